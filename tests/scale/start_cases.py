"""Nodes that find and lose each other, and ranks that agree, on a clock of their own.

The code of the launch and of the agreement runs as it is (virtual_time.py, virtual_group.py).
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from virtual_group import Group, Hop, ranks_in
from virtual_time import Server, Wire, World, launch_in

from finetune.commands.launch.heartbeat import Heartbeat
from finetune.commands.launch.rendezvous import (
    LaunchNode,
    Rendezvous,
    RendezvousError,
    RendezvousResult,
)
from finetune.errors import FinetuneError
from finetune.training.control import Control

DEVICES = 8  # of a node
TIMEOUT_SECONDS = 1800  # --timeout-seconds
# Assumed: 50 us each way between two machines, through the kernels of both; 10 Gbit/s. The store's
# time for a request is about what one takes there and back on this machine (`measured_request` in
# start.py).
WIRE = Wire(between=50e-6, within=15e-6, service=20e-6, rate=1.25e9)
HOP = Hop(seconds=50e-6, rate=1.25e9)
# Of a run that is fine-tuned, as it names itself (training/prepare.py): digests mostly.
FACTS = {f"fact {number}": "0123456789abcdef" * 4 for number in range(16)}


@dataclass
class Joined:
    """How nodes found each other."""

    nodes: int
    server: Server
    world: World
    results: dict[int, RendezvousResult | RendezvousError]
    # until the last node had its ranks (or knew that there are none), from when the last one came
    seconds: float
    late: list[tuple[float, list[int]]]  # when node 0 said that it waits, and for whom


def launch_node(rank: int, nodes: int, timeout: float = TIMEOUT_SECONDS) -> LaunchNode:
    first = {"launch_id": "launch", "attempt": 1, "listener": 0} if rank == 0 else {}
    return LaunchNode(
        nodes=nodes,
        rank=rank,
        address="node-0000",
        ports=tuple(range(29500, 29510)),
        processes=DEVICES,
        digest="0123456789abcdef",
        command="finetune.sft --config run.yaml",
        timeout_seconds=timeout,
        **first,
    )


def come(
    nodes: int,
    *,
    after: Mapping[int, float] | None = None,
    absent: Sequence[int] = (),
    then: Callable[[Rendezvous, RendezvousResult], None] | None = None,
    until: float = math.inf,
    timeout: float = TIMEOUT_SECONDS,
) -> Joined:
    """Let nodes come, some of them late, and find each other; what follows is done on each of
    them.
    """
    world = World()
    server = Server(world, WIRE, up=False)
    made = Joined(nodes, server, world, {}, 0.0, [])
    after = dict(after or {})

    def node(rank: int) -> None:
        rendezvous = Rendezvous(launch_node(rank, nodes, timeout))
        rendezvous.on_late = lambda missing: made.late.append((world.now, missing))
        try:
            made.results[rank] = rendezvous.join()
        except RendezvousError as error:
            made.results[rank] = error
        made.seconds = world.now - max(after.values(), default=0.0)
        if then is not None:
            then(rendezvous, made.results[rank])

    with launch_in(world, server):
        for rank in range(nodes):
            if rank not in absent:
                world.start(lambda rank=rank: node(rank), node=rank, at=after.get(rank, 0.0))
        world.run(until)
    return made


# --------------------------------------------------------------- heartbeats, and the end of workers


def heartbeat_load(nodes: int, seconds: float = 10.0) -> tuple[float, float]:
    """Requests and bytes of node 0's store per second of a run."""
    begin: dict[str, float] = {}

    def keep(rendezvous: Rendezvous, agreed: RendezvousResult) -> None:
        Heartbeat(rendezvous, agreed)
        world, server = rendezvous.store.world, rendezvous.store.server
        if rendezvous.node.rank == 0:
            world.sleep(5.0)
            begin.update(at=world.now, requests=server.requests.total(), bytes=server.bytes.total())
        world.sleep(1000.0)

    # Not all in one moment: a cluster's nodes are not started by one clock.
    made = come(
        nodes, after={rank: rank / nodes for rank in range(nodes)}, then=keep, until=6.5 + seconds
    )
    passed = made.world.now - begin["at"]
    requests, sent = made.server.requests.total(), made.server.bytes.total()
    return (requests - begin["requests"]) / passed, (sent - begin["bytes"]) / passed


