"""The supervisor with real processes, whose workers train nothing."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import SimpleNamespace

import pytest
import run_helpers
from launching import ROOT, environment

from finetune.commands.launch import supervise
from finetune.commands.launch.launch_spec import LaunchSpec
from finetune.commands.launch.log import LaunchLog
from finetune.runtime.nodes import Nodes
from finetune.runtime.ports import LOOPBACK, free_port, hold_port
from finetune.storage.launch_record import LaunchRecord

WORKERS = ROOT / "tests" / "commands" / "launch" / "workers"


def _supervise(
    folder: Path, what: str, processes: int, node: str, variables: dict[str, str]
) -> None:
    """A supervisor whose workers train nothing, in a process of its own."""
    os.setsid()
    rank, _, port = node.partition(":")
    console = os.open(folder / f"console{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(console, 1)
    os.dup2(console, 2)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    own = environment({"PYTHONPATH": f"{WORKERS}:{ROOT}", **variables})
    os.environ.clear()
    os.environ.update(own)
    nodes = Nodes(2, int(rank), LOOPBACK, int(port)) if node else Nodes(1, 0, LOOPBACK, None)
    held = hold_port(nodes.port, address=LOOPBACK) if nodes.rank == 0 else None
    config = SimpleNamespace(resume="auto", output_dir=str(folder), timeout_seconds=60)
    flags = (str(folder), what)
    spec = LaunchSpec("worker", flags, config, "cpu", nodes, processes, 2, 60, os.environ)
    supervise.PEER_GRACE_SECONDS = 2.0
    with LaunchLog(folder / "logs" / f"launch{rank}.log") as log:
        code = supervise.Supervisor(spec, held, log, LaunchRecord(log.path, folder)).run()
    os._exit(code)


@contextlib.contextmanager
def launched(
    folder: Path, what: str, processes: int = 1, node: str = "", **variables: str
) -> Iterator[ForkProcess]:
    """A supervisor (`node`: RANK:PORT of one of two); what is left of it is killed."""
    from finetune.commands.launch import agent  # noqa: F401, once for all

    arguments = (folder, what, processes, node, variables)
    process = multiprocessing.get_context("fork").Process(target=_supervise, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()
        run_helpers.send(left_over(folder, node[:1]), signal.SIGKILL)


def code_of(process: ForkProcess, seconds: float = 120) -> int | None:
    process.join(seconds)
    return process.exitcode


def run(folder: Path, what: str, processes: int = 1) -> int | None:
    with launched(folder, what, processes) as process:
        return code_of(process)


def until(condition: Callable[[], object]):
    run_helpers.wait_for(condition, 120)


def said(folder: Path, node: str = "") -> str:
    console = folder / f"console{node}.txt"
    return console.read_text() if console.exists() else ""


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
    folder = tmp_path / "of ${local_rank}"  # torch elastic would substitute it
    folder.mkdir()
    assert run(folder, "done", 2) == 0 and len(started(folder, 0)) == len(started(folder, 1)) == 1
    assert said(folder).splitlines().count("[SUCCESS] done") == 2
    assert (folder / "logs" / "launch.log").read_text() == said(folder)
    facts = record(folder)
    assert facts["ended_at"] is not None and facts["log"] == "launch.log"
    found = [(each["role"], each["rank"], each["attempt"]) for each in facts["processes"]]
    assert found == [("supervisor", None, None), ("worker", 0, 1), ("worker", 1, 1)]


def test_a_failure_before_the_first_step_is_not_started_again(tmp_path: Path):
    """Its traceback is in the log, and the diagnosis on the console."""
    assert run(tmp_path, "crash") == 1 and len(started(tmp_path)) == 1
    console, log = said(tmp_path), (tmp_path / "logs" / "launch.log").read_text()
    assert "not started again: it failed before its first step" in console
    assert "Traceback" not in console and "RuntimeError: by order of the test" in console
    assert "Traceback (most recent call last)" in log
    assert "diagnosis" in console and f"{tmp_path}/logs/launch.log:" in console


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_once_and_the_checkpoint_waited_for(tmp_path, number):
    with launched(tmp_path, "wait", 2) as process:
        until(lambda: said(tmp_path).count("[INFO] waiting") == 2)
        # a shell passes its own on, and a batch system signals everybody: still one request
        os.kill(process.pid, number)
        os.kill(process.pid, signal.SIGTERM)
        assert code_of(process) == 3
    for rank in (0, 1):
        assert [line.partition(" ")[2] for line in notes(tmp_path, rank)[1:]] == [
            f"signal {int(number)}",
            "saved",
        ]
    assert f"[WARNING] {number.name}: the run saves a checkpoint and stops" in said(tmp_path)
    assert not left_over(tmp_path)


def test_a_second_signal_leaves_at_once(tmp_path: Path):
    with launched(tmp_path, "wait", 1, SAVE_SECONDS="300") as process:
        until(lambda: "[INFO] waiting" in said(tmp_path))
        os.kill(process.pid, signal.SIGTERM)
        until(lambda: len(notes(tmp_path)) == 2)
        assert code_of(process, 3.1) is None
        os.kill(process.pid, signal.SIGTERM)
        assert code_of(process) == 128 + signal.SIGTERM
        until(lambda: not left_over(tmp_path))
    assert "saved" not in " ".join(notes(tmp_path))


def test_nodes_are_started_again_together(tmp_path: Path):
    """The last rank, on node 1, runs out of memory."""
    port, what = free_port(), "exit4-others-wait"
    with (
        launched(tmp_path, what, 2, node=f"0:{port}") as first,
        launched(tmp_path, what, 1, node=f"1:{port}") as second,
    ):
        assert code_of(first) == code_of(second) == 0
    assert [len(started(tmp_path, rank)) for rank in range(3)] == [2, 2, 2]
    assert "[ERROR] on node 1 the workers ended with exit code 4" in said(tmp_path, "0")
    assert "[ERROR] rank 2 ended with exit code 4" in said(tmp_path, "1")
    for node in ("0", "1"):
        assert "restart 1 of 2: out of memory: it resumes with smaller" in said(tmp_path, node)
