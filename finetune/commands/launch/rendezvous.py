"""How the nodes of a launch synchronize and exchange values: through torch's TCPStore on node 0.

The workers use the same store, and torch elastic's static rendezvous assigns their ranks with it.
Elastic's dynamic rendezvous (c10d) is not used. It unpickles what it finds in the store, and orders
nodes by host name instead of NODE_RANK (torch 2.13, elastic/rendezvous/dynamic_rendezvous.py).

The store has no secret and no encryption: anyone who can reach the port can write there. Values of
other nodes are JSON whose type is checked.

Keys, under `finetune/<digest of what is launched>/`: `attempt`; in each attempt `host/<node>`,
`here/<node>`, `failed`, `ended/<node>` and `decision/<node>`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from finetune.plain_text import plain_text
from finetune.runtime.collectives import name_ranks
from finetune.runtime.language import _
from finetune.runtime.nodes import Nodes
from finetune.runtime.parent_watchdog import call_with_timeout
from finetune.runtime.ports import HeldPort, listens

if TYPE_CHECKING:
    from torch.distributed import TCPStore

KEYS = "finetune/"
CONNECT_SECONDS = 10.0
# node 0 to its own store, which nothing else can answer: longer, in case the machine is busy
OPEN_SECONDS = 60.0
POLL_SECONDS = 1.0
LATE_SECONDS = 60.0  # between two reports of missing nodes

_T = TypeVar("_T")


class RendezvousError(Exception):
    """The nodes could not synchronize within the allowed time."""


class ConnectionLost(RendezvousError):
    """Node 0's store does not answer; another attempt can succeed."""


def use_libuv() -> bool:
    """Return whether stores use libuv. If this torch was built without it, USE_LIBUV=0 is set, for
    the workers too.
    """
    from torch.distributed import TCPStore

    if "USE_LIBUV" not in os.environ:
        try:
            TCPStore(
                "127.0.0.1",
                0,
                is_master=True,
                wait_for_workers=False,
                use_libuv=True,
            )
        except RuntimeError as error:
            if "libuv" not in str(error):
                raise
            os.environ["USE_LIBUV"] = "0"
    return os.environ.get("USE_LIBUV", "1") == "1"


