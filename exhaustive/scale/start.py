"""The start of 128 and 1,024 ranks: what node 0's store is asked, what ranks tell each other, who
is named when.

    python exhaustive/scale/start.py            # writes the section "Start" of docs/evidence/scale.md

The code of the launch and of the agreement runs as it is, on a clock of its own (virtual_time.py,
virtual_group.py); the connections of gloo are counted of real groups (gloo_store.py).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from document import write_section
from gloo_store import GlooTraffic, gloo_traffic
from start_cases import WIRE, agree, check, come

from finetune.runtime.collectives import name_ranks
from finetune.training.control import Control


def measured_request(requests: int = 4_000) -> float:
    """Seconds that a request of torch's own store takes here, there and back, where nothing
    disturbs it.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("key", "x" * 100)
    rounds = []
    for _ in range(10):
        begin = time.perf_counter()
        for _ in range(requests):
            store.check(["key"])
        rounds.append((time.perf_counter() - begin) / requests)
    return min(rounds)


def measure() -> dict[str, dict[str, list[float]]]:
    """Every figure, by number of nodes or ranks."""
    found: dict[str, dict[str, list[float]]] = {
        name: {} for name in ("join", "late", "check", "any", "token")
    }
    for nodes in (16, 128):
        made = come(nodes)
        found["join"][str(nodes)] = [
            made.server.requests.total(),
            made.server.bytes.total(),
            made.seconds,
        ]
        # Node 1 is ten minutes late: what the others ask meanwhile, a second.
        waited = come(nodes, after={1: 600.0})
        rest = waited.server.requests.total() - made.server.requests.total()
        found["late"][str(nodes)] = [
            rest / 600,
            (waited.server.bytes.total() - made.server.bytes.total()) / 600,
        ]
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
    """What is reported, and when, of 1, 2 and 10 of 128 nodes or 1,024 ranks."""
    lines = []
    for dead in ((5,), (5, 77), tuple(range(40, 50))):
        who = f"{len(dead)} of 128"
        late = come(128, after=dict.fromkeys(dead, 600.0))
        missing = come(128, absent=dead, timeout=300.0)
        named = f"node(s) {name_ranks(dead)} of 128 did not come"
        assert all(named in str(error) for error in missing.results.values())
        cells = [
            who,
            f"first named after {late.late[0][0]:.0f} s; all joined {late.seconds:.1f} s after the last arrived",
            f"named on all others after {missing.seconds:,.0f} s",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def gloo_lines() -> tuple[list[str], dict[bool, Callable[[int], tuple[float, float, float]]]]:
    """Groups that were made, and what their figures are for any number of ranks."""
    counted = {
        lazy: [gloo_traffic(ranks, lazy=lazy) for ranks in (2, 4, 8, 16, 32, 64)]
        for lazy in (False, True)
    }
    formulas = {lazy: fitted(counted[lazy], lazy) for lazy in counted}
    lines = []
    for at, every in enumerate(counted[False]):
        lazy = counted[True][at]
        cells = [f"{every.ranks}", "run"]
        cells += [
            f"{made.requests:,} | {made.bytes / 1e6:,.3f} | {made.connections:,}"
            for made in (every, lazy)
        ]
        lines.append("| " + " | ".join(cells) + " |")
    for ranks in (128, 1024):
        cells = [f"{ranks:,}", "computed"]
        for lazy in (False, True):
            requests, size, connections = formulas[lazy](ranks)
            cells.append(f"{requests:,.0f} | {size / 1e6:,.1f} | {connections:,.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return lines, formulas


def fitted(
    counted: Sequence[GlooTraffic], lazy: bool
) -> Callable[[int], tuple[float, float, float]]:
    """Requests, bytes and connections for any number of ranks: polynomials through what was
    counted.

    Where all connect to all, requests and connections are quadratic and bytes cubic: each of N
    ranks reads N records of 8 N bytes. On demand everything is linear: a tree has N - 1
    connections, and each end of one looks up the other.
    """
    ranks = np.array([made.ranks for made in counted], dtype=float)
    degrees = (
        {"requests": 1, "bytes": 1, "connections": 1}
        if lazy
        else {"requests": 2, "bytes": 3, "connections": 2}
    )
    fits = {}
    for name, degree in degrees.items():
        values = np.array([getattr(made, name) for made in counted], dtype=float)
        terms = np.vander(ranks, degree + 1)
        fits[name] = np.linalg.lstsq(terms / values[:, None], np.ones(len(values)), rcond=None)[0]
        error = np.abs(terms @ fits[name] / values - 1).max()
        assert error < 0.05, f"{name} does not follow the formula: {error:.1%}"

    def compute(count: int) -> tuple[float, float, float]:
        found = [float(np.polyval(fits[name], count)) for name in degrees]
        return found[0], found[1], found[2]

    return compute


# By the version that polled, at commit 6f38681: the same script with --figures.
BEFORE: dict[str, dict[str, list[float]]] = json.loads("""
    {"join": {"16": [340, 36569, 0.604], "128": [2804, 1086145, 0.632]},
     "late": {"16": [291.82, 16201], "128": [2454.4, 135022]},
     "check": {"128": [508, 160274, 0.01283], "1024": [4092, 1291026, 0.10333]},
     "any": {"128": [2, 16, 0.0127], "1024": [2, 16, 0.1023]},
     "token": {"128": [508, 2794, 0.0127], "1024": [4092, 22506, 0.10232]}}
    """)
TEXT = """\
This section counts what happens from the launch to the first step on 16 nodes (128 ranks) and on 128 nodes (1,024
ranks). The launch's rendezvous and the ranks' agreement run unchanged, in simulated time (exhaustive/scale/virtual_time.py)
and against a store that counts requests. gloo's connections are counted in real groups. `make scale PART=start` writes
this section.

**The store on node 0**: requests (what TCPStore sends for a call; a `get` is two) and bytes. *Late*: node 1 arrives ten
minutes after the others, which wait. *Before*: the first version of the launch, which had its own rendezvous.

| nodes | until all have joined, before | now | late: per second, before | now |
|--:|--:|--:|--:|--:|
{store}

- A waiting node checks once a second whether all nodes have arrived. At 128 nodes this keeps the store busy for
  {busy:.1%} of its time. While the workers run, each node checks once a second whether another node's workers failed:
  one request.
- If node 0 itself is late, the others try its port once a second. Its socket holds 4,096 of these connections while it
  loads torch.
- `launch` and the workers raise their limit to 65,536 open files if the system allows it. At 1,024 ranks the store
  alone has 1,280 connections, and the default limit on many systems is 1,024.

**Agreement of ranks** (`training/control.py`): messages and bytes that the busiest rank sends, and time until all are
done.

| call | ranks | messages, before | now | bytes, before | now | ms, before | now |
|---|--:|--:|--:|--:|--:|--:|--:|
{calls}

- gloo's all-reduce and all-gather are rings: N - 1 messages one after another, twice for an all-reduce. The ranks'
  check in every step (`any`) and at the start (`check_equal`) uses a binomial tree instead. `check_equal` compares
  digests and exchanges the full values only if they differ.

**The gloo group in addition to the device's group**: store requests, bytes and connections until its first agreement.
`TORCH_GLOO_LAZY_INIT` (torch 2.8 or later) connects ranks on demand. It is set unless the environment sets another
value. Without it every rank connects to every other (gloo's transport/tcp/context.cc).

| ranks | | all to all: requests | MB | connections | on demand: requests | MB | connections |
|--:|---|--:|--:|--:|--:|--:|--:|
{gloo}

- When all connect to all, a rank has 1,023 connections at 1,024 ranks, and node 0 sends {gigabytes:.1f} GB. That takes
  {group_before:.0f} s of the store's time; on demand it takes {group_now:.2f} s. On a CPU the default group also uses
  gloo and still connects all to all.

**Late, dead and different nodes**: 128 nodes, `--timeout-seconds` 300 (late: 1800).

| nodes | late by 600 s | missing |
|---|---|---|
{losses}

- The other nodes wait for a late node and name it each minute. A node that stops responding during a run is noticed
  when the workers of the other nodes time out in a collective (`--timeout-seconds`).
- Ranks that differ are identified by majority, and all are named: `data is X on 1,014 ranks, Y on ranks 8-15, 77,
  900`.

At 1,024 ranks, rendezvous, groups and agreement took {first_before:.1f} s before and take {first_now:.2f} s now. This
is the time to the first step without Python, torch, the model and the data. The assumptions: {between:.0f} us each way between
machines, 10 Gbit/s, and {service:.0f} us of the store's time per request (torch's own store takes {request:.0f} us
here, round trip). All nodes start at the same time.

Largest case actually run: the launch code for 128 nodes and the agreement between 1,024 ranks, in one process in
simulated time. The gloo groups had 64 ranks, as threads of one process, over real sockets.
"""


def write_document(found: dict[str, dict[str, list[float]]]) -> None:
    store, calls = [], []
    for nodes in ("16", "128"):
        cells = [nodes]
        for name in ("join", "late"):
            cells += [
                f"{figures[name][nodes][0]:,.0f}, {_size(figures[name][nodes][1])}"
                for figures in (BEFORE, found)
            ]
        store.append("| " + " | ".join(cells) + " |")
    for name, called in (("check", "check_equal"), ("any", "any"), ("token", "token")):
        for ranks in ("128", "1024"):
            pairs = [(BEFORE[name][ranks][place], found[name][ranks][place]) for place in range(3)]
            shown = [f"{a:,} | {b:,}" for a, b in pairs[:2]] + [
                f"{1000 * pairs[2][0]:.1f} | {1000 * pairs[2][1]:.1f}"
            ]
            calls.append("| " + " | ".join([called, f"{int(ranks):,}", *shown]) + " |")
    gloo, formulas = gloo_lines()
    spent = {lazy: _store_seconds(*formulas[lazy](1024)[:2]) for lazy in (False, True)}
    agreed = {
        name: sum(figures[name]["1024"][2] for name in ("check", "token"))
        for name, figures in (("before", BEFORE), ("now", found))
    }
    write_section(
        "Start",
        TEXT.format(
            store="\n".join(store),
            calls="\n".join(calls),
            gloo="\n".join(gloo),
            losses="\n".join(losses()),
            busy=_store_seconds(*found["late"]["128"]),
            gigabytes=formulas[False](1024)[1] / 1e9,
            group_before=spent[False],
            group_now=spent[True],
            first_before=BEFORE["join"]["128"][2] + spent[False] + agreed["before"],
            first_now=found["join"]["128"][2] + spent[True] + agreed["now"],
            between=1e6 * WIRE.between,
            service=1e6 * WIRE.service,
            request=1e6 * measured_request(),
        ),
    )


def _store_seconds(requests: float, size: float) -> float:
    """Of the store's one thread."""
    return requests * WIRE.service + size / WIRE.rate


def _size(count: float) -> str:
    return f"{count / 1e6:,.2f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--figures", action="store_true", help="print the figures as JSON, and write nothing"
    )
    options = parser.parse_args()
    found = measure()
    if options.figures:
        print(json.dumps(found))
    else:
        write_document(found)


if __name__ == "__main__":
    main()
