"""Questions that need torch, asked in a process of its own: an import that dies, hangs or is killed is an answer "
"too."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TORCH_TIMEOUT_SECONDS = 120.0
DATA_TIMEOUT_SECONDS = 300.0
BUILD_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Answer:
    """What a subprocess said: its report (None if it wrote none), how it ended, and the end of its messages."""

    report: Any
    code: int | None
    messages: str

    @property
    def last_words(self) -> list[str]:
        """The end of its messages, for people who want to see more than the reason."""
        return self.messages.splitlines()[-30:]

    @property
    def reason(self) -> str:
        """Why there is no report, in one line."""
        if self.code is None:
            return "it did not answer in time"
        lines = [line.strip() for line in self.messages.splitlines() if line.strip()]
        if self.code < 0:
            return f"it was ended by {signal.Signals(-self.code).name}" + (f": {lines[-1]}" if lines else "")
        said = [line for line in lines if "Error" in line] or lines
        return said[-1] if said else f"it ended with exit code {self.code}"


def what_now(answer: Answer) -> tuple[str, str]:
    """What to do about processes that failed, in English and Chinese."""
    if answer.code is None:
        return (
            "the machine may be too busy, or a device hangs: look (top, npu-smi info, nvidia-smi), and try again",
            "机器可能过于繁忙，或设备卡死：请查看 top、npu-smi info、nvidia-smi 后重试",
        )
    return (
        "the checks above may say why; --json has the last words of the processes (values.messages)",
        "上面的检查项可能已说明原因；--json 中有进程最后的输出（values.messages）",
    )


def ask(
    module: str,
    request: Mapping[str, Any],
    *,
    environment: Mapping[str, str],
    timeout_seconds: float,
) -> Answer:
    """Run `python -m MODULE REPORT` with the request as JSON on its standard input; the report is JSON in that file."""
    with tempfile.TemporaryDirectory(prefix="finetune-doctor-") as folder:
        report = Path(folder) / "report.json"
        code, messages = run_to_end(
            [sys.executable, "-m", module, str(report)],
            environment=environment,
            timeout_seconds=timeout_seconds,
            given=json.dumps(request),
        )
        try:
            said = json.loads(report.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            said = None
    return Answer(said, code, messages)


def run_to_end(
    words: Sequence[str],
    *,
    environment: Mapping[str, str],
    timeout_seconds: float,
    given: str = "",
    folder: Path | None = None,
) -> tuple[int | None, str]:
    """(exit code, both streams) of a process; None for one that had to be ended, with SIGTERM first, then SIGKILL.

    A launcher ends its own workers at SIGTERM, and they end themselves when it is gone.
    """
    process = subprocess.Popen(
        list(words),
        env={**environment, "PYTHONUNBUFFERED": "1"},
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        messages, _ = process.communicate(given, timeout=timeout_seconds)
        return process.returncode, messages
    except subprocess.TimeoutExpired:
        return None, _end(process)
    except BaseException:
        _end(process)
        raise


def _end(process: subprocess.Popen[str]) -> str:
    for number, patience_seconds in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            return process.communicate(timeout=patience_seconds)[0]
        except subprocess.TimeoutExpired:
            continue
    return ""
