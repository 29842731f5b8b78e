"""A server among clients that misbehave: others, at the load of serve_load.py, lose nothing, and
/health stays quick.

    python benchmarks/serve_misbehaving.py               # the bundled model, 2 CPU workers, 60
    seconds python benchmarks/serve_misbehaving.py --seconds 20 --json

Every client of misbehaving_clients.py is there all the time, one of each, in a process of low
priority: on machines of their own they would not take the server's processors. Exit code 1 if a
well-behaved client lost an answer, another one kept its connection beyond the server's limits, or a
worker was started again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import httpx
import psutil
from misbehaving_clients import CLIENTS, Server, misbehave
from serve_load import QUESTIONS, ask, load_options, start

LIMIT_SECONDS = 3  # for a head, for a body, and for reading
PATIENCE_SECONDS = 20  # keep-alive is 15


def misbehave_aside(
    server: Server, seconds: float, pause_seconds: float
) -> tuple[dict[str, int], dict[str, int]]:
    os.nice(10)
    end = time.monotonic() + seconds
    return asyncio.run(misbehave(server, lambda: time.monotonic() > end, pause_seconds))


async def measure(url: str, server_pid: int, options: argparse.Namespace) -> dict[str, Any]:
    ends: Counter[str] = Counter()
    health: list[float] = []
    limits = httpx.Limits(max_connections=options.clients + 8)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        end = time.monotonic() + options.seconds

        async def keep_asking(who: int) -> None:
            number = who * 10_000
            while time.monotonic() < end:
                ended, _ = await ask(client, model, number, options.tokens)
                ends[ended] += 1
                number += 1

        async def look() -> None:
            async with httpx.AsyncClient(base_url=url, timeout=30) as own:
                while time.monotonic() < end:
                    asked = time.monotonic()
                    assert (await own.get("/health")).status_code == 200
                    health.append(time.monotonic() - asked)
                    await asyncio.sleep(0.05)

        server = Server(int(url.rpartition(":")[2]), model, QUESTIONS[0], PATIENCE_SECONDS)
        with ProcessPoolExecutor(1) as others:
            loop = asyncio.get_running_loop()
            hostile = loop.run_in_executor(
                others, misbehave_aside, server, options.seconds, options.pause
            )
            await asyncio.gather(look(), *map(keep_asking, range(options.clients)))
            rounds, held = await hostile
        state = (await client.get("/health")).json()
    await asyncio.sleep(2)  # the last ones are thrown away for a moment
    connections = psutil.Process(server_pid).net_connections("tcp")
    return {
        "clients": options.clients,
        "seconds": options.seconds,
        "misbehaving_clients": len(CLIENTS),
        "misbehaved_times": sum(rounds.values()),
        "kept_their_connection": dict(held),
        "ends": dict(ends),
        "health_samples": len(health),
        "health_p50_ms": round(1000 * statistics.median(health), 1),
        "health_p99_ms": round(1000 * statistics.quantiles(health, n=100)[98], 1),
        "health_max_ms": round(1000 * max(health), 1),
        "connections_left_open": sum(one.status == "ESTABLISHED" for one in connections),
        "restarts": sum(worker["restarts"] for worker in state["workers"]),
        "status_after": state["status"],
    }


def main() -> int:
    parser = load_options(__doc__)
    parser.add_argument(
        "--pause", type=float, default=1.0, help="seconds before a client misbehaves again"
    )
    options = parser.parse_args()
    limits = [f"--{name}-seconds" for name in ("head", "body", "write")]
    server, url = start(options, *(word for name in limits for word in (name, str(LIMIT_SECONDS))))
    try:
        result = asyncio.run(measure(url, server.pid, options))
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:<24} {value}")
    fine = (
        set(result["ends"]) == {"complete"}
        and not result["kept_their_connection"]
        and not result["restarts"]
    )
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
