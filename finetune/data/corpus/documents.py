"""A corpus: files -> units of input of about a MiB -> documents. Units are read alone, in any
process, in any order.
"""

from __future__ import annotations

import codecs
import glob
import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.fields import nearest
from finetune.config.files import similar_files
from finetune.data.parts import Part, byte_parts
from finetune.data.reading.file_kinds import first_character, wrap_read_errors
from finetune.data.reading.files import (
    expand_each,
    glob_files,
    line_records,
    lines_between,
    named_twice,
    read_records,
    visible_files,
)
from finetune.data.report import RecordProblem
from finetune.errors import DataError, FinetuneError, raise_problems

if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData

logger = logging.getLogger("finetune")

BATCH_RECORDS = 256
# A process holds the tokens of a row group: above this, several of them are felt.
LARGE_GROUP_BYTES = 1 << 30
# Pages of a column are read through a buffer of this size, not a whole row group at once.
_BUFFER_BYTES = 1 << 20


def check_parquet(files: Sequence[Path], text_field: str) -> None:
    """Read the footer of each file, and say what they hold.

    Raises:
        DataError: no parquet file, one that was cut off, or without the column of texts; `Problems`
            for several.
    """
    problems: list[FinetuneError] = []
    records = 0
    groups = 0
    size_bytes = 0
    large = []
    for path in files:
        try:
            metadata = read_footer(path)
            column = _column_of_texts(path, metadata, text_field)
        except DataError as problem:
            problems.append(problem)
            continue
        records += metadata.num_rows
        groups += row_groups(path)
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
    """Read the footer of a parquet file; the footer of the last file is cached."""
    status = path.stat()
    return _footer(path, status.st_mtime_ns, status.st_size)


def row_groups(path: Path) -> int:
    """Return how many row groups a parquet file has.

    The result is cached, so that the large footer is not read again for it.
    """
    status = path.stat()
    return _row_groups(path, status.st_mtime_ns, status.st_size)


@cache
def _row_groups(path: Path, modified: int, size_bytes: int) -> int:
    return _footer(path, modified, size_bytes).num_row_groups


@lru_cache(maxsize=1)
def _footer(path: Path, modified: int, size_bytes: int) -> FileMetaData:
    import pyarrow.parquet

    with _wrap_parquet_errors(path, "is no parquet file, or was cut off"):
        return pyarrow.parquet.read_metadata(path)


def read_column(path: Path, group: int, text_field: str) -> Iterator[tuple[int, Any]]:
    """Read one column of a row group.

    Returns:
        (number of the record in its file from 1, record with the column alone) pairs, with a
        `RecordProblem` instead of a record that is not UTF-8.

    Raises:
        DataError: the row group cannot be read, or the column is missing.
    """
    import pyarrow.parquet

    metadata = read_footer(path)
    _column_of_texts(path, metadata, text_field)
    record = sum(metadata.row_group(before).num_rows for before in range(group))
    with _wrap_parquet_errors(path, f"row group {group} cannot be read"):
        file = pyarrow.parquet.ParquetFile(
            path, metadata=metadata, buffer_size=_BUFFER_BYTES, page_checksum_verification=True
        )
        for batch in file.iter_batches(BATCH_RECORDS, row_groups=[group], columns=[text_field]):
            for scalar in batch.column(0):
                record += 1
                try:
                    yield record, {text_field: scalar.as_py()}
                except UnicodeDecodeError as error:
                    yield record, RecordProblem("not UTF-8", f"byte {error.start + 1} of the text")


def _column_of_texts(path: Path, metadata: FileMetaData, text_field: str) -> int:
    """Return the index of the column among the stored columns; fields of nested columns count as
    columns there.
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
def _wrap_parquet_errors(path: Path, what: str) -> Iterator[None]:
    """Turn pyarrow's errors into DataError."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        # Broken pages are OSError too, without the system's reason.
        reason = getattr(error, "strerror", None)
        what = f"cannot be read: {reason}" if reason else f"{what}: {error}"
        raise DataError(what, str(path), "copy or write the file again, or leave it out") from error


