"""Turn the events of one answer into a response body or a stream of server-sent events, and count
them for /metrics.

When the client disconnects, the answer is cancelled in the worker.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from finetune.commands.serve.options import ServeOptions
from finetune.commands.serve.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    Shape,
    unavailable,
)
from finetune.commands.serve.workers import Event, NoWorker, QueueFull, WorkerPool

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """The values of /metrics. They never contain text of a request or an answer."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        own = {"registry": self._registry}
        self.requests = Counter(
            "finetune_requests", "Requests for answers", ("endpoint", "status"), **own
        )
        self.tokens = Counter("finetune_tokens", "Tokens read and written", ("kind",), **own)
        self.cancelled = Counter("finetune_cancelled", "Answers whose client left", **own)
        self.restarts = Counter("finetune_worker_restarts", "Workers started again", **own)
        self.lost = Counter("finetune_lost_requests", "Requests whose worker died", **own)
        self.first_token = Histogram(
            "finetune_time_to_first_token_seconds",
            "From the request to the first text",
            buckets=_SECONDS,
            **own,
        )
        self.duration = Histogram(
            "finetune_request_seconds",
            "From the request to the end of its answer",
            buckets=_SECONDS,
            **own,
        )
        self.workers = Gauge("finetune_workers_ready", "Workers that answer", **own)
        self.active = Gauge("finetune_active_requests", "Answers being written", **own)
        self.queue = Gauge("finetune_queued_requests", "Requests that wait for a worker", **own)

    def text(self, *, workers_ready: int, active: int, queued: int) -> bytes:
        self.workers.set(workers_ready)
        self.active.set(active)
        self.queue.set(queued)
        return generate_latest(self._registry)


class AnswerResponse(Response):
    """An ASGI response that queries the pool itself, so that it notices every disconnect."""

    def __init__(
        self,
        request: ChatRequest | CompletionRequest,
        *,
        pool: WorkerPool,
        options: ServeOptions,
        metrics: Metrics,
    ) -> None:
        self.request = request
        self.pool = pool
        self.options = options
        self.metrics = metrics
        self.changes = request.sampling_changes(options.max_new_tokens)
        chat = isinstance(request, ChatRequest)
        self.endpoint = "chat" if chat else "completions"
        self.shape = Shape(chat=chat, model=request.model)
        self.background = None
        self._began = time.monotonic()
        self._started = False  # the head of the response is out
        self._has_text = False
        self._status = "error"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._connection = (scope, receive, send)
        answer = asyncio.create_task(self._answer())
        leaving = asyncio.create_task(receive())  # the body is read: next comes the disconnect
        try:
            await asyncio.wait((answer, leaving), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
            else:
                self._status = "cancelled"
                self.metrics.cancelled.inc()
        finally:
            answer.cancel()
            leaving.cancel()
            await asyncio.gather(answer, leaving, return_exceptions=True)
            self.metrics.requests.labels(self.endpoint, self._status).inc()
            self.metrics.duration.observe(time.monotonic() - self._began)

    async def _answer(self) -> None:
        try:
            with anyio.fail_after(self.options.request_seconds):
                async with self._events() as events:
                    await (self._stream(events) if self.request.stream else self._whole(events))
            self._status = "200"
        except TimeoutError:
            await self._fail(unavailable("the answer took too long", "timeout", status=504))
        except ApiError as error:
            await self._fail(error)

    @asynccontextmanager
    async def _events(self) -> AsyncIterator[AsyncIterator[Event]]:
        """Yield the events of the answer, the first is "accepted"; raise ApiError for a failure."""
        try:
            async with self.pool.answer(
                self.request.prompt(),
                self.changes,
                self.options.queue_seconds,
                tools=self.request.callable_tools(),
            ) as queue:
                yield _checked(queue, self.metrics)
        except QueueFull as error:
            raise unavailable(
                "too many requests are waiting; try again", "queue_full", status=429
            ) from error
        except NoWorker as error:
            raise unavailable("no worker is running", "no_worker") from error
        except TimeoutError as error:  # of the queue; the limit of the whole answer is further out
            raise unavailable("no worker had room in time; try again", "queue_timeout") from error

    async def _whole(self, events: AsyncIterator[Event]) -> None:
        async for event in events:
            if event["is"] == "piece":
                self._first_token()
            elif event["is"] == "end":
                counts = self._count(event)
                body = self.shape.whole(
                    event["text"], event["finish_reason"], counts, event.get("calls", ())
                )
                await JSONResponse(body)(*self._connection)

    async def _stream(self, events: AsyncIterator[Event]) -> None:
        send = self._connection[2]
        async for event in events:
            if event["is"] == "accepted":
                headers = [
                    (b"content-type", b"text/event-stream; charset=utf-8"),
                    (b"x-accel-buffering", b"no"),
                ]
                await send(
                    {
                        "type": "http.response.start",
                        "status": 200,
                        "headers": headers,
                    }
                )
                self._started = True
                await _send_event(send, self.shape.first())
            elif event["is"] == "piece":
                self._first_token()
                await _send_event(send, self.shape.piece(event["text"]))
            elif event["is"] == "end":
                counts = self._count(event)
                if calls := event.get("calls"):
                    await _send_event(send, self.shape.calls(calls))
                await _send_event(send, self.shape.last(event["finish_reason"]))
                if self.request.include_usage:
                    await _send_event(send, self.shape.counts(counts))
        await send(
            {
                "type": "http.response.body",
                "body": b"data: [DONE]\n\n",
                "more_body": False,
            }
        )

    async def _fail(self, error: ApiError) -> None:
        self._status = str(error.status)
        if not self._started:
            await error.response()(*self._connection)
            return
        send = self._connection[2]
        # The protocol's form of an error in the middle of a stream; clients raise it.
        await _send_event(send, error.body)
        await send(
            {
                "type": "http.response.body",
                "body": b"",
                "more_body": False,
            }
        )

    def _first_token(self) -> None:
        if not self._has_text:
            self._has_text = True
            self.metrics.first_token.observe(time.monotonic() - self._began)

    def _count(self, end: Event) -> dict[str, int]:
        read, written = end["prompt_tokens"], end["completion_tokens"]
        self.metrics.tokens.labels("prompt").inc(read)
        self.metrics.tokens.labels("completion").inc(written)
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
        }


async def _checked(queue: asyncio.Queue[Event], metrics: Metrics) -> AsyncIterator[Event]:
    while True:
        event = await queue.get()
        if event["is"] == "lost":
            metrics.lost.inc()
            raise unavailable("the worker that wrote this answer ended; try again", "worker_lost")
        if event["is"] == "error":
            raise unavailable(event["message"], "generation_failed", status=500)
        if event["is"] == "refused":
            error = event["error"]
            code = (
                "context_length_exceeded" if event["kind"] == "PromptTooLong" else "invalid_value"
            )
            raise ApiError(400, error["what"], param=error["where"] or None, code=code)
        yield event
        if event["is"] == "end":
            return


async def _send_event(send: Send, body: Mapping[str, Any] | None) -> None:
    if body is not None:
        data = b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"
        await send(
            {
                "type": "http.response.body",
                "body": data,
                "more_body": True,
            }
        )
