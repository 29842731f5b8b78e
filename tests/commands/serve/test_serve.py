"""The server as clients meet it: the official client and curl, hostile sockets, killed workers, and
the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from launching import ROOT, run_cli, said
from serve_helpers import Served, alive, real_server, stub_server, wait_for

openai = pytest.importorskip("openai", reason="the openai client is not installed")

MODEL = ROOT / "data_samples" / "tiny-qwen3"
QUESTIONS = (
    "Explain the meaning of 100.64.0.0/10.",
    "什么是自治系统？",
    "请说出 BGP 的端口。",
    "What is NAT?",
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """The real command: two CPU workers with the bundled model."""
    with real_server(MODEL, "--num-workers", 2, "--max-batch", 4, "--max-queue", 8) as server:
        yield server


@pytest.fixture(scope="module")
def stub() -> Iterator[Served]:
    limits = {
        "head_seconds": 1.0,
        "body_seconds": 1.0,
        "max_connections": 40,
        "max_body_bytes": 100_000,
    }
    with stub_server(max_batch=4, max_queue=2, request_seconds=8.0, **limits) as server:
        yield server


def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60)


# ---------------------------------------------------------------- the official client, and curl


def test_a_model_whose_template_writes_no_calls_refuses_tools(served: Served):
    status, body = served.chat("q", tools=[{"type": "function", "function": {"name": "f"}}])
    assert (status, body["error"]["param"]) == (400, "tools")
    assert "writes no calls of tools" in body["error"]["message"]


def test_the_official_client_whole_and_streamed(served: Served):
    """And the answers are those of the generation core, alone and together."""
    from finetune.inference.generation import load_for_generation
    from finetune.inference.sampling import Sampling

    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    with load_for_generation(str(MODEL), device_type="cpu") as generator:
        expected = generator.generate(asked, Sampling(max_new_tokens=12))
    api = client(served)
    assert [model.id for model in api.models.list()] == [served.model] == ["tiny-qwen3"]
    assert api.models.retrieve(served.model).id == served.model

    def whole(messages: list) -> str:
        answer = api.chat.completions.create(model=served.model, messages=messages, max_tokens=12)
        assert (
            answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        )
        return (
            answer.choices[0].message.content,
            answer.choices[0].finish_reason,
            answer.usage.completion_tokens,
        )

    def streamed(messages: list) -> str:
        chunks = list(
            api.chat.completions.create(
                model=served.model,
                messages=messages,
                max_completion_tokens=12,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices == []
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
        return text, chunks[-2].choices[0].finish_reason, chunks[-1].usage.completion_tokens

    wanted = [(answer.text, answer.finish_reason, answer.completion_tokens) for answer in expected]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(whole, asked)) == wanted
        assert list(pool.map(streamed, asked)) == wanted
    assert [whole(messages) for messages in asked[:1]] == wanted[:1]
    # the model's template, which is a program, is run by another process
    for pid in served.worker_pids():
        assert any(
            "limited_template" in " ".join(child.cmdline())
            for child in psutil.Process(pid).children()
        )
    raw = api.completions.create(model=served.model, prompt="BGP", max_tokens=4)
    assert raw.object == "text_completion" and raw.usage.completion_tokens == 4
    pieces = api.completions.create(model=served.model, prompt="BGP", max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces) == raw.choices[0].text
    seeded = {
        "model": served.model,
        "messages": asked[0],
        "max_tokens": 12,
        "temperature": 1.0,
        "seed": 11,
    }
    assert (
        len({api.chat.completions.create(**seeded).choices[0].message.content for _ in range(3)})
        == 1
    )


def test_a_link_does_not_set_the_content_of_the_page(stub: Served):
    """FastAPI used to read both from the query."""
    plain = stub.request("GET", "/")
    linked = stub.request("GET", "/?content=wrong&content_type=text/plain")
    assert plain[0] == linked[0] == 200 and linked[2] == plain[2]
    assert linked[1]["content-type"] == plain[1]["content-type"] == "text/html; charset=utf-8"


def test_the_official_client_sees_errors_as_errors(served: Served, stub: Served):
    api, user = client(served), [{"role": "user", "content": "x"}]
    for error, code, request in (
        (openai.BadRequestError, "empty_array", {"messages": []}),
        (openai.BadRequestError, "unsupported_parameter", {"messages": user, "n": 3}),
        (
            openai.BadRequestError,
            "context_length_exceeded",
            {"messages": [{"role": "user", "content": "BGP " * 3000}]},
        ),
        (openai.NotFoundError, "model_not_found", {"messages": user, "model": "gpt-4"}),
    ):
        for stream in (False, True):
            with pytest.raises(error) as caught:
                api.chat.completions.create(**{"model": served.model, "stream": stream, **request})
            assert caught.value.code == code and caught.value.type == "invalid_request_error"
    for path in (
        "/nope",
        "/v1",
        "/docs",
        "/openapi.json",
        "/static/../server.py",
        "/%2e%2e/server.py",
    ):
        status, _, body = served.request("GET", path)
        assert status == 404 and json.loads(body)["error"]["code"] == "not_found", path
    status, headers, body = served.request("DELETE", "/v1/models")
    assert (
        status == 405
        and json.loads(body)["error"]["code"] == "method_not_allowed"
        and "GET" in headers["allow"]
    )
    assert stub.chat("fail")[0] == 500
    with pytest.raises(openai.APIError, match="made to"):
        messages = [{"role": "user", "content": "fail"}]
        list(client(stub).chat.completions.create(model="stub", messages=messages, stream=True))


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl not installed")
def test_curl(served: Served):
    def curl(*words: str) -> str:
        return subprocess.run(
            ["curl", "-sS", "-m", "60", *words], capture_output=True, text=True, check=True
        ).stdout

    body = {
        "model": served.model,
        "messages": [{"role": "user", "content": QUESTIONS[1]}],
        "max_tokens": 6,
    }
    address, kind = f"{served.url}/v1/chat/completions", "content-type: application/json"
    whole = json.loads(curl(address, "-H", kind, "-d", json.dumps(body)))
    stream = curl("-N", address, "-H", kind, "-d", json.dumps({**body, "stream": True}))
    events = [event.removeprefix("data: ") for event in stream.split("\n\n") if event]
    assert events[-1] == "[DONE]"
    pieces = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert "".join(pieces) == whole["choices"][0]["message"]["content"]
    refused = json.loads(curl(address, "-H", kind, "-d", '{"model": "tiny-qwen3", "messages": []}'))
    assert refused["error"]["type"] == "invalid_request_error"
    metrics = curl(f"{served.url}/metrics")
    assert "finetune_tokens_total" in metrics and QUESTIONS[1] not in metrics


# --------------------------------------------------------- clients that leave, and too many of them


def test_a_client_that_leaves_frees_the_worker(stub: Served):
    for stream in (True, False):
        with socket.create_connection(("127.0.0.1", stub.port)) as connection:
            body = {
                "model": "stub",
                "messages": [{"role": "user", "content": "slow 20000"}],
                "stream": stream,
            }
            connection.sendall(post(json.dumps(body).encode()))
            wait_for(lambda: stub.health()["workers"][0]["active"] == 1)
        wait_for(lambda: stub.health()["workers"][0]["active"] == 0)


def test_a_full_queue_is_429_and_a_long_answer_504(stub: Served):
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: stub.chat("slow 20"), range(12)))
    statuses = [status for status, _ in answers]
    assert statuses.count(200) >= 6 and set(statuses) == {200, 429}
    assert all(body["error"]["code"] == "queue_full" for status, body in answers if status == 429)
    status, headers, _ = stub.request(
        "POST",
        "/v1/chat/completions",
        {"model": "stub", "messages": [{"role": "user", "content": "slow 1000"}]},
    )
    assert status == 504 and headers["retry-after"]
    assert stub.chat("fine")[0] == 200


# ---------------------------------------------------------------- hostile sockets


def post(body: bytes, headers: str = "", length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type:"
        f" application/json\r\n{headers}"
    )
    return f"{head}content-length: {length}\r\n\r\n".encode() + body


def talk(server: Served, data: bytes, wait: float = 60) -> bytes:
    """Send, and read until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=wait) as connection:
        said = b""
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
            while part := connection.recv(65536):
                said += part
        return said


