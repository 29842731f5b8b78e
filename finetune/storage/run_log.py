"""What a run writes for people and tools to follow: one schema, one writer, one tolerant reader.
Also the files that are appended to for weeks, and curves for TensorBoard.

Files in the run folder (their form is public and frozen by a test):

`trainer_log.jsonl`  one line per logged step: at least step, loss, learning_rate, tokens_per_second
`events.jsonl`       one line per event that is not a step: `{"event": NAME, "time": seconds, ...}`
`samples.jsonl`      with `--log-samples`: `{"step": 1-based, "ids": [...]}` (see
storage/run_folder.py) `logs/`              console copies, one file per rank and start
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Self

from finetune.errors import DataError
from finetune.plain_text import mask_passwords, plain_lines
from finetune.storage.shared_storage import make_folder

LOGGER_NAME = "finetune"
LOG_FILE_ONLY = {"log_file_only": True}  # as `extra` of a log call: not to the console
_NAME_TIME = "%Y%m%d-%H%M%S"
# How often the name is checked: what is written meanwhile goes to the file that was moved away.
LOOK_SECONDS = 1.0
_BLOCK_BYTES = 1 << 16

# Names of events in events.jsonl. A name outside this table is refused, so that readers can rely on
# it.
EVENTS = (
    "start",  # the run (again) begins at a step: device, world size, plan, versions
    "execution",  # what was chosen where the configuration says auto, and why
    "eval",  # validation loss, overall and per difficulty
    "sample",  # pretraining: beginnings of windows and how the model continues them
    "early_stop",  # the evaluations were not better for long: the run ends here, as done
    "checkpoint",  # a checkpoint was verified and published
    "skipped_checkpoint",  # an invalid checkpoint was skipped, and why
    "resume",  # the run resumes from a checkpoint
    "spike",  # the loss jumped; the record numbers of the step
    "nonfinite",  # NaN or inf in loss or gradients; the step was skipped
    "oom",  # a device ran out of memory; the new token budget
    "signal",  # a signal asked for the stop
    "end",  # the run ended: state, exit code
)

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


# ---------------------------------------------------------------- files that are appended to


class AppendFile:
    """Appends pieces to a file, each with a single unbuffered write: a crash tears at most the
    last.

    Where the disk is full, what a piece had taken of it is given back, so that the next one, once
    there is room again, does not follow half of it. Where another file, or none, has the name
    (logrotate has renamed it, somebody has removed it), a new one is begun within `LOOK_SECONDS`;
    one that is copied and cut is simply written on.

    Raises:
        OSError: the file cannot be opened; it is a link.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._descriptor = self._open()
        self._look_at = time.monotonic() + LOOK_SECONDS

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(self.path, flags, 0o666)

    def append_bytes(self, piece: bytes) -> None:
        """Write all of it, or nothing. Raises OSError where the system does not take it."""
        if time.monotonic() >= self._look_at:
            self._follow_name()
        written = 0
        try:
            # The system takes less than all only when the disk is full, and then says so on the
            # second write.
            while written < len(piece):
                written += os.write(self._descriptor, memoryview(piece)[written:])
        except OSError:
            if written:
                with contextlib.suppress(OSError):
                    os.ftruncate(
                        self._descriptor, max(0, os.fstat(self._descriptor).st_size - written)
                    )
            raise

    def _follow_name(self) -> None:
        self._look_at = time.monotonic() + LOOK_SECONDS
        try:
            moved = not os.path.samestat(os.lstat(self.path), os.fstat(self._descriptor))
        except OSError as error:
            # anything else: what is open can still be written
            moved = isinstance(error, FileNotFoundError)
        if not moved:
            return
        try:
            opened = self._open()
        except OSError:  # the folder has gone, or the name is a link now
            return
        before, self._descriptor = self._descriptor, opened
        with contextlib.suppress(OSError):
            os.fsync(before)
        os.close(before)

    def cut_torn_line(self) -> None:
        """Cut what is after the last newline: a writer was killed, and the next line would follow
        half a line.
        """
        end = os.fstat(self._descriptor).st_size
        while end > 0:
            begin = max(0, end - _BLOCK_BYTES)
            newline = os.pread(self._descriptor, end - begin, begin).rfind(b"\n")
            if newline >= 0:
                end = begin + newline + 1
                break
            end = begin
        if end < os.fstat(self._descriptor).st_size:
            os.ftruncate(self._descriptor, end)

    def sync(self) -> None:
        """Sync the content to the device."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; twice does no harm."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JsonLines(AppendFile):
    """Appends one object per line to a file. A torn last line, which a crash has left, is cut
    first.
    """

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        self.cut_torn_line()

    def write(self, content: dict[str, Any]) -> None:
        try:
            text = _encode(content)
        # few lines hold a number that is not finite, and looking for it takes time
        except ValueError:
            text = _encode(strict(content))
        self.append_bytes((text + "\n").encode())


def strict(value: Any) -> Any:
    """NaN and inf as null: JSON does not know them. That a step had one is an event of its own."""
    if isinstance(value, dict):
        return {name: strict(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class StepLog(JsonLines):
    """A log with a line per step, that a resumed run continues.

    Opening it for a run that resumes after step `resume_step` cuts a torn last line and the lines
    of later steps, which the run will write again: so the file of an interrupted run ends up the
    same as that of an uninterrupted one.

    Attributes:
        kept_steps: the steps whose lines were kept, in order.
    """

    def __init__(self, path: Path | str, resume_step: int = 0) -> None:
        super().__init__(path)
        self.kept_steps: list[int] = []
        keep_bytes = 0
        with open(self.path, "rb") as file:
            for line in file:
                record = _parse_line(line)
                step = record.get("step") if record else None
                if not line.endswith(b"\n") or (type(step) is int and step > resume_step):
                    break
                keep_bytes += len(line)
                if type(step) is int:
                    self.kept_steps.append(step)
        os.ftruncate(self._descriptor, keep_bytes)
        self.sync()


# ---------------------------------------------------------------- curves for TensorBoard

_numbers = count()  # of the files of this process: two of one second have the same time


class CurveFile:
    """A new file of events in a folder, which is made where it is not there.

    Raises:
        ImportError: tensorboard is not installed.
        OSError: the file cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._event = Event
        self._summary = Summary
        folder.mkdir(parents=True, exist_ok=True)
        # The form of the name is what tensorboard looks for, and it reads files in the order of
        # their names.
        name = (
            f"events.out.tfevents.{int(time.time()):010d}"
            f".{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        )
        self._file = AppendFile(folder / name)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, step: int, values: dict[str, Any]) -> None:
        """The numbers among the values, named as Trainer's callback does: `eval_x` is `eval/x`,
        others `train/...`.
        """
        numbers = [
            self._summary.Value(tag=_tag(name), simple_value=value)
            for name, value in values.items()
            if isinstance(value, (int, float))
        ]
        self._write(
            self._event(wall_time=time.time(), step=step, summary=self._summary(value=numbers))
        )

    def _write(self, event: Any) -> None:
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        # TFRecord: length, its checksum, data, its checksum
        # (tensorboard/summary/writer/record_writer.py).
        checks = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
        self._file.append_bytes(length + checks[0] + data + checks[1])

    def close(self) -> None:
        """Close the file; twice does no harm."""
        self._file.close()


