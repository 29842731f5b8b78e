"""One process at a time in a run folder: an flock that dies with its holder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import logging
import os
import socket
import time
import weakref
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from finetune.errors import ExitCode, FinetuneError, StateError
from finetune.runtime.process_start import process_start
from finetune.storage import durable_files

LOCK_NAME = ".lock"
POLL_SECONDS = 0.2
SIGNATURE_LIMIT_BYTES = 1 << 16
# A file system that cannot lock at all says one of these.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}

logger = logging.getLogger("finetune")


def now_utc() -> str:
    """The time as ISO 8601 in UTC, whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _release_in_child() -> None:
    """A forked child (a loader's worker) shares the lock and would keep it after its parent was killed."""
    for lock in list(_held):
        lock.release()


@functools.cache
def _register_fork_hook() -> None:
    os.register_at_fork(after_in_child=_release_in_child)


def _sign(descriptor: int) -> None:
    facts = {"pid": os.getpid(), "host": socket.gethostname(), "since": now_utc()}
    text = json.dumps(facts | asdict(process_start(os.getpid()))) + "\n"
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)


class RunLock:
    """Holds a run folder for one process: `with RunLock(folder): ...`. It dies with the process, not with its children.

    Enters by creating the folder where it does not exist. Where the block ends by a refusal (an error with exit code 2)
    before anything else was written, what the lock created is removed again: a refused run writes nothing.

    Args:
        wait_seconds: how long to wait for another holder, who may be a killed run's worker about to end.

    Raises (on entry):
        StateError: another process holds the folder (named with its host), or the folder cannot be made or locked.
    """

    def __init__(self, run_folder: Path | str, wait_seconds: float = 30.0) -> None:
        self.run_folder = Path(run_folder)
        self.path = self.run_folder / LOCK_NAME
        self.wait_seconds = wait_seconds
        self._descriptor: int | None = None
        self._created_file = False
        self._created_folders: list[Path] = []

    def __enter__(self) -> RunLock:
        try:
            self._acquire()
        except OSError as error:
            self._undo()
            raise StateError(
                f"the output folder cannot be made or locked: {error.strerror or error}",
                str(self.run_folder),
                "choose another --output-dir, or fix what the system reports about this one",
            ) from error
        except FinetuneError:
            self._undo()
            raise
        _register_fork_hook()
        _held.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, FinetuneError) and error.exit_code == ExitCode.REFUSED:
            self._undo()
        self.release()

    def release(self) -> None:
        """Let go of the folder. The lock file stays: removing it would race with a process that waits for it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _acquire(self) -> None:
        deadline = time.monotonic() + self.wait_seconds
        warned = False
        while True:
            descriptor = self._open()
            try:
                locked = self._try_lock(descriptor)
                # A refused run may have removed the file between our open and our lock: then try the new one.
                if locked and self._is_still_there(descriptor):
                    _sign(descriptor)
                    self._descriptor = descriptor
                    return
            finally:
                if self._descriptor is None:
                    os.close(descriptor)
            if locked:
                continue
            holder = self._holder()
            if time.monotonic() >= deadline:
                raise StateError(
                    f"another run works in this folder: {holder}",
                    str(self.run_folder),
                    "wait until it ends, stop that process, or choose another --output-dir",
                )
            if not warned:
                logger.warning("%s is in use by %s; waiting up to %.0f s", self.run_folder, holder, self.wait_seconds)
                warned = True
            time.sleep(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))

    def _open(self) -> int:
        missing = []
        folder = self.run_folder
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another run was faster
                os.mkdir(folder)
                self._created_folders.append(folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(self.path, flags | os.O_EXCL, 0o666)
        except FileExistsError:
            return os.open(self.path, flags, 0o666)
        self._created_file = True
        return descriptor

    def _try_lock(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            why = "this file system has no locks, so nothing keeps a second run out: see that there is none"
            logger.warning("%s: %s", self.run_folder, why)
        return True

    def _is_still_there(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.lstat(self.path))
        except FileNotFoundError:
            return False

    def _holder(self) -> str:
        try:
            facts = json.loads(durable_files.read_bytes(self.path, SIGNATURE_LIMIT_BYTES))
            return f"process {facts['pid']} on {facts['host']} since {facts['since']}"
        except (OSError, ValueError, KeyError, TypeError):  # it has not signed yet
            return "a process that has not given its name"

    def _undo(self) -> None:
        """Remove what entering created, as far as nothing else was put there; the lock file only while it is ours."""
        try:
            if self._created_file and self._descriptor is not None:
                os.unlink(self.path)
            for folder in reversed(self._created_folders):
                os.rmdir(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                logger.warning("%s: what the refused run made could not be removed: %s", self.run_folder, error)
        self._created_file, self._created_folders = False, []
