"""The rendezvous of a launch's nodes: one TCP store, held by node 0 at the port of the launch.

Node 0 takes the first free of ten ports and writes there which launch this is. The others go
through the same ten ports until they find it, so a port that was taken needs no second round of
configuration. All calls that go over the network have a time limit: where a cable is pulled, a call
may never return, and signals must still be heard. Nodes that wait ask the store to answer when
there is something to say, so that a thousand of them do not keep it busy meanwhile.

Keys, under `finetune/`: `launch`, `node/<n>`, `ranks` (what is missing, where there are none),
`alive/<n>`; their records are in `records`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

from finetune.commands.launch.records import (
    Alive,
    Claim,
    LaunchFacts,
    Missing,
    R,
    Ranks,
    Record,
    read,
    seal,
    unseal,
)
from finetune.runs.console_lines import plain_text
from finetune.runtime.ports import listens
from finetune.runtime.timeouts import call_with_timeout

if TYPE_CHECKING:
    from torch.distributed import TCPStore

PREFIX = "finetune/"
CONNECT_SECONDS = 10.0
# node 0 to its own store, which nothing else can answer: longer, for where the machine is busy
OPEN_SECONDS = 60.0
POLL_SECONDS = 0.3
# where node 0 is not there yet: each look is a connection to each of ten ports
SLOWEST_POLL_SECONDS = 3.0
WAIT_SECONDS = 5.0  # the store answers earlier where there is something to say
LATE_SECONDS = 60.0  # between two words on who is still missing

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
    # Node 0: a name that no other launch has; others: that of the launch they took part in last, if
    # any.
    launch_id: str = ""
    # node 0: this attempt, from 1; others: the last one of that launch they took part in, 0 for
    # none
    attempt: int = 0
    listener: int = -1  # descriptor of node 0's listening socket, -1 on the others
    listens_at: str = "127.0.0.1"  # node 0: an address of its own at which that socket answers
    secret: str = field(default="", repr=False)  # that the nodes share; empty for none

    @property
    def store_address(self) -> str:
        """Where the store is: on its own node it needs no address that leads back from outside."""
        return self.listens_at if self.rank == 0 else self.address


class RendezvousError(Exception):
    """The nodes did not find each other. `kind` and `facts` tell why; `attempt_result` has the
    texts.
    """

    def __init__(self, kind: str, **facts: Any) -> None:
        super().__init__(kind)
        self.kind = kind
        self.facts = facts


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
    """Whether stores use libuv; where this torch is built without, USE_LIBUV=0 is set for the
    workers as well.
    """
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
    """The store of one attempt: the nodes find each other by `join`, and keep in touch by
    `heartbeat.Heartbeat`.
    """

    def __init__(self, node: LaunchNode) -> None:
        self.node = node
        self.libuv = use_libuv()
        self.port = 0
        # node 0: called while it waits for these
        self.on_late: Callable[[list[int]], None] = lambda nodes: None
        self.store: TCPStore | None = None
        self.launch: LaunchFacts | None = None
        self._deadline = time.monotonic() + node.timeout_seconds
        self._seen: dict[int, str] = {}  # port -> what answered there
        self._refused: set[int] = set()  # nodes for which somebody made a claim that is not signed

    def join(self) -> RendezvousResult:
        """Wait for all nodes.

        Raises:
            RendezvousError: they did not come in time, two have the same rank, or they do not share
                a secret.
        """
        if self.node.rank == 0:
            self._open()
        else:
            self._find()
        claim = self._claim()
        ranks = self._give_out() if self.node.rank == 0 else self._wait_for_ranks(claim)
        rank, launch = self.node.rank, self._launch()
        first = ranks.first
        return RendezvousResult(
            self.port, launch.id, launch.attempt, first[rank], first[-1], tuple(ranks.hosts)
        )

    def connect(self, port: int) -> TCPStore:
        """A further connection to the store at a port."""
        from torch.distributed import TCPStore

        seconds = timedelta(seconds=CONNECT_SECONDS)
        return TCPStore(
            self.node.store_address, port, is_master=False, timeout=seconds, use_libuv=self.libuv
        )

    def seal(self, key: str, record: Record) -> str:
        """A record as it is written at a key of this attempt."""
        return seal(record, key=key, launch=self._attempt(key), secret=self.node.secret)

    def unseal(self, key: str, kind: type[R], raw: bytes) -> R:
        """A record from a key of this attempt.

        Raises:
            ValueError: it is not one, or not signed as this launch signs.
        """
        return unseal(raw, kind, key=key, launch=self._attempt(key), secret=self.node.secret)

    def _launch(self) -> LaunchFacts:
        assert self.launch is not None, "the store is not open"
        return self.launch

    def _attempt(self, key: str) -> str:
        return "" if key == "launch" else f"{self._launch().id}/{self._launch().attempt}"

    def _open(self) -> None:
        from torch.distributed import TCPStore

        node = self.node
        self.port = node.ports[0]
        self.store = TCPStore(
            node.store_address,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=OPEN_SECONDS),
            use_libuv=self.libuv,
            master_listen_fd=node.listener,
        )
        self.launch = LaunchFacts(
            id=node.launch_id,
            digest=node.digest,
            attempt=node.attempt,
            nodes=node.nodes,
            host=socket.gethostname(),
            command=node.command[:1000],
        )
        self.store.set(PREFIX + "launch", self.seal("launch", self.launch))

    def _find(self) -> None:
        pause = POLL_SECONDS
        while self.store is None:
            for port in self.node.ports:
                if self._is_ours(port):
                    return
            self._wait("nothing_found", pause_seconds=pause)
            pause = min(2 * pause, SLOWEST_POLL_SECONDS)

    def _is_ours(self, port: int) -> bool:
        """Whether node 0's store of this launch and of a new attempt answers at a port; keeps
        it.
        """
        node = self.node
        if not listens(node.address, port, CONNECT_SECONDS):
            self._seen.pop(port, None)
            return False
        try:
            store = call_with_timeout(lambda: self.connect(port), CONNECT_SECONDS)
            # Node 0 writes it right after opening the store; a store of others' never has it.
            raw = call_with_timeout(lambda: store.get(PREFIX + "launch"), CONNECT_SECONDS + 1)
            known, signed = read(raw, LaunchFacts, key="launch", launch="", secret=node.secret)
        except (TimeoutError, RuntimeError, ValueError):
            self._seen[port] = "something else"
            return False
        if known.digest != node.digest or known.nodes != node.nodes:
            self._seen[port] = f"{plain_text(known.command)} ({known.nodes} nodes)"
            return False
        if known.id == node.launch_id and known.attempt <= node.attempt:
            return False  # about to end: the next attempt will answer at the same port
        if not signed:
            raise RendezvousError("other_secret", port=port, host=known.host)
        self.store = store
        self.port = port
        self.launch = known
        return True

    def _claim(self) -> Claim:
        """Write down that this node is here; another machine may not have the same rank."""
        host, rank = socket.gethostname(), self.node.rank
        ours = Claim(
            host=host, processes=self.node.processes, pid=os.getpid(), nonce=secrets.token_hex(16)
        )
        self._write(f"alive/{rank}", Alive(beat=0))  # whoever sees the node sees this
        key, sealed = f"node/{rank}", self.seal(f"node/{rank}", ours)
        found = self._ask(lambda store: store.compare_set(PREFIX + key, "", sealed))
        if found.decode(errors="replace") != sealed:
            with contextlib.suppress(ValueError):  # what is not a claim gives way
                other = self.unseal(key, Claim, found)
                if other.host != host:
                    raise RendezvousError("same_rank", rank=rank, hosts=[other.host, host])
                # started again by hand: ranks may have been given out to it already
                if not self.node.secret:
                    ours = ours.model_copy(update={"nonce": other.nonce})
            self._write(key, ours)
        return ours

    def _give_out(self) -> Ranks:
        """Node 0: wait for the others, then give out ranks."""
        nodes = range(self.node.nodes)
        tell_at = time.monotonic() + LATE_SECONDS
        while missing := sorted(set(nodes) - (claims := self._claims()).keys()):
            if time.monotonic() > self._deadline:
                self._write("ranks", Missing(nodes=missing))
                time.sleep(2 * POLL_SECONDS)  # so that those who are here can read it
                raise RendezvousError("nodes_missing", nodes=missing, refused=sorted(self._refused))
            if time.monotonic() > tell_at:
                self.on_late(missing)
                tell_at += LATE_SECONDS
            # where somebody puts something in a claim's place again and again
            time.sleep(POLL_SECONDS)
        made = [claims[rank] for rank in nodes]
        ranks = Ranks(
            first=[0, *accumulate(claim.processes for claim in made)],
            hosts=[claim.host for claim in made],
            nonces=[claim.nonce for claim in made],
        )
        self._write("ranks", ranks)
        return ranks

    def _claims(self) -> dict[int, Claim]:
        """The claims, when all are there or some seconds have passed, by node.

        One that is not signed, or no claim, makes room for the node's own.
        """
        keys = [f"node/{rank}" for rank in range(self.node.nodes)]
        if not self._come(keys):
            keys = [key for key in keys if self._has(key)]
        claims = {}
        for key, raw in zip(
            keys,
            self._ask(lambda store: store.multi_get([PREFIX + key for key in keys])),
            strict=True,
        ):
            rank = int(key.removeprefix("node/"))
            try:
                claims[rank] = self.unseal(key, Claim, raw)
            except ValueError:
                self._refused.add(rank)
                self._ask(lambda store, key=PREFIX + key: store.delete_key(key))
        return claims

    def _wait_for_ranks(self, claim: Claim) -> Ranks:
        key = f"node/{self.node.rank}"
        while True:
            if self._come(["ranks"]):
                raw = self._ask(lambda store: store.get(PREFIX + "ranks"))
                with contextlib.suppress(ValueError):  # not node 0's word
                    ranks = self.unseal("ranks", Ranks, raw)
                    if ranks.answers(claim, self.node.rank, self.node.nodes):
                        return ranks
                with contextlib.suppress(ValueError):
                    raise RendezvousError(
                        "nodes_missing", nodes=self.unseal("ranks", Missing, raw).nodes
                    )
            if not self._has(key):  # node 0 took away what somebody had put in its place
                self._write(key, claim)
            self._wait("no_ranks", extra_seconds=CONNECT_SECONDS)

    def _come(self, keys: Sequence[str]) -> bool:
        """Whether all these keys are there, now or within some seconds: one request, which the
        store answers then.
        """
        from torch.distributed import DistStoreError

        seconds = min(WAIT_SECONDS, max(POLL_SECONDS, self._deadline - time.monotonic()))

        def wait(store: TCPStore) -> bool:
            try:
                store.wait([PREFIX + key for key in keys], timedelta(seconds=seconds))
            except DistStoreError:  # not all; where the connection is lost, the next call says so
                return False
            return True

        return self._ask(wait, seconds + CONNECT_SECONDS)

    def _has(self, key: str) -> bool:
        return self._ask(lambda store: store.check([PREFIX + key]))

    def _write(self, key: str, record: Record) -> None:
        sealed = self.seal(key, record)
        self._ask(lambda store: store.set(PREFIX + key, sealed))

    def _ask(self, call: Callable[[TCPStore], _T], seconds: float = CONNECT_SECONDS) -> _T:
        try:
            return call_with_timeout(lambda: call(self.store), seconds)
        except (TimeoutError, RuntimeError) as error:
            raise RendezvousError("connection_lost", error=str(error).splitlines()[0]) from error

    def _wait(
        self, kind: str, extra_seconds: float = 0.0, pause_seconds: float | None = None
    ) -> None:
        if time.monotonic() > self._deadline + extra_seconds:
            raise RendezvousError(kind, seen={str(port): what for port, what in self._seen.items()})
        time.sleep(POLL_SECONDS if pause_seconds is None else pause_seconds)
