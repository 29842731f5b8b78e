"""What ranks agree on while they train, and the signals that stop a run.

Agreement uses its own gloo group next to the device's group. It exchanges a handful of bytes per
step and never uses the device, so it does not wait for what the device still computes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

from finetune.errors import FinetuneError
from finetune.runtime.collectives import (
    all_gather_plain,
    broadcast_plain,
    largest_of_all,
    name_ranks,
    plain,
)
from finetune.runtime.parent_watchdog import in_thread, progress

logger = logging.getLogger("finetune")

# Signals that come within this time are one request: a batch system signals every process, and the
# launcher passes its own on. Longer than it takes a worker to notice that its launcher is gone
# (runtime/parent_watchdog.py).
SAME_REQUEST_SECONDS = 3.0
# How often ranks ask one another whether all are done with their parts of a work; the longest that
# a collective waits.
POLL_SECONDS = 1.0

T = TypeVar("T")


class Control:
    """Agreement between ranks. With one process every method answers at once."""

    def __init__(self, world_size: int, timeout_seconds: int = 1800) -> None:
        self.world_size = world_size
        self.timeout_seconds = timeout_seconds
        self.group: dist.ProcessGroup | None = None
        if world_size > 1:
            # Otherwise each rank connects to every other rank immediately, although a tree needs
            # only 2 log2 N of its connections. For each connection it would read 8 N bytes from
            # node 0's store: 9 GB at 1,024 ranks (gloo's transport/tcp/context.cc).
            os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
            timeout = timedelta(seconds=timeout_seconds)
            self.group = dist.new_group(backend="gloo", timeout=timeout)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank. Every rank must call it."""
        return flag if self.group is None else largest_of_all([int(flag)], group=self.group) == [1]

    def gather(self, item: object) -> list[Any]:
        """Gather every rank's JSON-serializable value, by rank, on every rank.

        Values pass through JSON, so tuples come back as lists.
        """
        if self.group is None:
            return [plain(item)]  # so that one process notices what several would
        found = all_gather_plain(item, self.world_size, group=self.group)
        progress.mark()
        return found

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each of these sums over all ranks, in float64 and in the order of ranks. Every rank gives
        as many.
        """
        return [sum(column) for column in zip(*self.gather(list(values)), strict=True)]

    def check_equal(self, facts: Mapping[str, object]) -> None:
        """Raise on every rank unless all ranks know the same facts. Every rank must call, with the
        same names.

        Raises:
            FinetuneError: names every fact that differs, its values, and the ranks that have them.
        """
        known = {name: str(value) for name, value in facts.items()}
        if self.group is not None and self.have_one(known):
            return
        everyone = self.gather(known)
        differing = [
            f"{name} is {_who_has_what([other[name] for other in everyone])}"
            for name in known
            if any(other[name] != everyone[0][name] for other in everyone)
        ]
        if differing:
            raise FinetuneError(
                f"ranks do not have the same run: {'; '.join(differing)}",
                where="start of training",
                fix=(
                    "give all nodes the same files, settings and package versions, and one output"
                    " folder that they share; if another run was just ending there, start the same"
                    " command again"
                ),
            )

    def share(self, item: object) -> Any:
        """Return rank 0's JSON-serializable value on every rank; other ranks' values are ignored.

        The value passes through JSON, so tuples come back as lists.
        """
        return (
            self.gather(item)[0] if self.group is None else broadcast_plain(item, group=self.group)
        )

    def token(self) -> str:
        """Return a new name, the same on every rank.

        It does not come from the seeded generators, so training is not affected.
        """
        return str(self.share(f"{random.SystemRandom().getrandbits(48):012x}"))

    def wait_for(self, work: Future[Any]) -> None:
        """Wait until every rank's work is done, which may take longer than a collective. Every rank
        must call.

        Raises:
            FinetuneError: on every rank, where a rank's work has moved no bytes for as long as a
                collective may take.
        """
        began = time.monotonic()
        while True:
            wait([work], None if self.world_size == 1 else POLL_SECONDS)
            if not self.any(not work.done()):
                return
            # All ranks have just answered, so this rank is not stuck. A rank whose disk is gone is
            # reported below.
            progress.begin_save(self.timeout_seconds)
            if self.any(not work.done() and progress.seconds_unmoved(began) > self.timeout_seconds):
                raise FinetuneError(
                    f"a rank has neither read nor written anything for {self.timeout_seconds} s",
                    where="reading or writing a checkpoint",
                    fix=(
                        "see whether every node still reaches the run folder's disk, then start the"
                        " same command again"
                    ),
                )

    def together(self, work: Callable[[], T]) -> Future[T]:
        """Do this rank's part of a work by a thread while the ranks wait for one another. Every
        rank must call.

        Returns:
            what is done: the part's result or error.

        Raises:
            FinetuneError: as for `wait_for`.
        """
        # Not a pool's: the process would not end before a thread that waits for a disk.
        done = in_thread(work, "together")
        self.wait_for(done)
        return done

    def have_one(self, known: object) -> bool:
        """Return whether `known` is equal on all ranks.

        Ranks exchange only digests, 64 bytes each, for any size of `known`. Collective: every rank
        must call it.
        """
        if self.group is None:
            return True
        digest = hashlib.sha256(json.dumps(known).encode()).digest()
        words = [int(word) for word in np.frombuffer(digest, dtype="<i8")]
        # The largest of ~x is ~ of the smallest x: where smallest and largest are one, all are.
        largest = largest_of_all([*words, *(~word for word in words)], group=self.group)
        return largest[: len(words)] == [~word for word in largest[len(words) :]]


def _who_has_what(values: Sequence[str]) -> str:
    """`x on 1,014 ranks, y on ranks 8-15, 77`: what most have is counted, and who has anything else
    is named.

    Args:
        values: by rank.
    """
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    named = []
    for value, having in sorted(ranks.items(), key=lambda item: -len(item[1])):
        plural = "s" if len(having) > 1 else ""
        majority = len(having) > max(2, len(values) / 2)
        named.append(
            f"{value} on {len(having):,} ranks"
            if majority
            else f"{value} on rank{plural} {name_ranks(having)}"
        )
    return ", ".join(named)


class StoppedBeforeTraining(Exception):
    """A signal came before the first step; every rank raises this."""


class StopSignals:
    """SIGTERM and SIGINT ask for a stop at the end of the step; a second one, seconds later, leaves
    at once.

    A context manager: handlers are put back on exit; in a launcher's worker, what still comes of a
    request is taken for it. Outside the main thread (a notebook's worker, a test) Python does not
    allow handlers; then signals keep their meaning and this asks for nothing.

    Args:
        launched: whether this process is a launcher's worker.

    Attributes:
        name: of the first signal that came; None before one does.
        answer: message that is shown then: what the signal leads to at this point of the run.
    """

    def __init__(self, *, launched: bool = False) -> None:
        self.name: str | None = None
        self._launched = launched
        self.answer = "saving after this step, then stopping"
        self._first_seconds = 0.0
        self._previous: dict[int, Callable[..., Any] | int] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                # None: of one that was not set by Python, and cannot be put back by it.
                self._previous[number] = signal.signal(number, self._handle) or signal.SIG_DFL
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # Linux sends a worker one SIGTERM for each thread of its launcher, as the threads die.
            # A late SIGTERM would end a worker that has saved and waits for its peers to be done.
            late = self._launched and self.name is not None
            signal.signal(number, partial(self._after, handler) if late else handler)

    @property
    def requested(self) -> bool:
        return self.name is not None

    @property
    def _is_same_request(self) -> bool:
        return time.monotonic() - self._first_seconds < SAME_REQUEST_SECONDS

    @contextlib.contextmanager
    def answered(self, answer: str) -> Iterator[None]:
        """Say this instead in the meantime."""
        before, self.answer = self.answer, answer
        try:
            yield
        finally:
            self.answer = before

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None:
            if not self._is_same_request:
                os._exit(128 + number)
            return
        self._first_seconds = time.monotonic()
        self.name = signal.Signals(number).name
        # os.write, because a log call inside a handler can deadlock on the logger's own lock.
        text = f"{self.answer}; once more in {SAME_REQUEST_SECONDS:.0f} s leaves at once"
        os.write(2, f"[WARNING] {self.name}: {text}\n".encode())

    def _after(
        self, previous: Callable[..., Any] | int, number: int, frame: FrameType | None
    ) -> None:
        if self._is_same_request:
            return
        signal.signal(number, previous)
        signal.raise_signal(number)
