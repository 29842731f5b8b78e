"""The figures of a report: which curves, from what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from finetune.commands.report.charts import Series, area_svg, frame_range, line_svg
from finetune.runs.event_texts import PREFERENCE_NUMBERS
from finetune.runs.step_table import Points
from finetune.runs.view import RunView
from finetune.runtime.language import _

MIX_COLUMNS = 60
PLANNED_POINTS = 240


class Figure(NamedTuple):
    """A chart with its title, the names of its colors, and a note below."""

    title: str
    svg: Markup
    keys: Sequence[str] = ()
    note: str = ""
    areas: bool = False


def curves(view: RunView) -> list[Figure]:
    """Losses, rates and speed over the steps, as far as the run has them."""
    starts = [start.get("step") for start in view.starts[1:]]
    resumes = [step for step in starts if isinstance(step, int) and step > 0]
    events = view.standing("spike", "nonfinite")
    notes = []
    if events:
        text = _("Red: spikes at the top ({spikes}), skipped steps at the bottom ({skipped}).")
        spikes = sum(event["event"] == "spike" for event in events)
        notes.append(text.format(spikes=spikes, skipped=len(events) - spikes))
    if resumes:
        notes.append(_("Dashed: the run was started again."))

    def steps(field: str, name: str = "", smooth: bool = True) -> Series:
        return Series(name, view.values(field), smooth=smooth)

    def evaluations(field: str, name: str = "") -> Series:
        return Series(name, view.evaluated(field), marks=True)

    def both(field: str) -> list[Series]:
        return [steps(field, _("training")), evaluations(f"eval_{field}", _("validation"))]

    def mean_steps(field: str, names: Iterable[str]) -> list[Series]:
        return [Series(name, _smoothed(view.values(f"{field}/{name}"))) for name in names]

    def each_evaluation(field: str, names: Iterable[str]) -> list[Series]:
        return [evaluations(f"{field}/{name}", name) for name in names]

    difficulties, sources = view.difficulties, view.sources
    answers = each_evaluation("eval_exact_match", difficulties)
    answers.insert(0, evaluations("eval_exact_match", _("all")))
    used = view.values("mfu")
    figure = partial(_figure, resumes)
    figures = [
        figure(_("Loss per trained token"), both("loss"), events=events, notes=notes),
        figure(_("Loss by difficulty"), mean_steps("loss", difficulties)),
        figure(_("Validation loss by difficulty"), each_evaluation("eval_loss", difficulties)),
        figure(_("Exact match of generated answers"), answers, zero=True),
        *(figure(_(name).capitalize(), both(field)) for field, name, _form in PREFERENCE_NUMBERS),
        figure(_("Loss by source"), mean_steps("source_loss", sources)),
        figure(_("Validation loss by source"), each_evaluation("eval_source_loss", sources)),
        figure(_("Validation bits per byte"), [evaluations("eval_bpb")]),
        figure(_("Learning rate"), [steps("learning_rate", smooth=False)], zero=True),
        figure(_("Tokens per second"), [steps("tokens_per_second")], zero=True),
        figure(_("Gradient norm"), [steps("grad_norm")], zero=True),
        figure(
            _("Model FLOPs utilisation (MFU), %"),
            [Series("", Points(used.x, used.y * 100), smooth=True)],
            zero=True,
        ),
    ]
    return [one for one in figures if one is not None]


def _figure(
    resumes: Sequence[int],
    title: str,
    series: Sequence[Series],
    *,
    zero: bool = False,
    events: Sequence[dict[str, Any]] = (),
    notes: Sequence[str] = (),
) -> Figure | None:
    """Draw curves; None if no series has a point."""
    series = [one for one in series if one.points]
    if not series:
        return None
    ends = [f"{one.name} {one.points[0][1]:.4g} – {one.points[-1][1]:.4g}" for one in series]
    label = f"{title}: {'; '.join(ends)}"
    svg = line_svg(
        series,
        label=label,
        resumes=resumes,
        events=events,
        zero=zero,
    )
    high = frame_range(series, zero=zero)[1]
    above = [point for one in series for point in Points.of(one.points).above(high)]
    if above:
        step, highest = max(above, key=lambda point: point[1])
        text = _("Beyond the frame: {count}, the highest {highest} at step {step}.")
        beyond = text.format(count=len(above), highest=f"{highest:.4g}", step=f"{step:,}")
        notes = [beyond, *notes]
    keys = [one.name for one in series] if len(series) > 1 else []
    return Figure(title, Markup(svg), keys, " ".join(notes))


def _smoothed(points: Points) -> Points:
    """Take means over some steps: several curves in one frame are readable only so."""
    parts = len(points) // max(1, len(points) // 25)
    # Of one size: the mean of a short last part would jump.
    ends = [number * len(points) // parts for number in range(1, parts + 1)]
    chunks = [points[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return Points.of([(chunk[len(chunk) // 2][0], float(chunk.y.mean())) for chunk in chunks])


def mix(view: RunView) -> list[Figure]:
    """Return the curriculum over the steps, as planned and as it came."""
    schedule = view.schedule
    planned_names = schedule.difficulties if schedule else ()
    charts = (
        (_("Samples, as planned"), planned_names, _planned_mix(view)),
        (_("Trained tokens, as measured"), view.difficulties, _measured_mix(view)),
    )
    return [
        Figure(title, Markup(area_svg(names, columns, label=title)), names, areas=True)
        for title, names, columns in charts
        if columns
    ]


def _planned_mix(view: RunView) -> list[tuple[float, list[float]]]:
    """Shares of the samples by the schedule: (step, share by difficulty). A step rounds them to
    whole samples.
    """
    schedule, total = view.schedule, view.total_steps
    if schedule is None or not total:
        return []
    points = []
    for number in range(PLANNED_POINTS):
        shares = schedule.weights((number + 0.5) / PLANNED_POINTS).tolist()
        points.append((number / PLANNED_POINTS * total, shares))
        points.append(((number + 1) / PLANNED_POINTS * total, shares))
    inner = zip(points, points[1:], points[2:], strict=False)
    corners = [point for before, point, after in inner if not before[1] == point[1] == after[1]]
    return [points[0], *corners, points[-1]]


def _measured_mix(view: RunView) -> list[tuple[float, list[float]]]:
    """Shares of the trained tokens over the run, by the log: (step, share by difficulty)."""
    steps = view.steps.steps
    tokens = [np.nan_to_num(view.steps.column(f"tokens/{name}")) for name in view.difficulties]
    parts = min(MIX_COLUMNS, len(steps))
    columns = []
    for part in range(parts):
        first, end = part * len(steps) // parts, (part + 1) * len(steps) // parts
        sums = [float(counts[first:end].sum()) for counts in tokens]
        if total := sum(sums):
            shares = [count / total for count in sums]
            columns += [(float(steps[place]), shares) for place in (first, end - 1)]
    return columns
