"""Nodes that find and lose each other, and ranks that agree, on a clock of their own.

The code of the launch and of the agreement runs as it is (virtual_time.py, virtual_group.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from virtual_group import Group, Hop, ranks_in
from virtual_time import Server, Wire, World, launch_in

from finetune.commands.launch.rendezvous import Rendezvous, RendezvousError
from finetune.errors import FinetuneError
from finetune.runtime.nodes import Nodes
from finetune.training.control import Control

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
    results: dict[int, RendezvousError | None]
    # until the last node knew that all are there, or who is not, from when the last one came
    seconds: float
    late: list[tuple[float, str]]  # when node 0 reported that it waits, and for whom


def come(
    nodes: int,
    *,
    after: Mapping[int, float] | None = None,
    absent: Sequence[int] = (),
    timeout: float = TIMEOUT_SECONDS,
) -> Joined:
    """Let nodes come, some of them late, and meet."""
    world = World()
    server = Server(world, WIRE, up=False)
    made = Joined(nodes, server, world, {}, 0.0, [])
    after = dict(after or {})
    listener = SimpleNamespace(fileno=lambda: 0)
    held = SimpleNamespace(reached_at="node-0000", number=29500, listener=listener)

    def node(rank: int) -> None:
        def tell(message: str) -> None:
            if rank == 0 and message.startswith("still waiting"):
                made.late.append((world.now, message))

        named = Nodes(nodes, rank, "node-0000", 29500)
        rendezvous = Rendezvous(named, None if rank else held, "0123456789abcdef", timeout, tell)
        made.results[rank] = None
        try:
            rendezvous.begin_attempt()
        except RendezvousError as error:
            made.results[rank] = error
        made.seconds = world.now - max(after.values(), default=0.0)

    with launch_in(world, server):
        for rank in range(nodes):
            if rank not in absent:
                world.start(lambda rank=rank: node(rank), node=rank, at=after.get(rank, 0.0))
        world.run()
    return made


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
