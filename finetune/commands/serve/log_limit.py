"""A rate for log lines that clients cause: what is left out is counted, and the count is said."""

from __future__ import annotations

import logging
import threading
import time

LINES = 20
SECONDS = 60.0


class LineLimit(logging.Filter):
    """At most `lines` records in any window of `seconds`, for all loggers that have this filter
    together.
    """

    def __init__(
        self, report: logging.Logger, lines: int = LINES, seconds: float = SECONDS
    ) -> None:
        super().__init__()
        self._report = report
        self._lines = lines
        self._seconds = seconds
        self._lock = threading.Lock()
        self._window_began = 0.0
        self._seen = 0
        self._left_out = 0

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
            self._left_out += 1
            if self._left_out == 1:
                timer = threading.Timer(
                    self._window_began + self._seconds - now, self._say_left_out
                )
                timer.daemon = True
                timer.start()
            return False

    def _say_left_out(self) -> None:
        with self._lock:
            count, self._left_out = self._left_out, 0
        self._report.warning(
            "%d more lines about clients' requests were left out in %g seconds",
            count,
            self._seconds,
        )
