"""The tables of a report."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

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


def clock(seconds: float) -> str:
    """Local time of seconds since 1970."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def number(value: Any, form: str = "{:,.0f}") -> str:
    """Return a number as text; a dash for what is none."""
    return form.format(value) if is_finite_number(value) else "–"


def _mean(values: np.ndarray) -> float | None:
    """Return the mean of the values that are not NaN; None if there are none."""
    return float(np.nanmean(values)) if np.isfinite(values).any() else None


def _spent(view: RunView) -> np.ndarray:
    """Return float64 `(lines,)`: seconds of the steps that each line covers.

    Evaluation and saving are not counted.
    """
    return np.diff(view.steps.steps, prepend=0) * view.steps.column("step_seconds")


def seconds_trained(view: RunView) -> float:
    """Time in steps, evaluation and saving not counted."""
    return float(np.nansum(_spent(view)))


def tokens_trained(view: RunView) -> float:
    """Tokens of all steps, to the precision of the log."""
    return float(np.nansum(_spent(view) * view.steps.column("tokens_per_second")))


def evaluation(view: RunView) -> list[list[str]]:
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
    return rows


def planned(view: RunView) -> dict[str, Any]:
    """Return what the microbatch schedule planned for a step; empty if unknown."""
    plan = view.start.get("plan")
    return plan if isinstance(plan, dict) else {}


def measured(view: RunView) -> dict[str, float | None]:
    """Means over the steps of the log."""
    steps = view.steps
    seconds = steps.column("step_seconds")
    mean = _mean(seconds)
    return {
        "tokens": _mean(steps.column("tokens_per_second") * seconds),
        "samples": _mean(steps.column("samples_per_second") * seconds),
        "seconds": mean,
        "waiting": _mean(steps.column("loader_wait_seconds") / mean) if mean else None,
    }


def memory(view: RunView) -> list[list[str]]:
    """Return the peak memory of a process and of a device."""
    try:
        compared = compare_memory(view.source)
    except (FinetuneError, KeyError, ImportError):  # of transformers, for the model's sizes
        # it has not ended, is from an older version, or its model cannot be planned for
        return []
    return [
        [_(_MOST_MEMORY[n.name]), format_bytes(n.predicted_bytes), format_bytes(n.measured_bytes)]
        for n in compared
    ]


def starts(view: RunView) -> list[list[str]]:
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
    return rows


def checkpoints(view: RunView) -> list[list[str]]:
    """Return the checkpoints that were published last."""
    rows = []
    for event in view.events_named("checkpoint")[-MAX_ROWS:]:
        name = str(event.get("name"))
        is_there = re.fullmatch(r"checkpoint-\d+", name) and (view.source / name).is_dir()
        size_bytes = event.get("size_bytes")
        size = format_bytes(size_bytes) if isinstance(size_bytes, int) else "–"
        there = _("yes") if is_there else _("no, rotated")
        rows.append([name, number(event.get("step")), clock(event["time"]), size, there])
    return rows


def samples(view: RunView) -> list[list[Any]]:
    """Beginnings and how the model continued them, of the last sample event."""
    pairs = view.last_event("sample").get("samples")
    if not isinstance(pairs, list):
        return []
    return [pair for pair in pairs if isinstance(pair, list) and len(pair) == 2]


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
            yield path, " ".join(map(_plain, value)) or "–"
        else:
            yield path, "–" if value in (None, "") else _plain(value)


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
