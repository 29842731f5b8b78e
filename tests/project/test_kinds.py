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
    result = launched(folder, 2, "poem.txt")
    assert result.returncode == 0, said(result)
    return folder / "run"


def launched(folder: Path, processes: int, text: str):
    own = f"--text {text} --output-dir run --device-type cpu --dtype float32 --report-to none"
    return finetune(folder, f"launch --nproc {processes} toy {own}")


def finetune(folder: Path, line: str):
    paths = {"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"}
    return run_command([sys.executable, "-c", FINETUNE, *line.split()], env=paths, cwd=folder)


def test_it_trains_under_launch(run: Path):
    lines = [json.loads(line) for line in (run / "trainer_log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3] and (run / "model.safetensors").is_file()
    assert json.loads((run / "run_identity.json").read_text())["kind"] == "toy"
    failed = launched(run.parent, 1, "no.txt")
    assert failed.returncode == 2 and "there is no text" in said(failed)


def test_doctor_and_plan(folder: Path, run: Path):
    result = finetune(folder, "doctor toy --json --text poem.txt --output-dir new")
    found = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert found["config"]["what"].startswith("toy:") and found["batch"]["values"] == {"windows": 4}
    assert "bytes" in found["data"]["what"] and found["data"]["verdict"] == "ok"
    devices = "--nodes 1 --devices-per-node 2 --device-name H100 --device-memory 80GiB"
    result = finetune(folder, f"plan toy --json --text poem.txt --output-dir new {devices}")
    assert result.returncode == 0, said(result)
    plan = json.loads(result.stdout)
    assert plan["fits"] and plan["step"]["tokens"] == 64
    checked = finetune(folder, "plan --check run --json")
    assert {"agrees", "compared"} <= set(json.loads(checked.stdout)), said(checked)


def test_monitor_report_and_diagnose(folder: Path, run: Path):
    look = json.loads(finetune(folder, "monitor run --once --json").stdout)
    assert look["kind"] == "toy" and look["state"] == "done" and look["step"] == 3
    for line in ("monitor run --once", "report run --lang en"):
        result = finetune(folder, line)
        assert result.returncode == 0, said(result)
    page = (run / "report.html").read_text()
    assert "a toy" in page and "the bytes of" in page
    assert "no failure" in finetune(folder, "diagnose run --lang en").stdout.lower()


def test_what_a_command_line_is_for(monkeypatch: pytest.MonkeyPatch):
    import toy_kind  # noqa: F401 - registers

    from finetune.config import kinds

    assert tuple(KINDS) == ("sft", "pretrain", "dpo", "toy")
    assert kind_of_arguments(["--data", "a.jsonl", "--beta", "0.2"]).name == "dpo"
    assert kind_of_arguments(["--text", "a.txt", "--output-dir", "b"]).name == "toy"
    assert kind_of_arguments(["--data", "a.jsonl"]).name == "sft"
    monkeypatch.delitem(kinds._MODULES, "toy")
    monkeypatch.delitem(sys.modules, "toy_kind")


@pytest.mark.parametrize("entry", ["sft", "pretrain", "dpo"])
def test_what_a_kind_imports_when_called_exists(entry: str):
    nodes = ast.walk(ast.parse((ROOT / "finetune" / f"{entry}.py").read_text()))
    methods = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    inside = [node for method in methods for node in ast.walk(method)]
    imports = [node for node in inside if isinstance(node, ast.ImportFrom)]
    assert len(imports) >= 4
    for node in imports:
        path = ROOT / Path(*str(node.module).split(".")).with_suffix(".py")
        body = ast.parse(path.read_text()).body if path.exists() else []
        defined = {one.name for one in body if isinstance(one, (ast.FunctionDef, ast.ClassDef))}
        assert {alias.name for alias in node.names} <= (defined or {"device"}), node.module


# Besides the table: the entries and what prepares them, which name themselves; "dpo" is also the
# loss that its kind is named after; what other tools call their kinds is a fact about them.
ALLOWED = (
    "sft.py pretrain.py dpo.py __main__.py config/kinds.py training/prepare.py"
    " training/pretraining/prepare.py config/preference_config.py modeling/preference_loss.py"
    " training/preferences/objective.py commands/convert/axolotl.py"
    " commands/convert/llama_factory.py commands/convert/ms_swift.py"
    " commands/convert/preferences.py commands/convert/trl.py"
)


def test_nobody_else_lists_the_kinds():
    """No other module compares with a kind's name or asks for a configuration's class."""
    for path in sorted((ROOT / "finetune").rglob("*.py")):
        if str(path.relative_to(ROOT / "finetune")) not in ALLOWED.split():
            text = path.read_text(encoding="utf-8")
            kinds = re.search(r"isinstance\(\w+, \(?(?:Run|Pretrain|Preference)Config", text)
            nodes = ast.walk(ast.parse(text))
            names = {node.value for node in nodes if isinstance(node, ast.Constant)}
            assert not kinds and not names & {"sft", "pretrain", "dpo"}, path
