"""Servers that do with right answers what servers do: cut, draw, redirect, ask for a key. And the
public names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from protocol_server import SECRET, Server

from finetune.__main__ import main as finetune
from finetune.commands.verify.comparison import FINDINGS, with_reasoning
from finetune.commands.verify.endpoint import Endpoint
from finetune.commands.verify.evidence import EngineResponse
from finetune.commands.verify.options import VerifyOptions
from finetune.config.fields import flag
from finetune.config.options import flags_of
from finetune.errors import ConfigError, FinetuneError
from finetune.runtime.language import speaking

FROZEN = Path(__file__).parents[2] / "frozen" / "verify.txt"
DATA = Path(__file__).parents[3] / "data_samples" / "valid.jsonl"
Verify = Callable[..., dict]


@pytest.mark.parametrize("way", ["", "no logprobs"])
def test_a_server_that_shows_answers_only_is_right(
    way: str, verify: Verify, adapter: Path, serve: Callable[..., Server]
):
    report = verify(adapter, "--endpoint", serve(way).url)
    assert report["code"] == 0 and report["findings"] == []
    assert report["compared"] == {"token_ids": 0, "prompt_lengths": 8, "answers": 8, "logprobs": 0}


def test_vllms_ids_and_logprobs_are_compared(
    verify: Verify, adapter: Path, serve: Callable[..., Server]
):
    report = verify(adapter, "--endpoint", f"{serve('vllm').url}/v1/")
    assert report["code"] == 0 and report["deployment"]["engine"] == "vllm"
    assert report["compared"] == {"token_ids": 8, "prompt_lengths": 8, "answers": 8, "logprobs": 8}


@pytest.mark.parametrize(
    ("way", "name"), [("cuts", "unknown"), ("stops", "unknown"), ("draws", "not_greedy")]
)
def test_what_is_done_to_answers_is_found(
    way: str, name: str, verify: Verify, adapter: Path, serve: Callable[..., Server]
):
    report = verify(adapter, "--endpoint", serve(way).url)
    assert report["code"] == 1 and [finding["name"] for finding in report["findings"]] == [name], (
        report
    )


def test_the_key_is_sent_and_nowhere_shown(
    verify: Verify, adapter: Path, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
):
    server = serve("locked")
    monkeypatch.setenv("MY_KEY", SECRET)
    report = verify(adapter, "--endpoint", server.url, "--api-key-variable", "MY_KEY")
    assert report["code"] == 0 and SECRET not in json.dumps(report)
    assert {key for _, _, key in server.asked} == {f"Bearer {SECRET}"}


@pytest.mark.parametrize("way", ["bad key", "locked list", "echoes", "no http", "refuses all"])
def test_a_server_that_writes_the_key_back_does_not_get_it_shown(
    way: str,
    adapter: Path,
    serve: Callable[..., Server],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    server = serve(way)
    monkeypatch.setenv("OPENAI_API_KEY", f" {SECRET}\n")
    for flags in ([], ["--json"]):
        words = [
            "--model",
            adapter,
            "--data",
            DATA,
            "--device-type",
            "cpu",
            "--prompts",
            2,
            "--max-new-tokens",
            8,
        ]
        assert finetune(["verify", *map(str, words), "--endpoint", server.url, *flags]) == 1 + (
            way == "locked list"
        )
        shown = capfd.readouterr()
        assert any(key == f"Bearer {SECRET}" for _, _, key in server.asked)
        assert SECRET not in shown.out + shown.err + caplog.text and "***" in shown.out + shown.err
        assert "Traceback" not in shown.err and len(shown.out) < 8000


@pytest.mark.parametrize("key", ["sk-not\na-key", "sk-sch\u00fcssel", "sk-\u5bc6"])
def test_a_key_that_no_header_takes_is_refused_unseen(key: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_KEY", key)
    with pytest.raises(ConfigError, match="the key in MY_KEY") as caught:
        Endpoint("http://127.0.0.1:9", "m", key_variable="MY_KEY", timeout_seconds=1)
    assert "sk-" not in str(caught.value)


def choice(**more: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"content": "a"}, "finish_reason": "stop", **more}]}


FOREIGN: dict[str, Any] = {
    "no object": [1],
    "no choices": {"error": {"message": "x"}},
    "choices a dict": {"choices": {"0": {}}},
    "choices empty": {"choices": []},
    "a null choice": {"choices": [None]},
    "no message": {"choices": [{"finish_reason": "stop"}]},
    "content in parts": choice(message={"content": [{"type": "text", "text": "a"}]}),
    "reasoning a list": choice(message={"content": "a", "reasoning": ["b"]}),
    "finish a dict": choice(finish_reason={"a": 1}),
    "usage a list": choice() | {"usage": [1]},
    "count a text": choice() | {"usage": {"completion_tokens": "24"}},
    "logprobs a list": choice(logprobs=["x"]),
    "logprobs of texts": choice(logprobs={"content": ["x"]}),
    "a text as logprob": choice(logprobs={"content": [{"logprob": "x"}]}),
    "no JSON": b"<html>hello</html>",
}


def ask(server: Server, seconds: float = 60) -> EngineResponse:
    endpoint = Endpoint(server.url, None, key_variable="NO_KEY", timeout_seconds=seconds)
    return endpoint.chat([{"role": "user", "content": "hello"}], 4)


@pytest.mark.parametrize("name", FOREIGN)
def test_an_answer_of_no_protocol_is_said_to_be_one(name: str, serve: Callable[..., Server]):
    server = serve("gives")
    server.given = FOREIGN[name]
    with pytest.raises(FinetuneError, match="not of the OpenAI protocol") as caught:
        ask(server)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("ids", [[10**12], ["1"], {"a": 1}])
def test_ids_of_a_prompt_that_are_none_are_said_to_be_none(ids: Any, serve: Callable[..., Server]):
    server = serve("vllm ids")
    server.given = ids
    with pytest.raises(FinetuneError, match="not of the OpenAI protocol"):
        ask(server)


def test_half_a_character_is_replaced(serve: Callable[..., Server]):
    server = serve("gives")
    server.given = choice(message={"content": "a\ud800b"})
    assert ask(server).answer == "a?b"


@pytest.mark.parametrize("way", ["no http", "chunked"])
def test_a_server_that_breaks_off_has_failed(way: str, serve: Callable[..., Server]):
    with pytest.raises(FinetuneError, match="no server answers") as caught:
        ask(serve(way))
    assert caught.value.exit_code == 1


def test_an_error_is_known_although_its_body_never_comes(serve: Callable[..., Server]):
    server = serve("stalled")
    assert ask(server, 0.5).finish == "refused"
    server.released.set()


def test_a_model_is_chosen_only_where_there_is_no_choice(serve: Callable[..., Server]):
    server = serve("lists")
    base, one, two = (
        {"id": "base"},
        {"id": "one", "parent": "base"},
        {"id": "two", "parent": "base"},
    )
    for listed, name in (([base], "base"), ([base, one], "one")):
        server.given = listed
        assert Endpoint(server.url, None, key_variable="NO_KEY", timeout_seconds=60).model == name
    for listed in ([base, one, two], [base, one | {"parent": None}]):
        server.given = listed
        with pytest.raises(ConfigError, match="models: base, one") as caught:
            Endpoint(server.url, None, key_variable="NO_KEY", timeout_seconds=60)
        assert "--served-model" in caught.value.fix
        assert Endpoint(server.url, "one", key_variable="NO_KEY", timeout_seconds=60).model == "one"
    for listed in ({"a": 1}, [None], [{"id": 1}], []):
        server.given = listed
        with pytest.raises(ConfigError, match="list of models cannot be read|has no model"):
            Endpoint(server.url, None, key_variable="NO_KEY", timeout_seconds=60)


def test_answers_that_a_reasoning_parser_takes_are_found(
    verify: Verify, adapter: Path, serve: Callable[..., Server]
):
    """Answers without thoughts, of a model that thinks in nobody's eyes but the parser's."""
    report = verify(adapter, "--endpoint", serve("reasons").url)
    assert [finding["name"] for finding in report["findings"]] == ["reasoning_parser"], report
    assert report["code"] == 1 and report["same"] == 8


THOUGHT = "<think>\nab\n</think>\n\nc"


@pytest.mark.parametrize(
    ("content", "reasoning", "own", "whole"),
    [
        ("c", "ab", THOUGHT, THOUGHT),
        ("", "c", "c", "c"),  # taken for reasoning
        ("", "ax", "ac", "ax"),
        ("d", "xy", THOUGHT, "<think>\nxy\n</think>\n\nd"),  # of another model
    ],
)
def test_reasoning_is_put_back(content: str, reasoning: str, own: str, whole: str):
    assert with_reasoning(EngineResponse(content, "stop", reasoning), own) == whole


def test_the_text_names_fault_evidence_and_fix_in_both_languages(
    adapter: Path, serve: Callable[..., Server], capsys: pytest.CaptureFixture[str]
):
    data = Path(__file__).parents[3] / "data_samples" / "valid.jsonl"
    words = [
        "verify",
        "--model",
        adapter,
        "--data",
        data,
        "--device-type",
        "cpu",
        "--endpoint",
        serve("cuts").url,
    ]
    words += ["--prompts", 4, "--max-new-tokens", 24]
    assert finetune([*map(str, words), "--lang", "en"]) == 1
    english = capsys.readouterr().out
    assert "unknown: the answers are not the trained model's" in english
    assert (
        re.search(r"  answer \d, character \d+: ", english) and "  mend: see the first" in english
    )
    with speaking("en"):
        assert finetune([*map(str, words), "--lang", "zh"]) == 1
    assert "  修复：" in capsys.readouterr().out


@pytest.mark.frozen
def test_public_names_are_frozen():
    """Flags and names of findings: one may be added (to the file too); one that is there stays."""
    lines = [f"verify {flag(name)}" for name in ("help", *flags_of(VerifyOptions))]
    lines += [f"finding {name}" for name in FINDINGS]
    assert lines == FROZEN.read_text(encoding="utf-8").splitlines()
