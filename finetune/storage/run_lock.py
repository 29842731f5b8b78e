"""One process at a time in a run folder: an flock that dies with its holder, or, where there is
none, a claim.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import logging
import os
import time
import weakref
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from finetune.errors import ExitCode, FinetuneError, StateError
from finetune.storage.lock_claim import Claim, is_dead, read_signature, signature
from finetune.storage.shared_storage import has_local_locks, wait_for

LOCK_NAME = ".lock"
CLAIM_NAME = ".lock.claim"
POLL_SECONDS = 0.2
STALE_ATTEMPTS = 5
# A file system that cannot lock at all says one of these: NFS without lockd, Lustre without -o
# flock, FUSE, SMB.
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
_HELD = {errno.EWOULDBLOCK, errno.EACCES}

logger = logging.getLogger("finetune")


def now_utc() -> str:
    """The time as ISO 8601 in UTC, whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _release_in_child() -> None:
    """A forked child (a loader's worker) shares the lock and would keep it after its parent was
    killed.
    """
    for lock in list(_held):
        lock.release()


@functools.cache
def _register_fork_hook() -> None:
    os.register_at_fork(after_in_child=_release_in_child)


def _sign(descriptor: int, facts: dict[str, Any]) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, (json.dumps(facts) + "\n").encode(), 0)


def try_flock(descriptor: int, how: int, path: Path) -> bool | None:
    """Try to lock an open file at once: True: locked, False: somebody else has it, None: no locks
    that all see here.

    Args:
        how: fcntl.LOCK_EX, for which NFS wants a file that is open for writing, or LOCK_SH.
        path: of the file.

    Raises:
        OSError: anything else.
    """
    if has_local_locks(path):
        return None
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        if error.errno not in _HELD:
            raise
        return False
    return True


def is_held(run_folder: Path) -> bool | None:
    """Whether a process holds a run folder, without taking it; None where that cannot be told."""
    claim = read_signature(run_folder / CLAIM_NAME)
    if claim is not None and not is_dead(claim):
        return True
    path = run_folder / LOCK_NAME
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        # without locks a holder has a claim
        return try_flock(descriptor, fcntl.LOCK_SH, path) is False
    except OSError:
        return None
    finally:
        os.close(descriptor)


def holder(run_folder: Path) -> dict[str, Any]:
    """What the process that holds a run folder says of itself: pid, host, since; empty where it has
    not said it yet.
    """
    return read_signature(run_folder / CLAIM_NAME) or read_signature(run_folder / LOCK_NAME) or {}