UNIT_BYTES = 1 << 20
# A text file longer than a unit becomes several documents, cut after a line that ends within this
# many bytes.
_CUT_SEARCH_BYTES = 1 << 16
RECORD_SUFFIXES = (".jsonl", ".json", ".parquet")
# What a folder is searched for. A file or glob may name text of any other suffix.
_TEXT = """
    .txt .text .md .markdown .rst .tex .org .adoc .html .htm .xml .csv .tsv .yaml .yml .toml .ini
    .cfg .sql .css .log .sh .py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .kt .swift .js .jsx .ts
    .tsx .rb .php .pl .lua .r .jl .scala .hs
"""
TEXT_SUFFIXES = tuple(_TEXT.split())
_PACKED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".zip", ".tar", ".tgz", ".7z")


Unit = tuple[Part, ...]


def find_files(paths: Sequence[str]) -> tuple[Path, ...]:
    """Turn files, folders and globs into files, in the order given; within a folder or glob sorted
    by name.

    A folder is searched recursively for records and text by suffix (`RECORD_SUFFIXES`,
    `TEXT_SUFFIXES`), without hidden files and folders. A file or a glob may name text of any
    suffix.

    Raises:
        DataError: nothing is found, or files are compressed; `Problems` for several.
    """
    files = tuple(itertools.chain.from_iterable(expand_each(paths, _expand)))
    packed = [path for path in files if path.suffix.lower() in _PACKED_SUFFIXES]
    if packed:
        more = f" and {len(packed) - 1} more" if len(packed) > 1 else ""
        raise DataError(f"compressed files are not read{more}", str(packed[0]), "unpack them first")
    if twice := named_twice(files):
        logger.warning("read more than once, as asked: %s", ", ".join(twice[:5]))
    return files


def _expand(given: str) -> list[Path]:
    """Turn one file, folder or glob into files."""
    path = Path(given).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        inside = visible_files(path)
        known = [one for one in inside if one.suffix.lower() in (*RECORD_SUFFIXES, *TEXT_SUFFIXES)]
        if not known:
            fix = (
                f"name the files or a glob; a folder is searched for {', '.join(RECORD_SUFFIXES)}"
                " and text by suffix"
            )
            raise DataError("the folder holds no file that is known to be text", given, fix)
        if len(known) < len(inside):
            logger.info("%s: %d files of other kinds are left out", given, len(inside) - len(known))
        _warn_of_notes(given, known)
        return known
    if matches := glob_files(path):
        return matches
    if glob.has_magic(given):
        raise DataError(
            "no file matches", given, "check the pattern; ** stands for folders at any depth"
        )
    raise DataError("there is no such file or folder", given, similar_files(path))


def _warn_of_notes(given: str, files: Sequence[Path]) -> None:
    """A data set from a hub has a README next to its parquet files."""
    others = [path for path in files if path.suffix.lower() != ".parquet"]
    if others and len(others) < len(files):
        logger.warning(
            "%s holds parquet files, and %d others that are read as documents too, e.g. %s. Fix"
            " where they are none: --data '%s'",
            given,
            len(others),
            others[0],
            Path(given) / "**" / "*.parquet",
        )


def units_of(files: Sequence[Path]) -> Iterator[Unit]:
    """Cut files into units: large ones into several, small ones together. Depends on names, sizes
    and kinds alone.

    Raises:
        DataError: a file that cannot be read.
    """
    unit: list[Part] = []
    size_bytes = 0
    for path in files:
        with wrap_read_errors(path):
            for part in _parts(path):
                if unit and size_bytes + part.size_bytes > UNIT_BYTES:
                    yield tuple(unit)
                    unit, size_bytes = [], 0
                unit.append(part)
                size_bytes += part.size_bytes
    if unit:
        yield tuple(unit)


def size_of(unit: Unit) -> int:
    """Return the unit's share of the input, in bytes."""
    return sum(part.size_bytes for part in unit)


