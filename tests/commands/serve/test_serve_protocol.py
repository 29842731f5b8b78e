"""What requests are taken and refused, and what the guard lets through: no sockets."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest
from launching import ROOT

from finetune.commands.chat.command import ChatOptions
from finetune.commands.serve import options, protocol
from finetune.commands.serve.answers import Metrics
from finetune.commands.serve.app import create_app
from finetune.commands.serve.command import _bind, run_server
from finetune.commands.serve.guard import RESPONSE_HEADERS, Guard
from finetune.commands.serve.options import (
    SHORTEST_TOKEN,
    TOKEN_VARIABLE,
    ServeOptions,
    ServeSettings,
    read_token,
    worker_devices,
)
from finetune.commands.serve.protocol import ApiError, ChatRequest, CompletionRequest, parse
from finetune.commands.serve.workers import WorkerPool
from finetune.config.fields import flag
from finetune.config.options import flags_of, read_options
from finetune.errors import ConfigError

MESSAGES = [{"role": "user", "content": "x"}]


def chat(**more: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"model": "m", "messages": MESSAGES, **more}).encode())


def refused(body: bytes, kind: type[Any] = ChatRequest) -> dict[str, Any]:
    with pytest.raises(ApiError) as caught:
        parse(kind, body)
    assert caught.value.status == 400
    assert set(caught.value.body["error"]) == {"message", "type", "param", "code"}
    return caught.value.body["error"]


def test_what_is_taken():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    user = {"role": "user", "content": parts, "name": "n"}
    harmless = {"user": "u", "metadata": {"a": "b"}, "n": 1, "tools": [], "logprobs": None}
    asked = chat(messages=[{"role": "developer", "content": "s"}, user], **harmless)
    assert asked.prompt() == [{"role": "system", "content": "s"}, {**user, "content": "ab"}]
    own = {"temperature": 0, "top_p": 0.5, "top_k": 4, "seed": 3}
    asked = chat(**own, stop="x", max_tokens=9, max_completion_tokens=7)
    assert asked.sampling_changes(100) == {**own, "stop": ("x",), "max_new_tokens": 7}
    assert chat(max_tokens=10**9).sampling_changes(100) == {"max_new_tokens": 100}
    assert chat().sampling_changes(100) == {"max_new_tokens": 100}
    for prompt, expected in (("p", "p"), (["p"], "p"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2])):
        body = json.dumps({"model": "m", "prompt": prompt}).encode()
        assert parse(CompletionRequest, body).prompt() == expected


def test_answers_are_taken_back_with_all_their_fields():
    """`message.model_dump()` of the official client has every field of the protocol, most null."""
    nulls = ["refusal", "annotations", "audio", "function_call", "tool_calls", "reasoning_content"]
    answer = {"role": "assistant", "content": "a"}
    asked = chat(messages=[*MESSAGES, answer | dict.fromkeys(nulls)], stream=None, stop=None)
    assert asked.prompt()[1] == answer and asked.stream is False
    thinking = {**answer, "reasoning_content": "t"}
    assert chat(messages=[*MESSAGES, {**thinking, "annotations": []}]).prompt()[1] == thinking
    with pytest.raises(ApiError, match="only the assistant has"):
        chat(messages=[{**MESSAGES[0], "reasoning_content": "t"}])


INVALID: dict[str, list[Any]] = {
    "messages": ["x", MESSAGES * 1001],
    "model": [5, "m" * 257],
    "temperature": [-1, "hot", 10.5],
    "top_p": [0, 1.5],
    "repetition_penalty": [1e-300],
    "max_tokens": [0, 1.5, 10**4000],
    "seed": [2**63, -(2**63) - 1],
    "stop": [["x"] * 9, "x" * 257],
    "tool_choice": ["required"],
}
UNSUPPORTED = {"n": 2, "logprobs": True, "parallel_tool_calls": False, "presence_penalty": 0.5}
STRICT = {"type": "function", "function": {"name": "f", "strict": True}}
INSIDE: list[tuple[str, str, list[Any]]] = [
    ("stop", "stop[1]", ["x", ""]),
    ("messages", "messages[0].role", [{"role": "root", "content": "x"}]),
    ("messages", "messages[0].content", [{"role": "user", "content": None}]),
    ("messages", "messages[0].content[0]", [{"role": "user", "content": [1]}]),
    ("messages", "messages[1]", [*MESSAGES, 1, 2]),
    ("tools", "tools[0].function", [{"type": "function"}]),
    ("tools", "tools[0].function.strict", [STRICT]),
]


def test_what_is_refused():
    cases = [(name, name, "invalid_value", v) for name, values in INVALID.items() for v in values]
    cases += [(name, name, "unsupported_parameter", value) for name, value in UNSUPPORTED.items()]
    cases += [(name, place, "invalid_value", value) for name, place, value in INSIDE]
    cases += [("messages", "messages", "empty_array", [])]
    cases += [("temprature", "temprature", "unknown_parameter", 1)]
    for name, param, code, value in cases:
        error = refused(json.dumps({"model": "m", "messages": MESSAGES, name: value}).encode())
        assert error["type"] == "invalid_request_error" and error["message"]
        assert (error["param"], error["code"]) == (param, code), (name, str(value)[:80])
    # nothing is fetched for a message
    for kind in ("image_url", "input_audio", "file"):
        part = {"type": kind, kind: {"url": "file:///etc/passwd"}}
        body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
        error = refused(json.dumps(body).encode())
        assert error["code"] == "unsupported_content" and "passwd" not in str(error)
    for body in (b"", b"[]", b"\xff", b'{"model": NaN}', b'{"a":' * 9**5):
        assert refused(body)["code"] == "invalid_json"


def test_a_body_of_many_wrong_things_is_one_error(monkeypatch: pytest.MonkeyPatch):
    """pydantic would make an error of each: seconds, in which nobody is served, and a gigabyte."""
    many, nameless = 50_000, {str(number): 0 for number in range(20_000)}
    counted, convert = [], protocol._as_api_error

    def counting(error: Any) -> ApiError:
        counted.append(error.error_count())
        return convert(error)

    monkeypatch.setattr(protocol, "_as_api_error", counting)
    for body in (
        {"messages": [{"role": "user", "content": [1] * many}]},
        {"messages": [{"role": "user", "content": [nameless]}]},
        {"messages": [1] * many},
        {"messages": MESSAGES, "stop": [1] * many},
        {"prompt": [[]] * many},
        nameless,
    ):
        for kind in (ChatRequest, CompletionRequest):
            refused(json.dumps({"model": "m", **body}).encode(), kind)
    assert max(counted) < 20


def visit(
    method: str = "GET",
    path: str = "/v1/models",
    headers: dict[str, str] | list[tuple[str, str]] = (),
    body: list[bytes | None] = (),
    token: str | None = None,
    **limits: Any,
) -> tuple[int, dict[str, str], bytes]:
    """The answer; `body` are the request's parts, None: nothing more comes."""
    pairs = list(headers.items() if isinstance(headers, dict) else headers)
    if "host" not in dict(pairs):
        pairs.insert(0, ("host", "127.0.0.1:8000"))
    sent: list[dict[str, Any]] = []
    parts = list(body)

    async def receive() -> dict[str, Any]:
        if (part := parts.pop(0) if parts else b"") is None:
            await asyncio.sleep(3600)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def app(scope, receive, send) -> None:
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    raw = [(name.encode(), value.encode()) for name, value in pairs]
    scope = {"type": "http", "method": method, "path": path, "headers": raw}
    asyncio.run(Guard(app, ServeOptions(model="m", **limits), token)(scope, receive, send))
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    assert found.items() >= RESPONSE_HEADERS.items(), "on everything"
    assert not [name for name in found if name.startswith("access-control")], "no CORS"
    return sent[0]["status"], found, sent[1]["body"]