class RunLock:
    """Holds a run folder for one process: `with RunLock(folder): ...`. It dies with the process,
    not with its children.

    Enters by creating the folder where it does not exist. Where the block ends by a refusal (an
    error with exit code 2) before anything else was written, what the lock created is removed
    again: a refused run writes nothing.

    Where the file system has no locks that all machines see, a claim (lock_claim.py) stands for the
    lock; one that is there keeps others out also where this machine has locks.

    Args:
        wait_seconds: how long to wait for another holder, who may be a killed run's worker about to
            end.

    Raises (on entry):
        StateError: another process holds the folder (named with its host), or the folder cannot be
            made or locked.
    """

    def __init__(self, run_folder: Path | str, wait_seconds: float = 30.0) -> None:
        self.run_folder = Path(run_folder)
        self.path = self.run_folder / LOCK_NAME
        self.wait_seconds = wait_seconds
        self._claim = Claim(self.run_folder / CLAIM_NAME)
        self._descriptor: int | None = None
        self._signed: dict[str, Any] = {}
        self._has_no_locks = False
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
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, FinetuneError) and error.exit_code == ExitCode.REFUSED:
            self._undo()
        self.release()

    def release(self) -> None:
        """Let go of the folder. The lock file stays: removing it would race with a process that
        waits for it.
        """
        try:
            self._claim.give_back()
            # a child leaves its parent's
            if self._descriptor is not None and self._signed.get("pid") == os.getpid():
                _sign(self._descriptor, self._signed | {"ended": now_utc()})
        except OSError as error:
            logger.warning("%s: the run's name cannot be taken off: %s", self.run_folder, error)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _acquire(self) -> None:
        deadline = time.monotonic() + self.wait_seconds
        warned, stale = False, 0
        while True:
            try:
                locked = self._attempt()
            except OSError as error:
                # The file was removed, and perhaps made again, while this process looked at it; or
                # a request got lost.
                if error.errno not in (errno.ESTALE, errno.EIO) or stale == STALE_ATTEMPTS:
                    raise
                locked, stale = None, stale + 1
            if locked:
                return
            if locked is None:
                continue
            if time.monotonic() >= deadline:
                raise self._refusal()
            if not warned:
                logger.warning(
                    "%s is in use by %s; waiting up to %.0f s", *self._named(), self.wait_seconds
                )
                warned = True
            time.sleep(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))

    def _attempt(self) -> bool | None:
        """Whether the folder is this process's now; None where the lock's file was removed
        meanwhile.
        """
        descriptor = self._open()
        try:
            locked = try_flock(descriptor, fcntl.LOCK_EX, self.path)
            self._has_no_locks = locked is None
            if locked is False:
                return False
            # A refused run may have removed the file between our open and our lock: then try the
            # new one.
            if locked and not self._is_still_there(descriptor):
                return None
            if locked is None and self._is_signed():
                return False
            if locked is None or os.path.lexists(self._claim.path):
                if not self._claim.take():
                    return False
                logger.warning(
                    "%s: this file system has no locks that all machines see; %s stands for one: "
                    "should this machine "
                    "be lost while the run works, remove it before the next one",
                    self.run_folder, CLAIM_NAME,
                )  # fmt: skip
            signed = signature() if locked else {}
            if locked:
                _sign(descriptor, signed)
            self._descriptor = descriptor
            self._signed = signed
            return True
        finally:
            if self._descriptor is None:
                os.close(descriptor)
                self._claim.give_back()

    def _is_signed(self) -> bool:
        """Whether a machine that has locks here, as this one has not, may hold one: its runs sign,
        and sign off.
        """
        facts = read_signature(self.path)
        # Versions without claims never signed off.
        return (
            facts is not None
            and "pid_namespace" in facts
            and "ended" not in facts
            and not is_dead(facts)
        )

    def _refusal(self) -> StateError:
        folder, named = self._named()
        fix = "wait until it ends, stop that process, or choose another --output-dir"
        by_hand = self._claim.path if os.path.lexists(self._claim.path) else self.path
        if by_hand == self._claim.path or self._has_no_locks:
            fix += f"; if it is gone, which cannot be seen from here: rm {by_hand}"
        return StateError(f"another run works in this folder: {named}", folder, fix)

    def _named(self) -> tuple[str, str]:
        facts = holder(self.run_folder)
        named = "a process that has not given its name"
        with contextlib.suppress(KeyError):
            named = f"process {facts['pid']} on {facts['host']} since {facts['since']}"
        return str(self.run_folder), named

    def _open(self) -> int:
        missing = []
        folder = self.run_folder
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        for folder in reversed(missing):
            try:
                os.mkdir(folder)
                self._created_folders.append(folder)
            # another run was faster, perhaps on a machine whose work is not seen here yet
            except FileExistsError:
                wait_for(folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(self.path, flags | os.O_EXCL, 0o666)
        except FileExistsError:
            return os.open(self.path, flags, 0o666)
        self._created_file = True
        return descriptor

    def _is_still_there(self, descriptor: int) -> bool:
        # Opened, not looked at: a client of NFS asks the server anew for what it opens only.
        try:
            again = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return os.path.samestat(os.fstat(descriptor), os.fstat(again))
        finally:
            os.close(again)

    def _undo(self) -> None:
        """Remove what entering created, as far as nothing else was put there; the lock file only
        while it is ours.
        """
        try:
            self._claim.give_back()
            if self._created_file and self._descriptor is not None:
                os.unlink(self.path)
                self.release()  # or the file has another name on NFS, as long as it is open
            for folder in reversed(self._created_folders):
                os.rmdir(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                logger.warning(
                    "%s: what the refused run made could not be removed: %s", self.run_folder, error
                )
        self._created_file = False
        self._created_folders = []
