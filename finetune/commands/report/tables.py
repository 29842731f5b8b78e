"""The tables of a report."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from finetune.commands.diagnose.findings import mask_secrets
from finetune.commands.plan.check import check_run
from finetune.errors import FinetuneError
from finetune.runs.console_lines import plain_text
from finetune.runs.view import RunView
from finetune.storage.durable_files import format_bytes

_SECRET_NAME = re.compile(r"secret|passw|credential|api_?key|access_?key|private_?key|(^|_)token$", re.IGNORECASE)


@dataclass(frozen=True)
class Grid:
    """A table. `numbers` are the columns that are flush right; `mood(column, cell)` gives a cell's class."""

    head: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    numbers: Sequence[int] = ()
    mood: Callable[[int, str], str] = lambda column, cell: ""


def clock(seconds: float) -> str:
    """Local time of seconds since 1970."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def number(value: Any, form: str = "{:,.0f}") -> str:
    """A number in words; a dash for what is none."""
    return form.format(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else "–"


def intervals(view: RunView) -> list[tuple[int, dict[str, Any]]]:
    """Each logged line with the number of steps that it stands for."""
    steps = [0, *(record["step"] for record in view.steps)]
    return [(after - before, record) for before, after, record in zip(steps, steps[1:], view.steps, strict=False)]


def seconds_trained(view: RunView) -> float:
    """Time in steps, evaluation and saving not counted."""
    return sum(count * record["step_seconds"] for count, record in intervals(view) if has(record, "step_seconds"))


def tokens_trained(view: RunView) -> float:
    """Tokens of all steps, to the precision of the log."""
    return sum(
        count * record["step_seconds"] * record["tokens_per_second"]
        for count, record in intervals(view)
        if has(record, "step_seconds") and has(record, "tokens_per_second")
    )


def has(record: dict[str, Any], name: str) -> bool:
    """Whether a field is a number."""
    return isinstance(record.get(name), (int, float))


def evaluation(view: RunView, words: dict[str, str]) -> Grid:
    """Validation losses before the first and after the last step."""
    head = [words[n] for n in ("what", "before", "after", "change", "best", "at_step")]
    names = [
        (words["overall"], "eval_loss"),
        *((n, f"eval_loss/{n}") for n in view.difficulties),
        (words["bits"], "eval_bpb"),
    ]
    rows = []
    for title, name in names:
        points = view.evaluated(name)
        if points:
            (first_step, first), (_, last) = points[0], points[-1]
            best_step, best = min(points, key=lambda point: point[1])
            before = f"{first:.4f}" if first_step == 0 else f"{first:.4f} @ {first_step:,}"
            change = f"{(last - first) / first:+.1%}" if len(points) > 1 and first else "–"
            rows.append([title, before, f"{last:.4f}", change, f"{best:.4f}", f"{best_step:,}"])

    def mood(column: int, cell: str) -> str:
        return {"-": "better", "+": "worse"}.get(cell[0], "") if column == 3 and cell not in ("–", "+0.0%") else ""

    return Grid(head, rows, (1, 2, 3, 4, 5), mood)


def plan(view: RunView, words: dict[str, str]) -> Grid:
    """What the execution plan said of a step, and what the log says."""
    planned = _planned(view)
    if not planned:
        return Grid(())
    lines = [record for _, record in intervals(view) if has(record, "step_seconds")]
    seconds = statistics.mean([record["step_seconds"] for record in lines]) if lines else None

    def per_step(name: str) -> str:
        return mean([record[name] * record["step_seconds"] for record in lines if has(record, name)], "{:,.1f}")

    def mean(values: list[float], form: str) -> str:
        return form.format(statistics.mean(values)) if values else "–"

    waits = [record["loader_wait_seconds"] for record in lines if has(record, "loader_wait_seconds")]
    rows = [
        [words["tokens_per_step"], number(planned.get("tokens"), "{:,.1f}"), per_step("tokens_per_second")],
        [words["samples_per_step"], number(view.start.get("global_batch_size")), per_step("samples_per_second")],
        [words["step_time"], words["no_plan"], number(seconds, "{:.3f} s")],
        [words["loader_wait"], words["no_plan"], mean([wait / seconds for wait in waits] if seconds else [], "{:.1%}")],
        *_memory(view, words),
    ]
    return Grid([words["what"], words["planned"], words["measured"]], rows, (1, 2))


def _memory(view: RunView, words: dict[str, str]) -> list[list[str]]:
    """Most memory of a process and of a device: what `plan --check` compares."""
    try:
        compared = check_run(view.source, None).compared
    except (FinetuneError, KeyError):
        return []  # it has not ended, is of an older version, or of a model that cannot be planned for
    return [[words[f"most_{n.name}"], format_bytes(n.predicted), format_bytes(n.measured)] for n in compared]


def rows_planned(view: RunView, words: dict[str, str]) -> list[tuple[str, str]]:
    """How the plan lays the samples into rows."""
    planned = _planned(view)
    per_rank = planned.get("rows_per_rank")
    counted = "–"
    if isinstance(per_rank, list) and len(per_rank) == 3:
        fewest, mean, most = (number(count, "{:.4g}") for count in per_rank)
        counted = fewest if fewest == most else words["rows_range"].format(fewest=fewest, mean=mean, most=most)
    heaviest = words["tokens_unit"].format(count=number(planned.get("heaviest_row_tokens")))
    return [
        (words["rows_per_rank"], counted),
        (words["fill"], number(planned.get("fill"), "{:.1%}")),
        (words["imbalance"], number(planned.get("imbalance"), "{:.3f}")),
        (words["heaviest"], heaviest),
        (words["padding"], number(planned.get("padding_share"), "{:.1%}")),
        (words["padded_padding"], number(planned.get("padded_padding_share"), "{:.1%}")),
    ]


def _planned(view: RunView) -> dict[str, Any]:
    planned = view.start.get("plan")
    return planned if isinstance(planned, dict) else {}


def starts(view: RunView, words: dict[str, str]) -> Grid:
    """Every start of the run, and how it ended."""
    head = [words[n] for n in ("number", "began", "from_step", "to_step", "devices", "rows", "ended")]
    rows: list[list[str]] = []
    for count, start in enumerate(view.starts, 1):
        place = view.events.index(start)
        later = view.events[place + 1 :]
        until = next((n for n, event in enumerate(later) if event["event"] == "start"), len(later))
        end = next((event for event in later[:until] if event["event"] == "end"), None)
        last = count == len(view.starts)
        reached = end.get("step") if end else (view.step if last else None)
        devices = f"{start.get('world_size')} x {start.get('device_type')}, {start.get('dtype')}"
        if start.get("zero_stage"):
            devices += f", ZeRO-{start['zero_stage']}"
        ended = f"{end.get('state')} ({end.get('exit_code')}), {clock(end['time'])}" if end else words["running_still"]
        rows.append(
            [str(count), clock(start["time"]), number(start.get("step")), number(reached), devices]
            + [str(start.get("rows", "–")), ended]
        )
    return Grid(head, rows, (0, 2, 3))


def checkpoints(view: RunView, words: dict[str, str]) -> Grid:
    """Every checkpoint that was published."""
    rows = []
    for event in view.of("checkpoint"):
        name = str(event.get("name"))
        is_there = bool(re.fullmatch(r"checkpoint-\d+", name)) and (view.source / name).is_dir()
        size = format_bytes(event["size_bytes"]) if isinstance(event.get("size_bytes"), int) else "–"
        there = words["yes"] if is_there else words["no"]
        rows.append([plain_text(name), number(event.get("step")), clock(event["time"]), size, there])
    return Grid([words[n] for n in ("name", "step", "saved_at", "size", "there")], rows, (1, 3))


def samples(view: RunView) -> list[tuple[str, str]]:
    """Beginnings and how the model went on, of the last sample event."""
    events = view.of("sample")
    pairs = events[-1].get("samples") if events else None
    if not isinstance(pairs, list):
        return []
    return [(_lines(pair[0]), _lines(pair[1])) for pair in pairs if isinstance(pair, list) and len(pair) == 2]


def _lines(text: Any) -> str:
    return mask_secrets("\n".join(plain_text(line) for line in str(text).split("\n")))


def environment(view: RunView, words: dict[str, str]) -> list[tuple[str, str]]:
    """What the last start ran on."""
    start = view.start
    if not start:
        return []
    rows = [
        (words["device_type"], start.get("device_type")),
        (words["processes"], start.get("world_size")),
        (words["dtype"], start.get("dtype")),
        (words["zero"], start.get("zero_stage")),
        (words["compiled"], start.get("compiled")),
        (words["fp8"], start.get("fp8")),
        (words["global_batch_size"], start.get("global_batch_size")),
        (words["passes"], f"{start['passes']:.2f}" if has(start, "passes") else None),
    ]
    parameters = start.get("parameters")
    if isinstance(parameters, dict):
        rows += [(words["parameters"], number(parameters.get("trainable")))]
        rows += [(words["parameters_total"], number(parameters.get("total")))]
    versions = start.get("versions")
    rows += sorted(versions.items()) if isinstance(versions, dict) else []
    return [(plain_text(str(name)), plain_text(_plain(value))) for name, value in rows if value is not None]


def flat(path: str, value: Any) -> list[tuple[str, str]]:
    """(dotted name, text) of every setting; secrets are masked by name and by form."""
    if isinstance(value, dict) and value:
        return [row for name, inner in value.items() for row in flat(f"{path}.{name}" if path else str(name), inner)]
    if isinstance(value, list) and any(isinstance(inner, (dict, list)) for inner in value):
        return [row for place, inner in enumerate(value) for row in flat(f"{path}[{place}]", inner)]
    if not path:
        return []
    name = re.sub(r"\[\d+\]$", "", path).rpartition(".")[2]
    text = " ".join(map(_plain, value)) if isinstance(value, list) else "–" if value is None else _plain(value)
    hidden = _SECRET_NAME.search(name) and value not in (None, "")
    return [(plain_text(path), "***" if hidden else mask_secrets(plain_text(text)))]


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
