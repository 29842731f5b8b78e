"""The figures of a report: which curves, from what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from finetune.commands.report.charts import Series, frame_range, line_chart, stacked_chart
from finetune.commands.report.tables import has
from finetune.runs.view import RunView

MIX_COLUMNS = 60
PLANNED_POINTS = 240


@dataclass(frozen=True)
class Chart:
    """A figure: markup made by report_charts, title and the names of its colours."""

    title: str
    svg: Any
    keys: Sequence[str] = ()
    note: str = ""
    areas: bool = False


def curves(view: RunView, words: dict[str, str]) -> list[Chart]:
    """Losses, rates and speed over the steps, as far as the run has them."""
    resumes = [start["step"] for start in view.starts[1:] if isinstance(start.get("step"), int) and start["step"] > 0]

    def chart(title: str, *series: Series, zero: bool = False) -> Chart | None:
        series = tuple(one for one in series if one.points)
        label = f"{title}: " + "; ".join(
            f"{one.name} {one.points[0][1]:.4g} – {one.points[-1][1]:.4g}" for one in series
        )
        svg = line_chart(series, label=label, resumes=resumes, resumed_word=words["resumed"], zero=zero)
        if not svg:
            return None
        notes = [_beyond(series, zero, words), words["resume_note"] if resumes and title == words["loss"] else ""]
        keys = [one.name for one in series] if len(series) > 1 else []
        return Chart(title, _markup(svg), keys, " ".join(filter(None, notes)))

    used = [(step, share * 100) for step, share in view.values("mfu")]
    made = [
        chart(
            words["loss"],
            Series(words["train"], view.values("loss"), smooth=True),
            Series(words["valid"], view.evaluated(), marks=True),
        ),
        chart(words["level_loss"], *(Series(n, _smoothed(view.values(f"loss/{n}"))) for n in view.difficulties)),
        chart(
            words["valid_level_loss"],
            *(Series(name, view.evaluated(f"eval_loss/{name}"), marks=True) for name in view.difficulties),
        ),
        chart(words["bpb"], Series("", view.evaluated("eval_bpb"), marks=True)),
        chart(words["learning_rate"], Series("", view.values("learning_rate")), zero=True),
        chart(words["tokens_per_second"], Series("", view.values("tokens_per_second"), smooth=True), zero=True),
        chart(words["grad_norm"], Series("", view.values("grad_norm"), smooth=True), zero=True),
        chart(words["mfu"], Series("", used, smooth=True), zero=True),
    ]
    return [one for one in made if one is not None]


def _smoothed(points: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """Several curves in one frame are readable only as means over some steps."""
    window = max(1, len(points) // 25)
    chunks = [points[start : start + window] for start in range(0, len(points), window)]
    return [(chunk[len(chunk) // 2][0], sum(y for _, y in chunk) / len(chunk)) for chunk in chunks]


def _beyond(series: Sequence[Series], zero: bool, words: dict[str, str]) -> str:
    high = frame_range(series, zero=zero)[1]
    above = [point for one in series for point in one.points if point[1] > high]
    if not above:
        return ""
    step, highest = max(above, key=lambda point: point[1])
    return words["beyond"].format(count=len(above), highest=f"{highest:.4g}", step=f"{step:,}")


def _markup(svg: str) -> Any:
    from markupsafe import Markup

    return Markup(svg)  # report_charts escapes every text it is given


def mix(view: RunView, words: dict[str, str]) -> list[Chart]:
    """The curriculum over the steps, as planned and as it came."""
    charts = []
    planned = _planned_mix(view)
    if planned:
        names = list(view.stages[0].shares)
        svg = stacked_chart(names, planned, label=words["planned_mix"])
        charts.append(Chart(words["planned_mix"], _markup(svg), names, areas=True))
    measured = _measured_mix(view)
    if measured:
        svg = stacked_chart(view.difficulties, measured, label=words["measured_mix"])
        charts.append(Chart(words["measured_mix"], _markup(svg), view.difficulties, areas=True))
    return charts


def _planned_mix(view: RunView) -> list[tuple[float, list[float]]]:
    """Shares of the samples by the schedule: (step, share by difficulty). Each step has them rounded to whole samples."""
    total = view.total_steps
    if not (view.stages and total):
        return []

    from finetune.batching.curriculum import Schedule, Stage

    curriculum = view.config["curriculum"]
    made = [Stage(each["until"], tuple(each["mix"]), each.get("ramp", "step")) for each in curriculum["stages"]]
    schedule = Schedule(tuple(curriculum["levels"]), tuple(made))
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
    columns = []
    for first, last in _spans(len(view.steps)):
        part = view.steps[first:last]
        sums = [sum(r[f"tokens/{n}"] for r in part if has(r, f"tokens/{n}")) for n in view.difficulties]
        if sum(sums):
            shares = [tokens / sum(sums) for tokens in sums]
            columns += [(float(part[0]["step"]), shares), (float(part[-1]["step"]), shares)]
    return columns


def _spans(count: int) -> list[tuple[int, int]]:
    parts = min(MIX_COLUMNS, count)
    return [(number * count // parts, (number + 1) * count // parts) for number in range(parts)]
