"""How nodes meet in the store of node 0."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import run_helpers
import torch.distributed as dist

from finetune.commands.launch import rendezvous as rendezvous_module
from finetune.commands.launch.rendezvous import (
    KEYS,
    ConnectionLost,
    Rendezvous,
    RendezvousError,
    use_libuv,
)
from finetune.runtime.nodes import Nodes
from finetune.runtime.ports import LOOPBACK, HeldPort, hold_port

HOST = socket.gethostname()


@pytest.fixture
def port(monkeypatch) -> Iterator[HeldPort]:
    monkeypatch.setattr(rendezvous_module, "CONNECT_SECONDS", 2.5)
    monkeypatch.setattr(rendezvous_module, "POLL_SECONDS", 0.05)
    held = hold_port(None, address=LOOPBACK)
    yield held
    held.close()


def node(
    port: HeldPort, rank: int, *, count: int = 2, digest: str = "ours", timeout: float = 20
) -> Rendezvous:
    """A node of a launch; `told` on it is what it has for people."""
    told: list[str] = []
    held = port if rank == 0 else None
    made = Rendezvous(Nodes(count, rank, LOOPBACK, port.number), held, digest, timeout, told.append)
    made.told = told
    return made


def on_each(call: Callable[[Rendezvous], Any], *nodes: Rendezvous) -> list[Any]:
    """The results, or the errors, of a call on all nodes at the same time."""

    def result(each: Rendezvous) -> Any:
        try:
            return call(each)
        except RendezvousError as error:
            return error

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(result, nodes))


def meet(*nodes: Rendezvous) -> list[Any]:
    return on_each(Rendezvous.begin_attempt, *nodes)


def test_nodes_meet_and_learn_each_others_values(port: HeldPort):
    nodes = node(port, 0), node(port, 1)
    assert meet(*nodes) == [None, None]
    for met in nodes:
        assert met.told == [
            "waiting for 1 other node(s), up to 20 s",
            f"all nodes are here: {HOST}, {HOST}; rendezvous at port {port.number}",
        ]
    codes = on_each(lambda met: met.exchange("ended", 4 + met.nodes.rank, 20), *nodes)
    assert codes == [{0: 4, 1: 5}] * 2
    assert nodes[1].exchange("decision", True, 0) == {1: True}, "it does not wait"
    # what others write into the store is checked
    for value in ("no JSON", '"1"', "true", "[" * 100_000, "\xff"):
        nodes[1].store.set(nodes[1]._key("ended", 1), value)
        assert nodes[0].exchange("ended", 1, 0) == {0: 1}
    assert not nodes[0].has_failure()
    nodes[1].report_failure()
    assert nodes[0].has_failure() and nodes[1].has_failure()
    nodes[0].store = None  # its launch is gone
    with pytest.raises(ConnectionLost, match="connection to node 0 was lost"):
        nodes[1].exchange("ended", 1, 20)


def test_an_attempt_that_is_about_to_end_is_not_joined_again_but_the_next_is(port: HeldPort):
    first, second = node(port, 0), node(port, 1)
    meet(first, second)
    assert second.attempt == first.attempt and second.number == 1
    second.timeout_seconds = 0.5
    (error,) = meet(second)
    assert "no launch of this run answered" in str(error)
    second.timeout_seconds = 20
    first.report_failure()
    # by a worker
    dist.TCPStore(LOOPBACK, port.number, is_master=False).set("default_pg/address", "old")
    assert meet(first, second) == [None, None]
    assert second.attempt == first.attempt and second.number == 2
    assert not second.has_failure(), "what was reported late does not reach the next attempt"
    assert {key.partition("/")[0] for key in first.store.list_keys()} == {KEYS.rstrip("/")}
    # a node that was started again by hand takes part in what is under way
    assert meet(node(port, 1)) == [None]


def test_missing_nodes_are_named_on_every_node_that_is_there(port: HeldPort, monkeypatch):
    monkeypatch.setattr(rendezvous_module, "LATE_SECONDS", 0.5)
    other = node(port, 1, digest="of other flags", timeout=2)
    nodes = [node(port, rank, count=4, timeout=2) for rank in (0, 1)]
    *errors, alone = meet(*nodes, other)
    for error in errors:
        said = "node(s) 2-3 of 4 did not come within 2 s. fix: start the launch on them"
        assert said in str(error) and f"{LOOPBACK} port {port.number}" in str(error)
        assert not isinstance(error, ConnectionLost)
    assert "still waiting for 2 of 4 nodes: 2-3" in nodes[0].told
    assert "no launch of this run answered" in str(alone)


def test_without_node_0_the_port_and_what_to_do_are_named(port: HeldPort):
    """A silent program, and nothing at all."""
    for _ in range(2):
        (error,) = meet(node(port, 1, timeout=1))
        said = f"answered at {LOOPBACK} port {port.number} within 1 s. fix: start node 0"
        assert said in str(error)
        port.close()


def test_two_machines_with_one_rank(port: HeldPort):
    first = node(port, 0)
    with ThreadPoolExecutor(1) as pool:
        met = pool.submit(first.begin_attempt)
        run_helpers.wait_for(lambda: first.store and first.store.check([first._keys + "attempt"]))
        first.store.set(first._key("host", 1), "else\x1b[2Jwhere")
        (error,) = meet(node(port, 1))
        assert f"NODE_RANK=1 was given to two machines: elsewhere, {HOST}. fix:" in str(error)
        first.store.set(first._key("host", 1), HOST)  # the same machine: started again by hand
        assert meet(node(port, 1)) == [None]
        met.result(20)


def test_libuv_is_switched_off_only_where_torch_lacks_it(monkeypatch):
    monkeypatch.delenv("USE_LIBUV", raising=False)
    assert use_libuv() and "USE_LIBUV" not in os.environ

    def without(*arguments: Any, use_libuv: bool, **options: Any):
        raise RuntimeError("use_libuv was requested but PyTorch was built without libuv support")

    monkeypatch.setattr(dist, "TCPStore", without)
    assert not use_libuv() and os.environ["USE_LIBUV"] == "0"
    monkeypatch.setenv("USE_LIBUV", "1")
    assert use_libuv(), "the user's own stays"
