"""Servers that do with right answers what servers do: cut, draw, redirect, ask for a key. And the public names."""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.__main__ import main as finetune
from finetune.commands.verify.causes import CAUSES
from finetune.commands.verify.endpoint import Endpoint
from finetune.commands.verify.evidence import Seen
from finetune.commands.verify.merged import MergedFolder
from finetune.commands.verify.options import VerifyOptions
from finetune.commands.verify.replaying import put_back
from finetune.config.flags import flags_of
from finetune.config.names import flag
from finetune.errors import ConfigError, FinetuneError
from finetune.runtime.language import speaking

FROZEN = Path(__file__).parents[2] / "frozen" / "verify.txt"
STALLED = ("content-length", "1000")
DATA = Path(__file__).parents[3] / "data_samples" / "valid.jsonl"
SECRET = "sk-not-a-real-key-0123456789"
Verify = Callable[..., dict]


class Server:
    """A real model behind the protocol; `way` is what is done to its answers, `asked` what came in."""

    def __init__(self, folder: Path, way: str = "") -> None:
        self.model, self.way, self.asked = MergedFolder(folder, torch.device("cpu"), trust_remote_code=False), way, []
        self.given: Any = None  # the answer of way "gives", and the ids of way "vllm ids"
        self.released, self.refused = threading.Event(), None
        self.draw, self.lock = random.Random(0), threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                outer.asked.append((self.path, None, self.headers.get("authorization")))
                self.give(*outer.get(self.path, self.headers.get("authorization")))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.asked.append((self.path, body, self.headers.get("authorization")))
                with outer.lock:
                    answer = outer.post(self.path, body, self.headers.get("authorization"))
                self.give(*answer)

            def give(self, status: int, answer: Any) -> None:
                if outer.way == "no http" and self.path.endswith("completions"):
                    self.wfile.write(b"no http, and your key was " + SECRET.encode() + b"\r\n")
                    return
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                if outer.way in ("chunked", "stalled") and self.path.endswith("completions"):
                    self.send_header(*(("transfer-encoding", "chunked") if outer.way == "chunked" else STALLED))
                    self.end_headers()
                    self.wfile.write(b"5\r\nabc")
                    outer.released.wait(20 if outer.way == "stalled" else 0)
                    return
                if status == 307:
                    self.send_header("location", "http://127.0.0.1:9/v1/chat/completions")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def get(self, path: str, key: str | None) -> tuple[int, Any]:
        if path == "/v1/models" and self.way == "lists":
            return 200, {"data": self.given}
        if path == "/v1/models" and self.way == "locked list":
            return 401, {"error": {"message": f"bad key {key}"}}
        if path == "/props" and self.way == "echoes":
            facts = {"ftype": SECRET + "x" * 10_000, "build_info": f"of {SECRET}\ud800"}
            return 200, {"default_generation_settings": {}, **facts}
        if path == "/v1/models":
            return 200, {"data": [{"id": "m"}]}
        if path == "/version" and self.way in ("vllm", "vllm ids"):
            return 200, {"version": "0.20.0"}
        return 404, {"error": {"message": "no such path"}}

    def post(self, path: str, body: dict[str, Any], key: str | None) -> tuple[int, Any]:
        if self.way == "gives" and path.endswith("chat/completions"):
            return 200, self.given
        if self.way == "stalled" and path.endswith("chat/completions"):
            return 500, {}
        if self.way == "bad key" and path.endswith("chat/completions"):
            return 401, {"error": {"message": f"bad key {key}"}}
        if self.way in ("no system", "refuses all") and path.endswith("chat/completions"):
            self.refused = self.refused or body["messages"]
            if self.way == "refuses all" or body["messages"] == self.refused:
                return 400, {"error": {"message": f"System role not supported {key}"}}
        if self.way.isdigit() and path.endswith("chat/completions"):
            return int(self.way), {"error": {"message": f"no {key}"}}
        if self.way == "vllm ids" and path == "/tokenize":
            return 200, {"tokens": self.given}
        if self.way == "echoes" and path == "/apply-template":
            return 200, {"prompt": f"{key} \ud800"}
        if self.way == "echoes" and path == "/tokenize":
            return 200, {"tokens": [1, 2]}
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
        if self.way == "echoes":
            text, finish = f"{key} \ud800 {text}", f"stop {key}" * 100
        if self.way == "stops":
            text, finish = text[: len(text) // 2], "stop"
        if self.way == "draws":
            words = text.split(" ")
            self.draw.shuffle(words)
            text = " ".join(words)
        usage = {"prompt_tokens": seen.prompt_tokens, "completion_tokens": tokens}
        message = {"content": text} if self.way != "reasons" else {"content": None, "reasoning_content": text}
        choice = {"message": message, "finish_reason": finish}
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
        words = ["--model", adapter, "--data", DATA, "--device-type", "cpu", "--prompts", 2, "--max-new-tokens", 8]
        assert finetune(["verify", *map(str, words), "--endpoint", server.url, *flags]) == 1 + (way == "locked list")
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
    "an id of no vocabulary": choice(logprobs={"content": [{"logprob": -1.0, "id": 10**12}]}),
    "a negative id": choice(logprobs={"content": [{"logprob": -1.0, "id": -1}]}),
    "no JSON": b"<html>hello</html>",
}


