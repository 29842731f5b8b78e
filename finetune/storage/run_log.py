"""What a run writes for people and tools to follow: one schema, one writer, one tolerant reader.
Also the files that are appended to for weeks, and curves for TensorBoard.

Files in the run folder (their form is public and frozen by a test):

`trainer_log.jsonl`  one line per logged step: at least step, loss, learning_rate, tokens_per_second
`events.jsonl`       one line per event that is not a step: `{"event": NAME, "time": seconds, ...}`
`samples.jsonl`      with `--log-samples`: `{"step": 1-based, "ids": [...]}` (storage/run_folder.py)
`logs/`              console copies, one file per rank and start
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from finetune.errors import DataError
from finetune.plain_text import mask_passwords, plain_lines
from finetune.storage.shared_storage import make_folder

LOGGER_NAME = "finetune"
LOG_FILE_ONLY = {"log_file_only": True}  # as `extra` of a log call: not to the console
_NAME_TIME = "%Y%m%d-%H%M%S"
# How often the name is checked: until then, lines go to the file that was moved away.
LOOK_SECONDS = 1.0
_BLOCK_BYTES = 1 << 16

# Names of events in events.jsonl. Other names are refused, so that readers can rely on this list.
EVENTS = (
    "start",  # the run (again) begins at a step: device, world size, plan, versions
    "execution",  # the values that were chosen for auto, and why
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

    If the disk gets full, the written part of a piece is removed, so that the next piece, once
    there is space again, does not follow half a piece. If the file was renamed or removed (by
    logrotate or a user), a new file is started within `LOOK_SECONDS`. A file that was copied and
    truncated is continued.

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
        """Write all of it or nothing. Raises OSError, with the name, if it cannot be written."""
        if time.monotonic() >= self._look_at:
            self._follow_name()
        written = 0
        try:
            # The system writes only a part when the disk is full, and the second write fails.
            while written < len(piece):
                written += os.write(self._descriptor, memoryview(piece)[written:])
        except OSError as error:
            if written:
                with contextlib.suppress(OSError):
                    size_bytes = os.fstat(self._descriptor).st_size
                    os.ftruncate(self._descriptor, max(0, size_bytes - written))
            error.filename = str(self.path)
            raise

    def _follow_name(self) -> None:
        self._look_at = time.monotonic() + LOOK_SECONDS
        try:
            moved = not os.path.samestat(os.lstat(self.path), os.fstat(self._descriptor))
        except OSError as error:
            # any other error: the open file can still be written
            moved = isinstance(error, FileNotFoundError)
        if not moved:
            return
        try:
            opened = self._open()
        except OSError:  # the folder has gone, or the name is a link now
            return
        with contextlib.suppress(OSError):
            self.sync()
        os.close(self._descriptor)
        self._descriptor = opened

    def cut_torn_line(self) -> None:
        """Remove what follows the last newline: a writer was killed, and the next line would follow
        half a line.
        """
        size_bytes = end = os.fstat(self._descriptor).st_size
        while end > 0:
            begin = max(0, end - _BLOCK_BYTES)
            newline = os.pread(self._descriptor, end - begin, begin).rfind(b"\n")
            if newline >= 0:
                end = begin + newline + 1
                break
            end = begin
        if end < size_bytes:
            os.ftruncate(self._descriptor, end)

    def sync(self) -> None:
        """Sync the content to the device."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JsonLines(AppendFile):
    """Appends one object per line to a file, and removes first a torn last line that a crash has
    left.
    """

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        self.cut_torn_line()

    def write(self, content: dict[str, Any]) -> None:
        try:
            text = _encode(content)
        # few lines hold a number that is not finite, and searching for it takes time
        except ValueError:
            text = _encode(strict(content))
        self.append_bytes((text + "\n").encode())


