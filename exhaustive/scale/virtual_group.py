"""For the start at 1,024 ranks: gloo's collectives among the tasks of a world, with the messages
that gloo sends.

Point to point and broadcast (a binomial tree) send every message of their own; rings, whose
messages follow one another, are counted: an all-gather of N ranks sends 2 halves N - 1 times from
each, an all-reduce of k numbers sends k segments round twice (gloo's allgather.cc, allreduce.cc,
broadcast.cc).
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from virtual_time import Task, World


@dataclass(frozen=True)
class Hop:
    """A message between two ranks: seconds until the other has it, and bytes per second."""

    seconds: float
    rate: float


@dataclass
class Group:
    """All ranks of a world; the rank of a task is its `node`.

    Attributes:
        messages, bytes: sent, by rank.
    """

    world: World
    size: int
    hop: Hop
    timeout: float
    messages: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    _mail: dict[tuple[int, int], list[tuple[float, torch.Tensor]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _reading: dict[tuple[int, int], tuple[Task, int]] = field(default_factory=dict)
    _rounds: list[Round] = field(default_factory=list)
    _calls: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def __post_init__(self) -> None:
        self.messages, self.bytes = [0] * self.size, [0] * self.size

    @property
    def rank(self) -> int:
        return self.world.current.node

    def send(self, tensor: torch.Tensor, dst: int, group: Any = None) -> None:
        size = tensor.numel() * tensor.element_size()
        self._sent(self.rank, 1, size)
        arrival = self.world.now + self.hop.seconds + size / self.hop.rate
        self._mail[self.rank, dst].append((arrival, tensor.clone()))
        if (reader := self._reading.pop((self.rank, dst), None)) is not None:
            self.world.wake(*reader, arrival)

    def recv(self, tensor: torch.Tensor, src: int, group: Any = None) -> None:
        mail, task = self._mail[src, self.rank], self.world.current
        if not mail:
            self._reading[src, self.rank] = task, task.sleep + 1
            self.world.wake(task, task.sleep + 1, self.world.now + self.timeout)
            self.world.pause(task)
        if not mail:
            raise RuntimeError(
                f"Timed out waiting {self.timeout * 1000:.0f}ms for recv operation to complete"
            )
        arrival, sent = mail.pop(0)
        self.world.sleep(max(0.0, arrival - self.world.now))
        tensor.copy_(sent)

    def broadcast(self, tensor: torch.Tensor, src: int, group: Any = None) -> None:
        rank, dimensions = self.rank, (self.size - 1).bit_length()
        first = rank.bit_length()  # the steps after the one in which this rank is reached
        if rank:
            self.recv(tensor, rank - (1 << (first - 1)))
        for step in range(first, dimensions):
            if rank + (1 << step) < self.size:
                self.send(tensor, rank + (1 << step))

    def all_gather(
        self, outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None
    ) -> None:
        size = tensor.numel() * tensor.element_size()
        given = self._meet(
            tensor.clone(), (self.size - 1) * (self.hop.seconds + size / self.hop.rate)
        )
        self._sent(self.rank, 2 * (self.size - 1), (self.size - 1) * size)
        for output, value in zip(outputs, given, strict=True):
            output.copy_(value)

    def all_reduce(self, tensor: torch.Tensor, op: Any = None, group: Any = None) -> None:
        given = self._meet(tensor.clone(), 2 * (self.size - 1) * self.hop.seconds)
        self._sent(self.rank, 2 * tensor.numel(), 2 * tensor.numel() * tensor.element_size())
        tensor.copy_(torch.stack(given).amax(0))

    def _meet(self, given: Any, seconds: float) -> list[Any]:
        """What all ranks give, some time after the last of them has come."""
        task, number = self.world.current, self._calls[self.rank]
        self._calls[self.rank] += 1
        if number == len(self._rounds):
            self._rounds.append(Round())
        meeting = self._rounds[number]
        meeting.given[self.rank] = given
        meeting.waiting.append((task, task.sleep + 1))
        if len(meeting.given) == self.size:
            for waiting in meeting.waiting:
                self.world.wake(*waiting, self.world.now + seconds)
        self.world.wake(task, task.sleep + 1, self.world.now + self.timeout + seconds)
        self.world.pause(task)
        if len(meeting.given) < self.size:
            raise RuntimeError(
                f"Timed out waiting {self.timeout * 1000:.0f}ms for recv operation to complete"
            )
        return [meeting.given[rank] for rank in range(self.size)]

    def _sent(self, rank: int, messages: int, size: int) -> None:
        self.messages[rank] += messages
        self.bytes[rank] += size


@dataclass
class Round:
    """A ring: what each rank has given, and who waits."""

    given: dict[int, torch.Tensor] = field(default_factory=dict)
    waiting: list[tuple[Task, int]] = field(default_factory=list)


@contextlib.contextmanager
def ranks_in(world: World, group: Group) -> Iterator[None]:
    """torch.distributed among the tasks of this world."""
    stack_size = threading.stack_size(512 << 10)
    replaced = {
        name: getattr(group, name)
        for name in ("send", "recv", "broadcast", "all_gather", "all_reduce")
    }
    replaced |= {
        "get_rank": lambda group_=None: group.rank,
        "get_world_size": lambda group_=None: group.size,
    }
    replaced |= {"new_group": lambda **options: group}
    with contextlib.ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(patch.object(dist, name, value))
        try:
            yield
        finally:
            world.end()
            threading.stack_size(stack_size)
