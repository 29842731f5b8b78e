"""What runs left on this machine: processes, unfinished checkpoints, shared memory.

A process counts only if a run recorded it on this host and a process with the same id and start
time runs under the caller's user. Process ids are reused, and a folder may have come from another
machine. Records are read from

    `*.processes.json`   the launcher's list (docs/guides/launching.md), if only the caller can
                         write it
    `RUN/.lock`          rank 0, while it works

A file counts only if no process needs it. This is checked again right before it is removed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import signal
import socket
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from finetune.errors import FinetuneError, StateError
from finetune.runs.reader import is_run, runs_in
from finetune.runtime.language import _
from finetune.runtime.process_start import recorded_start
from finetune.storage import durable_files
from finetune.storage.checkpoint_files import clean_staging, staging_folders
from finetune.storage.launch_record import SAME_START_SECONDS, VERSION, StartedProcess, still_runs
from finetune.storage.run_lock import RunLock, holder, is_held

KILL_WAIT_SECONDS = 10.0
POLL_SECONDS = 0.1
SHARED_MEMORY_FOLDER = Path("/dev/shm")
# torch's names for tensors that processes share by files: torch_<process id>_<random>_<number>.
_TORCH_NAME = re.compile(r"torch_(\d+)_\d+(_\d+)?")
_LAUNCHER_NAMES = ("python", "torchrun", "accelerate", "deepspeed", "finetune", "pt_elastic")


@dataclass
class Orphan:
    """A process whose launcher is gone. `facts` are for people and for --json. `problem`: None
    before cleaning, "" once it has ended, else why it is still there.
    """

    process: psutil.Process
    facts: dict[str, Any]
    problem: str | None = None


@dataclass
class StaleArtifact:
    """A file or folder that may go. `kind`: "checkpoint" or "shared_memory"; `problem` as in
    `Orphan`.
    """

    kind: str
    path: Path
    size_bytes: int = 0
    run: Path | None = None
    problem: str | None = None


@dataclass
class Stale:
    """What runs left behind, and what is not touched."""

    runs: list[Path]  # the run folders that were checked
    orphans: list[Orphan] = field(default_factory=list)
    files: list[StaleArtifact] = field(default_factory=list)
    left_alone: list[dict[str, Any]] = field(default_factory=list)  # what, and "why"


@dataclass(frozen=True)
class _Launch:
    """A launcher's list; or the lock of a run, which names one process and no supervisor."""

    run: Path
    processes: list[StartedProcess]
    is_list: bool = True

    def has_ended(self) -> bool:
        """Return whether the supervisor is known to be gone."""
        supervisors = [process for process in self.processes if process.role == "supervisor"]
        return bool(supervisors) and not any(
            process.host != socket.gethostname() or still_runs(process) for process in supervisors
        )


def find_stale(run: Path | None, logs_folder: Path = Path("logs")) -> Stale:
    """List what is left of a run, or of all in ./runs and all launches in `logs_folder`. Changes
    nothing.

    Raises:
        StateError: the folder is not a run's.
    """
    if run is not None and not (run.is_dir() and is_run(run)):
        what = "is not a run: it holds no file of a run" if run.is_dir() else "is not a folder"
        raise StateError(
            f"{str(run)!a} {what}",
            fix="give the --output-dir of a run, or nothing for all in ./runs",
        )
    stale = Stale(runs_in(Path("runs")) if run is None else [run])
    known = {os.path.realpath(each): each for each in stale.runs}
    launches = []
    for launch in _launches([logs_folder, *(each / "logs" for each in stale.runs)], stale):
        place = os.path.realpath(launch.run)
        if run is None and is_run(launch.run):
            known.setdefault(place, launch.run)
        if run is None or place in known:
            launches.append(launch)
    stale.runs = list(known.values())
    locks = [lock for each in stale.runs if (lock := _lock_of(each)) is not None]
    _add_orphans(stale, [*launches, *locks])
    stale.files += _memory_of_orphans(stale.orphans)
    stale.files += _memory_of_the_dead(launches)
    for each in stale.runs:
        add_unfinished_checkpoints(stale, each)
    return stale


