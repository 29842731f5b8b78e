"""Logs as lines: without prefixes and colours, with rank and time, in bounded memory."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Literal

from finetune.commands.diagnose.log_paste import as_written
from finetune.commands.diagnose.log_prefixes import (
    decode,
    read_time,
    strip_prefixes,
    tells_time,
    year_in,
)

BLOCK_BYTES = 1 << 18
LINE_HEAD_BYTES = 16 << 10  # of a longer line the beginning is kept,
LINE_TAIL_BYTES = 4 << 10  # and its end
# Classifications of lines that are remembered, and the length of a line that is.
SHAPES_LIMIT = 50_000
SHAPE_BYTES = 1 << 10
LAST_LINES = 12
# Logged steps after which a process is taken to have survived an error.
SURVIVED_STEPS = 3

# Not worth a look, a logged training step, a line to look at, or one whose next line is, too.
LineKind = Literal["", "step", "line", "frame"]


@dataclass(frozen=True)
class LogLine:
    """One line of a log.

    Attributes:
        source: the log's name.
        number: from 1; pieces that a carriage return separates share one.
        text: without prefixes (rank, time, colours); indentation is kept.
        rank: of the process that wrote it; None if nothing tells.
        seconds: since the epoch by the clock of the machine that wrote it: its own time, else that
            of the last line before it that has one; None without any.
        steps_before: logged training steps before it in this log, by rank.
        has_time: it tells a time of its own.
        node: what else a prefix tells of where it was written: a host, a container, an actor.
    """

    source: str
    number: int
    text: str
    rank: int | None
    seconds: float | None
    steps_before: Mapping[int | None, int]
    node: str = ""
    has_time: bool = True

    def steps_since(self, earlier: Mapping[int | None, int]) -> int:
        """Return the most steps that a rank logged between an earlier place and this line."""
        counts = self.steps_before.items()
        return max((count - earlier.get(rank, 0) for rank, count in counts), default=0)


def raw_lines(first: bytes, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield number and bytes of every line; a carriage return ends one, too.

    The middle of a line that is too long is left out.

    Args:
        first: the first block, which was read from the file before.
    """
    number, rest, cut = 1, b"", False
    for block in chain([first], iter(lambda: file.read(BLOCK_BYTES), b"")):
        *lines, last = (rest + block).split(b"\n")
        for line in lines:
            yield from ((number, piece) for piece in _pieces(line, cut))
            number, cut = number + 1, False
        *bars, rest = last.split(b"\r")
        for bar in bars:
            yield number, _shorten(bar, cut)
            cut = False
        if len(rest) > LINE_HEAD_BYTES + LINE_TAIL_BYTES:
            rest, cut = _shorten(rest, cut), True
    if rest:
        yield from ((number, piece) for piece in _pieces(rest, cut))


def _pieces(line: bytes, cut: bool) -> Iterator[bytes]:
    for position, piece in enumerate(line.split(b"\r")):
        if piece:
            yield _shorten(piece, cut and position == 0)


def _shorten(line: bytes, cut: bool) -> bytes:
    if len(line) <= LINE_HEAD_BYTES + LINE_TAIL_BYTES:
        return line
    return line[:LINE_HEAD_BYTES] + line[-LINE_TAIL_BYTES:]


