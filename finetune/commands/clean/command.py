"""`python -m finetune clean [RUN]`: what recorded runs left on this machine, and, with `--yes`, an
end to it.

Only what a run recorded and what is proved to be it (recorded_processes.py, stale_artifacts.py). No
process is looked for by its name, and no cache is touched.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import psutil

from finetune.commands.clean.recorded_processes import (
    RecordedProcess,
    find,
    is_orphan,
    records_of_launches,
    records_of_run,
    send_signal,
)
from finetune.commands.clean.stale_artifacts import (
    SHARED_MEMORY_FOLDER,
    StaleArtifact,
    dead_shared_memory,
    operator_locks,
    remove,
    shared_memory_of,
    unfinished_checkpoints,
)
from finetune.config.fields import PathOption, setting
from finetune.config.options import SpokenOptions, read_options
from finetune.errors import ExitCode, FinetuneError, StateError
from finetune.plain_text import plain_text
from finetune.runs.console_lines import print_anything
from finetune.runs.reader import is_run, runs_in
from finetune.runtime.language import N_, _
from finetune.storage.durable_files import format_bytes

# A worker whose launcher died saves, and one that hangs ends by itself after 60 s or a few of its
# steps (parent_watchdog.py): a second signal before that would cost it the steps since its last
# checkpoint.
WAIT_SECONDS = 65.0
KILL_WAIT_SECONDS = 10.0
POLL_SECONDS = 0.1
COMMAND_CHARACTERS = 200  # of a process's command line that people are shown

# kind of an artifact -> its line.
_ARTIFACTS = {
    "checkpoint": N_("{path}  {size}, a save that was not finished"),
    "shared_memory": N_("{path}  {size}, shared memory of a run"),
    "operator_lock": N_(
        "{path}  a lock that a killed process left; builds wait for it without end"
    ),
}


@dataclass
class Stale:
    """What is left of runs, and what is not touched."""

    runs: list[Path]  # the run folders that were looked at
    # living processes whose launcher is gone
    orphans: list[RecordedProcess] = field(default_factory=list)
    # of each of them, by process id, for people
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    files: list[StaleArtifact] = field(default_factory=list)  # what may be removed
    left_alone: list[dict[str, Any]] = field(default_factory=list)  # (fields that name it, why)


@dataclass(frozen=True)
class Cleaned:
    """By process id and by path: "" where it is gone, else why it is still there."""

    processes: Mapping[int, str]
    files: Mapping[Path, str]

    @property
    def failures(self) -> list[str]:
        return [why for why in (*self.processes.values(), *self.files.values()) if why]


def find_stale(
    run: Path | None,
    *,
    runs_folder: Path = Path("runs"),
    logs_folder: Path = Path("logs"),
    shared_memory_folder: Path = SHARED_MEMORY_FOLDER,
) -> Stale:
    """What is left of a run, or of all in `runs_folder` and all launches in `logs_folder`. Changes
    nothing.

    Raises:
        StateError: the folder is not a run's.
    """
    if run is not None and not (run.is_dir() and is_run(run)):
        what = "is not a run: it holds no file of a run" if run.is_dir() else "is not a folder"
        raise StateError(
            f"{str(run)!a} {what}",
            fix="give the --output-dir of a run, or nothing for all in ./runs",
        )
    runs = runs_in(runs_folder) if run is None else [run]
    refused: dict[Path, str] = {}
    launches = records_of_launches([logs_folder, *(each / "logs" for each in runs)], run, refused)
    known = {os.path.realpath(each) for each in runs}
    runs += sorted(
        {r.run for r in launches if os.path.realpath(r.run) not in known and is_run(r.run)}
    )
    records = [*launches, *(record for each in runs for record in records_of_run(each))]
    stale = Stale(runs)
    _add_processes(stale, records, launches)
    stale.left_alone += [{"file": str(path), "why": why} for path, why in refused.items()]
    stale.files += shared_memory_of([record.pid for record in stale.orphans], shared_memory_folder)
    stale.files += dead_shared_memory(records, shared_memory_folder)
    for each in runs:
        files, why = unfinished_checkpoints(each)
        stale.files += files
        if why:
            stale.left_alone.append({"run": str(each), "why": why})
    if run is None:
        stale.files += operator_locks()
    return stale


def _add_processes(
    stale: Stale, records: Iterable[RecordedProcess], launches: Sequence[RecordedProcess]
) -> None:
    """A process of several records is listed once, and not as left alone where one of them proves
    it.
    """
    proved: set[int] = set()
    doubts: dict[int, str] = {}
    for record in records:
        process, why = find(record)
        if process is None:
            if why:
                doubts.setdefault(record.pid, why)
        elif record.pid not in proved:
            proved.add(record.pid)
            with contextlib.suppress(psutil.NoSuchProcess):  # it ends just now
                if is_orphan(record, process, launches):
                    stale.facts[record.pid] = _facts(record, process)
                    stale.orphans.append(record)
    stale.left_alone += [
        {"pid": pid, "why": why} for pid, why in sorted(doubts.items()) if pid not in proved
    ]


def _facts(record: RecordedProcess, process: psutil.Process) -> dict[str, Any]:
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(process.create_time()))
    facts = {"pid": record.pid, "role": record.role, "rank": record.rank, "run": str(record.run)}
    return {**facts, "started": began, "command": shlex.join(process.cmdline())}


# ---------------------------------------------------------------- ending and removing


def end(orphans: Sequence[RecordedProcess], wait_seconds: float) -> dict[int, bool]:
    """End processes: wait for them to save and go, then SIGTERM, then SIGKILL. Process id ->
    whether it is gone.
    """
    processes = {record.pid: find(record)[0] for record in orphans}
    stages = (
        (None, wait_seconds),
        (signal.SIGTERM, wait_seconds),
        (signal.SIGKILL, KILL_WAIT_SECONDS),
    )
    for number, seconds in stages:
        living = [record for record in orphans if _lives(processes[record.pid])]
        for record in living:
            if number is not None:
                send_signal(record, number)
        deadline = time.monotonic() + (seconds if living else 0)
        while (
            any(_lives(processes[record.pid]) for record in living) and time.monotonic() < deadline
        ):
            time.sleep(POLL_SECONDS)
    return {pid: not _lives(process) for pid, process in processes.items()}


def _lives(process: psutil.Process | None) -> bool:
    """By id and start time: the command line of a process that is just ending is gone already."""
    try:
        return (
            process is not None
            and process.is_running()
            and process.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.NoSuchProcess:
        return False


def clean(stale: Stale, wait_seconds: float) -> Cleaned:
    """End and remove what was found."""
    gone = end(stale.orphans, wait_seconds)
    files: dict[Path, str] = {}
    for artifact in stale.files:
        try:
            files[artifact.path] = "" if remove(artifact) else "it is in use now"
        except FinetuneError as error:
            files[artifact.path] = error.what
        except OSError as error:
            files[artifact.path] = error.strerror or str(error)
    return Cleaned(
        {pid: "" if is_gone else "it did not end" for pid, is_gone in gone.items()}, files
    )


# ---------------------------------------------------------------- what is shown


def _outcome(why: str | None, done: str) -> str:
    """How it went; "" before."""
    if why is None:
        return ""
    not_done = _("NOT done")
    return f"  [{done}]" if not why else f"  [{not_done}: {plain_text(why)}]"


def _process_lines(stale: Stale, cleaned: Cleaned | None) -> Iterator[str]:
    for record in stale.orphans:
        line = _("process {pid}  {role}{rank} of {run}, started {started}; its launcher is gone")
        facts = stale.facts[record.pid]
        shown = textwrap.shorten(facts["command"], COMMAND_CHARACTERS, placeholder=" ...")
        rank = "" if record.rank is None else f" {record.rank}"
        why = None if cleaned is None else cleaned.processes.get(record.pid)
        yield plain_text(f"{line.format(**facts | {'rank': rank})}: {shown}") + _outcome(
            why, _("ended")
        )


def _lines(stale: Stale, cleaned: Cleaned | None) -> Iterator[str]:
    """A line for each thing; after cleaning with how it went."""
    yield from _process_lines(stale, cleaned)
    for artifact in stale.files:
        line = _(_ARTIFACTS[artifact.kind]).format(
            path=artifact.path, size=format_bytes(artifact.size_bytes)
        )
        why = None if cleaned is None else cleaned.files.get(artifact.path)
        yield plain_text(line) + _outcome(why, _("removed"))
    for left in stale.left_alone:
        line = (
            _("process {pid}  left alone: {why}")
            if "pid" in left
            else _("{run}  left alone: {why}")
        )
        yield plain_text(
            line.format(**left if "file" not in left else left | {"run": left["file"]})
        )
    if not stale.orphans and not stale.files:
        yield _("nothing is left of {count} run(s) and launches").format(count=len(stale.runs))
    elif cleaned is None:
        yield _("nothing was changed; --yes ends and removes what is listed")


def to_json(stale: Stale, cleaned: Cleaned | None) -> dict[str, Any]:
    """Plain values; the form is public (tests/frozen/clean.txt)."""
    done = cleaned or Cleaned({}, {})

    def state(problem: str | None) -> dict[str, Any]:
        return {"done": problem == "", "problem": problem or None}

    return {
        "host": socket.gethostname(),
        "runs": [str(run) for run in stale.runs],
        "dry_run": cleaned is None,
        "processes": [
            {**stale.facts[r.pid], **state(done.processes.get(r.pid))} for r in stale.orphans
        ],
        "files": [
            {
                "kind": a.kind,
                "path": str(a.path),
                "size_bytes": a.size_bytes,
                **state(done.files.get(a.path)),
            }
            for a in stale.files
        ],
        "left_alone": stale.left_alone,
    }


# ---------------------------------------------------------------- command

option = partial(setting, group="options")


class CleanOptions(SpokenOptions):
    usage: ClassVar[str] = "python -m finetune clean [RUN] [--yes] [--wait SECONDS] [--json]"
    summary: ClassVar[str] = (
        "List what runs of this package left on this machine: processes whose launcher is gone,"
        " unfinished\ncheckpoints, shared memory, locks of operator builds. Only what a run"
        " recorded, proved by start time,\ncommand and owner. Without --yes nothing is changed."
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
    stale = find_stale(
        options.run,
        logs_folder=options.log_dir or Path(os.environ.get("FINETUNE_LOG_DIR") or "logs"),
    )
    cleaned = None
    if options.yes:
        if stale.orphans and not options.as_json:
            # before anything is ended
            print("\n".join(_process_lines(stale, None)), file=sys.stderr)
            waiting = _(
                "waiting up to {seconds:.0f} s for {count} process(es), which may be saving"
            )
            print(
                waiting.format(seconds=options.wait, count=len(stale.orphans)),
                file=sys.stderr,
                flush=True,
            )
        cleaned = clean(stale, options.wait)
    if options.as_json:
        print(json.dumps(to_json(stale, cleaned), ensure_ascii=False, indent=2))
    else:
        print("\n".join(_lines(stale, cleaned)))
    left = [*stale.orphans, *stale.files] if cleaned is None else cleaned.failures
    return int(ExitCode.FAILED if left else ExitCode.DONE)
