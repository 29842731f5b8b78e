"""For tests: ranks that are threads of one process, and what they tell one another, counted."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from finetune.training.control import Control

T = TypeVar("T")


class Meeting:
    """Where ranks that are threads meet; a call of another kind than the others' fails.

    Attributes:
        calls: of every rank, by kind.
        sent_bytes: by each rank, as JSON.
    """

    def __init__(self, ranks: int) -> None:
        self.barrier, self.ranks = threading.Barrier(ranks, timeout=60), ranks
        self.items: list[Any] = [None] * ranks
        self.calls: Counter[str] = Counter()
        self.sent_bytes: Counter[int] = Counter()

    def exchange(self, kind: str, item: object) -> list[Any]:
        rank = threading.current_thread().meeting_rank  # type: ignore[attr-defined]  # none: it has no business here
        text = json.dumps([kind, item])
        self.sent_bytes[rank] += len(text)
        self.calls[kind] += rank == 0
        self.items[rank] = text
        self.barrier.wait()
        found = [json.loads(other) for other in self.items]
        self.barrier.wait()
        assert {other for other, _ in found} == {kind}, (
            f"ranks are in different collectives: {found}"
        )
        return [value for _, value in found]

    def run(self, rank: Callable[[int], T]) -> list[T]:
        """What the function returns for each rank; where one fails, the others are let go."""

        def run_one(number: int) -> T:
            threading.current_thread().meeting_rank = number  # type: ignore[attr-defined]
            try:
                return rank(number)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.ranks) as threads:
            running = [threads.submit(run_one, number) for number in range(self.ranks)]
        failures = [error for future in running if (error := future.exception()) is not None]
        if failures:  # rather the reason than those that it let go
            raise min(failures, key=lambda error: isinstance(error, threading.BrokenBarrierError))
        return [future.result() for future in running]


class ThreadControl(Control):
    """A rank's part in a meeting."""

    def __init__(self, meeting: Meeting, timeout_seconds: int = 1800) -> None:
        super().__init__(1, timeout_seconds)
        self.world_size, self.meeting = meeting.ranks, meeting

    def any(self, flag: bool) -> bool:
        return any(self.meeting.exchange("any", flag))

    def gather(self, item: object) -> list[Any]:
        return self.meeting.exchange("gather", item)
