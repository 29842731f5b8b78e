"""Learning-rate schedules: functions of the step, so that nothing has to be restored on resume.

A new schedule is a function here and its entry in `SCHEDULES`: the setting takes its name, and the
help its meaning.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal


@dataclass(frozen=True)
class ScheduleSettings:
    """What a schedule may depend on in addition to the step.

    Attributes:
        warmdown_ratio: share of the run in which `warmdown` falls.
        final_fraction: the fraction that it falls to.
    """

    total_steps: int
    warmup_steps: int
    warmdown_ratio: float = 0.0
    final_fraction: float = 0.0


def warmup_count(warmup_steps: int | float, total_steps: int) -> int:
    """Steps of warm-up: a number below 1 is a fraction of all steps, rounded up.

    The fraction is the decimal that was written: 0.55 of 180 steps are 99, though 0.55 * 180 is
    99.00000000000001. It is never all steps: a run of one step would train at a rate of 0.
    """
    if warmup_steps >= 1:
        return int(warmup_steps)
    return min(math.ceil(Fraction(str(warmup_steps)) * total_steps), max(0, total_steps - 1))


def learning_rate_schedule(name: str, settings: ScheduleSettings) -> Callable[[int], float]:
    """Step (0-based) -> factor on the learning rate, for the update that takes the run from there
    to the next step.

    Raises:
        ValueError: there is no schedule of this name.
    """
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}; there are {', '.join(SCHEDULES)}")
    factor = SCHEDULES[name].factor
    return lambda step: factor(step, settings)


# The first three match transformers' get_scheduler, as a test checks. They warm up linearly from 0,
# then stay constant, fall linearly to 0, or follow half a cosine to 0 (Loshchilov & Hutter 2017,
# without restarts).


def constant(step: int, settings: ScheduleSettings) -> float:
    return _rise(step, settings) if step < settings.warmup_steps else 1.0


def linear(step: int, settings: ScheduleSettings) -> float:
    return (
        _rise(step, settings)
        if step < settings.warmup_steps
        else max(0.0, 1.0 - _progress(step, settings))
    )


def cosine(step: int, settings: ScheduleSettings) -> float:
    if step < settings.warmup_steps:
        return _rise(step, settings)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * _progress(step, settings))))


def warmdown(step: int, settings: ScheduleSettings) -> float:
    """Warm-up, stable, and linearly down in the last share of the run.

    As in nanochat (base_train.py get_lr_multiplier): the first update has 1 / warmup_steps, not 0,
    and the rate ends at `final_fraction`. Where warm-up and warm-down overlap, the lower of the two
    counts.
    """
    up = (step + 1) / settings.warmup_steps if step < settings.warmup_steps else 1.0
    warmdown_steps = round(settings.warmdown_ratio * settings.total_steps)
    if step <= settings.total_steps - warmdown_steps:
        return up
    left = max(0, settings.total_steps - step) / warmdown_steps
    return min(up, left + (1 - left) * settings.final_fraction)


def _rise(step: int, settings: ScheduleSettings) -> float:
    return step / max(1, settings.warmup_steps)


def _progress(step: int, settings: ScheduleSettings) -> float:
    """Return the progress: 0 at the end of the warm-up, 1 at the end of the run."""
    return (step - settings.warmup_steps) / max(1, settings.total_steps - settings.warmup_steps)


@dataclass(frozen=True)
class Schedule:
    """A schedule that a run may name."""

    factor: Callable[[int, ScheduleSettings], float]
    meaning: str  # of the learning rate after the warm-up
    pretraining_only: bool = False  # where it needs settings that only pretraining has


SCHEDULES = {
    "warmdown": Schedule(
        warmdown, "constant, then a straight line to final_lr_fraction", pretraining_only=True
    ),
    "cosine": Schedule(cosine, "half a cosine to 0"),
    "linear": Schedule(linear, "a straight line to 0"),
    "constant": Schedule(constant, "stays at its maximum"),
}
_FINE_TUNING = {
    name: schedule for name, schedule in SCHEDULES.items() if not schedule.pretraining_only
}
if TYPE_CHECKING:
    ScheduleName = str
    PretrainingScheduleName = str
else:  # the choices of the settings, as pydantic takes them
    ScheduleName, PretrainingScheduleName = Literal[tuple(_FINE_TUNING)], Literal[tuple(SCHEDULES)]


def described(*, pretraining: bool) -> str:
    """Return the names with what they mean, for the help."""
    schedules = SCHEDULES if pretraining else _FINE_TUNING
    return "; ".join(f"{name}: {schedule.meaning}" for name, schedule in schedules.items())
