"""The tables of a report."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from finetune.commands.plan.check import compare_memory
from finetune.errors import FinetuneError
from finetune.plain_text import mask_secrets, plain_text
from finetune.runs.event_texts import PREFERENCE_NUMBERS
from finetune.runs.view import RunView, is_finite_number
from finetune.runtime.language import N_, _
from finetune.storage.durable_files import format_bytes

_SECRET_NAME = re.compile(
    r"secret|passw|credential|api_?key|access_?key|private_?key|(^|_)token$", re.IGNORECASE
)
MOST_ROWS = 2000  # of what a run of weeks has without end
# What `plan --check` compares.
_MOST_MEMORY = {
    "host": N_("most memory of a process on the host"),
    "device": N_("most memory of a device"),
}


@dataclass(frozen=True)
class Grid:
    """A table. `numbers` are the columns that are flush right, `change` is the one that shows a
    change for the better or the worse.
    """

    head: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    numbers: Sequence[int] = ()
    change: int | None = None

    def cell_class(self, column: int, cell: str) -> str:
        """The class of a cell in the page."""
        classes = {"-": "better", "↑": "better", "+": "worse", "↓": "worse"}
        return classes.get(cell[0], "") if column == self.change and cell != "+0.0%" else ""


def clock(seconds: float) -> str:
    """Local time of seconds since 1970."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def number(value: Any, form: str = "{:,.0f}") -> str:
    """A number as text; a dash for what is none."""
    return form.format(value) if is_finite_number(value) else "–"


def _mean(values: np.ndarray) -> float | None:
    """Of those that are not NaN; None without any."""
    return float(np.nanmean(values)) if np.isfinite(values).any() else None


def _spent(view: RunView) -> np.ndarray:
    """float64 `(lines,)`: seconds of the steps that each line stands for, evaluation and saving not
    counted.
    """
    return np.diff(view.steps.steps, prepend=0) * view.steps.column("step_seconds")


def seconds_trained(view: RunView) -> float:
    """Time in steps, evaluation and saving not counted."""
    return float(np.nansum(_spent(view)))


def tokens_trained(view: RunView) -> float:
    """Tokens of all steps, to the precision of the log."""
    return float(np.nansum(_spent(view) * view.steps.column("tokens_per_second")))


def evaluation(view: RunView) -> Grid:
    """Validation losses, exact answers and preferences, before the first and after the last
    step.
    """
    losses = [(_("all"), "eval_loss")]
    losses += [(name, f"eval_loss/{name}") for name in view.difficulties]
    losses += [(name, f"eval_source_loss/{name}") for name in view.sources]
    losses.append((_("bits per byte"), "eval_bpb"))
    rows = [_compared(title, view.evaluated(name), "{:.4f}") for title, name in losses]
    # Shares of exact answers, and what a run on preferences compares.
    for name, title, form in (
        ("exact_match", N_("exact match"), "{:.1%}"),
        *PREFERENCE_NUMBERS[:2],
    ):
        rows.append(_compared(_(title), view.evaluated(f"eval_{name}"), form, higher=True))
        for difficulty in view.difficulties:
            points = view.evaluated(f"eval_{name}/{difficulty}")
            rows.append(_compared(f"{_(title)}, {difficulty}", points, form, higher=True))
    head = [_("What"), _("Before"), _("After"), _("Change"), _("Best"), _("at step")]
    return Grid(head, [row for row in rows if row], (1, 2, 3, 4, 5), change=3)


def _compared(
    title: str, points: Sequence[tuple[int, float]], form: str, *, higher: bool = False
) -> list[str]:
    """A row of what was evaluated; empty without points.

    Args:
        higher: higher is better, and the change is in points.
    """
    if not points:
        return []
    (first_step, first), (_step, last) = points[0], points[-1]
    best_step, best = (max if higher else min)(points, key=lambda point: point[1])
    before = form.format(first) + (f" @ {first_step:,}" if first_step else "")
    change = "–"
    if higher and last != first:
        change = ("↑" if last > first else "↓") + form.format(abs(last - first))
    elif not higher and len(points) > 1 and first:
        change = f"{(last - first) / first:+.1%}"
    return [title, before, form.format(last), change, form.format(best), f"{best_step:,}"]


def plan(view: RunView) -> Grid:
    """What the microbatch schedule planned for a step, and what the log says."""
    planned, steps = _planned(view), view.steps
    if not planned:
        return Grid(())
    seconds = steps.column("step_seconds")
    mean, waits = _mean(seconds), steps.column("loader_wait_seconds")
    tokens, samples = (
        number(_mean(steps.column(name) * seconds), "{:,.1f}")
        for name in ("tokens_per_second", "samples_per_second")
    )
    waiting = number(_mean(waits / mean) if mean else None, "{:.1%}")
    rows = [
        [_("tokens per step"), number(planned.get("tokens"), "{:,.1f}"), tokens],
        [_("samples per step"), number(view.start.get("global_batch_size")), samples],
        [_("time per step"), _("not estimated"), number(mean, "{:.3f} s")],
        [_("of it waiting for data"), _("not estimated"), waiting],
        *_memory(view),
    ]
    return Grid([_("What"), _("Planned"), _("Measured")], rows, (1, 2))


def _memory(view: RunView) -> list[list[str]]:
    """Most memory of a process and of a device."""
    try:
        compared = compare_memory(view.source)
    except (FinetuneError, KeyError, ImportError):  # of transformers, for the model's sizes
        # it has not ended, is of an older version, or of a model that cannot be planned for
        return []
    return [
        [_(_MOST_MEMORY[n.name]), format_bytes(n.predicted_bytes), format_bytes(n.measured_bytes)]
        for n in compared
    ]


