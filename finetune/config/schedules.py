"""The learning-rate schedules that a run may name: the one table. `training.schedules` has the curve of each."""

from __future__ import annotations

from typing import Literal, get_args

Schedule = Literal["cosine", "linear", "constant"]
# With what pretraining alone has, by warmdown_ratio and final_lr_fraction.
PretrainingSchedule = Literal["warmdown", Schedule]

# name -> the learning rate after the warm-up
PRETRAINING_SCHEDULES: dict[PretrainingSchedule, str] = {
    "warmdown": "constant, then a straight line to final_lr_fraction",
    "cosine": "half a cosine to 0",
    "linear": "a straight line to 0",
    "constant": "stays at its maximum",
}
SCHEDULES = {name: PRETRAINING_SCHEDULES[name] for name in get_args(Schedule)}


def described(schedules: dict[PretrainingSchedule, str]) -> str:
    """The names with what they mean, for the help."""
    return "; ".join(f"{name}: {meaning}" for name, meaning in schedules.items())
