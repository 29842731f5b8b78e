"""A claim: a file that stands for a lock where the file system has none that all machines see.

It is made by an exclusive create, which one process alone brings about on any file system (open(2):
O_EXCL, also on NFS since version 3). It does not fall with its process as a lock does. That a
process of this machine is dead can be seen, and its claim is taken over; that one of another
machine is cannot, however long it is silent (storage that hangs hangs for minutes): its claim is
for its owner to remove.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from finetune.runtime.process_start import boot_id, process_start, recorded_start
from finetune.storage import durable_files

LIMIT_BYTES = 1 << 16
POLL_SECONDS, SAID_EVERY_SECONDS = 0.2, 60.0

logger = logging.getLogger("finetune")


def signature() -> dict[str, Any]:
    """What tells this process from any other, here and elsewhere; ISO 8601 in UTC since when."""
    facts = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return facts | asdict(process_start(os.getpid())) | {"pid_namespace": _pid_namespace()}


def _pid_namespace() -> str | None:
    """Process ids mean something within one only: containers of one machine have their own."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def is_dead(facts: dict[str, Any]) -> bool:
    """Whether the process of a signature is known to be gone: it ran here; its id is free, reused
    or a zombie's.
    """
    here = (socket.gethostname(), boot_id(), _pid_namespace())
    if None in here or here != (
        facts.get("host"),
        facts.get("boot_id"),
        facts.get("pid_namespace"),
    ):
        return False
    pid, start = facts.get("pid"), recorded_start(facts)
    if type(pid) is not int or start.start_ticks is None:
        return False
    try:
        # Where /proc hides the processes of other users, they have no ticks: they may be alive.
        other = process_start(pid)
        reused = other.start_ticks is not None and other != start
        return reused or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return not psutil.pid_exists(pid)
    except psutil.Error:
        return False


def read_signature(path: Path) -> dict[str, Any] | None:
    """What a lock file or a claim says; empty where that cannot be read (yet), None where there is
    no such file.
    """
    try:
        facts = json.loads(durable_files.read_bytes(path, LIMIT_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


class Claim:
    """One file, taken and given back by one process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._taken_by: tuple[int, bytes] | None = None

    def take(self) -> bool:
        """Whether it is this process's now. Raises OSError."""
        return self._make() or self._take_over()

    def _take_over(self) -> bool:
        # two that find the same dead claim would remove each other's new one
        with machine_lock(self.path) as alone:
            facts = read_signature(self.path) if alone is not None else None
            # None: its owner has just removed it, or this machine does not see it yet.
            if facts is None or not is_dead(facts):
                return False
            os.unlink(self.path)
            return self._make()

    def give_back(self) -> None:
        """Remove it if it is this process's; a child's is not. Raises OSError."""
        if self._taken_by is not None and self._taken_by[0] == os.getpid():
            with contextlib.suppress(FileNotFoundError):
                if durable_files.read_bytes(self.path, LIMIT_BYTES) == self._taken_by[1]:
                    os.unlink(self.path)
        self._taken_by = None

    def _make(self) -> bool:
        text = (json.dumps(signature() | {"token": secrets.token_hex(8)}) + "\n").encode()
        try:
            os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        except FileExistsError:
            return False
        self._taken_by = os.getpid(), text
        try:
            self.path.write_bytes(text)
        except OSError:
            os.unlink(self.path)  # not to be taken for somebody's
            self._taken_by = None
            raise
        return True


@contextlib.contextmanager
def claimed(path: Path, what: str) -> Iterator[None]:
    """Hold a claim, waited for as long as it takes.

    Args:
        what: it is about, for the lines that say who is waited for.
    """
    claim, say_at = Claim(path), time.monotonic()
    while not claim.take():
        if time.monotonic() >= say_at:
            facts = read_signature(path) or {}
            who = (
                f"process {facts.get('pid')} on {facts.get('host')}" if facts else "another process"
            )
            logger.warning(
                "%s: waiting for %s; if it is gone, which cannot be seen from here: rm %s",
                what,
                who,
                path,
            )
            say_at = time.monotonic() + SAID_EVERY_SECONDS
        time.sleep(POLL_SECONDS)
    try:
        yield
    finally:
        claim.give_back()


@contextlib.contextmanager
def machine_lock(path: Path) -> Iterator[int | None]:
    """Hold a lock that stands for a path among the processes of this machine, in its folder for
    temporary files.

    Yields: the descriptor of the lock's file, which stays and is for its holder to write notes in;
        None where that folder has no locks either.
    """
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:16]
    file = Path(tempfile.gettempdir()) / f"finetune-{os.getuid()}-{name}.lock"
    descriptor: int | None = None
    try:
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            is_locked = True
        except OSError:
            is_locked = False
        yield descriptor if is_locked else None
    finally:
        if descriptor is not None:
            os.close(descriptor)
