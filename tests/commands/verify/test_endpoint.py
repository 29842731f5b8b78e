"""Servers that cut, draw, redirect, or require a key; and the public names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT
from protocol_server import SECRET, Server

from finetune.__main__ import main as finetune
from finetune.commands.verify.comparison import FINDINGS
from finetune.commands.verify.endpoint import Endpoint, _Choice, _is_one_per_token
from finetune.commands.verify.evidence import EngineResponse
from finetune.commands.verify.options import VerifyOptions
from finetune.config.fields import flag
from finetune.config.options import flags_of
from finetune.errors import ConfigError, FinetuneError


@pytest.mark.parametrize(
    ("tokens", "count", "finish", "expected"),
    [
        (["路", "由", ""], 3, "stop", True),
        (["路", "由"], None, "stop", True),
        (["路", "由"], 3, "stop", True),  # none for the end token
        (["路", "由"], 3, "length", False),
        (["路", "由", ""], 4, "stop", False),  # as llama.cpp does: "路" of two tokens
        (["路", "由", "<|im_end|>"], 4, "stop", False),
        (["路", "由", ""], 2, "stop", False),
    ],
)
def test_log_probabilities_must_be_one_per_token(tokens, count, finish, expected):
    logprobs = {"content": [{"token": token, "logprob": -1.0} for token in tokens]}
    given = {"message": {"content": "路由"}, "finish_reason": finish, "logprobs": logprobs}
    assert _is_one_per_token(_Choice.model_validate(given), count) == expected


@pytest.mark.parametrize("way", ["no logprobs", "vllm"])
def test_a_right_server_passes(way: str, verify, adapter: Path, serve, monkeypatch):
    """With what it shows; the key is sent, and shown nowhere."""
    server, shown = serve(way), 5 * (way == "vllm")
    monkeypatch.setenv("MY_KEY", SECRET)
    url = f"{server.url}/v1/" if shown else server.url
    report = verify(adapter, "--endpoint", url, "--api-key-variable", "MY_KEY")
    assert report["code"] == 0 and report["findings"] == []
    assert report["deployment"]["engine"] == ("vllm" if shown else "openai")
    compared = {"token_ids": shown, "prompt_lengths": 5, "answers": 5, "logprobs": shown}
    assert report["compared"] == compared
    assert {key for _, _, key in server.asked} == {f"Bearer {SECRET}"}
    assert SECRET not in json.dumps(report)


@pytest.mark.parametrize(
    ("way", "name", "same"),
    [("stops", "unknown", 0), ("draws", "not_greedy", 0), ("reasons", "reasoning_parser", 5)],
)
def test_what_is_done_to_answers_is_found(way, name, same, verify, adapter, serve):
    report = verify(adapter, "--endpoint", serve(way).url)
    assert [finding["name"] for finding in report["findings"]] == [name], report
    assert (report["code"], report["same"]) == (1, same)


@pytest.mark.parametrize("way", ["bad key", "locked list", "echoes", "no http", "refuses all"])
def test_a_server_that_writes_the_key_back_does_not_get_it_shown(
    way: str, adapter: Path, serve, monkeypatch, capfd, caplog
):
    server = serve(way)
    monkeypatch.setenv("OPENAI_API_KEY", f" {SECRET}\n")
    data = ROOT / "data_samples" / "valid.jsonl"
    words = ["--model", adapter, "--data", data, "--prompts", 2, "--max-new-tokens", 8]
    words += ["--device-type", "cpu", "--endpoint", server.url]
    for flags in ([], ["--json"]):
        code = finetune(["verify", *map(str, words), *flags])
        shown = capfd.readouterr()
        assert code == 1 + (way == "locked list")
        assert any(key == f"Bearer {SECRET}" for _, _, key in server.asked)
        assert SECRET not in shown.out + shown.err + caplog.text and "***" in shown.out + shown.err
        assert "Traceback" not in shown.err and len(shown.out) < 8000


def endpoint(server: Server, model: str | None = None, seconds: float = 60) -> Endpoint:
    return Endpoint(server.url, model, key_variable="NO_KEY", timeout_seconds=seconds)


def ask(server: Server, seconds: float = 60) -> EngineResponse:
    return endpoint(server, seconds=seconds).chat([{"role": "user", "content": "hello"}], 4)


def test_a_key_that_no_header_takes_is_refused_unseen(monkeypatch: pytest.MonkeyPatch):
    for key in ("sk-not\na-key", "sk-sch\u00fcssel", "sk-\u5bc6"):
        monkeypatch.setenv("MY_KEY", key)
        with pytest.raises(ConfigError, match="the key in MY_KEY") as caught:
            Endpoint("http://127.0.0.1:9", "m", key_variable="MY_KEY", timeout_seconds=1)
        assert "sk-" not in str(caught.value)


def choice(**more: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"content": "a"}, "finish_reason": "stop", **more}]}


FOREIGN: list[Any] = [
    [1],
    {"choices": []},
    {"choices": [None]},
    choice(message={"content": [{"type": "text", "text": "a"}]}),
    choice() | {"usage": {"completion_tokens": "24"}},
    choice(logprobs={"content": [{"logprob": "x"}]}),
    b"<html>hello</html>",
]


def test_an_answer_of_no_protocol_is_said_to_be_one(serve):
    for way, answers in (("gives", FOREIGN), ("vllm ids", [[10**12], ["1"], {"a": 1}])):
        server = serve(way)
        for given in answers:
            server.given = given
            with pytest.raises(FinetuneError, match="not of the OpenAI protocol") as caught:
                ask(server)
            assert caught.value.exit_code == 1
    for way in ("no http", "chunked"):
        with pytest.raises(FinetuneError, match="no server answers") as caught:
            ask(serve(way))
        assert caught.value.exit_code == 1
    server = serve("gives")
    server.given = choice(message={"content": "a\ud800b"})  # half a character
    assert ask(server).answer == "a?b"
    server = serve("stalled")  # an error whose body never comes
    assert ask(server, 0.5).finish == "refused"
    server.released.set()


def test_a_model_is_chosen_only_where_there_is_no_choice(serve):
    server, base = serve("lists"), {"id": "base"}
    one, two = ({"id": name, "parent": "base"} for name in ("one", "two"))
    for listed, name in (([base], "base"), ([base, one], "one")):
        server.given = listed
        assert endpoint(server).model == name
    for listed in ([base, one, two], [base, one | {"parent": None}]):
        server.given = listed
        with pytest.raises(ConfigError, match="models: base, one") as caught:
            endpoint(server)
        assert "--served-model" in caught.value.fix and endpoint(server, "one").model == "one"
    for listed in ({"a": 1}, [None], [{"id": 1}], []):
        server.given = listed
        with pytest.raises(ConfigError, match="list of models cannot be read|has no model"):
            endpoint(server)


@pytest.mark.frozen
def test_public_names_are_frozen():
    """Flags and names of findings: one may be added (to the file too); one that is there stays."""
    lines = [f"verify {flag(name)}" for name in ("help", *flags_of(VerifyOptions))]
    lines += [f"finding {name}" for name in FINDINGS]
    frozen = ROOT / "tests" / "frozen" / "verify.txt"
    assert lines == frozen.read_text(encoding="utf-8").splitlines()
