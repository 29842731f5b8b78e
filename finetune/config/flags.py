"""Flags, made from the schema of a configuration, and how a command line is read.

A flag is a field's name with dashes or underscores. `--flag value` and `--flag=value` are the same;
a boolean stands alone or takes true or false; a flag that takes several values takes them up to the
next flag; of a repeated flag the last wins, but `--config` collects. Everything wrong on the
command line is reported together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from finetune.config.fields import Strict, ordered_fields
from finetune.config.names import flag, normal, unknown_name
from finetune.config.precedence import Precedence, SourcedValue
from finetune.errors import ConfigError

# A text that begins with a dash and has spaces is a value.
IS_FLAG = re.compile(r"--?[A-Za-z][^\s=]*(?:=|$)")
COMMAND_LINE = "the command line"
ONLY_IN_FILES = frozenset({"curriculum", "deepspeed"})

# Flags that are no fields: name -> (unit, description).
EXTRA = {
    "config": (
        "FILE...",
        "DeepSpeed JSON with a finetune block, or YAML, JSON or .py run file; later ones win.",
    ),
    "deepspeed": (
        "FILE",
        "DeepSpeed JSON; counts above the files of --config; none turns DeepSpeed off.",
    ),
    "print_config": ("", "Print every value and where it is from, and stop."),
    "help": ("", "Print this and stop."),
    "local_rank": ("N", "Accepted because launchers pass it, and ignored."),
}
HELP = {"help": EXTRA["help"]}


@dataclass(frozen=True)
class Flag:
    """What a field accepts, read from its JSON Schema.

    Args:
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
    def is_switch(self) -> bool:
        """Whether it may stand without a value."""
        return "boolean" in self.kinds and (self.kinds <= {"boolean", "null"} or bool(self.choices))

    @property
    def switch_words(self) -> tuple[str, ...]:
        """What may stand behind a switch."""
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
        return (
            "NAME..."
            if self.is_list
            else "NUMBER"
            if self.kinds & {"integer", "number"}
            else "TEXT"
        )


def _branches(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return schema.get("anyOf", [schema])


def _bounds(schema: Mapping[str, Any]) -> str:
    words = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
    }
    return " and ".join(f"{word} {schema[key]}" for key, word in words.items() if key in schema)


def expected(schema: Mapping[str, Any]) -> str:
    """What a JSON Schema asks for, in words."""
    parts = []
    for branch in _branches(schema):
        if "const" in branch:
            parts.append(str(branch["const"]))
        elif "enum" in branch:
            parts.append(", ".join(map(str, branch["enum"])))
        elif branch.get("type") == "array":
            parts.append("a list of names" if branch["items"].get("type") == "string" else "a list")
        elif branch.get("type") in ("integer", "number"):
            kind = "a whole number" if branch["type"] == "integer" else "a number"
            parts.append(f"{kind} {_bounds(branch)}".strip())
        else:
            kinds = {
                "boolean": "true or false",
                "null": "null",
                "string": "a text that is not empty",
            }
            parts.append(kinds.get(branch.get("type", ""), "a block of names and values"))
    return " or ".join(parts)


def flags_of(model_class: type[Strict]) -> dict[str, Flag]:
    """The flag of every field, in the order of the help."""
    properties = model_class.model_json_schema()["properties"]
    return {name: _flag(name, properties[name]) for name in ordered_fields(model_class)}


def _flag(name: str, schema: Mapping[str, Any]) -> Flag:
    branches = _branches(schema)
    kinds = {
        branch.get("type", "string" if "const" in branch or "enum" in branch else "object")
        for branch in branches
    }
    closed = [branch for branch in branches if "const" in branch or "enum" in branch]
    choices = [
        str(choice) for branch in closed for choice in branch.get("enum", [branch.get("const")])
    ]
    free = any(branch.get("type") == "string" and branch not in closed for branch in branches)
    return Flag(
        name,
        frozenset(kinds),
        () if free or "object" in kinds else tuple(dict.fromkeys(choices)),
        expected(schema),
        schema.get("shown_default") or shown(schema.get("default")),
        schema.get("unit", ""),
        schema["group"],
        schema["description"],
    )


def shown(value: Any) -> str:
    """A value as the help and `--print-config` write it."""
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
    rest: list[str] = field(default_factory=list)
    problems: list[ConfigError] = field(default_factory=list)

    def refuse(self, what: str, fix: str) -> None:
        self.problems.append(ConfigError(what, COMMAND_LINE, fix))


def parse(
    arguments: Sequence[str],
    flags: Mapping[str, Flag],
    aliases: Mapping[str, str] | None = None,
    *,
    extra: Mapping[str, tuple[str, str]] = EXTRA,
    positional: Sequence[str] = (),
    keep_rest: bool = False,
    join_lists: bool = False,
) -> Parsed:
    """Take a command line apart. Raises nothing: problems are collected in the result.

    Args:
        aliases: other spelling -> field.
        extra: flags that are no fields, of `EXTRA`.
        positional: fields that stand without a flag, in order; a list takes all that follow.
        keep_rest: unknown flags, and the arguments after them, are another command line's: kept in
            `rest`.
        join_lists: a repeated flag that takes a list adds to it; else its last list counts.
    """
    settable = {
        name: one
        for name, one in flags.items()
        if name not in ONLY_IN_FILES and name not in positional
    }
    waiting = [flags[name] for name in positional]
    reader = _Reader(
        list(arguments), settable, aliases or {}, extra, waiting, keep_rest, join_lists
    )
    while reader.arguments:
        reader.read_next()
    return reader.parsed


