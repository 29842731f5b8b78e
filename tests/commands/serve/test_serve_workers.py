"""Workers that die, hang, are full or never start."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from serve_helpers import STUB_WORKER

from finetune.commands.serve import workers as workers_module
from finetune.commands.serve.worker_process import Worker
from finetune.commands.serve.workers import NoWorker, QueueFull, WorkerPool
from finetune.errors import DataError, FinetuneError
from finetune.inference.sampling import Sampling

COMMAND = (sys.executable, str(STUB_WORKER))


def with_pool(
    use: Callable[[WorkerPool], Awaitable[Any]], workers: int = 1, **settings: Any
) -> None:
    async def run() -> None:
        chosen = {"per_worker": 2, "max_queue": 2, "command": COMMAND, **settings}
        pool = WorkerPool({"model": "stub"}, [{}] * workers, **chosen)
        await pool.start()
        try:
            await asyncio.wait_for(use(pool), 60)
        finally:
            await pool.close()

    asyncio.run(run())


async def events(pool: WorkerPool, words: str, seconds: float = 10) -> list[dict[str, Any]]:
    """Of an answer, up to its last."""
    found, messages = [], [{"role": "user", "content": words}]
    async with pool.answer(messages, {"max_new_tokens": 10_000}, seconds) as queue:
        while not found or found[-1]["is"] not in ("end", "error", "refused", "lost"):
            found.append(await queue.get())
    return found


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


def test_a_dying_worker_takes_only_its_own_requests_and_comes_back():
    async def use(pool):
        tasks = [asyncio.create_task(events(pool, "slow 30")) for _ in range(4)]
        await until(lambda: pool.active_count == 4)
        first, second = pool.workers
        assert len(first.running) == len(second.running) == 2  # spread evenly
        pid = first.process.pid
        os.kill(pid, signal.SIGKILL)
        ends = [said[-1]["is"] for said in await asyncio.gather(*tasks)]
        assert sorted(ends) == ["end", "end", "lost", "lost"]
        await until(lambda: pool.ready_count == 2)
        assert first.process.pid != pid and first.restarts == 1 and second.restarts == 0
        assert (await events(pool, "again"))[-1]["is"] == "end"

    restarts = []
    with_pool(use, workers=2, on_restart=lambda: restarts.append(1))
    assert restarts == [1]


def test_a_hanging_worker_is_noticed_and_started_again(monkeypatch):
    monkeypatch.setattr(workers_module, "CHECK_SECONDS", 0.1)

    async def use(pool):
        first = pool.workers[0]
        os.kill(first.process.pid, signal.SIGSTOP)  # a pause is forgiven
        waiting = asyncio.create_task(events(pool, "say hello", 100))
        await until(lambda: first.state == "silent")
        assert pool.ready_count == 0
        os.kill(first.process.pid, signal.SIGCONT)
        assert (await waiting)[-1]["is"] == "end" and first.state == "ready" and first.restarts == 0
        pid = first.process.pid
        os.kill(pid, signal.SIGSTOP)
        lost = [asyncio.create_task(events(pool, "say hello", 100)) for _ in range(2)]
        assert [said[-1]["is"] for said in await asyncio.gather(*lost)] == ["lost", "lost"]
        assert (await events(pool, "say hello", 100))[-1]["is"] == "end"
        assert first.process.pid != pid and first.restarts == 1

    with_pool(use, worker_seconds=2.0)


def test_the_queue_is_bounded_and_first_come_is_first_served():
    async def use(pool):
        order: list[str] = []

        async def ask(name: str, words: str) -> None:
            await events(pool, words)
            order.append(name)

        running = [asyncio.create_task(ask(f"running {number}", "slow 20")) for number in range(2)]
        await until(lambda: pool.active_count == 2)
        waiting = []
        for number in range(2):
            waiting.append(asyncio.create_task(ask(f"waiting {number}", f"slow {1 + 10 * number}")))
            await until(lambda number=number: pool.queued_count == number + 1)
        with pytest.raises(QueueFull):
            await events(pool, "too many")
        await asyncio.gather(*running, *waiting)
        assert order[2:] == ["waiting 0", "waiting 1"]
        assert pool.queued_count == pool.active_count == 0

    with_pool(use)


def test_waiting_has_an_end_and_leaving_makes_room():
    async def use(pool):
        tasks = [asyncio.create_task(events(pool, "slow 2000")) for _ in range(2)]
        await until(lambda: pool.active_count == 2)
        with pytest.raises(asyncio.TimeoutError):
            await events(pool, "waits in vain", seconds=0.2)
        leaver = asyncio.create_task(events(pool, "leaves the queue"))
        stayer = asyncio.create_task(events(pool, "stays"))
        await until(lambda: pool.queued_count == 2)
        leaver.cancel()
        tasks[0].cancel()  # a client that leaves in the middle
        assert (await stayer)[-1]["is"] == "end"
        tasks[1].cancel()
        await asyncio.gather(leaver, *tasks, return_exceptions=True)
        await until(lambda: pool.active_count == 0 and pool.queued_count == 0)
        for _ in range(20):  # no room has leaked
            await asyncio.gather(events(pool, "a"), events(pool, "b"))

    with_pool(use)


def test_a_worker_that_does_not_start_is_said():
    async def use() -> None:
        for load, command, said in (
            ("broken", COMMAND, "no such model"),
            ("", (sys.executable, "-c", "print('hello')"), "ended before it was ready"),
        ):
            settings = {"per_worker": 1, "max_queue": 1, "command": command}
            with pytest.raises(FinetuneError, match=said):
                await WorkerPool({"model": load}, [{}, {}], **settings).start()

    asyncio.run(asyncio.wait_for(use(), 60))


def test_workers_that_never_come_back_are_given_up(monkeypatch, tmp_path):
    monkeypatch.setattr(workers_module, "LONGEST_PAUSE_SECONDS", 0.01)
    once = tmp_path / "started"
    script = (
        f"import os, runpy, sys\nif os.path.exists({str(once)!r}): sys.exit(7)\nopen({str(once)!r},"
        f" 'w').close()\nrunpy.run_path({str(STUB_WORKER)!r}, run_name='__main__')"
    )

    async def use(pool):
        assert (await events(pool, "die"))[-1]["is"] == "lost"
        waiting = asyncio.create_task(events(pool, "waits", seconds=120))
        await pool.all_failed.wait()
        with pytest.raises(NoWorker):
            await waiting
        with pytest.raises(NoWorker):
            await events(pool, "later")
        assert pool.workers[0].state == "failed"

    with_pool(use, command=(sys.executable, "-c", script))


def test_the_messages_of_a_worker_process():
    """With an engine that a test holds."""
    started: dict[str, Any] = {}
    cancelled = []

    def start(prompt, sampling, on_piece, tools):
        if prompt == "refuse":
            raise DataError("too long", "prompt", "shorten it")
        started[prompt] = (sampling, on_piece)
        return SimpleNamespace(prompt_tokens=7, cancel=lambda: cancelled.append(prompt))

    out = io.BytesIO()
    worker = Worker(SimpleNamespace(default_sampling=Sampling(), start=start), out)
    for name in ("a", "b", "refuse"):
        request = {"do": "answer", "id": name, "prompt": name, "tools": []}
        worker.handle({**request, "sampling": {"stop": ["x", "y"], "top_k": 3}})
    sampling, on_piece = started["a"]
    assert (sampling.stop, sampling.top_k) == (("x", "y"), 3)
    on_piece("words", None, None)
    started["b"][1]("", None, FinetuneError("out of memory"))
    for name in ("a", "a", "b"):  # b has ended
        worker.handle({"do": "cancel", "id": name})
    assert cancelled == ["a"]
    found = [json.loads(line) for line in out.getvalue().splitlines()]
    error = {"what": "too long", "where": "prompt", "fix": "shorten it"}
    assert found == [
        {"is": "accepted", "id": "a", "prompt_tokens": 7},
        {"is": "accepted", "id": "b", "prompt_tokens": 7},
        {"is": "refused", "id": "refuse", "kind": "DataError", "error": error},
        {"is": "piece", "id": "a", "text": "words"},
        {"is": "error", "id": "b", "message": "out of memory"},
    ]
