"""Numbers that depend on one another: which of them win, and what follows from them.

A rule looks at every value with the level of its source and settles what the user left open. It knows no file format
and no field type, and leaves a value of the wrong type alone: the model refuses that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from finetune.errors import ConfigError

DEFAULT_LEVEL = 0  # files follow from 1 in the order given, then --deepspeed, flags, overrides

MICRO, ACCUMULATION, GLOBAL = "micro_batch_size", "gradient_accumulation_steps", "global_batch_size"


@dataclass(frozen=True)
class Given:
    """A value and where it is from.

    Args:
        value: the value as read.
        level: precedence of the source; the higher wins.
        origin: what `--print-config` says, e.g. `default`, `ds_configs/zero3.json`, `--learning-rate`.
        place: the exact place for an error message; the origin where empty.
    """

    value: Any
    level: int
    origin: str
    place: str = ""

    @property
    def where(self) -> str:
        """The exact place."""
        return self.place or self.origin


@dataclass
class Settling:
    """What the sources said, being made into one configuration.

    Args:
        values: the winning value of every field, defaults included where they depend on nothing else.
        world_size: number of processes.
        defaults: the defaults alone.
        by_flag: the lowest level that counts as the command line (flags and overrides).
        derived: names that were computed here rather than decided by anyone.
    """

    values: dict[str, Given]
    world_size: int
    by_flag: int
    defaults: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[ConfigError] = field(default_factory=list)
    derived: set[str] = field(default_factory=set)

    def level(self, name: str) -> int:
        """Level of the value that counts; None is no value and has the level of a default."""
        given = self.values.get(name)
        return DEFAULT_LEVEL if given is None or given.value is None else given.level

    def value(self, name: str) -> Any:
        """The value that counts, None where there is none."""
        given = self.values.get(name)
        return None if given is None else given.value

    def derive(self, name: str, value: Any, origin: str) -> None:
        """Set a value that follows from others."""
        self.values[name] = Given(value, DEFAULT_LEVEL, origin)
        self.derived.add(name)


Rule = Callable[[Settling], None]


def processes(world_size: int) -> str:
    """`1 process`, `2 processes`."""
    return f"{world_size} process{'' if world_size == 1 else 'es'}"


def flag(name: str) -> str:
    """The flag of a field: `--learning-rate`."""
    return "--" + name.replace("_", "-")


def multiples_around(number: int, factor: int) -> str:
    """The nearest positive multiples of `factor`, as `28 or 32`."""
    below = number // factor * factor
    return " or ".join(str(multiple) for multiple in dict.fromkeys([below, below + factor]) if multiple)


def divisors_around(number: int, near: int) -> str:
    """The nearest divisors of `number` on both sides of `near`, as `3 or 5`."""
    below = next((d for d in range(min(near, number), 0, -1) if number % d == 0), None)
    above = next((d for d in range(near + 1, number + 1) if number % d == 0), None)
    return " or ".join(str(divisor) for divisor in (below, above) if divisor)


def batch_problem(global_batch_size: int, micro_batch_size: int) -> tuple[str, str]:
    """`(what, fix)` for a global batch that the micro-batch does not divide."""
    return (
        f"{GLOBAL} {global_batch_size} is not a multiple of {MICRO} {micro_batch_size}",
        f"nearest that agree: {GLOBAL} {multiples_around(global_batch_size, micro_batch_size)}, "
        f"or {MICRO} {divisors_around(global_batch_size, micro_batch_size)}",
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def settle_batch(settling: Settling) -> None:
    """Of micro-batch, accumulation and global batch the two of highest precedence win; the third is derived and said.

    At equal precedence the micro-batch is kept before the global batch and that before accumulation: the micro-batch is
    what fits into memory, the global batch is the training itself, accumulation is only how the one makes the other.
    """
    values = {name: settling.value(name) for name in (MICRO, GLOBAL, ACCUMULATION)}
    if not all(_is_count(value) or (value is None and name == ACCUMULATION) for name, value in values.items()):
        return
    levels = {name: settling.level(name) for name in values}
    if values[ACCUMULATION] is not None and len(set(levels.values())) == 1:
        _all_three(settling, values)
        return
    third = min(values, key=lambda name: (levels[name], name != ACCUMULATION, name != GLOBAL))
    if third == ACCUMULATION:
        _derive_accumulation(settling)
    elif third == GLOBAL:
        _derive_global(settling)
    else:
        _derive_micro(settling)


def _all_three(settling: Settling, values: dict[str, int]) -> None:
    micro, accumulation, size = values[MICRO], values[ACCUMULATION], values[GLOBAL]
    product = micro * accumulation * settling.world_size
    if product == size:
        return
    settling.problems.append(
        ConfigError(
            f"{MICRO} {micro} x {ACCUMULATION} {accumulation} x {processes(settling.world_size)} is {product}, "
            f"not {GLOBAL} {size}",
            ", ".join(dict.fromkeys(settling.values[name].where for name in values)),
            f"nearest that agrees: {GLOBAL} {product}; or leave {ACCUMULATION} out, it is derived",
        )
    )


def _derive_accumulation(settling: Settling) -> None:
    micro, size, world_size = settling.value(MICRO), settling.value(GLOBAL), settling.world_size
    if size % micro:
        what, fix = batch_problem(size, micro)
        places = ", ".join(dict.fromkeys(settling.values[name].where for name in (GLOBAL, MICRO)))
        settling.problems.append(ConfigError(what, places, fix))
        return
    accumulation = ceil(size / (micro * world_size))
    uneven = "" if size % (micro * world_size) == 0 else ", uneven: some devices have less to do in the last of them"
    given = settling.values.get(ACCUMULATION)
    replaced = f" instead of {given.value} ({given.where})" if given and given.value not in (None, accumulation) else ""
    settling.derive(ACCUMULATION, accumulation, f"derived from {GLOBAL}, {MICRO} and {processes(world_size)}")
    settling.notes.append(
        f"{ACCUMULATION} {accumulation}{replaced}: "
        f"{GLOBAL} {size} / ({MICRO} {micro} x {processes(world_size)}){uneven}"
    )


def _derive_global(settling: Settling) -> None:
    micro, accumulation, world_size = settling.value(MICRO), settling.value(ACCUMULATION), settling.world_size
    size, before = micro * accumulation * world_size, settling.values[GLOBAL]
    settling.derive(GLOBAL, size, f"derived from {MICRO}, {ACCUMULATION} and {processes(world_size)}")
    replaced = f" instead of {before.value} ({before.where})" if before.value != size else ""
    settling.notes.append(
        f"{GLOBAL} {size}{replaced}: {MICRO} {micro} x {ACCUMULATION} {accumulation} x {processes(world_size)}"
    )


def _derive_micro(settling: Settling) -> None:
    accumulation, size, world_size = settling.value(ACCUMULATION), settling.value(GLOBAL), settling.world_size
    share, before = accumulation * world_size, settling.values[MICRO]
    if size % share:
        places = ", ".join(dict.fromkeys(settling.values[name].where for name in (GLOBAL, ACCUMULATION)))
        settling.problems.append(
            ConfigError(
                f"{GLOBAL} {size} is not a whole micro-batch x {ACCUMULATION} {accumulation} x {processes(world_size)}",
                places,
                f"nearest that agree: {GLOBAL} {multiples_around(size, share)}; "
                f"or give {MICRO} instead of {ACCUMULATION}, which need not divide by the processes",
            )
        )
        return
    settling.derive(MICRO, size // share, f"derived from {GLOBAL}, {ACCUMULATION} and {processes(world_size)}")
    replaced = f" instead of {before.value} ({before.where})" if before.value != size // share else ""
    settling.notes.append(
        f"{MICRO} {size // share}{replaced}: "
        f"{GLOBAL} {size} / ({ACCUMULATION} {accumulation} x {processes(world_size)})"
    )


def settle_length(settling: Settling) -> None:
    """Of max_steps and num_epochs the one of higher precedence wins; at equal precedence max_steps."""
    if settling.value("max_steps") is None:
        return
    steps, epochs = settling.values["max_steps"], settling.values["num_epochs"]
    if settling.level("num_epochs") > settling.level("max_steps"):
        settling.derive("max_steps", None, f"derived: num_epochs ({epochs.origin}) wins")
        settling.notes.append(f"max_steps {steps.value} ({steps.where}) is not used: num_epochs {epochs.value} wins")
    elif epochs.level > DEFAULT_LEVEL and epochs.value != settling.defaults.get("num_epochs"):
        settling.notes.append(f"num_epochs {epochs.value} ({epochs.where}) is not used: max_steps {steps.value} wins")


def warn_of_long_warmup(settling: Settling) -> None:
    """A warm-up that never ends is allowed, and said."""
    warmup, steps = settling.value("warmup_steps"), settling.value("max_steps")
    if _is_count(warmup) and _is_count(steps) and warmup >= steps:
        settling.notes.append(
            f"warning: warmup_steps {warmup} is not below max_steps {steps}: the learning rate never gets to its top; "
            f"set {flag('warmup_steps')} to 0.03 for 3% of the steps"
        )


def settle_validation_data(settling: Settling) -> None:
    """`--data` by flag drops the validation data of the files, which belongs to the data that was replaced."""
    data, valid = settling.values.get("data"), settling.values.get("valid_data")
    if data and valid and valid.value and data.level >= settling.by_flag > valid.level:
        settling.derive("valid_data", [], f"dropped: data is from {data.origin}")
        settling.notes.append(
            f"valid_data ({valid.where}) is dropped, because data is from {data.origin}; "
            f"give {flag('valid_data')} to validate"
        )
        return
    files = {name: _listed(settling.value(name)) for name in ("data", "valid_data")}
    for path in sorted(files["data"] & files["valid_data"]):
        settling.notes.append(f"warning: {path} is in data and in valid_data: the validation loss will look too good")


def _listed(value: Any) -> set[str]:
    if isinstance(value, str):
        return {value}
    return {path for path in value if isinstance(path, str)} if isinstance(value, list | tuple) else set()


def say_what_is_unused(settling: Settling) -> None:
    """Settings that somebody gave and that the chosen way of training does not read."""
    adapter = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
    unused = [
        (adapter, settling.value("finetuning") == "full", "finetuning is full"),
        (("curriculum", "curriculum_seed"), settling.value("use_curriculum") is False, "use_curriculum is false"),
    ]
    for names, holds, reason in unused:
        given = [name for name in names if settling.level(name) > DEFAULT_LEVEL]
        if holds and given:
            places = ", ".join(f"{name} ({settling.values[name].where})" for name in given)
            settling.notes.append(f"not used, because {reason}: {places}")


RULES_FOR_FINE_TUNING: tuple[Rule, ...] = (
    settle_batch,
    settle_length,
    warn_of_long_warmup,
    settle_validation_data,
    say_what_is_unused,
)
