"""NaN and inf are counted, and end a run that cannot mend; spikes are told against OLMo's rule,
computed apart.
"""

from __future__ import annotations

import logging
import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import run_helpers
import torch

from finetune.errors import ExitCode, FinetuneError
from finetune.training.guards import (
    NONFINITE_LIMIT,
    NonFiniteGuard,
    SpikeDetector,
    StepOutcomes,
    StillGuard,
)


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
    """More than 6 sample deviations above the mean of the last 128 finite losses, the spike itself
    not among them.
    """
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


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_do_not_move_are_told_once(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
):
    model, guard = torch.nn.Linear(3, 3).to(dtype), StillGuard(steps=3)
    caplog.set_level(logging.WARNING, "finetune")
    for rate in (0.0, 1e-9, 1e-9, 1e-9, 1e-9):
        guard.before_step(model)
        guard.after_step(model, rate, lambda moved: moved)
        assert len(said(caplog)) <= 1
    (text,) = said(caplog)
    assert (
        "no trained weight has changed in 3 steps" in text
        and "1e-09" in text
        and "--learning-rate" in text
    )


@pytest.mark.parametrize("where", ["one weight", "another rank", "a frozen weight"])
def test_one_number_that_moves_is_enough(where: str, caplog: pytest.LogCaptureFixture):
    model, guard = torch.nn.Linear(3, 3), StillGuard(steps=2)
    model.bias.requires_grad_(False)
    caplog.set_level(logging.WARNING, "finetune")
    for _ in range(2):
        guard.before_step(model)
        with torch.no_grad():
            (model.bias if where == "a frozen weight" else model.weight)[-1] += (
                0 if where == "another rank" else 1e-6
            )
        guard.after_step(model, 1e-4, lambda moved: moved or where == "another rank")
    assert len(said(caplog)) == (where == "a frozen weight")


@pytest.mark.parametrize(
    ("loss", "words"), [(0.0, "learned by heart"), (2.5, "nothing is learned")]
)
def test_a_constant_loss_is_told_once(loss: float, words: str, caplog: pytest.LogCaptureFixture):
    guard = StillGuard(steps=4)
    caplog.set_level(logging.WARNING, "finetune")
    for value in (1.0, loss, loss, loss, math.nan, math.nan, math.nan, math.nan):
        guard.line(value)
    assert not said(caplog)
    for _ in range(9):
        guard.line(loss)
    (text,) = said(caplog)
    assert words in text and f"{loss:g}" in text


def test_a_run_that_changes_nothing_says_so(tmp_path: Path):
    materials = run_helpers.make_materials(tmp_path / "still", records=24)
    ranks = run_helpers.train(
        materials.settings(
            tmp_path / "run", finetuning="full", learning_rate=1e-30, max_steps=20, warmup_steps=0
        )
    )
    assert ranks.output().count("no trained weight has changed in 20 steps") == 1
    ranks = run_helpers.train(materials.settings(tmp_path / "moves", max_steps=20))
    assert "no trained weight" not in ranks.output()
