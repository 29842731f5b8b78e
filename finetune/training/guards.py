"""What must never be hidden: NaN and inf in loss or gradients, loss spikes, and a training that
changes nothing.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from finetune.errors import FinetuneError

logger = logging.getLogger("finetune")

# Skipped steps in a row after which a run is beyond repair: one bad batch is not, a broken state
# is.
NONFINITE_LIMIT = 10
SPIKE_WINDOW_STEPS = 128
SPIKE_SIGMAS = 6.0
# Steps, or lines of the log, without a change after which there is a warning.
STILL_STEPS = 20
_BITS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}


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
                f"loss or gradients were NaN or inf in {self.in_a_row} steps in a row, up to step"
                f" {step}",
                where="training",
                fix=(
                    "lower --learning-rate, prefer --dtype bfloat16 to float16, and look at the"
                    " records of these steps (events.jsonl names them); the last good checkpoint"
                    f" is {last_good or 'none: start again'}"
                ),
            )


class StepOutcomes:
    """Which steps were not finite: the device knows immediately, and the host reads it later.

    If the host read a step's outcome at its end, it would wait for the device, which then waits for
    the next step's first kernels. So it reads the step before, unless this one's is needed now.
    """

    def __init__(self) -> None:
        self._unread: deque[tuple[int, Any, Callable[[], bool]]] = deque()

    def add(self, step: int, batch: Any, nonfinite: Callable[[], bool]) -> None:
        """Add a step (1-based) with its batch; `nonfinite` returns its outcome when needed."""
        self._unread.append((step, batch, nonfinite))

    def read(self, *, all_of_them: bool) -> Iterator[tuple[int, Any, bool]]:
        """Steps not read yet with their batches and whether they were skipped; the last only with
        `all_of_them`.
        """
        while len(self._unread) > (0 if all_of_them else 1):
            step, batch, nonfinite = self._unread.popleft()
            yield step, batch, nonfinite()


def step_engine(engine: Any) -> bool:
    """Step DeepSpeed's engine unless gradients are not finite; return whether they were not."""
    # accelerate steps the engine inside `backward` and makes `optimizer.step()` of Trainer's loop a
    # no-op (DeepSpeedEngineWrapper). The executor bypasses that wrapper, so take the step here.
    # ZeRO-1/2 look for NaN before they step: by check_grad_overflow in 16 bits (a bf16 setting, on
    # by default), by the norm in float32. ZeRO-3 checks the raw gradients in float16 only
    # (_overflow_check_and_loss_scale_update), and otherwise the norm that it clips by
    # (is_invalid_grad_norm). The first condition below checks earlier. Remove it when a test of NaN
    # under ZeRO-3 passes without it.
    zero = engine.optimizer
    if hasattr(zero, "_overflow_clean_up") and not engine.fp16_enabled() and zero.has_overflow():
        zero._overflow_clean_up(zero.loss_scale)
        return True
    engine.step()
    # In float16 an overflow is the loss scaler at work, not a step gone wrong.
    return bool(zero.overflow) and not engine.fp16_enabled()


class SpikeDetector:
    """Detects a loss of more than 6 sigma above the mean of the last 128 steps (OLMo's
    SkipStepOptimizer rule).

    It only detects: the step is trained on, so that the samples of every step stay those of its
    global batch.
    """

    def __init__(self, window_steps: int = SPIKE_WINDOW_STEPS) -> None:
        self.losses: deque[float] = deque(maxlen=window_steps)

    def is_spike(self, loss: float) -> bool:
        """Return whether this loss is a spike against the window, which it then enters. False until
        the window is full.
        """
        spike = False
        if math.isfinite(loss):
            if len(self.losses) == self.losses.maxlen:
                mean = sum(self.losses) / len(self.losses)
                deviation = math.sqrt(
                    sum((x - mean) ** 2 for x in self.losses) / (len(self.losses) - 1)
                )
                spike = loss - mean > SPIKE_SIGMAS * deviation
            self.losses.append(loss)
        return spike


class StillGuard:
    """Warns once that the trained weights have not moved, and once that the loss is constant.

    Args:
        steps: with a learning rate above 0, or lines of the log, that must have changed something.
    """

    def __init__(self, steps: int = STILL_STEPS) -> None:
        self.steps = steps
        self._taken = 0
        self._before: list[torch.Tensor | None] | None = None
        self._loss = math.nan
        self._same = 0

    def before_step(self, model: torch.nn.Module) -> None:
        """Note the weights before the first step of this start."""
        if self._before is None:
            self._before = _sums_of_bits(model)

    def after_step(
        self, model: torch.nn.Module, rate: float, any_rank: Callable[[bool], bool]
    ) -> None:
        """Look at the weights once, after enough steps. Every rank must call it.

        Args:
            any_rank: whether it is so on any rank: under ZeRO-3 each checks its own slices.
        """
        if rate <= 0 or self._taken >= self.steps:
            return
        self._taken += 1
        if self._taken < self.steps:
            return
        before, self._before = self._before or [], []
        pairs = zip(before, _sums_of_bits(model), strict=True)
        sums = [(old, new) for old, new in pairs if old is not None and new is not None]
        # Most often the first has moved, and the host waits for the device once.
        moved = not sums or any(bool(old != new) for old, new in sums)
        if not any_rank(moved):
            logger.warning(
                "no trained weight has changed in %d steps: the gradients are 0, or a learning rate"
                " of %g is lost in rounding (fix: raise --learning-rate; python -m finetune inspect"
                " shows which tokens are trained)",
                self.steps,
                rate,
            )

    def line(self, loss: float) -> None:
        """Take the loss of a line of the log."""
        self._same = self._same + 1 if loss == self._loss else 1
        self._loss = loss
        if self._same == self.steps:
            cause = (
                "everything is learned by heart (fix: fewer steps, or more data)"
                if loss == 0
                else (
                    "nothing is learned (fix: raise --learning-rate; see the records with python -m"
                    " finetune inspect)"
                )
            )
            logger.warning(
                "the loss is %.6g in each of the last %d lines of the log: %s",
                loss,
                self.steps,
                cause,
            )


def _sums_of_bits(model: torch.nn.Module) -> list[torch.Tensor | None]:
    """For each trained parameter, of ZeRO-3 this rank's slice, the sum of its bits as numbers:
    int64, on its device.

    None for a slice that is not in memory but on NVMe.
    """
    held = [getattr(p, "ds_tensor", p).detach() for p in model.parameters() if p.requires_grad]
    return [
        t.contiguous().view(_BITS[t.element_size()]).sum(dtype=torch.int64) if t.numel() else None
        for t in held
    ]
