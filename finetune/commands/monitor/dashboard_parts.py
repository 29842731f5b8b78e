"""What the monitor's picture is made of: panels side by side, curves, bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from finetune.runs.text_chart import Points, averaged, bar, line_chart, sparkline, value_range


def side_by_side(panels: Sequence[tuple[str | Text, RenderableType, int]], rows: int, frame: box.Box) -> Table:
    """Panels of one height, their widths in proportion to the given shares."""
    grid = Table.grid(expand=True)
    for _, _, share in panels:
        grid.add_column(ratio=share)
    grid.add_row(
        *(
            Panel(
                Fixed(inner, rows), title=title, title_align="left", box=frame, border_style="dim", height=rows + 2,
                padding=(0, 1),
            )
            for title, inner, _ in panels
        )
    )  # fmt: skip
    return grid


@dataclass(frozen=True)
class Fixed:
    """Exactly so many lines of something: cut or filled up."""

    inner: RenderableType
    rows: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self.inner, options.update(height=self.rows), pad=True)[: self.rows]
        for line in [*lines, *[[Segment(" " * options.max_width)]] * (self.rows - len(lines))]:
            yield from line
            yield Segment.line()


@dataclass(frozen=True)
class Chart:
    """A curve with its highest and lowest value and its first and last step, filling the room it is given."""

    points: Points
    form: str
    colour: str
    unicode: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = options.height or 6
        points = averaged(self.points, max(1, options.max_width - 6))
        low, high = (self.form.format(value) for value in value_range(points))
        margin = max(len(low), len(high)) if points else 0
        width = max(1, options.max_width - margin - 1)
        has_axis = rows >= 4
        lines = line_chart(points, width, rows - has_axis, unicode=self.unicode)
        for number, line in enumerate(lines):
            label = {0: high, len(lines) - 1: low}.get(number, "") if self.points else ""
            yield Text.assemble((f"{label:>{margin}} ", "dim"), (line, self.colour))
        if has_axis and self.points:
            first, last = f"{self.points[0][0]:,}", f"{self.points[-1][0]:,}"
            gap = max(1, width - len(first) - len(last))
            yield Text(f"{'':>{margin}} {first}{' ' * gap}{last}", style="dim", no_wrap=True, overflow="crop")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(8, options.max_width)


@dataclass(frozen=True)
class Spark:
    """A sparkline as wide as the column."""

    values: Sequence[float]
    colour: str
    unicode: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = sparkline(self.values, options.max_width, unicode=self.unicode)
        yield Segment(line, Style.parse(self.colour))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)


@dataclass(frozen=True)
class Bar:
    """A share as a bar of the column's width; nothing where that is too narrow to be read.

    `alarming`: whether a share near 1 is a bad sign, as it is of memory, not of a processor.
    """

    share: float
    unicode: bool
    alarming: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        limits = ((0.95, "red"), (0.85, "yellow")) if self.alarming else ()
        colour = next((colour for limit, colour in limits if self.share > limit), "green")
        if options.max_width >= 3:
            yield Text(bar(self.share, options.max_width, unicode=self.unicode), colour)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(0, options.max_width)
