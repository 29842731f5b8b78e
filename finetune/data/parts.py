"""Data files in parts that any process reads alone: lines by their bytes, the other kinds as
batches of records.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.reading.file_kinds import (
    arrow_batches,
    batch_records,
    file_kind,
    is_compressed,
    open_text,
    parquet_batches,
    said_if_unreadable,
)
from finetune.data.reading.files import line_records, read_records
from finetune.data.records import RecordReader

if TYPE_CHECKING:
    from pyarrow import RecordBatch

PART_BYTES = 1 << 20  # of JSON Lines; what is under way is a few parts per process
PART_RECORDS = 256  # of the other kinds


@dataclass(frozen=True)
class Part:
    """Some records of a file, one after another."""

    file: int  # its number among the data files
    path: Path
    # of the file, for the progress; all but JSON Lines count whole with their first part
    size_bytes: int
    # JSON Lines: from the beginning of a line to the end of one, in bytes
    span: tuple[int, int] | None = None
    raw: bytes | None = None  # JSON Lines of a compressed file: some of its lines
    # of parquet and arrow, or (line, record)
    records: RecordBatch | list[tuple[int, Any]] | None = None
    first_record: int = 1  # of parquet and arrow: the number of the first record
    begins: bool = True  # whether it is the first part of the file
    form: str | None = None  # the file's format, where a part before this one has shown it

    def read(self) -> tuple[list[tuple[int, Any]], int]:
        """`(line, record)` or `(line, RecordProblem)` as of `read_records`, and how many lines to
        count on by.

        Lines of JSON Lines count from 1 in each part; the others are numbered as in their file, and
        count on by 0.

        Raises:
            DataError: the file cannot be read, or is one object over several lines.
        """
        if self.span is not None:
            with said_if_unreadable(self.path), self.path.open("rb") as file:
                file.seek(self.span[0])
                raw = file.read(self.span[1] - self.span[0])
            return self._lines(raw)
        if self.raw is not None:
            return self._lines(self.raw)
        if isinstance(self.records, list):
            return self.records, 0
        assert self.records is not None
        return list(enumerate(batch_records(self.records, self.path), self.first_record)), 0

    def _lines(self, raw: bytes) -> tuple[list[tuple[int, Any]], int]:
        records = list(line_records(io.BytesIO(raw), self.path, is_start=self.begins))
        return records, raw.count(b"\n") + (not raw.endswith(b"\n"))


def parts_of(
    files: Sequence[Path], readers: Sequence[RecordReader] | None = None
) -> Iterator[Part]:
    """The parts of all files in order, each with its file's format where a part before it has shown
    one.

    Args:
        readers: how the records of each file are read; None: under their own names.

    Raises:
        DataError: a file that cannot be read, a broken array or parquet file.
    """
    for number, path in enumerate(files):
        reader, form = readers[number] if readers else RecordReader(), None
        for part in _parts(number, path):
            yield replace(part, form=form)
            form = form or reader.form_shown(part.read()[0])


def _parts(number: int, path: Path) -> Iterator[Part]:
    with said_if_unreadable(path):
        kind, size_bytes = file_kind(path), path.stat().st_size
        if kind == "lines" and not is_compressed(path):
            for span in _spans(path, size_bytes):
                yield Part(number, path, span[1] - span[0], span=span, begins=span[0] == 0)
            return
        first = Part(number, path, size_bytes)
        if kind == "lines":
            for raw in _blocks(path):
                yield replace(first, raw=raw)
                first = replace(first, size_bytes=0, begins=False)
            return
        whole: dict[str, Callable[[Path, int], Iterable[Any]]] = {
            "parquet": parquet_batches,
            "arrow": arrow_batches,
        }
        batches = whole[kind](path, PART_RECORDS) if kind in whole else _batches(read_records(path))
        for batch in batches:
            yield replace(first, records=batch)
            first = replace(
                first, size_bytes=0, begins=False, first_record=first.first_record + len(batch)
            )


def _blocks(path: Path) -> Iterator[bytes]:
    """The decompressed lines of a file, about `PART_BYTES` at a time."""
    with open_text(path) as file:
        while block := file.read(PART_BYTES):
            yield block + file.readline()


def _spans(path: Path, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Cuts between lines, about every `PART_BYTES`; a longer line is a part of its own."""
    with path.open("rb") as file:
        begin = 0
        while begin < size_bytes:
            file.seek(begin + PART_BYTES - 1)
            file.readline()
            end = min(file.tell(), size_bytes)
            yield begin, end
            begin = end


def _batches(records: Iterator[tuple[int, Any]]) -> Iterator[list[tuple[int, Any]]]:
    while batch := list(islice(records, PART_RECORDS)):
        yield batch
