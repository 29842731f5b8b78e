"""One process at a time in a run folder: an flock, which the kernel releases when its holder dies.
If the file system has no locks that all machines see, a claim replaces the flock.

A claim is a file that is created exclusively, which only one process can do on any file system
(open(2): O_EXCL, also on NFS since version 3). The kernel does not remove it when its owner dies.
If the owner ran on this machine, the next process here can find that out and takes the claim over.
If the owner ran on another machine, nothing shows whether it is alive, however long it is silent
(storage can hang for minutes): a person has to remove the claim.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import logging
import os
import socket
import time
import weakref
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from finetune.errors import ExitCode, FinetuneError, StateError
from finetune.runtime.process_start import boot_id, process_start
from finetune.storage import durable_files
from finetune.storage.shared_storage import has_local_locks, wait_for

LOCK_NAME = ".lock"
CLAIM_NAME = ".lock.claim"
LIMIT_BYTES = 1 << 16
POLL_SECONDS = 0.2
WARN_EVERY_SECONDS = 60.0
STALE_ATTEMPTS = 5
# Errors of a file system without locks: NFS without lockd, Lustre without -o flock, FUSE, SMB.
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
_HELD = {errno.EWOULDBLOCK, errno.EACCES}

logger = logging.getLogger("finetune")


def now_utc() -> str:
    """Return the time as ISO 8601 in UTC, in whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def try_flock(descriptor: int, how: int, path: Path) -> bool | None:
    """Try to lock an open file without waiting.

    Args:
        how: fcntl.LOCK_EX, for which NFS requires a file that is open for writing, or LOCK_SH.
        path: of the file.

    Returns:
        True if it is locked, False if another process has the lock, None if there are no locks here
        that all machines see.

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


def _signature() -> dict[str, Any]:
    """Return what identifies this process on all machines, for messages and for `clean`."""
    facts = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": now_utc(),
    }
    return facts | asdict(process_start(os.getpid()))


def _read_signature(path: Path) -> dict[str, Any] | None:
    """Return the content of a lock file or a claim: empty if it cannot be read (yet), None if it
    does not exist.
    """
    try:
        return json.loads(durable_files.read_bytes(path, LIMIT_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}


def _write_signature(descriptor: int, facts: dict[str, Any]) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, (json.dumps(facts) + "\n").encode(), 0)


# ---------------------------------------------------------------- claims


def _name_here(path: Path) -> list[Any] | None:
    """Return what makes the name of `_bind_name` unique, or None outside Linux.

    The name is unique by its path, within a network namespace and one boot of the kernel.
    """
    try:
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return None
    return [os.path.realpath(path), socket.gethostname(), boot_id(), network]


def _bind_name(path: Path) -> socket.socket | None:
    """Bind a name that represents a path among the processes of this machine.

    The name is a Unix socket in the abstract namespace (unix(7)). It leaves no file, and the kernel
    frees it when its holder dies.

    Returns:
        None if another process has bound the name, or the system has no such names.
    """
    digest = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0finetune-{digest}")
    except OSError:
        name.close()
        return None
    return name


def _owner_is_gone(path: Path, name: socket.socket | None) -> bool:
    """Return whether the owner of a claim is dead: it had bound the name that is bound here now."""
    had = (_read_signature(path) or {}).get("name")
    return name is not None and had is not None and had == _name_here(path)


class Claim:
    """A file that one process takes and gives back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._name: socket.socket | None = None
        self._facts: dict[str, Any] = {}

    def take(self) -> bool:
        """Return whether the claim is this process's now. Raises OSError."""
        name = _bind_name(self.path)
        # Only the holder of the name removes the claim of a dead process. Otherwise two processes
        # that find the same claim would remove each other's new one.
        if _owner_is_gone(self.path, name):
            self.path.unlink(missing_ok=True)
        facts = _signature() | {"name": None if name is None else _name_here(self.path)}
        try:
            with open(self.path, "x", encoding="utf-8") as file:
                self._name, self._facts = name, facts
                json.dump(facts, file)
        except OSError as error:
            if self._facts:
                os.unlink(self.path)  # so that it does not look like another process's
                self._facts = {}
            if name is not None:
                name.close()
            if isinstance(error, FileExistsError):
                return False
            raise
        return True

    def give_back(self) -> None:
        """Remove the claim if it is this process's. A forked child only closes its copy of the
        name. Raises OSError.
        """
        if self._facts.get("pid") == os.getpid() and _read_signature(self.path) == self._facts:
            self.path.unlink(missing_ok=True)
        if self._name is not None:
            self._name.close()
        self._name = None
        self._facts = {}


@contextlib.contextmanager
def claimed(path: Path, what: str) -> Iterator[None]:
    """Hold a claim; wait for it without limit.

    Args:
        what: what the claim is about, for the log lines while this process waits.
    """
    claim = Claim(path)
    warn_at = time.monotonic()
    while not claim.take():
        if time.monotonic() >= warn_at:
            facts = _read_signature(path)
            who = "another process"
            if facts:
                who = f"process {facts.get('pid')} on {facts.get('host')}"
            logger.warning(
                "%s: waiting for %s; if it is gone, which cannot be seen from here: rm %s",
                what,
                who,
                path,
            )
            warn_at = time.monotonic() + WARN_EVERY_SECONDS
        time.sleep(POLL_SECONDS)
    try:
        yield
    finally:
        claim.give_back()


