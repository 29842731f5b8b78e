"""The entries of `data` on disk: which files each has, and the entry of each file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune.config.fields import DataSource
from finetune.data.reading.files import expand_groups


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
    sources = [
        entry if isinstance(entry, DataSource) else DataSource(path=os.fspath(entry))
        for entry in entries
    ]
    groups = enumerate(
        zip(sources, expand_groups([source.path for source in sources]), strict=True)
    )
    return tuple(
        DataFile(path, source, number) for number, (source, paths) in groups for path in paths
    )
