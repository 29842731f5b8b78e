"""Heartbeats: how the nodes of a launch know of one another while their workers work, and agree on
a restart.

Each second a node writes one record, its beat with all it has to tell, and reads those of all
others in one request: two calls a node and second, however many nodes there are.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from finetune.commands.launch.records import Alive, Decision, Ended, LaunchFacts
from finetune.commands.launch.rendezvous import PREFIX, Rendezvous, RendezvousResult

if TYPE_CHECKING:
    from torch.distributed import TCPStore

HEARTBEAT_SECONDS = 1.0
_TOLD: dict[str, type[Ended] | type[Decision]] = {"ended": Ended, "decision": Decision}


class Heartbeat:
    """Keeps in touch with the other nodes in a thread, over a connection of its own.

    Attributes:
        others: the other nodes.
        ended: by node, how its workers ended.
        decisions: by node, whether it wants another attempt.
    """

    def __init__(self, rendezvous: Rendezvous, agreed: RendezvousResult) -> None:
        self.rendezvous = rendezvous
        self.agreed = agreed
        node = rendezvous.node
        self.others = [rank for rank in range(node.nodes) if rank != node.rank]
        self.ended: dict[int, dict[str, Any]] = {}
        self.decisions: dict[int, dict[str, Any]] = {}
        self._last = dict.fromkeys(self.others, time.monotonic())
        self._beats: dict[int, int] = {}  # the last of each other node
        self._beat = itertools.count(1)
        self._said: dict[str, Any] = {}
        self.thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        if self.others:
            self.thread.start()

    def publish(self, what: str, facts: dict[str, Any]) -> None:
        """Let the others know how this node ended, or what it wants: `ended` or `decision`."""
        self._said[what] = _TOLD[what](**facts)

    def lost(self, seconds: float, known: Collection[int]) -> dict[int, int]:
        """Nodes without a heartbeat for longer than this, with the seconds, but for those that
        `known` tells of.
        """
        now = time.monotonic()
        silences = {rank: now - last for rank, last in self._last.items() if rank not in known}
        return {rank: round(silence) for rank, silence in silences.items() if silence > seconds}

    def _run(self) -> None:
        while True:
            try:
                store = self.rendezvous.connect(self.agreed.port)
                launch = self.rendezvous.unseal("launch", LaunchFacts, store.get(PREFIX + "launch"))
                if (launch.id, launch.attempt) != (self.agreed.launch_id, self.agreed.attempt):
                    # node 0 has begun anew: what this node has to tell is not for that store
                    return
                self._keep_in_touch(store)
            # the connection is lost, or node 0 is gone, or slow for a while
            except (RuntimeError, ValueError):
                time.sleep(HEARTBEAT_SECONDS)

    def _keep_in_touch(self, store: TCPStore) -> None:
        key = f"alive/{self.rendezvous.node.rank}"
        while True:
            beat = Alive(beat=next(self._beat), **self._said)
            store.set(PREFIX + key, self.rendezvous.seal(key, beat))
            self._read_others(store)
            time.sleep(HEARTBEAT_SECONDS)

    def _read_others(self, store: TCPStore) -> None:
        records = store.multi_get([f"{PREFIX}alive/{rank}" for rank in self.others])
        for rank, raw in zip(self.others, records, strict=True):
            with contextlib.suppress(ValueError):  # not that node's word
                alive = self.rendezvous.unseal(f"alive/{rank}", Alive, raw)
                if self._beats.get(rank) != alive.beat:
                    self._beats[rank], self._last[rank] = alive.beat, time.monotonic()
                if alive.ended is not None:
                    self.ended.setdefault(rank, alive.ended.model_dump())
                if alive.decision is not None:
                    self.decisions.setdefault(rank, alive.decision.model_dump())
