"""The worker processes of a server: one per device, restarted when they die, and the queue of
requests.

Requests wait in one queue until a worker has room, and go to the least busy one. If a worker dies,
its requests get the event `lost`; requests of other workers continue. A worker without heartbeats
gets no more requests, and is killed after `worker_seconds`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from finetune.errors import ConfigError, FinetuneError

logger = logging.getLogger("finetune")

WORKER_COMMAND = (sys.executable, "-m", "finetune.commands.serve.worker_process")
FAILED_STARTS = 5  # in a row, after which a worker is given up
LONGEST_PAUSE_SECONDS = 30.0
STOP_SECONDS = 10.0
CHECK_SECONDS = 0.5  # between checks for heartbeats; workers send them as often
QUIET_CHECKS = 10  # without a heartbeat, after which a worker gets no more requests
LINE_BYTES = 64 << 20  # of one message: an answer is much smaller

Event = dict[str, Any]
LOST: Event = {"is": "lost"}


class QueueFull(Exception):
    """`max_queue` requests are waiting."""


class NoWorker(Exception):
    """No worker is running or being started."""


@dataclass
class Worker:
    """One process and its requests.

    `state`: starting, ready, silent (no heartbeats), pausing (before a new start), failed,
    stopped.
    """

    number: int
    environment: Mapping[str, str]
    state: str = "starting"
    process: asyncio.subprocess.Process | None = None
    running: dict[str, asyncio.Queue[Event]] = field(default_factory=dict)
    restarts: int = 0
    silent_checks: int = 0  # since its last heartbeat
    task: asyncio.Task[None] | None = None

    def send(self, message: Mapping[str, Any]) -> None:
        if self.process is not None and not self.process.stdin.is_closing():
            self.process.stdin.write(json.dumps(message).encode() + b"\n")


@dataclass
class _WaitingRequest:
    identity: str
    events: asyncio.Queue[Event]
    granted: asyncio.Future[Worker]


@dataclass(eq=False)
class WorkerPool:
    """Workers with the same model.

    Attributes:
        load: arguments of `load_for_generation`.
        environments: variables of each worker, on top of this process's own.
        per_worker: answers that a worker writes at the same time.
        max_queue: requests that may wait for room.
        worker_seconds: time without a heartbeat after which a worker is killed.
        on_restart: called when a worker is started again.
        about: what the first worker reported when it was ready.
    """

    load: Mapping[str, Any]
    environments: Sequence[Mapping[str, str]]
    _: KW_ONLY
    per_worker: int
    max_queue: int
    worker_seconds: float = 30.0
    command: Sequence[str] = WORKER_COMMAND
    on_restart: Callable[[], None] = lambda: None
    about: dict[str, Any] = field(default_factory=dict)
    all_failed: asyncio.Event = field(default_factory=asyncio.Event)
    _waiting: deque[_WaitingRequest] = field(default_factory=deque)
    _closing: bool = False

    def __post_init__(self) -> None:
        self.workers = [Worker(*pair) for pair in enumerate(self.environments)]

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Start all workers and wait until each is ready.

        Raises:
            FinetuneError: what a worker reported, or that it died without a message.
        """
        ready = [asyncio.get_running_loop().create_future() for _ in self.workers]
        for worker, future in zip(self.workers, ready, strict=True):
            worker.task = asyncio.create_task(self._supervise(worker, future))
        try:
            await asyncio.gather(*ready)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End all workers; answers that are being written end as lost."""
        self._closing = True
        self._reject_waiting()
        await asyncio.gather(*(self._stop(worker) for worker in self.workers))

    async def _stop(self, worker: Worker) -> None:
        if worker.process is not None and worker.process.returncode is None:
            with contextlib.suppress(ConnectionError, RuntimeError):
                worker.process.stdin.close()  # it ends when its input does
            await _end(worker.process, STOP_SECONDS)
        if worker.task is not None:
            worker.task.cancel()
            await asyncio.gather(worker.task, return_exceptions=True)
        worker.state = "stopped"

    async def _supervise(self, worker: Worker, ready: asyncio.Future[None]) -> None:
        """Start the worker, and restart it whenever it dies."""
        failed_starts = 0
        while not self._closing:
            worker.state = "starting"
            was_ready, error = await self._run_once(worker, ready)
            if self._closing:
                return
            if not ready.done():  # the first start: the server does not begin without it
                ready.set_exception(error)
                return
            failed_starts = 0 if was_ready else failed_starts + 1
            if failed_starts >= FAILED_STARTS:
                worker.state = "failed"
                logger.error(
                    "worker %d failed to start %d times, given up: %s",
                    worker.number,
                    failed_starts,
                    error,
                )
                if all(worker.state == "failed" for worker in self.workers):
                    self._reject_waiting()
                    self.all_failed.set()
                return
            worker.state = "pausing"
            worker.restarts += 1
            self.on_restart()
            pause = 0.0 if failed_starts == 0 else min(LONGEST_PAUSE_SECONDS, 2.0**failed_starts)
            logger.warning("worker %d ended (%s) and is started again", worker.number, error.what)
            await asyncio.sleep(pause)

    async def _run_once(
        self, worker: Worker, ready: asyncio.Future[None]
    ) -> tuple[bool, FinetuneError]:
        """Run a worker until it ends. Returns whether it was ready, and why it ended."""
        error = FinetuneError(
            f"worker {worker.number} ended before it was ready", "worker", "see its messages above"
        )
        was_ready = False
        worker.process = process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **worker.environment},
            limit=LINE_BYTES,
        )
        watch: asyncio.Task[None] | None = None
        try:
            worker.send({"do": "load", **self.load})
            while line := await process.stdout.readline():
                event = json.loads(line)
                self._mark_responsive(worker)
                if event["is"] == "ready":
                    was_ready = True
                    self.about = self.about or event
                    worker.state = "ready"
                    watch = asyncio.create_task(self._watch(worker, process))
                    if not ready.done():
                        ready.set_result(None)
                    self._assign_waiting()
                elif event["is"] == "failed":
                    error = ConfigError(**event["error"])
                elif event["is"] != "alive":
                    self._deliver(worker, event)
        except (ValueError, KeyError) as wrong:
            logger.error(
                "worker %d sent what is no message: %s", worker.number, type(wrong).__name__
            )
        finally:
            if watch is not None:
                watch.cancel()
            code = await _end(process, 1.0)
            running, worker.running = worker.running, {}
            for queue in running.values():
                queue.put_nowait(LOST)
        if was_ready:
            reason = f"signal {-code}" if code < 0 else f"exit code {code}"
            error = FinetuneError(reason, f"worker {worker.number}")
        return was_ready, error

    async def _watch(self, worker: Worker, process: asyncio.subprocess.Process) -> None:
        """Kill the worker if it hangs: it is stopped, or a call in it never returns.

        Checks are counted instead of time: if this process itself was stopped, its workers were not
        silent.
        """
        while worker.silent_checks * CHECK_SECONDS < self.worker_seconds:
            await asyncio.sleep(CHECK_SECONDS)
            worker.silent_checks += 1
            if worker.silent_checks == QUIET_CHECKS and worker.state == "ready":
                worker.state = "silent"
        logger.error(
            "worker %d gave no sign of life for %g seconds and is ended",
            worker.number,
            self.worker_seconds,
        )
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    def _mark_responsive(self, worker: Worker) -> None:
        worker.silent_checks = 0
        if worker.state == "silent":
            worker.state = "ready"
            self._assign_waiting()

    # ------------------------------------------------------------ requests

    @property
    def ready_count(self) -> int:
        return sum(worker.state == "ready" for worker in self.workers)

    @property
    def active_count(self) -> int:
        return sum(len(worker.running) for worker in self.workers)

    @property
    def queued_count(self) -> int:
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def answer(
        self,
        prompt: Any,
        sampling: Mapping[str, Any],
        queue_seconds: float,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> AsyncIterator[asyncio.Queue[Event]]:
        """Yield a queue of the events of one answer, up to "end", "error", "refused" or "lost".
        Leaving earlier cancels the answer.

        Raises:
            QueueFull, NoWorker, asyncio.TimeoutError: it could not begin.
        """
        identity = uuid.uuid4().hex
        events: asyncio.Queue[Event] = asyncio.Queue()
        worker = await self._reserve(identity, events, queue_seconds)
        if identity in worker.running:  # else it has died in between, and `lost` is in the queue
            asked = {
                "prompt": prompt,
                "tools": list(tools),
                "sampling": dict(sampling),
            }
            worker.send(
                {
                    "do": "answer",
                    "id": identity,
                    **asked,
                }
            )
        try:
            yield events
        finally:
            if worker.running.pop(identity, None) is not None:
                worker.send({"do": "cancel", "id": identity})
                self._assign_waiting()

    async def _reserve(
        self, identity: str, events: asyncio.Queue[Event], queue_seconds: float
    ) -> Worker:
        """Wait for a worker that has counted the request as its own."""
        worker = self._least_busy()
        if worker is not None and not self._waiting:
            worker.running[identity] = events
            return worker
        if self._closing or all(worker.state in ("failed", "stopped") for worker in self.workers):
            raise NoWorker
        if len(self._waiting) >= self.max_queue:
            raise QueueFull
        request = _WaitingRequest(identity, events, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        try:
            return await asyncio.wait_for(request.granted, queue_seconds)
        except BaseException:
            with contextlib.suppress(ValueError):
                self._waiting.remove(request)
            for worker in self.workers:  # granted just when the waiting ended
                if worker.running.pop(identity, None) is not None:
                    self._assign_waiting()
            raise

    def _least_busy(self) -> Worker | None:
        room = [
            worker
            for worker in self.workers
            if worker.state == "ready" and len(worker.running) < self.per_worker
        ]
        return min(room, key=lambda worker: len(worker.running), default=None)

    def _assign_waiting(self) -> None:
        """Assign waiting requests to workers with room, first come first served."""
        while self._waiting and (worker := self._least_busy()) is not None:
            request = self._waiting.popleft()
            if not request.granted.done():
                worker.running[request.identity] = request.events
                request.granted.set_result(worker)

    def _reject_waiting(self) -> None:
        for request in self._waiting:
            if not request.granted.done():
                request.granted.set_exception(NoWorker())
        self._waiting.clear()

    def _deliver(self, worker: Worker, event: Event) -> None:
        queue = worker.running.get(event["id"])
        if queue is None:  # cancelled
            return
        if event["is"] in ("end", "error", "refused"):
            del worker.running[event["id"]]
            self._assign_waiting()
        queue.put_nowait(event)


async def _end(process: asyncio.subprocess.Process, seconds: float) -> int:
    """Wait for a process that should end, kill it if it does not, and return its exit code."""
    try:
        return await asyncio.wait_for(process.wait(), seconds)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return await process.wait()
