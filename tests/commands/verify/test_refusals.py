"""What deployments and `verify` refuse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from launching import ROOT
from protocol_server import SECRET

from finetune.__main__ import main as finetune
from finetune.commands.verify.comparison import refusals
from finetune.commands.verify.evidence import EngineResponse, Prompt, Replay
from finetune.commands.verify.merged import MergedFolder
from finetune.errors import ConfigError

DATA = ROOT / "data_samples" / "valid.jsonl"


def test_a_refusal_has_a_name_and_needs_no_model(verify, adapter, serve, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.setattr("finetune.commands.verify.reference.load_weights", None)
    fixes = {"401": "key", "404": "--served-model", "429": "limits requests", "503": "log"}
    for status, fix in fixes.items():
        server = serve(status)
        report = verify(adapter, "--endpoint", server.url)
        (finding,) = report["findings"]
        assert (report["code"], finding["name"], len(finding["prompts"])) == (1, "refused", 5)
        assert finding["detail"] == f"{status} no Bearer ***" and fix in finding["mend"]
        assert sum(path.endswith("completions") for path, _, _ in server.asked) == 1
    server = serve("gives")  # an answer that ends by refusing
    server.given = {"choices": [{"message": {"content": "no"}, "finish_reason": "refused"}]}
    report = verify(adapter, "--endpoint", server.url)
    assert [finding["name"] for finding in report["findings"]] == ["refused"]
    assert report["code"] == 1


def test_failures_are_json_where_it_is_asked_for(adapter: Path, capsys, monkeypatch):
    words = ["verify", "--model", str(adapter), "--data", str(DATA), "--device-type", "cpu"]
    for flags in (["--endpoint", "http://127.0.0.1:9"], []):
        assert finetune([*words, *flags, "--json"]) == 2
        error = json.loads(capsys.readouterr().out)["error"]
        assert error["exit_code"] == 2 and error["fix"]
    wrong = "verify --endpoint localhost:8000 --prompts 0 --wrong"
    for flag in ("--json", "--json=true", "--json true"):
        assert finetune([*wrong.split(), *flag.split()]) == 2
        error = json.loads(capsys.readouterr().out)["error"]
        problems = error["problems"]
        assert error["exit_code"] == 2 and error["what"] == f"{len(problems)} problems"
        named = {word for one in problems for word in (one["what"].split()[-1], one["where"])}
        assert {"--wrong", "--prompts"} <= named
    assert finetune([*wrong.split(), "--json=false"]) == 2 and capsys.readouterr().out == ""

    def interrupted(_options: object) -> dict:
        raise KeyboardInterrupt

    monkeypatch.setattr("finetune.commands.verify.command.verify", interrupted)
    assert finetune(["verify", "--model", str(adapter), "--merged", "x", "--json"]) == 130
    error = json.loads(capsys.readouterr().out)["error"]
    assert error.keys() == {"what", "where", "fix", "exit_code"} and error["fix"]
    assert error["exit_code"] == 130


def test_refusals_with_other_remedies_are_apart():
    words = ("400 no system", "422 too long", "429 slower", "400 no system")
    replays = [
        Replay(n, Prompt((), "", ()), EngineResponse("", "refused", status=int(w[:3]), words=w))
        for n, w in enumerate(words, 1)
    ]
    template, limit = refusals(replays)
    assert (template["detail"], template["prompts"]) == ("400 no system", [1, 2, 4])
    assert (limit["detail"], limit["prompts"]) == ("429 slower", [3])
    assert "chat template" in template["mend"] and "limits requests" in limit["mend"]


def test_folders_that_refuse_or_cannot_be_loaded(merged: Path, tmp_path: Path):
    folder, cpu = tmp_path / "raises", torch.device("cpu")
    shutil.copytree(merged, folder)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    deployment = MergedFolder(folder, cpu, trust_remote_code=False)
    assert deployment.chat([{"role": "user", "content": "hello"}], 4).finish == "refused"
    assert deployment.facts["refused"] == "no system role"
    (weights,) = folder.glob("*.safetensors")
    weights.write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match="cannot load it"):
        MergedFolder(folder, cpu, trust_remote_code=False)
    weights.unlink()
    (folder / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="GGUF") as caught:
        MergedFolder(folder, cpu, trust_remote_code=False)
    assert "--endpoint" in caught.value.fix


def test_what_cannot_be_verified_is_refused(adapter, serve, capsys, tmp_path, monkeypatch):
    def refused(code: int, said: str, *flags: object) -> None:
        words = ["--model", adapter, "--device-type", "cpu", *flags]
        assert finetune(["verify", *map(str, words)]) == code
        err = capsys.readouterr().err
        assert said in err and SECRET not in err and "Traceback" not in err, err

    data = ("--data", DATA)
    for flags, said in (
        ((), "there must be one deployment"),
        (("--endpoint", "http://x", "--merged", "y"), "there must be one deployment"),
        (("--endpoint", f"http://user:{SECRET}@host"), "a password in it"),
        (("--merged", tmp_path), "no model is there"),
        (("--endpoint", "http://127.0.0.1:9"), "no server answers"),
        (("--endpoint", "http://127.0.0.1:9", "--context-tokens", 48), "has no room for prompts"),
    ):
        refused(2, said, *data, *flags)
    for url in ("localhost:8000", "http://[::1", "http://a b/v1"):
        refused(2, "no address", *data, "--endpoint", url)
    refused(2, "--data", "--merged", tmp_path)
    refused(2, "the server refused: 401 bad key", *data, "--endpoint", serve("locked list").url)
    refused(1, "the server redirects: 307", *data, "--endpoint", serve("redirects").url)
    server = serve()
    monkeypatch.setattr(server, "get", lambda path, key: (307, {}))
    refused(2, "the server redirects: 307", *data, "--endpoint", server.url)
