"""What the dashboard is made of: curves, bars, tables. Each fits the room it is given, without
Unicode too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from finetune.runs.step_table import Points
from finetune.runs.text_chart import averaged, bar, sparkline, text_chart, value_range


class _Stretching:
    """As wide as there is room, and as narrow as need be."""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(0, options.max_width)


@dataclass(frozen=True)
class Curve(_Stretching):
    """A curve with its highest and lowest value and its first and last step."""

    points: Points
    form: str
    colour: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = options.height or 6
        points = averaged(self.points, max(1, options.max_width - 6))
        low, high = (self.form.format(value) for value in value_range(points))
        margin = max(len(low), len(high)) if points else 0
        width = max(1, options.max_width - margin - 1)
        has_axis = rows >= 4
        lines = text_chart(points, width, rows - has_axis, unicode=not options.ascii_only)
        for number, line in enumerate(lines):
            label = {0: high, len(lines) - 1: low}.get(number, "") if self.points else ""
            yield Text.assemble((f"{label:>{margin}} ", "dim"), (line, self.colour))
        if has_axis and self.points:
            first, last = f"{self.points[0][0]:,}", f"{self.points[-1][0]:,}"
            gap = max(1, width - len(first) - len(last))
            yield Text(
                f"{'':>{margin}} {first}{' ' * gap}{last}",
                style="dim",
                no_wrap=True,
                overflow="crop",
            )


@dataclass(frozen=True)
class Sparkline(_Stretching):
    """The course of some values in one line."""

    values: Sequence[float] | np.ndarray
    colour: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(
            sparkline(self.values, options.max_width, unicode=not options.ascii_only), self.colour
        )


@dataclass(frozen=True)
class Gauge(_Stretching):
    """A share as a bar; nothing where that is too narrow to be read.

    `alarming`: whether a share near 1 is a bad sign, as it is of memory, not of a processor.
    """

    share: float
    alarming: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        limits = ((0.95, "red"), (0.85, "yellow")) if self.alarming else ()
        colour = next((colour for limit, colour in limits if self.share > limit), "green")
        if options.max_width >= 3:
            yield Text(bar(self.share, options.max_width, unicode=not options.ascii_only), colour)


@dataclass(frozen=True)
class Progress(_Stretching):
    """The part of the run that is done, as a thin line."""

    share: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        done, left = "#." if options.ascii_only else "━─"
        filled = round(min(self.share, 1.0) * options.max_width)
        yield Text.assemble((done * filled, "cyan"), (left * (options.max_width - filled), "dim"))


def grid(
    rows: Sequence[Sequence[RenderableType]], *, stretching: int, right: Sequence[int] = ()
) -> Table:
    """A table without lines; each row is one line on the screen.

    Args:
        rows: cells of each, as many in every row. Of a line that is too long the right end is cut.
        stretching: the column that gets the room that is left, and gives way first.
        right: columns that are flush right.
    """
    table = Table.grid(padding=(0, 1), expand=True)
    for column, cells in enumerate(zip(*rows, strict=True)):
        is_last = column == len(rows[0]) - 1
        whole = (
            None if is_last or column == stretching else max(cell_len(str(cell)) for cell in cells)
        )
        justify: JustifyMethod = "right" if column in right else "left"
        table.add_column(
            no_wrap=True,
            justify=justify,
            min_width=whole,
            ratio=1 if column == stretching else None,
        )
    for row in rows:
        table.add_row(*row)
    return table


def one_line(text: Text) -> Text:
    """A text that is cut rather than wrapped."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def fact(name: str, value: str) -> Text:
    """A value with its name before it."""
    return Text.assemble((f"{name} ", "dim"), value)
