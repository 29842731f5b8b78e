"""What the READMEs show is true: every command runs, both languages show the same ones, and what is named exists."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import urllib.request
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from launching import BIN, PATIENCE_SECONDS, ROOT, environment
from run_helpers import events, largest_relative_difference, losses, wait_for
from shell_blocks import blocks, run_line, shell_lines, small, trains

from finetune.__main__ import COMMANDS
from finetune.commands.diagnose.command import diagnose_logs
from finetune.config.run_config import RunConfig

ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
PAGES_ON_TOP = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
DOCUMENTS = [ENGLISH, CHINESE, *(ROOT / name for name in PAGES_ON_TOP), *sorted((ROOT / "docs").glob("*.md"))]
LINES = shell_lines(ENGLISH)
# Flags in the documents that are not ours but of torchrun, accelerate launch and other programs.
LAUNCHER_FLAGS = {"--standalone", "--nproc_per_node", "--nnodes", "--node_rank", "--master_addr", "--master_port"}
LAUNCHER_FLAGS |= {"--max-restarts", "--local-rank", "--config_file", "--multi_gpu", "--num_processes", "--signal"}
# Of docker, kubectl, sacct, pip and hf, in the remedies of diagnose; of nanochat
LAUNCHER_FLAGS |= {"--format", "--shm-size", "--ipc", "--gpus", "--gpus-per-node", "--local-dir", "--build-arg"}
LAUNCHER_FLAGS |= {"--no-build-isolation", "--no-deps", "--window-pattern"}
LAUNCHER_FLAGS |= {"--dataset", "--dataset_name", "--model_name_or_path", "--use_peft", "--rlhf_type"}  # of other tools
LAUNCHER_FLAGS |= {"--accelerate_config", "--zero_stage", "--deepspeed_config_file"}  # that these pass on
LAUNCHER_FLAGS |= {"--max-model-len"}  # of vLLM
LAUNCHER_FLAGS |= {"--jobs", "--every"}  # of tests/grid.py
LAUNCHER_FLAGS |= {"--machine_rank", "--main_process_ip", "--main_process_port", "--use_deepspeed", "--flag"}


def test_both_languages_show_the_same() -> None:
    assert shell_lines(CHINESE) == LINES
    assert blocks(CHINESE, "python") == blocks(ENGLISH, "python")
    assert blocks(CHINESE, "json") == blocks(ENGLISH, "json")

    def facts(document: Path) -> list[str]:
        """Code spans but for links, headings by rank, and rows of tables by their number."""
        text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
        return sorted(re.findall(r"`([^`]+)`", text)) + re.findall(r"^(#+) ", text, flags=re.MULTILINE)

    assert facts(CHINESE) == facts(ENGLISH)


def test_the_two_commands_come_first() -> None:
    assert LINES[:2] == ["make demo", "make test"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stands for runs/: commands that follow one another find what the earlier ones left."""
    return tmp_path_factory.mktemp("readme")


@pytest.mark.parametrize("number", range(len(LINES)), ids=lambda number: LINES[number][:60])
def test_every_command_works(number: int, folder: Path) -> None:
    """In the order of the document, as later ones look at what earlier ones made."""
    line = LINES[number]
    if line.startswith("make "):
        assert f"\n{line.removeprefix('make ')}: $(READY)\n" in (ROOT / "Makefile").read_text()
        return
    if line.startswith("source "):
        assert line == "source .venv/bin/activate" and "VENV   := .venv\n" in (ROOT / "Makefile").read_text()
        return
    if "multi_node.sh" in line:
        return  # both lines together are run by tests/project/test_launchers.py
    if "finetune serve" in line:
        return check_server(small(line, folder), folder)
    may_time_out = line.startswith("timeout ")
    variables = {"NPROC_PER_NODE": "1", "FINETUNE_LOG_DIR": str(folder / "logs")}
    output = run_line(small(line, folder), folder, variables, codes=(0, 124) if may_time_out else (0,))
    if "torchrun" in line or "accelerate launch" in line:
        (folder / "console.log").write_text(output)
        assert diagnose_logs([folder / "console.log"]) == [], "a launcher's own words are taken for a failure"
    for shown in re.findall(r"log in (\S+logs/\S+)", output):
        assert "SUCCESS" in (ROOT / shown).read_text()
    if trains(line) and not may_time_out:
        check_run(line, folder)
    elif line.startswith("cmp "):
        assert largest_relative_difference(losses(folder / "one"), losses(folder / "two")) < 1e-5
    elif line.startswith("tail "):
        assert {"step", "loss", "learning_rate", "grad_norm", "tokens_per_second"} <= set(json.loads(output))
    elif line.startswith("cat "):
        assert (json.loads(output)["state"], json.loads(output)["exit_code"]) == ("done", 0)
    elif "finetune.pretrain" in line:
        assert "[SUCCESS] done: 2 steps" in output and any(
            (folder / name / "model.safetensors").is_file() for name in ("base", "continued")
        )
    elif "finetune.dpo" in line:
        assert "[SUCCESS] done: 2 steps" in output and events(folder / "preferences", "start")
    elif "checkpoints" in line:
        assert re.fullmatch(r"checkpoint-2  step 2 .* valid\n", output)
    elif "--audit" in line:
        assert "near duplicates" in output and "shared with the validation data" in output
    elif "inspect" in line:
        assert output.count("\nrecord ") == 3 and "[[" in output
    elif "curriculum show" in line:
        assert "80.0%" in output and "passes" in output
    elif "finetune doctor" in line:
        assert "[OK]" in output and "[ERROR]" not in output
    elif "finetune plan" in line:
        assert "it fits" in output and "ZeRO-3" in output
    elif "finetune diagnose" in line:
        assert "no failure" in output.lower()
    elif "finetune monitor" in line:
        assert "2/2" in output
    elif "finetune report" in line:
        assert (folder / "zero3" / "report.html").stat().st_size > 10_000
    elif "finetune chat" in line:
        assert output.strip()
    elif "finetune eval" in line:
        assert all(name in output for name in ("explain", "reasoning", "topology", "base"))
    elif "finetune merge" in line:
        assert (folder / "merged" / "model.safetensors").is_file()
    elif "finetune verify" in line:
        assert "the deployment answers as the trained model" in output
    elif "--print-config" in line:
        assert re.search(r"^micro_batch_size +4 +ds_configs/zero3.json$", output, re.MULTILINE)