@dataclass
class _Reader:
    """The state of `parse`: the arguments still to be read, and the positional fields still to be
    filled.
    """

    arguments: list[str]
    flags: Mapping[str, Flag]
    aliases: Mapping[str, str]
    extra: Mapping[str, tuple[str, str]]
    waiting: list[Flag]
    keep_rest: bool
    join_lists: bool
    parsed: Parsed = field(default_factory=Parsed)

    def read_next(self) -> None:
        """A flag with its values, or an argument that stands alone."""
        argument = self.arguments.pop(0)
        if argument == "--" and self.waiting:  # what follows stands alone, whatever it begins with
            while self.arguments:
                self._alone(self.arguments.pop(0))
            return
        if not IS_FLAG.match(argument):
            self._alone(argument)
            return
        typed, equals, attached = argument.partition("=")
        name = "help" if typed == "-h" else normal(typed) if typed.startswith("--") else typed
        name = self.aliases.get(name, name)
        if name in self.extra or name in self.flags:
            self._take(name, typed, [attached] if equals else self._values(self._most_values(name)))
            return
        values = [] if equals else self._values(len(self.arguments))
        if self.keep_rest:
            self.parsed.rest += [argument, *values]
        elif name in ONLY_IN_FILES:
            fix = f"put {name} into a YAML file and give it as --config FILE"
            self.parsed.refuse(f"{typed} cannot be given on the command line", fix)
        else:
            self.parsed.problems.append(
                unknown_name(typed, COMMAND_LINE, [*self.flags, *self.extra], flags=True)
            )

    def _alone(self, argument: str) -> None:
        if self.waiting:
            found = self.waiting[0] if self.waiting[0].is_list else self.waiting.pop(0)
            before = (
                self.parsed.values[found.name].value if found.name in self.parsed.values else []
            )
            value = (
                [*before, argument]
                if found.is_list
                else _value(argument, found, nulls=not self.join_lists)
            )
            self.parsed.values[found.name] = _sourced(found.name, value, found.metavar)
        elif self.keep_rest:
            self.parsed.rest.append(argument)
        else:
            fix = (
                "flags begin with -- (--config FILE, --data FILE ...); put a value with spaces in"
                " quotes"
            )
            self.parsed.refuse(f"{argument!r} belongs to no flag", fix)

    def _values(self, most: int) -> list[str]:
        """Take the arguments up to the next flag, at most so many."""
        values: list[str] = []
        while self.arguments and len(values) < most and not IS_FLAG.match(self.arguments[0]):
            values.append(self.arguments.pop(0))
        return values

    def _is_switch(self, name: str) -> bool:
        return name in ("help", "print_config") or (
            name in self.flags and self.flags[name].is_switch
        )

    def _switch_words(self, name: str) -> tuple[str, ...]:
        return self.flags[name].switch_words if name in self.flags else ("true", "false")

    def _most_values(self, name: str) -> int:
        if self._is_switch(name):
            return int(
                bool(self.arguments) and self.arguments[0].lower() in self._switch_words(name)
            )
        takes_many = name == "config" or (name in self.flags and self.flags[name].is_list)
        return len(self.arguments) if takes_many else 1

    def _take(self, name: str, typed: str, values: list[str]) -> None:
        """Give what follows a flag to what it sets."""
        parsed = self.parsed
        if self._is_switch(name):
            word, words = values[0].lower() if values else "true", self._switch_words(name)
            if word not in words:
                parsed.refuse(
                    f"{typed} is {values[0]!r}", f"write {', '.join(words[:-1])} or {words[-1]}"
                )
            elif name in self.flags:
                parsed.values[name] = _sourced(
                    name, {"true": True, "false": False}.get(word, word), typed
                )
            else:
                setattr(parsed, name, word == "true")
        elif not values:
            wanted = self.flags[name].expected if name in self.flags else self.extra[name][0]
            parsed.refuse(f"{typed} has no value", f"write {typed} and then {wanted}")
        elif name == "config":
            parsed.config_files += values
        elif name == "deepspeed":
            parsed.deepspeed = values[0]
        elif name == "local_rank":
            if not re.fullmatch(r"-?\d+", values[0]):
                parsed.refuse(f"{typed} is {values[0]!r}", "leave it to the launcher")
        elif self.join_lists and self.flags[name].is_list:
            before = parsed.values[name].value if name in parsed.values else []
            parsed.values[name] = _sourced(name, [*before, *values], typed)
        else:
            value = (
                values
                if len(values) > 1
                else _value(values[0], self.flags[name], nulls=not self.join_lists)
            )
            parsed.values[name] = _sourced(name, value, typed)


def _sourced(name: str, value: Any, typed: str) -> SourcedValue:
    return SourcedValue(value, Precedence.FLAG, flag(name), typed)


def _value(argument: str, found: Flag, *, nulls: bool) -> Any:
    """An argument as the type that the field takes; one that is none of them stays a text, which
    the schema refuses.

    Args:
        nulls: `none` and `null` are no value, as in the settings of a run; else they are texts like
            any other.
    """
    if found.is_list:
        return argument
    if nulls and "null" in found.kinds and argument.lower() in ("none", "null"):
        return None
    if "integer" in found.kinds and re.fullmatch(r"[+-]?\d{1,19}", argument):
        return int(argument)
    if "number" in found.kinds and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", argument):
        return float(argument)
    return argument
