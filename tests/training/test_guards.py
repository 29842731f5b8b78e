"""NaN and inf are counted, and end a run that cannot recover; spikes follow OLMo's rule; standing still is reported."""

from __future__ import annotations

import logging
import math
import random
import statistics
from pathlib import Path

import pytest
import run_helpers
import torch

import finetune
from finetune.errors import ExitCode, FinetuneError
from finetune.training.guards import NonFiniteGuard, SpikeDetector, StepOutcomes, StillGuard

NAN, INF = math.nan, math.inf


def test_nonfinite_steps_in_a_row_end_the_run_with_the_last_good_checkpoint():
    guard = NonFiniteGuard(limit=3)
    for step in range(1, 30):  # a good step between starts the count again
        guard.fine() if step % 3 == 0 else guard.skipped(step, None)
    guard.fine()
    guard.skipped(35, None)
    guard.skipped(36, None)
    with pytest.raises(FinetuneError, match="3 steps in a row, up to step 37") as caught:
        guard.skipped(37, "checkpoint-4")
    assert caught.value.exit_code == ExitCode.FAILED
    assert "checkpoint-4" in caught.value.fix and "--learning-rate" in caught.value.fix
    with pytest.raises(FinetuneError, match="none: start again"):
        guard.skipped(38, None)


def test_spikes_are_those_of_the_rule_computed_with_statistics():
    """More than 6 sample deviations above the mean of the last 128 finite losses, without itself."""
    choose = random.Random(3)
    losses = [choose.gauss(2.0, 0.1) for _ in range(600)]
    for step in (50, 128, 129, 300, 301, 599):
        losses[step] += 5.0
    losses[400:403] = [NAN, -5.0, INF]  # far below is no spike
    detector, finite, spikes, expected = SpikeDetector(), [], [], []
    for step, loss in enumerate(losses):
        if detector.is_spike(loss):
            spikes.append(step)
        window = finite[-128:]
        if math.isfinite(loss):
            mean = statistics.fmean(window) if window else 0.0
            if len(window) == 128 and loss > mean + 6 * statistics.stdev(window):
                expected.append(step)
            finite.append(loss)
    # 50: the window is not full yet
    assert spikes == expected and 300 in spikes and not {50, 400, 401, 402} & set(spikes)
    constant = SpikeDetector(window_steps=4)
    assert not any(constant.is_spike(1.0) for _ in range(10)) and constant.is_spike(1.001)


def test_outcomes_are_read_one_step_late_or_when_they_are_needed():
    asked: list[int] = []
    outcomes, noted = StepOutcomes(), []
    for step in range(1, 6):
        outcomes.add(step, f"batch {step}", lambda step=step: asked.append(step) or step == 2)
        noted.append(list(outcomes.read(all_of_them=step == 4)))
    assert noted == [
        *([], [(1, "batch 1", False)], [(2, "batch 2", True)]),
        *([(3, "batch 3", False), (4, "batch 4", False)], []),
    ]
    assert asked == [1, 2, 3, 4]


# ------------------------------------------------------------------------------------ standing still


@pytest.fixture(autouse=True)
def _warnings(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING, "finetune")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_do_not_move_are_reported_once(dtype: torch.dtype, caplog):
    model, guard = torch.nn.Linear(3, 3).to(dtype), StillGuard(steps=3)
    for number, rate in enumerate([0.0] * 4 + [1e-9] * 5):  # without a rate nothing can move
        guard.before_step(model)
        guard.after_step(model, rate, lambda moved: moved)
        assert len(caplog.messages) == (number >= 6)
    (text,) = caplog.messages
    for words in ("no trained weight has changed in 3 steps", "1e-09", "--learning-rate"):
        assert words in text


@pytest.mark.parametrize("where", ["one weight", "another rank", "a frozen weight"])
def test_one_number_that_moves_is_enough(where: str, caplog):
    model, guard = torch.nn.Linear(3, 3), StillGuard(steps=2)
    model.bias.requires_grad_(False)
    changed = model.bias if where == "a frozen weight" else model.weight
    for _ in range(2):
        guard.before_step(model)
        with torch.no_grad():
            changed[-1] += 0 if where == "another rank" else 1e-6
        guard.after_step(model, 1e-4, lambda moved: moved or where == "another rank")
    assert len(caplog.messages) == (where == "a frozen weight")


@pytest.mark.parametrize(
    ("loss", "words"), [(0.0, "learned by heart"), (2.5, "nothing is learned")]
)
def test_a_constant_loss_is_reported_once(loss: float, words: str, caplog):
    guard = StillGuard(steps=4)
    for value in (1.0, loss, loss, loss, NAN, NAN, NAN, NAN):
        guard.line(value)
    assert not caplog.messages
    for _ in range(9):
        guard.line(loss)
    (text,) = caplog.messages
    assert words in text and f"{loss:g}" in text


def test_a_run_that_changes_nothing_is_warned_of(tmp_path: Path, caplog):
    materials = run_helpers.make_materials(tmp_path / "still", records=24)
    changes = {"finetuning": "full", "learning_rate": 1e-30, "max_steps": 20, "warmup_steps": 0}
    finetune.run(materials.settings(tmp_path / "run", **changes))
    log = (tmp_path / "run" / "logs").glob("*")
    assert (
        "".join(p.read_text() for p in log).count("no trained weight has changed in 20 steps") == 1
    )