def _parts(path: Path) -> Iterator[Part]:
    """Cut a file into parts by its kind: row groups, a whole array, or a MiB of lines or text."""
    size_bytes = path.stat().st_size
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        groups = row_groups(path)
        for group in range(groups):
            yield Part(path, "parquet", group, group + 1, size_bytes // groups)
    elif suffix not in RECORD_SUFFIXES:
        yield from byte_parts(path, "text", UNIT_BYTES)
    elif first_character(path) == b"[":
        yield Part(path, "array", 0, size_bytes, size_bytes)
    else:
        yield from byte_parts(path, "lines", UNIT_BYTES)


def documents_of(
    unit: Unit, text_field: str
) -> Iterator[tuple[tuple[str, int], str | RecordProblem]]:
    """Read the documents of a unit in order; one with nothing but white space is yielded too.

    Returns:
        ((file, line), text) pairs, with a `RecordProblem` instead of the text of a record that is
        no document. The line (number of the record in parquet) counts from 1; it is 0 if the
        document is a file, or a part of one, as a whole.

    Raises:
        DataError: a file that cannot be read, or a broken JSON array or parquet file.
    """
    for part in unit:
        with wrap_read_errors(part.path):
            read = _read_text(part) if part.kind == "text" else _read_texts(part, text_field)
            for line, found in read:
                yield (str(part.path), line), found


def _read_texts(part: Part, text_field: str) -> Iterator[tuple[int, str | RecordProblem]]:
    """Yield the texts of a part with records."""
    if part.kind == "parquet":
        records = read_column(part.path, part.start, text_field)
    elif part.kind == "array":
        records = read_records(part.path)
    else:
        lines = lines_between(part.path, part.start, part.stop)
        records = line_records(lines, is_start=part.start == 0)
    before: int | None = None  # lines before the part; counted when a problem needs its line
    for line, record in records:
        found = _text_of(record, text_field)
        if part.kind == "lines" and isinstance(found, RecordProblem) and before is None:
            before = sum(1 for _ in lines_between(part.path, 0, part.start))
        yield line + (before or 0), found


def _read_text(part: Part) -> Iterator[tuple[int, str | RecordProblem]]:
    """Yield the document of a part of a text file, if one is in it."""
    with part.path.open("rb") as file:
        start, stop = _cut(file, part.start), _cut(file, part.stop)
        file.seek(start)
        raw = file.read(stop - start)
    if start >= stop:
        return
    if start == 0:
        raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        yield 0, raw.decode()
    except UnicodeDecodeError as error:
        yield 0, RecordProblem("not UTF-8", f"byte {start + error.start + 1} of the file")


def _cut(file: Any, nominal: int) -> int:
    """Return where to cut a text file near a byte: after the next line end, else between two
    characters.
    """
    if nominal == 0:
        return 0
    file.seek(nominal)
    following = file.read(_CUT_SEARCH_BYTES)
    if not following:
        return nominal  # the end of the file
    newline = following.find(b"\n")
    if newline >= 0:
        return nominal + newline + 1
    inside = 0
    # not a first byte
    while inside < 3 and following[inside : inside + 1] and 0x80 <= following[inside] < 0xC0:
        inside += 1
    return nominal + inside


def _text_of(record: Any, text_field: str) -> str | RecordProblem:
    """Return the text of a record, or the problem that makes it unusable."""
    if isinstance(record, RecordProblem):
        return record
    if not isinstance(record, dict):
        return RecordProblem("not an object", f"a {type(record).__name__}")
    if text_field not in record:
        fields = ", ".join(map(str, record))
        guess = nearest(text_field, map(str, record))
        meant = f"; did you mean --text-field {guess}?" if guess else ""
        return RecordProblem(f"no field {text_field}", f"its fields are {fields}{meant}")
    value = record[text_field]
    if not isinstance(value, str):
        return RecordProblem(f"{text_field} is no text", f"a {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can write what UTF-8 cannot
        return RecordProblem("half of a surrogate pair", f"character {error.start + 1} of the text")
    return value
