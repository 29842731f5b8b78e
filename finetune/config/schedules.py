"""The learning-rate schedules that a run may name: the one table. `training.schedules` has the curve of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Schedule = Literal["cosine", "linear", "constant"]
PretrainingSchedule = Literal["warmdown", Schedule]

# name -> the learning rate after the warm-up
SCHEDULES: dict[Schedule, str] = {
    "cosine": "half a cosine to 0",
    "linear": "a straight line to 0",
    "constant": "stays at its maximum",
}
# Of pretraining alone, which has warmdown_ratio and final_lr_fraction.
PRETRAINING_SCHEDULES: dict[PretrainingSchedule, str] = {
    "warmdown": "constant, then a straight line to final_lr_fraction",
    **SCHEDULES,
}


def described(schedules: Mapping[Schedule, str] | Mapping[PretrainingSchedule, str]) -> str:
    """The names with what they mean, for the help."""
    return "; ".join(f"{name}: {meaning}" for name, meaning in schedules.items())