class Rendezvous:
    """This node's connection to the store of its launch, from the first attempt to the last.

    Calls over the network run in threads with a time limit: they may never return if a cable is
    pulled, and signals must still be handled.

    Args:
        held: the port on node 0, else None.
        digest: of what is launched; nodes with different digests do not synchronize.
        tell: called with messages for people.

    Attributes:
        number: of the attempt, from 1.
        attempt: "<number>/<id of the launch>".
    """

    def __init__(
        self,
        nodes: Nodes,
        held: HeldPort | None,
        digest: str,
        timeout_seconds: float,
        tell: Callable[[str], None],
    ) -> None:
        self.nodes = nodes
        self.held = held
        self.timeout_seconds = timeout_seconds
        self.tell = tell
        # node 0 reaches its own store without an address that leads back from outside
        self.address = nodes.address if held is None else held.reached_at
        self.port = nodes.port if held is None else held.number
        self.number = 0
        self.attempt = secrets.token_hex(8)
        self.store: TCPStore | None = None
        self._keys = f"{KEYS}{digest}/"
        self._joined = ""  # the last attempt that this node took part in

    def begin_attempt(self) -> None:
        """Synchronize with the other nodes.

        Raises:
            RendezvousError: nodes did not connect in time, or two have the same rank.
        """
        others = self.nodes.count - 1
        if others:
            waiting = _("waiting for {others} other node(s), up to {seconds} s")
            self.tell(waiting.format(others=others, seconds=self.timeout_seconds))
        if self.held is None:
            self._find_attempt()
        else:
            self._open_attempt(self.held)
        host = socket.gethostname()
        key = self._key("host", self.nodes.rank)
        found = self._ask(lambda store: store.compare_set(key, "", host)).decode(errors="replace")
        if found != host:  # the same host is the same node, started again by hand
            same_rank = _(
                "NODE_RANK={rank} was given to two machines: {hosts}. fix: give each node its own,"
                " from 0"
            )
            hosts = f"{plain_text(found)}, {host}"
            raise RendezvousError(same_rank.format(rank=self.nodes.rank, hosts=hosts))
        there = self.exchange("here", host, self.timeout_seconds)
        if missing := sorted(set(range(self.nodes.count)) - there.keys()):
            nodes_missing = _(
                "node(s) {nodes} of {count} did not come within {seconds} s. fix: start the launch"
                " on them as well, with the same flags and their own NODE_RANK; see that they reach"
                " {address} port {port}"
            )
            raise self._error(nodes_missing, nodes=name_ranks(missing), count=self.nodes.count)
        self._joined = self.attempt
        if others:
            joined = _("all nodes are here: {hosts}; rendezvous at port {port}")
            hosts = plain_text(", ".join(there[node] for node in sorted(there)))
            self.tell(joined.format(hosts=hosts, port=self.port))

    def exchange(self, what: str, value: _T, seconds: float) -> dict[int, _T]:
        """Give the other nodes a value of this node in this attempt, and wait for theirs.

        Returns:
            The values by node, including this node's, without those that are late.

        Raises:
            RendezvousError: the connection is lost.
        """
        keys = [self._key(what, node) for node in range(self.nodes.count)]
        self._ask(lambda store: store.set(keys[self.nodes.rank], json.dumps(value)))
        now = time.monotonic()
        deadline, late_at = now + seconds, now + LATE_SECONDS
        while now < deadline and not self._ask(lambda store: store.check(keys)):
            if now > late_at:
                late_at += LATE_SECONDS
                missing = self._missing(keys)
                late = _("still waiting for {missing} of {count} nodes: {nodes}")
                nodes, count = name_ranks(missing), self.nodes.count
                self.tell(late.format(missing=len(missing), count=count, nodes=nodes))
            time.sleep(POLL_SECONDS)
            now = time.monotonic()
        missing = self._missing(keys)
        answers = {}
        present = [node for node in range(self.nodes.count) if node not in missing]
        found = self._ask(lambda store: store.multi_get([keys[node] for node in present]))
        for node, raw in zip(present, found, strict=True):
            with contextlib.suppress(ValueError, RecursionError):  # not written by a launch
                answer = json.loads(raw)
                if type(answer) is type(value):
                    answers[node] = answer
        return answers

    def _missing(self, keys: list[str]) -> list[int]:
        """Return the nodes whose keys are missing; one request if none is."""

        def find(store: TCPStore) -> list[int]:
            if store.check(keys):
                return []
            return [node for node, key in enumerate(keys) if not store.check([key])]

        return self._ask(find)

    def report_failure(self) -> None:
        """Report to the other nodes that workers of this node failed."""
        self._ask(lambda store: store.set(self._key("failed"), ""))

    def has_failure(self) -> bool:
        """Return whether workers of a node failed."""
        return self._ask(lambda store: store.check([self._key("failed")]))

    def _key(self, *words: object) -> str:
        return self._keys + "/".join(map(str, (self.attempt, *words)))

    def _open_attempt(self, held: HeldPort) -> None:
        if self.store is None:
            listener = os.dup(held.listener.fileno())  # the store will close it
            self._connect(OPEN_SECONDS, is_master=True, master_listen_fd=listener)
        # Workers of this attempt would connect to the addresses that earlier ones have left there.
        for key in self._ask(lambda store: store.list_keys()):
            if not key.startswith(KEYS):
                self.store.delete_key(key)
        self.number += 1
        self.attempt = f"{self.number}/{self.attempt.rpartition('/')[2]}"
        self.store.set(f"{self._keys}attempt", self.attempt)

    def _find_attempt(self) -> None:
        """Wait until node 0's store has an attempt that this node has not taken part in."""
        deadline = time.monotonic() + self.timeout_seconds
        while time.monotonic() < deadline:
            # another program may answer, and node 0 may be between two attempts
            with contextlib.suppress(RendezvousError, TimeoutError, RuntimeError, ValueError):
                if listens(self.address, self.port, CONNECT_SECONDS):
                    self._connect(CONNECT_SECONDS, is_master=False)
                    found = self._ask(lambda store: store.get(f"{self._keys}attempt"))
                    self.attempt = found.decode()
                    self.number = int(self.attempt.partition("/")[0])
                    if self.attempt != self._joined:
                        return
            time.sleep(POLL_SECONDS)
        raise self._error(
            _(
                "no launch of this run answered at {address} port {port} within {seconds} s. fix:"
                " start node 0 with the same flags (MASTER_PORT and NNODES included), and see that"
                " its firewall lets this port through"
            )
        )

    def _error(self, message: str, **facts: object) -> RendezvousError:
        facts |= {
            "seconds": self.timeout_seconds,
            "address": self.address,
            "port": self.port,
        }
        return RendezvousError(message.format(**facts))

    def _connect(self, seconds: float, **options: Any) -> None:
        from torch.distributed import TCPStore

        options |= {"timeout": timedelta(seconds=seconds), "use_libuv": use_libuv()}
        self.store = call_with_timeout(
            lambda: TCPStore(self.address, self.port, wait_for_workers=False, **options), seconds
        )

    def _ask(self, call: Callable[[TCPStore], _T]) -> _T:
        """Call with the store, within a time limit."""
        try:
            return call_with_timeout(lambda: call(self.store), CONNECT_SECONDS)
        except (TimeoutError, RuntimeError) as error:
            lost = _(
                "the connection to node 0 was lost during the rendezvous: {error}. fix: see its"
                " log, and the network"
            )
            message = lost.format(error=str(error).splitlines()[0])
            raise ConnectionLost(message) from error
