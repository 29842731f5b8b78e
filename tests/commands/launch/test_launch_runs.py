"""The supervisor with real processes, whose workers train nothing: restarts, signals, kills and
what is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import run_helpers
from launching import ROOT, environment

from finetune.runtime.ports import free_port

WORKERS = ROOT / "tests" / "commands" / "launch" / "workers"
WAIT_SECONDS = 120


@contextlib.contextmanager
def launched(
    folder: Path, what: str, processes: int = 1, *more: str, node: str = "", **variables: str
) -> Iterator[subprocess.Popen]:
    """`drive.py` at work; whatever is left of it at the end is killed, as its record tells."""
    variables |= {"NODE": node} if node else {}
    env = environment({"PYTHONPATH": f"{WORKERS}:{ROOT}", **variables})
    words = [sys.executable, str(WORKERS / "drive.py"), str(folder), what, str(processes), *more]
    with (folder / f"console{node[:1]}.txt").open("wb") as console:
        process = subprocess.Popen(
            words, env=env, stdout=console, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        run_helpers.send(left_over(folder, node[:1]), signal.SIGKILL)


def run(folder: Path, what: str, processes: int = 1, *more: str) -> int:
    with launched(folder, what, processes, *more) as process:
        return process.wait(WAIT_SECONDS)


def said(folder: Path, node: str = "") -> str:
    return (folder / f"console{node}.txt").read_text()


def record(folder: Path, node: str = "") -> dict:
    return json.loads((folder / "logs" / f"launch{node}.processes.json").read_text())


def left_over(folder: Path, node: str = "") -> list[int]:
    """Recorded processes that still run."""
    with contextlib.suppress(FileNotFoundError):
        return run_helpers.alive([process["pid"] for process in record(folder, node)["processes"]])
    return []


def notes(folder: Path, rank: int = 0) -> list[str]:
    path = folder / f"rank{rank}.txt"
    return path.read_text().splitlines() if path.exists() else []


def started(folder: Path, rank: int = 0) -> list[str]:
    return [line for line in notes(folder, rank) if " started " in line]


def test_done_and_what_is_recorded(tmp_path: Path):
    assert run(tmp_path, "done", 2) == 0
    assert said(tmp_path).splitlines().count("[SUCCESS] done") == 2
    assert (tmp_path / "logs" / "launch.log").read_text() == said(tmp_path), (
        "console and file say the same"
    )
    facts = record(tmp_path)
    assert facts["ended_at"] is not None and facts["log"] == "launch.log"
    assert [(p["role"], p["rank"], p["attempt"]) for p in facts["processes"]] == [
        ("supervisor", None, None), ("worker", 0, 1), ("worker", 1, 1)
    ]  # fmt: skip


def test_out_of_memory_is_started_again_and_resumes(tmp_path: Path):
    """The second rank ends with the code for it; all ranks of the second attempt are new
    processes.
    """
    assert run(tmp_path, "exit4", 2) == 0
    assert "[ERROR] rank 1 ended with exit code 4" in said(tmp_path)
    assert "[WARNING] restart 1 of 2: out of memory: it resumes with smaller microbatches" in said(
        tmp_path
    )
    assert len(started(tmp_path, 0)) == len(started(tmp_path, 1)) == 2
    assert [p["attempt"] for p in record(tmp_path)["processes"] if p["role"] == "worker"] == [
        1,
        1,
        2,
        2,
    ]


def test_a_refused_run_is_not_started_again(tmp_path: Path):
    assert run(tmp_path, "exit2") == 2
    assert len(started(tmp_path)) == 1 and "restart" not in said(tmp_path)
    assert "not started again: it was refused" in said(tmp_path)


def test_a_failure_before_the_first_step_is_not_started_again_and_its_traceback_is_in_the_log(
    tmp_path: Path,
):
    assert run(tmp_path, "crash") == 1
    assert len(started(tmp_path)) == 1
    console, log = said(tmp_path), (tmp_path / "logs" / "launch.log").read_text()
    assert "not started again: it failed before its first step" in console
    assert "Traceback" not in console and "RuntimeError: by order of the test" in console
    assert "Traceback (most recent call last)" in log
    assert "diagnosis" in console and f"{tmp_path}/logs/launch.log:" in console


def test_a_failure_after_steps_is_started_again_from_what_is_there(tmp_path: Path):
    """The run was told not to resume; its second attempt must."""
    (tmp_path / "status.json").write_text("{}")
    assert run(tmp_path, "step-then-crash", 1, "never") == 0
    assert "restart 1 of 2: it had trained before" in said(tmp_path)
    first, second = started(tmp_path)
    assert not first.endswith("--resume auto") and second.endswith("--resume auto")


def test_a_killed_worker_is_started_again(tmp_path: Path):
    assert run(tmp_path, "killed") == 0
    assert "[ERROR] rank 0 was ended by SIGKILL" in said(tmp_path)
    assert "restart 1 of 2" in said(tmp_path) and len(started(tmp_path)) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_once_and_the_checkpoint_waited_for(
    tmp_path: Path, number: signal.Signals
):
    with launched(tmp_path, "wait", 2) as process:
        run_helpers.wait_for(lambda: said(tmp_path).count("[INFO] waiting") == 2, WAIT_SECONDS)
        # a shell passes its own on, and a batch system signals everybody: still one request
        process.send_signal(number)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == 3
    for rank in (0, 1):
        assert [line.partition(" ")[2] for line in notes(tmp_path, rank)[1:]] == [
            f"signal {int(number)}",
            "saved",
        ]
    assert f"[WARNING] {number.name}: the run saves a checkpoint and stops" in said(tmp_path)
    assert not left_over(tmp_path)


def test_a_second_signal_leaves_at_once(tmp_path: Path):
    with launched(tmp_path, "wait", 1, SAVE_SECONDS="300") as process:
        run_helpers.wait_for(lambda: "[INFO] waiting" in said(tmp_path), WAIT_SECONDS)
        process.send_signal(signal.SIGTERM)
        run_helpers.wait_for(
            lambda: len(notes(tmp_path)) == 2, WAIT_SECONDS, what="the worker's signal"
        )
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == 128 + signal.SIGTERM
        run_helpers.wait_for(lambda: not left_over(tmp_path), WAIT_SECONDS, what="the end of all")
    assert "saved" not in " ".join(notes(tmp_path))


def test_a_killed_supervisor_leaves_nothing_behind_and_the_workers_save(tmp_path: Path):
    with launched(tmp_path, "wait", 1) as process:
        run_helpers.wait_for(lambda: "[INFO] waiting" in said(tmp_path), WAIT_SECONDS)
        roles = [entry["role"] for entry in record(tmp_path)["processes"]]
        assert roles == ["supervisor", "worker"] and len(left_over(tmp_path)) == 2
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        run_helpers.wait_for(lambda: not left_over(tmp_path), WAIT_SECONDS, what="the end of all")
    assert notes(tmp_path)[-1] == "1 saved"
    assert record(tmp_path)["ended_at"] is None


# ---------------------------------------------------------------- two nodes


@contextlib.contextmanager
def two_nodes(folder: Path, what: str) -> Iterator[list[subprocess.Popen]]:
    """Node 0 with two workers, node 1 with one."""
    port = free_port()
    with (
        launched(folder, what, 2, node=f"0:{port}") as first,
        launched(folder, what, 1, node=f"1:{port}") as second,
    ):
        if what == "wait":
            run_helpers.wait_for(lambda: len(waiting(folder)) == 3, WAIT_SECONDS)
        yield [first, second]


def waiting(folder: Path) -> list[int]:
    """Process ids of the workers that wait, by rank."""
    if (said(folder, "0") + said(folder, "1")).count("[INFO] waiting\n") < 3:
        return []
    return [int(started(folder, rank)[-1].split()[2]) for rank in range(3)]


def test_nodes_are_started_again_together(tmp_path: Path):
    """The last rank, on node 1, runs out of memory."""
    with two_nodes(tmp_path, "exit4-others-wait") as nodes:
        assert [node.wait(WAIT_SECONDS) for node in nodes] == [0, 0]
    assert [len(started(tmp_path, rank)) for rank in range(3)] == [2, 2, 2]
    assert "[ERROR] on node 1 the workers ended with exit code 4" in said(tmp_path, "0")
    assert "[ERROR] rank 2 ended with exit code 4" in said(tmp_path, "1")
    for node in ("0", "1"):
        assert "restart 1 of 2: out of memory: it resumes with smaller" in said(tmp_path, node)


def test_a_node_that_is_refused_stops_the_others(tmp_path: Path):
    with two_nodes(tmp_path, "exit2-others-wait") as nodes:
        assert [node.wait(WAIT_SECONDS) for node in nodes] == [2, 2]
    assert [len(started(tmp_path, rank)) for rank in range(3)] == [1, 1, 1]


def test_a_failure_on_one_node_ends_the_workers_of_the_other(tmp_path: Path, monkeypatch):
    with two_nodes(tmp_path, "wait") as nodes:
        os.kill(waiting(tmp_path)[2], signal.SIGKILL)
        # node 0's would wait for ever: they are ended, and all nodes start again
        run_helpers.wait_for(lambda: len(started(tmp_path, 2)) == 2, WAIT_SECONDS)
        run_helpers.wait_for(lambda: len(started(tmp_path, 0)) == 2, WAIT_SECONDS)
        assert "[ERROR] rank 2 was ended by SIGKILL" in said(tmp_path, "1")
        assert "on node 1 the workers ended with exit code 1" in said(tmp_path, "0")
        run_helpers.wait_for(
            lambda: (said(tmp_path, "0") + said(tmp_path, "1")).count("[INFO] waiting\n") == 6,
            WAIT_SECONDS,
        )
        for node in nodes:
            node.send_signal(signal.SIGTERM)
        assert [node.wait(WAIT_SECONDS) for node in nodes] == [3, 3]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_launch_lets_its_workers_save(tmp_path: Path, killed: int):
    with two_nodes(tmp_path, "wait") as nodes:
        nodes[killed].kill()
        ranks = [0, 1] if killed == 0 else [2]
        run_helpers.wait_for(
            lambda: not left_over(tmp_path, str(killed)),
            WAIT_SECONDS,
            what="the end of its workers",
        )
        assert [notes(tmp_path, rank)[-1] for rank in ranks] == ["1 saved"] * len(ranks)
        # in training all ranks save together; here those of the other node are told by hand
        nodes[1 - killed].send_signal(signal.SIGTERM)
        assert nodes[1 - killed].wait(WAIT_SECONDS) == 3


def test_a_stop_before_all_nodes_are_there(tmp_path: Path):
    with launched(tmp_path, "done", 1, node=f"0:{free_port()}") as process:
        run_helpers.wait_for(lambda: "waiting for 1 other" in said(tmp_path, "0"), WAIT_SECONDS)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_SECONDS) == 128 + signal.SIGINT
    assert not started(tmp_path)
