"""SIGTERM or SIGINT to any one rank: all save one checkpoint of the same step and exit with 3; a second one leaves."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import run_helpers
import run_patches
from run_helpers import LAYOUTS, Materials, events

from finetune.storage.checkpoint_files import list_checkpoints, verify
from finetune.training import control
from finetune.training.control import StopSignals

ZERO3 = {"finetuning": "full", **LAYOUTS["zero3_offload"]}


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    return run_helpers.make_materials(tmp_path_factory.mktemp("signals"))


@pytest.mark.parametrize(
    ("changes", "on_rank", "number"),
    [
        ({}, 1, signal.SIGTERM),
        pytest.param(ZERO3, 0, signal.SIGINT, marks=pytest.mark.slow),
    ],
    ids=["ddp", "zero3"],
)
def test_one_rank_gets_it_and_all_stop_at_the_same_step(
    materials, tmp_path, changes, on_rank, number
):
    """Where a checkpoint is due anyway: there is one."""
    output_dir, whole = tmp_path / "run", tmp_path / "whole"
    changes: dict[str, Any] = {"save_steps": 3, "save_total_limit": 9, **changes}
    wanted = materials.settings(output_dir, **changes)
    patch = {"patch": run_patches.signal_self, "patch_arguments": (on_rank, 3, int(number))}
    ranks = run_helpers.train(wanted, 2, expect=3, **patch)
    assert f"stopped by {number.name} at step 3" in ranks.output()
    status = run_helpers.status(output_dir)
    assert (status["state"], status["exit_code"], status["step"]) == ("stopped", 3, 3)
    assert status["checkpoint"] == "checkpoint-3"
    (event,) = events(output_dir, "signal")
    assert (event["step"], event["name"]) == (3, number.name)
    assert [folder.name for folder in list_checkpoints(output_dir)] == ["checkpoint-3"]
    assert verify(output_dir / "checkpoint-3").valid and len(events(output_dir, "checkpoint")) == 1
    assert not (output_dir / "adapter_model.safetensors").exists()

    run_helpers.train(wanted, 2)
    assert events(output_dir, "resume")[0]["checkpoint"] == "checkpoint-3"
    run_helpers.train(materials.settings(whole, **changes), 2)
    assert run_helpers.sample_ids(output_dir) == run_helpers.sample_ids(whole)
    run_helpers.assert_same_training(output_dir, whole)


def in_a_child(seconds: float) -> int:
    """Exit code of a process that gets two signals, which are one request for so long."""
    child = os.fork()
    if child == 0:
        control.SAME_REQUEST_SECONDS = seconds
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            os._exit(0 if stop.name == "SIGTERM" else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_second_signal_leaves_at_once_and_two_at_once_are_one():
    assert in_a_child(60.0) == 0
    assert in_a_child(0.0) == 128 + signal.SIGTERM


def test_handlers_are_put_back_where_no_launcher_is(monkeypatch):
    """A program that calls `finetune.run` again and again gets its own handlers, the very same."""
    monkeypatch.setattr(os, "write", lambda *_: 0)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with StopSignals() as stop:
        signal.raise_signal(signal.SIGINT)
    assert stop.name == "SIGINT"
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_signal_that_comes_twice_is_one_after_the_end_too(monkeypatch):
    """Linux signals a worker once per thread of its launcher that dies (kernel/exit.c)."""
    received: list[int] = []
    monkeypatch.setattr(os, "write", lambda *_: 0)
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with StopSignals(launched=True) as stop:
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert (stop.name, received) == ("SIGTERM", [])
        monkeypatch.setattr(control, "SAME_REQUEST_SECONDS", 0.0)
        for _ in range(2):  # another request, seconds later, is the program's own again
            signal.raise_signal(signal.SIGTERM)
        assert received == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigterm_to_torchrun_and_its_workers(materials, tmp_path):
    """What a batch system does. torchrun passes its own signal on: workers get it twice and still save."""
    output_dir = tmp_path / "run"
    with run_helpers.launch_torchrun(
        materials.settings(output_dir, max_steps=100_000), 2
    ) as launcher:
        log = output_dir / "trainer_log.jsonl"
        third = "the third step"
        run_helpers.wait_for(
            lambda: log.exists() and log.read_text().count("\n") > 2, 120, what=third
        )
        workers = run_helpers.workers(launcher.pid)
        assert len(workers) == 2
        run_helpers.send([launcher.pid, *workers], signal.SIGTERM)
        launcher.wait(60)
        run_helpers.wait_for(lambda: not run_helpers.alive(workers), what="the end of the workers")
    status = run_helpers.status(output_dir)
    assert (status["state"], status["exit_code"]) == ("stopped", 3)
    assert verify(output_dir / f"checkpoint-{status['step']}").valid
