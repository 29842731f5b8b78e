"""Charts as inline SVG. Colours come from the page's style (`.series-0`, `.grid`, ...): light, dark
and print.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from finetune.runs.step_table import Points
from finetune.runs.text_chart import Curve, averaged, value_range
from finetune.runtime.language import _

WIDTH, HEIGHT = 480, 230
LEFT, RIGHT, TOP, BOTTOM = 66, 12, 12, 26
# drawn as they are; more become means of intervals, with the span between least and greatest
MOST_POINTS = 240
MOST_TEXTS = 3  # of marks on one pixel
SERIES_COLOURS = 6


@dataclass(frozen=True)
class Series:
    """One curve."""

    name: str
    points: Curve
    marks: bool = False  # dots on the points, for few
    smooth: bool = False  # draw the moving mean strong and the values faint behind it


@dataclass(frozen=True)
class Mark:
    """A step to point at: the name of its event, `spike` or `nonfinite`, and what is said of it."""

    step: int
    kind: str
    text: str


class _Frame:
    """Where values lie in the picture."""

    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float]) -> None:
        self.x_low, self.x_high = (
            x_range if x_range[1] > x_range[0] else (x_range[0] - 0.5, x_range[0] + 0.5)
        )
        self.y_low, self.y_high = y_range

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (min(max(value, self.y_low), self.y_high) - self.y_low) / (self.y_high - self.y_low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def path(self, points: Curve) -> str:
        return "M" + "L".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round values from low to high: multiples of 1, 2 or 5 times a power of ten; at least one."""
    raw = (high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    step = next((power * factor for factor in (1, 2, 5, 10) if power * factor >= raw), power * 10)
    first = math.ceil(low / step - 1e-9)
    ticks = [(first + n) * step for n in range(int((high - first * step) / step + 1e-9) + 1)]
    return ticks or [low]


def tick_text(value: float) -> str:
    """`12000` -> `12k`; `0.00002` -> `2e-05`."""
    size = abs(value)
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (limit if letter != 'k' else 1e3):.3g}{letter}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if size >= 1e-4 or size == 0 else f"{value:.0e}"


def line_svg(
    series: Sequence[Series],
    *,
    label: str,
    resumes: Sequence[int] = (),
    marks: Sequence[Mark] = (),
    zero: bool = False,
) -> str:
    """Curves over the steps; "" where no series has a point.

    Args:
        label: what the picture shows, for those who do not see it.
        resumes: steps at which the run was started again.
        marks: steps to point at; of those that share a pixel one is drawn, with the texts of some.
        zero: whether the scale begins at zero.
    """
    series = [one for one in series if one.points]
    if not series:
        return ""
    ends = [one.points[place][0] for one in series for place in (0, -1)]
    frame = _Frame((min(ends), max(ends)), frame_range(series, zero=zero))
    body = [_grid(frame), _resume_marks(frame, resumes)]
    for number, one in enumerate(series):
        body.append(_curve(frame, one, number % SERIES_COLOURS))
    return _svg(label, [*body, _marks(frame, marks)])


def frame_range(series: Sequence[Series], *, zero: bool = False) -> tuple[float, float]:
    """The least and the greatest value that the frame shows; a lone outlier may lie beyond."""
    values = np.concatenate([Points.of(one.points).y for one in series])
    low, high = value_range(Points(values, values))
    low = 0.0 if zero else low
    margin = (high - low) * 0.06 or 0.5
    return (low if low == 0 else low - margin), high + margin


