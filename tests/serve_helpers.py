"""Servers in processes of their own, on loopback, with real workers or with stubs."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil
import run_helpers
from launching import ROOT, environment

STUB_WORKER = Path(__file__).with_name("chat_stub_worker.py")
_START_SECONDS = 300
# Runs a server whose settings come as JSON: what no flag offers, such as the worker's command.
_RUN = """
import json, sys
from finetune.commands.serve.command import run_server
from finetune.commands.serve.options import ServeOptions, ServeSettings
from finetune.storage.run_log import setup_console
setup_console(0)
options, settings = json.loads(sys.argv[1])
from finetune.errors import FinetuneError
try:
    sys.exit(run_server(ServeSettings(ServeOptions(**options), **settings)))
except FinetuneError as error:
    print(f"[ERROR] {error}", file=sys.stderr)
    sys.exit(int(error.exit_code))
"""


@dataclass
class Served:
    """A running server."""

    process: subprocess.Popen[str]
    port: int = 0
    lines: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 60,
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (lower-case names) and body. A body that is not bytes is sent as JSON."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        sent = dict(headers or {})
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        if body is not None:
            sent.setdefault("content-type", "application/json")
        try:
            connection.request(method, path, body, sent)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return response.status, found, response.read()
        finally:
            connection.close()

    def chat(self, text: str, **more: Any) -> tuple[int, dict[str, Any]]:
        asked = {"model": self.model, "messages": [{"role": "user", "content": text}], **more}
        status, _, body = self.request("POST", "/v1/chat/completions", asked)
        return status, json.loads(body)

    @property
    def model(self) -> str:
        return json.loads(self.request("GET", "/v1/models")[2])["data"][0]["id"]

    def health(self) -> dict[str, Any]:
        return json.loads(self.request("GET", "/health")[2])

    def worker_pids(self) -> list[int]:
        """Children of the server, oldest first."""
        children = psutil.Process(self.process.pid).children()
        return [child.pid for child in sorted(children, key=lambda child: child.create_time())]

    def stop(self) -> int:
        """End it in order; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextlib.contextmanager
def _running(words: Sequence[str], env: Mapping[str, str] | None = None) -> Iterator[Served]:
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(words, env=environment(env), cwd=ROOT, **output)
    served = Served(process)
    ready = threading.Event()

    def read() -> None:
        for line in process.stdout:
            served.lines.append(line)
            found = re.search(r"answers at http://\S+?:(\d+) ", line)
            if found:
                served.port = int(found[1])
                ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    try:
        if not ready.wait(_START_SECONDS) or not served.port:
            raise AssertionError("the server did not start:\n" + "".join(served.lines))
        yield served
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(45)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def stub_server(workers: int = 1, token: str | None = None, **options: Any) -> Iterator[Served]:
    """A server with workers that have no model; options as in ServeOptions."""
    settings = {
        "load": {"model": "stub"},
        "environments": [{}] * workers,
        "token": token,
        "worker_command": [sys.executable, str(STUB_WORKER)],
    }
    chosen = [{"model": "stub", "port": 0, **options}, settings]
    with _running([sys.executable, "-c", _RUN, json.dumps(chosen)]) as served:
        yield served


@contextlib.contextmanager
def real_server(
    model: Path | str, *flags: object, env: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """The command, on a free port of loopback."""
    words = f"-m finetune serve --device-type cpu --port 0 --model {model}".split()
    with _running([sys.executable, *words, *map(str, flags)], env) as served:
        yield served


def wait_for(condition: Any, seconds: float = 60) -> Any:
    """The condition's first true value; a server is expected to answer within a minute."""
    return run_helpers.wait_for(condition, seconds)
