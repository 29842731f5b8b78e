"""What pydantic found wrong, as problems with what, where and fix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from finetune.config.base_config import BaseConfig
from finetune.config.fields import CurriculumConfig, StageConfig, Strict, ordered_fields
from finetune.config.flags import Flag, flags_of
from finetune.config.names import OTHERWISE, UnknownName, flag, nearest, normal
from finetune.config.precedence import SourcedValue
from finetune.config.sources import DataSource
from finetune.errors import ConfigError

NESTED = {
    "curriculum": (*CurriculumConfig.model_fields, *StageConfig.model_fields),
    "data": tuple(DataSource.model_fields),
    "valid_data": tuple(DataSource.model_fields),
}


class MissingSetting(UnknownName):
    """A required setting that nobody gave; `guess` is its name."""


def problems_of(
    error: ValidationError, values: Mapping[str, SourcedValue], model_class: type[Strict]
) -> list[ConfigError]:
    """The problems behind a validation error, one per field where pydantic tried several types.

    Args:
        values: every field that somebody gave, for the location.
    """
    flags, order = flags_of(model_class), ordered_fields(model_class)
    found: dict[tuple[Any, ...], list[ConfigError]] = {}
    entries = error.errors()
    for entry in sorted(
        map(_untagged, entries),
        key=lambda entry: order.index(str(entry["loc"][0])) if entry["loc"] else len(order),
    ):
        name = str(entry["loc"][0]) if entry["loc"] else ""
        is_nested = name == "curriculum" or (name in NESTED and len(entry["loc"]) > 2)
        if entry["type"] == "default_factory_not_called" or _follows_from_another(entry, entries):
            continue
        if entry["type"] == "rule_broken":
            where = values[name].where if name in values else _origins(values)
            stem = f"{name}: " if name else ""
            problems = [
                ConfigError(stem + what, where, fix) for what, fix in entry["ctx"]["problems"]
            ]
        elif is_nested and len(entry["loc"]) > 1:
            problems = [_nested(entry, values[name].where)]
        elif entry["type"] == "missing":
            problems = [_missing(flags[name], model_class)]
        else:
            null = issubclass(model_class, BaseConfig)
            problems = [_wrong(flags[name], values[name], null=null)]
        found.setdefault(entry["loc"] if is_nested else (name,), problems)
    return [problem for problems in found.values() for problem in problems]


def _untagged(entry: ErrorDetails) -> ErrorDetails:
    """An error in an entry of data without pydantic's word for the kind of entry: data, 0, path."""
    head, tag, rest = entry["loc"][:2], entry["loc"][2:3], entry["loc"][3:]
    return {**entry, "loc": (*head, *rest)} if tag in (("path",), ("source",)) else entry


def _follows_from_another(entry: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a list is only too short because what is in it was refused."""
    depth = len(entry["loc"])
    return entry["type"] == "too_short" and any(
        len(other["loc"]) > depth and other["loc"][:depth] == entry["loc"] for other in entries
    )


def _origins(values: Mapping[str, SourcedValue]) -> str:
    given = dict.fromkeys(sourced.origin for sourced in values.values() if sourced.precedence)
    return ", ".join(given) or "the defaults"


def _missing(wanted: Flag, model_class: type[Strict]) -> MissingSetting:
    if issubclass(model_class, BaseConfig):
        where = "no file and no flag sets it"
        fix = f"give {flag(wanted.name)} {wanted.metavar}, or {wanted.name} in a --config file"
    else:
        stands_alone = wanted.name in getattr(model_class, "positional", ())
        where = "the command line"
        fix = (
            f"give {wanted.metavar}"
            if stands_alone
            else f"give {flag(wanted.name)} {wanted.metavar}"
        )
    return MissingSetting(f"{wanted.name} is not set, and has no default", where, fix, wanted.name)


def _wrong(wanted: Flag, given: SourcedValue, *, null: bool) -> ConfigError:
    """Args: null: whether `null` can be given, as in a run file; a command's option is left out
    instead.
    """
    what = f"{wanted.name} is {given.value!r}"
    typed = normal(given.value) if isinstance(given.value, str) else ""
    if wanted.choices and typed in OTHERWISE:
        what += f": {OTHERWISE[typed][0]}"
    guess = nearest(typed, wanted.choices) if typed else None
    unit = f" ({wanted.unit})" if wanted.unit.isalpha() else ""
    fix = f"did you mean {guess}? " if guess else ""
    expected = wanted.expected if null else wanted.expected.removesuffix(" or null")
    return ConfigError(what, given.where, f"{fix}give {expected}{unit}")


def _nested(entry: Mapping[str, Any], where: str) -> ConfigError:
    path = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in entry["loc"]
    ).lstrip(".")
    if entry["type"] == "extra_forbidden":
        guess = nearest(str(entry["loc"][-1]), NESTED[entry["loc"][0]])
        return ConfigError(
            f"unknown setting {path}", where, f"did you mean {guess!r}?" if guess else "remove it"
        )
    if entry["type"] == "missing":
        return ConfigError(f"{path} is not set", where, "give it")
    rule = entry["msg"].removeprefix("Input should be ")
    if entry["type"] == "too_short":
        rule = "a list that is not empty"
    elif not rule.startswith(("a ", "an ", "'")):
        rule = f"a value {rule}"
    return ConfigError(f"{path} is {entry['input']!r}", where, f"give {rule}")


def new_problems(
    found: list[ConfigError], known: list[ConfigError], *, unread: bool = False
) -> list[ConfigError]:
    """Problems of the schema that are not consequences of those already known.

    A field is not called missing where its name was misspelt, or where a file that may set it could
    not be read (`unread`).
    """
    reported = {problem.what for problem in known}
    guessed = {problem.guess for problem in known if isinstance(problem, UnknownName)}
    return [
        problem
        for problem in found
        if problem.what not in reported
        and not (isinstance(problem, UnknownName) and (unread or problem.guess in guessed))
    ]
