"""Connections with limits that uvicorn has no setting for: how many there are, and how long a request's head may take.

Without the second, a client that sends one byte of a header now and then holds its connection for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from finetune.commands.serve.protocol import ApiError

MAX_HEAD_BYTES = 32 << 10


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol with these limits; a subclass sets them."""

    max_connections: ClassVar[int]
    head_seconds: ClassVar[float]
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(503, "too many connections", "too_many_connections")
            return
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        answering = self.cycle is not None and not self.cycle.response_complete
        if not answering and self._head_timer is None:
            self._start_head_timer()
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_head_timer()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not a valid HTTP request", "invalid_http")

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.head_seconds, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._refuse(408, f"the request took longer than {self.head_seconds:g} seconds", "request_timeout")

    def _refuse(self, status: int, message: str, code: str) -> None:
        body = json.dumps(ApiError(status, message, code=code).body).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        events = (
            h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status]),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        with contextlib.suppress(h11.LocalProtocolError):  # an answer is under way already
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()


def limited_protocol(max_connections: int, head_seconds: float) -> type[LimitedProtocol]:
    """The protocol class with its limits, for `uvicorn.Config(http=...)`."""
    limits = {"max_connections": max_connections, "head_seconds": head_seconds}
    return type("LimitedProtocol", (LimitedProtocol,), limits)
