"""How the values of several sources become one configuration: which source wins, and rules between
settings that more than one type of run has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

from finetune.config.fields import Settings
from finetune.config.names import flag
from finetune.errors import ConfigError

ACCUMULATION = "gradient_accumulation_steps"


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
    """A value and its source.

    Args:
        value: the value as read.
        precedence: that of its source, a `Precedence` or one of the files above `FILE`.
        origin: what `--print-config` shows, e.g. `default`, `ds_configs/zero3.json`,
            `--learning-rate`.
        location: the exact location for an error message, if it is not the origin.
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
    """What the sources give, while one configuration is made of it.

    Args:
        model_class: the settings that are made.
        world_size: number of processes.
        values: the winning value of every field that has one.
        derived: names that were computed here rather than decided by anyone.
        unread: whether a file could not be read at all, so that nothing is known of what it sets.
    """

    model_class: type[Settings]
    world_size: int = 1
    values: dict[str, SourcedValue] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[ConfigError] = field(default_factory=list)
    derived: set[str] = field(default_factory=set)
    unread: bool = False

    def add_defaults(self) -> None:
        """Add the defaults that depend on nothing else."""
        for name, info in self.model_class.model_fields.items():
            if not info.is_required() and info.default_factory is None:
                self.values[name] = SourcedValue(info.default, Precedence.DEFAULT, "default")

    def default(self, name: str) -> Any:
        """Return the default of a setting."""
        return self.model_class.model_fields[name].default

    def value(self, name: str) -> Any:
        """Return the winning value, None if there is none."""
        return self.values[name].value if name in self.values else None

    def is_given(self, name: str) -> bool:
        """Return whether a source gives the setting a value other than None."""
        return self.precedence(name) > Precedence.DEFAULT

    def precedence(self, name: str) -> int:
        """Return the precedence of the winning value; None counts as a default."""
        return Precedence.DEFAULT if self.value(name) is None else self.values[name].precedence

    def derive(self, name: str, value: Any, origin: str) -> None:
        """Set a value that follows from others."""
        self.values[name] = SourcedValue(value, Precedence.DEFAULT, origin)
        self.derived.add(name)

    def instead_of(self, name: str, value: Any) -> str:
        """Return ` instead of 8 (ds.json)` if `value` replaces another, else nothing. Call it
        before `derive`.
        """
        before = self.values.get(name)
        if before is None or before.value in (None, "auto", value):
            return ""
        return f" instead of {before.value} ({before.where})"

    def refuse(self, what: str, names: Iterable[str], fix: str) -> None:
        """Note a problem of several settings together."""
        where = ", ".join(dict.fromkeys(self.values[name].where for name in names))
        self.problems.append(ConfigError(what, where, fix))


# Derives what the user left open, or notes a problem. A value of the wrong type is left alone: the
# schema rejects it.
Rule = Callable[[Resolution], None]


def processes(world_size: int) -> str:
    """Return `1 process` or `2 processes`."""
    return f"{world_size} process{'' if world_size == 1 else 'es'}"


def multiples_around(number: int, factor: int) -> str:
    """Return the nearest positive multiples of `factor`, as `28 or 32`."""
    below = number // factor * factor
    return f"{below} or {below + factor}" if below else str(factor)


def divisors_around(number: int, near: int) -> str:
    """Return the nearest divisors of `number` on both sides of `near`, as `3 or 5`."""
    below = next((d for d in range(min(near, number), 0, -1) if number % d == 0), None)
    above = next((d for d in range(near + 1, number + 1) if number % d == 0), None)
    return " or ".join(str(divisor) for divisor in (below, above) if divisor)


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number from 1."""
    return type(value) is int and value >= 1


def refuse_product(
    resolution: Resolution, whole: str, factors: tuple[str, ...], product: int
) -> None:
    """Note the problem of a batch that is given with all its factors and is not their product."""
    named = " x ".join(f"{name} {resolution.value(name)}" for name in factors)
    # Defaults that nobody touched are no place to look at, unless there is nothing else.
    names = (*factors, whole)
    resolution.refuse(
        f"{named} x {processes(resolution.world_size)} is {product}, not {whole}"
        f" {resolution.value(whole)}",
        list(filter(resolution.is_given, names)) or names,
        f"nearest that agrees: {whole} {product}; or leave {ACCUMULATION} out, it is derived",
    )


def warn_of_long_warmup(resolution: Resolution, total: str, share: str) -> None:
    """Warn about a warm-up that fills the run; it is allowed.

    Args:
        total: the setting with the number of steps.
        share: a usual warm-up as a share of them, e.g. "0.03 for 3%".
    """
    warmup, steps = resolution.value("warmup_steps"), resolution.value(total)
    if is_count(warmup) and is_count(steps) and warmup >= steps:
        resolution.notes.append(
            f"warning: warmup_steps {warmup} is not below {total} {steps}: the learning rate never"
            f" reaches its maximum; set {flag('warmup_steps')} to {share} of the steps"
        )


def note_unused(
    resolution: Resolution, unused: Iterable[tuple[tuple[str, ...], bool, str]]
) -> None:
    """Note settings that somebody gave and that this run does not read.

    Args:
        unused: (names, whether the run does not read them, why).
    """
    for names, holds, reason in unused:
        given = filter(resolution.is_given, names)
        named = ", ".join(f"{name} ({resolution.values[name].where})" for name in given)
        if holds and named:
            resolution.notes.append(f"not used, because {reason}: {named}")


def resolve_data_weights(resolution: Resolution, *, data: str = "data") -> None:
    """Let the weights of higher precedence win, and drop weights of data that was replaced.

    Args:
        data: the setting with the entries that are weighted.
    """
    named, weights = resolution.values.get(data), resolution.values["data_weights"]
    if not named or not weights.value:
        return
    if named.precedence >= Precedence.FLAG > weights.precedence:
        resolution.derive("data_weights", [], f"dropped: {data} is from {named.origin}")
        resolution.notes.append(
            f"data_weights ({weights.where}) is dropped, because {data} is from {named.origin}"
        )
    elif weights.precedence > named.precedence and isinstance(named.value, list | tuple | dict):
        given = [named.value] if isinstance(named.value, dict) else list(named.value)
        entries = [
            {name: value for name, value in entry.items() if name != "weight"}
            if isinstance(entry, dict)
            else entry
            for entry in given
        ]
        if entries != given:
            resolution.values[data] = replace(named, value=entries)
            resolution.notes.append(
                f"the weights in {data} ({named.where}) are not used: data_weights is"
                f" {weights.where}"
            )
