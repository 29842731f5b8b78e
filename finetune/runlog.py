"""What a run writes for people and tools to follow: one schema, one writer, one tolerant reader.

Files in the run folder (their form is public and frozen by a test):

`trainer_log.jsonl`  one line per logged step: `StepRecord` fields; at least step, loss, learning_rate, tokens_per_second
`events.jsonl`       one line per event that is not a step: `{"event": NAME, "time": seconds, ...}`
`samples.jsonl`      with `--log-samples`: `{"step": 1-based, "ids": [...]}` (see storage/run_folder.py)
`logs/`              console copies, one file per rank and start
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOGGER_NAME = "finetune"

# Names of events in events.jsonl. A name outside this table is refused, so that readers can rely on it.
EVENTS = (
    "start",  # the run (again) begins at a step: device, world size, plan, versions
    "eval",  # validation loss, overall and per level
    "checkpoint",  # a checkpoint was verified and published
    "skipped_checkpoint",  # resume passed over an invalid checkpoint, and why
    "resume",  # the run goes on from a checkpoint
    "spike",  # the loss jumped; the sample ids of the step
    "nonfinite",  # NaN or inf in loss or gradients; the step was skipped
    "oom",  # a device ran out of memory; the new token budget
    "signal",  # a signal asked for the stop
    "end",  # the run ended: state, exit code
)


class JsonLines:
    """Appends one flushed line per record; a crash tears at most the last line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def write(self, record: dict[str, Any]) -> None:
        # Unbuffered and in one call: a kill leaves a record whole or (a full disk) as a torn last line.
        self._file.write((json.dumps(record, ensure_ascii=False) + "\n").encode())

    def close(self) -> None:
        self._file.close()


class RunLog:
    """The log of one run folder. Every method is a no-op on ranks other than 0, so callers need not ask."""

    def __init__(self, run_folder: Path | None, resume_step: int = 0) -> None:
        self._steps = self._events = None
        if run_folder is not None:
            self._steps = JsonLines(run_folder / "trainer_log.jsonl")
            self._events = JsonLines(run_folder / "events.jsonl")

    def step(self, record: dict[str, Any]) -> None:
        if self._steps is not None:
            self._steps.write(record)

    def event(self, name: str, /, **facts: Any) -> None:
        """Write an event. Raises ValueError for a name that is not in `EVENTS`."""
        if name not in EVENTS:
            raise ValueError(f"unknown event {name!r}; the schema knows {', '.join(EVENTS)}")
        if self._events is not None:
            self._events.write({"event": name, "time": round(time.time(), 3), **facts})

    def close(self) -> None:
        for stream in (self._steps, self._events):
            if stream is not None:
                stream.close()


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSONL log; a torn last line (a crash while writing) is passed over.

    Raises:
        ValueError: a line that is not the last is not JSON; names the line.
    """
    with path.open(encoding="utf-8") as file:
        previous: str | None = None
        number = 0
        for line in file:
            if previous is not None:
                yield _record(previous, path, number)
            previous, number = line, number + 1
        if previous is not None and previous.endswith("\n"):
            yield _record(previous, path, number)


def _record(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{number}: not a JSON line: {error.msg}") from error


class _TaggedFormatter(logging.Formatter):
    TAGS = {logging.DEBUG: "DEBUG", logging.INFO: "INFO", logging.WARNING: "WARNING", logging.ERROR: "ERROR"}

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.prefix = f"rank {rank}: " if rank else ""

    def format(self, record: logging.LogRecord) -> str:
        tag = getattr(record, "tag", self.TAGS.get(record.levelno, record.levelname))
        return f"[{tag}] {self.prefix}{record.getMessage()}"


class _ConsoleHandler(logging.StreamHandler):
    """Writes to whatever sys.stderr is now, so that a progress bar which redirects it stays whole."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.setStream(sys.stderr)
        super().emit(record)


def setup_console(rank: int) -> logging.Logger:
    """Send the package's messages to stderr as `[INFO] ...` lines; ranks above 0 say warnings and errors only."""
    logger = logging.getLogger(LOGGER_NAME)
    logger.propagate = False
    logger.setLevel(logging.INFO)
    for handler in list(logger.handlers):
        if isinstance(handler, _ConsoleHandler):
            logger.removeHandler(handler)
    console = _ConsoleHandler()
    console.setFormatter(_TaggedFormatter(rank))
    console.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    logger.addHandler(console)
    return logger


def add_log_file(run_folder: Path, rank: int) -> logging.Handler:
    """Copy this rank's messages to `logs/<time>-rank<r>.log` in the run folder; returns the handler to remove."""
    folder = run_folder / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-rank{rank}.log"
    handler = logging.FileHandler(folder / name, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s [%(levelname)s] %(message)s"))
    logging.getLogger(LOGGER_NAME).addHandler(handler)
    return handler


def success(message: str) -> None:
    """Say that something came to a good end, as a `[SUCCESS]` line."""
    logging.getLogger(LOGGER_NAME).info(message, extra={"tag": "SUCCESS"})
