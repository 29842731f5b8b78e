"""`python -m finetune clean [RUN]`: list what recorded runs left on this machine and, with `--yes`,
end and remove it.

Only what a run recorded and what is proved to be it (leftovers.py). No process is looked for by its
name, and no cache is touched.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import textwrap
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from finetune.commands.clean.leftovers import Orphan, Stale, StaleArtifact, clean, find_stale
from finetune.config.fields import PathOption, setting
from finetune.config.options import SpokenOptions, read_options
from finetune.errors import ExitCode
from finetune.plain_text import plain_text
from finetune.runs.console_lines import print_anything
from finetune.runtime.language import N_, _
from finetune.storage.durable_files import format_bytes

# A worker whose launcher died saves a checkpoint. A worker that hangs ends by itself after 60 s or
# a few of its steps (parent_watchdog.py). A second signal before that would cost it the steps since
# its last checkpoint.
WAIT_SECONDS = 65.0
COMMAND_CHARACTERS = 200  # of a process's command line that people are shown

# kind of an artifact -> its line.
_ARTIFACTS = {
    "checkpoint": N_("{path}  {size}, a save that was not finished"),
    "shared_memory": N_("{path}  {size}, shared memory of a run"),
}

# ---------------------------------------------------------------- what is shown


def _outcome(problem: str | None, done: str) -> str:
    """Return how cleaning went; "" before."""
    if problem is None:
        return ""
    not_done = _("NOT done")
    return f"  [{not_done}: {plain_text(problem)}]" if problem else f"  [{done}]"


def _process_lines(orphans: Sequence[Orphan]) -> Iterator[str]:
    for orphan in orphans:
        line = _("process {pid}  {role}{rank} of {run}, started {started}; its launcher is gone")
        facts = orphan.facts
        rank = "" if facts["rank"] is None else f" {facts['rank']}"
        command = textwrap.shorten(facts["command"], COMMAND_CHARACTERS, placeholder=" ...")
        outcome = _outcome(orphan.problem, _("ended"))
        yield plain_text(f"{line.format(**facts | {'rank': rank})}: {command}") + outcome


def _lines(stale: Stale, is_dry_run: bool) -> Iterator[str]:
    """Yield a line for each thing; after cleaning with how it went."""
    yield from _process_lines(stale.orphans)
    for artifact in stale.files:
        line = _(_ARTIFACTS[artifact.kind])
        line = line.format(path=artifact.path, size=format_bytes(artifact.size_bytes))
        yield plain_text(line) + _outcome(artifact.problem, _("removed"))
    for left in stale.left_alone:
        if "pid" in left:
            line = _("process {pid}  left alone: {why}").format(**left)
        else:
            run = left.get("run") or left["file"]
            line = _("{run}  left alone: {why}").format(run=run, why=left["why"])
        yield plain_text(line)
    if not stale.orphans and not stale.files:
        yield _("nothing is left of {count} run(s) and launches").format(count=len(stale.runs))
    elif is_dry_run:
        yield _("nothing was changed; --yes ends and removes what is listed")


def to_json(stale: Stale, is_dry_run: bool) -> dict[str, Any]:
    """Return JSON-serializable values; the form is public (tests/frozen/clean.txt)."""

    def state(item: Orphan | StaleArtifact) -> dict[str, Any]:
        return {"done": item.problem == "", "problem": item.problem or None}

    return {
        "host": socket.gethostname(),
        "runs": [str(run) for run in stale.runs],
        "dry_run": is_dry_run,
        "processes": [each.facts | state(each) for each in stale.orphans],
        "files": [
            {
                "kind": each.kind,
                "path": str(each.path),
                "size_bytes": each.size_bytes,
                **state(each),
            }
            for each in stale.files
        ],
        "left_alone": stale.left_alone,
    }


# ---------------------------------------------------------------- command

option = partial(setting, group="options")


class CleanOptions(SpokenOptions):
    usage: ClassVar[str] = "python -m finetune clean [RUN] [--yes] [--wait SECONDS] [--json]"
    summary: ClassVar[str] = (
        "List what runs of this package left on this machine: processes whose launcher is gone,"
        " unfinished\ncheckpoints, shared memory. Only what a run recorded, proved by start time"
        " and owner. Without --yes\nnothing is changed."
    )
    epilog: ClassVar[str] = (
        "Exit code: 0 nothing is left (any more); 1 something is, listed; 2 not a run."
    )
    positional: ClassVar[tuple[str, ...]] = ("run",)

    run: PathOption | None = option(
        None, unit="RUN", shown_default="all in ./runs", description="A run's folder."
    )
    log_dir: PathOption | None = option(
        None,
        unit="FOLDER",
        shown_default="FINETUNE_LOG_DIR, else logs",
        description="Where launches keep their lists of processes.",
    )
    yes: bool = option(False, description="End and remove what is listed.")
    wait: float = option(
        WAIT_SECONDS,
        unit="seconds",
        ge=0,
        description=(
            "How long a process may take to save by itself, and again after SIGTERM, before"
            " SIGKILL."
        ),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """List, or end and remove. 0 nothing is left; 1 something is; 2 refused."""
    options = read_options(CleanOptions, argv)
    print_anything()
    logging.getLogger("finetune").addHandler(logging.NullHandler())
    logs_folder = options.log_dir or Path(os.environ.get("FINETUNE_LOG_DIR") or "logs")
    stale = find_stale(options.run, logs_folder=logs_folder)
    if options.yes:
        if stale.orphans and not options.as_json:
            # before anything is ended
            text = _("waiting up to {seconds:.0f} s for {count} process(es), which may be saving")
            waiting = text.format(seconds=options.wait, count=len(stale.orphans))
            print(
                *_process_lines(stale.orphans),
                waiting,
                sep="\n",
                file=sys.stderr,
                flush=True,
            )
        clean(stale, options.wait)
    if options.as_json:
        report = to_json(stale, not options.yes)
        print(json.dumps(report, ensure_ascii=False, indent=2))
    else:
        print("\n".join(_lines(stale, not options.yes)))
    is_left = any(item.problem != "" for item in (*stale.orphans, *stale.files))
    return int(ExitCode.FAILED if is_left else ExitCode.DONE)
