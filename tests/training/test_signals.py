"""SIGTERM or SIGINT to any one rank: all save one checkpoint of the same step and exit with 3; a
second one leaves.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import run_patches
import torch
from run_helpers import LAYOUTS, Materials

from finetune.storage.checkpoint_files import list_checkpoints, verify
from finetune.training import control
from finetune.training.control import SAME_REQUEST_SECONDS, StopSignals

STEPS = 6
LAYOUT = {"ddp": {}, "zero3": {"finetuning": "full", **LAYOUTS["zero3_offload"]}}


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    return run_helpers.make_materials(tmp_path_factory.mktemp("signals"))


@pytest.fixture(scope="module")
def uninterrupted(materials: Materials):
    """Output folder of the run that nobody stopped, by layout."""
    made: dict[str, Path] = {}

    def get(layout: str) -> Path:
        if layout not in made:
            made[layout] = materials.folder / f"uninterrupted-{layout}"
            run_helpers.train(settings(materials, made[layout], layout), 2)
        return made[layout]

    return get


def settings(materials: Materials, output_dir: Path, layout: str) -> dict[str, Any]:
    return materials.settings(output_dir, max_steps=STEPS, **LAYOUT[layout])


def assert_stopped(output_dir: Path, step: int, name: str) -> None:
    status = run_helpers.status(output_dir)
    assert (status["state"], status["exit_code"], status["step"]) == ("stopped", 3, step)
    assert status["checkpoint"] == f"checkpoint-{step}"
    (event,) = run_helpers.events(output_dir, "signal")
    assert (event["step"], event["name"]) == (step, name)
    assert [folder.name for folder in list_checkpoints(output_dir)] == [f"checkpoint-{step}"]
    assert verify(output_dir / f"checkpoint-{step}").valid


def assert_same_run(output_dir: Path, other: Path) -> None:
    """Ids, losses and the bits of the result."""
    assert run_helpers.sample_ids(output_dir) == run_helpers.sample_ids(other)
    assert run_helpers.losses(output_dir) == run_helpers.losses(other)
    first, second = run_helpers.result_weights(output_dir), run_helpers.result_weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("layout", "on_rank", "number"),
    [
        pytest.param("ddp", 0, signal.SIGINT, marks=pytest.mark.slow),
        ("ddp", 1, signal.SIGTERM),
        ("zero3", 0, signal.SIGINT),
        pytest.param("zero3", 1, signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_one_rank_is_told_and_all_stop_at_the_same_step(
    materials, uninterrupted, tmp_path, layout, on_rank, number
):
    output_dir = tmp_path / "run"
    wanted = settings(materials, output_dir, layout)
    ranks = run_helpers.train(
        wanted,
        2,
        expect=3,
        patch=run_patches.signal_self,
        patch_arguments=(on_rank, 3, int(number)),
    )
    assert_stopped(output_dir, 3, number.name)
    assert f"stopped by {number.name} at step 3" in ranks.output()
    assert not (output_dir / "adapter_model.safetensors").exists()

    run_helpers.train(wanted, 2)
    assert run_helpers.events(output_dir, "resume")[0]["checkpoint"] == "checkpoint-3"
    assert_same_run(output_dir, uninterrupted(layout))


def test_a_signal_in_the_last_step_leaves_a_finished_run(materials, uninterrupted, tmp_path):
    """The last checkpoint is there; the next start only writes the output."""
    output_dir = tmp_path / "run"
    wanted = settings(materials, output_dir, "ddp")
    run_helpers.train(
        wanted,
        2,
        expect=3,
        patch=run_patches.signal_self,
        patch_arguments=(0, STEPS, signal.SIGTERM),
    )
    assert_stopped(output_dir, STEPS, "SIGTERM")
    run_helpers.train(wanted, 2)
    assert run_helpers.status(output_dir)["state"] == "done"
    assert_same_run(output_dir, uninterrupted("ddp"))


def test_a_signal_where_a_checkpoint_was_due_anyway(materials, uninterrupted, tmp_path):
    output_dir = tmp_path / "run"
    wanted = settings(materials, output_dir, "ddp") | {"save_steps": 3}
    run_helpers.train(
        wanted, 2, expect=3, patch=run_patches.signal_self, patch_arguments=(1, 3, signal.SIGTERM)
    )
    assert_stopped(output_dir, 3, "SIGTERM")
    assert len(run_helpers.events(output_dir, "checkpoint")) == 1
    run_helpers.train(wanted, 2)
    assert_same_run(output_dir, uninterrupted("ddp"))


def test_a_second_signal_leaves_at_once(materials, uninterrupted, tmp_path):
    """Nothing is saved; the peer does not hang; the next start begins anew."""
    output_dir = tmp_path / "run"
    wanted = settings(materials, output_dir, "ddp")
    twice = (1, 3, signal.SIGTERM, SAME_REQUEST_SECONDS + 0.1)
    ranks = run_helpers.start(wanted, 2, patch=run_patches.signal_self, patch_arguments=twice)
    codes = ranks.wait(60)
    assert codes[1] == 128 + signal.SIGTERM
    assert codes[0] != 0
    assert list_checkpoints(output_dir) == []
    run_helpers.train(wanted, 2)
    assert_same_run(output_dir, uninterrupted("ddp"))


def test_handlers_are_put_back_where_no_launcher_is(monkeypatch):
    """A program that calls `finetune.run` again and again gets its own handlers, the very same."""
    monkeypatch.setattr(os, "write", lambda *_: 0)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with StopSignals() as stop:
        signal.raise_signal(signal.SIGINT)
    assert stop.name == "SIGINT"
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_signal_that_comes_twice_is_one_after_the_end_too(monkeypatch):
    """Linux tells a worker of its launcher's death once per thread of it (kernel/exit.c,
    forget_original_parent).
    """
    heard: list[int] = []
    monkeypatch.setattr(os, "write", lambda *_: 0)
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with StopSignals(launched=True) as stop:
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert (stop.name, heard) == ("SIGTERM", [])
        monkeypatch.setattr(control, "SAME_REQUEST_SECONDS", 0.0)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM] * 2, (
            "another request, seconds later, is the program's own again"
        )
    finally:
        signal.signal(signal.SIGTERM, before)


def test_one_process_without_a_launcher(materials, tmp_path):
    output_dir = tmp_path / "run"
    wanted = settings(materials, output_dir, "ddp")
    run_helpers.train(
        wanted, 1, expect=3, patch=run_patches.signal_self, patch_arguments=(0, 2, signal.SIGINT)
    )
    assert_stopped(output_dir, 2, "SIGINT")


def test_sigterm_to_torchrun_and_its_workers(materials, tmp_path):
    """What a batch system does. torchrun passes its own signal on, so that workers get it twice:
    they still save.
    """
    output_dir = tmp_path / "run"
    wanted = settings(materials, output_dir, "ddp") | {"max_steps": 100_000}
    with run_helpers.launch_torchrun(wanted, 2) as launcher:
        log = output_dir / "trainer_log.jsonl"
        run_helpers.wait_for(
            lambda: log.exists() and log.read_text().count("\n") > 2, 120, what="the third step"
        )
        workers = run_helpers.workers(launcher.pid)
        assert len(workers) == 2
        run_helpers.send([launcher.pid, *workers], signal.SIGTERM)
        launcher.wait(60)
        run_helpers.wait_for(lambda: not run_helpers.alive(workers), what="the end of the workers")
    status = run_helpers.status(output_dir)
    assert (status["state"], status["exit_code"]) == ("stopped", 3)
    assert verify(output_dir / f"checkpoint-{status['step']}").valid
