"""Reads a run into a `RunView`: from its folder (docs/reference/run_folder.md), or from a copy of
its console.

Nothing is written and no process is asked.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any

from finetune.errors import StateError
from finetune.runs.console_lines import parse_console_line
from finetune.runs.event_texts import WARNING_EVENTS, is_event_in_log
from finetune.runs.line_follower import LineFollower
from finetune.runs.step_table import StepTable
from finetune.runs.view import Message, RunView, State, is_finite_number
from finetune.runtime.process_start import is_same_start, recorded_start
from finetune.storage.run_folder import CONFIG_NAME, IDENTITY_NAME, STATUS_NAME, describe_folder
from finetune.storage.run_lock import LOCK_NAME, holder
from finetune.storage.run_log import plain_record

RANK_LOGS_FOLLOWED = 64
CONSOLE_BYTES = 32 << 20  # read from a console's copy: hundreds of thousands of steps
_END_OF_TIME = 253_402_300_800  # seconds from 1970 to the year 10000, which no calendar has
_RANK_LOG = re.compile(r".*-rank(\d+)\.log")
_RUN_NAMES = (IDENTITY_NAME, STATUS_NAME, LOCK_NAME, "trainer_log.jsonl", "events.jsonl")


class FolderReader:
    """Follows a run folder; `poll` brings the view up to date and returns it.

    What is new is read, and nothing again: a run of a week has a hundred megabytes of lines.
    """

    def __init__(self, folder: Path) -> None:
        self.view = RunView(folder)
        self._steps = LineFollower(folder / "trainer_log.jsonl")
        self._events = LineFollower(folder / "events.jsonl")
        self._logs: dict[str, LineFollower] = {}
        self._log_messages: dict[str, list[Message]] = {}
        self._described: list[tuple[int, ...] | None] = []

    def poll(self) -> RunView:
        view, folder = self.view, self.view.source
        self._describe()
        for new in self._steps.pieces():
            view.steps = StepTable() if new.restarted else view.steps
            for raw in new.lines:
                _take_step(view.steps, raw)
        changed = self._read_logs(folder / "logs")
        for new in self._events.pieces():
            changed = True
            view.events = [] if new.restarted else view.events
            for raw in new.lines:
                _take_event(view.events, raw)
        if changed:
            warnings = [
                Message(event["time"], "WARNING", 0, "", event)
                for event in view.events_named(*WARNING_EVENTS)
            ]
            view.messages = _merged([*self._log_messages.values(), warnings])
        times = [at for at in (self._steps.written_at, self._events.written_at) if at is not None]
        view.written_at = max(times, default=None)
        view.state = self._state()
        return view

    def _describe(self) -> None:
        """Read the run's identity, configuration and status, if one of these files was written.

        If a network mount fails for a moment, the last values are kept.

        Raises:
            StateError: the folder cannot be read, and never could.
        """
        names = (IDENTITY_NAME, CONFIG_NAME, STATUS_NAME)
        files = [_version(self.view.source / name) for name in names]
        if files == self._described:
            return
        try:
            described = describe_folder(self.view.source)
        except StateError:
            if not self._described:
                raise
            return
        self.view.identity = plain_record(described.identity or {})
        self.view.config = plain_record(described.config or {})
        self.view.status = plain_record(described.status or {})
        self._described = files

    def _state(self) -> State:
        state = self.view.status.get("state")
        if state in ("done", "failed", "stopped"):
            return state
        if state is None and not self.view.steps:
            return "waiting"
        return "vanished" if _holder_is_gone(self.view.source) else "running"

    def _read_logs(self, folder: Path) -> bool:
        """Take warnings and errors of the newest log of each rank; what is an event as well is left
        out. Any new?
        """
        changed = False
        for rank, name in _newest_per_rank(folder):
            follower = self._logs.setdefault(name, LineFollower(folder / name))
            messages = self._log_messages.setdefault(name, [])
            for new in follower.pieces():
                for line in new.lines:
                    if b"[WARNING]" not in line and b"[ERROR]" not in line:
                        continue  # most lines of a week: progress
                    warning = parse_console_line(line).warning
                    if warning and not is_event_in_log(warning[2]):
                        messages.append(Message(_log_time(line), warning[0], rank, warning[2]))
                        changed = True
        return changed


class ConsoleReader:
    """Follows a copy of a run's console, or a trainer_log.jsonl by itself. A rotated or truncated
    copy is followed.

    For a large copy, only its last CONSOLE_BYTES are read.
    """

    def __init__(self, path: Path) -> None:
        self.view = RunView(path)
        self._follower = LineFollower(path, CONSOLE_BYTES)

    def poll(self) -> RunView:
        view = self.view
        for raw in self._follower.poll().lines:
            self._take(raw)
        view.written_at = self._follower.written_at
        return view

    def _take(self, raw: bytes) -> None:
        view = self.view
        if raw.startswith(b"{"):
            _take_step(view.steps, raw)
            view.state = "running" if view.steps else "waiting"
            return
        line = parse_console_line(raw)
        if line.step:
            view.console_total_steps = line.step.pop("total_steps")
            view.stage_text = line.step.get("stage", "")
            view.steps.add(line.step)
            view.state = "running"
        elif line.evaluation:
            view.events.append({"event": "eval", **line.evaluation})
        elif line.checkpoint:
            view.events.append({"event": "checkpoint", **line.checkpoint})
        if line.end:
            view.state = line.end  # type: ignore[assignment]
        if line.warning:
            level, rank, text = line.warning
            view.messages.append(Message(None, level, rank, text))
            if level == "ERROR":
                view.state = "failed"


Reader = FolderReader | ConsoleReader


def open_run(
    run: Path | str | None,
    log: Path | str | None = None,
    *,
    may_come: bool = False,
) -> Reader:
    """Return a reader for a run folder, a console's copy, or, with neither, the newest run in
    `runs`.

    Args:
        may_come: wait for a missing folder if its parent folder exists.

    Raises:
        StateError: there is no such folder, file or run, or the folder is not a run's.
    """
    if log is not None:
        if not Path(log).is_file():
            raise StateError(
                f"{str(log)!a} is not a file", "--log", "give the file that holds the run's console"
            )
        return ConsoleReader(Path(log))
    if run is None:
        newest = runs_in("runs")
        if not newest:
            raise StateError(
                "there is no run in 'runs'",
                "RUN",
                "name the --output-dir of a run, or give --log FILE",
            )
        return FolderReader(newest[0])
    folder = Path(run)
    if folder.is_dir():
        if not is_run(folder) and any(folder.iterdir()):
            what = "is not a run: it holds no file of a run"
            raise StateError(f"{str(run)!a} {what}", fix=_named_runs("in", folder))
    elif folder.exists() or not (may_come and folder.parent.is_dir()):
        what = "is not a folder" if folder.exists() else "is not there"
        raise StateError(f"{str(run)!a} {what}", fix=_named_runs("beside", folder.parent))
    return FolderReader(folder)


def _named_runs(where: str, folder: Path) -> str:
    names = ", ".join(map(str, runs_in(folder)[:5]))
    return f"runs {where} it: {names}" if names else "give the --output-dir of a run"


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a file that only a run writes."""
    return any((folder / name).is_file() for name in _RUN_NAMES)


