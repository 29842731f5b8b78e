"""`python -m finetune report RUN`: one HTML file about a run, complete in itself: no network, no
scripts.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from markupsafe import Markup

from finetune.commands.report import tables
from finetune.commands.report.charts import TEMPLATES, tick_text
from finetune.commands.report.figures import curves, mix
from finetune.config.fields import PathOption, Text, setting
from finetune.config.kinds import KINDS
from finetune.config.options import SpokenOptions, read_options
from finetune.errors import ConfigError, ExitCode, StateError
from finetune.runs.console_lines import print_anything
from finetune.runs.event_texts import (
    WARNING_EVENTS,
    advice,
    event_text,
    format_duration,
    ranked_text,
    state_text,
)
from finetune.runs.reader import open_run
from finetune.runs.view import Message, RunView
from finetune.runtime.language import _, spoken
from finetune.storage.durable_files import format_bytes, replace_file
from finetune.version import __version__

option = partial(setting, group="options")


class ReportOptions(SpokenOptions):
    usage: ClassVar[str] = "python -m finetune report RUN [--output FILE] [--json]"
    summary: ClassVar[str] = (
        "Write one HTML file about a run: curves, curriculum, evaluation before and after, plan"
        " against measurement,\ncheckpoints, environment, configuration, events. It needs no"
        " network and runs no script."
    )
    epilog: ClassVar[str] = "Exit code: 0; 2 there is no such run, or the file cannot be written."
    positional: ClassVar[tuple[str, ...]] = ("run",)

    run: Text = option(unit="RUN", description="The run's folder (its --output-dir).")
    output: PathOption | None = option(
        None, unit="FILE", shown_default="RUN/report.html", description="The file to write."
    )


def build_report(view: RunView) -> str:
    """Return the page about a run. Whatever its texts hold, they are escaped; only charts go in as
    markup.
    """
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return TEMPLATES.get_template("page.html.jinja").render(
        html_lang={"zh": "zh-CN"}.get(spoken(), spoken()),
        style=Markup(style),
        style_hash=Markup(f"sha256-{digest}"),
        name=view.source.resolve().name,
        state=view.state,
        state_text=state_text(view),
        about=_about(view),
        error=view.status.get("error") or advice(view),
        tiles=_tiles(view),
        curves=curves(view),
        mix=mix(view),
        evaluation=tables.evaluation(view),
        plan=tables.plan(view),
        microbatches=tables.microbatches(view),
        warnings=[_warning(message) for message in view.messages[-tables.MAX_ROWS :]],
        starts=tables.starts(view),
        checkpoints=tables.checkpoints(view),
        samples=tables.samples(view),
        environment=tables.environment(view),
        config=list(tables.flat("", view.config)),
        events=[_event(event) for event in view.events[-tables.MAX_ROWS :]],
        footer=_(
            "Made by finetune {version} on {time}, from the files of the run folder. Secrets are"
            " masked."
        ).format(version=__version__, time=tables.clock(time.time())),
    )


def _event(event: dict[str, Any]) -> tuple[str, str, str]:
    """Return the time, the text, and the class of the row."""
    row_class = "warning" if event["event"] in WARNING_EVENTS else ""
    at = tables.clock(event["time"])
    if event["event"] == "sample":  # its texts have a section of their own
        event = {"event": "sample", "step": event.get("step")}
    return at, event_text(event), row_class


def _warning(message: Message) -> tuple[str, str, str]:
    at = "" if message.time is None else tables.clock(message.time)
    return at, ranked_text(message), "bad" if message.level == "ERROR" else "warning"


def _about(view: RunView) -> str:
    """What was trained, and when."""
    parts = [view.kind]
    if view.kind in KINDS:
        kind = KINDS[view.kind]
        parts = [_(kind.title), kind.describe(view.config)]
    if view.events:
        parts.append(
            f"{tables.clock(view.events[0]['time'])} – {tables.clock(view.events[-1]['time'])}"
        )
    return " · ".join(filter(None, parts))


def _tiles(view: RunView) -> list[tuple[str, str, str]]:
    """Return name, value and a remark of the numbers at the top."""
    total = view.total_steps
    of_total = _("of {total}").format(total=f"{total:,}") if total else ""
    tiles = [(_("Steps"), f"{view.step:,}", of_total)]
    losses = view.values("loss").y
    if len(losses):
        first = _("first {first}").format(first=f"{losses[0]:.4f}")
        tiles.append((_("Last training loss"), f"{losses[-1]:.4f}", first))
    evaluated = view.evaluated()
    if evaluated:
        before = ""
        if evaluated[0][0] == 0 and len(evaluated) > 1:
            before = _("{before} before training").format(before=f"{evaluated[0][1]:.4f}")
        tiles.append((_("Validation loss"), f"{evaluated[-1][1]:.4f}", before))
    median = _("median")
    speeds = view.values("tokens_per_second").y
    if len(speeds):
        tiles.append((_("Tokens per second"), f"{np.median(speeds):,.0f}", median))
    if seconds := tables.seconds_trained(view):
        without = _("without evaluation and saving")
        tiles.append((_("Training time"), format_duration(seconds), without))
    if tokens := tables.tokens_trained(view):
        tiles.append((_("Tokens"), tick_text(tokens), ""))
    used = view.values("mfu").y
    if len(used):
        tiles.append((_("MFU"), f"{np.median(used):.1%}", median))
    return tiles


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report. 0; 2: not a run, or the file cannot be written."""
    print_anything()
    options = read_options(ReportOptions, argv)
    view = open_run(options.run).poll()
    if not (view.events or view.steps or view.config):
        raise StateError(
            "nothing has been logged yet", where=options.run, fix="start the run, then ask again"
        )
    page = build_report(view)
    output = options.output or Path(options.run) / "report.html"
    try:
        if output.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        replace_file(output, page.encode())
    except OSError as error:
        raise ConfigError(
            f"the report cannot be written: {error.strerror or error}",
            str(output),
            "name another --output FILE",
        ) from error
    size_bytes = output.stat().st_size
    if options.as_json:
        written = {"run": options.run, "report": str(output), "size_bytes": size_bytes}
        print(json.dumps(written, ensure_ascii=False))
    else:
        print(f"{output}  {format_bytes(size_bytes)}")
    return int(ExitCode.DONE)
