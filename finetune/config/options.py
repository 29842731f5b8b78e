"""Command lines, made from the schema of settings: parsing, help, and readable messages for what
pydantic found wrong with options or with the settings of a run.

A flag is a field's name with dashes or underscores. `--flag value` and `--flag=value` are the same.
A boolean stands alone or takes true or false. A flag that takes several values takes them up to the
next flag. The last of a repeated flag wins, but `--config` and the lists of a command collect. All
errors on the command line are reported together. A command declares a subclass of `Options` and
calls `read_options`.
"""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby, islice, takewhile
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from finetune.config.base_config import BaseConfig
from finetune.config.fields import (
    NUMBER,
    OTHERWISE,
    CurriculumConfig,
    DataSource,
    Precedence,
    Resolution,
    Settings,
    SourcedValue,
    StageConfig,
    UnknownName,
    flag,
    nearest,
    normal,
    ordered_fields,
    setting,
    unknown_name,
)
from finetune.errors import ConfigError, raise_problems
from finetune.runtime.language import pick_language, speak

# A word that begins with a dash and has spaces is a value.
IS_FLAG = re.compile(r"--?[A-Za-z][^\s=]*(?:=|$)")
COMMAND_LINE = "the command line"
ONLY_IN_FILES = frozenset({"curriculum", "deepspeed"})
MAX_WIDTH = 118
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_INDENT = 38
_SOURCES = """\
Values come from the defaults, then the files of --config in order, then the flags; the later wins.
Flags may be written with - or _, as --flag value or --flag=value. Of a repeated flag the last counts.
A relative path is relative to the current folder, in files too."""


@dataclass(frozen=True)
class Flag:
    """What a field accepts, read from its JSON Schema.

    Args:
        name: the field, or the attribute of `Parsed` for a flag that is not a field.
        kinds: JSON types, e.g. {"integer", "null"}.
        choices: the only values; empty if other values are possible.
        expected: description of what it accepts.
        group: heading in the help; empty for a flag that is not a field.
    """

    name: str
    kinds: frozenset[str]
    choices: tuple[str, ...]
    expected: str
    default: str
    unit: str
    group: str
    description: str
    is_required: bool = False

    @property
    def is_switch(self) -> bool:
        """Whether the flag may stand without a value."""
        return "boolean" in self.kinds and (self.kinds <= {"boolean", "null"} or bool(self.choices))

    @property
    def switch_words(self) -> tuple[str, ...]:
        """The words that may follow a switch."""
        return ("true", "false", *self.choices)

    @property
    def is_list(self) -> bool:
        return "array" in self.kinds

    @property
    def metavar(self) -> str:
        if self.unit:
            return self.unit if "|" in self.unit else self.unit.upper()
        if self.is_switch:
            return f"[{'|'.join(self.switch_words)}]"
        if self.choices:
            return "|".join(self.choices)
        if self.is_list:
            return "NAME..."
        return "NUMBER" if self.kinds & {"integer", "number"} else "TEXT"


def _extra(name: str, kind: str, unit: str, description: str) -> Flag:
    return Flag(name, frozenset({kind}), (), unit, "", unit, "", description)


# Flags that are no fields.
HELP = {"help": _extra("help", "boolean", "", "Print this and stop.")}
EXTRA = {
    "config": _extra(
        "config_files",
        "array",
        "FILE...",
        "DeepSpeed JSON with a finetune block, or YAML, JSON or .py run file; later ones win.",
    ),
    "deepspeed": _extra(
        "deepspeed",
        "string",
        "FILE",
        "DeepSpeed JSON; counts above the files of --config; none turns DeepSpeed off.",
    ),
    "print_config": _extra(
        "print_config", "boolean", "", "Print every value and where it is from, and stop."
    ),
    **HELP,
    "local_rank": _extra(
        "local_rank", "integer", "N", "Accepted because launchers pass it, and ignored."
    ),
}


