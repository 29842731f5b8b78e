"""The start of up to 128 nodes and 1,024 ranks, counted in simulated time: who is asked what, and
who is named when.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import sys
from pathlib import Path

from launching import ROOT

from finetune.runtime import host
from finetune.runtime.collectives import broadcast_plain, largest_of_all
from finetune.runtime.ports import LOOPBACK, hold_port

sys.path.append(str(ROOT / "exhaustive" / "scale"))
import start_cases as start
from gloo_store import CountingStore, real_groups


def test_nodes_that_wait_for_a_late_one_ask_each_second_and_it_is_named():
    nodes, late = 32, 300.0
    made = start.come(nodes, after={5: late, 30: late})
    assert made.results == dict.fromkeys(range(nodes))
    # beside that: each minute who is missing, key by key
    assert made.server.requests.total() <= nodes * (14 + late + nodes * late / 60)
    assert [message for _, message in made.late] == ["still waiting for 2 of 32 nodes: 5, 30"] * 4
    assert made.late[0][0] < 70 and made.seconds < 7.0


# ---------------------------------------------------------------- ranks


def test_ranks_that_agree_send_a_few_messages_of_64_bytes():
    made, rounds = start.agree(256, start.check({})), 8
    assert set(made.answers.values()) == {None} and len(made.answers) == 256
    assert made.messages[1] <= rounds + 1 and made.bytes[1] <= 64 * made.messages[1]
    assert made.seconds < 2 * rounds * 60e-6 + 1e-3
    made = start.agree(128, lambda control, rank: control.token())  # a broadcast
    assert len(set(made.answers.values())) == 1 and made.messages[1] <= 2 * 7


def test_ranks_that_differ_are_told_apart_by_majority_and_all_named():
    differing = {rank: "c" if rank == 90 else "b" for rank in (0, *range(8, 16), 77, 90)}
    facts = {rank: {"data": differing.get(rank, "a")} for rank in range(128)}
    made = start.agree(128, start.check(facts))
    (said,) = {str(error).splitlines()[0] for error in made.answers.values()}
    named = "data is a on 117 ranks, b on ranks 0, 8-15, 77, c on rank 90"
    assert len(made.answers) == 128 and f"ranks do not have the same run: {named}" in said
    made = start.agree(2, start.check({1: {"fact 0": "x", "fact 3": "y"}}))
    fact = start.FACTS["fact 0"]
    assert f"fact 0 is {fact} on rank 0, x on rank 1; fact 3 is" in str(made.answers[0])


def test_late_ranks_are_waited_for_and_dead_ones_end_it_at_the_timeout():
    after = {9: 600.0, 10: 500.0}
    made = start.agree(64, lambda control, rank: control.any(rank == 9), after=after)
    assert set(made.answers.values()) == {True} and made.seconds < 0.01
    made = start.agree(64, lambda control, rank: control.any(False), absent=(9, 40), timeout=60)
    assert len(made.answers) == 62 and made.seconds <= 2 * 60 + 1
    assert all("Timed out" in str(answer) for answer in made.answers.values())


# ---------------------------------------------------------------- real groups, sockets and limits


def test_real_groups_find_the_largest_and_give_out_rank_0s_value():
    with real_groups(3, CountingStore(), lazy=True) as everywhere:
        assert everywhere(lambda rank: largest_of_all([rank, -rank, 2**62])) == [[2, 0, 2**62]] * 3
        given = everywhere(lambda rank: broadcast_plain({"mine": [rank, None]}))
        assert given == [{"mine": [0, None]}] * 3


def test_hundreds_of_nodes_may_knock_before_node_0_listens():
    limit = int(Path("/proc/sys/net/core/somaxconn").read_text())
    held = hold_port(None, address=LOOPBACK)
    with contextlib.ExitStack() as callers:
        callers.callback(held.close)
        for _ in range(min(300, limit)):
            address = (LOOPBACK, held.number)
            callers.enter_context(socket.create_connection(address, timeout=5))


def test_a_process_may_ask_for_more_open_files():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        host.allow_open_files()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    most = host.MAX_OPEN_FILES
    assert soft == (most if hard == resource.RLIM_INFINITY else min(hard, most)) > 256
