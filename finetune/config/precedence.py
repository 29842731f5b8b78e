"""Which source wins: every value carries where it is from and how much that counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from finetune.errors import ConfigError


class Precedence(IntEnum):
    """Of two sources the higher wins. The files of `--config` are `FILE`, `FILE + 1`, ... in the
    order given.
    """

    DEFAULT = 0
    FILE = 1
    DEEPSPEED = 1_000_000  # the file of --deepspeed
    FLAG = 1_000_001
    OVERRIDE = 1_000_002  # of a Python caller


@dataclass(frozen=True)
class SourcedValue:
    """A value and where it is from.

    Args:
        value: the value as read.
        precedence: that of its source, a `Precedence` or one of the files above `FILE`.
        origin: what `--print-config` says, e.g. `default`, `ds_configs/zero3.json`,
            `--learning-rate`.
        location: the exact location for an error message; the origin where empty.
    """

    value: Any
    precedence: int
    origin: str
    location: str = ""

    @property
    def where(self) -> str:
        """The exact location."""
        return self.location or self.origin


@dataclass
class Resolution:
    """What the sources gave, being made into one configuration.

    Args:
        values: the winning value of every field, defaults included where they depend on nothing
            else.
        world_size: number of processes.
        defaults: the defaults alone.
        derived: names that were computed here rather than decided by anyone.
    """

    values: dict[str, SourcedValue]
    world_size: int
    defaults: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[ConfigError] = field(default_factory=list)
    derived: set[str] = field(default_factory=set)

    def precedence(self, name: str) -> int:
        """That of the value that counts; None is no value and has the precedence of a default."""
        sourced = self.values.get(name)
        return (
            Precedence.DEFAULT if sourced is None or sourced.value is None else sourced.precedence
        )

    def value(self, name: str) -> Any:
        """The value that counts, None where there is none."""
        sourced = self.values.get(name)
        return None if sourced is None else sourced.value

    def derive(self, name: str, value: Any, origin: str) -> None:
        """Set a value that follows from others."""
        self.values[name] = SourcedValue(value, Precedence.DEFAULT, origin)
        self.derived.add(name)

    def instead_of(self, name: str, value: Any) -> str:
        """` instead of 8 (ds.json)` where `value` replaces another, else nothing. Ask before
        `derive`.
        """
        before = self.values.get(name)
        if before is None or before.value in (None, "auto", value):
            return ""
        return f" instead of {before.value} ({before.where})"

    def refuse(self, what: str, names: tuple[str, ...], fix: str) -> None:
        """Note a problem of several settings together."""
        where = ", ".join(dict.fromkeys(self.values[name].where for name in names))
        self.problems.append(ConfigError(what, where, fix))


# Derives what the user left open, or notes a problem. A value of the wrong type is left alone: the
# schema refuses it.
Rule = Callable[[Resolution], None]
