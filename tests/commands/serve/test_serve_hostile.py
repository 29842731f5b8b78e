"""Clients that hold on to what they were refused, never read, or are too many: each loses its
connection in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from launching import ROOT
from serve_helpers import Served, stub_server, wait_for

sys.path.insert(0, str(ROOT / "benchmarks"))
from misbehaving_clients import CLIENTS, Server, misbehave

CONNECTIONS = 24


@pytest.fixture(scope="module")
def stub() -> Iterator[Served]:
    limits = {
        "head_seconds": 1.0,
        "body_seconds": 1.0,
        "write_seconds": 1.0,
        "max_connections": CONNECTIONS,
    }
    with stub_server(max_batch=8, token="a-token-of-length-24-abc", **limits) as server:
        yield server


def connect(server: Served) -> socket.socket:
    """A connection whose own buffer is small."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", server.port))
    return connection


def open_connections(server: Served) -> int:
    found = psutil.Process(server.process.pid).net_connections("tcp")
    return sum(one.status == "ESTABLISHED" for one in found)


def read_to_the_end(connection: socket.socket) -> bytes:
    said = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            said += part
    return said


def read_answer(connection: socket.socket) -> bytes:
    """A head and its body."""
    said = b""
    while b"}}" not in said:
        said += connection.recv(65536)
    return said


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("host: 127.0.0.1", 401),
        ("host: evil.example", 421),
        ("host: [", 400),
        ("host: 127.0.0.1\r\norigin: http://evil.example", 403),
        (
            (
                "host: 127.0.0.1\r\nauthorization: Bearer a-token-of-length-24-abc\r\ncontent-type:"
                " text/plain"
            ),
            415,
        ),
        ("host: 127.0.0.1\r\nhost: 127.0.0.1", 400),
    ],
)
def test_what_is_refused_is_not_waited_for(stub: Served, headers, status):
    """One byte of the body after the refusal used to keep the connection for ever."""
    with connect(stub) as connection:
        connection.sendall(
            f"POST /v1/chat/completions HTTP/1.1\r\n{headers}\r\ncontent-length: 1000000\r\n\r\n".encode()
        )
        answer = read_answer(connection)
        assert (
            answer.startswith(f"HTTP/1.1 {status} ".encode())
            and b"connection: close" in answer.lower()
        )
        connection.sendall(b"{")
        assert read_to_the_end(connection) == b""
    wait_for(lambda: open_connections(stub) == 0)


def test_a_client_that_never_reads_loses_its_connection(stub: Served):
    """Answers that are over, and answers that go on: neither waits for a reader for ever."""
    page = b"GET /app.js HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    body = json.dumps(
        {
            "model": "stub",
            "messages": [{"role": "user", "content": "say " + "x" * 20_000}],
            "stream": True,
        }
    ).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type:"
        b" application/json\r\n"
    )
    head += (
        b"authorization: Bearer a-token-of-length-24-abc\r\ncontent-length: "
        + str(len(body)).encode()
    )
    held = [connect(stub) for _ in range(8)]
    try:
        for connection in held[:4]:
            connection.sendall(page * 400)
        for connection in held[4:]:
            connection.sendall(head + b"\r\n\r\n" + body)
        wait_for(lambda: open_connections(stub) == len(held))
        wait_for(lambda: open_connections(stub) == 0)
        wait_for(lambda: stub.health()["workers"][0]["active"] == 0)
    finally:
        for connection in held:
            connection.close()


def test_too_many_connections_is_an_answer(stub: Served):
    """Not a reset: the request that comes after the refusal is read and thrown away."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(connect(stub)) for _ in range(CONNECTIONS)]
        wait_for(lambda: open_connections(stub) == CONNECTIONS)
        for _ in range(3):
            status, _, body = stub.request("POST", "/v1/chat/completions", b" " * (1 << 20))
            assert status == 503 and json.loads(body)["error"]["code"] == "too_many_connections"
        assert all(read_to_the_end(connection).startswith(b"HTTP/1.1 408 ") for connection in held)
    assert stub.health()["status"] == "ok"


def test_a_hanging_worker_is_seen_and_its_requests_end():
    with stub_server(worker_seconds=2.0) as server:
        pid = server.worker_pids()[0]
        os.kill(pid, signal.SIGSTOP)
        status, body = server.chat("hello")
        assert status == 503 and body["error"]["code"] == "worker_lost"
        wait_for(lambda: server.health()["status"] == "ok")
        assert server.chat("hello")[0] == 200 and pid not in server.worker_pids()
        assert "no sign of life for 2 seconds" in "".join(server.lines)


def test_refused_requests_do_not_fill_the_log(stub: Served):
    for _ in range(60):
        with connect(stub) as connection:
            connection.sendall(b"no HTTP\r\n\r\n")
            assert read_to_the_end(connection).startswith(b"HTTP/1.1 400 ")
    upgrade = {"connection": "upgrade", "upgrade": "websocket"}
    for _ in range(20):
        stub.request("GET", "/", headers=upgrade)
    assert not [line for line in stub.lines if "Invalid HTTP" in line or "upgrade" in line]


def test_all_misbehave_at_once_and_a_well_behaved_client_loses_nothing():
    """A short sample of benchmarks/serve_misbehaving.py: every client of it once, with workers that
    have no model.
    """
    limits = {"head_seconds": 1.0, "body_seconds": 1.0, "write_seconds": 1.0}
    with stub_server(workers=2, max_batch=8, **limits) as server:
        over = threading.Event()
        answers: list[int] = []

        def behave() -> None:
            while not over.is_set():
                status, body = server.chat("say hello, world")
                answers.append(status)
                assert body["choices"][0]["message"]["content"] == "hello, world"

        with ThreadPoolExecutor(4) as pool:
            behaving = [pool.submit(behave) for _ in range(4)]
            try:
                others = Server(server.port, "stub", "slow 20", patience_seconds=60)
                rounds, held = asyncio.run(misbehave(others, until=lambda: True, pause_seconds=0))
            finally:
                over.set()
            for one in behaving:
                one.result(60)
        assert len(rounds) == len(CLIENTS) >= 30 and not held
        assert answers and set(answers) == {200}
        wait_for(lambda: open_connections(server) == 0)
        health = server.health()
        assert health["status"] == "ok" and health["queued"] == 0
        assert [(worker["active"], worker["restarts"]) for worker in health["workers"]] == [
            (0, 0)
        ] * 2
        assert "Traceback" not in "".join(server.lines)
