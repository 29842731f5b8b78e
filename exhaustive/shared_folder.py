"""For tests: a folder that nodes share by a network file system (network_file_system.py), and
processes on them.

The mounts are served by a process of their own, which also takes them away when the test is gone:

    python exhaustive/shared_folder.py FOLDER FLOCK NODE0 NODE1    # takes JSON, a line at a time, and
    answers each
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fuse_connection import leave_mounts, mount_bound, why_not

TESTS = Path(__file__).resolve().parent

__all__ = ["SharedFolder", "why_not"]


class SharedFolder:
    """A context manager: a folder, and how each node sees it.

    Args:
        place: an empty folder, or a new one, for the folder and the mounts.
        flock: "server", or "kernel": each node grants it by itself, as with local_lock=flock.
        settings: see network_file_system.Settings.

    Attributes:
        disk: the folder itself, as the server has it.
        nodes: the same, as each node sees it.
    """

    def __init__(
        self, place: Path, nodes: int = 2, *, flock_by: str = "server", **settings: Any
    ) -> None:
        self.disk, self.nodes = place / "disk", [place / f"node{number}" for number in range(nodes)]
        self._flock_by, self._settings = flock_by, settings
        self.lag_seconds = settings.get("lag_seconds", 0.0)
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> SharedFolder:
        for folder in (self.disk, *self.nodes):
            folder.mkdir(parents=True, exist_ok=True)
        words = [
            str(TESTS / "shared_folder.py"),
            str(self.disk),
            self._flock_by,
            *map(str, self.nodes),
        ]
        self._server = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._answer()
        self.set(**self._settings)
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None and self._server.stdin is not None:
            print(json.dumps({"end": True}), file=self._server.stdin, flush=True)
            self._server.wait(30)

    def _answer(self) -> None:
        assert self._server is not None and self._server.stdout is not None
        answer = self._server.stdout.readline()
        assert answer == "ready\n", f"the file system's server says {answer!r}"

    def _tell(self, **what: Any) -> None:
        assert self._server is not None and self._server.stdin is not None
        print(json.dumps(what), file=self._server.stdin, flush=True)
        self._answer()

    def set(self, **settings: Any) -> None:
        """Change how it behaves; see network_file_system.Settings."""
        self._tell(settings=settings)

    def fail(self, operation: str, number: int, name: str = "", **rest: Any) -> None:
        """Let an operation fail; see network_file_system.Fault."""
        self._tell(fault={"operation": operation, "number": number, "name": name, **rest})

    def pause(self, seconds: float) -> None:
        """Answer nothing for so long."""
        self._tell(pause=seconds)

    def heal(self) -> None:
        """No fault any more."""
        self._tell(heal=True)


def on_node(rank: int, nodes: tuple[str, ...], onto: str) -> None:
    """Make this process one of node `rank` (by turns): its own mounts and host name, the shared
    folder at `onto`.
    """
    number = rank % len(nodes)
    leave_mounts(f"node{number}")
    mount_bound(Path(nodes[number]), Path(onto))


def _serve(folder: Path, flock_by: str, targets: list[Path]) -> None:
    from network_file_system import Client, Fault, Server

    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    os.umask(0)
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: not to outlive the test
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server = Server()
    clients: list[Client] = []
    try:
        for number, target in enumerate(targets):
            clients.append(Client(server, folder, target, number, flock=flock_by == "server"))
        print("ready", flush=True)
        while os.getppid() == parent and (line := sys.stdin.readline()):
            told = json.loads(line)
            if "end" in told:
                break
            for name, value in told.get("settings", {}).items():
                assert hasattr(server.settings, name), name
                setattr(server.settings, name, value)
            if "fault" in told:
                server.faults.append(Fault(**told["fault"]))
            if "heal" in told:
                server.faults.clear()
            if "pause" in told:
                server.paused_until = time.monotonic() + told["pause"]
            print("ready", flush=True)
    finally:
        for client in clients:
            client.connection.unmount()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.argv[2], [Path(word) for word in sys.argv[3:]])
