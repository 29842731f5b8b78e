"""Learning-rate schedules as pure functions of the step, so that nothing has to be restored on resume."""

from __future__ import annotations

import math
from fractions import Fraction


def warmup_count(warmup_steps: int | float, total_steps: int) -> int:
    """Steps of warm-up: a number below 1 is a fraction of all steps, rounded up.

    The fraction is the decimal that was written: 0.55 of 180 steps are 99, though 0.55 * 180 is 99.00000000000001.
    """
    return math.ceil(Fraction(str(warmup_steps)) * total_steps) if warmup_steps < 1 else int(warmup_steps)


def warmdown_factor(
    step: int, *, total_steps: int, warmup_steps: int, warmdown_ratio: float, final_fraction: float
) -> float:
    """Factor for the update after `step` steps: warm-up, stable, and linearly down in the last share of the run.

    nanochat's course (base_train.py get_lr_multiplier): the first update has 1 / warmup_steps, not 0, and the rate ends
    at `final_fraction`. Where warm-up and warm-down overlap, the lower of the two counts.
    """
    up = (step + 1) / warmup_steps if step < warmup_steps else 1.0
    warmdown_steps = round(warmdown_ratio * total_steps)
    if step <= total_steps - warmdown_steps:
        return up
    left = max(0, total_steps - step) / warmdown_steps
    return min(up, left + (1 - left) * final_fraction)


def learning_rate_factor(step: int, *, total_steps: int, warmup_steps: int, scheduler: str) -> float:
    """Factor on the learning rate for the update that takes the run from `step` to `step + 1` (0-based).

    Linear warm-up from 0, then constant, linear to 0, or half a cosine to 0 (Loshchilov & Hutter 2017, without
    restarts): the same curves as transformers' get_scheduler, with which a test compares them.

    Raises:
        ValueError: a scheduler that is not one of cosine, linear, constant.
    """
    if step < warmup_steps:
        return step / max(1, warmup_steps)
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    if scheduler == "constant":
        return 1.0
    if scheduler == "linear":
        return max(0.0, 1.0 - progress)
    if scheduler == "cosine":
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
    raise ValueError(f"unknown scheduler {scheduler!r}")
