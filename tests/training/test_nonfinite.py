"""NaN and inf are never hidden and never reach the weights; spikes and standing still are reported."""

from __future__ import annotations

import logging
import math
import random
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import run_patches
import torch
from run_helpers import LAYOUTS, events
from safetensors.torch import load_file

import finetune
from finetune.errors import FinetuneError
from finetune.training import guards
from finetune.training.guards import (
    NONFINITE_LIMIT,
    NonFiniteGuard,
    SpikeDetector,
    StepOutcomes,
    StillGuard,
)

NAN, INF = math.nan, math.inf


def saved_state(output_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights and moments of a checkpoint, by file and name."""
    paths = sorted((output_dir / f"checkpoint-{step}").glob("*.safetensors"))
    tensors = [(path, load_file(path)) for path in paths]
    return {f"{path.name}:{name}": t for path, file in tensors for name, t in file.items()}


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


FULL = {"finetuning": "full"}
# processes, settings, on rank, factor, where
CASES: dict[str, tuple[int, dict[str, Any], int, float, str]] = {
    "no clipping": (1, {"max_grad_norm": 0.0}, 0, NAN, "gradient"),
    "DDP, LoRA": (2, {}, 1, NAN, "loss"),
    "ZeRO-3, bfloat16": (2, {"dtype": "bfloat16", **LAYOUTS["zero3"]}, 0, NAN, "loss"),
    "ZeRO-2": (2, FULL | LAYOUTS["zero2"], 1, NAN, "loss"),
    "ZeRO-3, full": (2, FULL | LAYOUTS["zero3_offload"], 0, INF, "gradient"),
}
SLOW_CASES = ("ZeRO-2", "ZeRO-3, full")


@pytest.mark.parametrize(
    ("processes", "changes", "on_rank", "factor", "where"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name in SLOW_CASES))
        for name, case in CASES.items()
    ],
)
def test_the_step_is_skipped_on_all_ranks_and_a_resume_right_after_it_changes_nothing(
    materials, tmp_path, processes, changes, on_rank, factor, where
):
    output_dir = tmp_path / "run"
    common = {"save_steps": 1, "save_total_limit": 9, "max_steps": 5, "warmup_steps": 0}
    common |= {"lr_scheduler": "linear", "lora_dropout": 0.3}
    settings = materials.settings(output_dir, **common, **changes)
    spoiled = {"patch": run_patches.spoil_losses, "patch_arguments": (on_rank, (3,), factor, where)}
    ranks = run_helpers.train(settings, processes, launched=True, **spoiled)
    (event,) = events(output_dir, "nonfinite")
    assert event["step"] == 3 and event["ids"] == run_helpers.sample_ids(output_dir)[2]
    assert "step 3 was skipped" in ranks.output()

    states = {step: saved_state(output_dir, step) for step in range(1, 6)}
    same = [equal(states[step], states[step + 1]) for step in range(1, 5)]
    assert same == [False, True, False, False]

    before = run_helpers.lines(output_dir / "trainer_log.jsonl")
    # What is not finite is null in the log: JSON has no word for it.
    finite = [True, True, False, True, True]
    assert [line["loss"] is not None for line in before] == (
        finite if where == "loss" else [True] * 5
    )
    assert [line["grad_norm"] is not None for line in before] == finite
    rates = [line["learning_rate"] for line in before]
    assert rates == pytest.approx([1e-2 * (1 - step / 5) for step in range(5)])

    for name in ("checkpoint-4", "checkpoint-5"):
        shutil.rmtree(output_dir / name)
    (output_dir / "status.json").unlink()
    run_helpers.train(settings, processes, launched=True)
    assert [event["step"] for event in events(output_dir, "resume")] == [3]
    after = run_helpers.lines(output_dir / "trainer_log.jsonl")
    for name in ("step", "loss", "grad_norm", "learning_rate"):
        assert [line[name] for line in after] == [line[name] for line in before], name
    assert equal(saved_state(output_dir, 5), states[5])


def test_at_the_limit_the_run_stops_and_names_the_last_good_checkpoint(materials, tmp_path):
    """Also where it was resumed from; a good step between starts the count again."""
    output_dir, last = tmp_path / "run", 5 + NONFINITE_LIMIT  # the limit's step and one more
    changes = {"save_steps": 3, "max_steps": 40, "logging_steps": 50}
    settings = materials.settings(output_dir, **changes)
    spoiled = {"patch": run_patches.spoil_losses, "expect": 1, "launched": True}
    spoiled["patch_arguments"] = (0, (2, *range(5, 99)), NAN)
    ranks = run_helpers.train(settings, **spoiled)
    skipped = [event["step"] for event in events(output_dir, "nonfinite")]
    assert skipped == [2, *range(5, last)]
    assert len(run_helpers.sample_ids(output_dir)) == last
    # What was saved meanwhile holds the weights of step 4, which are good.
    newest = max(output_dir.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    named = f"the last good checkpoint is {newest.name}"
    assert named in ranks.output()
    status = run_helpers.status(output_dir)
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 1, last)
    assert f"{NONFINITE_LIMIT} steps in a row" in status["error"]
    again = run_helpers.train(settings | {"save_steps": 0}, **spoiled)
    assert named in again.output()


def short_window(rank: int, steps: int, spike: int) -> None:
    guards.SpikeDetector.__init__.__defaults__ = (steps,)
    run_patches.spoil_losses(rank, 0, (spike - steps - 1, spike), 30.0)


def test_spikes_are_reported_with_the_ids_of_their_step(materials, tmp_path):
    """Once the window is full; a spike is trained on all the same."""
    output_dir, spike = tmp_path / "run", 12
    settings = materials.settings(output_dir, max_steps=spike + 1, learning_rate=1e-6)
    patch = {"patch": short_window, "patch_arguments": (8, spike)}
    assert f"step {spike}: loss" in run_helpers.train(settings, **patch).output()
    (event,) = events(output_dir, "spike")
    assert event["step"] == spike and event["loss"] == run_helpers.losses(output_dir)[spike - 1]
    assert event["ids"] == run_helpers.sample_ids(output_dir)[spike - 1]


def test_spikes_are_those_of_the_rule_computed_with_statistics():
    """More than 6 sample deviations above the mean of the last 128 finite losses, without itself."""
    choose = random.Random(3)
    losses = [choose.gauss(2.0, 0.1) for _ in range(600)]
    for step in (50, 128, 129, 300, 301, 599):
        losses[step] += 5.0
    losses[400:403] = [NAN, -5.0, INF]  # far below is no spike
    detector, expected = SpikeDetector(), []
    spikes = [step for step, loss in enumerate(losses) if detector.is_spike(loss)]
    for step, loss in enumerate(losses):
        window = [before for before in losses[:step] if math.isfinite(before)][-128:]
        enough = len(window) == 128
        if enough and statistics.fmean(window) + 6 * statistics.stdev(window) < loss < INF:
            expected.append(step)
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
    good = [(step, f"batch {step}", step == 2) for step in range(1, 5)]
    assert noted == [[], good[:1], good[1:2], good[2:], []]
    assert asked == [1, 2, 3, 4]


@pytest.fixture(autouse=True)
def _warnings(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING, "finetune")


def test_weights_that_do_not_move_are_reported_once(caplog):
    model, guard = torch.nn.Linear(3, 3).to(torch.bfloat16), StillGuard(steps=3)
    for number, rate in enumerate([0.0] * 4 + [1e-9] * 5):  # without a rate nothing can move
        guard.before_step(model)
        guard.after_step(model, rate, lambda moved: moved)
        assert len(caplog.messages) == (number >= 6)
    (text,) = caplog.messages
    for words in ("no trained weight has changed in 3 steps", "1e-09", "--learning-rate"):
        assert words in text


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


def test_a_run_that_changes_nothing_is_warned_of(materials, tmp_path: Path):
    changes = {"finetuning": "full", "learning_rate": 1e-30, "max_steps": 20, "warmup_steps": 0}
    finetune.run(materials.settings(tmp_path / "run", **changes))
    text = "".join(path.read_text() for path in (tmp_path / "run" / "logs").iterdir())
    assert text.count("no trained weight has changed in 20 steps") == 1
    with pytest.raises(FinetuneError, match="none: start again"):
        NonFiniteGuard(limit=1).skipped(38, None)
