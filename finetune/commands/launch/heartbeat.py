"""Heartbeats: how the nodes of a launch know of one another while their workers work, and agree on a restart."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from finetune.commands.launch.rendezvous import PREFIX, Rendezvous, RendezvousResult

if TYPE_CHECKING:
    from torch.distributed import TCPStore

HEARTBEAT_SECONDS = 1.0


class Heartbeat:
    """Keeps in touch with the other nodes in a thread, over a connection of its own.

    Attributes:
        others: the other nodes.
        ended: by node, how its workers ended.
        decisions: by node, whether it wants another attempt.
    """

    def __init__(self, rendezvous: Rendezvous, agreed: RendezvousResult) -> None:
        self.rendezvous, self.agreed = rendezvous, agreed
        node = rendezvous.node
        self.others = [rank for rank in range(node.nodes) if rank != node.rank]
        self.ended: dict[int, dict[str, Any]] = {}
        self.decisions: dict[int, dict[str, Any]] = {}
        self._last = dict.fromkeys(self.others, time.monotonic())
        self._counts: dict[int, bytes] = {}
        self._outbox: list[tuple[str, dict[str, Any]]] = []
        self.thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        if self.others:
            self.thread.start()

    def publish(self, what: str, facts: dict[str, Any]) -> None:
        """Let the others know how this node ended, or what it wants: `ended` or `decision`."""
        self._outbox.append((f"{PREFIX}{what}/{self.rendezvous.node.rank}", facts))

    def lost(self, seconds: float, known: Collection[int]) -> dict[int, int]:
        """Nodes without a heartbeat for longer than this, with the seconds, but for those that `known` tells of."""
        now = time.monotonic()
        silences = {rank: now - last for rank, last in self._last.items() if rank not in known}
        return {rank: round(silence) for rank, silence in silences.items() if silence > seconds}

    def _run(self) -> None:
        while True:
            try:
                store = self.rendezvous.connect(self.agreed.port)
                launch = json.loads(store.get(PREFIX + "launch"))
                if (launch["id"], launch["attempt"]) != (self.agreed.launch_id, self.agreed.attempt):
                    return  # node 0 has begun anew: what this node has to tell is not for that store
                self._keep_in_touch(store)
            except (RuntimeError, ValueError):  # the connection is lost, or node 0 is gone, or slow for a while
                time.sleep(HEARTBEAT_SECONDS)

    def _keep_in_touch(self, store: TCPStore) -> None:
        beat = 0
        while True:
            beat += 1
            store.set(f"{PREFIX}alive/{self.rendezvous.node.rank}", f"{beat} {time.monotonic()}")
            while self._outbox:
                key, facts = self._outbox[0]
                store.set(key, json.dumps(facts))
                self._outbox.pop(0)
            self._read_others(store)
            time.sleep(HEARTBEAT_SECONDS)

    def _read_others(self, store: TCPStore) -> None:
        counts = store.multi_get([f"{PREFIX}alive/{rank}" for rank in self.others])
        for rank, count in zip(self.others, counts, strict=True):
            if self._counts.get(rank) != count:
                self._counts[rank], self._last[rank] = count, time.monotonic()
            for what, known in (("ended", self.ended), ("decision", self.decisions)):
                key = f"{PREFIX}{what}/{rank}"
                if rank not in known and store.check([key]):
                    known[rank] = json.loads(store.get(key))
