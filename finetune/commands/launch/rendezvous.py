"""The rendezvous of a launch's nodes: one TCP store, held by node 0 at the port of the launch.

Node 0 takes the first free of ten ports and writes there which launch this is. The others go through the same ten ports
until they find it, so a port that was taken needs no second round of configuration. All calls that go over the network
have a time limit: where a cable is pulled, a call may never return, and signals must still be heard.

Keys, under `finetune/`: `launch` {id, digest, attempt, nodes, host, command}; `node/<n>` {host, processes}; `ranks`
[first rank of each node] or `missing` [nodes that did not come]; `alive/<n>` a counter; `ended/<n>` how its workers
ended; `decision/<n>` whether it wants another attempt.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

from finetune.runtime.ports import listens
from finetune.runtime.timeouts import call_with_timeout

if TYPE_CHECKING:
    from torch.distributed import TCPStore

PREFIX = "finetune/"
CONNECT_SECONDS = 10.0
POLL_SECONDS = 0.3

_T = TypeVar("_T")


@dataclass(frozen=True)
class LaunchNode:
    """This node in its launch."""

    nodes: int
    rank: int
    address: str
    ports: tuple[int, ...]
    processes: int
    digest: str  # of what is launched: the same on all nodes of one launch
    command: str  # what is launched, for people
    timeout_seconds: float
    # Node 0: a name that no other launch has; others: that of the launch they took part in last, if any.
    launch_id: str = ""
    attempt: int = 0  # node 0: this attempt, from 1; others: the last one of that launch they took part in, 0 for none
    listener: int = -1  # descriptor of node 0's listening socket, -1 on the others

    @property
    def store_address(self) -> str:
        """Where the store is: on its own node it needs no network, nor an address that leads back from inside."""
        return "127.0.0.1" if self.rank == 0 else self.address


class RendezvousError(Exception):
    """The nodes did not find each other. `kind` and `facts` tell why; `attempt_result` has the texts."""

    def __init__(self, kind: str, **facts: Any) -> None:
        super().__init__(kind)
        self.kind, self.facts = kind, facts


@dataclass(frozen=True)
class RendezvousResult:
    """What the nodes agreed on."""

    port: int
    launch_id: str
    attempt: int
    first_rank: int  # global rank of this node's first worker
    world_size: int
    hosts: tuple[str, ...]  # host names by node


def use_libuv() -> bool:
    """Whether stores use libuv; where this torch is built without, USE_LIBUV=0 is set for the workers as well."""
    from torch.distributed import TCPStore

    if "USE_LIBUV" not in os.environ:
        try:
            TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=True)
        except RuntimeError as error:
            if "libuv" not in str(error):
                raise
            os.environ["USE_LIBUV"] = "0"
    return os.environ.get("USE_LIBUV", "1") == "1"


class Rendezvous:
    """The store of one attempt: the nodes find each other by `join`, and keep in touch by `heartbeat.Heartbeat`."""

    def __init__(self, node: LaunchNode) -> None:
        self.node, self.libuv = node, use_libuv()
        self.port = 0
        self.store: TCPStore | None = None
        self._deadline = time.monotonic() + node.timeout_seconds
        self._seen: dict[int, str] = {}  # port -> what answered there

    def join(self) -> RendezvousResult:
        """Wait for all nodes.

        Raises:
            RendezvousError: they did not come in time, or two have the same rank.
        """
        if self.node.rank == 0:
            self._open()
        else:
            self._find()
        self._claim()
        if self.node.rank == 0:
            self._gather()
        return self._agreed()

    def connect(self, port: int) -> TCPStore:
        """A further connection to the store at a port."""
        from torch.distributed import TCPStore

        seconds = timedelta(seconds=CONNECT_SECONDS)
        return TCPStore(self.node.store_address, port, is_master=False, timeout=seconds, use_libuv=self.libuv)

    def _open(self) -> None:
        from torch.distributed import TCPStore

        node = self.node
        self.port = node.ports[0]
        self.store = TCPStore(
            node.store_address,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=CONNECT_SECONDS),
            use_libuv=self.libuv,
            master_listen_fd=node.listener,
        )
        facts = {"id": node.launch_id, "digest": node.digest, "attempt": node.attempt, "nodes": node.nodes}
        self.store.set(PREFIX + "launch", json.dumps(facts | {"host": socket.gethostname(), "command": node.command}))

    def _find(self) -> None:
        while self.store is None:
            for port in self.node.ports:
                if self._is_ours(port):
                    return
            self._wait("nothing_found")

    def _is_ours(self, port: int) -> bool:
        """Whether node 0's store of this launch and of a new attempt answers at a port; keeps it."""
        if not listens(self.node.address, port, CONNECT_SECONDS):
            self._seen.pop(port, None)
            return False
        try:
            store = call_with_timeout(lambda: self.connect(port), CONNECT_SECONDS)
            # Node 0 writes it right after opening the store; a store of others' never has it.
            known = call_with_timeout(lambda: json.loads(store.get(PREFIX + "launch")), CONNECT_SECONDS + 1)
        except (TimeoutError, RuntimeError, ValueError):
            self._seen[port] = "something else"
            return False
        if known["digest"] != self.node.digest or known["nodes"] != self.node.nodes:
            self._seen[port] = f"{known['command']} ({known['nodes']} nodes)"
            return False
        if known["id"] == self.node.launch_id and known["attempt"] <= self.node.attempt:
            return False  # about to end: the next attempt will answer at the same port
        self.store, self.port = store, port
        return True

    def _claim(self) -> None:
        """Write down that this node is here; another machine may not have the same rank."""
        ours = {"host": socket.gethostname(), "processes": self.node.processes, "pid": os.getpid()}
        key = f"{PREFIX}node/{self.node.rank}"
        self._ask(lambda store: store.set(f"{PREFIX}alive/{self.node.rank}", "0"))  # whoever sees the node sees this
        found = json.loads(self._ask(lambda store: store.compare_set(key, "", json.dumps(ours))))
        if found != ours:
            if found["host"] != ours["host"]:
                raise RendezvousError("same_rank", rank=self.node.rank, hosts=[found["host"], ours["host"]])
            self._write(f"node/{self.node.rank}", ours)  # started again by hand

    def _gather(self) -> None:
        """Node 0: wait for the others, then give out ranks."""
        nodes = range(self.node.nodes)
        while missing := [rank for rank in nodes if not self._has(f"node/{rank}")]:
            if time.monotonic() > self._deadline:
                self._write("missing", missing)
                time.sleep(2 * POLL_SECONDS)  # so that those who are here can read it
                raise RendezvousError("nodes_missing", nodes=missing)
            time.sleep(POLL_SECONDS)
        processes = [self._read(f"node/{rank}")["processes"] for rank in nodes]
        self._write("ranks", [0, *accumulate(processes)])

    def _agreed(self) -> RendezvousResult:
        while not self._has("ranks"):
            if self._has("missing"):
                raise RendezvousError("nodes_missing", nodes=self._read("missing"))
            self._wait("no_ranks", extra_seconds=CONNECT_SECONDS)
        ranks, launch = self._read("ranks"), self._read("launch")
        hosts = tuple(self._read(f"node/{rank}")["host"] for rank in range(self.node.nodes))
        return RendezvousResult(self.port, launch["id"], launch["attempt"], ranks[self.node.rank], ranks[-1], hosts)

    def _has(self, key: str) -> bool:
        return self._ask(lambda store: store.check([PREFIX + key]))

    def _read(self, key: str) -> Any:
        return json.loads(self._ask(lambda store: store.get(PREFIX + key)))

    def _write(self, key: str, value: Any) -> None:
        self._ask(lambda store: store.set(PREFIX + key, json.dumps(value)))

    def _ask(self, call: Callable[[TCPStore], _T]) -> _T:
        try:
            return call_with_timeout(lambda: call(self.store), CONNECT_SECONDS)
        except (TimeoutError, RuntimeError) as error:
            raise RendezvousError("connection_lost", error=str(error).splitlines()[0]) from error

    def _wait(self, kind: str, extra_seconds: float = 0.0) -> None:
        if time.monotonic() > self._deadline + extra_seconds:
            raise RendezvousError(kind, seen={str(port): what for port, what in self._seen.items()})
        time.sleep(POLL_SECONDS)
