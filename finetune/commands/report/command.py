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
from typing import ClassVar

import numpy as np
from markupsafe import Markup

from finetune.commands.report import tables
from finetune.commands.report.charts import TEMPLATES
from finetune.commands.report.figures import curves, mix
from finetune.config.fields import PathOption, Text, setting
from finetune.config.kinds import KINDS
from finetune.config.options import SpokenOptions, read_options
from finetune.errors import ConfigError, ExitCode, StateError
from finetune.runs import event_texts
from finetune.runs.console_lines import print_anything
from finetune.runs.reader import open_run
from finetune.runs.view import RunView
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
    """Return the page about a run. All strings are escaped; only charts are inserted as markup."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()

    def median(field: str) -> float | None:
        values = view.values(field).y
        return float(np.median(values)) if len(values) else None

    return TEMPLATES.get_template("page.html.jinja").render(
        html_lang={"zh": "zh-CN"}.get(spoken(), spoken()),
        style=Markup(style),
        style_hash=Markup(f"sha256-{digest}"),
        name=view.source.resolve().name,
        view=view,
        about=_about(view),
        speed=median("tokens_per_second"),
        mfu=median("mfu"),
        curves=curves(view),
        mix=mix(view),
        config=list(tables.flat("", view.config)),
        version=__version__,
        now=time.time(),
        tables=tables,
        texts=event_texts,
    )


def _about(view: RunView) -> str:
    """Return what was trained, and when."""
    parts = [view.kind]
    if view.kind in KINDS:
        kind = KINDS[view.kind]
        parts = [_(kind.title), kind.describe(view.config)]
    if view.events:
        parts.append(
            f"{tables.clock(view.events[0]['time'])} – {tables.clock(view.events[-1]['time'])}"
        )
    return " · ".join(filter(None, parts))


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
        written = {
            "run": options.run,
            "report": str(output),
            "size_bytes": size_bytes,
        }
        print(json.dumps(written, ensure_ascii=False))
    else:
        print(f"{output}  {format_bytes(size_bytes)}")
    return int(ExitCode.DONE)
