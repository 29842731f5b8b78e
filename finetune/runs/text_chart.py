"""Curves and bars out of characters: braille dots (2 x 4 in a cell) where the terminal has them, else stars."""

from __future__ import annotations

from collections.abc import Sequence

# Unicode braille patterns: U+2800 plus a bit for each dot, by (row, column) in the cell.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-~=+*#"
# Below this many points every one is shown; above it a lone spike does not squeeze the rest of the curve flat.
_ROBUST_FROM_POINTS = 20

Points = Sequence[tuple[float, float]]


def value_range(points: Points) -> tuple[float, float]:
    """(low, high) to draw: all values, but of many points not a few far outliers. Never empty."""
    values = sorted(y for _, y in points)
    if not values:
        return 0.0, 1.0
    low, high = values[0], values[-1]
    if len(values) >= _ROBUST_FROM_POINTS:
        near_low, near_high = values[len(values) // 50], values[-1 - len(values) // 50]
        spread = near_high - near_low
        low, high = max(low, near_low - spread / 2), min(high, near_high + spread / 2)
    if high - low <= 1e-9 * max(abs(high), abs(low), 1e-9):
        margin = abs(high) * 0.05 or 0.5
        low, high = low - margin, high + margin
    return low, high


def text_chart(points: Points, width: int, height: int, *, unicode: bool = True) -> list[str]:
    """`height` lines of `width` characters with the curve through the points, ascending in x, drawn to fit.

    Points that share a character are best averaged before (`averaged`): finer is only noise.
    """
    across, up = (2, 4) if unicode else (1, 1)
    columns, rows = width * across, height * up
    lit = [[False] * columns for _ in range(rows)]
    low, high = value_range(points)
    dots = [
        (column, round((min(max(y, low), high) - low) / (high - low) * (rows - 1)))
        for column, y in _by_column(points, columns)
    ]
    for (column, row), (next_column, next_row) in zip(dots, [*dots[1:], *dots[-1:]], strict=True):
        length = max(next_column - column, abs(next_row - row), 1)
        for part in range(length + 1):
            x = column + round((next_column - column) * part / length)
            y = row + round((next_row - row) * part / length)
            lit[rows - 1 - y][x] = True
    return ["".join(_cell(lit, top, left, unicode) for left in range(0, columns, across)) for top in range(0, rows, up)]


def averaged(points: Points, parts: int) -> Points:
    """At most `parts` points: the means of those in each of so many equal intervals of x."""
    if len(points) <= parts:
        return points
    first, last = points[0][0], points[-1][0]
    return [(first + (last - first) * column / max(1, parts - 1), mean) for column, mean in _by_column(points, parts)]


def _by_column(points: Points, columns: int) -> list[tuple[int, float]]:
    """(column, mean of the values in it), ascending, for columns that have a point."""
    if not points:
        return []
    first, last = points[0][0], points[-1][0]
    sums: dict[int, tuple[float, int]] = {}
    for x, y in points:
        column = round((x - first) / (last - first) * (columns - 1)) if last > first else 0
        total, count = sums.get(column, (0.0, 0))
        sums[column] = total + y, count + 1
    return [(column, total / count) for column, (total, count) in sorted(sums.items())]


def _cell(lit: list[list[bool]], top: int, left: int, unicode: bool) -> str:
    if not unicode:
        return "*" if lit[top][left] else " "
    bits = sum(
        bit for row, line in enumerate(_DOTS) for column, bit in enumerate(line) if lit[top + row][left + column]
    )
    return chr(0x2800 + bits) if bits else " "


def sparkline(values: Sequence[float], width: int, *, unicode: bool = True) -> str:
    """Some values as at most `width` blocks of 8 heights; empty without values."""
    blocks = _BLOCKS if unicode else _ASCII_BLOCKS
    means = [mean for _, mean in _by_column(list(enumerate(values)), min(width, len(values)))]
    if not means:
        return ""
    low, high = min(means), max(means)
    return "".join(blocks[round((mean - low) / (high - low) * 7) if high > low else 3] for mean in means)


def bar(share: float, width: int, *, unicode: bool = True) -> str:
    """A share from 0 to 1 as a filled part of `width` characters."""
    filled = round(min(max(share, 0.0), 1.0) * width)
    return ("█" if unicode else "#") * filled + ("░" if unicode else ".") * (width - filled)
