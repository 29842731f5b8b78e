"""Every command of every page is run here, for two steps, or its page says what it needs.

Commands that can be run anywhere stand in ```bash blocks. The others stand in blocks without a
language, below words that say what they need or how long they take. The README is a page like the
others.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from converted_runs import EXAMPLE, INFO
from launching import BIN, PATIENCE_SECONDS, ROOT, environment
from run_helpers import events, largest_relative_difference, losses, wait_for
from shell_blocks import blocks, run_line, run_together, shell_lines, small, trains

from finetune.commands.diagnose.command import diagnose_logs

README = ROOT / "README.md"
PREFERENCES = ROOT / "docs" / "guides" / "preferences.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_COMMANDS = [page for page in PAGES if blocks(page, "bash") and page.stem != "tutorial"]
COMMAND = re.compile(
    r"^(python|make|bash|torchrun|accelerate|docker|sbatch|git|pip|uv|source|[A-Z_]+=\S+ \w+) ",
    re.M,
)
BASE = "data_samples/tiny-qwen3"
REAL_MODEL = "build/smollm2"
RECORD = {"instruction": "Which port does BGP use?", "output": "TCP port 179."}
RECORD["difficulty"] = "explain"
AROUND = "data_samples ds_configs accelerate_configs launchers docs README.md"


def test_a_command_that_is_not_run_says_what_it_needs() -> None:
    fence = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
    for page in PAGES:
        parts = fence.split(page.read_text(encoding="utf-8"))
        for before, language, block in zip(parts[::3], parts[1::3], parts[2::3], strict=False):
            if language != "bash" and COMMAND.search(block):
                paragraph = re.split(r"\n#+ ", before)[-1]
                says = re.search(r"\b(needs?|takes)\b", paragraph, re.IGNORECASE)
                assert says, f"{page.name}: {block}"


def checkout(folder: Path) -> Path:
    """`folder`, with what a reader of the pages has around."""
    (folder / "build").mkdir()
    for name in (*AROUND.split(), REAL_MODEL):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout in which a reader works, with the files that the pages take to be there, under
    their names.
    """
    folder = checkout(tmp_path_factory.mktemp("reader"))
    for name, target in {"BASE": BASE, "MODEL": BASE, "TEXTS": "docs"}.items():
        (folder / name).symlink_to(ROOT / target)
    for name in ("logs", "held_out", "books", "code", "examples/train_lora", "data"):
        (folder / name).mkdir(parents=True)
    labels = {"prompt": "Which port?", "completion": "Port 179.", "label": True}
    text = {"text": "A router chooses a way."}
    rows = {"own": RECORD, "train": RECORD, "labels": labels, "articles": text, "web": text}
    for name, row in rows.items():
        (folder / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 8)
    for name, target in (("valid.jsonl", "."), ("networks_facts.txt", "books")):
        shutil.copy(ROOT / "data_samples" / name, folder / target)
    shutil.copy(folder / "valid.jsonl", folder / "held_out")
    shutil.copy(ROOT / "data_samples" / "generators" / "graphs.py", folder / "code")
    pairs = {"model_name_or_path": BASE, "dataset_name": "pairs.jsonl"}
    pairs |= {"output_dir": "runs/pairs", "use_peft": True}
    for name, text in {
        "pairs.jsonl": blocks(PREFERENCES, "json")[0],
        "question.txt": "What is BGP?",
        "book.txt": "A hub repeats what it hears.",
        "examples/train_lora/qwen3_lora_sft.yaml": yaml.safe_dump(EXAMPLE),
        "data/dataset_info.json": json.dumps(INFO),
        "data/identity.json": json.dumps([RECORD] * 8),
        "data/alpaca_en_demo.json": json.dumps([RECORD] * 8),
        "dpo.yaml": yaml.safe_dump(pairs),
    }.items():
        (folder / name).write_text(text)
    line = small("python -m finetune.sft --config ds_configs/zero3.json", folder / "runs")
    console = run_line(line, folder / "outputs", cwd=folder)
    for name in ("my-run", "a", "b/checkpoint-200"):
        shutil.copytree(folder / "runs/zero3", folder / "runs" / name)
    for name in ("train.log", "logs/20260101-120000-1.log"):
        (folder / name).write_text(console)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.stem)