def microbatches(view: RunView) -> list[tuple[str, str]]:
    """How the samples are laid into microbatches, by the microbatch schedule."""
    planned = _planned(view)
    per_rank = planned.get("rows_per_rank")
    counted = "–"
    if isinstance(per_rank, list) and len(per_rank) == 3:
        fewest, mean, most = (number(count, "{:.4g}") for count in per_rank)
        spread = _("{fewest} to {most}, {mean} on average").format(
            fewest=fewest, mean=mean, most=most
        )
        counted = fewest if fewest == most else spread
    largest = _("{count} tokens").format(count=number(planned.get("heaviest_row_tokens")))
    return [
        (_("microbatches per process and step"), counted),
        (_("packing efficiency"), number(planned.get("fill"), "{:.1%}")),
        (_("imbalance over processes"), number(planned.get("imbalance"), "{:.3f}")),
        (_("largest microbatch"), largest),
        (_("padding, of computed tokens"), number(planned.get("padding_share"), "{:.1%}")),
        (
            _("padding that a padded run would have"),
            number(planned.get("padded_padding_share"), "{:.1%}"),
        ),
    ]


def _planned(view: RunView) -> dict[str, Any]:
    planned = view.start.get("plan")
    return planned if isinstance(planned, dict) else {}


def starts(view: RunView) -> Grid:
    """Every start of the run, and how it ended."""
    rows: list[list[str]] = []
    ends: list[dict[str, Any] | None] = []
    for event in view.events:
        if event["event"] == "start":
            ends.append(None)
        elif event["event"] == "end" and ends and ends[-1] is None:
            ends[-1] = event
    for count, (start, end) in enumerate(zip(view.starts, ends, strict=True), 1):
        reached = view.step if count == len(ends) else None
        ended = _("not recorded")
        if end:
            reached = end.get("step")
            ended = f"{end.get('state')} ({end.get('exit_code')}), {clock(end['time'])}"
        devices = f"{start.get('world_size')} x {start.get('device_type')}, {start.get('dtype')}"
        if start.get("zero_stage"):
            devices += f", ZeRO-{start['zero_stage']}"
        steps = [number(start.get("step")), number(reached)]
        microbatches = str(start.get("rows", "–"))
        rows.append([str(count), clock(start["time"]), *steps, devices, microbatches, ended])
    head = [
        _("No."),
        _("Began"),
        _("From step"),
        _("To step"),
        _("Devices"),
        _("Microbatches"),
        _("Ended"),
    ]
    return Grid(head, rows, (0, 2, 3))


def checkpoints(view: RunView) -> Grid:
    """The checkpoints that were published last."""
    rows = []
    for event in view.events_named("checkpoint")[-MOST_ROWS:]:
        name = str(event.get("name"))
        is_there = bool(re.fullmatch(r"checkpoint-\d+", name)) and (view.source / name).is_dir()
        size_bytes = event.get("size_bytes")
        size = format_bytes(size_bytes) if isinstance(size_bytes, int) else "–"
        there = _("yes") if is_there else _("no, rotated")
        step = number(event.get("step"))
        rows.append([plain_text(name), step, clock(event["time"]), size, there])
    return Grid([_("Name"), _("Step"), _("Saved"), _("Size"), _("There now")], rows, (1, 3))


def samples(view: RunView) -> list[tuple[str, str]]:
    """Beginnings and how the model continued them, of the last sample event."""
    events = view.events_named("sample")
    pairs = events[-1].get("samples") if events else None
    if not isinstance(pairs, list):
        return []
    return [
        (_lines(pair[0]), _lines(pair[1]))
        for pair in pairs
        if isinstance(pair, list) and len(pair) == 2
    ]


def _lines(text: Any) -> str:
    return mask_secrets("\n".join(plain_text(line) for line in str(text).split("\n")))


def environment(view: RunView) -> list[tuple[str, str]]:
    """What the last start ran on."""
    start = view.start
    if not start:
        return []
    rows = [
        (_("device type"), start.get("device_type")),
        (_("processes"), start.get("world_size")),
        (_("number format"), start.get("dtype")),
        (_("ZeRO stage"), start.get("zero_stage")),
        (_("compiled"), start.get("compiled")),
        (_("float8 products"), start.get("fp8")),
        (_("global batch"), start.get("global_batch_size")),
        (
            _("passes over the data"),
            f"{start['passes']:.2f}" if is_finite_number(start.get("passes")) else None,
        ),
    ]
    parameters = start.get("parameters")
    if isinstance(parameters, dict):
        rows += [(_("parameters, trained"), number(parameters.get("trainable")))]
        rows += [(_("parameters, all"), number(parameters.get("total")))]
    versions = start.get("versions")
    rows += sorted(versions.items()) if isinstance(versions, dict) else []
    return [
        (plain_text(str(name)), plain_text(_plain(value)))
        for name, value in rows
        if value is not None
    ]


def flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """(dotted name, text) of every setting; secrets are masked by name and by form."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from flat(f"{path}.{name}" if path else str(name), inner)
        return
    if isinstance(value, list) and any(isinstance(inner, (dict, list)) for inner in value):
        for position, inner in enumerate(value):
            yield from flat(f"{path}[{position}]", inner)
        return
    if not path:
        return
    name = re.sub(r"\[\d+\]$", "", path).rpartition(".")[2]
    text = "–" if value is None else _plain(value)
    if isinstance(value, list):
        text = " ".join(map(_plain, value))
    hidden = _SECRET_NAME.search(name) and value not in (None, "")
    yield plain_text(path), "***" if hidden else mask_secrets(plain_text(text))


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
