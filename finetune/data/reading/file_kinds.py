"""Kinds of data files by their names, compression, and the records of those that are not JSON."""

from __future__ import annotations

import bz2
import codecs
import contextlib
import csv
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from finetune.data.problems import RecordProblem
from finetune.errors import DataError

if TYPE_CHECKING:
    from pyarrow import RecordBatch

TEXT_SUFFIXES = (".json", ".jsonl", ".csv")
SUFFIXES = (*TEXT_SUFFIXES, ".parquet", ".arrow")


_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
KINDS_IN_WORDS = (
    f"{', '.join(SUFFIXES)}; of the first three also with {', '.join(_COMPRESSIONS)} behind"
)


def is_data_file(path: Path) -> bool:
    """Whether the name is that of a kind that is read."""
    suffix, compression = _suffixes(path)
    return suffix in (TEXT_SUFFIXES if compression else SUFFIXES)


def is_compressed(path: Path) -> bool:
    """Whether the file must be read from its beginning; parquet and arrow compress inside."""
    return bool(_suffixes(path)[1])


def _suffixes(path: Path) -> tuple[str, str]:
    """`.jsonl` and `.gz` of `rows.jsonl.gz`; the second is empty where nothing compresses the
    file.
    """
    last = path.suffix.lower()
    return (path.with_suffix("").suffix.lower(), last) if last in _COMPRESSIONS else (last, "")


@contextlib.contextmanager
def said_if_unreadable(path: Path) -> Iterator[None]:
    """Turn the errors of the system and of compression into DataError."""
    try:
        yield
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"cannot be read: {reason}", where=str(path), fix="check the file"
        ) from error


def open_text(path: Path) -> IO[bytes]:
    """The file's bytes, decompressed. Errors as `said_if_unreadable` knows them, also while it is
    read.
    """
    compression = _suffixes(path)[1]
    if compression == ".zst":
        import pyarrow

        # The wheels of pyarrow have zstd; Python before 3.14 has not.
        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return cast("IO[bytes]", openers.get(compression, open)(path, "rb"))


def file_kind(path: Path) -> str:
    """parquet, arrow, csv, array or lines: how the records of a file are told apart. May raise as
    `open_text`.
    """
    suffix = _suffixes(path)[0]
    if suffix in (".parquet", ".arrow", ".csv"):
        return suffix[1:]
    return "array" if first_character(path) == b"[" else "lines"


def first_character(path: Path) -> bytes:
    """The first byte that is no white space; empty where there is none. `[` tells an array of
    records from lines.
    """
    with open_text(path) as file:
        block = file.read(4096).removeprefix(codecs.BOM_UTF8)
        while block:
            if block := block.lstrip(b" \t\r\n"):
                return block[:1]
            block = file.read(4096)
    return b""


def csv_records(path: Path) -> Iterator[tuple[int, Any]]:
    """`(line, record)` of a file of comma-separated values with a header, or `(line,
    RecordProblem)`; all are texts.

    Raises:
        DataError: no header, a name twice in it, broken quotes (records behind them cannot be told
            apart), not UTF-8.
    """
    csv.field_size_limit(sys.maxsize)  # of the process: a text is as long as it is
    with io.TextIOWrapper(open_text(path), encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, strict=True)
        line = 1
        try:
            header = next(rows, [])
            if len(set(header)) != len(header) or not header:
                raise DataError(
                    "has no header of different names",
                    where=f"{path}:1",
                    fix="name each column once",
                )
            line = rows.line_num + 1
            for row in rows:
                if len(row) == len(header):
                    yield line, dict(zip(header, row, strict=True))
                elif row:
                    yield (
                        line,
                        RecordProblem("broken CSV", f"{len(row)} fields under {len(header)} names"),
                    )
                line = rows.line_num + 1
        except csv.Error as error:
            raise DataError(
                f"broken CSV: {error}", where=f"{path}:{line}", fix="correct the quotes"
            ) from error
        except UnicodeDecodeError as error:
            raise DataError(
                "is not UTF-8", where=f"{path}, from line {line}", fix="save the file as UTF-8"
            ) from error


def parquet_batches(path: Path, records: int) -> Iterator[RecordBatch]:
    """The records of a parquet file in batches of at most so many.

    Raises:
        DataError: it is none.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        yield from pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=records)
    except pyarrow.ArrowInvalid as error:
        raise DataError(
            f"is no parquet file: {error}", where=str(path), fix="write the file again"
        ) from error


def batch_records(batch: RecordBatch, path: Path) -> list[dict[str, Any]]:
    """The records of a batch as Python has them.

    Raises:
        DataError: a value that Python has not: a time beyond the year 9999, a text that is not
            UTF-8.
    """
    try:
        return batch.to_pylist()
    except (OverflowError, ValueError) as error:
        what = f"has a value that cannot be read: {error}"
        raise DataError(
            what, where=str(path), fix="leave the column out, or write it as text"
        ) from error


def arrow_batches(path: Path, records: int) -> Iterator[RecordBatch]:
    """The records of an Arrow IPC file or stream (`datasets` writes streams) in batches of at most
    so many.

    Raises:
        DataError: it is none.
    """
    import pyarrow
    import pyarrow.ipc

    try:
        with pyarrow.memory_map(str(path)) as source:
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            if is_file:
                reader = pyarrow.ipc.open_file(source)
                batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
            else:
                batches = iter(pyarrow.ipc.open_stream(source))
            for batch in batches:
                for first in range(0, batch.num_rows, records):
                    # Copied: a slice sent to another process takes all of its batch along.
                    yield batch.take(
                        pyarrow.array(range(first, min(first + records, batch.num_rows)))
                    )
    except pyarrow.ArrowInvalid as error:
        raise DataError(
            f"is no Arrow file: {error}", where=str(path), fix="write the file again"
        ) from error