# ---------------------------------------------------------------- processes


def _launches(folders: Iterable[Path], stale: Stale) -> Iterator[_Launch]:
    """Yield the launchers' lists in these folders.

    Ignore a list that others can write. Everyone can see the ids and start times of all processes,
    so others could list any process.
    """
    for path in sorted({path for folder in folders for path in folder.glob("*.processes.json")}):
        state, why = path.lstat(), None
        if state.st_uid != os.getuid():
            why = _("the record belongs to another user")
        elif state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            why = _("others can write the record (chmod go-w, if it is yours)")
        if why is not None:
            stale.left_alone.append({"file": str(path), "why": why})
            continue
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # it proves nothing
            content = json.loads(path.read_bytes())
            if content["version"] == VERSION:
                processes = [StartedProcess(**each) for each in content["processes"]]
                yield _Launch(Path(content["output_dir"]), processes)


def _lock_of(run: Path) -> _Launch | None:
    """Return the process that the lock of a run names; None if no run has signed it, or not with
    its start time.
    """
    facts = holder(run)
    start = recorded_start(facts)
    if start.start_ticks is None or facts.get("ended") or not _is_own_file(run / ".lock"):
        return None
    process = StartedProcess(
        facts["pid"], math.nan, None, "worker", 0, None, facts["host"], **vars(start)
    )
    return _Launch(run, [process], is_list=False)


def _add_orphans(stale: Stale, launches: Iterable[_Launch]) -> None:
    """Add each living process whose launcher is gone once; and those that have only the id of a
    recorded one.
    """
    proved: set[int] = set()
    doubts: dict[int, str] = {}
    for launch in launches:
        for record in launch.processes:
            if record.host != socket.gethostname() or record.pid in proved:
                continue
            try:
                process = psutil.Process(record.pid)
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if process.uids().real != os.getuid():
                    doubts[record.pid] = "it belongs to another user"
                elif not still_runs(record):
                    doubts[record.pid] = "it has another start time: the process id was used again"
                else:
                    proved.add(record.pid)
                    is_orphan = record.role != "supervisor" and launch.has_ended()
                    if is_orphan or (not launch.is_list and _has_lost_elastic(process)):
                        stale.orphans.append(Orphan(process, _facts(record, launch.run, process)))
            except (psutil.NoSuchProcess, TypeError):  # it has ended; the record is not whole
                continue
    stale.left_alone += [
        {"pid": pid, "why": why} for pid, why in sorted(doubts.items()) if pid not in proved
    ]


def _facts(record: StartedProcess, run: Path, process: psutil.Process) -> dict[str, Any]:
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(process.create_time()))
    facts = {
        "pid": record.pid,
        "role": record.role,
        "rank": record.rank,
        "run": str(run),
    }
    return facts | {"started": began, "command": shlex.join(process.cmdline())}


