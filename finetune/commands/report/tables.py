"""The tables of a report."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from finetune.commands.plan.check import compare_memory
from finetune.errors import FinetuneError
from finetune.runs.event_texts import PREFERENCE_NUMBERS
from finetune.runs.view import RunView, is_finite_number
from finetune.runtime.language import N_, _
from finetune.storage.durable_files import format_bytes

_SECRET_NAME = re.compile(
    r"secret|passw|credential|api_?key|access_?key|private_?key|(^|_)token$", re.IGNORECASE
)
MAX_ROWS = 2000  # of what a run of weeks has without end
# What `plan --check` compares.
_MOST_MEMORY = {
    "host": N_("most memory of a process on the host"),
    "device": N_("most memory of a device"),
}


class Grid(NamedTuple):
    """A table. Columns count from 0.

    Attributes:
        numbers: the columns that are flush right.
        change: the column that shows a change for the better or the worse.
    """

    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    numbers: Sequence[int] = ()
    change: int | None = None


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
    rows: list[list[str]] = []

    def add(title: str, field: str, form: str = "{:.4f}", higher: bool = False) -> None:
        """Add a row if the field was evaluated.

        Args:
            higher: higher is better, and the change is in points.
        """
        points = view.evaluated(field)
        if not points:
            return
        (first_step, first), (_step, last) = points[0], points[-1]
        best = max if higher else min
        best_step, best_value = best(points, key=lambda point: point[1])
        before = form.format(first)
        if first_step:
            before += f" @ {first_step:,}"
        change = "–"
        if higher and last != first:
            change = ("↑" if last > first else "↓") + form.format(abs(last - first))
        elif not higher and len(points) > 1 and first:
            change = f"{(last - first) / first:+.1%}"
        after, best_text = form.format(last), form.format(best_value)
        rows.append([title, before, after, change, best_text, f"{best_step:,}"])

    add(_("all"), "eval_loss")
    for name in view.difficulties:
        add(name, f"eval_loss/{name}")
    for name in view.sources:
        add(name, f"eval_source_loss/{name}")
    add(_("bits per byte"), "eval_bpb")
    # Shares of exact answers, and what a run on preferences compares.
    exact_match = ("exact_match", N_("exact match"), "{:.1%}")
    for field, title, form in (exact_match, *PREFERENCE_NUMBERS[:2]):
        add(_(title), f"eval_{field}", form, higher=True)
        for name in view.difficulties:
            add(f"{_(title)}, {name}", f"eval_{field}/{name}", form, higher=True)
    head = [_("What"), _("Before"), _("After"), _("Change"), _("Best"), _("at step")]
    return Grid(head, rows, numbers=(1, 2, 3, 4, 5), change=3)


def plan(view: RunView) -> Grid:
    """What the microbatch schedule planned for a step, and what the log says."""
    planned, steps = _planned(view), view.steps
    if not planned:
        return Grid()
    seconds = steps.column("step_seconds")
    mean = _mean(seconds)
    tokens = _mean(steps.column("tokens_per_second") * seconds)
    samples = _mean(steps.column("samples_per_second") * seconds)
    waiting = _mean(steps.column("loader_wait_seconds") / mean) if mean else None
    unknown = _("not estimated")
    rows = [
        [_("tokens per step"), number(planned.get("tokens"), "{:,.1f}"), number(tokens, "{:,.1f}")],
        [
            _("samples per step"),
            number(view.start.get("global_batch_size")),
            number(samples, "{:,.1f}"),
        ],
        [_("time per step"), unknown, number(mean, "{:.3f} s")],
        [_("of it waiting for data"), unknown, number(waiting, "{:.1%}")],
        *_memory(view),
    ]
    return Grid([_("What"), _("Planned"), _("Measured")], rows, numbers=(1, 2))


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
        counted, mean, most = (number(count, "{:.4g}") for count in per_rank)
        if counted != most:
            spread = _("{fewest} to {most}, {mean} on average")
            counted = spread.format(fewest=counted, mean=mean, most=most)
    largest = _("{count} tokens").format(count=number(planned.get("heaviest_row_tokens")))
    padded = _("padding that a padded run would have")
    return [
        (_("microbatches per process and step"), counted),
        (_("packing efficiency"), number(planned.get("fill"), "{:.1%}")),
        (_("imbalance over processes"), number(planned.get("imbalance"), "{:.3f}")),
        (_("largest microbatch"), largest),
        (_("padding, of computed tokens"), number(planned.get("padding_share"), "{:.1%}")),
        (padded, number(planned.get("padded_padding_share"), "{:.1%}")),
    ]


def _planned(view: RunView) -> dict[str, Any]:
    planned = view.start.get("plan")
    return planned if isinstance(planned, dict) else {}


def starts(view: RunView) -> Grid:
    """Every start of the run, and how it ended."""
    rows: list[list[str]] = []
    last_start = len(view.starts)
    for event in view.events:
        if event["event"] == "start":
            devices = (
                f"{event.get('world_size')} x {event.get('device_type')}, {event.get('dtype')}"
            )
            if event.get("zero_stage"):
                devices += f", ZeRO-{event['zero_stage']}"
            count = len(rows) + 1
            rows.append(
                [
                    str(count),
                    clock(event["time"]),
                    number(event.get("step")),
                    number(view.step if count == last_start else None),
                    devices,
                    str(event.get("rows", "–")),
                    _("not recorded"),
                ]
            )
        elif event["event"] == "end" and rows and rows[-1][6] == _("not recorded"):
            rows[-1][3] = number(event.get("step"))
            rows[-1][6] = f"{event.get('state')} ({event.get('exit_code')}), {clock(event['time'])}"
    head = [
        _("No."),
        _("Began"),
        _("From step"),
        _("To step"),
        _("Devices"),
        _("Microbatches"),
        _("Ended"),
    ]
    return Grid(head, rows, numbers=(0, 2, 3))


def checkpoints(view: RunView) -> Grid:
    """The checkpoints that were published last."""
    rows = []
    for event in view.events_named("checkpoint")[-MAX_ROWS:]:
        name = str(event.get("name"))
        is_there = re.fullmatch(r"checkpoint-\d+", name) and (view.source / name).is_dir()
        size_bytes = event.get("size_bytes")
        size = format_bytes(size_bytes) if isinstance(size_bytes, int) else "–"
        there = _("yes") if is_there else _("no, rotated")
        rows.append([name, number(event.get("step")), clock(event["time"]), size, there])
    head = [_("Name"), _("Step"), _("Saved"), _("Size"), _("There now")]
    return Grid(head, rows, numbers=(1, 3))


def samples(view: RunView) -> list[list[Any]]:
    """Beginnings and how the model continued them, of the last sample event."""
    pairs = view.last_event("sample").get("samples")
    if not isinstance(pairs, list):
        return []
    return [pair for pair in pairs if isinstance(pair, list) and len(pair) == 2]


def environment(view: RunView) -> list[tuple[str, str]]:
    """What the last start ran on."""
    start = view.start
    passes = start.get("passes")
    rows = [
        (_("device type"), start.get("device_type")),
        (_("processes"), start.get("world_size")),
        (_("number format"), start.get("dtype")),
        (_("ZeRO stage"), start.get("zero_stage")),
        (_("compiled"), start.get("compiled")),
        (_("float8 products"), start.get("fp8")),
        (_("global batch"), start.get("global_batch_size")),
        (_("passes over the data"), f"{passes:.2f}" if is_finite_number(passes) else None),
    ]
    parameters = start.get("parameters")
    if isinstance(parameters, dict):
        rows.append((_("parameters, trained"), number(parameters.get("trainable"))))
        rows.append((_("parameters, all"), number(parameters.get("total"))))
    versions = start.get("versions")
    if isinstance(versions, dict):
        rows += sorted(versions.items())
    return [(name, _plain(value)) for name, value in rows if value is not None]


def flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield (dotted name, text) of every setting; those with the name of a secret are masked."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from flat(f"{path}.{name}" if path else str(name), inner)
    elif isinstance(value, list) and any(isinstance(inner, (dict, list)) for inner in value):
        for position, inner in enumerate(value):
            yield from flat(f"{path}[{position}]", inner)
    elif path:
        name = re.sub(r"\[\d+\]$", "", path).rpartition(".")[2]
        if _SECRET_NAME.search(name) and value not in (None, ""):
            yield path, "***"
        elif isinstance(value, list):
            yield path, " ".join(map(_plain, value))
        else:
            yield path, "–" if value is None else _plain(value)


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
