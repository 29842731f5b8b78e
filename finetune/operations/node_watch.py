"""How the nodes of a launch hear of one another while their workers are at work, and agree on what comes after."""

from __future__ import annotations

import json
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from finetune.operations.node_meeting import PREFIX, Meeting

if TYPE_CHECKING:
    from torch.distributed import TCPStore

HEARTBEAT_SECONDS = 1.0


@dataclass
class Watch:
    """Keeps in touch with the other nodes in a thread, over a connection of its own.

    Attributes:
        ended: by node, how its workers ended.
        verdicts: by node, whether it wants another attempt.
        heard: by node, when it was last heard of (time.monotonic).
    """

    meeting: Meeting
    ended: dict[int, dict[str, Any]] = field(default_factory=dict)
    verdicts: dict[int, dict[str, Any]] = field(default_factory=dict)
    heard: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        place = self.meeting.place
        self.others = [rank for rank in range(place.nodes) if rank != place.rank]
        self.heard = dict.fromkeys(self.others, time.monotonic())
        self._counts: dict[int, bytes] = {}
        self._outbox: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        if self.others:
            threading.Thread(target=self._run, name="watch-nodes", daemon=True).start()

    def say(self, what: str, facts: dict[str, Any]) -> None:
        """Let the others know how this node ended, or what it wants: `ended` or `verdict`."""
        self._outbox.put((f"{PREFIX}{what}/{self.meeting.place.rank}", facts))

    def silent_seconds(self) -> dict[int, float]:
        """For each other node, how long ago it was last heard of."""
        now = time.monotonic()
        return {rank: now - heard for rank, heard in self.heard.items()}

    def _run(self) -> None:
        try:
            store = self.meeting.connect(self.meeting.port)
            beat = 0
            while True:
                beat += 1
                store.set(f"{PREFIX}alive/{self.meeting.place.rank}", str(beat))
                while not self._outbox.empty():
                    key, facts = self._outbox.get()
                    store.set(key, json.dumps(facts))
                self._listen(store)
                time.sleep(HEARTBEAT_SECONDS)
        except RuntimeError:  # the connection is lost, or node 0 is gone: nobody is heard of any more
            return

    def _listen(self, store: TCPStore) -> None:
        counts = store.multi_get([f"{PREFIX}alive/{rank}" for rank in self.others])
        for rank, count in zip(self.others, counts, strict=True):
            if self._counts.get(rank) != count:
                self._counts[rank], self.heard[rank] = count, time.monotonic()
            for what, known in (("ended", self.ended), ("verdict", self.verdicts)):
                key = f"{PREFIX}{what}/{rank}"
                if rank not in known and store.check([key]):
                    known[rank] = json.loads(store.get(key))
