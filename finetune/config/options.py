"""The options of commands, and what pydantic found wrong with options or a run's settings, in
words.

A command declares a subclass of `Options` and calls `read_options`. Of a repeated flag the last
wins; lists are joined.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from finetune.config.base_config import BaseConfig
from finetune.config.fields import (
    CurriculumConfig,
    DataSource,
    Settings,
    StageConfig,
    ordered_fields,
    setting,
)
from finetune.config.flags import Flag, fitted, flag_lines, flags_of, parse
from finetune.config.names import OTHERWISE, UnknownName, flag, nearest, normal
from finetune.config.rules import Precedence, Resolution, SourcedValue
from finetune.errors import ConfigError, raise_problems
from finetune.runtime.language import pick_language, speak

AnySettings = TypeVar("AnySettings", bound=Settings)
AnyOptions = TypeVar("AnyOptions", bound="Options")
NESTED = {
    "curriculum": (*CurriculumConfig.model_fields, *StageConfig.model_fields),
    "data": tuple(DataSource.model_fields),
    "valid_data": tuple(DataSource.model_fields),
}


def validated(model_class: type[AnySettings], resolution: Resolution) -> AnySettings:
    """Return the settings that somebody decided, checked by their schema.

    Raises:
        ConfigError: one thing is wrong; `Problems` for several, those of `resolution` first.
    """
    decided = {
        name: sourced.value
        for name, sourced in resolution.values.items()
        if sourced.precedence > Precedence.DEFAULT or name in resolution.derived
    }
    settings, problems = None, resolution.problems
    try:
        settings = model_class.model_validate(decided)
    except ValidationError as error:
        reported = {problem.what for problem in problems}
        found = _problems_of(error, resolution, model_class)
        problems = problems + [problem for problem in found if problem.what not in reported]
    raise_problems(problems)
    assert settings is not None, "settings that were not made without a problem that says why"
    return settings


def _problems_of(
    error: ValidationError, resolution: Resolution, model_class: type[Settings]
) -> list[ConfigError]:
    """Return the problems behind a validation error, one per field if pydantic tried several types.

    A field is not reported as missing if its name was misspelt, or if a file that may set it could
    not be read.
    """
    flags, order, values = flags_of(model_class), ordered_fields(model_class), resolution.values
    misspelt = {known.guess for known in resolution.problems if isinstance(known, UnknownName)}
    entries = error.errors()

    def position(entry: ErrorDetails) -> int:
        return order.index(str(entry["loc"][0])) if entry["loc"] else len(order)

    found: dict[tuple[Any, ...], list[ConfigError]] = {}
    for entry in sorted(map(_untagged, entries), key=position):
        location, kind = entry["loc"], entry["type"]
        name = str(location[0]) if location else ""
        is_nested = name == "curriculum" or (name in NESTED and len(location) > 2)
        if kind == "default_factory_not_called" or _follows_from_another(entry, entries):
            continue
        problems = []
        if kind == "rule_broken":
            origins = (given.origin for given in values.values() if given.precedence)
            everywhere = ", ".join(dict.fromkeys(origins)) or "the defaults"
            where = values[name].where if name in values else everywhere
            stem = f"{name}: " if name else ""
            for what, fix in entry["ctx"]["problems"]:
                problems.append(ConfigError(stem + what, where, fix))
        elif is_nested and len(location) > 1:
            problems.append(_nested(entry, values[name].where))
        elif kind != "missing":
            problems.append(_wrong(flags[name], values[name], model_class))
        elif not resolution.unread and name not in misspelt:
            problems.append(_missing(flags[name], model_class))
        found.setdefault(location if is_nested else (name,), problems)
    return [problem for problems in found.values() for problem in problems]


def _untagged(entry: ErrorDetails) -> ErrorDetails:
    """Remove pydantic's word for the type of an entry of data: (data, 0, "source", path)."""
    head, tag, rest = entry["loc"][:2], entry["loc"][2:3], entry["loc"][3:]
    return {**entry, "loc": (*head, *rest)} if tag in (("path",), ("source",)) else entry


def _follows_from_another(entry: ErrorDetails, entries: Sequence[ErrorDetails]) -> bool:
    """Return whether a list is only too short because what is in it was rejected."""
    location = entry["loc"]
    return entry["type"] == "too_short" and any(
        len(other["loc"]) > len(location) and other["loc"][: len(location)] == location
        for other in entries
    )


