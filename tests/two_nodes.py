"""Two nodes on one machine: network namespaces, joined by a cable that can be pulled."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
from launching import BIN, ROOT, environment

ADDRESSES = ("10.213.7.1", "10.213.7.2")


def why_not() -> str:
    """Why namespaces cannot be made here; empty where they can."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "needs Linux and iproute2 (ip netns)"
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    name = f"finetune-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


class TwoNodes:
    """The namespaces and what runs in them, until the end of a `with`."""

    def __init__(self, logs: Path) -> None:
        self.names = tuple(f"finetune-{os.getpid()}-{node}" for node in (0, 1))
        self.links = tuple(f"ft{os.getpid() % 10**7}x{node}" for node in (0, 1))
        self.logs = logs
        self.started: list[subprocess.Popen] = []

    def __enter__(self) -> TwoNodes:
        try:
            for name in self.names:
                _ip("netns", "add", name)
            _ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
            for name, link, address in zip(self.names, self.links, ADDRESSES, strict=True):
                _ip("link", "set", link, "netns", name)
                _ip("-n", name, "address", "add", f"{address}/24", "dev", link)
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "link", "set", link, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.wait()
        self._kill_recorded()
        known = {line.split()[0] for line in _ip("netns", "list").splitlines() if line}
        for name in self.names:
            if name in known:
                _ip("netns", "delete", name)  # with its end of the cable, and so the other

    def _kill_recorded(self) -> None:
        """What a killed supervisor would take a minute to be rid of."""
        for path in self.logs.glob("*.processes.json"):
            for recorded in json.loads(path.read_text())["processes"]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process = psutil.Process(recorded["pid"])
                    if abs(process.create_time() - recorded["start_time"]) < 2:
                        process.kill()

    def cable(self, state: str) -> None:
        """`down` pulls the cable, `up` puts it back."""
        _ip("-n", self.names[1], "link", "set", self.links[1], state)

    def start(
        self, node: int, words: Sequence[str], output: Path, env: Mapping[str, str] | None = None
    ):
        """Start a command on a node."""
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        with output.open("wb") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.names[node], *words],
                cwd=ROOT,
                env=environment({"PATH": path, **(env or {})}),
                stdout=file,
                stderr=file,
            )
        self.started.append(process)
        return process

    @contextlib.contextmanager
    def port_taken(self, port: int) -> Iterator[None]:
        """Let another program listen at a port of node 0 without ever answering."""
        code = f"import socket, time; s = socket.create_server(('', {port})); print('ready', flush=True)"
        code += "; time.sleep(999)"
        words = ["ip", "netns", "exec", self.names[0], sys.executable, "-S", "-c", code]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.started.append(process)
        assert process.stdout.readline() == "ready\n"
        try:
            yield
        finally:
            process.kill()
            process.wait()

    def launch(self, flags: Sequence[str], folder: Path, **variables: str) -> list[Launched]:
        """`launchers/multi_node.sh` on both nodes; by default with two processes each."""
        launched = []
        for node in (0, 1):
            output = folder / f"node{node}-{time.monotonic_ns()}.txt"
            env = {"NODE_RANK": str(node), "MASTER_ADDR": ADDRESSES[0], "NPROC_PER_NODE": "2"}
            env |= {"LC_ALL": "C.UTF-8", "FINETUNE_LOG_DIR": str(self.logs)}
            words = ["bash", str(ROOT / "launchers" / "multi_node.sh"), *flags]
            launched.append(Launched(self.start(node, words, output, env | variables), output))
        return launched


class Launched:
    """A launch on one node: its process and what it said."""

    def __init__(self, process: subprocess.Popen, output: Path) -> None:
        self.process, self.output = process, output

    def wait(self, seconds: float) -> int:
        return self.process.wait(seconds)

    def said(self) -> str:
        return self.output.read_text(errors="replace")


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
