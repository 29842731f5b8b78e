"""The progress line: a live bar on a terminal, else a log line from time to time."""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING

from finetune.runtime.terminal import console as terminal_console

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

EVERY_SECONDS = 10.0  # minimum time between two lines without a terminal

logger = logging.getLogger("finetune")


class ProgressLine:
    """Only rank 0 makes one.

    Args:
        total_steps: steps of the whole run.
        done_steps: steps that a resumed run starts from.
        counted: what a step is called.
    """

    def __init__(
        self,
        total_steps: int,
        done_steps: int = 0,
        counted: str = "step",
    ) -> None:
        self.total_steps = total_steps
        self.counted = counted
        self._last_line = 0.0
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar, self._task = self._make_bar(done_steps)
            self._bar.start()

    def _make_bar(self, done_steps: int) -> tuple[Progress, TaskID]:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        bar = Progress(
            TextColumn(self.counted),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[facts]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=terminal_console(stderr=True),
        )
        return bar, bar.add_task(
            "train",
            total=self.total_steps,
            completed=done_steps,
            facts="",
        )

    def update(self, step: int, *, stage: str, facts: str, eta_seconds: float) -> None:
        """`stage` is the curriculum's, "" for none."""
        facts = f"{stage}  {facts}" if stage else facts
        if self._bar is not None:
            self._bar.update(self._task, completed=step, facts=facts)
        elif time.monotonic() - self._last_line >= EVERY_SECONDS or step == self.total_steps:
            self._last_line = time.monotonic()
            eta = format_seconds(eta_seconds)
            logger.info("%s %d/%d  %s  ETA %s", self.counted, step, self.total_steps, facts, eta)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def format_seconds(seconds: float) -> str:
    """`75` -> `1:15`; `3700` -> `1:01:40`."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
