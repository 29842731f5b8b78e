"""Curves and bars out of characters: braille dots (2 x 4 in a cell) where the terminal has them,
else stars.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from finetune.runs.step_table import Points

# Unicode braille patterns: U+2800 plus a bit for each dot, by (row, column) in the cell.
_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-~=+*#"
# Below this many points every one is shown; above it a lone spike does not squeeze the rest of the
# curve flat.
_ROBUST_FROM_POINTS = 20

Curve = Sequence[tuple[float, float]]


def value_range(points: Curve) -> tuple[float, float]:
    """(low, high) to draw: all values, but of many points not a few far outliers. Never empty."""
    values = np.sort(Points.of(points).y)
    if not len(values):
        return 0.0, 1.0
    low, high = float(values[0]), float(values[-1])
    if len(values) >= _ROBUST_FROM_POINTS:
        outliers = len(values) // 50
        near_low, near_high = float(values[outliers]), float(values[-1 - outliers])
        spread = near_high - near_low
        low, high = max(low, near_low - spread / 2), min(high, near_high + spread / 2)
    if high - low <= 1e-9 * max(abs(high), abs(low), 1e-9):
        margin = abs(high) * 0.05 or 0.5
        low, high = low - margin, high + margin
    return low, high


def text_chart(points: Curve, width: int, height: int, *, unicode: bool = True) -> list[str]:
    """`height` lines of `width` characters with the curve through the points, ascending in x, drawn
    to fit.

    Points that share a character are best averaged before (`averaged`): finer is only noise.
    """
    across, up = (2, 4) if unicode else (1, 1)
    columns, rows = width * across, height * up
    low, high = value_range(points)
    used, means = _by_column(Points.of(points), columns)
    shares = (np.clip(means, low, high) - low) / (high - low)
    levels = np.rint(shares * (rows - 1)).astype(np.int64)
    dots = list(zip(used.tolist(), levels.tolist(), strict=True))
    lit = np.zeros((rows, columns), dtype=np.int64)
    for (column, row), (next_column, next_row) in zip(dots, [*dots[1:], *dots[-1:]], strict=True):
        length = max(next_column - column, abs(next_row - row), 1)
        for part in range(length + 1):
            x = column + round((next_column - column) * part / length)
            y = row + round((next_row - row) * part / length)
            lit[rows - 1 - y, x] = 1
    if not unicode:
        return ["".join("*" if dot else " " for dot in line) for line in lit.tolist()]
    cells = lit.reshape(height, up, width, across) * _DOTS[:, None, :]
    codes = cells.sum(axis=(1, 3)).tolist()
    return ["".join(chr(0x2800 + code) if code else " " for code in line) for line in codes]


def averaged(points: Curve, parts: int) -> Points:
    """Return at most `parts` points: the means of the points in `parts` equal intervals of x."""
    points = Points.of(points)
    if len(points) <= parts:
        return points
    first, last = points.x[0], points.x[-1]
    columns, means = _by_column(points, parts)
    return Points(first + (last - first) * columns / max(1, parts - 1), means)


def _by_column(points: Points, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """(columns, means of the values in them), ascending, for columns that have a point."""
    if not points:
        return np.empty(0, dtype=np.int64), np.empty(0)
    first, last = points.x[0], points.x[-1]
    places = np.zeros(len(points), dtype=np.int64)
    if last > first:
        places = np.rint((points.x - first) / (last - first) * (columns - 1)).astype(np.int64)
    counts = np.bincount(places)
    used = np.flatnonzero(counts)
    return used, np.bincount(places, weights=points.y)[used] / counts[used]


def sparkline(values: Sequence[float] | np.ndarray, width: int, *, unicode: bool = True) -> str:
    """Some values as at most `width` blocks of 8 heights; empty without values."""
    blocks = _BLOCKS if unicode else _ASCII_BLOCKS
    values = np.asarray(values, dtype=np.float64)
    means = _by_column(Points(np.arange(len(values)), values), min(width, len(values)))[1].tolist()
    if not means:
        return ""
    low, high = min(means), max(means)
    return "".join(
        blocks[round((mean - low) / (high - low) * 7) if high > low else 3] for mean in means
    )


def bar(share: float, width: int, *, unicode: bool = True) -> str:
    """Return a share from 0 to 1 as a filled part of `width` characters."""
    filled = round(min(max(share, 0.0), 1.0) * width)
    return ("█" if unicode else "#") * filled + ("░" if unicode else ".") * (width - filled)
