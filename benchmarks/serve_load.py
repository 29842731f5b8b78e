"""Load on a server: many streaming clients at once against one at a time, a worker killed in the
middle, /health timed.

    python benchmarks/serve_load.py                      # the bundled model, 2 CPU workers, 32
    clients, 60 seconds python benchmarks/serve_load.py --seconds 20 --json

It starts the server itself, on a free port of loopback, and ends it. Exit code 1 if a request ended
in another way than complete, refused for now (429, 503), or lost with the worker that was killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
QUESTIONS = [
    json.loads(line)["instruction"]
    for line in (ROOT / "data_samples" / "valid.jsonl").read_text(encoding="utf-8").splitlines()
]
PASSING = {"complete", "429", "503", "worker_lost"}


async def ask(client: httpx.AsyncClient, model: str, number: int, tokens: int) -> tuple[str, int]:
    """How one streamed answer ended, and its tokens. Drawn at random, so that answers have their
    full length.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}],
        "max_tokens": tokens,
        "temperature": 1.0,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    counted, done = 0, False
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                return str(response.status_code), 0
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return event["error"]["code"], counted
                    if event.get("usage"):
                        counted = event["usage"]["completion_tokens"]
    except httpx.HTTPError as error:
        return type(error).__name__, counted
    return ("complete" if done else "cut"), counted


async def one_after_another(
    client: httpx.AsyncClient, model: str, seconds: float, tokens: int
) -> float:
    """Tokens per second of a single client."""
    began, total, number = time.monotonic(), 0, 0
    while time.monotonic() - began < seconds:
        ended, counted = await ask(client, model, number, tokens)
        assert ended == "complete", ended
        total, number = total + counted, number + 1
    return total / (time.monotonic() - began)


async def measure(url: str, server_pid: int, options: argparse.Namespace) -> dict:
    ends: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=options.clients + 8)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        alone = await one_after_another(client, model, options.seconds / 4, options.tokens)
        began = time.monotonic()
        end = began + options.seconds
        total = 0

        async def keep_asking(who: int) -> None:
            nonlocal total
            number = who * 10_000
            while time.monotonic() < end:
                ended, counted = await ask(client, model, number, options.tokens)
                ends[ended] += 1
                total, number = total + counted, number + 1
                if ended in ("429", "503"):
                    await asyncio.sleep(random.random())

        health: list[float] = []

        async def look() -> None:
            async with httpx.AsyncClient(base_url=url, timeout=30) as own:
                while time.monotonic() < end:
                    asked = time.monotonic()
                    assert (await own.get("/health")).status_code == 200
                    health.append(time.monotonic() - asked)
                    await asyncio.sleep(0.05)

        async def kill() -> None:
            await asyncio.sleep(options.seconds / 2)
            os.kill(children(server_pid)[0], signal.SIGKILL)

        tasks = [keep_asking(who) for who in range(options.clients)]
        await asyncio.gather(look(), *([kill()] if options.kill else []), *tasks)
        together = total / (time.monotonic() - began)
        state = (await client.get("/health")).json()
    return {
        "clients": options.clients,
        "seconds": options.seconds,
        "tokens_per_second_alone": round(alone, 1),
        "tokens_per_second_together": round(together, 1),
        "times": round(together / alone, 2),
        "ends": dict(ends),
        "health_samples": len(health),
        "health_p50_ms": round(1000 * statistics.median(health), 1),
        "health_p99_ms": round(1000 * statistics.quantiles(health, n=100)[98], 1),
        "health_max_ms": round(1000 * max(health), 1),
        "restarts": sum(worker["restarts"] for worker in state["workers"]),
        "status_after": state["status"],
    }


def children(pid: int) -> list[int]:
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(word) for word in found.stdout.split()]


def start(options: argparse.Namespace, *flags: str) -> tuple[subprocess.Popen[str], str]:
    words = [
        sys.executable,
        "-m",
        "finetune",
        "serve",
        "--model",
        options.model,
        "--device-type",
        "cpu",
    ]
    words += [
        "--port",
        "0",
        "--num-workers",
        str(options.workers),
        "--max-batch",
        str(options.max_batch),
        *flags,
    ]
    server = subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    for line in server.stdout:
        found = re.search(r"answers at (http://\S+)", line)
        if found:
            return server, found[1]
    raise SystemExit("the server did not start")


def load_options(description: str) -> argparse.ArgumentParser:
    """What a benchmark of the server under load can be told."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--model", default="data_samples/tiny-qwen3")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    return parser


def main() -> int:
    parser = load_options(__doc__)
    parser.add_argument(
        "--no-kill", dest="kill", action="store_false", help="leave the workers alone"
    )
    options = parser.parse_args()
    server, url = start(options)
    try:
        result = asyncio.run(measure(url, server.pid, options))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:<28} {value}")
    return 0 if set(result["ends"]) <= PASSING else 1


if __name__ == "__main__":
    sys.exit(main())
