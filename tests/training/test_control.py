"""What ranks exchange: plain values and nothing that runs. And signals: a stop that all ranks make together."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest
import run_helpers
import run_patches
from run_helpers import events
from thread_ranks import Meeting, ThreadControl

from finetune.errors import FinetuneError
from finetune.runtime import parent_watchdog
from finetune.storage.checkpoint_files import list_checkpoints, verify
from finetune.training import control
from finetune.training.control import Control, StopSignals


def test_a_pickle_of_a_stranger_who_joined_does_not_run(materials, tmp_path: Path):
    """He is rank 1, and sends what torch's own collective for objects would unpickle."""
    proof = tmp_path / "it ran"
    patch = {"patch": run_patches.stranger, "patch_arguments": (str(proof),)}
    ranks = run_helpers.start(materials.settings(tmp_path / "run"), 2, **patch)
    assert ranks.wait() == [1, 0], ranks.output()
    assert not proof.exists(), "it ran"
    assert "rank 1 sent something that is not JSON" in ranks.output()


def exchange(rank: int, folder: str) -> None:
    """Instead of a run: what ranks give each other, and whether they know the same, written down."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    two = Control(2)
    two.check_equal({"a": 1})
    try:
        two.check_equal({"a": 1, "b": rank})
    except FinetuneError as error:
        (Path(folder) / f"{rank}.txt").write_text(error.what)
    run_patches.exchange(rank, folder)


def test_what_ranks_exchange_arrives_as_it_was(tmp_path: Path):
    patch = {"patch": exchange, "patch_arguments": (str(tmp_path),)}
    ranks = run_helpers.start({"output_dir": str(tmp_path / "run")}, 2, **patch)
    assert ranks.wait() == [0, 0], ranks.output()
    first, second = ((tmp_path / f"{rank}.json").read_text() for rank in (0, 1))
    assert first == second
    gathered, shared, sums, token = json.loads(first)
    numbers = "[1e-320, NaN, -0.0, 0.30000000000000004, Infinity, 1152921504606846977]"
    expected = [[0, "short", "", None], [1, json.loads(numbers), "x" * 1000, None]]
    assert json.dumps(gathered) == json.dumps(expected)
    assert (shared, sums) == ({"mine": 0}, [0.1 + 0.2, 1]) and len(token) == 12
    for rank in (0, 1):
        differing = (tmp_path / f"{rank}.txt").read_text()
        assert differing == "ranks do not have the same run: b is 0 on rank 0, 1 on rank 1"


@pytest.mark.parametrize("moves", [True, False])
def test_a_rank_whose_disk_does_not_answer_ends_the_run_on_all(monkeypatch, moves: bool):
    """No collective waits for a work: ranks ask again and again, as long as bytes move, however slowly."""
    monkeypatch.setattr(control, "POLL_SECONDS", 0.001)
    unmoved = 0.0 if moves else 3601.0
    monkeypatch.setattr(parent_watchdog.progress, "seconds_unmoved", lambda since: unmoved)
    meeting, late = Meeting(3), threading.Event()

    def rank(number: int) -> str:
        def work() -> tuple[str, bool]:
            if number == 1:
                run_helpers.wait_for(lambda: late.is_set() or meeting.calls["any"] > 9)
            return threading.current_thread().name, True

        try:
            return str(ThreadControl(meeting, timeout_seconds=3600).together(work).result())
        except FinetuneError as error:
            return str(error)

    found = meeting.run(rank)
    late.set()
    if moves:
        assert found == ["('together', True)"] * 3
    else:
        assert len(set(found)) == 1 and "neither read nor written anything for 3600 s" in found[0]


def test_one_rank_gets_it_and_all_stop_at_the_same_step(materials, tmp_path):
    """Where a checkpoint is due anyway: there is one."""
    output_dir = tmp_path / "run"
    patch = {"patch": run_patches.signal_self, "patch_arguments": (1, 3, signal.SIGTERM)}
    ranks = run_helpers.train(materials.settings(output_dir, save_steps=3), 2, expect=3, **patch)
    assert "stopped by SIGTERM at step 3" in ranks.output()
    status = run_helpers.status(output_dir)
    assert (status["state"], status["exit_code"], status["step"]) == ("stopped", 3, 3)
    assert status["checkpoint"] == "checkpoint-3"
    (event,) = events(output_dir, "signal")
    assert (event["step"], event["name"]) == (3, "SIGTERM")
    assert [folder.name for folder in list_checkpoints(output_dir)] == ["checkpoint-3"]
    assert verify(output_dir / "checkpoint-3").valid and len(events(output_dir, "checkpoint")) == 1
    assert not (output_dir / "adapter_model.safetensors").exists()


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


def test_a_signal_that_comes_twice_is_one_after_the_end_too(monkeypatch):
    """Linux signals a worker once per thread of its launcher that dies (kernel/exit.c). Without a
    launcher a program gets its own handlers back, the very same.
    """
    received: list[int] = []
    monkeypatch.setattr(os, "write", lambda *_: 0)
    handler = lambda number, _: received.append(number)  # noqa: E731
    before = signal.signal(signal.SIGTERM, handler)
    try:
        with StopSignals() as alone:
            signal.raise_signal(signal.SIGTERM)
        assert alone.name == "SIGTERM" and signal.getsignal(signal.SIGTERM) is handler
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
