"""Parquet files of a corpus: refused by their footers before anything is read, then read row group
by row group.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.names import nearest
from finetune.data.problems import RecordProblem
from finetune.errors import DataError, FinetuneError, raise_problems

if TYPE_CHECKING:
    from pyarrow import Array
    from pyarrow.parquet import FileMetaData

logger = logging.getLogger("finetune")

BATCH_RECORDS = 256
# A process holds the tokens of a row group: above this, several of them are felt.
LARGE_GROUP_BYTES = 1 << 30
# Pages of a column are read through a buffer of this size, instead of all of a row group's at once.
_BUFFER_BYTES = 1 << 20


def check_parquet(files: Sequence[Path], text_field: str) -> None:
    """Read the footer of each file, and say what they hold.

    Raises:
        DataError: no parquet file, one that was cut off, or without the column of texts; `Problems`
            for several.
    """
    problems: list[FinetuneError] = []
    records = groups = size_bytes = 0
    large = []
    for path in files:
        try:
            metadata = read_footer(path)
            column = _column_of_texts(path, metadata, text_field)
        except DataError as problem:
            problems.append(problem)
            continue
        records, groups = records + metadata.num_rows, groups + row_groups(path)
        sizes = [
            metadata.row_group(group).column(column).total_uncompressed_size
            for group in range(metadata.num_row_groups)
        ]
        size_bytes += sum(sizes)
        if max(sizes, default=0) > LARGE_GROUP_BYTES:
            large.append(path)
    raise_problems(problems)
    if files:
        what = "%d parquet files: %s records in %s row groups, %s MiB of %s before compression"
        logger.info(
            what,
            len(files),
            f"{records:,}",
            f"{groups:,}",
            f"{size_bytes / 2**20:,.0f}",
            text_field,
        )
    if large:
        logger.warning(
            "%d parquet files have row groups of more than %.0f GiB of text, e.g. %s: each process"
            " holds the tokens of a row group. Fix where memory is short: write them with fewer"
            " records in a row group, or --num-workers 1",
            len(large),
            LARGE_GROUP_BYTES / 2**30,
            large[0],
        )


def read_footer(path: Path) -> FileMetaData:
    """The footer of a parquet file; that of the file read last is kept."""
    status = path.stat()
    return _footer(path, status.st_mtime_ns, status.st_size)


def row_groups(path: Path) -> int:
    """How many row groups a parquet file has; remembered, as its footer is large and need not be
    read again for it.
    """
    status = path.stat()
    return _row_groups(path, status.st_mtime_ns, status.st_size)


@cache
def _row_groups(path: Path, modified: int, size_bytes: int) -> int:
    return _footer(path, modified, size_bytes).num_row_groups


@lru_cache(maxsize=1)
def _footer(path: Path, modified: int, size_bytes: int) -> FileMetaData:
    import pyarrow.parquet

    with _said(path, "is no parquet file, or was cut off"):
        return pyarrow.parquet.read_metadata(path)


def read_texts(path: Path, group: int, text_field: str) -> Iterator[tuple[int, Any]]:
    """(number of the record in its file from 1, value of the column) of a row group;
    `RecordProblem` for no UTF-8.

    Raises:
        DataError: what is stored there cannot be read, or the column is not there.
    """
    import pyarrow.parquet

    metadata = read_footer(path)
    _column_of_texts(path, metadata, text_field)
    record = sum(metadata.row_group(before).num_rows for before in range(group))
    with _said(path, f"row group {group} cannot be read"):
        file = pyarrow.parquet.ParquetFile(
            path, metadata=metadata, buffer_size=_BUFFER_BYTES, page_checksum_verification=True
        )
        for batch in file.iter_batches(BATCH_RECORDS, row_groups=[group], columns=[text_field]):
            for value in _values(batch.column(0)):
                record += 1
                yield record, value


def _values(column: Array) -> list[Any]:
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [_value(scalar) for scalar in column]


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return RecordProblem("not UTF-8", f"byte {error.start + 1} of the text")


def _column_of_texts(path: Path, metadata: FileMetaData, text_field: str) -> int:
    """The number of the column among those that are stored (fields of nested columns are columns
    there).
    """
    schema = metadata.schema.to_arrow_schema()
    fix = "name the column that holds the text with --text-field"
    if text_field not in schema.names:
        guess = nearest(text_field, schema.names)
        also = (
            f"; did you mean --text-field {guess}?"
            if guess
            else f"; its columns are {', '.join(schema.names)}"
        )
        raise DataError(f"has no column {text_field}{also}", str(path), fix)
    kind = schema.types[schema.names.index(text_field)]
    kind = getattr(kind, "value_type", kind) if str(kind).startswith("dictionary") else kind
    if str(kind) not in ("string", "large_string", "string_view"):
        raise DataError(f"column {text_field} holds {kind}, and no text", str(path), fix)
    stored = [metadata.schema.column(number).path for number in range(len(metadata.schema))]
    return stored.index(text_field)


@contextmanager
def _said(path: Path, what: str) -> Iterator[None]:
    """Turn pyarrow's errors into DataError."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        # Broken pages are OSError too, without the system's reason.
        reason = getattr(error, "strerror", None)
        what = f"cannot be read: {reason}" if reason else f"{what}: {error}"
        raise DataError(what, str(path), "copy or write the file again, or leave it out") from error
