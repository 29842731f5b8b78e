"""What a run folder tells about how its run ended: logs, status, settings, out-of-memory note."""

from __future__ import annotations

import contextlib
import io
import json
import re
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from finetune.commands.diagnose.evidence import LogEvidence
from finetune.commands.diagnose.log_facts import facts_of_config
from finetune.commands.diagnose.log_lines import LogFile
from finetune.commands.diagnose.log_scan import scan_log
from finetune.errors import DataError, StateError
from finetune.storage import durable_files
from finetune.storage.run_folder import STATUS_NAME, describe_folder
from finetune.storage.run_lock import LOCK_NAME, is_held
from finetune.storage.run_log import read_jsonl_tolerant

OUT_OF_MEMORY_NAME = "oom.json"
STEPS_NAME = "trainer_log.jsonl"
# Ranks of one start open their logs within this time: the others wait for rank 0.
START_SECONDS = 600.0
SHOWN_RECORDS = 10
_LOG_NAME = re.compile(r"(\d{8}-\d{6})-\d+-rank\d+\.log$")


class RunFolder:
    """A run folder to be diagnosed.

    Raises:
        DataError: it is not a run's, or cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        fix = "give a log file, or the --output-dir of a run"
        try:
            description = describe_folder(folder)
        except StateError as error:
            raise DataError(error.what, error.where, fix) from error
        if description.kind != "run":
            raise DataError("the folder is not a run's", str(folder), fix)
        self.folder = folder
        self.config: dict[str, Any] = description.config or {}
        self.status: dict[str, Any] = description.status or {}

    def logs(self) -> list[Path]:
        """The logs of the last start, of all ranks; none of a run that is done."""
        if self.status.get("state") == "done":
            return []
        started = {path: _start_time(path) for path in sorted(self.folder.glob("logs/*.log"))}
        last = max(
            (seconds for path, seconds in started.items() if path.name.endswith("-rank0.log")),
            default=0.0,
        )
        return [
            path
            for path, seconds in started.items()
            if seconds >= last and seconds - last < START_SECONDS
        ]

    def evidence(self) -> LogEvidence:
        """What the status says, as if it were a log."""
        state, step, line = self.status.get("state"), self.status.get("step"), ""
        if state == "failed":
            line = f"[ERROR] {self.status.get('error') or 'the run failed'}\n"
        elif state == "stopped":
            line = f"the run was stopped by a signal at step {step}\n"
        elif (
            state == "running"
            and (self.folder / LOCK_NAME).exists()
            and is_held(self.folder) is False
        ):
            step = self._last_step() or step
            line = (
                f"the run's process {self.status.get('pid')} disappeared at or after step {step}\n"
            )
        return scan_log(LogFile(str(self.folder / STATUS_NAME), io.BytesIO(line.encode())))

    def _last_step(self) -> int:
        """Of the log, 0 without one: the status is written at starts, checkpoints and ends only."""
        last: dict[str, Any] = {}
        with contextlib.suppress(OSError, DataError):
            for record in read_jsonl_tolerant(self.folder / STEPS_NAME):
                last = record
        return int(last.get("step", 0))

    def facts(self) -> dict[str, str]:
        """Settings of the run for the text of remedies, and what its out-of-memory note says."""
        facts = facts_of_config(self.config)
        with contextlib.suppress(OSError, ValueError):
            note = json.loads(durable_files.read_bytes(self.folder / OUT_OF_MEMORY_NAME, 1 << 20))
            facts |= {
                f"oom_{name}": str(value) for name, value in note.items() if value is not None
            }
        with contextlib.suppress(OSError, DataError):
            if records := list(islice(self._nonfinite_records(), SHOWN_RECORDS)):
                facts["nonfinite_records"] = ", ".join(records)
        return facts

    def _nonfinite_records(self) -> Iterator[str]:
        for event in read_jsonl_tolerant(self.folder / "events.jsonl"):
            if event.get("event") == "nonfinite":
                yield from map(str, event.get("ids", []))


def _start_time(path: Path) -> float:
    match = _LOG_NAME.search(path.name)
    with contextlib.suppress(ValueError, OSError):
        return (
            time.mktime(time.strptime(match[1], "%Y%m%d-%H%M%S")) if match else path.stat().st_mtime
        )
    return 0.0
