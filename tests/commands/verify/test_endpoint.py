"""Servers that do with right answers what servers do: cut, draw, redirect, ask for a key. And the public names."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.__main__ import main as finetune
from finetune.commands.verify.causes import CAUSES
from finetune.commands.verify.merged import MergedFolder
from finetune.commands.verify.options import VerifyOptions
from finetune.config.flags import flags_of
from finetune.config.names import flag
from finetune.runtime.language import speaking

FROZEN = Path(__file__).parents[2] / "frozen" / "verify.txt"
SECRET = "sk-not-a-real-key-0123456789"
Verify = Callable[..., dict]


class Server:
    """A real model behind the protocol; `way` is what is done to its answers, `asked` what came in."""

    def __init__(self, folder: Path, way: str = "") -> None:
        self.model, self.way, self.asked = MergedFolder(folder, torch.device("cpu"), trust_remote_code=False), way, []
        self.draw, self.lock = random.Random(0), threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.give(*outer.get(self.path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.asked.append((self.path, body, self.headers.get("authorization")))
                with outer.lock:
                    self.give(*outer.post(self.path, body, self.headers.get("authorization")))

            def give(self, status: int, answer: Any) -> None:
                data = json.dumps(answer).encode()
                self.send_response(status)
                if status == 307:
                    self.send_header("location", "http://127.0.0.1:9/v1/chat/completions")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def get(self, path: str) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "m"}]}
        if path == "/version" and self.way == "vllm":
            return 200, {"version": "0.20.0"}
        return 404, {"error": {"message": "no such path"}}

    def post(self, path: str, body: dict[str, Any], key: str | None) -> tuple[int, Any]:
        if self.way == "redirects" and path.endswith("completions"):
            return 307, {}
        if self.way == "locked" and key != f"Bearer {SECRET}":
            return 401, {"error": {"message": "a key is needed"}}
        if path == "/tokenize" and self.way == "vllm":
            text = self.model.tokenizer.apply_chat_template(
                body["messages"], tokenize=False, add_generation_prompt=True
            )
            return 200, {"tokens": self.model.tokenizer(text, add_special_tokens=False)["input_ids"]}
        if path != "/v1/chat/completions":
            return 404, {"error": {"message": "no such path"}}
        assert body["temperature"] == 0
        seen = self.model.chat(body["messages"], min(body["max_tokens"], 6 if self.way == "cuts" else 1 << 20))
        text, finish, tokens = seen.answer, seen.finish, seen.answer_tokens
        if self.way == "stops":
            text, finish = text[: len(text) // 2], "stop"
        if self.way == "draws":
            words = text.split(" ")
            self.draw.shuffle(words)
            text = " ".join(words)
        usage = {"prompt_tokens": seen.prompt_tokens, "completion_tokens": tokens}
        choice = {"message": {"content": text}, "finish_reason": finish}
        if self.way == "vllm" and body.get("logprobs"):
            choice["logprobs"] = {"content": [{"token": "", "logprob": number} for number in seen.logprobs]}
        return 200, {"choices": [choice], "usage": usage}


@pytest.fixture
def serve(merged: Path) -> Iterator[Callable[[str], Server]]:
    started = []

    def start(way: str = "") -> Server:
        started.append(Server(merged, way))
        return started[-1]

    yield start
    for server in started:
        server.http.shutdown()
        server.http.server_close()


def test_a_server_that_shows_answers_only_is_right(verify: Verify, adapter: Path, serve: Callable[..., Server]):
    report = verify(adapter, "--endpoint", serve().url)
    assert report["code"] == 0 and report["findings"] == []
    assert report["compared"] == {"token_ids": 0, "prompt_lengths": 8, "answers": 8, "logprobs": 0}


def test_vllms_ids_and_logprobs_are_compared(verify: Verify, adapter: Path, serve: Callable[..., Server]):
    report = verify(adapter, "--endpoint", f"{serve('vllm').url}/v1/")
    assert report["code"] == 0 and report["deployment"]["engine"] == "vllm"
    assert report["compared"] == {"token_ids": 8, "prompt_lengths": 8, "answers": 8, "logprobs": 8}


@pytest.mark.parametrize(("way", "name"), [("cuts", "answers_cut"), ("stops", "stops_early"), ("draws", "not_greedy")])
def test_what_is_done_to_answers_is_found(
    way: str, name: str, verify: Verify, adapter: Path, serve: Callable[..., Server]
):
    report = verify(adapter, "--endpoint", serve(way).url)
    assert report["code"] == 1 and [finding["name"] for finding in report["findings"]] == [name], report


def test_the_key_is_sent_and_nowhere_shown(
    verify: Verify, adapter: Path, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
):
    server = serve("locked")
    monkeypatch.setenv("MY_KEY", SECRET)
    report = verify(adapter, "--endpoint", server.url, "--api-key-variable", "MY_KEY")
    assert report["code"] == 0 and SECRET not in json.dumps(report)
    assert {key for _, _, key in server.asked} == {f"Bearer {SECRET}"}


def refused(capsys: pytest.CaptureFixture[str], *flags: object) -> tuple[int, str]:
    code = finetune(["verify", "--device-type", "cpu", *map(str, flags)])
    return code, capsys.readouterr().err


def test_what_cannot_be_verified_is_refused(
    adapter: Path, serve: Callable[..., Server], capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    model = ("--model", adapter, "--data", Path(__file__).parents[3] / "data_samples" / "valid.jsonl")
    for flags, code, said in (
        ((), 2, "there must be one deployment"),
        (("--endpoint", "http://x", "--merged", "y"), 2, "there must be one deployment"),
        (("--endpoint", "localhost:8000"), 2, "no address"),
        (("--endpoint", f"http://user:{SECRET}@host"), 2, "a password in it"),
        (("--endpoint", "http://127.0.0.1:9"), 2, "no server answers"),
        (("--merged", tmp_path), 2, "no model is there"),
        (("--endpoint", serve("redirects").url), 1, "the server refused: 307"),
        (("--endpoint", serve("locked").url), 1, "put the server's key into the variable"),
    ):
        found, words = refused(capsys, *model, *flags)
        assert found == code and said in words and SECRET not in words and "Traceback" not in words, words
    found, words = refused(capsys, "--model", adapter, "--merged", tmp_path)
    assert found == 2 and "--data" in words


def test_the_text_names_fault_evidence_and_remedy_in_both_languages(
    adapter: Path, serve: Callable[..., Server], capsys: pytest.CaptureFixture[str]
):
    data = Path(__file__).parents[3] / "data_samples" / "valid.jsonl"
    words = ["verify", "--model", adapter, "--data", data, "--device-type", "cpu", "--endpoint", serve("cuts").url]
    words += ["--prompts", 4, "--max-new-tokens", 24]
    assert finetune([*map(str, words), "--lang", "en"]) == 1
    english = capsys.readouterr().out
    assert "answers_cut: the server cuts answers off" in english and "  mend: raise its own limit" in english
    with speaking("en"):
        assert finetune([*map(str, words), "--lang", "zh"]) == 1
    assert "answers_cut: 服务器截断了答案" in capsys.readouterr().out


@pytest.mark.frozen
def test_public_names_are_frozen():
    """Flags and names of findings: one may be added (to the file too); one that is there stays."""
    lines = [f"verify {flag(name)}" for name in ("help", *flags_of(VerifyOptions))]
    lines += [f"finding {cause.name}" for cause in CAUSES]
    assert lines == FROZEN.read_text(encoding="utf-8").splitlines()
