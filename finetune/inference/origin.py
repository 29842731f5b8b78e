"""The run that a model, an adapter or a checkpoint came from. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import DataError
from finetune.storage.run_folder import describe_folder
from finetune.storage.run_log import read_jsonl_tolerant


@dataclass(frozen=True)
class Origin:
    """A run folder; `settings` and `identity` are empty where they cannot be read."""

    folder: Path
    settings: dict[str, Any]
    identity: dict[str, Any]

    def evaluations(self, up_to_step: int | None = None) -> list[dict[str, Any]]:
        """The run's evaluations in order, those after a step left out; none where the log cannot be read."""
        try:
            events = list(read_jsonl_tolerant(self.folder / "events.jsonl"))
        except (OSError, DataError):
            return []
        found = [event for event in events if event.get("event") == "eval" and isinstance(event.get("step"), int)]
        return [event for event in found if up_to_step is None or event["step"] <= up_to_step]


def find_run(result: Path) -> Origin | None:
    """The run whose output folder or checkpoint this is; None where there is none."""
    result = result.expanduser().resolve()
    for folder in (result, result.parent):
        if folder.is_dir() and (described := describe_folder(folder)).kind == "run":
            return Origin(folder, described.config or {}, described.identity or {})
    return None
