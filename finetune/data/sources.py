"""The entries of `data` on disk: which files each has, and how the records of a file are read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.config.sources import DataSource
from finetune.data.files import expand_groups
from finetune.data.formats import Conversation, to_conversation


@dataclass(frozen=True)
class DataFile:
    """A file, and the entry of `data` that names it."""

    path: Path
    source: DataSource
    number: int  # of the entry


def expand_sources(entries: Sequence[str | Path | DataSource]) -> tuple[DataFile, ...]:
    """The files of all entries in order, each with its entry.

    Raises:
        DataError: as `expand_paths`.
    """
    sources = [entry if isinstance(entry, DataSource) else DataSource(path=os.fspath(entry)) for entry in entries]
    groups = enumerate(zip(sources, expand_groups([source.path for source in sources]), strict=True))
    return tuple(DataFile(path, source, number) for number, (source, paths) in groups for path in paths)


def read_conversation(
    record: Any, form: str, source: DataSource, difficulties: Sequence[str] | None, difficulty_field: str
) -> Conversation:
    """`to_conversation` for a record of a source, which may set the difficulty.

    Raises:
        RecordProblem: as `to_conversation`.
    """
    if source.difficulty is None or difficulties is None:
        return to_conversation(record, form, difficulties, difficulty_field)
    return replace(to_conversation(record, form), difficulty=source.difficulty)
