"""Limits that uvicorn has no setting for: how many connections there are, how long a request's head
may take, how long a client may take to read what was written for it, and how many lines clients may
cause in the log.

Without them, a client holds its connection for ever: with one byte of a header now and then, by
never reading, or with a byte of a body that was refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from finetune.commands.serve.options import ServeOptions
from finetune.commands.serve.protocol import ApiError

MAX_HEAD_BYTES = 32 << 10
# A socket that is closed with unread bytes is reset, and the reset may overtake the answer. So
# after a refusal what still comes is thrown away for a moment: so long, so much, and for one
# connection to this many of `max_connections`.
LINGER_SECONDS = 1.0
LINGER_BYTES = 4 << 20
LINGER_SHARE = 4
# Lines that clients cause in the log: so many in so long.
LOG_LINES = 20
LOG_SECONDS = 60.0


class _Transport:
    """The transport as uvicorn sees it: each write has a deadline, and `close` tells what was
    refused unread apart.
    """

    def __init__(self, transport: asyncio.Transport, protocol: LimitedProtocol) -> None:
        self._transport = transport
        self._protocol = protocol
        self.write = protocol.write
        self.close = protocol.close

    def is_closing(self) -> bool:
        return self._protocol.lingering or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol with these limits; a subclass sets them."""

    limits: ClassVar[ServeOptions]
    lingering_count: ClassVar[int]
    lingering = False  # refused; the answer is out, and what comes is thrown away
    _real: asyncio.Transport
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _linger_timer: asyncio.TimerHandle | None = None
    _written_bytes = 0
    _discarded_bytes = 0

    def connection_made(self, transport: Any) -> None:
        self._real = transport
        super().connection_made(_Transport(transport, self))
        if len(self.connections) - type(self).lingering_count > self.limits.max_connections:
            self._refuse(503, "too many connections", "too_many_connections")
            return
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        for timer in (self._write_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        if self.lingering:
            type(self).lingering_count -= 1
        super().connection_lost(exc)

    # ------------------------------------------------------------ reading

    def data_received(self, data: bytes) -> None:
        if self.lingering:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > LINGER_BYTES:
                self._real.close()
            return
        if self.transport.is_closing():
            return
        answering = self.cycle is not None and not self.cycle.response_complete
        if not answering and self._head_timer is None:
            self._start_head_timer()
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_head_timer()

    def on_response_complete(self) -> None:
        # answered without its body: nobody waits for the rest
        if self.conn.their_state is h11.SEND_BODY:
            self.transport.close()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not a valid HTTP request", "invalid_http")

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.head_seconds, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            seconds = self.limits.head_seconds
            self._refuse(
                408, f"the request took longer than {seconds:g} seconds", "request_timeout"
            )

    # ------------------------------------------------------------ writing

    def write(self, data: bytes) -> None:
        """The transport's `write`."""
        if self.lingering:
            return
        self._real.write(data)
        self._written_bytes += len(data)
        if self._write_timer is None and self._real.get_write_buffer_size():
            self._start_write_timer()

    def _start_write_timer(self) -> None:
        self._write_timer = self.loop.call_later(
            self.limits.write_seconds, self._check_written, self._written_bytes
        )

    def _check_written(self, goal: int) -> None:
        """Whether the client has taken the first `goal` bytes; the connection ends if not."""
        self._write_timer = None
        waiting = self._real.get_write_buffer_size()
        if self._written_bytes - waiting < goal:
            self._real.abort()
        elif waiting:
            self._start_write_timer()

    # ------------------------------------------------------------ refusing and closing

    def _refuse(self, status: int, message: str, code: str) -> None:
        headers = {"connection": "close"}
        response = ApiError(status, message, code=code, headers=headers).response()
        events = (
            h11.Response(
                status_code=status, headers=response.raw_headers, reason=STATUS_PHRASES[status]
            ),
            h11.Data(data=response.body),
            h11.EndOfMessage(),
        )
        with contextlib.suppress(h11.LocalProtocolError):  # an answer is under way already
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self._linger()

    def close(self) -> None:
        """The transport's `close`."""
        if self.conn.their_state is h11.SEND_BODY:
            self._linger()
        else:
            self._real.close()

    def _linger(self) -> None:
        if self.transport.is_closing():
            return
        if type(self).lingering_count * LINGER_SHARE >= self.limits.max_connections:
            self._real.close()
            return
        self.lingering = True
        type(self).lingering_count += 1
        self._stop_head_timer()
        self._unset_keepalive_if_required()
        with contextlib.suppress(OSError):  # the client has left already
            self._real.write_eof()
        self.flow.resume_reading()
        self._linger_timer = self.loop.call_later(LINGER_SECONDS, self._real.close)


def limited_protocol(limits: ServeOptions) -> type[LimitedProtocol]:
    """Return the protocol class with its limits, for `uvicorn.Config(http=...)`."""
    return type("LimitedProtocol", (LimitedProtocol,), {"limits": limits, "lingering_count": 0})


class LineLimit(logging.Filter):
    """At most `lines` records in any window of `seconds`, for all loggers that have this filter
    together.
    """

    def __init__(
        self, report: logging.Logger, lines: int = LOG_LINES, seconds: float = LOG_SECONDS
    ) -> None:
        super().__init__()
        self._report = report
        self._lines = lines
        self._seconds = seconds
        self._lock = threading.Lock()
        self._window_began = 0.0
        self._seen = 0
        self._dropped = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        with self._lock:
            now = time.monotonic()
            if now - self._window_began >= self._seconds:
                self._window_began = now
                self._seen = 0
            self._seen += 1
            if self._seen <= self._lines:
                return True
            self._dropped += 1
            if self._dropped == 1:
                timer = threading.Timer(
                    self._window_began + self._seconds - now, self._log_dropped_count
                )
                timer.daemon = True
                timer.start()
            return False

    def _log_dropped_count(self) -> None:
        with self._lock:
            count, self._dropped = self._dropped, 0
        self._report.warning(
            "%d more lines about clients' requests were left out in %g seconds",
            count,
            self._seconds,
        )
