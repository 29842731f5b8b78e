"""How nodes find each other at a port: other programs, other launches, old attempts, missing and
doubled nodes.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import run_helpers
import torch.distributed as dist

from finetune.commands.launch import rendezvous as rendezvous_module
from finetune.commands.launch.heartbeat import Heartbeat
from finetune.commands.launch.records import (
    Claim,
    Decision,
    Ended,
    NotSigned,
    Ranks,
    Record,
    seal,
    unseal,
)
from finetune.commands.launch.rendezvous import (
    PREFIX,
    LaunchNode,
    Rendezvous,
    RendezvousError,
    RendezvousResult,
    use_libuv,
)
from finetune.runtime.ports import LOOPBACK, HeldPort, hold_port
from finetune.runtime.timeouts import call_with_timeout

FIRST = LaunchNode(
    nodes=2,
    rank=0,
    address="127.0.0.1",
    ports=(),
    processes=2,
    digest="ours",
    command="finetune.sft",
    timeout_seconds=20,
    launch_id="launch",
    attempt=1,
)


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(rendezvous_module, "CONNECT_SECONDS", 2.5)
    monkeypatch.setattr(rendezvous_module, "POLL_SECONDS", 0.05)


@contextmanager
def held_ports(count: int) -> Iterator[list[HeldPort]]:
    held = [hold_port(None, address=LOOPBACK) for _ in range(count)]
    try:
        yield held
    finally:
        for port in held:
            port.close()


def first(port: HeldPort, **changes: Any) -> LaunchNode:
    # The store takes the descriptor and closes it in the end, as it does in the agent's own
    # process.
    return replace(FIRST, ports=(port.number,), listener=os.dup(port.listener.fileno()), **changes)


def second(*ports: HeldPort, **changes: Any) -> LaunchNode:
    numbers = tuple(port.number for port in ports)
    return replace(FIRST, rank=1, ports=numbers, launch_id="", attempt=0, **changes)


def join(*nodes: LaunchNode) -> list[tuple[Rendezvous, RendezvousResult | RendezvousError]]:
    """All at the same time."""
    found: dict[int, tuple[Rendezvous, RendezvousResult | RendezvousError]] = {}

    def run(number: int, node: LaunchNode) -> None:
        rendezvous = Rendezvous(node)
        try:
            found[number] = (rendezvous, rendezvous.join())
        except RendezvousError as error:
            found[number] = (rendezvous, error)

    threads = [threading.Thread(target=run, args=item) for item in enumerate(nodes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[number] for number in range(len(nodes))]


def test_the_second_node_passes_over_what_is_not_ours():
    """A silent program, one that talks something else, a store without a word of ours, another
    launch's store.
    """
    with held_ports(5) as (silent, web, store, other, ours):

        def talk() -> None:
            connection, _ = web.listener.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        for _ in range(2):  # the look whether somebody listens, and the store's
            threading.Thread(target=talk, daemon=True).start()
        foreign = dist.TCPStore(
            "127.0.0.1", store.number, is_master=True, wait_for_workers=False,
            master_listen_fd=os.dup(store.listener.fileno()),
        )  # fmt: skip
        another = Rendezvous(first(other, digest="another"))
        another._open()
        (_, one), (rendezvous, two) = join(first(ours), second(silent, web, store, other, ours))
        assert isinstance(one, RendezvousResult) and isinstance(two, RendezvousResult)
        assert (one.port, two.port) == (ours.number, ours.number)
        assert (one.first_rank, two.first_rank, one.world_size, two.world_size) == (0, 2, 4, 4)
        assert two.attempt == 1 and two.hosts == (socket.gethostname(),) * 2
        assert rendezvous._seen[other.number] == "finetune.sft (2 nodes)"
        assert rendezvous._seen[silent.number] == rendezvous._seen[web.number] == "something else"
        del foreign


def test_nodes_with_different_numbers_of_processes():
    with held_ports(1) as (port,):
        (_, one), (_, two) = join(first(port, processes=3), second(port, processes=1))
        assert (one.first_rank, two.first_rank, two.world_size) == (0, 3, 4)


def test_an_attempt_that_is_about_to_end_is_not_joined_again_but_a_new_launch_is():
    with held_ports(1) as (port,):
        old = Rendezvous(first(port))
        old._open()
        was_in_it = Rendezvous(replace(second(port), launch_id="launch", attempt=1))
        assert not was_in_it._is_ours(port.number)
        assert Rendezvous(replace(second(port), launch_id="before", attempt=1))._is_ours(
            port.number
        )
        assert Rendezvous(second(port))._is_ours(port.number)
        del old


def test_missing_nodes_are_named_on_every_node_that_is_there():
    with held_ports(1) as (port,):
        nodes = [replace(node, nodes=4, timeout_seconds=2) for node in (first(port), second(port))]
        errors = [error for _, error in join(*nodes)]
        assert [(error.kind, error.facts) for error in errors] == [
            ("nodes_missing", {"nodes": [2, 3], "refused": []}),
            ("nodes_missing", {"nodes": [2, 3]}),
        ]


def test_without_node_0_it_is_said_what_answered():
    with held_ports(2) as (silent, free):
        free.close()
        ((_, error),) = join(replace(second(silent, free), timeout_seconds=1))
        assert (error.kind, error.facts) == (
            "nothing_found",
            {"seen": {str(silent.number): "something else"}},
        )


def test_two_machines_with_one_rank():
    with held_ports(1) as (port,):
        node_0 = Rendezvous(first(port))
        node_0._open()
        claimed = Claim(host="elsewhere", processes=2, pid=1, nonce="n")
        node_0._write("node/1", claimed)
        ((_, error),) = join(second(port))
        assert error.kind == "same_rank"
        assert error.facts == {"rank": 1, "hosts": ["elsewhere", socket.gethostname()]}
        # the same machine: started again by hand
        here = claimed.model_copy(update={"host": socket.gethostname()})
        node_0._write("node/1", here)
        node_0._claim()
        node_0._give_out()
        ((_, agreed),) = join(second(port))
        assert isinstance(agreed, RendezvousResult)


# ---------------------------------------------------------------- strangers

SECRET = "correct horse battery"
FORGED = json.dumps(
    {
        "record": Claim(host="stranger", processes=1, pid=1, nonce="n").model_dump_json(),
        "mac": "0" * 64,
    }
)


def put(port: HeldPort, key: str, value: str) -> None:
    """What anybody can do who reaches the port."""
    dist.TCPStore(LOOPBACK, port.number, is_master=False).set(PREFIX + key, value)


@pytest.mark.parametrize(
    "forged", [FORGED, "no record", "[]", json.dumps({"record": "{}", "mac": ""})]
)
def test_a_claim_that_is_not_signed_does_not_take_a_nodes_place(forged: str):
    with held_ports(1) as (port,):
        node_0 = Rendezvous(first(port, secret=SECRET))
        node_0._open()
        put(port, "node/1", forged)
        put(
            port,
            "ranks",
            json.dumps({"record": '{"first": [0, 1, 2], "hosts": [], "nonces": []}', "mac": ""}),
        )
        node_0._claim()
        assert node_0._claims().keys() == {0} and node_0._refused == {1}
        put(port, "node/1", forged)  # again, before the node that it stands for has come
        threading.Thread(target=node_0._give_out).start()
        ((_, agreed),) = join(second(port, secret=SECRET))
        assert isinstance(agreed, RendezvousResult) and agreed.hosts == (socket.gethostname(),) * 2


def test_a_stranger_alone_is_refused_in_words():
    with held_ports(1) as (port,):
        node_0 = Rendezvous(first(port, secret=SECRET, timeout_seconds=0))
        node_0._open()
        put(port, "node/1", FORGED)
        node_0._claim()
        with pytest.raises(RendezvousError) as error:
            node_0._give_out()
        assert error.value.facts == {"nodes": [1], "refused": [1]}


@pytest.mark.parametrize("secrets", [(SECRET, SECRET + "!"), (SECRET, ""), ("", SECRET)])
def test_nodes_that_do_not_share_a_secret_do_not_meet(secrets: tuple[str, str]):
    with held_ports(1) as (port,):
        node_0 = Rendezvous(first(port, secret=secrets[0]))
        node_0._open()
        ((_, error),) = join(second(port, secret=secrets[1]))
        assert (error.kind, error.facts) == (
            "other_secret",
            {"port": port.number, "host": socket.gethostname()},
        )


def test_an_answer_of_an_earlier_launch_is_not_one():
    """A stranger gives out again what node 0 signed before: the claim that it answers had another
    nonce.
    """
    claim = Claim(host="here", processes=2, pid=1, nonce="new")
    ranks = Ranks(first=[0, 2, 4], hosts=["here", "here"], nonces=["a", "new"])
    assert ranks.answers(claim, 1, 2)
    assert not ranks.answers(claim.model_copy(update={"nonce": "old"}), 1, 2)
    assert not ranks.answers(claim, 1, 3)
    assert not ranks.model_copy(update={"first": [0, 4, 2]}).answers(claim, 1, 2)
    assert not ranks.model_copy(update={"first": [0, 2, 5]}).answers(claim, 1, 2), (
        "it has two processes"
    )


@pytest.mark.parametrize(
    ("key", "launch", "secret"),
    [("node/2", "a/1", SECRET), ("node/1", "a/2", SECRET), ("node/1", "a/1", "another")],
)
def test_a_signature_is_for_its_place(key: str, launch: str, secret: str):
    sealed = seal(Decision(restart=True), key="node/1", launch="a/1", secret=SECRET).encode()
    assert unseal(sealed, Decision, key="node/1", launch="a/1", secret=SECRET).restart
    with pytest.raises(NotSigned):
        unseal(sealed, Decision, key=key, launch=launch, secret=secret)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Ended, '{"exit_code": "1", "rank": 0}'),
        (Ended, '{"exit_code": 100000, "rank": 0}'),
        (Claim, '{"host": "\\u001b[2J", "processes": 1, "pid": 1, "nonce": "n"}'),
        (Claim, '{"host": "h", "processes": 1000000000, "pid": 1, "nonce": "n"}'),
        (Claim, '{"host": "h", "processes": 1, "pid": 1, "nonce": "n", "more": 1}'),
        (Ranks, '{"first": [], "hosts": [], "nonces": []}'),
        (Decision, "[" * 100_000),
        (Decision, '"' + "x" * (2 << 20) + '"'),
    ],
)
def test_records_of_another_form_are_none(kind: type[Record], text: str):
    for raw in (json.dumps({"record": text, "mac": ""}), text):
        with pytest.raises(ValueError):
            unseal(raw.encode(), kind, key="k", launch="", secret="")


def test_nodes_know_of_one_another_and_of_a_lost_heartbeat():
    with held_ports(1) as (port,):
        heartbeats = [Heartbeat(*joined) for joined in join(first(port), second(port))]
        heartbeats[0].publish("ended", {"exit_code": 4, "rank": 0})
        heartbeats[1].publish("decision", {"restart": True})
        run_helpers.wait_for(lambda: heartbeats[1].ended and heartbeats[0].decisions)
        assert heartbeats[1].ended == {0: {"exit_code": 4, "rank": 0}}
        assert heartbeats[0].decisions == {1: {"restart": True}}
        assert (
            heartbeats[0].lost(-1, known=()).keys() == {1}
            and heartbeats[0].lost(10, known=()) == {}
        )
        assert heartbeats[0].lost(-1, known={1: {}}) == {}


def test_what_is_said_late_does_not_reach_the_next_attempt():
    with held_ports(1) as (port,):
        following = Rendezvous(first(port, attempt=2))
        following._open()
        late = RendezvousResult(port.number, "launch", 1, 2, 4, ("here", "here"))
        heartbeat = Heartbeat(Rendezvous(second(port)), late)
        heartbeat.publish("ended", {"exit_code": 1, "rank": 2})
        heartbeat.thread.join(20)
        assert not heartbeat.thread.is_alive()
        assert not following.store.check([f"{PREFIX}ended/1"])


def test_a_call_that_never_returns_is_given_up():
    never = threading.Event()
    with pytest.raises(TimeoutError, match="within 0 s"):
        call_with_timeout(never.wait, 0.1)
    with pytest.raises(ZeroDivisionError):
        call_with_timeout(lambda: 1 / 0, 5)
    assert call_with_timeout(lambda: 3, 5) == 3
    never.set()


def test_libuv_is_switched_off_only_where_torch_lacks_it(monkeypatch):
    monkeypatch.delenv("USE_LIBUV", raising=False)
    assert use_libuv() and "USE_LIBUV" not in os.environ

    def without(*arguments: Any, use_libuv: bool, **options: Any) -> None:
        raise RuntimeError("use_libuv was requested but PyTorch was built without libuv support")

    monkeypatch.setattr(dist, "TCPStore", without)
    assert not use_libuv() and os.environ["USE_LIBUV"] == "0"
    monkeypatch.setenv("USE_LIBUV", "1")
    assert use_libuv(), "the user's own stays"
