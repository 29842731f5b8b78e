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
    resumes = [
        start["step"]
        for start in view.starts[1:]
        if isinstance(start.get("step"), int) and start["step"] > 0
    ]

    def figure(
        title: str, *series: Series, marks: Sequence[Mark] = (), zero: bool = False, note: str = ""
    ) -> Figure | None:
        series = tuple(one for one in series if one.points)
        label = f"{title}: " + "; ".join(
            f"{one.name} {one.points[0][1]:.4g} – {one.points[-1][1]:.4g}" for one in series
        )
        svg = line_svg(series, label=label, resumes=resumes, marks=marks, zero=zero)
        if not svg:
            return None
        keys = [one.name for one in series] if len(series) > 1 else []
        return Figure(
            title, Markup(svg), keys, " ".join(filter(None, (_beyond(series, zero), note)))
        )

    used, marks = view.values("mfu"), _marks(view)
    figures = [
        figure(
            _("Loss per trained token"),
            Series(_("training"), view.values("loss"), smooth=True),
            Series(_("validation"), view.evaluated(), marks=True),
            marks=marks,
            note=" ".join(
                filter(
                    None,
                    (_marked(marks), _("Dashed: the run was started again.") if resumes else ""),
                )
            ),
        ),
        figure(
            _("Loss by difficulty"),
            *(Series(n, _smoothed(view.values(f"loss/{n}"))) for n in view.difficulties),
        ),
        figure(
            _("Validation loss by difficulty"),
            *(
                Series(name, view.evaluated(f"eval_loss/{name}"), marks=True)
                for name in view.difficulties
            ),
        ),
        figure(
            _("Exact match of generated answers"),
            Series(_("all"), view.evaluated("eval_exact_match"), marks=True),
            *(
                Series(name, view.evaluated(f"eval_exact_match/{name}"), marks=True)
                for name in view.difficulties
            ),
            zero=True,
        ),
        *(
            figure(
                _(name).capitalize(),
                Series(_("training"), view.values(field), smooth=True),
                Series(_("validation"), view.evaluated(f"eval_{field}"), marks=True),
            )
            for field, name, _form in PREFERENCE_NUMBERS
        ),
        figure(
            _("Loss by source"),
            *(Series(n, _smoothed(view.values(f"source_loss/{n}"))) for n in view.sources),
        ),
        figure(
            _("Validation loss by source"),
            *(
                Series(name, view.evaluated(f"eval_source_loss/{name}"), marks=True)
                for name in view.sources
            ),
        ),
        figure(_("Validation bits per byte"), Series("", view.evaluated("eval_bpb"), marks=True)),
        figure(_("Learning rate"), Series("", view.values("learning_rate")), zero=True),
        figure(
            _("Tokens per second"),
            Series("", view.values("tokens_per_second"), smooth=True),
            zero=True,
        ),
        figure(_("Gradient norm"), Series("", view.values("grad_norm"), smooth=True), zero=True),
        figure(
            _("Model FLOPs utilisation (MFU), %"),
            Series("", Points(used.x, used.y * 100), smooth=True),
            zero=True,
        ),
    ]
    return [one for one in figures if one is not None]


def _marks(view: RunView) -> list[Mark]:
    """Every spike, and every step that was skipped: neither may be lost among many steps."""
    return [
        Mark(event["step"], event["event"], plain_text(event_text(event)))
        for event in view.standing("spike", "nonfinite")
    ]


def _marked(marks: Sequence[Mark]) -> str:
    spikes = sum(mark.kind == "spike" for mark in marks)
    if not marks:
        return ""
    return _("Red: spikes at the top ({spikes}), skipped steps at the bottom ({skipped}).").format(
        spikes=spikes, skipped=len(marks) - spikes
    )


def _smoothed(points: Points) -> Points:
    """Several curves in one frame are readable only as means over some steps."""
    parts = len(points) // max(1, len(points) // 25)
    # of one size: a short last one would jump
    ends = [number * len(points) // parts for number in range(1, parts + 1)]
    chunks = [points[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return Points.of([(chunk[len(chunk) // 2][0], float(chunk.y.mean())) for chunk in chunks])


def _beyond(series: Sequence[Series], zero: bool) -> str:
    high = frame_range(series, zero=zero)[1]
    above = [point for one in series for point in Points.of(one.points).above(high)]
    if not above:
        return ""
    step, highest = max(above, key=lambda point: point[1])
    return _("Beyond the frame: {count}, the highest {highest} at step {step}.").format(
        count=len(above), highest=f"{highest:.4g}", step=f"{step:,}"
    )


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
    columns = []
    for first, last in _spans(len(steps)):
        sums = [float(of_one[first:last].sum()) for of_one in tokens]
        if sum(sums):
            shares = [count / sum(sums) for count in sums]
            columns += [(float(steps[first]), shares), (float(steps[last - 1]), shares)]
    return columns


def _spans(count: int) -> list[tuple[int, int]]:
    parts = min(MIX_COLUMNS, count)
    return [(number * count // parts, (number + 1) * count // parts) for number in range(parts)]