def test_the_commands_of_a_page(page: Path, place: Path, request: pytest.FixtureRequest) -> None:
    lines = shell_lines(page)
    if any(REAL_MODEL in line for line in lines):
        request.getfixturevalue("smollm2_model")
    for line in lines:
        run_command(line, place)


def run_command(line: str, place: Path) -> None:
    """One command in the reader's folder, and what it must have done."""
    makefile = (ROOT / "Makefile").read_text()
    if line.startswith("make "):
        assert f"\n{line.split()[1]}: $(READY)" in makefile
        return
    if line.startswith("source "):
        assert line == "source .venv/bin/activate" and "VENV   := .venv\n" in makefile
        return
    if "runs/demo-TIME" in line:
        return  # tests/commands/evaluate/test_tasks.py
    if "--output-dir tokens/" in line and (place / "tokens").exists():
        return  # done for the example of Python
    if "finetune verify" in line and not (place / "models/my-model").exists():
        run_command(shell_lines(ROOT / "docs" / "guides" / "merging.md")[0], place)
    words = small(line, place / "runs")
    if "--config run.yaml" in line:
        words += f" --model {BASE} --cutoff-len 256"
    if "finetune serve" in line:
        return check_server(words, place)
    # Something is left of a run; a CPU's C library kept memory that the run did not need any more
    # (docs/guides/planning.md).
    codes = (0, 1) if "finetune clean" in line or "plan --check" in line else (0,)
    variables = {"NPROC_PER_NODE": "1", "FINETUNE_LOG_DIR": str(place / "logs")}
    output = run_line(words, place / "outputs", variables, codes, cwd=place)
    if "torchrun" in line or "accelerate launch" in line:
        (place / "console.log").write_text(output)
        assert diagnose_logs([place / "console.log"]) == [], "a launcher's own words"
    if trains(line) and "--dry-run" not in line:
        check_run(line, words)
    for part, form in FORMS.items():
        assert part not in line or re.search(form, output, re.M | re.S), f"{line}\n{output}"
    for part, check in CHECKS.items():
        assert part not in line or check(output, place), f"{line}\n{output}"


DONE = r"\[SUCCESS\] done: 2 steps"
# What the output of a command with these words must have: regular expressions,
FORMS = {
    "finetune.pretrain": DONE,
    "finetune.dpo": DONE,
    "finetune checkpoints": r"\Acheckpoint-2  step 2 [^\n]* valid\n\Z",
    "--audit": "(?=.*near duplicates).*shared with the validation data",
    "curriculum show": r"(?=.*80\.0%).*passes",
    "finetune doctor": r"\A(?!.*\[ERROR\]).*\[OK\]",
    "finetune plan --config": "it fits",
    "plan --check": r"on the host: predicted \d+ MiB, measured [\d,]+ MiB",
    "finetune diagnose runs": "(?i)no failure",
    "monitor runs/mine": "2/2",
    "finetune report": "report.html",
    "finetune chat": r"\S",
    "finetune eval": r"\| measure \| of \||\| difficulty \|",
    "finetune verify": "the deployment answers as the trained model",
    "--print-config": r"^micro_batch_size +4 +ds_configs/zero3.json$",
}
# and what else must be so.
CHECKS: dict[str, Callable[[str, Path], object]] = {
    "cmp ": lambda said, at: (
        largest_relative_difference(losses(at / "runs/one"), losses(at / "runs/two")) < 1e-5
    ),
    "tail ": lambda said, at: {"step", "loss", "tokens_per_second"} <= set(json.loads(said)),
    "cat runs": lambda said, at: json.loads(said)["state"] == "done",
    "--rows 2": lambda said, at: said.count("\nrecord ") == 2 and "[[" in said,
    "--rows 3": lambda said, at: said.count("\nrecord ") == 3 and "[[" in said,
    "--once --json": lambda said, at: json.loads(said)["step"] == 2,
}


