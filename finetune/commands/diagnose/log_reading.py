"""Logs as lines: without prefixes and colours, with rank and time, in bounded memory however large the log is."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from finetune.commands.diagnose.log_prefixes import decode, has_a_time, read_time, strip_prefixes

BLOCK_BYTES = 1 << 18
LINE_HEAD_BYTES = 16 << 10  # of a longer line the beginning is kept,
LINE_TAIL_BYTES = 4 << 10  # and its end
SHAPES_LIMIT = 50_000
SHAPE_BYTES = 1 << 10

# Not worth a look, a logged training step, or a line to look at.
LineKind = Literal["", "step", "line"]


@dataclass(frozen=True)
class LogLine:
    """One line of a log.

    Attributes:
        source: the log's name.
        number: from 1; pieces that a carriage return separates share one.
        text: without prefixes (rank, time, colours); indentation is kept.
        rank: of the process that wrote it; None where nothing tells.
        seconds: since the epoch by the clock of the machine that wrote it; None where no line so far had a time.
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


def raw_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of every line, cut in the middle where it is too long; a carriage return ends one too."""
    number, rest, cut = 1, b"", False
    while block := file.read(BLOCK_BYTES):
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
    """

    def __init__(self, source: str, file: BinaryIO, *, rank: int | None = None) -> None:
        self.source, self.rank = source, rank
        self.steps: dict[int | None, int] = {}
        self._file, self._year = file, time.localtime().tm_year  # for times that have none
        self._shapes: dict[bytes, tuple[LineKind, bool]] = {}

    def lines(self, kind_of: Callable[[str], LineKind]) -> Iterator[LogLine]:
        """The lines to look at. Lines that differ in digits only are classified once, unless they speak of errors."""
        timed: bytes | None = None
        for number, raw in raw_lines(self._file):
            key = raw if _digits_matter(raw) else raw.translate(None, b"0123456789")
            known = self._shapes.get(key)
            if known is None:
                text = strip_prefixes(decode(raw))[0]
                known = kind_of(text), has_a_time(decode(raw[:200]))
                self._remember(key, known)
            kind, has_time = known
            if has_time:
                timed = raw
            if not kind:
                continue
            text, rank, node = strip_prefixes(decode(raw))
            rank = self.rank if rank is None else rank
            if kind == "step":
                self.steps[rank] = self.steps.get(rank, 0) + 1
            else:
                seconds = None if timed is None else read_time(decode(timed[:200]), self._year)
                yield LogLine(self.source, number, text, rank, seconds, dict(self.steps), node)

    def _remember(self, key: bytes, known: tuple[LineKind, bool]) -> None:
        if len(self._shapes) >= SHAPES_LIMIT:
            self._shapes.clear()
        if len(key) <= SHAPE_BYTES:
            self._shapes[key] = known


def _digits_matter(raw: bytes) -> bool:
    return b"rror" in raw or b"code" in raw or b"ignal" in raw or b"ERR" in raw


_RANK_IN_NAME = re.compile(r"rank[-_]?(\d{1,5})(?!\d)|(?:^|/)(\d{1,5})/(?:stdout|stderr)\.log$")


def rank_in_name(path: Path) -> int | None:
    """The rank that a log's name or folder tells: `...-rank3.log`, torch elastic's `attempt_0/3/stderr.log`."""
    match = _RANK_IN_NAME.search(str(path))
    return int(match[1] or match[2]) if match else None
