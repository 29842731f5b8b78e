"""For the start at 1,024 ranks: threads that take turns on a clock of their own, and a store over a
wire.

One thread runs at a time, and time passes only when all wait, so that 30 minutes of waiting take
none and every run is the same. The code of the launch runs as it is: what it imports (time,
threads, sockets, torch's store) is replaced.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist


class Over(SystemExit):
    """Ends a thread whose world has ended; `threading` says nothing of it."""


class Task:
    """A thread of a world."""

    def __init__(self, node: int) -> None:
        self.node, self.turn, self.sleep = node, threading.Semaphore(0), 0


class World:
    """Everything that happens, by time.

    Attributes:
        now: seconds since the beginning.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._back = threading.Semaphore(0)
        self._tasks: dict[int, Task] = {}
        self._over = False
        self._problems: list[BaseException] = []

    @property
    def current(self) -> Task:
        return self._tasks[threading.get_ident()]

    def at(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (seconds, next(self._numbers), event))

    def start(self, function: Callable[[], Any], *, node: int, at: float | None = None) -> None:
        """Begin a task on a node."""
        task = Task(node)

        def run() -> None:
            self._tasks[threading.get_ident()] = task
            task.turn.acquire()
            try:
                if not self._over:
                    function()
            except Over:
                pass
            except BaseException as error:
                self._problems.append(error)
            self._back.release()

        threading.Thread(target=run, daemon=True).start()
        self.at(self.now if at is None else at, lambda: self._go_on(task))

    def sleep(self, seconds: float) -> None:
        # a thread that an earlier test has left behind
        if threading.get_ident() not in self._tasks:
            return time.sleep(seconds)
        task = self.current
        self.wake(task, task.sleep + 1, self.now + seconds)
        self.pause(task)

    def pause(self, task: Task) -> None:
        """Wait until somebody wakes this task."""
        task.sleep += 1
        self._back.release()
        task.turn.acquire()
        if self._over:
            raise Over

    def wake(self, task: Task, sleep: int, at: float) -> None:
        """Let a task go on at a time, unless it has gone on from this sleep before."""
        self.at(at, lambda: self._go_on(task) if task.sleep == sleep else None)

    def _go_on(self, task: Task) -> None:
        task.sleep += 1  # whoever else would wake it from this sleep is too late
        task.turn.release()
        self._back.acquire()

    def run(self, until: float = float("inf")) -> None:
        """Everything that happens up to a time.

        Raises what a task raised.
        """
        while self._events and self._events[0][0] <= until and not self._problems:
            self.now, _, event = heapq.heappop(self._events)
            event()
        if self._problems:
            raise self._problems[0]
        if until != float("inf"):
            self.now = until

    def end(self) -> None:
        """Let every thread end."""
        self._over = True
        for task in list(self._tasks.values()):
            task.turn.release()


@dataclass(frozen=True)
class Wire:
    """How long it takes to reach a store and to be answered.

    Attributes:
        between, within: seconds that a message takes, between two nodes and on one.
        service: seconds of the store for a request, which it takes one after another.
        rate: bytes per second that it reads or writes.
    """

    between: float
    within: float
    service: float
    rate: float


@dataclass
class Server:
    """The store of node 0: what TCPStore's one thread does for a message, counted and in order.

    Attributes:
        cut: nodes whose cable is pulled: what they ask is never answered.
        requests: by kind, of all clients.
        bytes: in and out.
    """

    world: World
    wire: Wire
    node: int = 0
    up: bool = True
    cut: set[int] = field(default_factory=set)
    requests: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    values: dict[str, bytes] = field(default_factory=dict)
    _busy_until: float = 0.0
    _waiting: dict[str, list[Callable[[], None]]] = field(default_factory=lambda: defaultdict(list))

    def latency(self, node: int) -> float:
        return self.wire.within if node == self.node else self.wire.between

    def take(self, kind: str, sent: int, node: int, answer: Callable[[], None]) -> None:
        """A message of so many bytes is on its way; `answer` is called when it has been dealt
        with.
        """
        arrival = self.world.now + self.latency(node)

        def arrive() -> None:
            self.requests[kind] += 1
            self.bytes["in"] += sent
            self._busy_until = (
                max(self._busy_until, self.world.now) + self.wire.service + sent / self.wire.rate
            )
            self.world.at(self._busy_until, answer)

        self.world.at(arrival, arrive)

    def reply(self, answered: int) -> None:
        self.bytes["out"] += answered
        self._busy_until += answered / self.wire.rate

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value
        for tell in self._waiting.pop(key, []):
            tell()

    def when_there(self, keys: Sequence[str], tell: Callable[[], None]) -> None:
        missing = next((key for key in keys if key not in self.values), None)
        if missing is None:
            tell()
        else:
            self._waiting[missing].append(lambda: self.when_there(keys, tell))