def _curve(frame: _Frame, one: Series, number: int) -> str:
    parts = []
    points = averaged(one.points, MOST_POINTS)
    is_smoothed = one.smooth and len(one.points) >= 10
    if len(points) < len(one.points):
        parts.append(
            f'<path class="band series-{number}" d="{_band(frame, Points.of(one.points))}"/>'
        )
    elif is_smoothed:
        parts.append(f'<path class="faint series-{number}" d="{frame.path(points)}"/>')
    if is_smoothed:
        points = _moving_mean(points, max(3, len(points) // 20))
    if len(points) > 1:
        parts.append(f'<path class="line series-{number}" d="{frame.path(points)}"/>')
    if one.marks or len(points) == 1:
        parts += [
            f'<circle class="dot series-{number}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}"'
            f' r="3.5"><title>{escape(one.name)} {y:.5g} @ {x:,.0f}</title></circle>'
            for x, y in points
        ]
    return "".join(parts)


def _moving_mean(points: Points, window: int) -> Points:
    """The mean of each value and its neighbours on both sides (fewer at the ends), so that the
    curve is not late.
    """
    half = window // 2
    near = [points.y[max(0, number - half) : number + half + 1] for number in range(len(points))]
    return Points(points.x, np.array([values.mean() for values in near]))


def _band(frame: _Frame, points: Points) -> str:
    """The area between least and greatest value of each pixel's width: no value is left out of
    it.
    """
    columns = np.floor(
        (points.x - points.x[0]) / (points.x[-1] - points.x[0]) * (WIDTH - LEFT - RIGHT - 1)
    )
    begins = np.flatnonzero(np.diff(columns, prepend=-1.0))
    above = Points(points.x[begins], np.maximum.reduceat(points.y, begins))
    below = Points(points.x[begins][::-1], np.minimum.reduceat(points.y, begins)[::-1])
    return frame.path([*above, *below]) + "Z"


def _marks(frame: _Frame, marks: Sequence[Mark]) -> str:
    """A triangle at the top for a spike, a line at the bottom for a step that was skipped."""
    drawn: dict[tuple[int, str], list[str]] = {}
    for mark in marks:
        if frame.x_low <= mark.step <= frame.x_high:
            drawn.setdefault((round(frame.x(mark.step)), mark.kind), []).append(mark.text)
    forms = {"spike": "M{x},{top}l-4,-7h8z", "nonfinite": "M{x},{floor}v-12"}
    return "".join(
        f'<path class="{kind}" d="{forms[kind].format(x=x, top=TOP + 4, floor=HEIGHT - BOTTOM)}">'
        f"<title>{escape('; '.join(texts[:MOST_TEXTS]))}</title></path>"
        for (x, kind), texts in drawn.items()
    )


def area_svg(
    names: Sequence[str], columns: Sequence[tuple[float, Sequence[float]]], *, label: str
) -> str:
    """Shares that add up to one over the steps, as areas: the first name at the bottom; "" without
    columns.
    """
    if not columns:
        return ""
    wide = [*columns, (columns[-1][0] + 1, columns[-1][1])] if len(columns) == 1 else list(columns)
    frame = _Frame((wide[0][0], wide[-1][0]), (0.0, 1.0))
    body = []
    bottom = [0.0] * len(wide)
    for number, name in enumerate(names):
        top = [low + shares[number] for low, (_x, shares) in zip(bottom, wide, strict=True)]
        edge = [(x, y) for (x, _shares), y in zip(wide, top, strict=True)]
        back = [(x, y) for (x, _shares), y in zip(reversed(wide), reversed(bottom), strict=True)]
        colour = number % SERIES_COLOURS
        body.append(
            f'<path class="area series-{colour}"'
            f' d="{frame.path([*edge, *back])}Z"><title>{escape(name)}</title></path>'
        )
        bottom = top
    body.append(_grid(frame, form=lambda value: f"{value:.0%}"))
    return _svg(label, body)


def _grid(frame: _Frame, form: Callable[[float], str] = tick_text) -> str:
    right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for value in nice_ticks(frame.y_low, frame.y_high, 4):
        y = frame.y(value)
        parts.append(f'<path class="grid" d="M{LEFT},{y:.1f}H{right}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 7}" y="{y + 4:.1f}"'
            f' text-anchor="end">{form(value)}</text>'
        )
    for value in nice_ticks(frame.x_low, frame.x_high, 5):
        if float(value).is_integer():
            x, anchor = frame.x(value), "end" if frame.x(value) > right - 14 else "middle"
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{floor + 17}"'
                f' text-anchor="{anchor}">{value:,.0f}</text>'
            )
    parts.append(f'<path class="axis" d="M{LEFT},{floor}H{right}"/>')
    return "".join(parts)


def _resume_marks(frame: _Frame, steps: Sequence[int]) -> str:
    floor, title = HEIGHT - BOTTOM, escape(_("started again after step"))
    return "".join(
        f'<path class="resume" d="M{frame.x(step):.1f},{TOP}V{floor}"><title>{title}'
        f" {step:,}</title></path>"
        for step in steps
        if frame.x_low <= step <= frame.x_high
    )


def _svg(label: str, body: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}" '
        f'preserveAspectRatio="xMidYMid meet">{"".join(body)}</svg>'
    )