@cache
def flags_of(model_class: type[Settings]) -> Mapping[str, Flag]:
    """Return the flag of every field, in the order of the help."""
    schema = model_class.model_json_schema()
    required = schema.get("required", ())
    return {
        name: _flag(name, schema["properties"][name], is_required=name in required)
        for name in ordered_fields(model_class)
    }


def typed_flags(model_class: type[Settings]) -> dict[str, Flag]:
    """Return every flag that may be typed, including those that are no fields."""
    apart = {*model_class.positional, *ONLY_IN_FILES}
    flags = {name: found for name, found in flags_of(model_class).items() if name not in apart}
    return flags | (EXTRA if issubclass(model_class, BaseConfig) else HELP)


def _flag(name: str, schema: Mapping[str, Any], *, is_required: bool) -> Flag:
    branches: list[Mapping[str, Any]] = schema.get("anyOf", [schema])
    kinds: set[str] = set()
    choices: list[str] = []
    is_open = False
    for branch in branches:
        values = branch.get("enum", [branch["const"]] if "const" in branch else [])
        kind = branch.get("type", "string" if values else "object")
        kinds.add(kind)
        choices += map(str, values)
        is_open = is_open or kind == "object" or (kind == "string" and not values)
    return Flag(
        name,
        frozenset(kinds),
        () if is_open else tuple(dict.fromkeys(choices)),
        " or ".join(map(_expected, branches)),
        schema.get("shown_default") or shown(schema.get("default")),
        schema.get("unit", ""),
        schema["group"],
        schema["description"],
        is_required,
    )


def _expected(branch: Mapping[str, Any]) -> str:
    """Describe what a JSON Schema without alternatives accepts."""
    if "const" in branch:
        return str(branch["const"])
    if "enum" in branch:
        return ", ".join(map(str, branch["enum"]))
    kind = branch.get("type", "")
    if kind == "array":
        return "a list of names" if branch["items"].get("type") == "string" else "a list"
    if kind in ("integer", "number"):
        bounds = {
            "minimum": "at least",
            "exclusiveMinimum": "above",
            "maximum": "at most",
            "exclusiveMaximum": "below",
        }
        number = "a whole number" if kind == "integer" else "a number"
        given = (f"{word} {branch[key]}" for key, word in bounds.items() if key in branch)
        return f"{number} {' and '.join(given)}".strip()
    words = {
        "boolean": "true or false",
        "null": "null",
        "string": "a text that is not empty",
    }
    return words.get(kind, "a block of names and values")


def shown(value: Any) -> str:
    """Return a value as the help and `--print-config` write it."""
    if isinstance(value, list):
        return " ".join(map(shown, value)) or "none"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


@dataclass
class Parsed:
    """A command line, taken apart.

    Args:
        values: field -> value, with the flag as typed for its location.
        rest: arguments that belong to another command line.
    """

    values: dict[str, SourcedValue] = field(default_factory=dict)
    config_files: list[str] = field(default_factory=list)
    deepspeed: str | None = None
    print_config: bool = False
    help: bool = False
    local_rank: int | None = None
    rest: list[str] = field(default_factory=list)
    problems: list[ConfigError] = field(default_factory=list)

    def refuse(self, what: str, fix: str) -> None:
        self.problems.append(ConfigError(what, COMMAND_LINE, fix))