class LogFile:
    """One log, read once from its beginning.

    Args:
        source: its name.
        rank: of the process that wrote it, if the name tells.
        year: of lines that tell none, if another log tells it; the present one otherwise.

    Attributes:
        head: its first lines, as text.
        count: lines that are not empty. steps: logged training steps, by rank. last: its last
            lines, with their numbers; all so far.
    """

    def __init__(
        self,
        source: str,
        file: BinaryIO,
        *,
        rank: int | None = None,
        year: int | None = None,
    ) -> None:
        self.source = source
        self.rank = rank
        self.count = 0
        self.steps: dict[int | None, int] = {}
        self.last: deque[tuple[int, bytes]] = deque(maxlen=LAST_LINES)
        self._first = as_written(file.read(BLOCK_BYTES), file)
        self._file = file
        self.head = decode(self._first)
        self.year = year_in(self.head) or year or time.localtime().tm_year
        self._shapes: dict[bytes, tuple[LineKind, bool]] = {}
        self._last_steps: deque[bytes] = deque(maxlen=2)
        self._step_times: dict[int | None, deque[bytes]] = {}

    def lines(self, kind_of: Callable[[str], LineKind]) -> Iterator[LogLine]:
        """Yield the lines to look at.

        Lines that differ in digits only are classified once, unless they speak of errors.
        """
        timed, in_frame = self._first_time(), False
        for number, raw in raw_lines(self._first, self._file):
            self.last.append((number, raw))
            self.count += bool(raw.strip())
            kind, is_timed = self._classified(raw, kind_of)
            timed = raw if is_timed else timed
            after_frame, in_frame = in_frame, kind == "frame"
            if not kind and not after_frame:
                continue
            text, rank, node = strip_prefixes(decode(raw))
            rank = self.rank if rank is None else rank
            if kind == "step":
                self._last_steps.append(raw)
                self.steps[rank] = self.steps.get(rank, 0) + 1
                times = self._step_times.setdefault(rank, deque(maxlen=SURVIVED_STEPS))
                times.append(timed)
                continue
            seconds, steps = self._time(timed), dict(self.steps)
            yield LogLine(self.source, number, text, rank, seconds, steps, node, is_timed)

    def _first_time(self) -> bytes:
        """Return the first line of the head that tells a time: those before it are near it."""
        lines = (line for line in self._first.split(b"\n") if tells_time(decode(line[:200])))
        return next(lines, b"")

    def broken_off(self) -> LogLine | None:
        """Return the last line if it is the beginning of a step's line; None otherwise."""
        number, raw = self.last[-1] if self.last else (0, b"")
        cut = _shape(raw)
        steps = [step for step in map(_shape, self._last_steps) if step != cut]
        rest = next((step[len(cut) :] for step in steps if step.startswith(cut)), b"")
        if len(cut) < 8 or not (cut[-1:].isalpha() and rest[:1].isalpha()):
            return None
        text, rank, node = strip_prefixes(decode(raw))
        return LogLine(self.source, number, text, rank, None, dict(self.steps), node)

    def trained_until(self) -> dict[int | None, float]:
        """Return by rank the time since which it logged as many steps as show that it survived."""
        full = {r: t for r, t in self._step_times.items() if len(t) == SURVIVED_STEPS}
        times = {rank: self._time(of_rank[0]) for rank, of_rank in full.items()}
        return {rank: seconds for rank, seconds in times.items() if seconds is not None}

    def _time(self, raw: bytes) -> float | None:
        return read_time(decode(raw[:200]), self.year) if raw else None

    def _classified(self, raw: bytes, kind_of: Callable[[str], LineKind]) -> tuple[LineKind, bool]:
        key = raw if _digits_matter(raw) else raw.translate(None, b"0123456789")
        known = self._shapes.get(key)
        if known is None:
            known = kind_of(strip_prefixes(decode(raw))[0]), tells_time(decode(raw[:200]))
            if len(self._shapes) >= SHAPES_LIMIT:
                self._shapes.clear()
            if len(key) <= SHAPE_BYTES:
                self._shapes[key] = known
        return known


def _shape(line: bytes) -> bytes:
    return re.sub(rb"\d+", b"0", line)


def _digits_matter(raw: bytes) -> bool:
    return b"rror" in raw or b"code" in raw or b"ignal" in raw or b"ERR" in raw


_RANK_IN_NAME = re.compile(r"rank[-_]?(\d{1,5})(?!\d)|(?:^|/)(\d{1,5})/(?:stdout|stderr)\.log$")


def rank_in_name(path: Path) -> int | None:
    """Return the rank that a log's name or folder tells.

    `...-rank3.log`, torch elastic's `attempt_0/3/stderr.log`.
    """
    match = _RANK_IN_NAME.search(str(path))
    return int(match[1] or match[2]) if match else None