def test_hostile_bytes_are_refused_in_shape_and_the_server_stays(stub: Served):
    body = json.dumps({"model": "stub", "messages": [{"role": "user", "content": "hi"}]}).encode()
    for name, data, status in (
        ("slow head", b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx: ", 408),
        ("nothing", b"", 408),
        ("slow body", post(b"{", length=100), 408),
        ("100 MB announced", post(b"{", length=100 << 20), 413),
        ("bad JSON", post(b"{", "connection: close\r\n"), 400),
        ("no HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        ("huge head", b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx: " + b"a" * 60_000, 400),
        ("two lengths", post(body, "content-length: 5\r\n"), 400),
        ("smuggled", post(body, "transfer-encoding: chunked\r\n"), 400),
        ("wrong host", b"GET / HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n", 421),
        ("no host", b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n", 400),
        ("cross-origin", post(body, "origin: https://evil.example\r\nconnection: close\r\n"), 403),
        (
            "a form",
            post(body, "connection: close\r\n").replace(b"application/json", b"text/plain"),
            415,
        ),
    ):
        answer = talk(stub, data)
        assert answer.startswith(f"HTTP/1.1 {status} ".encode()), (name, answer[:300])
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"], name
    assert stub.chat("fine")[0] == 200 and stub.health()["status"] == "ok"


def test_a_100_mb_body_is_not_read(stub: Served):
    """Sent in chunks, so that no length gives it away; memory stays as it was."""
    process = psutil.Process(stub.process.pid)
    before = process.memory_info().rss
    head = post(b"", "transfer-encoding: chunked\r\n").replace(b"content-length: 0\r\n", b"")
    sent, answer = 0, b""
    with socket.create_connection(("127.0.0.1", stub.port), timeout=60) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(head)
            while sent < 100 << 20:
                connection.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
                sent += 0x10000
        with contextlib.suppress(ConnectionError):  # the refusal may be lost with the connection
            answer = connection.recv(65536)
    assert sent < 100 << 20 and answer[:13] in (b"", b"HTTP/1.1 413 ")
    assert process.memory_info().rss - before < 50 << 20
    assert stub.health()["status"] == "ok"


def test_many_slow_connections_are_bounded_and_end(stub: Served):
    held = [socket.create_connection(("127.0.0.1", stub.port), timeout=60) for _ in range(60)]
    try:
        for connection in held[:30]:
            connection.sendall(b"POST / HTTP/1.1\r\nx: ")
        # every one is answered and closed, in a second or two
        refused = [connection.recv(4096) for connection in held]
        assert all(answer.startswith((b"HTTP/1.1 408", b"HTTP/1.1 503")) for answer in refused)
        assert any(answer.startswith(b"HTTP/1.1 503") for answer in refused)
    finally:
        for connection in held:
            connection.close()
    wait_for(lambda: stub.chat("fine")[0] == 200)


# ---------------------------------------------------------------- workers that die, and the end


def stream_texts(server: Served, count: int, tokens: int) -> list[str]:
    """How each of so many streams at once ended: "complete", or the code of its error."""

    def one(number: int) -> str:
        api = client(server)
        try:
            chunks = list(
                api.chat.completions.create(
                    model=server.model,
                    messages=[{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}],
                    max_tokens=tokens,
                    stream=True,
                    temperature=1.0,
                )
            )
            return (
                "complete"
                if chunks[-1].choices[0].finish_reason in ("stop", "length")
                else "broken"
            )
        except openai.APIError as error:
            return str(error.code)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def test_under_load_with_a_worker_killed(served: Served):
    """A short sample of benchmarks/serve_load.py: every request ends, and only the dead worker's
    end with an error.
    """
    first, second = served.worker_pids()[:2]
    ends: list[str] = []
    load = threading.Thread(target=lambda: ends.extend(stream_texts(served, 16, 60)))
    load.start()
    wait_for(lambda: all(worker["active"] == 4 for worker in served.health()["workers"]))
    os.kill(first, signal.SIGKILL)
    load.join(120)
    assert len(ends) == 16
    assert set(ends) <= {"complete", "worker_lost", "queue_full"}
    assert ends.count("worker_lost") <= 4 and ends.count("complete") >= 4
    wait_for(lambda: served.health()["status"] == "ok", 240, "for the new worker")
    assert second in served.worker_pids() and first not in served.worker_pids()
    assert (
        served.health()["workers"][0]["restarts"] + served.health()["workers"][1]["restarts"] == 1
    )
    assert set(stream_texts(served, 8, 8)) == {"complete"}


def test_stops_in_order_and_leaves_nobody():
    with stub_server(workers=2) as server:
        pids = server.worker_pids()
        ends: list[tuple[int, dict]] = []
        asking = threading.Thread(target=lambda: ends.append(server.chat("slow 20")))
        asking.start()
        wait_for(lambda: any(worker["active"] for worker in server.health()["workers"]))
        assert server.stop() == 0
        asking.join(30)
        assert ends[0][0] == 200 and ends[0][1]["choices"][0]["message"]["content"].endswith(
            "word19 "
        )
        assert len(pids) == 2 and not any(map(alive, pids))
        assert "Traceback" not in "".join(server.lines) and "word19" not in "".join(server.lines)


def test_workers_die_with_a_killed_server():
    with stub_server(workers=2) as server:
        pids = server.worker_pids()
        server.process.kill()
        server.process.wait()
        wait_for(lambda: not any(map(alive, pids)))


def test_refused_before_anything_is_loaded(tmp_path: Path, stub: Served):
    cases = (
        (["--host", "0.0.0.0"], "there is no token"),
        (["--port", stub.port], "cannot be used"),
        (["--port", "99999"], "port is 99999"),
        (["--max-batch", "0"], "max_batch is 0"),
        (["--body-seconds", "nan"], "body_seconds is 'nan'"),
        (["--num-gpus", "2"], "the device is the CPU"),
    )
    for flags, message in cases:
        words = ["serve", "--model", MODEL, "--device-type", "cpu", *flags]
        result = run_cli(words, module="finetune", env={"FINETUNE_SERVE_TOKEN": None})
        assert (
            result.returncode == 2 and message in result.stderr and "Traceback" not in said(result)
        ), flags
    result = run_cli(
        ["serve", "--model", tmp_path / "no", "--device-type", "cpu", "--port", 0],
        module="finetune",
    )
    assert (
        result.returncode == 2
        and "no such model folder" in result.stderr
        and "Traceback" not in said(result)
    )


def test_a_public_server_asks_for_its_token(tmp_path: Path):
    token = "a-token-of-length-24-abc"
    with stub_server(host="0.0.0.0", token=token) as server:
        status, _, body = server.request("GET", "/v1/models")
        assert status == 401 and json.loads(body)["error"]["code"] == "invalid_api_key"
        good = {"authorization": f"Bearer {token}"}
        assert server.request("GET", "/v1/models", headers=good)[0] == 200
        assert (
            server.request("GET", "/metrics")[0] == 401
            and server.request("GET", "/health")[0] == 200
        )
        assert (
            server.request("GET", "/v1/models", headers={**good, "host": "rebound.example"})[0]
            == 421
        )
        environ = Path(f"/proc/{server.worker_pids()[0]}/environ").read_bytes()
        assert token.encode() not in environ and token not in "".join(server.lines)
        with pytest.raises(openai.AuthenticationError):
            client(server).models.list()