def parse(
    arguments: Sequence[str], model_class: type[Settings], *, keep_rest: bool = False
) -> Parsed:
    """Take a command line apart. Raise nothing: problems are collected in the result.

    Args:
        keep_rest: unknown flags, and the arguments after them, belong to another command line: keep
            them in `rest`.
    """
    parsed, words = Parsed(), list(arguments)
    is_run = issubclass(model_class, BaseConfig)
    flags = typed_flags(model_class)
    waiting = [flags_of(model_class)[name] for name in model_class.positional]

    def take(found: Flag, typed: str, values: list[str]) -> None:
        """Give what follows a flag to what it sets."""
        name = found.name
        value: Any
        if found.is_switch:
            word, allowed = values[0].lower() if values else "true", found.switch_words
            if word not in allowed:
                fix = f"write {', '.join(allowed[:-1])} or {allowed[-1]}"
                return parsed.refuse(f"{typed} is {values[0]!r}", fix)
            value = {"true": True, "false": False}.get(word, word)
        elif not values:
            return parsed.refuse(
                f"{typed} has no value", f"write {typed} and then {found.expected}"
            )
        elif name == "local_rank" and not re.fullmatch(r"-?\d+", values[0]):
            return parsed.refuse(f"{typed} is {values[0]!r}", "leave it to the launcher")
        elif name == "config_files" and not found.group:
            value = [*parsed.config_files, *values]
        elif found.is_list and not is_run:
            value = [*(parsed.values[name].value if name in parsed.values else ()), *values]
        else:
            value = values if len(values) > 1 else _value(values[0], found, nulls=is_run)
        if found.group:
            parsed.values[name] = SourcedValue(value, Precedence.FLAG, flag(name), typed)
        else:
            setattr(parsed, name, value)

    def stand_alone(word: str) -> None:
        if waiting:
            found = waiting[0] if waiting[0].is_list else waiting.pop(0)
            take(found, found.metavar, [word])
        elif keep_rest:
            parsed.rest.append(word)
        else:
            fix = (
                "flags begin with -- (--config FILE, --data FILE ...); put a value with spaces in"
                " quotes"
            )
            parsed.refuse(f"{word!r} belongs to no flag", fix)

    while words:
        word = words.pop(0)
        if word == "--" and waiting:  # the others are values, even if they look like flags
            while words:
                stand_alone(words.pop(0))
        elif not IS_FLAG.match(word):
            stand_alone(word)
        else:
            typed, equals, attached = word.partition("=")
            name = "help" if typed == "-h" else normal(typed) if typed.startswith("--") else typed
            name = model_class.aliases.get(name, name)
            found = flags.get(name)
            most = len(words) if found is None or found.is_list else 1
            if found is not None and found.is_switch:
                most = int(bool(words) and words[0].lower() in found.switch_words)
            values = list(islice(takewhile(lambda word: not IS_FLAG.match(word), words), most))
            if equals:
                values = []
            del words[: len(values)]
            if found is not None:
                take(found, typed, [attached] if equals else values)
            elif keep_rest:
                parsed.rest += [word, *values]
            elif name in ONLY_IN_FILES:
                fix = f"put {name} into a YAML file and give it as --config FILE"
                parsed.refuse(f"{typed} cannot be given on the command line", fix)
            else:
                parsed.problems.append(unknown_name(typed, COMMAND_LINE, flags, flags=True))
    return parsed


def _value(argument: str, found: Flag, *, nulls: bool) -> Any:
    """Return an argument as the type that the field takes; an argument of another type stays a
    string, which the schema rejects.

    Args:
        nulls: `none` and `null` are no value, as in the settings of a run; else they are strings
            like any other.
    """
    if found.is_list:
        return argument
    if nulls and "null" in found.kinds and argument.lower() in ("none", "null"):
        return None
    if "integer" in found.kinds and re.fullmatch(r"[+-]?\d{1,19}", argument):
        return int(argument)
    if "number" in found.kinds and NUMBER.fullmatch(argument):
        return float(argument)
    return argument


def help_width() -> int:
    """Return the columns of a line of help: the terminal's, 118 if it is wider or there is none."""
    return max(60, min(MAX_WIDTH, shutil.get_terminal_size((MAX_WIDTH + 1, 24)).columns - 1))