def runs_in(folder: Path | str) -> list[Path]:
    """Return the run folders directly in a folder, the one that wrote last first."""
    try:
        runs = [path for path in Path(folder).iterdir() if path.is_dir() and is_run(path)]
    except OSError:
        return []
    return sorted(runs, key=_last_written, reverse=True)


def _last_written(folder: Path) -> float:
    times = (LineFollower(folder / name).written_at for name in _RUN_NAMES)
    return max((at for at in times if at is not None), default=0.0)


# ---------------------------------------------------------------- lines


def json_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a line; empty for anything else: a torn line is skipped."""
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return plain_record(record) if isinstance(record, dict) else {}


def _take_step(steps: StepTable, raw: bytes) -> None:
    record = json_object(raw)
    if type(record.get("step")) is int:
        steps.add(record)


def _take_event(events: list[dict[str, Any]], raw: bytes) -> None:
    record = json_object(raw)
    time = record.get("time")
    is_event = isinstance(record.get("event"), str) and is_finite_number(time)
    is_event = is_event and 0 <= time < _END_OF_TIME
    if is_event and (record["event"] != "eval" or type(record.get("step")) is int):
        events.append(record)


def _merged(sources: Iterable[Sequence[Message]]) -> list[Message]:
    """Merge the messages of several sources by time; the messages of one source stay in order, even
    if its clock went back.
    """
    timed: list[tuple[float, Message]] = []
    for messages in sources:
        latest = accumulate((message.time or 0.0 for message in messages), max)
        timed += zip(latest, messages, strict=True)
    return [message for _, message in sorted(timed, key=itemgetter(0))]


def _version(path: Path) -> tuple[int, ...] | None:
    """Return what changes when a file is written or replaced; None if it does not exist."""
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_ino, state.st_size, state.st_mtime_ns


def _log_time(line: bytes) -> float | None:
    """Seconds since 1970 of a line of a rank's log, which has the writer's local time."""
    try:
        return datetime.strptime(line[:23].decode("ascii"), "%Y-%m-%d %H:%M:%S,%f").timestamp()
    except ValueError:
        return None


def _newest_per_rank(folder: Path) -> list[tuple[int, str]]:
    """Each rank with the name of its newest log; names begin with the time."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    newest = {int(found[1]): name for name in names if (found := _RANK_LOG.fullmatch(name))}
    return sorted(newest.items())[:RANK_LOGS_FOLLOWED]


def _holder_is_gone(run_folder: Path) -> bool:
    """Return whether the process that signed the lock is known to be gone: it ran on this host, its
    id is free or reused.
    """
    import psutil

    facts = holder(run_folder)
    try:
        signed = datetime.fromisoformat(facts["since"]).timestamp()
        if facts["host"] != socket.gethostname():
            return False
        process = psutil.Process(int(facts["pid"]))
        same = is_same_start(process.pid, recorded_start(facts))
        if same is None:
            same = process.create_time() <= signed + 1.5
        return not same or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except (ValueError, KeyError, TypeError, psutil.Error):
        return False