def check_server(line: str, folder: Path) -> None:
    """It says where it listens, answers there, and ends on Ctrl-C."""
    env = environment({"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "HF_HOME": str(folder / "hf")})
    words = ["bash", "-c", f"exec {line}"]
    with subprocess.Popen(words, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as server:
        try:
            said = map(bytes.decode, iter(server.stdout.readline, b""))
            address = next(found[0] for line in said if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
            wait_for(lambda: answers(f"{address}/health"), PATIENCE_SECONDS, what="a worker that answers")
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=PATIENCE_SECONDS)
    assert server.returncode == 0


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=60) as reply:
            return reply.status == 200
    except OSError:
        return False


def check_run(line: str, folder: Path) -> None:
    """The run is done, and was what the line says."""
    output_dir = Path(re.search(r"--output-dir (\S+)", small(line, folder))[1])
    processes = 2 if re.search("nproc_per_node 2|nproc 2|cpu_2", line) else 1
    stage = 0 if "--deepspeed none" in line else int(re.search(r"zero(\d)", line.split("--config ")[-1])[1])
    assert json.loads((output_dir / "status.json").read_text())["state"] == "done"
    start = events(output_dir, "start")
    if not (output_dir.name == "zero2" and len(start) == 1):  # stopped after 20 seconds, or done before that
        assert (start[-1]["world_size"], start[-1]["zero_stage"]) == (processes, stage)


@pytest.mark.parametrize("number", range(len(blocks(ENGLISH, "python"))))
def test_every_python_example_works(number: int, folder: Path, tmp_path: Path) -> None:
    """After the commands, whose adapter the second one loads."""
    code = blocks(ENGLISH, "python")[number].replace("runs/", f"{folder}/")
    code = code.replace('"max_steps": 20', f'"max_steps": 2, "cache_dir": "{folder}/cache", "device_type": "cpu"')
    (tmp_path / "example.py").write_text(code, encoding="utf-8")
    output = run_line(f"python {tmp_path / 'example.py'}", tmp_path, {"PYTHONPATH": str(ROOT)})
    if "finetune.run" in code:
        assert re.search(r"^done 2 \d+\.\d+$", output, re.MULTILINE)


def test_the_data_example_is_a_record() -> None:
    from finetune.data.formats import detect_format, to_conversation

    (record,) = map(json.loads, blocks(ENGLISH, "json"))
    assert detect_format(record) == "alpaca"
    assert to_conversation(record, "alpaca", ("explain", "reasoning", "topology")).difficulty == "explain"


def test_the_curriculum_example_is_a_configuration() -> None:
    curriculum, sources = map(yaml.safe_load, blocks(ROOT / "docs" / "curriculum.md", "yaml"))
    settings = {"model": "m", "data": "d", "output_dir": "o", **curriculum}
    assert RunConfig.model_validate(settings).curriculum.levels == ("easy", "hard")
    assert [source.weight for source in RunConfig.model_validate(settings | sources).sources] == [3.0, 1.0]


@cache
def known_flags() -> frozenset[str]:
    """What the help of every command names."""
    said = io.StringIO()
    for module, _ in COMMANDS.values():
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            import_module(module).main(["--help"])
    ours = re.findall(r"--[a-z][\w-]+", said.getvalue())
    scripts = [path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").glob("*.py")]
    return frozenset(ours + re.findall(r'"(--[a-z][a-z-]+)"', "\n".join(scripts)))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_what_is_named_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    # In the table of the guides only the right column is ours, and what it refuses it names.
    ours = "\n".join(line.split(" | ")[-1] for line in text.splitlines() if "refused" not in line)
    for name in re.findall(r"(?<![\w-])--([a-z][\w-]+)", ours if document.name == "from_the_guides.md" else text):
        assert f"--{name}".replace("_", "-") in known_flags() or f"--{name}" in LAUNCHER_FLAGS, f"--{name}"
    for path in re.findall(r"\b(?:tests|docs|ds_configs|accelerate_configs|launchers|data_samples)/[\w/.*-]*\w", text):
        assert list(ROOT.glob(path)), path
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert target.startswith("https://") or (document.parent / target).exists(), target
    for command in re.findall(r"python -m finetune (\w+)", text):
        assert command in COMMANDS, command
