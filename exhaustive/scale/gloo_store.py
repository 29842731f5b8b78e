"""What a group of gloo asks of the store and how many connections it opens, counted of real ones: a
thread a rank.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)


class CountingStore(dist.Store):
    """A store in this process, with the messages that TCPStore would send: a `get` is a wait and a
    get.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()
        self.requests: Counter[str] = Counter()
        self.bytes = 0

    def set(self, key: str, value: bytes | str) -> None:
        raw = value.encode() if isinstance(value, str) else bytes(value)
        with self.changed:
            self.requests["set"] += 1
            self.bytes += len(raw)
            self.values[key] = raw
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key], TIMEOUT)
        with self.changed:
            self.requests["get"] += 1
            self.bytes += len(self.values[key])
            return self.values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta = TIMEOUT) -> None:
        with self.changed:
            self.requests["wait"] += 1
            if not self.changed.wait_for(
                lambda: all(key in self.values for key in keys), timeout.total_seconds()
            ):
                raise dist.DistStoreError(f"wait timeout, keys: {keys}")

    def check(self, keys: Sequence[str]) -> bool:
        with self.changed:
            self.requests["check"] += 1
            return all(key in self.values for key in keys)


@dataclass(frozen=True)
class GlooTraffic:
    """Of one group, of all its ranks.

    Attributes:
        requests, bytes: of the store, until the group was there and had agreed once.
        connections: that were open then.
    """

    ranks: int
    requests: int
    bytes: int
    connections: int


@contextlib.contextmanager
def real_groups(
    ranks: int, store: dist.Store, *, lazy: bool
) -> Iterator[Callable[[Callable[[int], Any]], list[Any]]]:
    """Groups of gloo in this process; yields what lets each rank do something, in a thread of its
    own.
    """
    from finetune.runtime.host import allow_open_files

    allow_open_files()
    own = threading.local()
    groups: dict[int, Any] = {}

    def make(rank: int) -> None:
        device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=lazy)
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._timeout, options._threads = [device], TIMEOUT, 1
        groups[rank] = dist.ProcessGroupGloo(store, rank, ranks, options)

    front: dict[str, Callable[..., Any]] = {
        "get_rank": lambda group=None: own.rank,
        "get_world_size": lambda group=None: ranks,
        "send": lambda tensor, dst, group=None: groups[own.rank].send([tensor], dst, 0).wait(),
        "recv": lambda tensor, src, group=None: groups[own.rank].recv([tensor], src, 0).wait(),
        "broadcast": lambda tensor, src, group=None: groups[own.rank].broadcast(tensor, src).wait(),
        "all_gather": lambda outputs, tensor, group=None: (
            groups[own.rank].allgather([outputs], [tensor]).wait()
        ),
    }
    with ThreadPoolExecutor(ranks) as pool, contextlib.ExitStack() as stack:
        for name, call in front.items():
            stack.enter_context(patch.object(dist, name, call))

        def on(rank: int, function: Callable[[int], Any]) -> Any:
            own.rank = rank
            return function(rank)

        def everywhere(function: Callable[[int], Any]) -> list[Any]:
            return list(pool.map(lambda rank: on(rank, function), range(ranks)))

        everywhere(make)
        yield everywhere
        groups.clear()


def gloo_traffic(ranks: int, *, lazy: bool) -> GlooTraffic:
    """A group of so many ranks that agrees once, as training/control.py does."""
    from finetune.runtime.collectives import largest_of_all

    store, before = CountingStore(), _sockets()
    with real_groups(ranks, store, lazy=lazy) as everywhere:
        found = everywhere(lambda rank: largest_of_all([rank, -rank]))
        assert found == [[ranks - 1, 0]] * ranks, found
        return GlooTraffic(
            ranks, store.requests.total(), store.bytes, (_sockets() - before - ranks) // 2
        )


def _sockets() -> int:
    return sum(os.readlink(link).startswith("socket:") for link in _links())


def _links() -> Iterator[Path]:
    for link in Path("/proc/self/fd").iterdir():
        if link.is_symlink():
            yield link
