"""The commands that a Markdown file shows, and how to try them here: small, in their own folder."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import run_helpers
from launching import BIN, PATIENCE_SECONDS, ROOT, environment

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(document: Path, language: str) -> list[str]:
    """The contents of the fenced blocks of one language, in order."""
    found = _FENCE.findall(document.read_text(encoding="utf-8"))
    return [text for name, text in found if name == language]


def shell_lines(document: Path) -> list[str]:
    """The commands of all shell blocks, in order, without their comments."""
    joined = (block.replace("\\\n", "") for block in blocks(document, "bash"))
    lines = [line.partition("  # ")[0].strip() for block in joined for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def trains(line: str) -> bool:
    starts = ("finetune.sft", "finetune sft", "finetune launch", "launchers/")
    return any(start in line for start in starts) and "--print-config" not in line


def small(line: str, folder: Path) -> str:
    """The same command for two steps, in `folder` instead of runs/ and the user's cache."""
    cache = f" --cache-dir {shlex.quote(str(folder / 'cache'))}"
    if trains(line):
        if "--output-dir" not in line:
            line += " --output-dir runs/" + re.search(r"--config (?:ds_configs/)?(\w+)[.]", line)[1]
        line += " --data data_samples/train.jsonl --max-steps 2 --device-type cpu"
    # Seconds after which a run is stopped: on a busy machine it has not even begun by then.
    line = line.replace("timeout --signal TERM 20 ", "timeout --signal TERM 600 ")
    if "--eval-steps" in line:
        given = r"--eval-steps \d+ --eval-generate \d+"
        line = re.sub(given, "--eval-steps 1 --eval-generate 2", line)
    if "finetune.dpo" in line:
        line += " --max-steps 2 --device-type cpu"
    if "finetune.pretrain" in line:
        # The model that stands for the reader's was made for 512 tokens.
        line = line.replace("--max-seq-len 2048", "--max-seq-len 128")
        line = line.replace("size 65536", "size 512")
        line += " --num-iterations 2 --device-type cpu --report-to none"
    if "finetune serve" in line:
        line += " --port 0 --device-type cpu"
    if " chat " in line or " eval " in line:
        line += " --max-new-tokens 4" if " chat " in line else " --generate 2 --max-new-tokens 4"
    # of two steps so little was learned that 16 bits would lose it, which merge refuses
    if "finetune merge" in line:
        line += " --dtype float32"
    caches = trains(line) or "finetune inspect" in line or "finetune.dpo" in line
    return line.replace("runs/", f"{folder}/") + (cache if caches else "")


def run_together(
    lines: Sequence[str],
    folder: Path,
    variables: dict[str, str] | None = None,
    timeout_seconds: float = PATIENCE_SECONDS,
    cwd: Path = ROOT,
) -> list[tuple[int, str]]:
    """Run shell lines at the same time (as on several nodes); the exit code and output of each."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "HF_HOME": str(folder / "hf")}
    env = environment(own | (variables or {}))
    logs = [folder / f"output-{number}-{time.monotonic_ns()}.txt" for number in range(len(lines))]
    started = []
    try:
        for line, log in zip(lines, logs, strict=True):
            with log.open("wb") as file:
                output = {"stdout": file, "stderr": file, "start_new_session": True}
                started.append(subprocess.Popen(["bash", "-c", line], cwd=cwd, env=env, **output))
        deadline = time.monotonic() + timeout_seconds
        codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its workers watch it and end too
                process.wait()
    return [(code, log.read_text(errors="replace")) for code, log in zip(codes, logs, strict=True)]


def run_line(
    line: str,
    folder: Path,
    variables: dict[str, str] | None = None,
    codes: Sequence[int] = (0,),
    cwd: Path = ROOT,
) -> str:
    """Run one shell line; its output. `python -m finetune...` is forked, which saves its imports."""
    words = shlex.split(line)
    if words[:2] == ["python", "-m"] and "*" not in line:
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"output-{time.monotonic_ns()}.txt"
        code, output = run_helpers.run_module(words[2], words[3:], log, variables or {}, cwd)
    else:
        ((code, output),) = run_together([line], folder, variables, cwd=cwd)
    assert code in codes, f"{line}\nexit code {code}\n{output}"
    return output
