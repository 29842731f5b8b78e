"""Logs as lines: without prefixes and colours, with rank and time, in bounded memory however large
the log is.
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Literal

from finetune.commands.diagnose.log_facts import facts_of
from finetune.commands.diagnose.log_prefixes import (
    YEAR,
    Clock,
    clock_in,
    decode,
    read_time,
    strip_prefixes,
)

BLOCK_BYTES = 1 << 18
LINE_HEAD_BYTES = 16 << 10  # of a longer line the beginning is kept,
LINE_TAIL_BYTES = 4 << 10  # and its end
SHAPES_LIMIT = 50_000
LAST_LINES = 12
SHAPE_BYTES = 1 << 10
# Lines without a time that wait for the next time in their log, and how long after the last time
# one may be.
WAITING_LIMIT = 200
UNTIMED_SECONDS = 600.0
# Logged steps after which a process is taken to have survived an error.
SURVIVED_STEPS = 3

# Not worth a look, a logged training step, or a line to look at.
LineKind = Literal["", "step", "line"]


@dataclass(frozen=True)
class Moment:
    """A time that a log tells: seconds since the epoch, None where it tells none; of its year or
    the present one.
    """

    seconds: float | None
    year_known: bool


@dataclass(frozen=True)
class LogLine:
    """One line of a log.

    Attributes:
        source: the log's name.
        number: from 1; pieces that a carriage return separates share one.
        text: without prefixes (rank, time, colours); indentation is kept.
        rank: of the process that wrote it; None where nothing tells.
        seconds: since the epoch by the clock of the machine that wrote it; of a line without a time
            that of the nearest line of its log that has one, None where none is near.
        bounds: the times between which it was written: twice its own time where it has one.
        year_known: whether a line so far told the year; it is the present one otherwise.
        steps_before: logged training steps before it in this log, by rank.
        node: what else a prefix tells of where it was written: a host, a container, an actor.
    """

    source: str
    number: int
    text: str
    rank: int | None
    seconds: float | None
    steps_before: Mapping[int | None, int]
    node: str = ""
    bounds: tuple[float, float] = (-math.inf, math.inf)
    year_known: bool = True

    def steps_since(self, earlier: Mapping[int | None, int]) -> int:
        """The most steps that a rank logged between an earlier place in the log and this line."""
        return max(
            (count - earlier.get(rank, 0) for rank, count in self.steps_before.items()), default=0
        )


def raw_lines(first: bytes, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of every line, cut in the middle where it is too long; a carriage return
    ends one too.

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
    pieces = line.split(b"\r") if b"\r" in line else [line]
    for position, piece in enumerate(pieces):
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
        rank: of the process that wrote it, where the name tells.

    Attributes:
        steps: logged training steps so far, by rank.
        last: its last lines so far, with their numbers.
        broken_off: the last line, where it is a step's line up to the middle of a word.
    """

    def __init__(self, source: str, file: BinaryIO, *, rank: int | None = None) -> None:
        self.source = source
        self.rank = rank
        self.steps: dict[int | None, int] = {}
        self.broken_off: LogLine | None = None
        self.last: deque[tuple[int, bytes]] = deque(maxlen=LAST_LINES)
        # for times that have none
        self._first = file.read(BLOCK_BYTES)
        self._file = file
        self._year = time.localtime().tm_year
        self._shapes: dict[bytes, tuple[LineKind, Clock]] = {}
        self._timed: bytes | None = None  # the last line with a time
        self._dated: bytes | None = None  # the last one that tells the year too
        self._step_times: dict[int | None, deque[tuple[bytes | None, bytes | None]]] = {}

    def facts(self) -> frozenset[str]:
        """Return what the first lines tell of the run, of `FACTS`."""
        return facts_of(decode(self._first))

    def lines(self, kind_of: Callable[[str], LineKind]) -> Iterator[LogLine]:
        """The lines to look at. Lines that differ in digits only are classified once, unless they
        speak of errors.
        """
        waiting: list[LogLine] = []
        number, raw, steps_seen = 0, b"", deque([b""], maxlen=2)
        for number, raw in raw_lines(self._first, self._file):
            self.last.append((number, raw))
            kind, clock = self._classified(raw, kind_of)
            if clock:
                self._timed = raw
                self._dated = raw if clock == "date" else self._dated
            if waiting and (clock or len(waiting) >= WAITING_LIMIT):
                until, told = (
                    (self._time(self._timed, self._dated), strip_prefixes(decode(raw))[1])
                    if clock
                    else (None, None)
                )
                yield from (_placed(line, until, goes_on=line.rank == told) for line in waiting)
                waiting.clear()
            if not kind:
                continue
            text, rank, node = strip_prefixes(decode(raw))
            rank = self.rank if rank is None else rank
            if kind == "step":
                steps_seen.append(raw)
                self.steps[rank] = self.steps.get(rank, 0) + 1
                times = self._step_times.setdefault(rank, deque(maxlen=SURVIVED_STEPS))
                times.append((self._timed, self._dated))
                continue
            seconds, steps = self._time(self._timed, self._dated), dict(self.steps)
            line = LogLine(
                self.source,
                number,
                text,
                rank,
                seconds,
                steps,
                node,
                year_known=self._dated is not None,
            )
            if clock and seconds is not None:
                yield replace(line, bounds=(seconds, seconds))
            else:
                waiting.append(line)
        yield from (_placed(line, None) for line in waiting)
        if _is_cut(raw, steps_seen[0] if raw is steps_seen[-1] else steps_seen[-1]):
            text, rank, node = strip_prefixes(decode(raw))
            seconds, steps = self._time(self._timed, self._dated), dict(self.steps)
            self.broken_off = LogLine(self.source, number, text, rank, seconds, steps, node)

    def _classified(self, raw: bytes, kind_of: Callable[[str], LineKind]) -> tuple[LineKind, Clock]:
        key = raw if _digits_matter(raw) else raw.translate(None, b"0123456789")
        known = self._shapes.get(key)
        if known is None:
            known = kind_of(strip_prefixes(decode(raw))[0]), clock_in(decode(raw[:200]))
            self._remember(key, known)
        return known

    def trained_until(self) -> dict[int | None, Moment]:
        """By rank the time since which it logged as many steps as show that it survived what came
        before.
        """
        times = {
            rank: of_rank[0]
            for rank, of_rank in self._step_times.items()
            if len(of_rank) == SURVIVED_STEPS
        }
        return {
            rank: Moment(self._time(*first), first[1] is not None) for rank, first in times.items()
        }

    def _time(self, timed: bytes | None, dated: bytes | None) -> float | None:
        """The time of a line; its year is the last one that a line told."""
        if timed is None:
            return None
        year = self._year if dated is None else int(YEAR.findall(decode(dated[:200]))[0])
        return read_time(decode(timed[:200]), year)

    def _remember(self, key: bytes, known: tuple[LineKind, Clock]) -> None:
        if len(self._shapes) >= SHAPES_LIMIT:
            self._shapes.clear()
        if len(key) <= SHAPE_BYTES:
            self._shapes[key] = known


