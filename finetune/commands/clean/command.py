"""`python -m finetune clean [RUN]`: what recorded runs left behind on this machine, and, with `--yes`, an end to it.

Only what a run recorded and what is proved to be it (recorded_processes.py, leftovers.py). No process is looked for by
its name, and no cache is touched.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.commands.clean.leftovers import (
    SHARED_MEMORY_FOLDER,
    Leftover,
    dead_shared_memory,
    operator_locks,
    remove,
    shared_memory_of,
    unfinished_checkpoints,
)
from finetune.commands.clean.recorded_processes import (
    Record,
    find,
    is_orphan,
    records_of_launches,
    records_of_run,
    send_signal,
)
from finetune.errors import ConfigError, ExitCode, FinetuneError, StateError
from finetune.runs.console_lines import plain_text, print_anything
from finetune.runs.reader import is_run, runs_in
from finetune.runtime.language import Language, Text, pick_language
from finetune.storage.durable_files import format_bytes

if TYPE_CHECKING:
    import psutil

# A worker whose launcher died saves, and is ended by its own watch after 60 s (orphans.py): a second signal before
# that would cost it the steps since its last checkpoint.
WAIT_SECONDS = 65.0
KILL_WAIT_SECONDS = 10.0
POLL_SECONDS = 0.1

TEXT: dict[str, Text] = {
    "process": {
        "en": "process {pid}  {role}{rank} of {run}, started {started}; its launcher is gone",
        "zh": "进程 {pid}  {run} 的 {role}{rank},启动于 {started};其启动器已不在",
    },
    "checkpoint": {"en": "{path}  {size}, a save that was not finished", "zh": "{path}  {size},未完成的保存"},
    "shared_memory": {"en": "{path}  {size}, shared memory of a run", "zh": "{path}  {size},训练留下的共享内存"},
    "operator_lock": {
        "en": "{path}  a lock that a killed process left; builds wait for it without end",
        "zh": "{path}  被杀进程留下的锁;后续编译会一直等待",
    },
    "left_process": {"en": "process {pid}  left alone: {why}", "zh": "进程 {pid}  不处理:{why}"},
    "left_run": {"en": "{run}  left alone: {why}", "zh": "{run}  不处理:{why}"},
    "nothing": {"en": "nothing is left of {count} run(s) and launches", "zh": "{count} 个训练没有任何遗留"},
    "dry": {
        "en": "nothing was changed; --yes ends and removes what is listed",
        "zh": "未作任何改动;加 --yes 才会结束和删除以上各项",
    },
    "waiting": {
        "en": "waiting up to {seconds:.0f} s for {count} process(es), which may be saving",
        "zh": "最多等待 {seconds:.0f} 秒:{count} 个进程可能正在保存",
    },
    "ended": {"en": "ended", "zh": "已结束"},
    "removed": {"en": "removed", "zh": "已删除"},
    "failed": {"en": "NOT done", "zh": "未完成"},
}


@dataclass
class Found:
    """What is left, and what is not touched.

    Attributes:
        runs: the run folders that were looked at.
        orphans: records of living processes whose launcher is gone.
        facts: of each of them, by process id, for people.
        files: what may be removed.
        left_alone: (fields that say what, why).
    """

    runs: list[Path]
    orphans: list[Record] = field(default_factory=list)
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    files: list[Leftover] = field(default_factory=list)
    left_alone: list[dict[str, Any]] = field(default_factory=list)


def look(
    run: Path | None,
    *,
    runs_folder: Path = Path("runs"),
    logs_folder: Path = Path("logs"),
    shared_memory_folder: Path = SHARED_MEMORY_FOLDER,
) -> Found:
    """What is left of a run, or of all in `runs_folder` and all launches in `logs_folder`. Changes nothing.

    Raises:
        StateError: the folder is not a run's.
    """
    if run is not None and not (run.is_dir() and is_run(run)):
        what = "is not a run: it holds no file of a run" if run.is_dir() else "is not a folder"
        raise StateError(f"{str(run)!a} {what}", fix="give the --output-dir of a run, or nothing for all in ./runs")
    runs = runs_in(runs_folder) if run is None else [run]
    launches = records_of_launches([logs_folder, *(each / "logs" for each in runs)], run)
    known = {os.path.realpath(each) for each in runs}
    runs += sorted({r.run for r in launches if os.path.realpath(r.run) not in known and is_run(r.run)})
    records = [*launches, *(record for each in runs for record in records_of_run(each))]
    found = Found(runs)
    _look_at_processes(found, records, launches)
    found.files += shared_memory_of([record.pid for record in found.orphans], shared_memory_folder)
    found.files += dead_shared_memory(records, shared_memory_folder)
    for each in runs:
        files, why = unfinished_checkpoints(each)
        found.files += files
        if why:
            found.left_alone.append({"run": str(each), "why": why})
    if run is None:
        found.files += operator_locks()
    return found


def _look_at_processes(found: Found, records: Iterable[Record], launches: Sequence[Record]) -> None:
    """A process that several records tell of is listed once, and not as left alone where one of them proves it."""
    proved: set[int] = set()
    doubts: dict[int, str] = {}
    for record in records:
        process, why = find(record)
        if process is None:
            if why:
                doubts.setdefault(record.pid, why)
        elif record.pid not in proved:
            proved.add(record.pid)
            if is_orphan(record, process, launches):
                found.orphans.append(record)
                found.facts[record.pid] = _process_facts(record, process.create_time())
    found.left_alone += [{"pid": pid, "why": why} for pid, why in sorted(doubts.items()) if pid not in proved]


# ---------------------------------------------------------------- ending and removing


def end(orphans: Sequence[Record], wait_seconds: float) -> dict[int, bool]:
    """End processes: wait for them to save and go, then SIGTERM, then SIGKILL. Process id -> whether it is gone."""
    processes = {record.pid: find(record)[0] for record in orphans}
    stages = ((None, wait_seconds), (signal.SIGTERM, wait_seconds), (signal.SIGKILL, KILL_WAIT_SECONDS))
    for number, seconds in stages:
        living = [record for record in orphans if _lives(processes[record.pid])]
        for record in living:
            if number is not None:
                send_signal(record, number)
        deadline = time.monotonic() + (seconds if living else 0)
        while any(_lives(processes[record.pid]) for record in living) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    return {pid: not _lives(process) for pid, process in processes.items()}


def _lives(process: psutil.Process | None) -> bool:
    """By id and start time: the command line of a process that is just ending is gone already."""
    import psutil

    try:
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def clean(found: Found, wait_seconds: float) -> tuple[dict[int, str], dict[Path, str]]:
    """End and remove what was found. By process id and by path: "", or why it is still there."""
    gone = end(found.orphans, wait_seconds)
    processes = {pid: "" if is_gone else "it did not end" for pid, is_gone in gone.items()}
    files: dict[Path, str] = {}
    for leftover in found.files:
        try:
            files[leftover.path] = "" if remove(leftover) else "it is in use now"
        except FinetuneError as error:
            files[leftover.path] = error.what
        except OSError as error:
            files[leftover.path] = error.strerror or str(error)
    return processes, files


# ---------------------------------------------------------------- words


def _lines(found: Found, done: tuple[dict[int, str], dict[Path, str]] | None, language: Language) -> Iterable[str]:
    """A line for each thing; with `done` how it went."""

    def outcome(why: str | None, word: str) -> str:
        if why is None:
            return ""
        return f"  [{TEXT[word][language]}]" if not why else f"  [{TEXT['failed'][language]}: {plain_text(why)}]"

    for record in found.orphans:
        facts = found.facts[record.pid]
        text = TEXT["process"][language].format(**facts | {"rank": "" if record.rank is None else f" {record.rank}"})
        yield plain_text(text) + outcome(done and done[0].get(record.pid), "ended")
    for leftover in found.files:
        size = format_bytes(leftover.size_bytes)
        text = plain_text(TEXT[leftover.kind][language].format(path=leftover.path, size=size))
        yield text + outcome(done and done[1].get(leftover.path), "removed")
    for each in found.left_alone:
        yield plain_text(TEXT["left_process" if "pid" in each else "left_run"][language].format(**each))


def _process_facts(record: Record, began: float) -> dict[str, Any]:
    return {
        "pid": record.pid,
        "role": record.role,
        "rank": record.rank,
        "run": str(record.run),
        "started": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began)),
    }


def to_json(found: Found, done: tuple[dict[int, str], dict[Path, str]] | None) -> dict[str, Any]:
    """Plain values; the form is public (tests/frozen/clean.txt)."""

    def state(problem: str | None) -> dict[str, Any]:
        return {"done": problem == "", "problem": problem or None}

    return {
        "host": socket.gethostname(),
        "runs": [str(run) for run in found.runs],
        "dry_run": done is None,
        "processes": [{**found.facts[r.pid], **state(done and done[0].get(r.pid))} for r in found.orphans],
        "files": [
            {
                "kind": leftover.kind,
                "path": str(leftover.path),
                "size_bytes": leftover.size_bytes,
                **state(done and done[1].get(leftover.path)),
            }
            for leftover in found.files
        ],
        "left_alone": found.left_alone,
    }


# ---------------------------------------------------------------- command


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m finetune clean",
        description="List what runs of this package left on this machine: processes whose launcher is gone, unfinished "
        "checkpoints, shared memory, locks of operator builds. Only what a run recorded, proved by start time, command "
        "and owner. Without --yes nothing is changed.",
        epilog="Exit code: 0 nothing is left (any more); 1 something is, listed; 2 not a run.",
    )
    parser.add_argument("run", metavar="RUN", nargs="?", type=Path, help="a run's folder; default: all in ./runs")
    parser.add_argument(
        "--log-dir",
        metavar="FOLDER",
        type=Path,
        default=Path(os.environ.get("FINETUNE_LOG_DIR") or "logs"),
        help="where launches keep their lists of processes (FINETUNE_LOG_DIR, else logs)",
    )
    parser.add_argument("--yes", action="store_true", help="end and remove what is listed")
    parser.add_argument(
        "--wait",
        metavar="SECONDS",
        type=float,
        default=WAIT_SECONDS,
        help="how long a process may take to save by itself, and again after SIGTERM, before SIGKILL (default 65)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--lang", metavar="en|zh", help="language (default: the locale's)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """List, or end and remove. 0 nothing is left; 1 something is; 2 refused."""
    options = _parser().parse_args(argv)
    language = pick_language(options.lang)
    print_anything()
    if not 0 <= options.wait < float("inf"):
        raise ConfigError(f"--wait is {options.wait:g}", where="--wait", fix="give seconds, 0 or more")
    logging.getLogger("finetune").addHandler(logging.NullHandler())
    found = look(options.run, logs_folder=options.log_dir)
    done = None
    if options.yes:
        if found.orphans and not options.json:
            text = TEXT["waiting"][language].format(seconds=options.wait, count=len(found.orphans))
            print(text, file=sys.stderr, flush=True)
        done = clean(found, options.wait)
    if options.json:
        print(json.dumps(to_json(found, done), ensure_ascii=False, indent=2))
    else:
        for line in _lines(found, done, language):
            print(line)
        if not found.orphans and not found.files:
            print(TEXT["nothing"][language].format(count=len(found.runs)))
        elif done is None:
            print(TEXT["dry"][language])
    problems = (
        [*found.orphans, *found.files] if done is None else [why for part in done for why in part.values() if why]
    )
    return int(ExitCode.FAILED if problems else ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main())
