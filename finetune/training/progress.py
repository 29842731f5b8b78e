"""How fast it goes and how far it is: the step meter and the progress line."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

logger = logging.getLogger("finetune")


@dataclass(frozen=True)
class Measured:
    """One logging interval: what was trained and how long it took, evaluation and saving not counted."""

    steps: int
    tokens: int
    samples: int
    seconds: float
    loader_wait_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def samples_per_second(self) -> float:
        return self.samples / max(self.seconds, 1e-9)

    def facts(self) -> dict[str, float]:
        """For a line of the log."""
        steps = max(1, self.steps)
        return {
            "tokens_per_second": round(self.tokens_per_second, 1),
            "samples_per_second": round(self.samples_per_second, 2),
            "step_seconds": round(self.seconds / steps, 4),
            "loader_wait_seconds": round(self.loader_wait_seconds / steps, 4),
        }


class StepMeter:
    """Adds up tokens, samples and training time between two log lines."""

    def __init__(self) -> None:
        self._mark: float | None = None
        self._reset()

    def _reset(self) -> None:
        self._steps = self._tokens = self._samples = 0
        self._seconds = self._wait = 0.0

    def start(self) -> None:
        if self._mark is None:
            self._mark = time.perf_counter()

    def add_step(self, *, tokens: int, samples: int) -> None:
        self._steps += 1
        self._tokens += tokens
        self._samples += samples

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        self.start()
        began = time.perf_counter()
        yield
        self._wait += time.perf_counter() - began

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside does not count as training."""
        self._collect()
        yield
        if self._mark is not None:
            self._mark = time.perf_counter()

    def _collect(self) -> None:
        if self._mark is not None:
            now = time.perf_counter()
            self._seconds += now - self._mark
            self._mark = now

    def take(self) -> Measured:
        """What was added since the last take."""
        self._collect()
        measured = Measured(self._steps, self._tokens, self._samples, self._seconds, self._wait)
        self._reset()
        return measured


class ProgressLine:
    """A live bar on a terminal; elsewhere a line now and then. Only rank 0 makes one.

    Args:
        total_steps: steps of the whole run.
        done_steps: steps that a resumed run starts from.
        every_seconds: shortest time between two lines where there is no terminal.
    """

    def __init__(self, total_steps: int, done_steps: int = 0, every_seconds: float = 10.0) -> None:
        self.total_steps, self.every_seconds = total_steps, every_seconds
        self._last_line = 0.0
        self._bar = None
        if sys.stderr.isatty():
            self._bar, self._task = self._make_bar(done_steps)
            self._bar.start()

    def _make_bar(self, done_steps: int):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[facts]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
        )
        return bar, bar.add_task("train", total=self.total_steps, completed=done_steps, facts="")

    def update(
        self, step: int, *, stage: str, loss: float, tokens_per_second: float, eta_seconds: float, more: str = ""
    ) -> None:
        facts = f"{stage + '  ' if stage else ''}loss {loss:.4f}  {tokens_per_second:,.0f} tok/s{more}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, facts=facts)
        elif time.monotonic() - self._last_line >= self.every_seconds or step == self.total_steps:
            self._last_line = time.monotonic()
            logger.info("step %d/%d  %s  ETA %s", step, self.total_steps, facts, format_seconds(eta_seconds))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def format_seconds(seconds: float) -> str:
    """`75` -> `1:15`; `3700` -> `1:01:40`."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
