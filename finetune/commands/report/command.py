"""`python -m finetune report RUN`: one HTML file about a run, complete in itself: no network, no
scripts.
"""

from __future__ import annotations

import base64
import hashlib
import json
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from finetune.commands.report import tables
from finetune.commands.report.charts import tick_text
from finetune.commands.report.figures import curves, mix
from finetune.config.fields import PathOption, Text, setting
from finetune.config.kinds import KINDS
from finetune.config.options import SpokenOptions, read_options
from finetune.errors import ConfigError, ExitCode, StateError
from finetune.plain_text import mask_secrets, plain_text
from finetune.runs.console_lines import print_anything
from finetune.runs.event_texts import (
    WARNING_EVENTS,
    advice,
    event_text,
    format_duration,
    message_text,
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
    """The page about a run. Texts of the run are escaped, whatever they hold; only charts go in as
    markup.
    """
    folder = Path(__file__).parent
    style = (folder / "page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.globals["_"] = _
    return environment.from_string((folder / "page.html.jinja").read_text(encoding="utf-8")).render(
        html_lang={"zh": "zh-CN"}.get(spoken(), spoken()),
        style=Markup(style),
        style_hash=Markup(f"sha256-{digest}"),
        name=plain_text(view.source.resolve().name),
        state=view.state,
        state_text=state_text(view),
        about=_about(view),
        error=mask_secrets(plain_text(str(view.status.get("error") or ""))) or advice(view),
        tiles=_tiles(view),
        curves=curves(view),
        mix=mix(view),
        evaluation=tables.evaluation(view),
        plan=tables.plan(view),
        microbatches=tables.microbatches(view),
        warnings=[_warning(message) for message in view.messages[-tables.MOST_ROWS :]],
        starts=tables.starts(view),
        checkpoints=tables.checkpoints(view),
        samples=tables.samples(view),
        environment=tables.environment(view),
        config=list(tables.flat("", view.config)),
        events=[_event(event) for event in view.events[-tables.MOST_ROWS :]],
        footer=_(
            "Made by finetune {version} on {time}, from the files of the run folder. Secrets are"
            " masked."
        ).format(version=__version__, time=tables.clock(time.time())),
    )


# ---------------------------------------------------------------- parts


def _event(event: dict[str, Any]) -> tuple[str, str, str]:
    """Time, text, and the class of the row."""
    # without its texts
    shown = {"event": "sample", "step": event.get("step")} if event["event"] == "sample" else event
    row_class = "warning" if event["event"] in WARNING_EVENTS else ""
    return tables.clock(event["time"]), mask_secrets(plain_text(event_text(shown))), row_class


def _warning(message: Message) -> tuple[str, str, str]:
    at = tables.clock(message.time) if message.time is not None else ""
    text = mask_secrets(message_text(message))
    if message.rank:
        text = f"rank {message.rank}: {text}"
    return at, text, "bad" if message.level == "ERROR" else "warning"


def _about(view: RunView) -> str:
    """What was trained, and when."""
    parts = [view.kind] if view.kind else []
    if view.kind in KINDS:
        kind = KINDS[view.kind]
        parts = [_(kind.title), *filter(None, [kind.describe(view.config)])]
    if view.events:
        first, last = (tables.clock(view.events[place]["time"]) for place in (0, -1))
        parts.append(f"{first} – {last}")
    return mask_secrets(plain_text(" · ".join(map(str, parts))))


def _tiles(view: RunView) -> list[tuple[str, str, str]]:
    """Name, value and a remark, of the numbers that stand at the top."""
    total = view.total_steps
    tiles = [
        (_("Steps"), f"{view.step:,}", _("of {total}").format(total=f"{total:,}") if total else "")
    ]
    losses, evaluated = view.values("loss"), view.evaluated()
    if losses:
        first = _("first {first}").format(first=f"{losses[0][1]:.4f}")
        tiles.append((_("Last training loss"), f"{losses[-1][1]:.4f}", first))
    if evaluated:
        before = _("{before} before training").format(before=f"{evaluated[0][1]:.4f}")
        is_before = evaluated[0][0] == 0 and len(evaluated) > 1
        tiles.append((_("Validation loss"), f"{evaluated[-1][1]:.4f}", before if is_before else ""))
    if speeds := view.values("tokens_per_second").y.tolist():
        tiles.append((_("Tokens per second"), f"{statistics.median(speeds):,.0f}", _("median")))
    if seconds := tables.seconds_trained(view):
        tiles.append(
            (_("Training time"), format_duration(seconds), _("without evaluation and saving"))
        )
    if tokens := tables.tokens_trained(view):
        tiles.append((_("Tokens"), tick_text(tokens), ""))
    if used := view.values("mfu").y.tolist():
        tiles.append((_("MFU"), f"{statistics.median(used):.1%}", _("median")))
    return tiles


# ---------------------------------------------------------------- command


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
        print(
            json.dumps(
                {"run": options.run, "report": str(output), "size_bytes": size_bytes},
                ensure_ascii=False,
            )
        )
    else:
        print(f"{output}  {format_bytes(size_bytes)}")
    return int(ExitCode.DONE)
