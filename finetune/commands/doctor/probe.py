"""Probes in a separate process: an import that crashes, hangs or is killed is a result too."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.runtime.language import _, speak, spoken

# How long a process may take to end after a signal.
GRACE_SECONDS = 10.0
# Begins the line of a probe's output that holds its report as JSON.
MARK = "FINETUNE REPORT "


@dataclass(frozen=True)
class Answer:
    """How a subprocess ended.

    Attributes:
        code: exit code; None if it did not end in time.
        messages: what it printed.
    """

    code: int | None
    messages: str

    @property
    def reports(self) -> list[Any]:
        """Return the reports; a truncated report is left out."""
        reports = []
        for line in re.findall(rf"^{MARK}(.*)$", self.messages, re.M):
            with contextlib.suppress(ValueError):
                reports.append(json.loads(line))
        return reports

    @property
    def report(self) -> Any:
        """Return the probe's report; None if it did not get that far."""
        return self.reports[-1] if self.reports else None

    @property
    def last_lines(self) -> list[str]:
        """The end of its messages, for people who want to see more than the reason."""
        return self.messages.splitlines()[-30:]

    @property
    def reason(self) -> str:
        """Why there is no report, in one line."""
        if self.code is None:
            return _("it did not answer in time")
        lines = [line.strip() for line in self.messages.splitlines() if line.strip()]
        if self.code < 0:
            ended = _("it was ended by {signal}").format(signal=signal.Signals(-self.code).name)
            return f"{ended}: {lines[-1]}" if lines else ended
        errors = [line for line in lines if "Error" in line] or lines
        return errors[-1] if errors else _("it ended with exit code {code}").format(code=self.code)

    @property
    def fix(self) -> str:
        """Return the fix for processes that failed."""
        if self.code is None:
            return _(
                "the machine may be too busy, or a device hangs: look (top, npu-smi info,"
                " nvidia-smi), and try again"
            )
        return _(
            "the checks above may tell why; --json has the last messages of the processes"
            " (values.messages)"
        )


def ask(
    module: str,
    request: Mapping[str, Any],
    *,
    environment: Mapping[str, str],
    timeout_seconds: float,
) -> Answer:
    """Run `python -m MODULE`, whose `main` is `answer_with`, with the request on its standard
    input.
    """
    return run_to_end(
        [sys.executable, "-m", module],
        environment=environment,
        timeout_seconds=timeout_seconds,
        standard_input=json.dumps({**request, "language": spoken()}),
    )


def answer_with(probe: Callable[..., Any]) -> None:
    """Be the other side of `ask`: call the probe with the request, and print its report."""
    request = json.load(sys.stdin)
    speak(request.pop("language"))
    print_report(probe(**request))


def print_report(report: Any) -> None:
    """Print a report that `Answer` finds between the lines of libraries and of other processes: in
    one write, which the system does not divide up to 4 KiB.
    """
    print(f"\n{MARK}{json.dumps(report)}", flush=True)


def run_to_end(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    timeout_seconds: float,
    standard_input: str = "",
) -> Answer:
    """Run a process to its end and return how it ended, with both of its streams. One that takes
    too long gets SIGTERM, then SIGKILL.

    A launcher ends its own workers at SIGTERM, and they end themselves when it is gone.
    """
    process = subprocess.Popen(
        list(command),
        env={**environment, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        messages, _errors = process.communicate(standard_input, timeout=timeout_seconds)
        return Answer(process.returncode, messages)
    except subprocess.TimeoutExpired:
        return Answer(None, _end(process))
    except BaseException:
        _end(process)
        raise


def _end(process: subprocess.Popen[str]) -> str:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            return process.communicate(timeout=GRACE_SECONDS)[0]
        except subprocess.TimeoutExpired:
            continue
    return ""
