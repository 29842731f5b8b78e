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

from finetune.commands.launch.attempt_result import AttemptResult
from finetune.commands.launch.rendezvous import RendezvousError, RendezvousResult
from finetune.errors import FinetuneError
from finetune.runtime.collectives import broadcast_plain, largest_of_all, name_ranks
from finetune.runtime.nodes import Nodes
from finetune.runtime.ports import LOOPBACK, hold_port

sys.path.append(str(Path(__file__).parent))
import start_cases as start
from gloo_store import CountingStore, gloo_traffic, real_groups


def test_a_node_that_comes_costs_node_0_some_requests():
    for nodes in (16, 128):
        made = start.come(nodes)
        assert [made.results[rank].first_rank for rank in range(nodes)] == [
            8 * rank for rank in range(nodes)
        ]
        assert made.server.requests.total() <= 14 * nodes + 30, made.server.requests
        assert made.seconds < 1.0


def test_nodes_that_wait_for_a_late_one_ask_every_few_seconds_and_it_is_named():
    nodes, late = 32, 300.0
    made = start.come(nodes, after={5: late, 30: late})
    assert all(isinstance(result, RendezvousResult) for result in made.results.values())
    assert made.server.requests.total() <= nodes * (14 + 0.8 * late), made.server.requests
    assert [missing for _, missing in made.late] == [[5, 30]] * 4
    assert made.late[0][0] < 70 and made.seconds < 7.0


def test_ten_dead_nodes_are_named_on_all_others_when_the_time_is_over():
    dead = [3, 17, *range(40, 48)]
    made = start.come(64, absent=dead, timeout=120.0)
    assert made.results.keys() == set(range(64)) - set(dead)
    told = {(result.kind, tuple(result.facts["nodes"])) for result in made.results.values()}
    assert told == {("nodes_missing", tuple(dead))}
    assert made.seconds < 120.0 + 2
    (line,) = AttemptResult(problem="nodes_missing", facts={"nodes": dead, "refused": []}).lines(
        Nodes(64, 0, "node-0", 29500), (29500, 29501), 120
    )
    assert "node(s) 3, 17, 40-47 of 64 did not come within 120 s" in line


def test_without_node_0_the_others_knock_seldom():
    made = start.come(32, absent=[0], timeout=120.0)
    assert {
        result.kind for result in made.results.values() if isinstance(result, RendezvousError)
    } == {"nothing_found"}
    assert made.server.requests["connect"] <= 31 * 10 * (120 / 3 + 5)


def test_a_heartbeat_is_one_record_and_one_look_at_all_others():
    requests, sent = start.heartbeat_load(32)
    assert requests <= 32 * 3.3
    assert sent <= 32 * 32 * 250


@pytest.mark.parametrize("silent", [(5,), (5, 6), tuple(range(3, 13))])
def test_nodes_that_fall_silent_are_named_by_all_others_within_the_time_promised(
    silent: tuple[int, ...],
):
    told = start.after_loss(16, silent=silent, timeout=20.0)
    others = set(range(16)) - set(silent)
    assert others <= told.keys()
    for rank in others:
        assert told[rank].lost == list(silent)
        # the workers' own timeout, the grace, and a look at the others
        assert told[rank].seconds <= 20.0 + 15.0 + 16.0
    lines = AttemptResult({0: 1}, lost_nodes=dict.fromkeys(silent, 75)).lines(
        Nodes(16, 0, "a", 29500), (29500,), 60
    )
    assert len(lines) == 2 and f"node {name_ranks(silent)}: no heartbeat for 75 s" in lines[1]


def test_nodes_whose_workers_fail_are_known_to_all_others():
    told = start.after_loss(16, failing=(2, 9))
    assert all({2, 9} - {rank} <= set(named.ended) for rank, named in told.items())
    assert max(named.seconds for named in told.values()) < 40.0


# ---------------------------------------------------------------- ranks


def test_ranks_that_agree_send_a_few_messages_of_64_bytes():
    for ranks in (128, 1024):
        made = start.agree(ranks, start.check({}))
        assert set(made.answers.values()) == {None} and len(made.answers) == ranks
        assert (
            made.messages[1] <= (ranks - 1).bit_length() + 1
            and made.bytes[1] <= 64 * made.messages[1]
        )
        assert made.seconds < 2 * (ranks - 1).bit_length() * 60e-6 + 1e-3


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 13])
def test_any_is_any_for_every_number_of_ranks(ranks: int):
    for set_on in (*range(ranks), None):
        made = start.agree(ranks, lambda control, rank, set_on=set_on: control.any(rank == set_on))
        assert set(made.answers.values()) == {set_on is not None} and len(made.answers) == ranks


def test_a_token_is_a_broadcast():
    made = start.agree(128, lambda control, rank: control.token())
    assert len(set(made.answers.values())) == 1
    assert made.messages[1] <= 2 * 7


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
    said = {str(error).splitlines()[0] for error in made.answers.values()}
    assert len(made.answers) == 128 and len(said) == 1
    assert f"ranks do not have the same run: {named}" in said.pop()


def test_every_fact_that_differs_is_named():
    made = start.agree(2, start.check({1: {"fact 0": "x", "fact 3": "y"}}))
    error = made.answers[0]
    assert isinstance(error, FinetuneError)
    assert f"fact 0 is {start.FACTS['fact 0']} on rank 0, x on rank 1; fact 3 is" in str(error)


def test_late_ranks_are_waited_for_and_dead_ones_end_it_at_the_timeout():
    made = start.agree(
        64, lambda control, rank: control.any(rank == 9), after={9: 600.0, 10: 500.0}
    )
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
    for ranks in (2, 3, 7):
        with real_groups(ranks, CountingStore(), lazy=True) as everywhere:
            assert (
                everywhere(lambda rank: largest_of_all([rank, -rank, 2**62]))
                == [[ranks - 1, 0, 2**62]] * ranks
            )
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
        "import resource; from finetune.runtime.host import allow_open_files, MOST_OPEN_FILES as"
        " most\nlimit = resource.RLIMIT_NOFILE; resource.setrlimit(limit, (256,"
        " resource.getrlimit(limit)[1]))\nallow_open_files();"
        " print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], most)"
    )
    soft, most = map(
        int,
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, check=True
        ).stdout.split(),
    )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert soft == (most if hard == resource.RLIM_INFINITY else min(hard, most)) > 256


@pytest.mark.parametrize(
    ("ranks", "name"),
    [([], ""), ([3], "3"), ([0, 1, 2], "0-2"), ([*range(8, 16), 77, 900], "8-15, 77, 900")],
)
def test_names_of_ranks(ranks: list[int], name: str):
    assert name_ranks(ranks) == name