def _tag(name: str) -> str:
    return f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"


# ---------------------------------------------------------------- the log of a run


class RunLog:
    """The log of one run folder. Every method is a no-op on ranks other than 0, so callers need not
    ask.
    """

    def __init__(self, run_folder: Path | None, resume_step: int = 0) -> None:
        self._steps = self._events = None
        self._curves: CurveFile | None = None
        if run_folder is not None:
            self._steps = StepLog(run_folder / "trainer_log.jsonl", resume_step)
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

    def draw_curves(self, folder: Path) -> None:
        """Write what `curves` is given for TensorBoard, into a new file of this folder."""
        if self._steps is not None:
            self._curves = CurveFile(folder)

    def curves(self, step: int, values: dict[str, Any]) -> None:
        """Numbers of a step, as Trainer names them."""
        if self._curves is not None:
            self._curves.write(step, values)

    def close(self) -> None:
        for stream in (self._steps, self._events, self._curves):
            if stream is not None:
                stream.close()


def read_jsonl_tolerant(path: Path | str) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file in order, without a torn last line (no newline at its end,
    or not JSON).

    Raises:
        DataError: a line before the last is not a JSON object.
        OSError: the file cannot be read.
    """
    torn: int | None = None
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if torn is not None:
                what = "a line in the middle of the log is not a JSON object"
                raise DataError(what, f"{path}:{torn}", "take out that line")
            record = _parse_line(line)
            if record is None or not line.endswith(b"\n"):
                torn = number
            else:
                yield record


def _parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


# ---------------------------------------------------------------- console and log files


class _PlainFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return mask_passwords(plain_lines(super().format(record)))


class _TaggedFormatter(logging.Formatter):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.prefix = f"rank {rank}: " if rank else ""

    def format(self, record: logging.LogRecord) -> str:
        text = mask_passwords(plain_lines(record.getMessage()))
        return f"[{getattr(record, 'tag', record.levelname)}] {self.prefix}{text}"


class _ConsoleHandler(logging.StreamHandler):
    """Writes to whatever sys.stderr is now, so that a progress bar which redirects it stays
    whole.
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "log_file_only", False):
            self.stream = sys.stderr  # not setStream: it flushes the old one, which may be closed
            super().emit(record)


