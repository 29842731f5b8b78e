"""A third kind of run, which only this test knows, works in every command that looks at runs."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest
from launching import ROOT, run_command, said

from finetune.config.kinds import KINDS, kind_of_arguments

# `python -m finetune ...` in a process that knows the toy; started processes find it by its
# module's name.
FINETUNE = "import sys, toy_kind; from finetune.__main__ import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("toy")
    (made / "poem.txt").write_text("The rank that waits is not the rank that fails.\n" * 40)
    return made


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """A run of the toy, launched on two processes."""
    result = finetune(folder, "launch", "--nproc", 2, "toy", *settings(folder))
    assert result.returncode == 0, said(result)
    return folder / "run"


def settings(folder: Path) -> list[object]:
    where = [
        "--text",
        folder / "poem.txt",
        "--output-dir",
        folder / "run",
        "--device-type",
        "cpu",
        "--dtype",
        "float32",
    ]
    return [*where, "--report-to", "none"]


def finetune(folder: Path, *words: object):
    paths = {"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"}
    return run_command([sys.executable, "-c", FINETUNE, *map(str, words)], env=paths, cwd=folder)


def test_it_trains_under_launch(run: Path):
    lines = [json.loads(line) for line in (run / "trainer_log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3] and (run / "model.safetensors").is_file()
    assert json.loads((run / "run_identity.json").read_text())["kind"] == "toy"


def test_doctor(folder: Path):
    result = finetune(
        folder,
        "doctor",
        "toy",
        "--json",
        "--text",
        folder / "poem.txt",
        "--output-dir",
        folder / "new",
    )
    found = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert found["config"]["what"].startswith("toy:") and found["batch"]["values"] == {"windows": 4}
    assert "bytes" in found["data"]["what"] and found["data"]["verdict"] == "ok"


def test_plan(folder: Path, run: Path):
    words = [
        "--nodes",
        1,
        "--devices-per-node",
        2,
        "--device-name",
        "H100",
        "--device-memory",
        "80GiB",
    ]
    text = ["--text", folder / "poem.txt"]
    result = finetune(
        folder, "plan", "toy", "--json", *text, "--output-dir", folder / "new", *words
    )
    assert result.returncode == 0, said(result)
    plan = json.loads(result.stdout)
    assert plan["fits"] and plan["step"]["tokens"] == 64
    checked = finetune(folder, "plan", "--check", run, "--json")
    assert {"agrees", "compared"} <= set(json.loads(checked.stdout)), said(checked)


def test_monitor_and_report(folder: Path, run: Path):
    look = json.loads(finetune(folder, "monitor", run, "--once", "--json").stdout)
    assert look["kind"] == "toy" and look["state"] == "done" and look["step"] == 3
    picture = finetune(folder, "monitor", run, "--once")
    assert picture.returncode == 0, said(picture)
    result = finetune(folder, "report", run, "--lang", "en")
    assert result.returncode == 0, said(result)
    page = (run / "report.html").read_text()
    assert "a toy" in page and "the bytes of" in page


def test_diagnose(folder: Path, run: Path):
    assert "no failure" in finetune(folder, "diagnose", run, "--lang", "en").stdout.lower()
    failed = finetune(
        folder, "launch", "--nproc", 1, "toy", *settings(folder)[2:], "--text", folder / "no.txt"
    )
    assert failed.returncode == 2 and "there is no text" in said(failed)


def test_what_a_command_line_is_for(monkeypatch: pytest.MonkeyPatch):
    import toy_kind  # noqa: F401 - registers

    assert tuple(KINDS) == ("sft", "pretrain", "dpo", "toy")
    assert kind_of_arguments(["--data", "a.jsonl", "--beta", "0.2"]).name == "dpo"
    assert kind_of_arguments(["--text", "a.txt", "--output-dir", "b"]).name == "toy"
    assert kind_of_arguments(["--data", "a.jsonl"]).name == "sft"
    from finetune.config import kinds

    monkeypatch.delitem(kinds._MODULES, "toy")
    monkeypatch.delitem(sys.modules, "toy_kind")


@pytest.mark.parametrize("entry", ["sft", "pretrain", "dpo"])
def test_what_a_kind_imports_when_called_exists(entry: str):
    found = 0
    for method in ast.walk(ast.parse((ROOT / "finetune" / f"{entry}.py").read_text())):
        if not isinstance(method, ast.FunctionDef):
            continue
        for node in ast.walk(method):
            if isinstance(node, ast.ImportFrom):
                path = ROOT / Path(*str(node.module).split(".")).with_suffix(".py")
                defined = defined_in(path) if path.exists() else {"device"}
                assert {alias.name for alias in node.names} <= defined, f"{entry}.{method.name}"
                found += 1
    assert found >= 4


def defined_in(path: Path) -> set[str]:
    body = ast.parse(path.read_text()).body
    return {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def test_nobody_else_lists_the_kinds():
    """No other module compares with a kind's name or asks for a configuration's class."""
    # Besides the table: the entries and what prepares them, which name themselves.
    allowed = {"sft.py", "pretrain.py", "dpo.py", "__main__.py", "config/kinds.py"}
    allowed |= {"training/prepare.py", "training/pretraining/prepare.py"}
    # "dpo" is also the loss that its kind is named after.
    allowed |= {
        "config/preference_config.py",
        "modeling/preference_loss.py",
        "training/preferences/objective.py",
    }
    # What other tools call their kinds of run is a fact about them.
    tools = ("axolotl", "llama_factory", "ms_swift", "preferences", "trl")
    allowed |= {f"commands/convert/{tool}.py" for tool in tools}
    for path in sorted((ROOT / "finetune").rglob("*.py")):
        if str(path.relative_to(ROOT / "finetune")) in allowed:
            continue
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"isinstance\(\w+, \(?(?:Run|Pretrain|Preference)Config", text), path
        names = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
        assert not names & {"sft", "pretrain", "dpo"}, path