def _placed(line: LogLine, until: float | None, *, goes_on: bool = False) -> LogLine:
    """A line without a time of its own, between the times before and after it in its log.

    Args:
        goes_on: the line with the time after it is of the same process.
    """
    since = line.seconds
    if since is None:
        return line if until is None else replace(line, seconds=until, bounds=(-math.inf, until))
    if until is None:
        return replace(line, bounds=(since, since + UNTIMED_SECONDS))
    nearer = until if goes_on and line.rank is not None else since
    return replace(line, seconds=nearer, bounds=(min(since, until), max(since, until)))


def _is_cut(line: bytes, whole: bytes) -> bool:
    """Whether a line is the beginning of another, digits aside, and ends within a word or an early
    number of it.
    """
    shape, of_whole = (re.sub(rb"\d+", b"0", raw.rstrip()) for raw in (line, whole))
    if (
        not of_whole.startswith(shape)
        or len(shape) < 8
        or of_whole[len(shape) :][:1] in (b"", b" ")
    ):
        return False
    return shape[-1:].isalpha() or (shape[-1:].isdigit() and len(shape) <= len(of_whole) // 2)


def _digits_matter(raw: bytes) -> bool:
    return b"rror" in raw or b"code" in raw or b"ignal" in raw or b"ERR" in raw


_RANK_IN_NAME = re.compile(r"rank[-_]?(\d{1,5})(?!\d)|(?:^|/)(\d{1,5})/(?:stdout|stderr)\.log$")


def rank_in_name(path: Path) -> int | None:
    """The rank that a log's name or folder tells: `...-rank3.log`, torch elastic's
    `attempt_0/3/stderr.log`.
    """
    match = _RANK_IN_NAME.search(str(path))
    return int(match[1] or match[2]) if match else None