@dataclass
class Named:
    """What a node reported of the end: when, and of whom."""

    seconds: float  # from the moment at which it happened
    lost: list[int]
    ended: list[int]


def after_loss(
    nodes: int, *, silent: Sequence[int] = (), failing: Sequence[int] = (), timeout: float = 60.0
) -> dict[int, Named]:
    """What each node reports where nodes fall silent (a cable), or their workers fail, some seconds
    into the run.

    Args:
        timeout: --timeout-seconds; workers of the others wait for lost ones in a collective, and
            give up then.
    """
    from finetune.commands.launch import elastic_agent
    from finetune.commands.launch.elastic_agent import Agent

    happens, told = 5.0, {}

    class Workers:
        """Of a node: they end by themselves where they fail, else when they are told to."""

        def __init__(self, world: World, fails: bool) -> None:
            self.world, self.fails, self.closed = world, fails, False

        def wait(self, seconds: float) -> Any:
            failed = self.fails and self.world.now >= happens
            gave_up = bool(silent) and self.world.now >= happens + timeout
            if not (failed or gave_up or self.closed):
                return None
            code = 1 if failed or gave_up else -15
            return SimpleNamespace(failures={0: SimpleNamespace(exitcode=code, timestamp=0)})

        def close(self, number: int, seconds: float) -> None:
            self.closed = True

    def watch(rendezvous: Rendezvous, agreed: RendezvousResult) -> None:
        world, rank = rendezvous.store.world, rendezvous.node.rank
        agent = Agent.__new__(Agent)
        agent.request, agent.node, agent.stop_signal, agent._stop_at = None, rendezvous.node, 0, 0.0
        agent._reports, agent._workers = io.StringIO(), Workers(world, rank in failing)
        agent._next_request = lambda: {"restart": True}
        heartbeat = Heartbeat(rendezvous, agreed)
        if rank in silent:
            world.sleep(happens - world.now)
            rendezvous.store.server.cut.add(rank)
        codes = agent._follow(heartbeat, agreed)
        agent._end(heartbeat, codes)
        report = json.loads(agent._reports.getvalue().splitlines()[0])
        lost, ended = sorted(map(int, report["lost_nodes"])), sorted(map(int, report["others"]))
        told[rank] = Named(agent.reported - happens, lost, ended)

    def report(agent: Agent, event: str, **facts: Any) -> None:
        if event == "ended":
            agent.reported = elastic_agent.time.monotonic()
        agent._reports.write(json.dumps({"event": event, **facts}) + "\n")

    with patch.object(Agent, "_report", report):
        come(nodes, then=watch, until=happens + timeout + 50.0)
    return told


# ---------------------------------------------------------------- agreement of ranks


@dataclass
class Agreement:
    """One call of every rank.

    Attributes:
        seconds: until the last rank was done, from the moment that the last one came.
        messages, bytes: that rank 0 and that the busiest rank sends.
        answers: by rank, what came of it, an error included.
    """

    ranks: int
    seconds: float
    messages: tuple[int, int]
    bytes: tuple[int, int]
    answers: dict[int, Any]


def agree(
    ranks: int,
    call: Callable[[Control, int], Any],
    *,
    after: Mapping[int, float] | None = None,
    absent: Sequence[int] = (),
    timeout: int = TIMEOUT_SECONDS,
) -> Agreement:
    """Let every rank make one call of its `Control`; some come late, or never."""
    world = World()
    group = Group(world, ranks, HOP, timeout)
    answers: dict[int, Any] = {}
    ends: list[float] = []

    def rank(number: int) -> None:
        try:
            answers[number] = call(Control(ranks, timeout), number)
        except (RuntimeError, FinetuneError) as error:
            answers[number] = error
        ends.append(world.now)

    with ranks_in(world, group):
        for number in range(ranks):
            if number not in absent:
                world.start(
                    lambda number=number: rank(number),
                    node=number,
                    at=(after or {}).get(number, 0.0),
                )
        world.run()
    seconds = max(ends) - max((after or {}).values(), default=0.0)
    counted = [(group.messages[0], max(group.messages)), (group.bytes[0], max(group.bytes))]
    return Agreement(ranks, seconds, *counted, answers)


def check(facts: Mapping[int, Mapping[str, object]]) -> Callable[[Control, int], None]:
    """`check_equal`, with other facts on some ranks."""
    return lambda control, rank: control.check_equal({**FACTS, **facts.get(rank, {})})