JSON_TYPE = {"content-type": "application/json"}
PUBLIC = {"host": "0.0.0.0", "allow_host": ("chat.example",)}
HOSTS = {
    200: "127.0.0.1:8000 localhost LOCALHOST:1 [::1]:8000 localhost.",
    421: "evil.example 127.0.0.1.evil.example:8000 192.168.0.7",
    400: "localhost:8000@evil.example localhost:port localhost/evil [::1]evil.example:80"
    " [127.0.0.1]x [::1 ::1 localhost\\.evil.example evil.example?localhost",
}


def test_hosts():
    for status, hosts in HOSTS.items():
        for host in hosts.split():
            assert visit(headers={"host": host})[0] == status, host
    assert (visit(headers={"host": ""})[0], visit(headers={"host": "a b"})[0]) == (400, 421)
    for host in ("192.168.0.7:8000", "[fe80::1]", "chat.example", "evil.example"):
        assert visit(headers={"host": host}, **PUBLIC)[0] == (421 if "evil" in host else 200), host


def test_origins():
    policy = RESPONSE_HEADERS["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}  # to the page
    for status, allowed in (
        (200, [{"origin": "http://127.0.0.1:8000"}, link]),
        (200, [{"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}]),
        # another origin to a browser
        (403, [{"origin": "http://localhost:8000"}, {"origin": "http://127.0.0.1:3000"}]),
        (403, [{"origin": "https://evil.example"}, {"origin": "null"}, {"origin": "http://["}]),
        (403, [{"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}]),
    ):
        for headers in allowed:
            assert visit(headers=headers)[0] == status, headers
            posted = visit("POST", headers={**headers, **JSON_TYPE})[0]
            assert posted == (403 if headers is link else status), headers


def test_tokens():
    token = "correct-horse-battery"
    assert visit(headers={"authorization": "Bearer anything"})[0] == 200  # none is set
    for scheme in ("Bearer", "bearer"):
        assert visit(headers={"authorization": f"{scheme} {token}"}, token=token)[0] == 200
    wrong = ("Bearer correct-horse-batterY", f"Basic {token}", token, f"Bearer {token} x")
    for headers in ({}, *({"authorization": value} for value in wrong)):
        status, found, body = visit(headers=headers, token=token)
        assert (status, found["www-authenticate"]) == (401, "Bearer"), headers
        assert b"invalid_api_key" in body
    for status, paths in ((200, "/ /app.js /health"), (401, "/metrics /v1/models /health/ //")):
        for path in paths.split():
            assert visit(path=path, token=token)[0] == status, path
    assert visit("POST", path="/", headers=JSON_TYPE, token=token)[0] == 401


def test_bodies():
    limits = {"max_body_bytes": 10, "body_seconds": 0.1}
    chunked = {**JSON_TYPE, "transfer-encoding": "chunked"}
    assert visit("POST", headers=chunked, body=[b"12345", b"67890"], **limits)[2] == b"1234567890"
    assert visit("POST", headers=chunked, body=[b"12345", b"678901"], **limits)[0] == 413
    announced = {**JSON_TYPE, "content-length": "104857600"}
    assert visit("POST", headers=announced, body=[None], **limits)[0] == 413
    late = visit("POST", headers=JSON_TYPE, body=[b"1", None], **limits)
    assert (late[0], late[1]["connection"]) == (408, "close") and b"request_timeout" in late[2]
    both = {**chunked, "content-length": "1"}
    assert visit("POST", headers=both, body=[b"1"], **limits)[0] == 400
    for name in ("host", "authorization", "content-length"):
        twice = [("host", "localhost"), *JSON_TYPE.items(), (name, "1"), (name, "2")]
        assert visit("POST", headers=twice, body=[b"1"], **limits)[0] == 400
    for kind in ("text/plain", "multipart/form-data", ""):  # of forms
        assert visit("POST", headers={"content-type": kind}, body=[b"{}"])[0] == 415


def test_the_token_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    file = tmp_path / "token"
    file.write_text("0123456789abcdef\n")
    assert read_token(str(file)) == "0123456789abcdef" and read_token(None) is None
    monkeypatch.setenv(TOKEN_VARIABLE, "fedcba9876543210")
    assert read_token(None) == "fedcba9876543210"
    assert TOKEN_VARIABLE not in os.environ  # workers must not inherit it
    for wrong in ("short", "with space in the middle", "täglich-neu-gemacht"):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match=f"{SHORTEST_TOKEN} printable"):
            read_token(str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(str(tmp_path / "none"))
    served = ServeSettings(ServeOptions(model="m"), {}, (), token="0123456789abcdef")
    assert "0123456789" not in repr(served)


def test_the_world_is_not_served_without_a_token():
    for changes in ({"host": "::"}, {"host": "example.org"}, {"allow_host": ("chat.example",)}):
        with pytest.raises(ConfigError, match="reached by others, and there is no token") as caught:
            run_server(ServeSettings(ServeOptions(model="m", **changes), {"model": "m"}, [{}]))
        assert caught.value.where == ("--host" if "host" in changes else "--allow-host")


def test_a_second_server_on_a_port_is_refused_while_the_first_loads():
    with _bind("127.0.0.1", 0) as first, pytest.raises(ConfigError, match="cannot be used"):
        _bind("127.0.0.1", first.getsockname()[1])


def test_each_worker_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(options, "usable_cores", lambda: 7)
    assert worker_devices("cpu", None, 3) == ("cpu", [{}] * 3, 2)
    assert worker_devices("cpu", None, None) == ("cpu", [{}], 7)
    with pytest.raises(ConfigError, match="the device is the CPU"):
        worker_devices("cpu", 2, None)
    monkeypatch.setattr(options, "_probe", lambda requested: ("cuda", 2))
    for visible, numbers in ((None, "01"), ("6,4", "64")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
        found = worker_devices("auto", 2, None)
        assert found == ("cuda", [{"CUDA_VISIBLE_DEVICES": number} for number in numbers], None)
    with pytest.raises(ConfigError, match="3 workers on 2 cuda"):
        worker_devices("auto", 3, None)


@pytest.mark.frozen
def test_public_names_are_frozen():
    """A name may be added (to the file too); one that is there stays."""
    lines = []
    for command, kind in (("chat", ChatOptions), ("serve", ServeOptions)):
        lines += [f"{command} {flag(name)}" for name in ("help", *flags_of(kind))]
        with pytest.raises(ConfigError, match="unknown flag --mod"):  # none may be shortened
            read_options(kind, ["--model", "m", "--mod", "x"])
    metrics = Metrics()
    text = metrics.text(workers_ready=0, active=0, queued=0).decode()
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
    lines += [f"metric {name}" for name in names if not name.endswith("_created")]
    pool = WorkerPool({}, [{}], per_worker=1, max_queue=1)
    routes = create_app(pool, ServeOptions(model="m"), None, metrics).app.routes
    lines += [f"path {method} {route.path}" for route in routes for method in sorted(route.methods)]
    frozen = ROOT / "tests" / "frozen" / "chat_names.txt"
    assert lines == frozen.read_text(encoding="utf-8").splitlines()
