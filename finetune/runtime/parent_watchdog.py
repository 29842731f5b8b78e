"""Nothing waits forever: workers never outlive their launcher, and calls that hang are abandoned.

torch elastic starts workers in separate sessions, so they would continue after their launcher is
killed. They receive a signal to stop, finish their step, save and end, without a time limit. A
worker that makes no progress any more (its peers are gone, and it waits for them in a collective)
is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

from finetune.runtime.launch_environment import LaunchWorld

_T = TypeVar("_T")

PARENT_CHECK_SECONDS = 2.0
# Minimum time without progress before a kill. A hung process holds its devices for this long.
PARENT_GRACE_SECONDS = 60.0
# Multiple of the longest recent step: the next step may be longer.
STEPS_OF_PATIENCE = 3
RECENT_STEPS = 20
# Bytes read and written between two checks that show a save or its verification at work. A process
# that waits in a collective moves none, and threads of its libraries few.
MOVED_BYTES = 1 << 20


class Progress:
    """When this process last made progress, and how long the next progress may take."""

    def __init__(self) -> None:
        self._at = self._step_at = self._moved_at = time.monotonic()
        self._patience_seconds = PARENT_GRACE_SECONDS
        self._step_seconds: deque[float] = deque(maxlen=RECENT_STEPS)

    def mark(self) -> None:
        """Note progress."""
        self._at = time.monotonic()

    def mark_moved(self) -> None:
        """Note that any thread has read or written bytes of a file."""
        self._at = self._moved_at = time.monotonic()

    def seconds_unmoved(self, since: float) -> float:
        """Return for how long no bytes were moved, counted from a time of `time.monotonic`."""
        return time.monotonic() - max(since, self._moved_at)

    def begin_step(self, limit_seconds: float) -> None:
        """Note the start of a step. The first step, which may compile, may take as long as its
        collectives would wait.
        """
        self.mark()
        self._step_at = self._at
        self._patience_seconds = (
            self._steps() if self._step_seconds else limit_seconds + PARENT_GRACE_SECONDS
        )

    def end_step(self) -> None:
        self.mark()
        self._step_seconds.append(self._at - self._step_at)
        self._patience_seconds = self._steps()

    def begin_save(self, limit_seconds: float) -> None:
        """Note the start of a save: a rank waits for others that write, as long as its collectives
        would, which then end it.
        """
        self.mark()
        self._patience_seconds = limit_seconds + PARENT_GRACE_SECONDS

    def is_overdue(self, since: float) -> bool:
        """Return whether there was no progress for too long, counted from a time of
        `time.monotonic`.
        """
        return time.monotonic() - max(since, self._at) > self._patience_seconds

    def _steps(self) -> float:
        return max(PARENT_GRACE_SECONDS, STEPS_OF_PATIENCE * max(self._step_seconds))


progress = Progress()  # of this process


def die_with_launcher(world: LaunchWorld) -> None:
    """Make a worker stop when its launcher is gone. Call it first; before training, the worker just
    ends.

    On Linux the kernel sends SIGTERM at the parent's death, on other systems a thread that polls.
    A worker that then makes no progress for longer than `progress` allows, and moves no bytes, is
    ended by SIGKILL.
    """
    if not world.launched:
        return
    parent = os.getppid()
    signaled_by_kernel = sys.platform == "linux"
    if signaled_by_kernel:
        PR_SET_PDEATHSIG = 1
        signaled_by_kernel = (
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM) == 0
        )

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_SECONDS)
        if not signaled_by_kernel:  # a second, later SIGTERM would end it without saving
            os.kill(os.getpid(), signal.SIGTERM)
        stop = Stop()
        while not stop.is_stuck():
            time.sleep(PARENT_CHECK_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


class Stop:
    """The time from a request to stop until the process has stopped."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._moved_bytes = _moved_bytes()

    def is_stuck(self) -> bool:
        moved = _moved_bytes()
        if moved - self._moved_bytes >= MOVED_BYTES:
            progress.mark()
        self._moved_bytes = moved
        return progress.is_overdue(self._since)


def _moved_bytes() -> int:
    """Return how many bytes this process has read and written by system calls; 0 if the system does
    not report it.
    """
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


# ---------------------------------------------------------------- calls that may never return


def in_thread(call: Callable[[], _T], name: str | None = None) -> Future[_T]:
    """Start a call in a daemon thread, which does not keep the process from ending.

    Returns:
        The future with its result or error.
    """
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def call_with_timeout(call: Callable[[], _T], seconds: float) -> _T:
    """Return the result of a call into a library that may never return (a lost device, a pulled
    cable). Signals are handled meanwhile.

    Raises:
        TimeoutError: it took longer. The call stays in its thread and is abandoned.
    """
    future = in_thread(call)
    if not wait([future], timeout=max(0.0, seconds)).done:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return future.result()
