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
    folder: Path, what: str, processes: int, resume: str, node: str, variables: dict[str, str]
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
    config = SimpleNamespace(resume=resume, output_dir=str(folder), timeout_seconds=60)
    flags = (str(folder), what)
    spec = LaunchSpec("worker", flags, config, "cpu", nodes, processes, 2, 60, os.environ)
    supervise.PEER_GRACE_SECONDS = 2.0
    supervise.REPORT_SECONDS = float(variables.get("REPORT_SECONDS", 60))
    with LaunchLog(folder / "logs" / f"launch{rank}.log") as log:
        code = supervise.Supervisor(spec, held, log, LaunchRecord(log.path, folder)).run()
    os._exit(code)


@contextlib.contextmanager
def launched(
    folder: Path, what: str, processes: int = 1, resume: str = "auto", node: str = "", **variables
) -> Iterator[ForkProcess]:
    """A supervisor (`node`: RANK:PORT of one of two); what is left of it is killed."""
    from finetune.commands.launch import agent  # noqa: F401, once for all

    arguments = (folder, what, processes, resume, node, variables)
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


def run(folder: Path, what: str, processes: int = 1, resume: str = "auto") -> int | None:
    with launched(folder, what, processes, resume) as process:
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


def test_a_failure_after_steps_is_started_again_from_what_is_there(tmp_path: Path):
    """The run was told not to resume; its second attempt must."""
    (tmp_path / "status.json").write_text("{}")
    assert run(tmp_path, "step-then-crash", 1, "never") == 0
    assert "restart 1 of 2: it had trained before" in said(tmp_path)
    first, second = started(tmp_path)
    assert not first.endswith("--resume auto") and second.endswith("--resume auto")
    found = [(each["role"], each["attempt"]) for each in record(tmp_path)["processes"]]
    assert found == [("supervisor", None), ("worker", 1), ("worker", 2)]


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


@contextlib.contextmanager
def two_nodes(folder: Path, what: str, **variables: str) -> Iterator[list[ForkProcess]]:
    """Node 0 with two workers, node 1 with one."""
    port = free_port()
    with (
        launched(folder, what, 2, node=f"0:{port}", **variables) as first,
        launched(folder, what, 1, node=f"1:{port}", **variables) as second,
    ):
        yield [first, second]


def test_nodes_are_started_again_together(tmp_path: Path):
    """The last rank, on node 1, runs out of memory."""
    with two_nodes(tmp_path, "exit4-others-wait") as nodes:
        assert [code_of(node) for node in nodes] == [0, 0]
    assert [len(started(tmp_path, rank)) for rank in range(3)] == [2, 2, 2]
    assert "[ERROR] on node 1 the workers ended with exit code 4" in said(tmp_path, "0")
    assert "[ERROR] rank 2 ended with exit code 4" in said(tmp_path, "1")
    for node in ("0", "1"):
        assert "restart 1 of 2: out of memory: it resumes with smaller" in said(tmp_path, node)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_launch_lets_its_workers_save(tmp_path: Path, killed: int):
    # the other launch need not wait long for a report of the killed one
    with two_nodes(tmp_path, "wait", REPORT_SECONDS="1") as nodes:
        until(lambda: (said(tmp_path, "0") + said(tmp_path, "1")).count("[INFO] waiting\n") == 3)
        nodes[killed].kill()
        until(lambda: not left_over(tmp_path, str(killed)))
        for rank in [0, 1] if killed == 0 else [2]:
            assert notes(tmp_path, rank)[-1] == "1 saved"
        assert record(tmp_path, str(killed))["ended_at"] is None
        # in training all ranks save together; here those of the other node are told by hand
        os.kill(nodes[1 - killed].pid, signal.SIGTERM)
        assert code_of(nodes[1 - killed]) == 3


def test_a_stop_before_all_nodes_are_there(tmp_path: Path):
    with launched(tmp_path, "done", 1, node=f"0:{free_port()}") as process:
        until(lambda: "waiting for 1 other" in said(tmp_path, "0"))
        os.kill(process.pid, signal.SIGINT)
        assert code_of(process) == 128 + signal.SIGINT
    assert not started(tmp_path)
