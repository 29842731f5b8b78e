"""Limits that uvicorn has no setting for: the number of connections, the time for a request's head,
and the time for a client to read what was written for it.

Without them a client can hold its connection forever: with a byte of a header now and then, or by
never reading.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from finetune.commands.serve.options import ServeOptions
from finetune.commands.serve.protocol import LINGER_SECONDS, ApiError

MAX_HEAD_BYTES = 32 << 10


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol with these limits."""

    def __init__(self, limits: ServeOptions, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self.limits = limits
        self._is_refused = False  # the answer is written, and what still arrives is discarded
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # pause_writing is called as soon as the system's buffer is full
        transport.set_write_buffer_limits(high=0)
        if len(self.connections) > self.limits.max_connections:
            self._refuse(503, "too many connections", "too_many_connections")
        else:
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        if self._head_timer is None and not self._is_answering:
            self._start_head_timer()
        super().data_received(data)
        if self._is_answering:
            self._stop_head_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not a valid HTTP request", "invalid_http")

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.head_seconds, self._refuse_late_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_late_head(self) -> None:
        if not self.transport.is_closing():
            message = f"the request took longer than {self.limits.head_seconds:g} seconds"
            self._refuse(408, message, "request_timeout")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer, and close the connection a moment later (see LINGER_SECONDS)."""
        self._is_refused = True
        self._stop_head_timer()
        response = ApiError(status, message, code=code, headers={"connection": "close"}).response()
        head = h11.Response(
            status_code=status, headers=response.raw_headers, reason=STATUS_PHRASES[status]
        )
        try:
            for event in (head, h11.Data(data=response.body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
            self.transport.write_eof()
        except (h11.LocalProtocolError, OSError):  # an answer is in progress, or the client left
            self.transport.close()
            return
        # uvicorn counts it no more and does not wait for it when the server stops
        self.connections.discard(self)
        self.loop.call_later(LINGER_SECONDS, self.transport.close)
