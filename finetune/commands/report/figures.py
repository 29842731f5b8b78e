"""The figures of a report: which curves, from what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from finetune.batching.curriculum import Schedule, Stage
from finetune.commands.report.charts import Mark, Series, area_svg, frame_range, line_svg
from finetune.plain_text import plain_text
from finetune.runs.event_texts import PREFERENCE_NUMBERS, event_text
from finetune.runs.step_table import Points
from finetune.runs.view import RunView
from finetune.runtime.language import _

MIX_COLUMNS = 60
PLANNED_POINTS = 240


@dataclass(frozen=True)
class Figure:
    """A chart with its title, the names of its colours, and a note below."""

    title: str
    svg: Markup
    keys: Sequence[str] = ()
    note: str = ""
    areas: bool = False


def curves(view: RunView) -> list[Figure]:
    """Losses, rates and speed over the steps, as far as the run has them."""
    starts = [start.get("step") for start in view.starts[1:]]
    resumes = [step for step in starts if isinstance(step, int) and step > 0]
    used, marks, notes = view.values("mfu"), _marks(view), []
    if marks:
        text = _("Red: spikes at the top ({spikes}), skipped steps at the bottom ({skipped}).")
        spikes = sum(mark.kind == "spike" for mark in marks)
        notes.append(text.format(spikes=spikes, skipped=len(marks) - spikes))
    if resumes:
        notes.append(_("Dashed: the run was started again."))

    def trained(field: str, names: Sequence[str]) -> list[Series]:
        return [Series(name, _smoothed(view.values(f"{field}/{name}"))) for name in names]

    def evaluated(field: str, names: Sequence[str]) -> list[Series]:
        return [Series(name, view.evaluated(f"{field}/{name}"), marks=True) for name in names]

    def both(field: str) -> list[Series]:
        return [
            Series(_("training"), view.values(field), smooth=True),
            Series(_("validation"), view.evaluated(f"eval_{field}"), marks=True),
        ]

    def alone(points: Points, smooth: bool = True) -> list[Series]:
        return [Series("", points, smooth=smooth)]

    exact = Series(_("all"), view.evaluated("eval_exact_match"), marks=True)
    difficulties, sources = view.difficulties, view.sources
    # Each with whether its scale begins at zero.
    pictures = [
        (_("Loss by difficulty"), trained("loss", difficulties), False),
        (_("Validation loss by difficulty"), evaluated("eval_loss", difficulties), False),
        (
            _("Exact match of generated answers"),
            [exact, *evaluated("eval_exact_match", difficulties)],
            True,
        ),
        *((_(name).capitalize(), both(field), False) for field, name, _form in PREFERENCE_NUMBERS),
        (_("Loss by source"), trained("source_loss", sources), False),
        (_("Validation loss by source"), evaluated("eval_source_loss", sources), False),
        (
            _("Validation bits per byte"),
            [Series("", view.evaluated("eval_bpb"), marks=True)],
            False,
        ),
        (_("Learning rate"), alone(view.values("learning_rate"), smooth=False), True),
        (_("Tokens per second"), alone(view.values("tokens_per_second")), True),
        (_("Gradient norm"), alone(view.values("grad_norm")), True),
        (_("Model FLOPs utilisation (MFU), %"), alone(Points(used.x, used.y * 100)), True),
    ]
    loss = _figure(_("Loss per trained token"), both("loss"), False, resumes, marks, notes)
    figures = [loss, *(_figure(*picture, resumes) for picture in pictures)]
    return [figure for figure in figures if figure is not None]


def _figure(
    title: str,
    series: Sequence[Series],
    zero: bool,
    resumes: Sequence[int],
    marks: Sequence[Mark] = (),
    notes: Sequence[str] = (),
) -> Figure | None:
    """None where no series has a point."""
    series = [one for one in series if one.points]
    if not series:
        return None
    ends = [f"{one.name} {one.points[0][1]:.4g} – {one.points[-1][1]:.4g}" for one in series]
    label = f"{title}: {'; '.join(ends)}"
    svg = line_svg(series, label=label, resumes=resumes, marks=marks, zero=zero)
    keys = [one.name for one in series] if len(series) > 1 else []
    return Figure(title, Markup(svg), keys, " ".join([*_beyond(series, zero), *notes]))


def _marks(view: RunView) -> list[Mark]:
    """Every spike, and every step that was skipped: neither may be lost among many steps."""
    return [
        Mark(event["step"], event["event"], plain_text(event_text(event)))
        for event in view.standing("spike", "nonfinite")
    ]


def _smoothed(points: Points) -> Points:
    """Several curves in one frame are readable only as means over some steps."""
    parts = len(points) // max(1, len(points) // 25)
    # of one size: a short last one would jump
    ends = [number * len(points) // parts for number in range(1, parts + 1)]
    chunks = [points[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return Points.of([(chunk[len(chunk) // 2][0], float(chunk.y.mean())) for chunk in chunks])


def _beyond(series: Sequence[Series], zero: bool) -> list[str]:
    high = frame_range(series, zero=zero)[1]
    above = [point for one in series for point in Points.of(one.points).above(high)]
    if not above:
        return []
    step, highest = max(above, key=lambda point: point[1])
    text = _("Beyond the frame: {count}, the highest {highest} at step {step}.")
    return [text.format(count=len(above), highest=f"{highest:.4g}", step=f"{step:,}")]


def mix(view: RunView) -> list[Figure]:
    """The curriculum over the steps, as planned and as it came."""
    stages = view.stages
    charts = (
        (_("Samples, as planned"), list(stages[0].shares) if stages else [], _planned_mix(view)),
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
    total = view.total_steps
    if not (view.stages and total):
        return []
    curriculum = view.config["curriculum"]
    stages = [
        Stage(each["until"], tuple(each["mix"]), each.get("ramp", "step"))
        for each in curriculum["stages"]
    ]
    schedule = Schedule(tuple(curriculum["levels"]), tuple(stages))
    points = []
    for number in range(PLANNED_POINTS):
        shares = schedule.weights((number + 0.5) / PLANNED_POINTS).tolist()
        ends = (number / PLANNED_POINTS * total, (number + 1) / PLANNED_POINTS * total)
        points += [(end, shares) for end in ends]
    inner = zip(points, points[1:], points[2:], strict=False)
    corners = [point for before, point, after in inner if not before[1] == point[1] == after[1]]
    return [points[0], *corners, points[-1]]


def _measured_mix(view: RunView) -> list[tuple[float, list[float]]]:
    """Shares of the trained tokens over the run, by the log: (step, share by difficulty)."""
    steps = view.steps.steps
    tokens = [np.nan_to_num(view.steps.column(f"tokens/{name}")) for name in view.difficulties]
    columns, parts = [], min(MIX_COLUMNS, len(steps))
    for part in range(parts):
        first, last = part * len(steps) // parts, (part + 1) * len(steps) // parts
        sums = [float(counts[first:last].sum()) for counts in tokens]
        if total := sum(sums):
            shares = [count / total for count in sums]
            columns += [(float(steps[first]), shares), (float(steps[last - 1]), shares)]
    return columns
