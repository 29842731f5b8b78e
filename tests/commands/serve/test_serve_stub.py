"""A server whose workers have no model: its clients, good and hostile, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from launching import ROOT
from run_helpers import alive
from serve_helpers import Served, stub_server, wait_for

openai = pytest.importorskip("openai", reason="the openai client is not installed")

CONNECTIONS = 24
LIMITS = {"head_seconds": 1.0, "body_seconds": 1.0, "write_seconds": 1.0}


@pytest.fixture(scope="module")
def stub() -> Iterator[Served]:
    limits = {**LIMITS, "max_connections": CONNECTIONS, "max_body_bytes": 100_000}
    with stub_server(max_batch=4, max_queue=2, **limits) as server:
        yield server


def chats(server: Served) -> openai.resources.chat.Completions:
    settings = {"api_key": "any", "max_retries": 0, "timeout": 60}
    settings["default_headers"] = {"connection": "close"}  # else they wait for a next request
    return openai.OpenAI(base_url=f"{server.url}/v1", **settings).chat.completions


def post(body: bytes, headers: str = "", length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json"
    return f"{head}\r\n{headers}content-length: {length}\r\n\r\n".encode() + body


def question(words: str, **more: object) -> bytes:
    messages = [{"role": "user", "content": words}]
    return json.dumps({"model": "stub", "messages": messages, **more}).encode()


def connect(server: Served) -> socket.socket:
    """A connection whose own buffer is small."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(60)
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


def test_calls_of_tools_whole_and_streamed(stub: Served):
    function = {"name": "ping", "parameters": {"type": "object", "properties": {"host": {}}}}
    tools = [{"type": "function", "function": function}]
    messages = [{"role": "user", "content": 'call ping {"host": "a"}'}]
    asked = {"model": "stub", "tools": tools, "messages": messages}
    choice = chats(stub).create(**asked).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "ping")
    assert json.loads(call.function.arguments) == {"host": "a"}
    chunks = [chunk.choices[0] for chunk in chats(stub).create(**asked, stream=True)]
    (streamed,) = [made for chunk in chunks for made in chunk.delta.tool_calls or ()]
    assert (streamed.index, streamed.id) == (0, call.id)
    assert streamed.function.arguments == call.function.arguments
    assert chunks[-1].finish_reason == "tool_calls"
    # The history goes back as it came, and reaches the worker with its calls.
    result = {"role": "tool", "tool_call_id": call.id, "content": "history"}
    asked["messages"] = [*messages, choice.message, result]
    sent = json.loads(chats(stub).create(**asked).choices[0].message.content)
    assert sent["prompt"][1]["tool_calls"][0]["function"]["name"] == "ping"
    assert sent["prompt"][2]["tool_call_id"] == call.id and sent["tools"] == tools
    none = chats(stub).create(**asked, tool_choice="none").choices[0].message
    assert json.loads(none.content)["tools"] == []


def counted(server: Served) -> dict[str, float]:
    lines = server.request("GET", "/metrics")[2].decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if line[0] != "#"]
    return {name.removeprefix("finetune_"): float(value) for name, value in pairs}


def test_errors_pages_and_metrics(stub: Served):
    before = counted(stub)
    asked = question("say hello, world", stream=True)
    body = stub.request("POST", "/v1/chat/completions", asked)[2]
    assert body.endswith(b"data: [DONE]\n\n")
    assert stub.chat("fail")[0] == 500
    status, body = stub.chat("refuse")
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    status, body = stub.chat("die")
    assert (status, body["error"]["code"]) == (503, "worker_lost")
    wait_for(lambda: stub.health()["status"] == "ok")
    with pytest.raises(openai.APIError, match="made to"):
        messages = [{"role": "user", "content": "fail"}]
        list(chats(stub).create(model="stub", messages=messages, stream=True))
    after = counted(stub)
    found = {name: value - before.get(name, 0.0) for name, value in after.items()}
    expected = {'{kind="prompt"}': 5, '{kind="completion"}': 2}
    assert {name: found[f"tokens_total{name}"] for name in expected} == expected
    endpoint = 'requests_total{endpoint="chat",status='
    assert [found[f'{endpoint}"{code}"}}'] for code in (200, 500, 503)] == [1, 2, 1]
    assert found["lost_requests_total"] == found["worker_restarts_total"] == 1
    assert found["time_to_first_token_seconds_count"] == 1
    assert (after["workers_ready"], after["active_requests"]) == (1, 0)

    for path in ("/nope", "/docs", "/openapi.json", "/static/../server.py", "/%2e%2e/server.py"):
        status, _, body = stub.request("GET", path)
        assert status == 404 and json.loads(body)["error"]["code"] == "not_found", path
    status, headers, body = stub.request("DELETE", "/v1/models")
    assert (status, json.loads(body)["error"]["code"]) == (405, "method_not_allowed")
    assert "GET" in headers["allow"]
    # FastAPI used to read both from the query
    plain, linked = (stub.request("GET", f"/{q}") for q in ("", "?content=x&content_type=text/x"))
    assert plain[0] == linked[0] == 200 and linked[2] == plain[2]
    assert linked[1]["content-type"] == plain[1]["content-type"] == "text/html; charset=utf-8"


def test_a_client_that_leaves_frees_the_worker(stub: Served):
    for stream in (True, False):
        with connect(stub) as connection:
            connection.sendall(post(question("slow 20000", stream=stream)))
            wait_for(lambda: stub.health()["workers"][0]["active"] == 1)
        wait_for(lambda: stub.health()["workers"][0]["active"] == 0)


