"""Processes that runs of this package have recorded, and whether a process of today is one of them.

A process id alone proves nothing: it is used again, and a folder may have come from another
machine. A process counts as recorded only if it runs on the recorded host under the caller's user,
runs a command of this package, and has the recorded start and command (or holds the very file open
that the record is about).

Records are the caller's own: what others could have written may name any process, whose id, start
and command everybody can see. They are read from
    `*.processes.json`                    the launcher's list (docs/launching.md)
    `RUN/.lock`                           rank 0, while it works
    `RUN/logs/<time>-<pid>-rank<r>.log`   each rank, in the name of the log that it has open
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from finetune.runtime.language import _
from finetune.runtime.process_start import ProcessStart, is_same_start, recorded_start
from finetune.storage import durable_files
from finetune.storage.launch_record import SAME_START_SECONDS, VERSION, command_digest
from finetune.storage.run_lock import CLAIM_NAME, LOCK_NAME

_RECORD_LIMIT_BYTES = 16 << 20
_LOG_NAME = re.compile(r"(\d{8}-\d{6})-(\d+)-rank(\d+)\.log")
_TRAINS = re.compile(r"finetune(\.|/|\b.*\b)(sft|pretrain)\b")
# An argument that names this package, among the first: `python -u -m finetune.sft`,
# `.../bin/finetune launch`.
_OURS = re.compile(r"(.*/)?finetune(\.\w+)*(/\w+\.py)?")
_OURS_WITHIN = 6
_LAUNCHER_NAMES = ("python", "torchrun", "accelerate", "deepspeed", "finetune", "pt_elastic")


@dataclass(frozen=True)
class RecordedProcess:
    """A process as a run recorded it."""

    pid: int
    role: str  # "supervisor", "agent" or "worker"
    run: Path
    # Where it ran; None where the record does not say (then only the file it has open can prove
    # it).
    host: str | None = None
    rank: int | None = None
    start: ProcessStart = ProcessStart(None, None)
    # seconds since 1970; None where the record only says that it ran at `seen_time`
    start_time: float | None = None
    seen_time: float | None = None
    command_digest: str | None = None  # as in docs/launching.md; None where the record does not say
    # a file that the process has open as long as it works; None where none is known
    open_file: Path | None = None
    launch: Path | None = None  # the record's file, for a record of the launcher's list


# ---------------------------------------------------------------- reading


def records_of_run(run: Path) -> list[RecordedProcess]:
    """What the run folder itself records: its lock, and the logs of its ranks.

    They prove nothing by what they say, but by who has them open: so they need to be the caller's,
    but a group may write them, as it does in a folder that it shares.
    """
    found = []
    try:
        lock = _read_object(run / CLAIM_NAME, _check_owner) or _read_object(
            run / LOCK_NAME, _check_owner
        )
        since = datetime.fromisoformat(lock["since"]).timestamp()
        pid, host, start = int(lock["pid"]), str(lock["host"]), recorded_start(lock)
        found.append(
            RecordedProcess(
                pid, "worker", run, host, 0, start, None, since, open_file=run / LOCK_NAME
            )
        )
    except (KeyError, TypeError, ValueError, Distrusted):
        pass  # no run has signed it yet
    for path in sorted((run / "logs").glob("*-rank*.log")) if (run / "logs").is_dir() else []:
        if (name := _LOG_NAME.fullmatch(path.name)) and _is_own(path):
            seen = datetime.strptime(name[1], "%Y%m%d-%H%M%S").timestamp()
            pid, rank = int(name[2]), int(name[3])
            found.append(
                RecordedProcess(pid, "worker", run, rank=rank, seen_time=seen, open_file=path)
            )
    return found


def records_of_launches(
    folders: Iterable[Path], run: Path | None = None, refused: dict[Path, str] | None = None
) -> list[RecordedProcess]:
    """What launchers recorded in `*.processes.json` in these folders: of one run, or of all.

    Args:
        refused: gets the files that are not trusted, with the reason.
    """
    found: list[RecordedProcess] = []
    for path in sorted(
        {path for folder in folders if folder.is_dir() for path in folder.glob("*.processes.json")}
    ):
        try:
            launch = _read_object(path, partial(_check_writers, path.parent))
        except Distrusted as error:
            if refused is not None:
                refused[path] = str(error)
            continue
        output_dir, processes = launch.get("output_dir"), launch.get("processes")
        if (
            launch.get("version") != VERSION
            or not isinstance(output_dir, str)
            or not isinstance(processes, list)
        ):
            continue
        if run is not None and os.path.realpath(output_dir) != os.path.realpath(run):
            continue
        found += [
            record
            for each in processes
            if (record := _launched(each, Path(output_dir), path)) is not None
        ]
    return found


class Distrusted(Exception):
    """A record that another user may have written."""


def _check_owner(state: os.stat_result) -> None:
    if state.st_uid != os.getuid():
        raise Distrusted(_("the record belongs to another user"))


def _check_writers(folder: Path, state: os.stat_result) -> None:
    """Only the caller may have written a record that is believed; nor may others have put it there
    under this name.
    """
    _check_owner(state)
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or state.st_nlink != 1:
        raise Distrusted(_("others can write the record (chmod go-w, if it is yours)"))
    place = os.stat(folder).st_mode
    if place & stat.S_IWOTH and not place & stat.S_ISVTX:
        raise Distrusted(
            _("everybody can write in the record's folder (chmod o-w, if the record is yours)")
        )


def _is_own(path: Path) -> bool:
    state = os.lstat(path)
    return stat.S_ISREG(state.st_mode) and state.st_uid == os.getuid()


def _launched(process: Any, run: Path, launch: Path) -> RecordedProcess | None:
    """A record of the launcher's list; None for one that is not whole, which then proves
    nothing.
    """
    try:
        return RecordedProcess(
            pid=int(process["pid"]),
            role=str(process["role"]),
            run=run,
            host=str(process["host"]),
            rank=None if process.get("rank") is None else int(process["rank"]),
            start=recorded_start(process),
            start_time=float(process["start_time"]),
            # null, for none seen, is no command's digest
            command_digest=str(process["command_digest"]),
            launch=launch,
        )
    except (KeyError, TypeError, ValueError):
        return None


def _read_object(path: Path, check: Callable[[os.stat_result], None]) -> dict[str, Any]:
    try:
        content = json.loads(durable_files.read_bytes(path, _RECORD_LIMIT_BYTES, check))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


# ---------------------------------------------------------------- a process of today


def find(record: RecordedProcess) -> tuple[psutil.Process | None, str]:
    """The process of a record, or None and why a living process of that id is not it ("" where
    there is none).
    """
    if record.host is not None and record.host != socket.gethostname():
        return None, ""
    try:
        process = psutil.Process(record.pid)
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return None, ""
        why = _difference(record, process)
    except psutil.NoSuchProcess:
        return None, ""
    except psutil.AccessDenied:
        why = "it belongs to another user"
    return (None, why) if why else (process, "")


def _difference(record: RecordedProcess, process: psutil.Process) -> str:
    """In what a process is not the recorded one; "" where it is."""
    if process.uids().real != os.getuid():
        return "it belongs to another user"
    same = is_same_start(record.pid, record.start)
    if same is None and record.start_time is not None:  # a record from before ticks were in it
        same = abs(process.create_time() - record.start_time) <= SAME_START_SECONDS
    if same is False:
        return "it has another start time: the process id was used again"
    command = process.cmdline()
    if not is_ours(command):
        return "it does not run a command of this package"
    if record.command_digest is not None:
        return "" if command_digest(command) == record.command_digest else "it runs another command"
    if not _TRAINS.search(" ".join(command)):
        return "it does not run a training command"
    if record.open_file is None or not _has_open(process, record.open_file):
        return "it does not have the run's file open"
    return ""


def is_ours(command: Sequence[str]) -> bool:
    """Whether a command line starts something of this package."""
    return any(map(_OURS.fullmatch, command[:_OURS_WITHIN]))


def _has_open(process: psutil.Process, path: Path) -> bool:
    wanted = os.path.realpath(path)
    return any(os.path.realpath(file.path) == wanted for file in process.open_files())


def is_orphan(
    record: RecordedProcess, process: psutil.Process, launches: Iterable[RecordedProcess]
) -> bool:
    """Whether the launcher of a process is gone. Where that cannot be known, it is not.

    Args:
        launches: the records of all launches.
    """
    if record.launch is not None:
        supervisors = [
            other
            for other in launches
            if other.launch == record.launch and other.role == "supervisor"
        ]
        return (
            record.role != "supervisor"
            and bool(supervisors)
            and not any(map(_may_live, supervisors))
        )
    # Only torch elastic is known to be a worker's parent for all of its life. Under other
    # launchers, and by hand, a process may well live on without the one that started it.
    if "TORCHELASTIC_RUN_ID" not in process.environ():
        return False
    parent = process.parent()
    return parent is None or not _may_be_launcher(parent)


def _may_live(supervisor: RecordedProcess) -> bool:
    """Whether a launcher may be alive: less proof is asked here than of a process that is to be
    ended.
    """
    if supervisor.host != socket.gethostname() or supervisor.start_time is None:
        return True
    try:
        process = psutil.Process(supervisor.pid)
        same = is_same_start(supervisor.pid, supervisor.start)
        # a step of the clock moves the time; what still runs the recorded command may be it
        if same is None:
            same = abs(process.create_time() - supervisor.start_time) <= SAME_START_SECONDS
            same = same or command_digest(process.cmdline()) == supervisor.command_digest
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _may_be_launcher(parent: psutil.Process) -> bool:
    try:
        names = {parent.name(), *map(os.path.basename, parent.cmdline()[:2])}
    except psutil.Error:  # gone, or another user's: an init, not a launcher of ours
        return False
    return any(name.startswith(_LAUNCHER_NAMES) for name in names)


def send_signal(record: RecordedProcess, number: signal.Signals) -> bool:
    """Send a signal to the recorded process and to no other; False where it is gone.

    The process is looked at once more after a handle on it (pidfd) is held, so that its id cannot
    pass to another process in between. Where the system has no such handles, right before the
    signal.
    """
    handle = None
    try:
        handle = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return False
    except (AttributeError, OSError):
        pass  # not Linux, or one without pidfd
    try:
        if find(record)[0] is None:
            return False
        if handle is not None:
            signal.pidfd_send_signal(handle, number)
        else:
            os.kill(record.pid, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        if handle is not None:
            os.close(handle)
