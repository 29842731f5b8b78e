"""How fast records go through a long preparation: a line of log now and then."""

from __future__ import annotations

import logging
import time

from finetune.runtime.progress import format_seconds
from finetune.storage.durable_files import format_bytes

logger = logging.getLogger("finetune")

SAID_EVERY_SECONDS = 30.0


class Pace:
    """Says how far a job is, how fast it goes, and when it will be done.

    Args:
        what: the job, for people.
        total: how much there is to do, in bytes of input or in records.
        begun: how much of it was done before, in records.
    """

    def __init__(self, what: str, total: int, begun: int = 0) -> None:
        self._what = what
        self._total = total
        self._begun = begun
        self._begin = self._said = time.monotonic()

    def at(self, done: int, records: int, written_bytes: int | None = None) -> None:
        """Say something if it is time to; `records` are done, and `done` of the total, which may be
        in bytes.
        """
        now = time.monotonic()
        if now - self._said < SAID_EVERY_SECONDS:
            return
        self._said = now
        left = (now - self._begin) * (self._total - done) / max(done - self._begun, 1)
        facts = self._facts(records, written_bytes, now)
        logger.info(
            "%s: %.0f%%, %s, %s left",
            self._what,
            100 * done / self._total,
            facts,
            format_seconds(left),
        )

    def finish(self, records: int, written_bytes: int, processes: int) -> None:
        """Say the final figures."""
        now = time.monotonic()
        facts, seconds = self._facts(records, written_bytes, now), format_seconds(now - self._begin)
        logger.info("%s: done in %s by %d processes, %s", self._what, seconds, processes, facts)

    def _facts(self, records: int, written_bytes: int | None, now: float) -> str:
        rate = (records - self._begun) / max(now - self._begin, 1e-9)
        size = (
            ""
            if written_bytes is None
            else f", {format_bytes(round(written_bytes / max(records, 1)))} a record"
        )
        return f"{records:,} records, {rate:,.0f} records/s{size}"
