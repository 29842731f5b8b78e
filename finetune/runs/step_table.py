"""The lines of trainer_log.jsonl by column. Each value takes 8 bytes, also for a million steps;
dicts would take 2 kB a line.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

RECENT_STEPS = 20
BLOCK_LINES = 1000
# Names that get a column: some per difficulty, and a few more. A log with more is none of ours.
MOST_COLUMNS = 500
_STEP_LIMIT = 1 << 53  # beyond it a float misses whole numbers


class Points(Sequence[tuple[float, float]]):
    """A curve: pairs of a step and a value, ascending.

    Attributes:
        x: `(points,)`: whole numbers where the steps are.
        y: float64 `(points,)`
    """

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x = x
        self.y = y

    @classmethod
    def of(cls, points: Sequence[tuple[float, float]]) -> Points:
        """Make points from pairs; `Points` are returned unchanged."""
        if isinstance(points, Points):
            return points
        x, y = zip(*points, strict=True) if points else ((), ())
        return cls(np.asarray(x), np.asarray(y, dtype=np.float64))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, place: int | slice) -> Any:
        """Return a pair, or `Points` for a slice."""
        if isinstance(place, slice):
            return Points(self.x[place], self.y[place])
        return self.x[place].item(), self.y[place].item()

    def __iter__(self) -> Iterator[tuple[float, float]]:
        return iter(zip(self.x.tolist(), self.y.tolist(), strict=True))

    def above(self, limit: float) -> Points:
        """Return the points with a greater value."""
        return Points(self.x[self.y > limit], self.y[self.y > limit])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # it compares by content


class StepTable:
    """Logged steps, ascending.

    Attributes:
        recent: the last lines as they are, RECENT_STEPS at most.
    """

    def __init__(self, records: Iterable[dict[str, Any]] = ()) -> None:
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT_STEPS)
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}
        self._new: list[dict[str, Any]] = []  # the last lines, which are not in the columns yet
        for record in records:
            self.add(record)

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def last(self) -> dict[str, Any]:
        """The last line; empty before it."""
        return self.recent[-1] if self.recent else {}

    @property
    def steps(self) -> np.ndarray:
        """int64 `(lines,)`"""
        return np.array(self._steps, dtype=np.int64)

    def add(self, record: dict[str, Any]) -> None:
        """Take a line. A step that comes again (a run that went back) takes the place of the first
        and all after it.
        """
        step = record["step"]
        if not -_STEP_LIMIT < step < _STEP_LIMIT:
            return
        if self._steps and self._steps[-1] >= step:
            self._drop_from(bisect_left(self._steps, step))
        self._steps.append(step)
        self.recent.append(record)
        self._new.append(record)
        if len(self._new) == BLOCK_LINES:
            self._fill_columns()

    def _fill_columns(self) -> None:
        """Column by column: one line after the other takes five times as long."""
        before = len(self._steps) - len(self._new)
        for name in dict.fromkeys(name for record in self._new for name in record):
            if name not in self._columns and len(self._columns) < MOST_COLUMNS:
                self._columns[name] = array("d", [math.nan]) * before
        for name, column in self._columns.items():
            values = [record.get(name) for record in self._new]
            column.extend(values if set(map(type, values)) == {float} else map(_number, values))
        self._new.clear()

    def _drop_from(self, place: int) -> None:
        self._fill_columns()
        for _ in range(min(len(self._steps) - place, len(self.recent))):
            self.recent.pop()
        for column in (self._steps, *self._columns.values()):
            del column[place:]

    def column(self, name: str) -> np.ndarray:
        """float64 `(lines,)`: a field of every line, NaN where it is not a finite number."""
        self._fill_columns()
        column = self._columns.get(name)
        values = np.full(len(self), np.nan) if column is None else np.array(column)
        values[np.isinf(values)] = np.nan
        return values

    def points(self, name: str) -> Points:
        """Steps with the finite values of a field."""
        values = self.column(name)
        known = np.isfinite(values)
        return Points(self.steps[known], values[known])


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf
