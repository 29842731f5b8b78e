"""Charts as inline SVG. `chart.svg.jinja` has the elements, `page.css` the colors (`.series-0`,
`.grid`, ...) for light, dark and print; here are the coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from finetune.plain_text import mask_secrets, plain_lines
from finetune.runs.event_texts import event_text
from finetune.runs.step_table import Points
from finetune.runs.text_chart import Curve, averaged, value_range
from finetune.runtime.language import _

WIDTH, HEIGHT = 480, 230
LEFT, RIGHT, TOP, BOTTOM = 66, 12, 12, 26
FLOOR = HEIGHT - BOTTOM
# A curve with more points becomes means of intervals, on a band from the least to the greatest.
MAX_POINTS = 240


def _clean(value: Any) -> str:
    """Return what a template shows without control characters and secrets; markup as it is."""
    return value if isinstance(value, Markup) else mask_secrets(plain_lines(str(value)))


# Texts of a run are cleaned and escaped wherever a template shows them.
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_clean,
)


@dataclass(frozen=True)
class Series:
    """A curve.

    Attributes:
        marks: draw dots on the points, for few.
        smooth: draw the moving mean strong and the values faint behind it.
    """

    name: str
    points: Curve
    marks: bool = False
    smooth: bool = False


class _Frame:
    """Maps values to coordinates of the picture."""

    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float]) -> None:
        self.x_low, self.x_high = x_range
        if self.x_high <= self.x_low:
            self.x_low, self.x_high = self.x_low - 0.5, self.x_low + 0.5
        self.y_low, self.y_high = y_range

    def shows(self, step: float) -> bool:
        return self.x_low <= step <= self.x_high

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        inside = min(max(value, self.y_low), self.y_high)
        return FLOOR - (inside - self.y_low) / (self.y_high - self.y_low) * (FLOOR - TOP)

    def path(self, points: Curve) -> str:
        return "M" + "L".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round values from low to high: multiples of 1, 2 or 5 times a power of ten; at least
    one.
    """
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    step = next((power * factor for factor in (1, 2, 5) if power * factor >= raw), power * 10)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)] or [low]


def tick_text(value: float) -> str:
    """`12000` -> `12k`; `0.00002` -> `2e-05`."""
    size = abs(value)
    for limit, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit:
            return f"{value / unit:.3g}{letter}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if size >= 1e-4 or size == 0 else f"{value:.0e}"


def line_svg(
    series: Sequence[Series],
    *,
    label: str,
    resumes: Sequence[int] = (),
    events: Sequence[dict[str, Any]] = (),
    zero: bool = False,
) -> str:
    """Draw curves over the steps; "" if no series has a point.

    Args:
        label: describes the picture for those who do not see it.
        resumes: steps at which the run was started again.
        events: `spike` and `nonfinite` events. Of those that share a pixel one is drawn, with the
            texts of the first three.
        zero: whether the scale begins at zero.
    """
    series = [one for one in series if one.points]
    if not series:
        return ""
    first = min(one.points[0][0] for one in series)
    last = max(one.points[-1][0] for one in series)
    frame = _Frame((first, last), frame_range(series, zero=zero))
    marks: dict[tuple[int, str], list[str]] = {}
    for event in events:
        if frame.shows(event["step"]):
            place = round(frame.x(event["step"])), event["event"]
            marks.setdefault(place, []).append(event_text(event))
    return _chart(
        frame=frame,
        label=label,
        curves=[_curve(frame, one) for one in series],
        resumes=list(filter(frame.shows, resumes)),
        marks=marks,
    )


def frame_range(series: Sequence[Series], *, zero: bool = False) -> tuple[float, float]:
    """Return the smallest and largest value that the frame shows; a lone outlier may be outside."""
    values = np.concatenate([Points.of(one.points).y for one in series])
    low, high = value_range(Points(values, values))
    low = 0.0 if zero else low
    margin = (high - low) * 0.06 or 0.5
    return (low if low == 0 else low - margin), high + margin


def _curve(frame: _Frame, one: Series) -> tuple[str, list[tuple[str, str]], Curve]:
    """Return the name, the paths with their classes, and the points that get a dot."""
    paths = []
    points = averaged(one.points, MAX_POINTS)
    is_smoothed = one.smooth and len(one.points) >= 10
    if len(points) < len(one.points):
        paths.append(("band", _band(frame, Points.of(one.points))))
    elif is_smoothed:
        paths.append(("faint", frame.path(points)))
    if is_smoothed:
        # Of the neighbors on both sides, fewer at the ends, so that the curve is not late.
        half = max(3, len(points) // 20) // 2
        near = [points.y[max(0, place - half) : place + half + 1] for place in range(len(points))]
        points = Points(points.x, np.array([values.mean() for values in near]))
    if len(points) > 1:
        paths.append(("line", frame.path(points)))
    return one.name, paths, points if one.marks or len(points) == 1 else ()


def _band(frame: _Frame, points: Points) -> str:
    """Return the area between the smallest and largest value at each pixel; it holds all values."""
    progress = (points.x - points.x[0]) / (points.x[-1] - points.x[0])
    columns = np.floor(progress * (WIDTH - LEFT - RIGHT - 1))
    begins = np.flatnonzero(np.diff(columns, prepend=-1.0))
    above = Points(points.x[begins], np.maximum.reduceat(points.y, begins))
    below = Points(points.x[begins], np.minimum.reduceat(points.y, begins))
    return frame.path([*above, *below[::-1]]) + "Z"


def area_svg(
    names: Sequence[str], columns: Sequence[tuple[float, Sequence[float]]], *, label: str
) -> str:
    """Draw shares that add up to one over the steps, as areas; "" without columns.

    Args:
        names: of the shares, from the bottom.
        columns: steps with their shares.
    """
    if not columns:
        return ""
    x = [step for step, _shares in columns]
    shares = [[0.0, *shares] for _step, shares in columns]
    if len(x) == 1:
        x, shares = [x[0], x[0] + 1], shares * 2
    frame = _Frame((x[0], x[-1]), (0.0, 1.0))
    edges = [Points(np.array(x), edge) for edge in np.cumsum(shares, axis=1).T]
    areas = [
        (name, frame.path([*top, *bottom[::-1]]))
        for name, bottom, top in zip(names, edges, edges[1:], strict=False)
    ]
    return _chart(frame=frame, label=label, areas=areas)


TEMPLATES.globals.update(
    _=_,
    nice_ticks=nice_ticks,
    tick_text=tick_text,
    width=WIDTH,
    height=HEIGHT,
    left=LEFT,
    right=WIDTH - RIGHT,
    top=TOP,
    floor=FLOOR,
)
_chart = TEMPLATES.get_template("chart.svg.jinja").render