class Client:
    """In the place of TCPStore, with its messages: a `get` is a wait and a get, a `set` is not
    answered.
    """

    def __init__(self, server: Server, timeout: timedelta) -> None:
        self.server, self.world, self.timeout = server, server.world, timeout.total_seconds()
        self.node = self.world.current.node
        if not server.up:
            self.world.sleep(server.latency(self.node))
            raise RuntimeError("connection refused")
        self._call("validate", 5, lambda: 0)
        self._call("ping", 5, lambda: 5)

    def _check(self) -> None:
        if not self.server.up:
            raise RuntimeError("Broken pipe")
        if self.node in self.server.cut:
            self.world.sleep(self.timeout)
            raise RuntimeError("recv: timed out")

    def _call(self, kind: str, sent: int, deal: Callable[[], int]) -> None:
        """Send a message, and wait for what it is answered; `deal` returns the bytes of that."""
        self._check()
        task = self.world.current

        def answer() -> None:
            self.server.reply(deal())
            self.world.wake(task, sleep, self.world.now + self.server.latency(self.node))

        self.server.take(kind, sent, self.node, answer)
        sleep = task.sleep + 1
        self.world.pause(task)

    def _value(self, kind: str, sent: int, deal: Callable[[], bytes]) -> bytes:
        found: list[bytes] = []

        def answer() -> int:
            found.append(deal())
            return 8 + len(found[0])

        self._call(kind, sent, answer)
        return found[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._check()
        task, there = self.world.current, []
        seconds = self.timeout if timeout is None else timeout.total_seconds()

        def tell() -> None:
            there.append(True)
            self.server.reply(1)
            self.world.wake(task, sleep, self.world.now + self.server.latency(self.node))

        sent = 9 + sum(9 + len(key) for key in keys)
        self.server.take("wait", sent, self.node, lambda: self.server.when_there(keys, tell))
        sleep = task.sleep + 1
        self.world.wake(task, sleep, self.world.now + seconds)
        self.world.pause(task)
        if not there:
            self._call("cancel wait", 1, lambda: 1)
            raise dist.DistStoreError(f"wait timeout after {seconds} s, keys: {keys[:3]}")

    def set(self, key: str, value: str) -> None:
        self._check()
        raw = value.encode()
        self.server.take(
            "set", 17 + len(key) + len(raw), self.node, lambda: self.server.put(key, raw)
        )

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._value("get", 10 + len(key), lambda: self.server.values[key])

    def multi_get(self, keys: list[str]) -> list[bytes]:
        if not keys:
            return []
        self.wait(keys)
        found: list[bytes] = []

        def deal() -> int:
            found.extend(self.server.values[key] for key in keys)
            return sum(8 + len(value) for value in found)

        self._call("multi_get", 9 + sum(9 + len(key) for key in keys), deal)
        return found

    def check(self, keys: list[str]) -> bool:
        found: list[bool] = []

        def deal() -> int:
            found.append(all(key in self.server.values for key in keys))
            return 1

        self._call("check", 9 + sum(9 + len(key) for key in keys), deal)
        return found[0]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        def deal() -> bytes:
            if self.server.values.get(key, b"").decode() == expected:
                self.server.put(key, desired.encode())
            return self.server.values[key]

        return self._value("compare_set", 25 + len(key) + len(expected) + len(desired), deal)

    def list_keys(self) -> list[str]:
        self._call("list_keys", 1, lambda: sum(8 + len(key) for key in self.server.values))
        return list(self.server.values)


@contextlib.contextmanager
def launch_in(world: World, server: Server) -> Iterator[None]:
    """The modules of the launch see this world's clock, threads, host names and store."""
    from finetune.commands.launch import rendezvous

    clock = SimpleNamespace(monotonic=lambda: world.now, sleep=world.sleep)

    def store(
        host: str, port: int, *, timeout: timedelta, is_master: bool, **options: Any
    ) -> Client:
        if is_master:
            server.up = True
        return Client(server, timeout)

    def listens(host: str, port: int, seconds: float) -> bool:
        world.sleep(2 * server.latency(world.current.node))
        server.requests["connect"] += 1
        return server.up

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(rendezvous, "time", clock))
        stack.enter_context(
            patch.object(rendezvous, "call_with_timeout", lambda call, seconds: call())
        )
        stack.enter_context(patch.object(rendezvous, "listens", listens))
        stack.enter_context(patch.object(rendezvous, "use_libuv", lambda: True))
        name = SimpleNamespace(gethostname=lambda: f"node-{world.current.node:04d}")
        stack.enter_context(patch.object(rendezvous, "socket", name))
        stack.enter_context(patch.object(dist, "TCPStore", store))
        try:
            yield
        finally:
            world.end()
