"""NaN and inf are counted, and end a run that cannot mend; spikes are told against OLMo's rule, computed apart."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import pytest

from finetune.errors import ExitCode, FinetuneError
from finetune.training.guards import NONFINITE_LIMIT, NonFiniteGuard, SpikeDetector, StepOutcomes


def test_nonfinite_steps_in_a_row_end_the_run_with_the_last_good_checkpoint():
    guard = NonFiniteGuard(limit=3)
    guard.skipped(5, None)
    guard.skipped(6, None)
    with pytest.raises(FinetuneError) as caught:
        guard.skipped(7, "checkpoint-4")
    assert caught.value.exit_code == ExitCode.FAILED
    assert "3 steps in a row, up to step 7" in str(caught.value)
    assert "checkpoint-4" in caught.value.fix and "--learning-rate" in caught.value.fix


def test_without_a_checkpoint_it_says_start_again():
    guard = NonFiniteGuard(limit=1)
    with pytest.raises(FinetuneError, match="none: start again"):
        guard.skipped(1, None)


def test_a_good_step_between_starts_the_count_again():
    guard = NonFiniteGuard()
    for step in range(10 * NONFINITE_LIMIT):
        if step % NONFINITE_LIMIT == NONFINITE_LIMIT - 1:
            guard.fine()
        else:
            guard.skipped(step, None)
    assert guard.in_a_row == 0


def test_spikes_are_those_of_the_rule_computed_with_statistics():
    """More than 6 sample deviations above the mean of the last 128 finite losses, the spike itself not among them."""
    choose = random.Random(3)
    losses = [choose.gauss(2.0, 0.1) for _ in range(600)]
    for step in (50, 128, 129, 300, 301, 599):
        losses[step] += 5.0
    losses[400] = math.nan
    losses[401] = -5.0  # far below is no spike
    detector, finite, told = SpikeDetector(), [], []
    for step, loss in enumerate(losses):
        if detector.is_spike(loss):
            told.append(step)
        window = finite[-128:]
        expected = False
        if math.isfinite(loss):
            if len(window) == 128:
                expected = loss > statistics.fmean(window) + 6 * statistics.stdev(window)
            finite.append(loss)
        assert (told[-1:] == [step]) == expected, f"step {step}"
    assert 300 in told and 50 not in told  # 50: the window is not full yet
    assert 401 not in told


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_no_spike_and_stays_out_of_the_window(loss: float):
    detector = SpikeDetector(window_steps=2)
    assert not any(detector.is_spike(x) for x in (1.0, 1.1, loss))
    assert list(detector.losses) == [1.0, 1.1]


def test_a_constant_loss_has_no_deviation_and_any_rise_is_told():
    detector = SpikeDetector(window_steps=4)
    assert not any(detector.is_spike(1.0) for _ in range(10))
    assert detector.is_spike(1.001)


def test_outcomes_are_read_one_step_late_or_when_they_are_needed():
    asked: list[int] = []

    def outcome(step: int) -> Callable[[], bool]:
        def read() -> bool:
            asked.append(step)
            return step == 2

        return read

    outcomes, noted = StepOutcomes(), []
    for step in range(1, 6):
        outcomes.add(step, f"batch {step}", outcome(step))
        noted.append(list(outcomes.read(all_of_them=step == 4)))
    assert noted[0] == [] and noted[1] == [(1, "batch 1", False)]
    assert noted[2] == [(2, "batch 2", True)], "the step that it was, a step later"
    assert noted[3] == [(3, "batch 3", False), (4, "batch 4", False)]
    assert noted[4] == [] and asked == [1, 2, 3, 4]
