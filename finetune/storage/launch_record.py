"""`<log>.processes.json`: the processes that a launch started, so that `clean` can identify those
left.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from finetune.runtime.process_start import ProcessStart, is_same_start, process_start
from finetune.storage.durable_files import replace_file
from finetune.storage.run_lock import now_utc

VERSION = 1
# For records without ticks: start times are computed from the boot time, which corrections of the
# clock move a little.
SAME_START_SECONDS = 2.0
# Between fork and the end of exec a process has no command line: for milliseconds.
COMMAND_WAIT_SECONDS = 1.0


@dataclass(frozen=True)
class StartedProcess:
    """One process; docs/guides/launching.md describes the fields."""

    pid: int
    start_time: float
    command_digest: str | None
    role: str
    rank: int | None
    attempt: int | None
    host: str
    boot_id: str | None
    start_ticks: int | None


def command_digest(arguments: list[str]) -> str:
    return hashlib.sha256("\0".join(arguments).encode("utf-8", "surrogateescape")).hexdigest()


def describe(
    pid: int, role: str, *, rank: int | None = None, attempt: int | None = None
) -> StartedProcess | None:
    """Describe a process so that a later one with the same id can be distinguished; None if it is
    gone already.
    """
    try:
        process = psutil.Process(pid)
        start, start_time = process_start(pid), process.create_time()
        digest = _digest(process)
    except psutil.Error:
        return None
    host = socket.gethostname()
    return StartedProcess(
        pid, start_time, digest, role, rank, attempt, host, start.boot_id, start.start_ticks
    )


def _digest(process: psutil.Process) -> str | None:
    """Return the digest of the command line; None if the process shows none."""
    deadline = time.monotonic() + COMMAND_WAIT_SECONDS
    while not (arguments := process.cmdline()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return command_digest(arguments) if arguments else None


class LaunchRecord:
    """The list, in memory and in its file, which is next to `log`."""

    def __init__(self, log: Path, output_dir: Path) -> None:
        self.path = log.with_suffix(".processes.json")
        self._facts = {
            "version": VERSION,
            "log": log.name,
            "output_dir": str(output_dir.absolute()),
            "started_at": now_utc(),
            "ended_at": None,
        }
        self._processes: list[StartedProcess] = []
        self._add(os.getpid(), "supervisor", None, None)
        self._write()

    def _add(self, pid: int, role: str, rank: int | None, attempt: int | None) -> None:
        process = describe(pid, role, rank=rank, attempt=attempt)
        if process is not None:
            self._processes.append(process)

    def add_workers(self, pids: Mapping[int, int], attempt: int) -> None:
        """Note the workers of an attempt, given as process ids by global rank, and write the
        file.
        """
        for rank, pid in pids.items():
            self._add(pid, "worker", rank, attempt)
        self._write()

    def end(self) -> None:
        self._facts["ended_at"] = now_utc()
        self._write()

    def kill(self) -> None:
        """SIGKILL to every worker that still runs."""
        for process in self._processes:
            if process.role == "worker" and still_runs(process):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)

    def _write(self) -> None:
        content = self._facts | {"processes": [asdict(process) for process in self._processes]}
        # Never writable for other users, with any umask: `clean` may end what it names.
        replace_file(self.path, (json.dumps(content, indent=1) + "\n").encode(), mode=0o644)


def still_runs(process: StartedProcess) -> bool:
    """Return whether the process is alive, and not another one with the same id."""
    try:
        found = psutil.Process(process.pid)
        same = is_same_start(process.pid, ProcessStart(process.boot_id, process.start_ticks))
        if same is None:
            same = abs(found.create_time() - process.start_time) < SAME_START_SECONDS
        return same and found.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
