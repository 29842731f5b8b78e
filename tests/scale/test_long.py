"""What a week does to a run, in some hundred steps: nothing is kept or done a step more, and
nothing is lost.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import run_helpers
from launching import ROOT

from finetune.commands.report.command import build_report
from finetune.runs.reader import open_run
from finetune.runtime.language import speaking
from finetune.training.results import RunResult

sys.path.append(str(ROOT / "exhaustive" / "scale"))
import long

# Looks between saves and evaluations: of these steps every one is like any other.
PLAN = long.Plan(steps=720, look_every=40, nan_every=97, spike_every=173, look_seconds=0.05)
SAVE_EVERY = 360


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which losses are NaN, the clock jumps both ways, and the log is rotated from
    outside.
    """
    folder = tmp_path_factory.mktemp("long")
    materials = run_helpers.make_materials(folder / "materials")
    settings = long.settings(materials, folder / "run", PLAN)
    settings |= {"save_steps": SAVE_EVERY, "eval_steps": SAVE_EVERY}
    numbers = (str(folder / "run"), str(folder / "watch.jsonl"), asdict(PLAN))
    run_helpers.train(settings, patch=long.prepare, patch_arguments=numbers)
    return folder / "run"


@pytest.fixture(scope="module")
def looks(run: Path) -> list[dict[str, Any]]:
    """At the process, without the first (loading) and those of steps out of the ordinary."""
    told = [*PLAN.nan_steps, *range(PLAN.spike_every, PLAN.steps, PLAN.spike_every), SAVE_EVERY]
    told += [SAVE_EVERY + 1, PLAN.steps * 2 // 5, PLAN.steps * 7 // 10]
    everything = list(long.lines_of(run.parent / "watch.jsonl"))[4:]
    quiet = [
        look for look in everything if all(not 0 <= look["step"] - step <= 41 for step in told)
    ]
    assert len(quiet) >= 4
    return quiet


def test_counters_are_exact_and_every_step_costs_the_same_and_leaves_nothing(
    run: Path, looks: list[dict[str, Any]]
):
    long.check(run, PLAN)
    # No log is read, no folder is listed, no file opened: 3 lines are written, one call each.
    for look in looks:
        calls = dict(look["calls"])
        lines = 3 * PLAN.look_every
        assert lines <= calls.pop("write") <= lines + 2, "and a line of progress"
        assert calls.keys() <= {"lstat", "fstat"}, "whether the logs still have their names"
    # The lines of the log alone, kept as Trainer keeps them, are 30 blocks of memory a step.
    settled = [look for look in looks if look["step"] > SAVE_EVERY + 1]
    steps, blocks = ([look[name] for look in settled] for name in ("step", "blocks"))
    assert len(settled) >= 3 and statistics.linear_regression(steps, blocks).slope < 5
    assert len({(look["open_files"], look["threads"]) for look in settled}) == 1


def test_the_picture_and_the_report_stand_the_clock(run: Path):
    view = open_run(run).poll()
    assert (view.state, view.step, view.eta_seconds) == ("done", PLAN.steps, 0.0)
    assert view.elapsed_seconds >= 0 and 0 < view.steps.column("step_seconds").max() < 60
    told = [message.event for message in view.messages if message.event]
    skipped = [event["step"] for event in told if event["event"] == "nonfinite"]
    assert skipped == PLAN.nan_steps, "in the order in which they came, whatever the clock said"
    with speaking("en"):
        page = build_report(view)
    assert page.count('class="nonfinite"') == len(PLAN.nan_steps)
    assert page.count('class="spike"') == len(PLAN.spike_steps)
    history = RunResult(run, "done", PLAN.steps, first_step=700).history
    assert [line["step"] for line in history if "loss" in line] == list(range(701, 721))
    assert [line["step"] for line in history if "eval_loss" in line] == [0, 360, 720]
    assert RunResult(run, "done", PLAN.steps).history == []


def test_tensorboard_reads_the_curves(run: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    lines = {line["step"]: line for line in long.lines_of(run / "trainer_log.jsonl")}
    for name in ("grad_norm", "loss/explain"):
        drawn = {point.step: point.value for point in found.Scalars(f"train/{name}")}
        known = {step: line[name] for step, line in lines.items() if line.get(name) is not None}
        assert {step: drawn[step] for step in known} == pytest.approx(known, rel=1e-6)
    assert [point.step for point in found.Scalars("eval/loss")] == [0, 360, 720]
