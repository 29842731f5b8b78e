"""Data files in parts, which any process reads alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.reading.file_kinds import (
    BATCHES,
    batch_records,
    file_kind,
    is_compressed,
    wrap_read_errors,
)
from finetune.data.reading.files import line_records, lines_between, read_records
from finetune.data.records import RecordReader

if TYPE_CHECKING:
    from pyarrow import RecordBatch

PART_BYTES = 1 << 20  # of JSON Lines; what is in flight is a few parts per process
PART_RECORDS = 256  # of the other kinds


@dataclass(frozen=True)
class Part:
    """A part of a file.

    Attributes:
        kind: one of
            - "lines": JSON lines that start in the bytes `start` to `stop`
            - "text": these bytes as one document
            - "array": a whole JSON array
            - "parquet": row groups `start` to `stop`
            - "records": `records` from `start` to `stop`, read already
        size_bytes: the part's share of its file, for the progress.
        file: number of the file among the data files.
        form: the file's format, if a part before this one has shown it.
    """

    path: Path
    kind: str
    start: int
    stop: int
    size_bytes: int
    records: RecordBatch | list[tuple[int, Any]] | None = None
    file: int = 0
    form: str | None = None

    def read(self) -> tuple[list[tuple[int, Any]], int]:
        """Read the records of a part of `parts_of`.

        Returns: `(line, record)` or `(line, RecordProblem)` pairs as from `read_records`, and the
            number to add to the line count. "lines" count from 1 in each part; other kinds use the
            line numbers of the file and add 0.

        Raises:
            DataError: the file cannot be read, or is one object over several lines.
        """
        if self.kind == "lines":
            with wrap_read_errors(self.path):
                lines = list(lines_between(self.path, self.start, self.stop))
            return list(line_records(lines, self.path, is_start=self.start == 0)), len(lines)
        if isinstance(self.records, list):
            return self.records, 0
        assert self.records is not None
        return list(enumerate(batch_records(self.records, self.path), self.start)), 0


def byte_parts(path: Path, kind: str, part_bytes: int) -> Iterator[Part]:
    """Cut a file every `part_bytes`, regardless of its content."""
    size_bytes = path.stat().st_size
    for start in range(0, size_bytes, part_bytes):
        stop = min(start + part_bytes, size_bytes)
        yield Part(path, kind, start, stop, stop - start)


def parts_of(files: Sequence[Path], readers: Sequence[RecordReader]) -> Iterator[Part]:
    """Cut files into parts, in order.

    Args:
        readers: how the records of each file are read.

    Raises:
        DataError: a file cannot be read, or is a broken array or parquet file.
    """
    for number, (path, reader) in enumerate(zip(files, readers, strict=True)):
        form = None
        for part in _parts(path, reader.max_samples):
            yield replace(part, file=number, form=form)
            form = form or reader.form_shown(part.read()[0])


def _parts(path: Path, most: int | None) -> Iterator[Part]:
    """Cut one file, or its first records, into parts."""
    with wrap_read_errors(path):
        kind = file_kind(path)
        if kind == "lines" and not is_compressed(path) and most is None:
            yield from byte_parts(path, kind, PART_BYTES)
            return
        batches: Iterable[Any]
        if kind in BATCHES:
            batches = BATCHES[kind](path, PART_RECORDS)
        else:
            records = read_records(path, most)
            batches = iter(lambda: list(islice(records, PART_RECORDS)), [])
        start, size_bytes = 1, path.stat().st_size
        for batch in batches:
            if most is not None:
                batch = batch[: most - (start - 1)]
            if not len(batch):
                return
            yield Part(path, "records", start, start + len(batch), size_bytes, batch)
            start += len(batch)
            size_bytes = 0  # the file counts whole with its first part
