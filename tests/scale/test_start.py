"""The start of up to 128 nodes and 1,024 ranks, counted in simulated time: who is asked what, and
who is named when.
"""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT

from finetune.errors import FinetuneError
from finetune.runtime.collectives import broadcast_plain, largest_of_all, name_ranks
from finetune.runtime.ports import LOOPBACK, hold_port

sys.path.append(str(ROOT / "exhaustive" / "scale"))
import start_cases as start
from gloo_store import CountingStore, gloo_traffic, real_groups


def test_a_node_that_comes_costs_node_0_some_requests():
    for nodes in (16, 128):
        made = start.come(nodes)
        assert made.results == dict.fromkeys(range(nodes))
        assert made.server.requests.total() <= 14 * nodes + 30, made.server.requests
        assert made.seconds < 3.0


def test_nodes_that_wait_for_a_late_one_ask_each_second_and_it_is_named():
    nodes, late = 32, 300.0
    made = start.come(nodes, after={5: late, 30: late})
    assert made.results == dict.fromkeys(range(nodes))
    # beside that: each minute who is missing, key by key
    assert made.server.requests.total() <= nodes * (14 + late + nodes * late / 60)
    assert [message for _, message in made.late] == ["still waiting for 2 of 32 nodes: 5, 30"] * 4
    assert made.late[0][0] < 70 and made.seconds < 7.0


def test_ten_dead_nodes_are_named_on_all_others_when_the_time_is_over():
    dead = [3, 17, *range(40, 48)]
    made = start.come(64, absent=dead, timeout=120.0)
    assert made.results.keys() == set(range(64)) - set(dead)
    for error in made.results.values():
        assert "node(s) 3, 17, 40-47 of 64 did not come within 120.0 s" in str(error)
    assert made.seconds < 120.0 + 2

    made = start.come(32, absent=[0], timeout=120.0)  # without node 0 the others knock seldom
    assert len(made.results) == 31
    for error in made.results.values():
        assert "no launch of this run answered at node-0000 port 29500" in str(error)
    assert made.server.requests["connect"] <= 31 * (120 + 5)


# ---------------------------------------------------------------- ranks


def test_ranks_that_agree_send_a_few_messages_of_64_bytes():
    for ranks in (128, 1024):
        made, rounds = start.agree(ranks, start.check({})), (ranks - 1).bit_length()
        assert set(made.answers.values()) == {None} and len(made.answers) == ranks
        assert made.messages[1] <= rounds + 1 and made.bytes[1] <= 64 * made.messages[1]
        assert made.seconds < 2 * rounds * 60e-6 + 1e-3
    made = start.agree(128, lambda control, rank: control.token())  # a broadcast
    assert len(set(made.answers.values())) == 1 and made.messages[1] <= 2 * 7


def test_any_is_any_for_every_number_of_ranks():
    for ranks in (2, 3, 8, 13):
        for set_on in (*range(ranks), None):
            asked = lambda control, rank, set_on=set_on: control.any(rank == set_on)  # noqa: E731
            made = start.agree(ranks, asked)
            assert set(made.answers.values()) == {set_on is not None} and len(made.answers) == ranks


@pytest.mark.parametrize(
    ("differing", "named"),
    [
        ({77: "b"}, "data is a on 127 ranks, b on rank 77"),
        ({0: "b", 3: "b"}, "data is a on 126 ranks, b on ranks 0, 3"),
        (
            {rank: "c" if rank == 90 else "b" for rank in (*range(8, 16), 77, 90)},
            "data is a on 118 ranks, b on ranks 8-15, 77, c on rank 90",
        ),
    ],
)
def test_ranks_that_differ_are_told_apart_by_majority_and_all_named(
    differing: dict[int, str], named: str
):
    facts = {rank: {"data": differing.get(rank, "a")} for rank in range(128)}
    made = start.agree(128, start.check(facts))
    (said,) = {str(error).splitlines()[0] for error in made.answers.values()}
    assert len(made.answers) == 128 and f"ranks do not have the same run: {named}" in said


def test_every_fact_that_differs_is_named():
    made = start.agree(2, start.check({1: {"fact 0": "x", "fact 3": "y"}}))
    error = made.answers[0]
    assert isinstance(error, FinetuneError)
    assert f"fact 0 is {start.FACTS['fact 0']} on rank 0, x on rank 1; fact 3 is" in str(error)


def test_late_ranks_are_waited_for_and_dead_ones_end_it_at_the_timeout():
    asked = lambda control, rank: control.any(rank == 9)  # noqa: E731
    made = start.agree(64, asked, after={9: 600.0, 10: 500.0})
    assert set(made.answers.values()) == {True} and made.seconds < 0.01
    made = start.agree(64, lambda control, rank: control.any(False), absent=(9, 40), timeout=60)
    assert len(made.answers) == 62 and made.seconds <= 2 * 60 + 1
    assert all("Timed out" in str(answer) for answer in made.answers.values())


# ---------------------------------------------------------------- real groups, sockets and limits


def test_gloo_connects_on_demand_and_asks_the_store_less():
    every, lazy = gloo_traffic(12, lazy=False), gloo_traffic(12, lazy=True)
    assert (every.connections, lazy.connections) == (12 * 11 / 2, 11)
    assert (every.requests, lazy.requests) == (3 * 12**2 + 12, 7 * 12 - 6)
    assert lazy.bytes < every.bytes / 4


def test_real_groups_find_the_largest_and_give_out_rank_0s_value():
    for ranks in (2, 5):
        with real_groups(ranks, CountingStore(), lazy=True) as everywhere:
            largest = everywhere(lambda rank: largest_of_all([rank, -rank, 2**62]))
            assert largest == [[ranks - 1, 0, 2**62]] * ranks
            given = everywhere(lambda rank: broadcast_plain({"mine": [rank, None]}))
            assert given == [{"mine": [0, None]}] * ranks


def test_hundreds_of_nodes_may_knock_before_node_0_listens():
    limit = int(Path("/proc/sys/net/core/somaxconn").read_text())
    held, callers = hold_port(None, address=LOOPBACK), []
    try:
        for _ in range(min(300, limit)):
            callers.append(socket.create_connection((LOOPBACK, held.number), timeout=5))
    finally:
        for caller in callers:
            caller.close()
        held.close()


def test_a_process_may_ask_for_more_open_files():
    code = (
        "import resource; from finetune.runtime.host import allow_open_files, MAX_OPEN_FILES as"
        " most\nlimit = resource.RLIMIT_NOFILE; resource.setrlimit(limit, (256,"
        " resource.getrlimit(limit)[1]))\nallow_open_files();"
        " print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], most)"
    )
    soft, most = map(int, subprocess.check_output([sys.executable, "-c", code]).split())
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert soft == (most if hard == resource.RLIM_INFINITY else min(hard, most)) > 256


def test_names_of_ranks():
    names = {"": [], "3": [3], "0-2": [0, 1, 2], "8-15, 77, 900": [*range(8, 16), 77, 900]}
    for name, ranks in names.items():
        assert name_ranks(ranks) == name
