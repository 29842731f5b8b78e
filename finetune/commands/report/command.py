"""`python -m finetune report RUN`: one HTML file about a run, complete in itself: no network, no scripts."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.commands.diagnose.findings import mask_secrets
from finetune.commands.monitor.texts import WORDS as MONITOR_WORDS
from finetune.commands.monitor.texts import format_duration, way_on
from finetune.commands.report.figures import curves, mix
from finetune.commands.report.page import render_page
from finetune.commands.report.tables import (
    checkpoints,
    clock,
    environment,
    evaluation,
    flat,
    number,
    plan,
    rows_planned,
    samples,
    seconds_trained,
    starts,
    tokens_trained,
)
from finetune.commands.report.words import WORDS
from finetune.config.kinds import kind_names, kind_title, run_kind
from finetune.errors import ConfigError, ExitCode, StateError
from finetune.runs.console_lines import plain_text, print_anything
from finetune.runs.event_texts import WARNING_EVENTS, event_text
from finetune.runs.reader import open_run
from finetune.runs.view import RunView
from finetune.runtime.language import Language, pick_language, speaking
from finetune.storage.durable_files import format_bytes, replace_file
from finetune.version import __version__

MOST_EVENTS = 2000


def build_report(view: RunView, language: Language) -> str:
    """The page about a run."""
    words = WORDS[language]
    facts = {
        "name": plain_text(view.source.resolve().name),
        "state": view.state,
        "state_text": MONITOR_WORDS[language][view.state],
        "about": _about(view, language),
        "error": mask_secrets(plain_text(str(view.status.get("error") or ""))) or way_on(view, language),
        "tiles": _tiles(view, words),
        "curves": curves(view, words),
        "mix": mix(view, words),
        "evaluation": evaluation(view, words),
        "plan": plan(view, words),
        "rows": rows_planned(view, words),
        "warnings": [_message_row(view, message, language) for message in view.messages[-MOST_EVENTS:]],
        "starts": starts(view, words),
        "checkpoints": checkpoints(view, words),
        "samples": samples(view),
        "environment": environment(view, words),
        "config": list(flat("", view.config)),
        "events": [
            (clock(event["time"]), _text(event, language), "warning" if event["event"] in WARNING_EVENTS else "")
            for event in view.events[-MOST_EVENTS:]
        ],
        "footer": words["footer"].format(version=__version__, time=clock(time.time())),
    }
    return render_page(facts, language)


# ---------------------------------------------------------------- words and numbers


def _text(event: dict[str, Any], language: Language) -> str:
    if event["event"] == "sample":  # its texts have a place of their own
        event = {"event": "sample", "step": event.get("step")}
    return mask_secrets(plain_text(event_text(event, language)))


def _message_row(view: RunView, message: Any, language: Language) -> tuple[str, str, str]:
    text = message.text if message.event is None else _text(message.event, language)
    rank = f"rank {message.rank}: " if message.rank else ""
    at = clock(message.time) if message.time is not None else ""
    return at, rank + mask_secrets(plain_text(text)), "bad" if message.level == "ERROR" else "warning"


def _about(view: RunView, language: Language) -> str:
    config = view.config
    with speaking(language):
        parts = [kind_title(view.kind)] if view.kind else []
        if view.kind in kind_names() and (described := run_kind(view.kind).describe(config)):
            parts.append(described)
    times = [event["time"] for event in view.events]
    if times:
        parts.append(f"{clock(min(times))} – {clock(max(times))}")
    return mask_secrets(plain_text(" · ".join(map(str, parts))))


def _tiles(view: RunView, words: dict[str, str]) -> list[tuple[str, str, str]]:
    tiles = [
        (words["steps"], f"{view.step:,}", words["of_steps"].format(total=number(view.total_steps)))
        if view.total_steps
        else (words["steps"], f"{view.step:,}", "")
    ]
    losses, evaluated = view.values("loss"), view.evaluated()
    if losses:
        tiles.append(
            (words["last_loss"], f"{losses[-1][1]:.4f}", words["first_was"].format(first=f"{losses[0][1]:.4f}"))
        )
    if evaluated:
        before = words["from_before"].format(before=f"{evaluated[0][1]:.4f}") if evaluated[0][0] == 0 else ""
        tiles.append((words["valid_loss"], f"{evaluated[-1][1]:.4f}", before if len(evaluated) > 1 else ""))
    speeds = [speed for _, speed in view.values("tokens_per_second")]
    if speeds:
        tiles.append((words["speed"], f"{statistics.median(speeds):,.0f}", words["middle"]))
    if seconds := seconds_trained(view):
        tiles.append((words["time"], format_duration(seconds), words["without"]))
    if tokens := tokens_trained(view):
        tiles.append((words["tokens"], _short(tokens), ""))
    used = [share for _, share in view.values("mfu")]
    if used:
        tiles.append((words["mfu_tile"], f"{statistics.median(used):.1%}", words["middle"]))
    return tiles


def _short(count: float) -> str:
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if count >= limit:
            return f"{count / (limit if letter != 'k' else 1e3):.3g}{letter}"
    return f"{count:,.0f}"


# ---------------------------------------------------------------- command


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report. 0; 2: not a run, or the file cannot be written."""
    parser = argparse.ArgumentParser(
        prog="python -m finetune report",
        description="Write one HTML file about a run: curves, curriculum, evaluation before and after, plan against "
        "measurement, checkpoints, environment, configuration, events. It needs no network and runs no script.",
        epilog="Exit code: 0; 2 there is no such run, or the file cannot be written.",
    )
    parser.add_argument("run", metavar="RUN", help="the run's folder (its --output-dir)")
    parser.add_argument("--output", metavar="FILE", type=Path, help="the file to write (default RUN/report.html)")
    parser.add_argument("--lang", metavar="en|zh", help="language (default: the locale's)")
    parser.add_argument("--json", action="store_true", help="say where the report is as a JSON object")
    options = parser.parse_args(argv)
    language = pick_language(options.lang)
    print_anything()
    view = open_run(options.run).poll()
    if not (view.events or view.steps or view.config):
        raise StateError("nothing has been logged yet", where=options.run, fix="start the run, then ask again")
    output = options.output or Path(options.run) / "report.html"
    try:
        if output.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        replace_file(output, build_report(view, language).encode())
    except OSError as error:
        raise ConfigError(
            f"the report cannot be written: {error.strerror or error}", str(output), "name another --output FILE"
        ) from error
    size_bytes = output.stat().st_size
    if options.json:
        print(json.dumps({"run": options.run, "report": str(output), "size_bytes": size_bytes}, ensure_ascii=False))
    else:
        print(f"{output}  {format_bytes(size_bytes)}")
    return int(ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main())