# ---------------------------------------------------------------- the lock of a run folder


def is_held(run_folder: Path) -> bool | None:
    """Return whether a process holds a run folder, without taking it; None if that cannot be
    known.
    """
    claim = run_folder / CLAIM_NAME
    if os.path.lexists(claim):
        name = _bind_name(claim)
        is_gone = _owner_is_gone(claim, name)
        if name is not None:
            name.close()
        if not is_gone:
            return True
    path = run_folder / LOCK_NAME
    try:
        with path.open("rb") as file:
            # without locks a holder has a claim
            return try_flock(file.fileno(), fcntl.LOCK_SH, path) is False
    except FileNotFoundError:
        return False
    except OSError:
        return None


def holder(run_folder: Path) -> dict[str, Any]:
    """Return the signature of the process that holds a run folder: pid, host, since; empty if it
    has not signed yet.
    """
    return _read_signature(run_folder / CLAIM_NAME) or _read_signature(run_folder / LOCK_NAME) or {}


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _release_in_child() -> None:
    """Release the locks that a forked child (a loader's worker) shares: it would keep them after
    its parent is killed.
    """
    for lock in list(_held):
        lock.release()


@functools.cache
def _register_fork_hook() -> None:
    os.register_at_fork(after_in_child=_release_in_child)


class RunLock:
    """Holds a run folder for one process: `with RunLock(folder): ...`. The lock ends with the
    process, not with its children.

    Entering creates the folder if it does not exist. If the block ends with a refusal (an error
    with exit code 2) before anything else was written, what the lock created is removed again: a
    refused run writes nothing.

    If the file system has no locks that all machines see, a `Claim` replaces the lock. An existing
    claim excludes other processes even if this machine has locks.

    Args:
        wait_seconds: how long to wait for another holder, which may be a killed run's worker about
            to end.

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
        """Release the folder. The lock file stays: removing it would race with a process that waits
        for it.
        """
        try:
            self._claim.give_back()
            # a child leaves its parent's
            if self._descriptor is not None and self._signed.get("pid") == os.getpid():
                _write_signature(self._descriptor, self._signed | {"ended": now_utc()})
        except OSError as error:
            logger.warning("%s: the run's name cannot be taken off: %s", self.run_folder, error)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _acquire(self) -> None:
        deadline = time.monotonic() + self.wait_seconds
        warned = False
        stale = 0
        while True:
            try:
                locked = self._attempt()
            except OSError as error:
                # The file was removed, and perhaps made again, while this process accessed it; or a
                # request got lost.
                if error.errno not in (errno.ESTALE, errno.EIO) or stale == STALE_ATTEMPTS:
                    raise
                stale += 1
                continue
            if locked is None:
                continue
            if locked:
                return
            if time.monotonic() >= deadline:
                raise self._refusal()
            if not warned:
                logger.warning(
                    "%s is in use by %s; waiting up to %.0f s", *self._named(), self.wait_seconds
                )
                warned = True
            time.sleep(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))

    def _attempt(self) -> bool | None:
        """Return whether the folder is this process's now; None if the lock file was removed
        meanwhile.
        """
        descriptor = self._open()
        try:
            locked = try_flock(descriptor, fcntl.LOCK_EX, self.path)
            self._has_no_locks = locked is None
            if locked is False:
                return False
            # A refused run may have removed the file between open and lock: then try the new one.
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
            if locked:
                self._signed = _signature() | {"ended": None}
                _write_signature(descriptor, self._signed)
            self._descriptor = descriptor
            return True
        finally:
            if self._descriptor is None:
                os.close(descriptor)
                self._claim.give_back()

    def _is_signed(self) -> bool:
        """Return whether a machine that, unlike this one, has locks here may hold one: its runs
        sign the lock file, and note when they end.
        """
        return (_read_signature(self.path) or {}).get("ended", "earlier version") is None

    def _refusal(self) -> StateError:
        folder, named = self._named()
        fix = "wait until it ends, stop that process, or choose another --output-dir"
        has_claim = os.path.lexists(self._claim.path)
        if has_claim or self._has_no_locks:
            by_hand = self._claim.path if has_claim else self.path
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
            # another run was faster, perhaps on a machine whose changes are not visible here yet
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
        # Open the file instead of calling stat: an NFS client queries the server again only on
        # open.
        try:
            with self.path.open("rb") as again:
                return os.path.samestat(os.fstat(descriptor), os.fstat(again.fileno()))
        except FileNotFoundError:
            return False

    def _undo(self) -> None:
        """Remove what entering created, unless something else was put there; the lock file only
        while this process holds it.
        """
        try:
            self._claim.give_back()
            if self._created_file and self._descriptor is not None:
                os.unlink(self.path)
                self.release()  # on NFS an open file would keep another name
            for folder in reversed(self._created_folders):
                os.rmdir(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                logger.warning(
                    "%s: what the refused run made could not be removed: %s", self.run_folder, error
                )
        self._created_file = False
        self._created_folders = []
