"""Flags, made from the schema of a configuration: parsing, help, and the table that freezes them.

A flag is a field's name with dashes or underscores. `--flag value` and `--flag=value` are the same; a boolean stands
alone or takes true or false; a flag that takes several words takes them up to the next flag; of a repeated flag the
last wins, but `--config` collects. Everything wrong on the command line is reported together.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from finetune.config.fields import GROUPS, Strict, ordered_fields
from finetune.config.names import normal, unknown_name
from finetune.config.rules import flag
from finetune.config.run_config import BaseConfig
from finetune.errors import ConfigError

IS_FLAG = re.compile(r"--?[A-Za-z]")
COMMAND_LINE = "the command line"
ONLY_IN_FILES = frozenset({"curriculum", "deepspeed"})

# Flags that are no fields: name -> (unit, description).
EXTRA = {
    "config": ("FILE...", "DeepSpeed JSON with a finetune block, or YAML, JSON or .py run file; later ones win."),
    "deepspeed": ("FILE", "DeepSpeed JSON; counts above the files of --config; none turns DeepSpeed off."),
    "print_config": ("", "Print every value and where it is from, and stop."),
    "help": ("", "Print this and stop."),
    "local_rank": ("N", "Accepted because launchers pass it, and ignored."),
}
HELP = {"help": EXTRA["help"]}


@dataclass(frozen=True)
class Flag:
    """What a field accepts, read from its JSON Schema.

    Args:
        name: the field.
        kinds: JSON types, e.g. {"integer", "null"}.
        choices: the only values, empty where there are others.
    """

    name: str
    kinds: frozenset[str]
    choices: tuple[str, ...]
    expected: str
    default: str
    unit: str
    group: str
    description: str

    @property
    def metavar(self) -> str:
        """What stands for the value in the help."""
        if self.unit:
            return self.unit if "|" in self.unit else self.unit.upper()
        if self.choices:
            return "|".join(self.choices)
        if self.kinds <= {"boolean", "null"}:
            return "[true|false]"
        return "NAME..." if "array" in self.kinds else "NUMBER" if self.kinds & {"integer", "number"} else "TEXT"


def _branches(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return schema.get("anyOf", [schema])


def _bounds(schema: Mapping[str, Any]) -> str:
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    return " and ".join(f"{word} {schema[key]}" for key, word in words.items() if key in schema)


def expected(schema: Mapping[str, Any]) -> str:
    """What a JSON Schema asks for, in words."""
    said = []
    for branch in _branches(schema):
        if "const" in branch:
            said.append(str(branch["const"]))
        elif "enum" in branch:
            said.append(", ".join(map(str, branch["enum"])))
        elif branch.get("type") == "array":
            said.append("a list of names" if branch["items"].get("type") == "string" else "a list")
        elif branch.get("type") in ("integer", "number"):
            kind = "a whole number" if branch["type"] == "integer" else "a number"
            said.append(f"{kind} {_bounds(branch)}".strip())
        else:
            kinds = {"boolean": "true or false", "null": "null", "string": "a text that is not empty"}
            said.append(kinds.get(branch.get("type", ""), "a block of names and values"))
    return " or ".join(said)


def flags_of(model_class: type[Strict]) -> dict[str, Flag]:
    """The flag of every field, in the order of the help."""
    properties = model_class.model_json_schema()["properties"]
    return {name: _flag(name, properties[name]) for name in ordered_fields(model_class)}


def _flag(name: str, schema: Mapping[str, Any]) -> Flag:
    branches = _branches(schema)
    kinds = {branch.get("type", "string" if "const" in branch or "enum" in branch else "object") for branch in branches}
    closed = [branch for branch in branches if "const" in branch or "enum" in branch]
    choices = [str(choice) for branch in closed for choice in branch.get("enum", [branch.get("const")])]
    free = any(branch.get("type") == "string" and branch not in closed for branch in branches)
    return Flag(
        name,
        frozenset(kinds),
        () if free or "object" in kinds else tuple(dict.fromkeys(choices)),
        expected(schema),
        schema.get("shown_default") or _shown(schema.get("default")),
        schema.get("unit", ""),
        schema["group"],
        schema["description"],
    )


def _shown(value: Any) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


@dataclass
class Parsed:
    """A command line, taken apart.

    Args:
        values: field -> (value, flag as typed).
        config_files: the files of every `--config`, in order.
        deepspeed: the file of `--deepspeed`, None where it was not given.
        rest: words that belong to another command line.
    """

    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    config_files: list[str] = field(default_factory=list)
    deepspeed: str | None = None
    print_config: bool = False
    help: bool = False
    rest: list[str] = field(default_factory=list)
    problems: list[ConfigError] = field(default_factory=list)


def parse(
    arguments: Sequence[str],
    flags: Mapping[str, Flag],
    aliases: Mapping[str, str] | None = None,
    *,
    extra: Mapping[str, tuple[str, str]] = EXTRA,
    positional: Sequence[str] = (),
    keep_rest: bool = False,
) -> Parsed:
    """Take a command line apart. Raises nothing: problems are collected in the result.

    Args:
        aliases: other spelling -> field.
        extra: flags that are no fields, of `EXTRA`.
        positional: fields that stand without a flag, in order; the last may take several words. Lists that a repeated
            flag gives are joined where `extra` is not that of a run.
        keep_rest: unknown flags, and the words after them, are another command line's: kept in `rest`.
    """
    parsed, waiting = Parsed(), list(positional)
    position = 0
    while position < len(arguments):
        word = arguments[position]
        position += 1
        if not IS_FLAG.match(word):
            if waiting:
                name = waiting[0] if "array" in flags[waiting[0]].kinds else waiting.pop(0)
                _take(parsed, name, flags[name].metavar, [word], flags, join=True)
                continue
            if keep_rest:
                parsed.rest.append(word)
                continue
            fix = "flags begin with --; put a value with spaces in quotes, and write several files after one flag"
            parsed.problems.append(ConfigError(f"{word!r} belongs to no flag", COMMAND_LINE, fix))
            continue
        typed, equals, attached = word.partition("=")
        name = "help" if typed == "-h" else normal(typed) if typed.startswith("--") else typed
        name = (aliases or {}).get(name, name)
        if name not in extra and (name not in flags or name in ONLY_IN_FILES or name in positional):
            count = 0 if equals else _words_that_follow(arguments, position, len(arguments))
            if keep_rest:
                parsed.rest += arguments[position - 1 : position + count]
            else:
                parsed.problems.append(_unknown(typed, name, flags, extra))
            position += count
            continue
        taken = 0 if equals else _words_that_follow(arguments, position, _most_words(name, flags, arguments, position))
        words = [attached] if equals else list(arguments[position : position + taken])
        position += taken
        _take(parsed, name, typed, words, flags, join=extra is not EXTRA)
    return parsed


def _unknown(typed: str, name: str, flags: Mapping[str, Flag], extra: Mapping[str, Any]) -> ConfigError:
    if name in ONLY_IN_FILES:
        fix = f"put {name} into a YAML file and give it as --config FILE"
        return ConfigError(f"{typed} cannot be given on the command line", COMMAND_LINE, fix)
    known = [known for known in [*flags, *extra] if known not in ONLY_IN_FILES or known in extra]
    return unknown_name(typed, COMMAND_LINE, known, flags=True)


def _words_that_follow(arguments: Sequence[str], position: int, most: int) -> int:
    count = 0
    while count < most and position + count < len(arguments) and not IS_FLAG.match(arguments[position + count]):
        count += 1
    return count


def _most_words(name: str, flags: Mapping[str, Flag], arguments: Sequence[str], position: int) -> int:
    """How many words after a flag may be its value."""
    if name in ("help", "print_config") or (name in flags and flags[name].kinds <= {"boolean", "null"}):
        is_truth = position < len(arguments) and arguments[position].lower() in ("true", "false")
        return 1 if is_truth else 0
    takes_many = name == "config" or (name in flags and "array" in flags[name].kinds)
    return len(arguments) if takes_many else 1


def _take(parsed: Parsed, name: str, typed: str, words: list[str], flags: Mapping[str, Flag], *, join: bool) -> None:
    """Give the words after a flag to what it sets; joined to those of the same flag before it, if it takes many."""
    if name in ("help", "print_config") or (name in flags and flags[name].kinds <= {"boolean", "null"}):
        truth = words[0].lower() if words else "true"
        if truth not in ("true", "false"):
            parsed.problems.append(ConfigError(f"{typed} is {words[0]!r}", COMMAND_LINE, "write true or false"))
        elif name in flags:
            parsed.values[name] = (truth == "true", typed)
        else:
            setattr(parsed, name, truth == "true")
        return
    if not words:
        wanted = flags[name].expected if name in flags else EXTRA[name][0]
        parsed.problems.append(ConfigError(f"{typed} has no value", COMMAND_LINE, f"write {typed} and then {wanted}"))
    elif name == "config":
        parsed.config_files += words
    elif name == "deepspeed":
        parsed.deepspeed = words[0]
    elif name == "local_rank":
        if not re.fullmatch(r"-?\d+", words[0]):
            parsed.problems.append(ConfigError(f"{typed} is {words[0]!r}", COMMAND_LINE, "leave it to the launcher"))
    else:
        if join and "array" in flags[name].kinds:
            words = [*parsed.values.get(name, ([], ""))[0], *words]
        value = words if len(words) > 1 or (join and "array" in flags[name].kinds) else _value(words[0], flags[name])
        parsed.values[name] = (value, typed)


def _value(word: str, found: Flag) -> Any:
    """A word as the type that the field takes; a word that is none of them stays a text, which the model refuses."""
    if "array" in found.kinds:
        return word
    if "null" in found.kinds and word.lower() in ("none", "null"):
        return None
    if "integer" in found.kinds and re.fullmatch(r"[+-]?\d{1,18}", word):
        return int(word)
    if "number" in found.kinds and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", word):
        return float(word)
    return word


def help_text(model_class: type[BaseConfig]) -> str:
    """The help of a run: flags by group, with units and defaults."""
    flags = flags_of(model_class)
    lines = [
        f"usage: {model_class.command} [--config FILE...] [--flag value ...]",
        "",
        "Values come from the defaults, then the files of --config in order, then the flags; the later wins.",
        "Flags may be written with - or _, as --flag value or --flag=value. Of a repeated flag the last counts.",
        "A relative path is relative to the current folder, in files too.",
        "",
        "configuration",
    ]
    for name, (unit, description) in EXTRA.items():
        lines += _entry(f"{flag(name)} {unit}".strip(), description)
    lines += flag_lines(model_class, GROUPS)
    if "curriculum" in flags:
        lines += ["", "curriculum.levels and curriculum.stages (until, mix, ramp) are set in a file."]
    return "\n".join(lines) + "\n"


def flag_lines(model_class: type[Strict], groups: Iterable[str], positional: Sequence[str] = ()) -> list[str]:
    """The flags of each group, with units and defaults."""
    aliases: Mapping[str, str] = getattr(model_class, "aliases", {})
    required = {info.alias or name for name, info in model_class.model_fields.items() if info.is_required()}
    flags, lines = flags_of(model_class), []
    for group in groups:
        members = [found for found in flags.values() if found.group == group and found.name not in ONLY_IN_FILES]
        lines += ["", group] if members else []
        for found in members:
            default = "required" if found.name in required else f"default {found.default}"
            others = ", ".join(flag(other) for other, name in aliases.items() if name == found.name)
            also = f"; also {others}" if others else ""
            head = found.metavar if found.name in positional else f"{flag(found.name)} {found.metavar}"
            lines += _entry(head, f"{found.description} [{default}{also}]")
    return lines


def _entry(head: str, text: str, indent: int = 38) -> list[str]:
    wrapped = textwrap.wrap(text, 118 - indent)
    if len(head) + 4 > indent:
        return [f"  {head}", *(" " * indent + line for line in wrapped)]
    return [f"  {head:<{indent - 2}}{wrapped[0]}", *(" " * indent + line for line in wrapped[1:])]


def flag_table(model_class: type[BaseConfig]) -> str:
    """One line per flag: name, types, default. A test compares it with the committed list of flags."""
    required = {info.alias or name for name, info in model_class.model_fields.items() if info.is_required()}
    rows: Iterable[tuple[str, str, str]] = [
        *((flag(name), unit or "alone", "-") for name, (unit, _) in EXTRA.items()),
        *(
            (flag(found.name), found.expected, "required" if found.name in required else found.default)
            for found in flags_of(model_class).values()
            if found.name not in ONLY_IN_FILES
        ),
        *((flag(other), f"the same as {flag(name)}", "-") for other, name in model_class.aliases.items()),
    ]
    return "".join(f"{name}  {kind}  [{default}]\n" for name, kind, default in sorted(rows))
