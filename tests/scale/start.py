"""The start of 128 and 1,024 ranks, counted: what node 0's store is asked, what ranks tell each other, who is named when.

    python tests/scale/start.py            # writes the section "Start" of docs/scale.md

The code of the launch and of the agreement runs as it is, on a clock of its own (virtual_time.py, virtual_group.py); the
connections of gloo are counted of real groups (gloo_store.py).
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

import numpy as np
from gloo_store import GlooTraffic, gloo_traffic
from virtual_group import Group, Hop, ranks_in
from virtual_time import Server, Wire, World, launch_in

from finetune.commands.launch.heartbeat import Heartbeat
from finetune.commands.launch.rendezvous import LaunchNode, Rendezvous, RendezvousError, RendezvousResult
from finetune.errors import FinetuneError
from finetune.training.control import Control

DEVICES = 8  # of a node
TIMEOUT_SECONDS = 1800  # --timeout-seconds
# TCP between two machines of one placement group: 50 us there and back are what vendors publish for the best of them, and
# here each way is given as much. The store's time for a request is measured of torch's own (`measured_service`).
WIRE = Wire(between=50e-6, within=15e-6, service=20e-6, rate=1.25e9)
HOP = Hop(seconds=50e-6, rate=1.25e9)
# Of a run that is fine-tuned, as it names itself (training/prepare_sft.py): digests mostly.
FACTS = {f"fact {number}": "0123456789abcdef" * 4 for number in range(16)}


@dataclass
class Joined:
    """How nodes found each other."""

    nodes: int
    server: Server
    world: World
    results: dict[int, RendezvousResult | RendezvousError]
    seconds: float  # until the last node had its ranks (or knew that there are none), from when the last one came
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
    """Let nodes come, some of them late, and find each other; what follows is done on each of them."""
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


# ---------------------------------------------------------------- heartbeats, and the end of workers


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
    made = come(nodes, after={rank: rank / nodes for rank in range(nodes)}, then=keep, until=6.5 + seconds)
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
    """What each node reports where nodes fall silent (a cable), or their workers fail, some seconds into the run.

    Args:
        timeout: --timeout-seconds; workers of the others wait for lost ones in a collective, and give up then.
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
                world.start(lambda number=number: rank(number), node=number, at=(after or {}).get(number, 0.0))
        world.run()
    seconds = max(ends) - max((after or {}).values(), default=0.0)
    counted = [(group.messages[0], max(group.messages)), (group.bytes[0], max(group.bytes))]
    return Agreement(ranks, seconds, *counted, answers)


def check(facts: Mapping[int, Mapping[str, object]]) -> Callable[[Control, int], None]:
    """`check_equal`, with other facts on some ranks."""
    return lambda control, rank: control.check_equal({**FACTS, **facts.get(rank, {})})


# ---------------------------------------------------------------- the tables


def measured_service(requests: int = 20_000) -> float:
    """Seconds of torch's own store for a request: one client and the store on two cores, nothing between them."""
    import time

    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("key", "x" * 100)
    begin = time.perf_counter()
    for _ in range(requests):
        store.check(["key"])
    return (time.perf_counter() - begin) / requests


