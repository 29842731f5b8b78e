"""What is refused: conversations by a deployment, and deployments, flags and folders by
`verify`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from protocol_server import SECRET, Server

from finetune.__main__ import main as finetune
from finetune.commands.verify.comparison import ask, refusals
from finetune.commands.verify.evidence import EngineResponse, Messages, Prompt, Replay
from finetune.commands.verify.merged import MergedFolder
from finetune.errors import ConfigError

DATA = Path(__file__).parents[3] / "data_samples" / "valid.jsonl"
Verify = Callable[..., dict]


def test_a_refused_conversation_is_a_difference(
    verify: Verify, adapter: Path, serve: Callable[..., Server]
):
    report = verify(adapter, "--endpoint", serve("no system").url)
    assert report["code"] == 1 and report["same"] == 7, report
    (finding,) = report["findings"]
    assert (finding["name"], finding["prompts"]) == ("refused", [1]) and "System role" in finding[
        "detail"
    ]
    assert report["deployment"]["refused"].startswith("400 System role not supported")


STATUSES = {
    "401": "key",
    "403": "key",
    "404": "--served-model",
    "429": "limits requests",
    "503": "log",
}


@pytest.mark.parametrize("way", STATUSES)
def test_a_refusal_has_a_name_and_needs_no_model(
    way: str,
    verify: Verify,
    adapter: Path,
    serve: Callable[..., Server],
    monkeypatch: pytest.MonkeyPatch,
):
    server = serve(way)
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.setattr("finetune.commands.verify.reference.load_weights", None)
    report = verify(adapter, "--endpoint", server.url)
    (finding,) = report["findings"]
    assert (report["code"], finding["name"], len(finding["prompts"])) == (1, "refused", 8)
    assert finding["detail"] == f"{way} no Bearer ***" and STATUSES[way] in finding["mend"]
    assert sum(path.endswith("completions") for path, _, _ in server.asked) == 1


def test_a_failure_is_json_too(adapter: Path, capsys: pytest.CaptureFixture[str]):
    for flags in (["--endpoint", "http://127.0.0.1:9"], []):
        words = [
            "verify",
            "--model",
            str(adapter),
            "--data",
            str(DATA),
            "--device-type",
            "cpu",
            *flags,
            "--json",
        ]
        assert finetune(words) == 2
        report = json.loads(capsys.readouterr().out)
        assert report["error"]["exit_code"] == 2 and report["error"]["fix"]


@pytest.mark.parametrize(
    "flag", ["--json", "--json=true", "--json true", "--json=false", "--json false"]
)
def test_several_failures_are_all_json_where_it_is_asked_for(
    flag: str, capsys: pytest.CaptureFixture[str]
):
    assert (
        finetune(
            ["verify", "--endpoint", "localhost:8000", "--prompts", "0", *flag.split(), "--wrong"]
        )
        == 2
    )
    said = capsys.readouterr()
    if flag.endswith("false"):
        assert said.out == ""
        return
    error = json.loads(said.out)["error"]
    assert error["exit_code"] == 2 and error["what"] == f"{len(error['problems'])} problems"
    assert {"--wrong", "--prompts"} <= {
        problem["what"].split()[-1] for problem in error["problems"]
    } | {problem["where"] for problem in error["problems"]}, error
    assert all(
        problem["what"] in said.err and problem["fix"] in said.err for problem in error["problems"]
    )


def test_an_interrupt_is_json_too(
    adapter: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupted(_options: object) -> dict:
        raise KeyboardInterrupt

    monkeypatch.setattr("finetune.commands.verify.command.verify", interrupted)
    assert finetune(["verify", "--model", str(adapter), "--merged", "x", "--json"]) == 130
    error = json.loads(capsys.readouterr().out)["error"]
    assert (
        error.keys() == {"what", "where", "fix", "exit_code"}
        and error["exit_code"] == 130
        and error["fix"]
    )


def test_a_refused_second_answer_is_no_other_answer():
    class Limited:
        name, facts, asked = "limited", {}, 0

        def chat(self, _messages: Messages, _most: int) -> EngineResponse:
            self.asked += 1
            if self.asked == 2:
                return EngineResponse("", "refused", status=429)
            return EngineResponse("yes", "stop")

    first, second = ask(Limited(), [Prompt((), "", ())] * 2, 4)
    assert (first.response.answer, first.again, second.again) == ("yes", None, "yes")


def test_refusals_with_other_remedies_are_apart():
    replies = (
        (400, "400 no system"),
        (422, "422 too long"),
        (429, "429 slower"),
        (400, "400 no system"),
    )
    replays = [
        Replay(
            number,
            Prompt((), "", ()),
            EngineResponse("", "refused", status=status, words=words),
        )
        for number, (status, words) in enumerate(replies, 1)
    ]
    template, limit = refusals(replays)
    assert (template["detail"], template["prompts"]) == ("400 no system", [1, 2, 4])
    assert "chat template" in template["mend"]
    assert (limit["detail"], limit["prompts"]) == ("429 slower", [3])
    assert "limits requests" in limit["mend"]


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
    model = ("--model", adapter, "--data", DATA)
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
        assert (
            found == code and said in words and SECRET not in words and "Traceback" not in words
        ), words
    found, words = refused(capsys, "--model", adapter, "--merged", tmp_path)
    assert found == 2 and "--data" in words


def test_an_answer_that_ends_by_refusing_is_a_refusal(
    verify: Verify, adapter: Path, serve: Callable[..., Server]
):
    server = serve("gives")
    server.given = {"choices": [{"message": {"content": "no"}, "finish_reason": "refused"}]}
    report = verify(adapter, "--endpoint", server.url)
    assert [finding["name"] for finding in report["findings"]] == ["refused"] and report[
        "code"
    ] == 1
