"""Logs as lines: without prefixes and colours, with rank and time, in bounded memory however large the log is."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from finetune.plain_text import plain_lines

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
        steps_before: logged training steps before it in this log.
    """

    source: str
    number: int
    text: str
    rank: int | None
    seconds: float | None
    steps_before: int


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
        steps: logged training steps so far.
    """

    def __init__(self, source: str, file: BinaryIO, *, rank: int | None = None) -> None:
        self.source, self.rank, self.steps = source, rank, 0
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
                known = kind_of(text), _TIMESTAMP.search(decode(raw[:200])) is not None
                self._remember(key, known)
            kind, has_time = known
            if has_time:
                timed = raw
            if kind == "step":
                self.steps += 1
            elif kind == "line":
                text, rank = strip_prefixes(decode(raw))
                seconds = None if timed is None else read_time(decode(timed[:200]), self._year)
                yield LogLine(self.source, number, text, self.rank if rank is None else rank, seconds, self.steps)

    def _remember(self, key: bytes, known: tuple[LineKind, bool]) -> None:
        if len(self._shapes) >= SHAPES_LIMIT:
            self._shapes.clear()
        if len(key) <= SHAPE_BYTES:
            self._shapes[key] = known


def _digits_matter(raw: bytes) -> bool:
    return b"rror" in raw or b"code" in raw or b"ignal" in raw or b"ERR" in raw


# ---------------------------------------------------------------- prefixes

_RANK = r"(?P<rank>\d{1,5})"
_PREFIX = re.compile(
    rf"\[rank{_RANK}\]:\s?"  # torch
    rf"|\[Rank {_RANK.replace('rank', 'rank2')}\] ?"
    rf"|\[(?:default|default_)?{_RANK.replace('rank', 'rank3')}\]:\s?"  # torch elastic's --tee, pdsh
    rf"|{_RANK.replace('rank', 'rank4')}: (?=\S|  )"  # srun --label
    r"|\([\w.<>-]+ pid=\d+(?:, ip=[\d.:a-fA-F]+)?\)\s?"  # ray and others
    rf"|rank {_RANK.replace('rank', 'rank5')}: "  # ours
)
_STAMP = (
    r"(?P<year>20\d\d)[-/](?P<month>\d\d)[-/](?P<day>\d\d)[ T_-](?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
    r"(?:[.,](?P<fraction>\d{1,9})(?:\.(?P<micro>\d{3}))?)?(?:Z|[+-]\d\d:?\d\d)?"
)
_GLOG = r"[IWEFDV](?P<month>\d\d?)(?P<day>\d\d) (?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)\.(?P<fraction>\d{3,9})"
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_SYSLOG = (
    rf"(?P<name>{'|'.join(_MONTHS)}) +(?P<day>\d\d?) (?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
    r"(?: (?P<year>20\d\d))?"
)
_FORMS = tuple(re.compile(rf"(?<![\w.]){form}") for form in (_STAMP, _GLOG, _SYSLOG))
_ANONYMOUS = [re.sub(r"\?P<\w+>", "?:", form) for form in (_STAMP, _GLOG, _SYSLOG)]
_TIMESTAMP = re.compile(rf"(?<![\w.])(?:{'|'.join(_ANONYMOUS)})")
_TIME_PREFIX = re.compile(rf"\[?(?:{_ANONYMOUS[0]}|{_ANONYMOUS[2]})\]?[:,]? ?(?:- )?")


def decode(raw: bytes) -> str:
    """Text without colour codes and whatever else a terminal would obey; what is not UTF-8 is replaced."""
    return plain_lines(raw.decode("utf-8", errors="replace"))


def strip_prefixes(text: str) -> tuple[str, int | None]:
    """The line without what launchers and loggers put before it, and the rank they name."""
    rank = None
    for _ in range(4):
        match = _PREFIX.match(text) or _TIME_PREFIX.match(text)
        if match is None or match.end() == 0:
            break
        named = next((value for name, value in match.groupdict().items() if value and name.startswith("rank")), None)
        rank = int(named) if named is not None else rank
        text = text[match.end() :]
    if rank is None and (named_inside := _RANK_INSIDE.search(text)):
        rank = int(next(filter(None, named_inside.groups())))
    return text, rank


_RANK_INSIDE = re.compile(r"\[(?:[^][]*\b)?Rank (\d{1,5})\b|RankID:(\d{1,5})\b")


def read_time(text: str, year: int) -> float | None:
    """The first time in a line, by the local clock: seconds since the epoch. Offsets from UTC are not looked at."""
    for form in _FORMS:
        if match := form.search(text):
            parts = match.groupdict()
            month = int(parts["month"]) if parts.get("month") else _MONTHS.index(parts["name"]) + 1
            numbers = [int(parts[name]) for name in ("day", "hour", "minute", "second")]
            try:
                seconds = time.mktime((int(parts.get("year") or year), month, *numbers, 0, 0, -1))
            except (OverflowError, ValueError):
                continue
            return seconds + float(f"0.{parts.get('fraction') or 0}")
    return None


_RANK_IN_NAME = re.compile(r"rank[-_]?(\d{1,5})(?!\d)|(?:^|/)(\d{1,5})/(?:stdout|stderr)\.log$")


def rank_in_name(path: Path) -> int | None:
    """The rank that a log's name or folder tells: `...-rank3.log`, torch elastic's `attempt_0/3/stderr.log`."""
    match = _RANK_IN_NAME.search(str(path))
    return int(match[1] or match[2]) if match else None