def check_run(line: str, words: str) -> None:
    """The run is done, and was what the line says."""
    output_dir = Path(re.search(r"--output-dir (\S+)", words)[1])
    processes = 2 if re.search("nproc_per_node 2|nproc 2|cpu_2", line) else 1
    named = re.search(r"--config \S*zero(\d)", line)
    stage = 0 if "--deepspeed none" in line or named is None else int(named[1])
    assert json.loads((output_dir / "status.json").read_text())["state"] == "done"
    start = events(output_dir, "start")
    # A run that is done is not started again on two processes.
    if not (output_dir.name == "zero2" and len(start) == 1):
        assert (start[-1]["world_size"], start[-1]["zero_stage"]) == (processes, stage)


def check_server(line: str, place: Path) -> None:
    """It says where it listens, answers there, and ends on Ctrl-C."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    env = environment({"PATH": path, "HF_HOME": str(place / "hf")})
    words, output = ["bash", "-c", f"exec {line}"], subprocess.PIPE
    with subprocess.Popen(
        words, cwd=place, env=env, stdout=output, stderr=subprocess.STDOUT
    ) as server:
        try:
            lines = map(bytes.decode, iter(server.stdout.readline, b""))
            found = (re.search(r"http://127\.0\.0\.1:\d+", line) for line in lines)
            address = next(filter(None, found))[0]
            health = f"{address}/health"
            wait_for(lambda: answers(health), PATIENCE_SECONDS, what="a worker that answers")
            client = blocks(ROOT / "docs" / "guides" / "chat_and_serve.md", "python")[0]
            client = client.replace("http://127.0.0.1:8000", address)
            name = re.search(r"--model \S*/(\S+)", line)[1]
            client = client.replace('"my-run"', f'"{name}"')
            (place / "client.py").write_text(client, encoding="utf-8")
            run_block("python client.py", place)
        finally:
            server.send_signal(signal.SIGINT)
            rest = server.communicate(timeout=PATIENCE_SECONDS)[0]
    assert server.returncode == 0 and b"stopped by a signal" in rest


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=60) as reply:
            return reply.status == 200
    except OSError:
        return False


SHOWN = """
[INFO] auto: learning_rate 0.0011; by 12 samples, hidden size 576, and finetuning lora
[SUCCESS] done: 15 steps, output in runs/office
Printers are in VLAN 55.
The capital of France is Paris.
runs/office  done  step 15/15 (100%)
runs/office/report.html
"""


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2_model")
def test_the_tutorial_does_what_it_shows(tmp_path: Path) -> None:
    place, page = checkout(tmp_path), ROOT / "docs" / "start" / "tutorial.md"
    setup, *texts = blocks(page, "bash")
    for line in setup.splitlines():
        run_command(line, place)
    said = "\n".join(run_block(text, place) for text in texts)
    shown = "\n".join(blocks(page, "text"))
    for line in SHOWN.strip().splitlines():
        assert line in shown and line in said, line


OF_PYTHON = ("reference/run_folder.md", "guides/chat_and_serve.md", "guides/pretraining_data.md")
CHECKED = """
assert result.state == "done" and trainer.state.global_step == 4
assert all(seen["labels"].shape == seen["input_ids"].shape for seen in [finetune.PackedCollator()(rows[:3])])
"""


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2_model")
def test_the_examples_of_python_work(place: Path) -> None:
    run_command(shell_lines(ROOT / "docs" / "guides" / "pretraining_data.md")[0], place)
    code = [*blocks(ROOT / "docs" / "guides" / "python.md", "python"), CHECKED]
    # Of other pages: the run's adapter in plain peft, answers from Python, and token files.
    others = [text for name in OF_PYTHON for text in blocks(ROOT / "docs" / name, "python")]
    code += [text for text in others if "OpenAI" not in text]
    (place / "example.py").write_text("\n".join(code), encoding="utf-8")
    output = run_block("python example.py", place)
    assert "step 1" in output and "end 4" in output


def run_block(text: str, place: Path) -> str:
    ((code, output),) = run_together([f"set -e\n{text}"], place / "outputs", cwd=place)
    assert code == 0, f"{text}\n{output}"
    return output