def _has_lost_elastic(process: psutil.Process) -> bool:
    """Return whether the parent of an elastic worker is gone.

    Only torch elastic is known to be a worker's parent for all of its life. Under other launchers,
    and by hand, a process may well live on without the one that started it.
    """
    if "TORCHELASTIC_RUN_ID" not in process.environ():
        return False
    try:
        parent = process.parent()
        return parent is None or not parent.name().startswith(_LAUNCHER_NAMES)
    except psutil.Error:  # gone, or another user's: an init, not a launcher of ours
        return True


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _end(orphans: Sequence[Orphan], wait_seconds: float) -> None:
    """Wait for processes to save and go, then send SIGTERM, then SIGKILL.

    psutil sends no signal to a process that has another start time than when it was found.
    """
    stages = {
        0: wait_seconds,
        signal.SIGTERM: wait_seconds,
        signal.SIGKILL: KILL_WAIT_SECONDS,
    }
    for number, seconds in stages.items():
        living = [orphan.process for orphan in orphans if _lives(orphan.process)]
        for process in living:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)  # 0 signals nothing
        deadline = time.monotonic() + seconds
        while any(map(_lives, living)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    for orphan in orphans:
        orphan.problem = "it did not end" if _lives(orphan.process) else ""


# ---------------------------------------------------------------- unfinished checkpoints


def add_unfinished_checkpoints(stale: Stale, run: Path) -> None:
    """Add what killed saves left in a run folder, unless the run is active: it may be saving."""
    folders = staging_folders(run)
    is_busy = is_held(run) if folders else False
    if is_busy is not False:
        why = "the run is at work" if is_busy else "its lock cannot be looked at"
        stale.left_alone.append({"run": str(run), "why": why})
        return
    for folder in folders:
        size_bytes = sum(durable_files.walk_files(folder)[0].values())
        stale.files.append(StaleArtifact("checkpoint", folder, size_bytes, run))


# ---------------------------------------------------------------- shared memory


def _memory_of_orphans(orphans: Sequence[Orphan]) -> list[StaleArtifact]:
    """Return the shared memory that living orphans have mapped: free once they have ended."""
    paths = {path for orphan in orphans for path in _mapped(orphan.process.pid)}
    return [_memory(path) for path in sorted(paths) if _is_own_file(path)]


def _memory_of_the_dead(launches: Sequence[_Launch]) -> Iterator[StaleArtifact]:
    """Yield files that torch made under the id of a process of this host that is gone.

    The name holds only the process id. The file belongs to the recorded process if no process has
    that id now, and the file was made between that process's start and the run's last activity.
    Active runs are left out: they may run in another container, which has its own process ids.
    """
    here = {
        process.pid: (process.start_time, launch.run)
        for launch in launches
        for process in launch.processes
        if process.host == socket.gethostname() and is_held(launch.run) is False
    }
    for path in sorted(SHARED_MEMORY_FOLDER.glob("torch_*")):
        match = _TORCH_NAME.fullmatch(path.name)
        pid = int(match[1]) if match else 0
        if pid in here and not psutil.pid_exists(pid) and _is_free_memory(path):
            began, run = here[pid]
            made = path.stat().st_mtime
            if began - SAME_START_SECONDS <= made <= _last_sign_of_life(run):
                yield _memory(path)


def _memory(path: Path) -> StaleArtifact:
    return StaleArtifact("shared_memory", path, path.stat().st_size)


def _last_sign_of_life(run: Path) -> float:
    """Return when a run wrote its logs last, in seconds since 1970."""
    logs = [run / "trainer_log.jsonl", run / "events.jsonl"]
    return max((path.stat().st_mtime for path in logs if path.exists()), default=0.0)


def _is_own_file(path: Path) -> bool:
    try:
        state = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(state.st_mode) and state.st_uid == os.getuid()


def _is_free_memory(path: Path) -> bool:
    """Return whether a file is the caller's, and no process has it mapped."""
    return _is_own_file(path) and not any(path in _mapped(pid) for pid in psutil.pids())


def _mapped(pid: int) -> list[Path]:
    """Return the files of shared memory that a process has mapped, as far as the caller may see."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape")
    except OSError:
        return []
    return [Path(path) for path in re.findall(rf"{re.escape(str(SHARED_MEMORY_FOLDER))}/.*", maps)]


# ---------------------------------------------------------------- removing


def clean(stale: Stale, wait_seconds: float) -> None:
    """End and remove what was found, and note in each item how it went."""
    _end(stale.orphans, wait_seconds)
    for artifact in stale.files:
        try:
            _remove(artifact)
            is_gone = not durable_files.is_taken(artifact.path)
            artifact.problem = "" if is_gone else "it is in use now"
        except FinetuneError as error:
            artifact.problem = error.what
        except OSError as error:
            artifact.problem = error.strerror or str(error)


def _remove(artifact: StaleArtifact) -> None:
    """Remove an artifact if it is still stale.

    Raises:
        StateError: the run was started again meanwhile.
        OSError: it cannot be removed.
    """
    if artifact.run is not None:
        if artifact.path.exists():
            with RunLock(artifact.run, wait_seconds=0):
                clean_staging(artifact.run)
    elif _is_free_memory(artifact.path):
        artifact.path.unlink(missing_ok=True)
