"""One run at a time in a folder, and no worker without its launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import run_helpers
import run_patches
from launching import environment
from run_helpers import Materials

from finetune.runtime import parent_watchdog
from finetune.runtime.parent_watchdog import Progress, Stop
from finetune.storage.checkpoint_files import verify


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    return run_helpers.make_materials(tmp_path_factory.mktemp("orphans"))


def logged_steps(output_dir: Path) -> int:
    log = output_dir / "trainer_log.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def test_no_worker_trains_on_when_the_launcher_is_killed(materials, tmp_path):
    """torch elastic starts workers in sessions of their own; they save."""
    output_dir = tmp_path / "run"
    settings = materials.settings(output_dir, max_steps=100_000)
    with run_helpers.launch_torchrun(settings, 2) as launcher:
        run_helpers.wait_for(lambda: logged_steps(output_dir) > 2, 120, what="the third step")
        workers = run_helpers.workers(launcher.pid)
        assert len(workers) == 2
        try:
            os.kill(launcher.pid, signal.SIGKILL)
            run_helpers.wait_for(lambda: not run_helpers.alive(workers), 60)
        finally:
            run_helpers.send(run_helpers.alive(workers), signal.SIGKILL)
    status = run_helpers.status(output_dir)
    assert (status["state"], status["exit_code"]) == ("stopped", 3)
    assert verify(output_dir / f"checkpoint-{status['step']}").valid


ORPHAN = """
import signal, sys, time
from pathlib import Path
from finetune.runtime import parent_watchdog
from finetune.runtime.launch_environment import LaunchWorld
folder, what, told = Path(sys.argv[1]), sys.argv[2], []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
parent_watchdog.PARENT_CHECK_SECONDS = 0.05
parent_watchdog.PARENT_GRACE_SECONDS = parent_watchdog.progress._patience_seconds = 0.2
parent_watchdog.die_with_launcher(LaunchWorld(0, 0, 1, 1, launched=True))
if what == "step":
    parent_watchdog.progress.begin_step(limit_seconds=600)
(folder / "ready").touch()
while not told:
    time.sleep(0.01)
time.sleep(600 if what == "hang" else 1)
(folder / "saved").touch()
"""


@pytest.mark.parametrize(("what", "saved"), [("step", True), ("hang", False)])
def test_an_orphan_finishes_its_step_and_one_that_hangs_is_ended(what, saved, tmp_path):
    start = "import subprocess as s, sys; print(s.Popen([sys.executable, '-c', *sys.argv[1:]]).pid,"
    words = [sys.executable, "-c", start + " flush=True); input()", ORPHAN, str(tmp_path), what]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env=environment(), **pipes) as launcher:
        orphan = int(launcher.stdout.readline())
        try:
            run_helpers.wait_for((tmp_path / "ready").exists, what="the worker")
            launcher.kill()
            run_helpers.wait_for(lambda: not run_helpers.alive([orphan]))
        finally:
            run_helpers.send(run_helpers.alive([orphan]), signal.SIGKILL)
    assert (tmp_path / "saved").exists() == saved


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(parent_watchdog, "time", clock)
    monkeypatch.setattr(parent_watchdog, "progress", Progress())
    return clock


def stuck_after(clock: SimpleNamespace) -> float:
    """Seconds without any progress, from now on, until the watch ends the process."""
    stop, begin = Stop(), clock.now
    while not stop.is_stuck():
        clock.now += 1
    return clock.now - begin - 1


def test_patience_is_of_the_runs_own_step_time(clock):
    watched = parent_watchdog.progress
    assert stuck_after(clock) == 60, "nothing is known of it"
    watched.begin_step(limit_seconds=1800)
    assert stuck_after(clock) == 1860, "the first step may compile"
    watched.end_step()
    for _ in range(parent_watchdog.RECENT_STEPS):
        watched.begin_step(1800)
        clock.now += 300
        watched.end_step()
    assert stuck_after(clock) == 900, "its first step is forgotten"
    watched.begin_step(1800)
    clock.now += 400
    assert stuck_after(clock) == 900, "from the stop on, not from before it"
    watched.begin_save(1800)
    assert stuck_after(clock) == 1860


def test_what_writes_is_not_stuck(clock, tmp_path):
    """A save of hundreds of gigabytes is one call, and so is its verification."""
    stop = Stop()
    for _ in range(5):
        clock.now += 50
        (tmp_path / "weights").write_bytes(bytes(2 << 20))
        assert not stop.is_stuck()
    clock.now += 50
    (tmp_path / "weights").read_bytes()
    assert not stop.is_stuck()
    clock.now += 61
    assert stop.is_stuck()


def test_a_second_run_in_the_folder_waits_and_is_refused_or_goes_on(materials, tmp_path):
    """From what the other left there: it had looked at the folder before the other saved."""
    output_dir = tmp_path / "run"
    settings = materials.settings(output_dir, max_steps=60)
    first = run_helpers.start(settings, patch=run_patches.pause_steps, patch_arguments=(0.3,))
    try:
        run_helpers.wait_for(lambda: logged_steps(output_dir) > 0, what="the first step")
        patch = {"patch": run_patches.short_lock_wait, "patch_arguments": (1.0,)}
        output = run_helpers.train(settings, expect=2, **patch).output()
        assert "waiting up to 1 s" in output and "another run works in this folder" in output
        assert str(first.pids[0]) in output
        assert first.processes[0].exitcode is None, "the run at work was disturbed"
        second = run_helpers.start(settings)
        run_helpers.wait_for(lambda: "waiting up to" in second.output())
        run_helpers.send(first.pids, signal.SIGTERM)
        assert first.wait() == [3]
        assert second.wait() == [0], second.output()
    finally:
        first.kill()
    stopped = run_helpers.events(output_dir, "signal")[0]["step"]
    assert [event["step"] for event in run_helpers.events(output_dir, "resume")] == [stopped]
    assert len(run_helpers.sample_ids(output_dir)) == len(run_helpers.losses(output_dir)) == 60


def test_ranks_agree_about_their_folder_and_data(materials, tmp_path):
    """A first rank that makes the folder before the second looks; two nodes whose files differ."""
    slow, other = tmp_path / "slow", tmp_path / "other"
    settings = materials.settings(slow, resume="never", max_steps=1)
    run_helpers.train(settings, 2, patch=run_patches.delay, patch_arguments=(1, 2.0))
    assert run_helpers.status(slow)["state"] == "done"
    data = run_helpers.make_data(tmp_path / "other.jsonl", 60, seed=9)
    patch = {"patch": run_patches.other_data, "patch_arguments": (1, str(data), 2.0)}
    output = run_helpers.train(materials.settings(other), 2, expect=1, **patch).output()
    assert "rank 1" in output and "data" in output
    assert not (other / "trainer_log.jsonl").exists()
