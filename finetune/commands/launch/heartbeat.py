"""How the nodes of a launch hear of one another while their workers are at work, and agree on what comes after."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

from finetune.commands.launch.rendezvous import PREFIX, Meeting, Met

if TYPE_CHECKING:
    from torch.distributed import TCPStore

HEARTBEAT_SECONDS = 1.0


class Watch:
    """Keeps in touch with the other nodes in a thread, over a connection of its own.

    Args:
        meeting: where the nodes have met.
        met: what they agreed on.

    Attributes:
        others: the other nodes.
        ended: by node, how its workers ended.
        verdicts: by node, whether it wants another attempt.
    """

    def __init__(self, meeting: Meeting, met: Met) -> None:
        self.meeting, self.met = meeting, met
        place = meeting.place
        self.others = [rank for rank in range(place.nodes) if rank != place.rank]
        self.ended: dict[int, dict[str, Any]] = {}
        self.verdicts: dict[int, dict[str, Any]] = {}
        self._heard = dict.fromkeys(self.others, time.monotonic())
        self._counts: dict[int, bytes] = {}
        self._outbox: list[tuple[str, dict[str, Any]]] = []
        self.thread = threading.Thread(target=self._run, name="watch-nodes", daemon=True)
        if self.others:
            self.thread.start()

    def say(self, what: str, facts: dict[str, Any]) -> None:
        """Let the others know how this node ended, or what it wants: `ended` or `verdict`."""
        self._outbox.append((f"{PREFIX}{what}/{self.meeting.place.rank}", facts))

    def silent_seconds(self) -> dict[int, float]:
        """For each other node, how long ago it was last heard of."""
        now = time.monotonic()
        return {rank: now - heard for rank, heard in self._heard.items()}

    def _run(self) -> None:
        while True:
            try:
                store = self.meeting.connect(self.met.port)
                launch = json.loads(store.get(PREFIX + "launch"))
                if (launch["id"], launch["attempt"]) != (self.met.launch_id, self.met.attempt):
                    return  # node 0 has begun anew: what we have to say is not for that store
                self._keep_in_touch(store)
            except (RuntimeError, ValueError):  # the connection is lost, or node 0 is gone, or slow for a while
                time.sleep(HEARTBEAT_SECONDS)

    def _keep_in_touch(self, store: TCPStore) -> None:
        beat = 0
        while True:
            beat += 1
            store.set(f"{PREFIX}alive/{self.meeting.place.rank}", f"{beat} {time.monotonic()}")
            while self._outbox:
                key, facts = self._outbox[0]
                store.set(key, json.dumps(facts))
                self._outbox.pop(0)
            self._listen(store)
            time.sleep(HEARTBEAT_SECONDS)

    def _listen(self, store: TCPStore) -> None:
        counts = store.multi_get([f"{PREFIX}alive/{rank}" for rank in self.others])
        for rank, count in zip(self.others, counts, strict=True):
            if self._counts.get(rank) != count:
                self._counts[rank], self._heard[rank] = count, time.monotonic()
            for what, known in (("ended", self.ended), ("verdict", self.verdicts)):
                key = f"{PREFIX}{what}/{rank}"
                if rank not in known and store.check([key]):
                    known[rank] = json.loads(store.get(key))