def test_a_full_queue_is_429(stub: Served):
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: stub.chat("slow 10"), range(12)))
    statuses = [status for status, _ in answers]
    assert statuses.count(200) >= 6 and set(statuses) == {200, 429}
    assert all(body["error"]["code"] == "queue_full" for status, body in answers if status == 429)


def test_too_many_connections_is_an_answer(stub: Served):
    """Not a reset: the request that comes after the refusal is read and thrown away."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(connect(stub)) for _ in range(CONNECTIONS)]
        wait_for(lambda: open_connections(stub) == CONNECTIONS)
        status, _, body = stub.request("POST", "/v1/chat/completions", b" " * (1 << 20))
        assert status == 503 and json.loads(body)["error"]["code"] == "too_many_connections"
        assert all(read_to_the_end(connection).startswith(b"HTTP/1.1 408 ") for connection in held)
    assert stub.health()["status"] == "ok"


def test_hostile_bytes_are_refused_in_shape_and_the_server_stays(stub: Served):
    get = b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    for name, data, status in (
        ("slow head", get + b"x: ", 408),
        ("slow body", post(b"{", length=100), 408),
        ("100 MB announced", post(b"{", length=100 << 20), 413),
        ("no HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        ("huge head", get + b"x: " + b"a" * 60_000, 400),
        ("two lengths", post(question("hi"), "content-length: 5\r\n"), 400),
    ):
        with connect(stub) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(data)
            answer = read_to_the_end(connection)
        assert answer.startswith(f"HTTP/1.1 {status} ".encode()), (name, answer[:300])
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"], name
    for _ in range(10):
        stub.request("GET", "/", headers={"connection": "upgrade", "upgrade": "websocket"})
    # which does not fill the log
    assert not [line for line in stub.lines if re.search("Invalid HTTP|upgrade|Traceback", line)]
    assert stub.chat("fine")[0] == 200 and stub.health()["status"] == "ok"


def test_a_client_that_reads_slowly_keeps_its_connection(stub: Served):
    """Longer than the server waits for one that does not read."""
    asking = post(question("say " + "1234567" * 2048, stream=True))  # as many pieces
    with connect(stub) as slow:
        slow.sendall(asking)
        said, begin = b"", time.monotonic()
        while time.monotonic() - begin < 2 * LIMITS["write_seconds"]:
            said += slow.recv(4096)
            time.sleep(0.02)
        while b"[DONE]" not in said[-100:] and (part := slow.recv(65536)):
            said += part
    assert b"[DONE]" in said[-100:] and said.count(b'"1234567"') == 2048


def test_all_misbehave_at_once_and_a_well_behaved_client_loses_nothing(monkeypatch):
    """A short sample of benchmarks/serve_misbehaving.py: every client of it once."""
    if not (ROOT / "benchmarks").exists():
        pytest.skip("a copy of the tree for exhaustive/faults.py")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import misbehaving_clients as clients

    with stub_server(workers=2, max_batch=8, **LIMITS) as server:
        over = threading.Event()
        answers: list[int] = []

        def behave() -> None:
            while not over.is_set():
                status, body = server.chat("say hello, world")
                answers.append(status)
                assert body["choices"][0]["message"]["content"] == "hello, world"

        with ThreadPoolExecutor(4) as pool:
            behaving = [pool.submit(behave) for _ in range(4)]
            others = clients.Server(server.port, "stub", "slow 20", patience_seconds=60)
            try:
                made = clients.misbehave(others, until=lambda: True, pause_seconds=0)
                rounds, held = asyncio.run(made)
            finally:
                over.set()
            for one in behaving:
                one.result(60)
        assert len(rounds) == len(clients.CLIENTS) >= 30 and not held
        assert answers and set(answers) == {200}
        wait_for(lambda: open_connections(server) == 0)
        health = server.health()
        workers = [(worker["active"], worker["restarts"]) for worker in health["workers"]]
        assert (health["queued"], workers) == (0, [(0, 0)] * 2)
        assert "Traceback" not in "".join(server.lines)


def test_a_public_server_asks_for_its_token_and_stops_in_order():
    token = "a-token-of-length-24-abc"
    good = {"authorization": f"Bearer {token}"}
    with stub_server(2, token, host="0.0.0.0", request_seconds=2.0) as server:
        with pytest.raises(openai.AuthenticationError):
            chats(server).create(model="stub", messages=[{"role": "user", "content": "x"}])
        rebound = {**good, "host": "rebound.example"}
        assert server.request("GET", "/v1/models", headers=rebound)[0] == 421
        pids = server.worker_pids()
        assert token.encode() not in Path(f"/proc/{pids[0]}/environ").read_bytes()

        def ask(words: str) -> tuple[int, dict[str, str], bytes]:
            return server.request("POST", "/v1/chat/completions", question(words), good)

        status, headers, _ = ask("slow 1000")  # longer than any answer may take
        assert status == 504 and headers["retry-after"]
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask, "slow 15")
            wait_for(lambda: any(worker["active"] for worker in server.health()["workers"]))
            assert server.stop() == 0
            status, _, body = answer.result(30)
        assert status == 200 and b"word14 " in body
        assert len(pids) == 2 and not alive(pids)
        assert not re.search(f"Traceback|word14|{token}", "".join(server.lines))