def setup_console(rank: int) -> logging.Logger:
    """Send the package's messages to stderr as `[INFO] ...` lines; ranks above 0 print errors
    only.
    """
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


class _LogFile(logging.Handler):
    """A rank's messages in a file. What a full disk does not take is lost, and counted once there
    is room again.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = AppendFile(path)
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        lost = (
            f"({self._lost} messages before this one could not be written)\n" if self._lost else ""
        )
        try:
            self._file.append_bytes(
                (lost + self.format(record) + "\n").encode("utf-8", "backslashreplace")
            )
        except OSError:
            self._lost += 1
        else:
            self._lost = 0

    def close(self) -> None:
        self._file.close()
        super().close()


def add_log_file(run_folder: Path, rank: int) -> logging.Handler:
    """Copy this rank's messages to `logs/<time>-<pid>-rank<r>.log` in the run folder; returns the
    handler to remove.
    """
    folder = run_folder / "logs"
    make_folder(folder, parents=True)
    handler = _LogFile(folder / f"{_start_time(folder, rank)}-{os.getpid()}-rank{rank}.log")
    handler.setFormatter(_PlainFormatter("%(asctime)s [%(levelname)s] %(message)s"))
    logging.getLogger(LOGGER_NAME).addHandler(handler)
    return handler


def _start_time(folder: Path, rank: int) -> str:
    """Return the local time; if the clock has gone back, a second after this rank's newest log, as
    readers sort by name.
    """
    own = re.compile(rf"(\d{{8}}-\d{{6}})-\d+-rank{rank}\.log")
    newest = max(
        (found[1] for name in os.listdir(folder) if (found := own.fullmatch(name))), default=""
    )
    now = time.strftime(_NAME_TIME)
    if now > newest:
        return now
    return time.strftime(
        _NAME_TIME, time.localtime(time.mktime(time.strptime(newest, _NAME_TIME)) + 1)
    )


def success(message: str) -> None:
    """Log that something completed, as a `[SUCCESS]` line."""
    logging.getLogger(LOGGER_NAME).info(message, extra={"tag": "SUCCESS"})