def strict(value: Any) -> Any:
    """Replace NaN and inf by None: JSON does not have them. A step with one gets an event."""
    if isinstance(value, dict):
        return {name: strict(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class StepLog(JsonLines):
    """A log with a line per step, which a resumed run continues.

    Opening it for a run that resumes after step `resume_step` removes a torn last line and the
    lines of later steps. The run will write those again, so an interrupted run ends with the same
    file as an uninterrupted one.

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


def warn_of_lost_lines(log: StepLog, resume_step: int) -> None:
    """Warn if the lines that were kept end earlier before the checkpoint than lines are apart."""
    steps = [0, *log.kept_steps]
    apart = max((later - earlier for earlier, later in pairwise(steps)), default=resume_step)
    if resume_step - steps[-1] > apart:
        logging.getLogger(LOGGER_NAME).warning(
            "%s lost its end: the last line before step %d, from which the run resumes, is of"
            " step %d; curves and reports have a gap",
            log.path,
            resume_step,
            steps[-1],
        )


# ---------------------------------------------------------------- curves for TensorBoard

_numbers = count()  # one per file of this process: two files may be made in the same second


class CurveFile:
    """A new file of events in a folder, which is made if it does not exist.

    Raises:
        ImportError: tensorboard is not installed.
        OSError: the file cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard looks for names of this form, and reads files in the order of their names.
        name = (
            f"events.out.tfevents.{int(time.time()):010d}"
            f".{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        )
        self._file = AppendFile(folder / name)
        self._records = RecordWriter(SimpleNamespace(write=self._file.append_bytes))
        self._write(file_version="brain.Event:2")

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write the numbers among the values, named as Trainer's callback does: `eval_x` is
        `eval/x`, others `train/...`.
        """
        numbers = []
        for name, value in values.items():
            if isinstance(value, (int, float)):
                is_eval = name.startswith("eval_")
                tag = f"eval/{name.removeprefix('eval_')}" if is_eval else f"train/{name}"
                numbers.append(self._summary.Value(tag=tag, simple_value=value))
        self._write(step=step, summary=self._summary(value=numbers))

    def _write(self, **facts: Any) -> None:
        event = self._event(wall_time=time.time(), **facts)
        self._records.write(event.SerializeToString())

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        self._file.close()


# ---------------------------------------------------------------- the log of a run


class RunLog:
    """The log of one run folder. Without a folder, as on ranks other than 0, every method does
    nothing.
    """

    def __init__(self, run_folder: Path | None, resume_step: int = 0) -> None:
        self._steps = self._events = None
        self._curves: CurveFile | None = None
        if run_folder is not None:
            self._steps = StepLog(run_folder / "trainer_log.jsonl", resume_step)
            warn_of_lost_lines(self._steps, resume_step)
            self._events = JsonLines(run_folder / "events.jsonl")

    def step(self, record: dict[str, Any]) -> None:
        if self._steps is not None:
            self._steps.write(record)

    def event(self, name: str, /, **facts: Any) -> None:
        """Write an event. Raises ValueError for a name that is not in `EVENTS`."""
        if name not in EVENTS:
            raise ValueError(f"unknown event {name!r}; the schema knows {', '.join(EVENTS)}")
        if self._events is not None:
            self._events.write(
                {
                    "event": name,
                    "time": round(time.time(), 3),
                    **facts,
                }
            )

    def draw_curves(self, folder: Path) -> None:
        """Let `curves` write for TensorBoard, into a new file of this folder."""
        if self._steps is not None:
            self._curves = CurveFile(folder)

    def curves(self, step: int, values: dict[str, Any]) -> None:
        """Write the values of a step, by Trainer's names."""
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


# Fields in events and status.json that readers compute with. A field of several numbers is given
# with its form.
_NUMBERS = frozenset(
    (
        "step",
        "total_steps",
        "world_size",
        "size_bytes",
        "exit_code",
        "zero_stage",
        "global_batch_size",
        "flops_per_token",
        "peak_flops",
        "best",
        "best_step",
        "output_step",
    )
)
_SEVERAL = {
    "peak_device_bytes": list,
    "peak_host_bytes": list,
    "planned_peak_bytes": dict,
    "parameters": dict,
    "plan": dict,
    "versions": dict,
    "removed": list,
}
_LARGEST = 1 << 53  # whole number that a float holds


def plain_record(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of a run's files in a form that is safe to show: files may be damaged, or
    hostile.

    Control characters are removed from strings. Numbers that are not finite or are too large become
    None. A field that readers compute with is left out if it does not hold a number.
    """
    plain = _plain_value(record)
    for name in _NUMBERS & plain.keys():
        if not _is_number(plain[name]):
            del plain[name]
    for name in _SEVERAL.keys() & plain.keys():
        given = plain[name]
        numbers = given.values() if isinstance(given, dict) else given
        is_whole = isinstance(given, _SEVERAL[name])
        if is_whole and name.endswith(("_bytes", "parameters")):
            known = [
                number for number in numbers if number is not None or name == "planned_peak_bytes"
            ]
            is_whole = all(map(_is_number, known))  # a rank may not know its memory
        if not is_whole:
            del plain[name]
    return plain


def _plain_value(value: Any) -> Any:
    if isinstance(value, str):
        return plain_lines(value)
    if isinstance(value, dict):
        return {plain_lines(str(name)): _plain_value(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain_value(inner) for inner in value]
    return value if not isinstance(value, int | float) or abs(value) <= _LARGEST else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


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
    """Writes to the current sys.stderr, so that a progress bar which redirects it stays intact."""

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
    """A rank's messages in a file. On a full disk messages are lost; their number is written once
    there is space again.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = AppendFile(path)
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record) + "\n"
        if self._lost:
            text = f"({self._lost} messages before this one could not be written)\n{text}"
        try:
            self._file.append_bytes(text.encode("utf-8", "backslashreplace"))
        except OSError:
            self._lost += 1
        else:
            self._lost = 0

    def close(self) -> None:
        self._file.close()
        super().close()


def add_log_file(run_folder: Path, rank: int) -> logging.Handler:
    """Copy this rank's messages to `logs/<time>-<pid>-rank<r>.log` in the run folder; return the
    handler, which the caller removes.
    """
    folder = run_folder / "logs"
    make_folder(folder, parents=True)
    handler = _LogFile(folder / f"{_start_time(folder, rank)}-{os.getpid()}-rank{rank}.log")
    handler.setFormatter(_PlainFormatter("%(asctime)s [%(levelname)s] %(message)s"))
    logging.getLogger(LOGGER_NAME).addHandler(handler)
    return handler


def _start_time(folder: Path, rank: int) -> str:
    """Return the local time; if the clock has gone back, a second after this rank's newest log,
    because readers sort by name.
    """
    own = re.compile(rf"(\d{{8}}-\d{{6}})-\d+-rank{rank}\.log")
    found = filter(None, map(own.fullmatch, os.listdir(folder)))
    newest = max((match[1] for match in found), default="")
    now = time.strftime(_NAME_TIME)
    if now > newest:
        return now
    seconds = time.mktime(time.strptime(newest, _NAME_TIME))
    return time.strftime(_NAME_TIME, time.localtime(seconds + 1))


def success(message: str) -> None:
    """Log that something completed, as a `[SUCCESS]` line."""
    logging.getLogger(LOGGER_NAME).info(message, extra={"tag": "SUCCESS"})
