"""The learning-rate schedules that a run may name: the one table. `training.schedules` has the curve of each."""

from __future__ import annotations

# name -> the learning rate after the warm-up
SCHEDULES = {"cosine": "half a cosine to 0", "linear": "a straight line to 0", "constant": "stays at its maximum"}
# Of pretraining alone, which has warmdown_ratio and final_lr_fraction.
PRETRAINING_SCHEDULES = {"warmdown": "constant, then a straight line to final_lr_fraction", **SCHEDULES}


def described(schedules: dict[str, str]) -> str:
    """The names with what they mean, for the help."""
    return "; ".join(f"{name}: {meaning}" for name, meaning in schedules.items())
