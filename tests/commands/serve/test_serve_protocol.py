"""What requests are taken and refused, in the protocol's shape, and what the guard lets through. No
sockets here.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.commands.serve import protocol
from finetune.commands.serve.command import _bind, run_server
from finetune.commands.serve.guard import RESPONSE_HEADERS, Guard
from finetune.commands.serve.options import (
    SHORTEST_TOKEN,
    TOKEN_VARIABLE,
    ServeOptions,
    ServeSettings,
    read_token,
)
from finetune.commands.serve.protocol import ApiError, ChatRequest, CompletionRequest, Shape, parse
from finetune.errors import ConfigError

MESSAGES = [{"role": "user", "content": "x"}]


def chat(**more: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"model": "m", "messages": MESSAGES, **more}).encode())


def test_what_is_taken():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": parts, "name": "n"},
    ]
    asked = chat(
        messages=messages,
        user="u",
        metadata={"a": "b"},
        n=1,
        presence_penalty=0,
        tools=[],
        logprobs=None,
    )
    assert asked.prompt() == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "ab", "name": "n"},
    ]
    asked = chat(
        temperature=0, top_p=0.5, seed=3, stop="x", max_tokens=9, max_completion_tokens=7, top_k=4
    )
    assert asked.sampling_changes(100) == {
        "temperature": 0, "top_p": 0.5, "top_k": 4, "seed": 3, "stop": ("x",), "max_new_tokens": 7
    }  # fmt: skip
    assert chat(max_tokens=10**9).sampling_changes(100) == {"max_new_tokens": 100}
    assert chat().sampling_changes(100) == {"max_new_tokens": 100}
    for prompt, expected in (("p", "p"), (["p"], "p"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2])):
        body = json.dumps({"model": "m", "prompt": prompt}).encode()
        assert parse(CompletionRequest, body).prompt() == expected


def test_answers_are_taken_back_with_all_their_fields():
    """`message.model_dump()` of the official client has every field of the protocol, most null."""
    nulls = ("refusal", "annotations", "audio", "function_call", "tool_calls", "reasoning_content")
    answer = {"role": "assistant", "content": "a"} | dict.fromkeys(nulls)
    asked = chat(messages=[{"role": "user", "content": "q"}, answer], stream=None, stop=None)
    assert asked.prompt()[1] == {"role": "assistant", "content": "a"} and asked.stream is False
    thinking = {"role": "assistant", "content": "a", "reasoning_content": "t", "annotations": []}
    (_, plain) = chat(messages=[{"role": "user", "content": "q"}, thinking]).prompt()
    assert plain == {"role": "assistant", "content": "a", "reasoning_content": "t"}
    with pytest.raises(ApiError, match="only the assistant has"):
        chat(messages=[{"role": "user", "content": "q", "reasoning_content": "t"}])


STRICT = {"type": "function", "function": {"name": "f", "strict": True}}


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"messages": []}, "messages", "empty_array"),
        ({"messages": "x"}, "messages", "invalid_value"),
        ({"messages": [{"role": "root", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "invalid_value"),
        ({"messages": MESSAGES * 1001}, "messages", "invalid_value"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 1.5}, "max_tokens", "invalid_value"),
        ({"stop": ["x"] * 9}, "stop", "invalid_value"),
        ({"stream": "yes"}, "stream", "invalid_value"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"logprobs": True}, "logprobs", "unsupported_parameter"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "invalid_value"),
        (
            {"tools": [{"type": "retrieval", "function": {"name": "f"}}]},
            "tools[0].type",
            "invalid_value",
        ),
        ({"tools": [STRICT]}, "tools[0].function.strict", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"presence_penalty": 0.5}, "presence_penalty", "unsupported_parameter"),
        ({"temprature": 1}, "temprature", "unknown_parameter"),
        ({"model": 5}, "model", "invalid_value"),
        ({"model": "m" * 257}, "model", "invalid_value"),
        ({"temperature": 10.5}, "temperature", "invalid_value"),
        ({"top_p": 1.5}, "top_p", "invalid_value"),
        ({"top_k": -1}, "top_k", "invalid_value"),
        ({"top_k": 2**63}, "top_k", "invalid_value"),
        ({"max_tokens": 10**4000}, "max_tokens", "invalid_value"),
        ({"max_completion_tokens": 2**31}, "max_completion_tokens", "invalid_value"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty", "invalid_value"),
        ({"seed": 2**63}, "seed", "invalid_value"),
        ({"seed": -(2**63) - 1}, "seed", "invalid_value"),
        ({"stop": "x" * 257}, "stop", "invalid_value"),
        ({"stop": ["x", ""]}, "stop[1]", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": "x", "name": "n" * 257}]},
            "messages[0].name",
            "invalid_value",
        ),
        ({"messages": [*MESSAGES, 1, 2]}, "messages[1]", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [1]}]},
            "messages[0].content[0]",
            "invalid_value",
        ),
    ],
)
def test_what_is_refused(more, param, code):
    with pytest.raises(ApiError) as refused:
        chat(**more).sampling_changes(100)
    error = refused.value.body["error"]
    assert (
        refused.value.status == 400
        and error["type"] == "invalid_request_error"
        and error["message"]
    )
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize(
    "name", [name for name, given in ChatRequest.model_fields.items() if name != "messages"]
)
@pytest.mark.parametrize(
    "value", ["1e999", "-1e999", "NaN", "Infinity", "-1", "1e308", str(10**400)]
)
def test_no_number_is_without_bounds(name, value):
    body = f'{{"model": "m", "messages": [{{"role": "user", "content": "x"}}], "{name}": {value}}}'.encode()
    if (name, value) == ("seed", "-1"):
        parse(ChatRequest, body)
        return
    with pytest.raises(ApiError) as refused:
        parse(ChatRequest, body)
    assert refused.value.status == 400


MANY = 200_000
NAMELESS = {str(number): 0 for number in range(MANY // 4)}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [1] * MANY}]},
        {"messages": [{"role": "user", "content": [NAMELESS]}]},
        {"messages": [1] * MANY},
        {"messages": [NAMELESS]},
        {"messages": MESSAGES, "stop": [1] * MANY},
        {"prompt": [1.5] * MANY},
        {"prompt": [[]] * MANY},
        NAMELESS,
    ],
    ids=[
        "content",
        "names of a part",
        "messages",
        "names of a message",
        "stop",
        "prompt",
        "prompts",
        "names",
    ],
)
def test_a_body_of_many_wrong_things_is_one_error(body, monkeypatch):
    """pydantic would make an error of each: seconds, in which nobody is served, and a gigabyte."""
    counted, convert = [], protocol._as_api_error
    monkeypatch.setattr(
        protocol,
        "_as_api_error",
        lambda error: counted.append(error.error_count()) or convert(error),
    )
    for kind in (ChatRequest, CompletionRequest):
        with pytest.raises(ApiError) as refused:
            parse(kind, json.dumps({"model": "m", **body}).encode())
        assert refused.value.status == 400
    assert counted and max(counted) < 20


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_nothing_is_fetched_for_a_message(kind):
    part = {"type": kind, kind: {"url": "file:///etc/passwd"}}
    with pytest.raises(ApiError) as refused:
        chat(messages=[{"role": "user", "content": [part]}])
    assert refused.value.status == 400 and "passwd" not in str(refused.value.body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff",
        b'{"model": NaN}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
    ],
)
def test_what_is_not_json(body):
    with pytest.raises(ApiError) as refused:
        parse(ChatRequest, body)
    assert refused.value.status == 400 and refused.value.body["error"]["code"] == "invalid_json"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(allow_nan=False)
    | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
NAMES = st.sampled_from([*ChatRequest.model_fields, "n", "tools", "user", "prompt", "x"])


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(NAMES, JSON, max_size=5))
def test_any_json_is_taken_or_refused_in_shape(given_body):
    for kind in (ChatRequest, CompletionRequest):
        try:
            parse(
                kind, json.dumps({"model": "m", "messages": MESSAGES, **given_body}).encode()
            ).sampling_changes(9)
        except ApiError as error:
            assert error.status == 400 and set(error.body["error"]) == {
                "message",
                "type",
                "param",
                "code",
            }


def test_bodies_have_the_protocols_shape():
    shape = Shape(chat=True, model="m")
    whole = shape.whole("text", "stop", {"total_tokens": 3})
    assert (
        whole["object"] == "chat.completion" and whole["choices"][0]["message"]["content"] == "text"
    )
    assert shape.first()["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert shape.last("length")["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "length",
    }
    assert {shape.piece("a")["id"], whole["id"], shape.counts({})["id"]} == {whole["id"]}
    assert Shape(chat=False, model="m").piece("a")["choices"][0]["text"] == "a"
    assert Shape(chat=False, model="m").first() is None


# ---------------------------------------------------------------- the guard


def visit(
    method: str = "GET",
    path: str = "/v1/models",
    headers: dict[str, str] | list[tuple[str, str]] | None = None,
    body: list[bytes | None] = (),
    token: str | None = None,
    **options: Any,
) -> tuple[int, dict[str, str], bytes]:
    """What a request gets; `body` are its parts, None: nothing more comes. The application echoes
    it with 200.
    """
    pairs = list(headers.items() if isinstance(headers, dict) else headers or [])
    if not any(name == "host" for name, _ in pairs):
        pairs.insert(0, ("host", "127.0.0.1:8000"))
    sent: list[dict[str, Any]] = []
    parts = list(body)

    async def receive() -> dict[str, Any]:
        if not parts:
            return {"type": "http.request", "body": b"", "more_body": False}
        part = parts.pop(0)
        if part is None:
            await asyncio.sleep(3600)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def app(scope, receive, send) -> None:
        message = await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": message["body"]})

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(name.encode(), value.encode()) for name, value in pairs],
    }
    guard = Guard(app, ServeOptions(model="m", **options), token)
    asyncio.run(guard(scope, receive, send))
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], found, sent[1]["body"]


JSON_TYPE = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("[::1]:8000", 200),
        ("localhost.", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example:8000", 421),
        ("192.168.0.7", 421),
        ("localhost:8000@evil.example", 400),
        ("", 400),
        ("a b", 421),
        ("localhost:port", 400),
        ("localhost/evil", 400),
        ("[::1].evil.example", 400),
        ("[::1]evil.example:80", 400),
        ("[127.0.0.1]x", 400),
        ("[::1", 400),
        ("::1", 400),
        ("localhost\\.evil.example", 400),
        ("localhost#.evil.example", 400),
        ("evil.example?localhost", 400),
    ],
)
def test_hosts(host, status):
    assert visit(headers={"host": host})[0] == status


def test_other_addresses_when_the_server_is_public():
    public = {"host": "0.0.0.0", "allow_host": ("chat.example",)}
    for host, status in (
        ("192.168.0.7:8000", 200),
        ("[fe80::1]", 200),
        ("chat.example", 200),
        ("evil.example", 421),
    ):
        assert visit(headers={"host": host}, **public)[0] == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://127.0.0.1:8000"}, 200),
        ({"origin": "http://localhost:8000"}, 403),  # another origin to a browser
        ({"origin": "http://127.0.0.1:3000"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "file://"}, 403),
        ({"origin": "http://["}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),  # a link to the page
    ],
)
def test_origins(headers, status):
    assert visit(headers=headers)[0] == status
    posted = 403 if "navigate" in headers.values() else status
    assert visit("POST", headers={**headers, **JSON_TYPE})[0] == posted


def test_no_cors_and_a_strict_policy_on_everything():
    for status, headers, _ in (
        visit(),
        visit(headers={"host": "evil"}),
        visit("POST"),
    ):
        assert status in (200, 421, 415)
        assert not [name for name in headers if name.startswith("access-control")]
        assert {name: headers[name] for name in RESPONSE_HEADERS} == RESPONSE_HEADERS
    policy = RESPONSE_HEADERS["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_a_form_cannot_post(kind):
    assert (
        visit("POST", headers={"content-type": kind, "content-length": "2"}, body=[b"{}"])[0] == 415
    )


def test_tokens():
    token = "correct-horse-battery"
    assert visit(headers={"authorization": "Bearer anything"})[0] == 200  # none is set
    for given_header, status in (
        (None, 401),
        ("Bearer correct-horse-battery", 200),
        ("bearer correct-horse-battery", 200),
        ("Bearer correct-horse-batterY", 401),
        ("Bearer ", 401),
        ("Basic correct-horse-battery", 401),
        ("correct-horse-battery", 401),
        ("Bearer correct-horse-battery x", 401),
    ):
        status_now, headers, body = visit(
            headers={"authorization": given_header} if given_header else {}, token=token
        )
        assert status_now == status, given_header
        assert status == 200 or (
            headers["www-authenticate"] == "Bearer" and b"invalid_api_key" in body
        )
    for path in ("/", "/app.js", "/health"):
        assert visit(path=path, token=token)[0] == 200
    for path in ("/metrics", "/v1/models", "/health/", "//", "/v1/../health"):
        assert visit(path=path, token=token)[0] == 401
    assert visit("POST", path="/", headers=JSON_TYPE, token=token)[0] == 401


def test_bodies():
    limits = {"max_body_bytes": 10, "body_seconds": 0.1}
    chunked = {**JSON_TYPE, "transfer-encoding": "chunked"}
    assert visit("POST", headers=chunked, body=[b"12345", b"67890"], **limits)[2] == b"1234567890"
    assert visit("POST", headers=chunked, body=[b"12345", b"678901"], **limits)[0] == 413
    assert (
        visit("POST", headers={**JSON_TYPE, "content-length": "104857600"}, body=[None], **limits)[
            0
        ]
        == 413
    )
    status, headers, body = visit(
        "POST", headers={**JSON_TYPE, "content-length": "9"}, body=[b"1", None], **limits
    )
    assert status == 408 and headers["connection"] == "close" and b"request_timeout" in body
    both = {**chunked, "content-length": "1"}
    assert visit("POST", headers=both, body=[b"1"], **limits)[0] == 400
    for name in ("host", "authorization", "content-length"):
        twice = [("host", "localhost"), *JSON_TYPE.items(), (name, "1"), (name, "2")]
        assert visit("POST", headers=twice, body=[b"1"], **limits)[0] == 400


# ---------------------------------------------------------------- who may listen where


def test_the_token_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    file = tmp_path / "token"
    file.write_text("0123456789abcdef\n")
    assert read_token(str(file)) == "0123456789abcdef" and read_token(None) is None
    monkeypatch.setenv(TOKEN_VARIABLE, "fedcba9876543210")
    assert read_token(None) == "fedcba9876543210"
    import os

    assert TOKEN_VARIABLE not in os.environ  # workers must not inherit it
    for wrong in ("short", "with space in the middle", "", "täglich-neu-gemacht"):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match=f"{SHORTEST_TOKEN} printable"):
            read_token(str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(str(tmp_path / "none"))
    assert "0123456789" not in repr(
        ServeSettings(ServeOptions(model="m"), {}, (), token="0123456789abcdef")
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "example.org"])
def test_the_world_is_not_served_without_a_token(host):
    with pytest.raises(ConfigError, match="can be reached by others, and there is no token"):
        run_server(ServeSettings(ServeOptions(model="m", host=host), {"model": "m"}, [{}]))


def test_a_name_that_others_use_needs_a_token_too():
    with pytest.raises(
        ConfigError, match="chat.example can be reached by others, and there is no token"
    ) as refused:
        run_server(
            ServeSettings(
                ServeOptions(model="m", allow_host=("chat.example",)), {"model": "m"}, [{}]
            )
        )
    assert refused.value.where == "--allow-host"


def test_a_second_server_on_a_port_is_refused_while_the_first_loads():
    with _bind("127.0.0.1", 0) as first, pytest.raises(ConfigError, match="cannot be used"):
        _bind("127.0.0.1", first.getsockname()[1])
