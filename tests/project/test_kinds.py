"""A third kind of run, which only this test knows, works in every command that looks at runs."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import ROOT, run_command, said

from finetune.__main__ import main
from finetune.config import kinds
from finetune.config.kinds import kind_of_arguments

# `python -m finetune ...` in a process that knows the toy; started processes find it by its
# module's name.
FINETUNE = "import sys, toy_kind; from finetune.__main__ import main; sys.exit(main(sys.argv[1:]))"
PATHS = f"{ROOT / 'tests'}:{ROOT}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a text, while this process knows the toy too."""
    made = tmp_path_factory.mktemp("toy")
    (made / "poem.txt").write_text("The rank that waits is not the rank that fails.\n" * 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        patch.setenv("PYTHONPATH", PATHS)
        import toy_kind  # noqa: F401 - registers

        yield made
    sys.modules.pop("toy_kind")
    kinds._MODULES.pop("toy")


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """A run of the toy, as launched."""
    own = "--text poem.txt --output-dir run --device-type cpu --dtype float32 --report-to none"
    words = [sys.executable, "-c", FINETUNE, *f"launch --nproc 1 toy {own}".split()]
    result = run_command(words, env={"PYTHONPATH": PATHS}, cwd=folder)
    assert result.returncode == 0, said(result)
    return folder / "run"


@pytest.fixture
def printed(folder: Path, capsys) -> Callable[[str], str]:
    def call(line: str) -> str:
        main(line.split())
        return capsys.readouterr().out

    return call


def test_it_trains_under_launch(run: Path):
    lines = [json.loads(line) for line in (run / "trainer_log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3] and (run / "model.safetensors").is_file()
    assert json.loads((run / "run_identity.json").read_text())["kind"] == "toy"


def test_doctor_and_plan(printed: Callable[[str], str], run: Path):
    report = json.loads(printed("doctor toy --json --text poem.txt --output-dir new"))
    found = {check["name"]: check for check in report["checks"]}
    assert found["config"]["what"].startswith("toy:") and found["batch"]["values"] == {"windows": 4}
    assert "bytes" in found["data"]["what"] and found["data"]["verdict"] == "ok"
    devices = "--nodes 1 --devices-per-node 2 --device-name H100 --device-memory 80GiB"
    plan = json.loads(printed(f"plan toy --json --text poem.txt --output-dir new {devices}"))
    assert plan["fits"] and plan["step"]["tokens"] == 64
    assert {"agrees", "compared"} <= set(json.loads(printed("plan --check run --json")))


def test_monitor_report_and_diagnose(printed: Callable[[str], str], run: Path):
    look = json.loads(printed("monitor run --once --json"))
    assert look["kind"] == "toy" and look["state"] == "done" and look["step"] == 3
    printed("report run --lang en")
    page = (run / "report.html").read_text()
    assert "a toy" in page and "the bytes of" in page
    assert "no failure" in printed("diagnose run --lang en").lower()


@pytest.mark.usefixtures("folder")
def test_what_a_command_line_is_for():
    assert tuple(kinds.KINDS) == ("sft", "pretrain", "dpo", "toy")
    assert kind_of_arguments(["--data", "a.jsonl", "--beta", "0.2"]).name == "dpo"
    assert kind_of_arguments(["--text", "a.txt", "--output-dir", "b"]).name == "toy"


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
            asked = re.search(r"isinstance\(\w+, \(?(?:Run|Pretrain|Preference)Config", text)
            nodes = ast.walk(ast.parse(text))
            names = {node.value for node in nodes if isinstance(node, ast.Constant)}
            assert not asked and not names & {"sft", "pretrain", "dpo"}, path