def measure() -> dict[str, dict[str, list[float]]]:
    """Every figure, by number of nodes or ranks."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in ("join", "late", "beat", "check", "any", "token")}
    for nodes in (16, 128):
        made = come(nodes)
        found["join"][str(nodes)] = [made.server.requests.total(), made.server.bytes.total(), made.seconds]
        # Node 1 is ten minutes late: what the others ask meanwhile, a second.
        waited = come(nodes, after={1: 600.0})
        rest = waited.server.requests.total() - made.server.requests.total()
        found["late"][str(nodes)] = [rest / 600, (waited.server.bytes.total() - made.server.bytes.total()) / 600]
        found["beat"][str(nodes)] = list(heartbeat_load(nodes))
    calls: dict[str, Callable[[Control, int], Any]] = {
        "check": check({}),
        "any": lambda control, rank: control.any(False),
        "token": lambda control, rank: control.token(),
    }
    for ranks in (128, 1024):
        for name, call in calls.items():
            made = agree(ranks, call)
            found[name][str(ranks)] = [max(made.messages), max(made.bytes), made.seconds]
    return found


def losses() -> list[str]:
    """What is said, and when, of 1, 2 and 10 of 128 nodes or 1,024 ranks."""
    lines = []
    for dead in ((5,), (5, 77), tuple(range(40, 50))):
        who = f"{len(dead)} of 128"
        late = come(128, after=dict.fromkeys(dead, 600.0))
        missing = come(128, absent=dead)
        absent = max(late.late[0][0] for _ in dead)
        assert {tuple(result.facts["nodes"]) for result in missing.results.values()} == {dead}
        silent = after_loss(128, silent=dead, timeout=300.0)
        failing = after_loss(128, failing=dead)
        assert all(named.lost == list(dead) for rank, named in silent.items() if rank not in dead)
        assert all(set(dead) - {rank} <= set(named.ended) for rank, named in failing.items())
        cells = [
            who,
            f"first named after {absent:.0f} s; ranks {late.seconds:.1f} s after the last came",
            f"named on all others after {missing.world.now:,.0f} s",
            f"named on all others after {max(named.seconds for r, named in silent.items() if r not in dead):.0f} s",
            f"after {max(named.seconds for rank, named in failing.items() if rank not in dead):.0f} s",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def gloo_lines() -> tuple[list[str], dict[bool, Callable[[int], tuple[float, float, float]]]]:
    """Groups that were made, and what their figures are for any number of ranks."""
    counted = {lazy: [gloo_traffic(ranks, lazy=lazy) for ranks in (2, 4, 8, 16, 32, 64)] for lazy in (False, True)}
    formulas = {lazy: fitted(counted[lazy], lazy) for lazy in counted}
    lines = []
    for at, every in enumerate(counted[False]):
        lazy = counted[True][at]
        cells = [f"{every.ranks}", "run"]
        cells += [f"{made.requests:,} | {made.bytes / 1e6:,.3f} | {made.connections:,}" for made in (every, lazy)]
        lines.append("| " + " | ".join(cells) + " |")
    for ranks in (128, 1024):
        cells = [f"{ranks:,}", "computed"]
        for lazy in (False, True):
            requests, size, connections = formulas[lazy](ranks)
            cells.append(f"{requests:,.0f} | {size / 1e6:,.1f} | {connections:,.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return lines, formulas


def fitted(counted: Sequence[GlooTraffic], lazy: bool) -> Callable[[int], tuple[float, float, float]]:
    """Requests, bytes and connections for any number of ranks: polynomials that go through what was counted.

    With every connection, requests are quadratic and bytes cubic (each of N ranks reads N records of 8 N bytes); on
    demand all are N log N, as each rank looks up the log2 N others that it talks to.
    """
    ranks = np.array([made.ranks for made in counted], dtype=float)
    degrees = {"requests": 2, "bytes": 3, "connections": 2}
    fits = {}
    for name, degree in degrees.items():
        values = np.array([getattr(made, name) for made in counted], dtype=float)
        terms = _terms(ranks, degree, lazy)
        fits[name] = np.linalg.lstsq(terms / values[:, None], np.ones(len(values)), rcond=None)[0]
        error = np.abs(terms @ fits[name] / values - 1).max()
        assert error < 0.05, f"{name} does not follow the formula: {error:.1%}"

    def compute(count: int) -> tuple[float, float, float]:
        values = [float((_terms(np.array([float(count)]), degrees[name], lazy) @ fits[name])[0]) for name in degrees]
        return values[0], values[1], values[2]

    return compute


def _terms(ranks: np.ndarray, degree: int, lazy: bool) -> np.ndarray:
    if lazy:
        return np.stack([ranks * np.ceil(np.log2(ranks)), ranks, np.ones_like(ranks)], axis=1)
    return np.stack([ranks**power for power in range(degree + 1)], axis=1)