def _missing(wanted: Flag, model_class: type[Settings]) -> ConfigError:
    where, fix = "the command line", f"give {flag(wanted.name)} {wanted.metavar}"
    if issubclass(model_class, BaseConfig):
        where = "no file and no flag sets it"
        fix += f", or {wanted.name} in a --config file"
    elif wanted.name in model_class.positional:
        fix = f"give {wanted.metavar}"
    return ConfigError(f"{wanted.name} is not set, and has no default", where, fix)


def _wrong(wanted: Flag, given: SourcedValue, model_class: type[Settings]) -> ConfigError:
    what = f"{wanted.name} is {given.value!r}"
    typed = normal(given.value) if isinstance(given.value, str) else ""
    if wanted.choices and typed in OTHERWISE:
        what += f": {OTHERWISE[typed][0]}"
    guess = nearest(typed, wanted.choices) if typed else None
    unit = f" ({wanted.unit})" if wanted.unit.isalpha() else ""
    fix = f"did you mean {guess}? " if guess else ""
    expected = wanted.expected
    if not issubclass(model_class, BaseConfig):  # an option is left out, not set to null
        expected = expected.removesuffix(" or null")
    return ConfigError(what, given.where, f"{fix}give {expected}{unit}")


def _nested(entry: ErrorDetails, where: str) -> ConfigError:
    location, kind = entry["loc"], entry["type"]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    path = path.lstrip(".")
    if kind == "extra_forbidden":
        guess = nearest(str(location[-1]), NESTED[str(location[0])])
        fix = f"did you mean {guess!r}?" if guess else "remove it"
        return ConfigError(f"unknown setting {path}", where, fix)
    if kind == "missing":
        return ConfigError(f"{path} is not set", where, "give it")
    rule = entry["msg"].removeprefix("Input should be ")
    if kind == "too_short":
        rule = "a list that is not empty"
    elif not rule.startswith(("a ", "an ", "'")):
        rule = f"a value {rule}"
    return ConfigError(f"{path} is {entry['input']!r}", where, f"give {rule}")


class Options(Settings):
    """The options of a command; a subclass adds fields, each a `setting(...)`.

    Attributes:
        usage: the line after "usage: "; the first words are the command.
        epilog: the last lines of the help, e.g. the meaning of the exit code.
    """

    usage: ClassVar[str]
    summary: ClassVar[str]
    epilog: ClassVar[str] = ""
    groups: ClassVar[tuple[str, ...]] = ("options", "output")


class SpokenOptions(Options):
    """The options of a command that speaks English and Chinese, to people and to programs."""

    # `json` itself is a method of pydantic's models.
    as_json: bool = setting(
        False, alias="json", group="output", description="Write JSON instead of text."
    )
    lang: Literal["en", "zh"] | None = setting(
        None,
        group="output",
        unit="en|zh",
        shown_default="the locale's",
        description="Language of the output.",
    )


def read_options(options_class: type[AnyOptions], arguments: Sequence[str] | None) -> AnyOptions:
    """Return the options of a command line; print the help and exit for `--help`.

    Args:
        arguments: what follows the command; None: the arguments of this process.

    Raises:
        ConfigError: one thing is wrong; `Problems` for several.
        SystemExit: with 0, after the help.
    """
    return read_known_options(options_class, arguments, keep_rest=False)[0]


def read_known_options(
    options_class: type[AnyOptions], arguments: Sequence[str] | None, *, keep_rest: bool = True
) -> tuple[AnyOptions, list[str]]:
    """Return the options and, in their order, the other arguments, which belong to a run."""
    given = sys.argv[1:] if arguments is None else arguments
    parsed = parse(given, options_class, keep_rest=keep_rest)
    if parsed.help:
        sys.stdout.write(options_help(options_class))
        raise SystemExit(0)
    options = validated(
        options_class, Resolution(options_class, values=parsed.values, problems=parsed.problems)
    )
    if isinstance(options, SpokenOptions):
        speak(pick_language(options.lang))
    return options, parsed.rest


def asks_for_json(options_class: type[SpokenOptions], arguments: Sequence[str]) -> bool:
    """Return whether `--json` is set on a command line, even if the rest of it is wrong."""
    found = parse(arguments, options_class).values.get("json")
    return found is not None and found.value is True


def options_help(options_class: type[Options]) -> str:
    """Return the help of a command."""
    lines = [*fitted(f"usage: {options_class.usage}"), "", *fitted(options_class.summary)]
    lines += flag_lines(options_class)
    if options_class.epilog:
        lines += ["", *fitted(options_class.epilog)]
    return "\n".join(lines) + "\n"
