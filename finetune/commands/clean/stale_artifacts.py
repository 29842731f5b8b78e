"""Stale artifacts: files that runs left outside their results: unfinished checkpoints, shared
memory, build locks.

Each is found only with proof that it is a run's and that nobody needs it, and the proof is checked
again right before it is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from finetune.commands.clean.recorded_processes import RecordedProcess
from finetune.storage import durable_files
from finetune.storage.checkpoint_files import clean_staging, staging_folders
from finetune.storage.launch_record import SAME_START_SECONDS
from finetune.storage.run_lock import LOCK_NAME, RunLock, is_held

SHARED_MEMORY_FOLDER = Path("/dev/shm")
# torch's names for tensors that processes share by files: torch_<process id>_<random>_<number>.
_TORCH_NAME = re.compile(r"torch_(\d+)_\d+(_\d+)?")
# As training/operators.py writes them: the lock of ours around torch's own, and its content while
# at work.
OPERATOR_LOCK_NAME, OPERATOR_AT_WORK = "finetune.lock", b"loading\n"


@dataclass(frozen=True)
class StaleArtifact:
    """A file or folder that may go. `kind`: "checkpoint", "shared_memory" or "operator_lock"."""

    kind: str
    path: Path
    size_bytes: int
    run: Path | None = None


# ---------------------------------------------------------------- unfinished checkpoints


def unfinished_checkpoints(run: Path) -> tuple[list[StaleArtifact], str]:
    """What killed saves left in a run folder; none, and why, while the run is at work (its save may
    be going on).
    """
    folders = staging_folders(run)
    if not folders:
        return [], ""
    if why := _in_use(run):
        return [], why
    return [StaleArtifact("checkpoint", folder, _size_bytes(folder), run) for folder in folders], ""


def _in_use(run: Path) -> str:
    """Why a run's lock cannot be had; "" where it can."""
    held = is_held(run)
    if held is None:
        return "its lock cannot be looked at"
    return "the run is at work" if held else ""


def _size_bytes(path: Path) -> int:
    try:
        return (
            sum(durable_files.walk_files(path)[0].values())
            if path.is_dir()
            else os.lstat(path).st_size
        )
    except OSError:
        return 0


# ---------------------------------------------------------------- shared memory


def shared_memory_of(
    pids: Sequence[int], folder: Path = SHARED_MEMORY_FOLDER
) -> list[StaleArtifact]:
    """The files of shared memory that living processes have mapped or open: theirs, and free once
    they have ended.
    """
    found: dict[Path, None] = {}
    for pid in pids:
        found.update(dict.fromkeys(_mapped(pid, folder)))
    return [
        StaleArtifact("shared_memory", path, _size_bytes(path))
        for path in sorted(found)
        if _is_own_file(path)
    ]


def dead_shared_memory(
    records: Sequence[RecordedProcess], folder: Path = SHARED_MEMORY_FOLDER
) -> list[StaleArtifact]:
    """Files that torch made under the id of a process of this host which is gone.

    The name has the process id only. It is the recorded process's beyond doubt if nobody has that
    id now, and the file is no older than the process and no younger than the run's last sign of
    life. Nothing is looked at while the run is at work: it may be so in another container, with
    process ids of its own.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    here = [record for record in records if record.host == socket.gethostname()]
    at_work = {run for run in {record.run for record in here} if _in_use(run)}
    here = [record for record in here if record.run not in at_work]
    found = []
    for name in names:
        match = _TORCH_NAME.fullmatch(name)
        path = folder / name
        if (
            match
            and _is_own_file(path)
            and not psutil.pid_exists(int(match[1]))
            and not _users(path, folder)
        ):
            run = next((r.run for r in here if r.pid == int(match[1]) and _made_by(r, path)), None)
            if run is not None:
                found.append(StaleArtifact("shared_memory", path, _size_bytes(path), run))
    return found


def _made_by(record: RecordedProcess, path: Path) -> bool:
    began = record.start_time if record.start_time is not None else record.seen_time
    if began is None:
        return False
    try:
        made = os.lstat(path).st_mtime
    except OSError:
        return False
    return began - SAME_START_SECONDS <= made <= _last_sign_of_life(record)


def _last_sign_of_life(record: RecordedProcess) -> float:
    own = (
        [record.open_file]
        if record.open_file is not None and record.open_file.name != LOCK_NAME
        else []
    )
    times = []
    for path in (*own, record.run / "trainer_log.jsonl", record.run / "events.jsonl"):
        with contextlib.suppress(OSError):
            times.append(os.stat(path).st_mtime)
    return max(times, default=0.0)


def _is_own_file(path: Path) -> bool:
    try:
        state = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(state.st_mode) and state.st_uid == os.getuid()


def _mapped(pid: int, folder: Path) -> Iterator[Path]:
    """Files of a folder that a process has mapped or open, as far as it may be looked at."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines():
            words = line.split(maxsplit=5)
            if len(words) == 6 and words[5].startswith(f"{folder}/"):
                yield Path(words[5])
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith(f"{folder}/"):
                    yield Path(target)


def _users(path: Path, folder: Path) -> list[int]:
    """Processes that have a file mapped or open."""
    return [pid for pid in psutil.pids() if path in set(_mapped(pid, folder))]


# ---------------------------------------------------------------- locks of torch's builds


def operator_locks() -> list[StaleArtifact]:
    """torch's `lock` files that a killed process of ours left: every later build there would wait
    without end.
    """
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    # Where torch builds operators for runs of this package (runtime/launch_environment.py), and its
    # own default.
    roots = [
        Path(named) if named else Path(sys.prefix) / "torch_extensions",
        Path("~/.cache/torch_extensions"),
    ]
    found = []
    for root in (root.expanduser() for root in roots):
        for ours in sorted(
            {*root.glob(f"*/{OPERATOR_LOCK_NAME}"), *root.glob(f"*/*/{OPERATOR_LOCK_NAME}")}
        ):
            with _held_if_left(ours) as left:
                if left:
                    found.append(StaleArtifact("operator_lock", ours.with_name("lock"), 0))
    return found


@contextlib.contextmanager
def _held_if_left(ours: Path) -> Iterator[bool]:
    """Hold our lock where nobody does; True where its last holder, one of ours, did not finish and
    torch's is there.
    """
    try:
        descriptor = os.open(ours, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            at_work = os.pread(descriptor, len(OPERATOR_AT_WORK), 0) == OPERATOR_AT_WORK
        except OSError:  # held, or a file system without locks: nothing is known
            yield False
            return
        yield at_work and _is_own_file(ours.with_name("lock"))
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------- removing


def remove(artifact: StaleArtifact) -> bool:
    """Remove an artifact if it is still stale; whether it is gone.

    Raises:
        StateError: the run was started again meanwhile.
        OSError: it cannot be removed.
    """
    if artifact.kind == "checkpoint":
        if artifact.run is not None and durable_files.is_taken(artifact.path):
            with RunLock(artifact.run, wait_seconds=0):
                clean_staging(artifact.run)
        return not durable_files.is_taken(artifact.path)
    if artifact.kind == "operator_lock":
        with _held_if_left(artifact.path.with_name(OPERATOR_LOCK_NAME)) as left:
            if left:
                artifact.path.unlink(missing_ok=True)
        return not artifact.path.exists()
    if _is_own_file(artifact.path) and not _users(artifact.path, artifact.path.parent):
        artifact.path.unlink(missing_ok=True)
    return not durable_files.is_taken(artifact.path)