def ask(server: Server, seconds: float = 60) -> Seen:
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
    base, one, two = {"id": "base"}, {"id": "one", "parent": "base"}, {"id": "two", "parent": "base"}
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


def test_a_refused_conversation_is_a_difference(verify: Verify, adapter: Path, serve: Callable[..., Server]):
    report = verify(adapter, "--endpoint", serve("no system").url)
    assert report["code"] == 1 and report["same"] == 7, report
    (finding,) = report["findings"]
    assert (finding["name"], finding["prompts"]) == ("refused", [1]) and "System role" in finding["detail"]
    assert report["deployment"]["refused"].startswith("400 System role not supported")


STATUSES = {"401": "key", "403": "key", "404": "--served-model", "429": "limits requests", "503": "log"}


@pytest.mark.parametrize("way", STATUSES)
def test_a_refusal_has_a_name_and_needs_no_model(
    way: str, verify: Verify, adapter: Path, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
):
    server = serve(way)
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.setattr("finetune.commands.verify.reference.load_weights", None)
    report = verify(adapter, "--endpoint", server.url)
    (finding,) = report["findings"]
    assert (report["code"], finding["name"], len(finding["prompts"])) == (1, "refused", 8)
    assert finding["detail"] == f"{way} no Bearer ***" and STATUSES[way] in finding["mend"]
    assert sum(path.endswith("completions") for path, _, _ in server.asked) == 1


def test_answers_that_a_reasoning_parser_takes_are_found(verify: Verify, adapter: Path, serve: Callable[..., Server]):
    """Answers without thoughts, of a model that thinks in nobody's eyes but the parser's."""
    report = verify(adapter, "--endpoint", serve("reasons").url)
    assert [finding["name"] for finding in report["findings"]] == ["reasoning_parser"], report
    assert report["code"] == 1 and report["same"] == 8


THOUGHT = "<think>\nab\n</think>\n\nc"


@pytest.mark.parametrize(
    ("content", "thoughts", "own", "thinks", "whole", "parsed"),
    [
        ("c", "ab", THOUGHT, True, THOUGHT, False),  # apart, and all there
        ("c", "", THOUGHT, True, THOUGHT, True),  # kept back
        ("", "c", "c", False, "c", True),
        ("d", "xy", "c", False, "<think>\nxy\n</think>\n\nd", False),  # of another model
        ("c", "", "c", False, "c", False),
    ],
)
def test_thoughts_are_put_back(content: str, thoughts: str, own: str, thinks: bool, whole: str, parsed: bool):
    seen, misled = put_back(Seen(content, "stop", thoughts=thoughts), own, thinks)
    assert (seen.answer, misled) == (whole, parsed)


def test_a_failure_is_json_too(adapter: Path, capsys: pytest.CaptureFixture[str]):
    for flags in (["--endpoint", "http://127.0.0.1:9"], []):
        words = ["verify", "--model", str(adapter), "--data", str(DATA), "--device-type", "cpu", *flags, "--json"]
        assert finetune(words) == 2
        report = json.loads(capsys.readouterr().out)
        assert report["error"]["exit_code"] == 2 and report["error"]["fix"]


def test_a_folder_whose_template_raises_is_a_refusal(merged: Path, tmp_path: Path):
    folder = tmp_path / "raises"
    shutil.copytree(merged, folder)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    deployment = MergedFolder(folder, torch.device("cpu"), trust_remote_code=False)
    assert deployment.chat([{"role": "user", "content": "hello"}], 4).finish == "refused"
    assert deployment.facts["refused"] == "no system role"


def test_folders_that_cannot_be_loaded_are_refused(merged: Path, tmp_path: Path):
    folder = tmp_path / "broken"
    shutil.copytree(merged, folder)
    (weights,) = folder.glob("*.safetensors")
    weights.write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match="cannot load it"):
        MergedFolder(folder, torch.device("cpu"), trust_remote_code=False)
    weights.unlink()
    (folder / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="GGUF") as caught:
        MergedFolder(folder, torch.device("cpu"), trust_remote_code=False)
    assert "--endpoint" in caught.value.fix


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
        (("--endpoint", "http://[::1"), 2, "no address"),
        (("--endpoint", "http://a b/v1"), 2, "no address"),
        (("--endpoint", "http://a..b/v1"), 2, "no address"),
        (("--endpoint", "http://host:x/v1"), 2, "no address"),
        (("--endpoint", "http://127.0.0.1:9", "--served-model", "m"), 2, "no server answers"),
        (("--endpoint", serve("locked list").url), 2, "the server refused: 401 bad key"),
        (("--endpoint", serve("redirects").url), 1, "the server redirects: 307"),
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
