"""What a run folder tells about how its run ended: the logs of its last start, status, settings, out-of-memory note."""

from __future__ import annotations

import contextlib
import io
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.commands.diagnose.log_evidence import LogEvidence, LogScan
from finetune.commands.diagnose.log_reading import LogFile
from finetune.errors import DataError, StateError
from finetune.storage import durable_files
from finetune.storage.run_folder import STATUS_NAME, FolderDescription, describe_folder
from finetune.storage.run_log import read_jsonl_tolerant

OUT_OF_MEMORY_NAME = "oom.json"
# Ranks of one start open their logs within this time: the others wait for rank 0.
START_SECONDS = 600.0
_FACTS = ("micro_batch_size", "cutoff_len", "timeout_seconds", "dataloader_num_workers", "learning_rate", "dtype")
_PRETRAIN_FACTS = {"device_batch_size": "micro_batch_size", "max_seq_len": "cutoff_len"}
_LOG_NAME = re.compile(r"(\d{8}-\d{6})-\d+-rank\d+\.log$")


class RunFolder:
    """A run folder to be diagnosed.

    Raises:
        DataError: it is not a run's, or cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.description: FolderDescription = describe_folder(folder)
        except StateError as error:
            raise DataError(error.what, error.where, "give a log file, or the --output-dir of a run") from error
        if self.description.kind != "run":
            raise DataError("the folder is not a run's", str(folder), "give a log file, or the --output-dir of a run")
        self.status: dict[str, Any] = self.description.status or {}

    def logs(self) -> list[Path]:
        """The logs of the last start, of all ranks; none of a run that is done."""
        if self.status.get("state") == "done":
            return []
        begun = {path: _begun(path) for path in sorted(self.folder.glob("logs/*.log"))}
        starts = [seconds for path, seconds in begun.items() if path.name.endswith("-rank0.log")]
        last = max(starts, default=0.0)
        return [path for path, seconds in begun.items() if seconds >= last and seconds - last < START_SECONDS]

    def evidence(self) -> LogEvidence:
        """What the status says, as if it were a log."""
        lines = "".join(f"{line}\n" for line in self._said())
        return LogScan().read(LogFile(str(self.folder / STATUS_NAME), io.BytesIO(lines.encode())))

    def _said(self) -> Iterator[str]:
        state, step = self.status.get("state"), self.status.get("step")
        if state == "failed":
            yield f"[ERROR] {self.status.get('error') or 'the run failed'}"
        elif state == "stopped":
            yield f"the run was stopped by a signal at step {step}"
        elif state == "running" and self._held() is False:
            yield f"the run's process {self.status.get('pid')} is gone without a word at or after step {step}"

    def _held(self) -> bool | None:
        """Whether a process holds the run's lock; None where that cannot be told (another machine's, no locks)."""
        import fcntl

        try:
            with (self.folder / ".lock").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return None
        return False

    def facts(self) -> dict[str, str]:
        """Settings of the run for the words of remedies, and what its out-of-memory note says."""
        config = self.description.config or {}
        names = {name: name for name in _FACTS} | _PRETRAIN_FACTS
        facts = {fact: str(config[name]) for name, fact in names.items() if config.get(name) is not None}
        with contextlib.suppress(OSError, ValueError):
            note = json.loads(durable_files.read_bytes(self.folder / OUT_OF_MEMORY_NAME, 1 << 20))
            facts |= {f"oom_{name}": str(value) for name, value in note.items() if value is not None}
        rows = [str(row) for event in self._events("nonfinite") for row in event.get("ids", [])][:10]
        return facts | ({"nonfinite_rows": ", ".join(rows)} if rows else {})

    def _events(self, name: str) -> list[dict[str, Any]]:
        with contextlib.suppress(OSError, DataError):
            return [event for event in read_jsonl_tolerant(self.folder / "events.jsonl") if event.get("event") == name]
        return []


def _begun(path: Path) -> float:
    match = _LOG_NAME.search(path.name)
    with contextlib.suppress(ValueError, OSError):
        return time.mktime(time.strptime(match[1], "%Y%m%d-%H%M%S")) if match else path.stat().st_mtime
    return 0.0
