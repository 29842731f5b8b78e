"""What must never be hidden: NaN and inf in loss or gradients, and loss spikes."""

from __future__ import annotations

import math
from collections import deque

from finetune.errors import FinetuneError

# Skipped steps in a row after which a run is beyond repair: one bad batch is not, a broken state is.
NONFINITE_LIMIT = 10
SPIKE_WINDOW_STEPS = 128
SPIKE_SIGMAS = 6.0


class NonFiniteGuard:
    """Counts steps that were skipped because loss or gradients were not finite.

    Args:
        limit: skipped steps in a row after which `skipped` raises.
    """

    def __init__(self, limit: int = NONFINITE_LIMIT) -> None:
        self.limit = limit
        self.in_a_row = 0

    def fine(self) -> None:
        self.in_a_row = 0

    def skipped(self, step: int, last_good: str | None) -> None:
        """Note a skipped step.

        Args:
            step: 1-based.
            last_good: name of the newest valid checkpoint, None without one.

        Raises:
            FinetuneError: the limit is reached.
        """
        self.in_a_row += 1
        if self.in_a_row >= self.limit:
            raise FinetuneError(
                f"loss or gradients were NaN or inf in {self.in_a_row} steps in a row, up to step {step}",
                where="training",
                fix="lower --learning-rate, prefer --dtype bfloat16 to float16, and look at the records of these steps "
                f"(events.jsonl names them); the last good checkpoint is {last_good or 'none: start again'}",
            )


class SpikeDetector:
    """Tells a loss that lies more than 6 sigma above the mean of the last 128 steps (OLMo's SkipStepOptimizer rule).

    It only tells: a spike's step is trained on, so that the samples of every step stay those of its global batch.
    """

    def __init__(self, window_steps: int = SPIKE_WINDOW_STEPS, sigmas: float = SPIKE_SIGMAS) -> None:
        self.sigmas = sigmas
        self.losses: deque[float] = deque(maxlen=window_steps)

    def is_spike(self, loss: float) -> bool:
        """Whether this loss is a spike against the window, which it then enters. False until the window is full."""
        spike = False
        if math.isfinite(loss):
            if len(self.losses) == self.losses.maxlen:
                mean = sum(self.losses) / len(self.losses)
                deviation = math.sqrt(sum((x - mean) ** 2 for x in self.losses) / (len(self.losses) - 1))
                spike = loss - mean > self.sigmas * deviation
            self.losses.append(loss)
        return spike