def fitted(text: str) -> list[str]:
    """Return the lines of a text as they are if all fit; else fill its paragraphs, and wrap
    indented lines by themselves.
    """
    lines, width = text.splitlines(), help_width()
    if all(len(line) <= width for line in lines):
        return lines
    result = []
    for indented, group in groupby(lines, lambda line: not line or line.startswith(" ")):
        for part in group if indented else [" ".join(group)]:
            usage = part.startswith("usage:")
            spaces = " " * (11 if usage else len(part) - len(part.lstrip()) + 4 * indented)
            result += textwrap.wrap(
                part,
                width,
                subsequent_indent=spaces,
                break_long_words=False,
                break_on_hyphens=False,
            ) or [""]
    return result


def help_text(model_class: type[BaseConfig]) -> str:
    """Return the help of a run."""
    usage = f"usage: {model_class.command} [--config FILE...] [--flag value ...]"
    lines = [usage, "", *fitted(_SOURCES), "", "configuration"]
    for name, found in EXTRA.items():
        lines += _entry(f"{flag(name)} {found.unit}".strip(), found.description)
    lines += flag_lines(model_class)
    if "curriculum" in model_class.model_fields:
        text = "curriculum.levels and curriculum.stages (until, mix, ramp) are set in a file."
        lines += ["", *fitted(text)]
    return "\n".join(lines) + "\n"


def flag_lines(model_class: type[Settings]) -> list[str]:
    """Return the flags of each group, with units and defaults; for a switch of a command that is
    off by default only the flag and its description.
    """
    short_switches = not issubclass(model_class, BaseConfig)
    lines: list[str] = []
    previous = ""
    for found in flags_of(model_class).values():
        if found.name in ONLY_IN_FILES:
            continue
        if found.group != previous:
            lines += ["", found.group]
            previous = found.group
        default = "required" if found.is_required else f"default {found.default}"
        aliases = model_class.aliases.items()
        others = ", ".join(flag(other) for other, name in aliases if name == found.name)
        also = f"; also {others}" if others else ""
        head = f"{flag(found.name)} {found.metavar}"
        if found.name in model_class.positional:
            head = found.metavar
        if short_switches and found.kinds == {"boolean"} and found.default == "false":
            head, default, also = flag(found.name), "", also.removeprefix("; ")
        notes = f" [{default}{also}]" if default or also else ""
        lines += _entry(head, found.description + notes)
    return lines


def _entry(head: str, text: str) -> list[str]:
    wrapped = textwrap.wrap(text, help_width() - _INDENT, break_on_hyphens=False)
    lines = [" " * _INDENT + line for line in wrapped]
    if len(head) + 4 > _INDENT:
        return [f"  {head}", *lines]
    return [f"  {head:<{_INDENT - 2}}{wrapped[0]}", *lines[1:]]


AnySettings = TypeVar("AnySettings", bound=Settings)
AnyOptions = TypeVar("AnyOptions", bound="Options")
NESTED = {
    "curriculum": (*CurriculumConfig.model_fields, *StageConfig.model_fields),
    "data": tuple(DataSource.model_fields),
    "valid_data": tuple(DataSource.model_fields),
}


def validated(model_class: type[AnySettings], resolution: Resolution) -> AnySettings:
    """Return the settings that were given or derived, checked by their schema.

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
        found = _problems_of(error, resolution)
        problems = problems + [problem for problem in found if problem.what not in reported]
    raise_problems(problems)
    assert settings is not None, "settings that were not made without a problem that says why"
    return settings


def _problems_of(error: ValidationError, resolution: Resolution) -> list[ConfigError]:
    """Return the problems behind a validation error, one per field if pydantic tried several types.

    A field is not reported as missing if its name was misspelt, or if a file that may set it could
    not be read.
    """
    model_class, values = resolution.model_class, resolution.values
    flags, order = flags_of(model_class), ordered_fields(model_class)
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
    if isinstance(given.value, str) and _SURROGATE.search(given.value):
        return ConfigError(f"{what}: not UTF-8", given.where, "set PYTHONUTF8=1")
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
