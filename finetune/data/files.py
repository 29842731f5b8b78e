"""Data files: which they are, their hashes, and their records one by one with line numbers."""

from __future__ import annotations

import codecs
import contextlib
import glob
import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.config_files import similar_files
from finetune.data.json_array import array_records
from finetune.data.problems import RecordProblem
from finetune.errors import DataError, FinetuneError, raise_problems

if TYPE_CHECKING:
    from pyarrow import RecordBatch

logger = logging.getLogger("finetune")

SUFFIXES = (".json", ".jsonl", ".parquet")
_PARQUET_BATCH_RECORDS = 1024


def expand_paths(paths: Sequence[str | Path]) -> tuple[Path, ...]:
    """Turn files, folders and globs into files, in the order given; within a folder or glob sorted by name.

    Folders are searched to the bottom for .json, .jsonl and .parquet files; hidden files and folders are left out.

    Raises:
        DataError: a path that does not exist, holds no data file, or is of another kind; several together.
    """
    if isinstance(paths, (str, Path)):
        paths = [paths]
    return tuple(itertools.chain.from_iterable(expand_groups(paths)))


def expand_groups(paths: Sequence[str | Path]) -> list[list[Path]]:
    """`expand_paths`, with the files of each path apart."""
    groups: list[list[Path]] = []

    def expand(given: str) -> list[Path]:
        groups.append(_expand(given))
        return groups[-1]

    files = expand_each(paths, expand)
    if not files:
        raise DataError("no data files were named", where="--data", fix="give --data a file, a folder or a glob")
    if twice := named_twice(files):
        logger.warning("read more than once, as asked: %s (name a file once to train on it once)", ", ".join(twice))
    return groups


def expand_each(paths: Sequence[str | Path], expand: Callable[[str], list[Path]]) -> list[Path]:
    """The files that each path names, in order; what is wrong with several paths is reported together."""
    files: list[Path] = []
    problems: list[FinetuneError] = []
    for path in paths:
        try:
            files += expand(str(path))
        except DataError as problem:
            problems.append(problem)
    raise_problems(problems)
    return files


def named_twice(files: Sequence[Path]) -> list[str]:
    """The files that are in the list more than once, by name."""
    return sorted(str(file) for file, times in Counter(files).items() if times > 1)


def visible_files(folder: Path) -> list[Path]:
    """The files of a folder down to the bottom, sorted by name, without hidden files and folders."""
    inside = (path for path in folder.rglob("*") if path.is_file())
    return sorted(p for p in inside if not any(part.startswith(".") for part in p.relative_to(folder).parts))


def glob_files(pattern: Path) -> list[Path]:
    """The files that a glob names, sorted by name; ** stands for folders at any depth."""
    return sorted(path for match in glob.glob(str(pattern), recursive=True) if (path := Path(match)).is_file())


def _expand(given: str) -> list[Path]:
    path = Path(given).expanduser()
    if path.is_dir():
        files = [inside for inside in visible_files(path) if inside.suffix.lower() in SUFFIXES]
        if not files:
            raise DataError(
                f"the folder holds no {', '.join(SUFFIXES)} file", where=given, fix="name a folder with data files"
            )
        return files
    if path.exists():
        if path.suffix.lower() not in SUFFIXES:
            raise DataError(
                f"{path.suffix or 'a file without suffix'} is not a known kind of data file",
                where=given,
                fix=f"use one of {', '.join(SUFFIXES)}",
            )
        return [path]
    if matches := [match for match in glob_files(path) if match.suffix.lower() in SUFFIXES]:
        return matches
    if glob.has_magic(given):
        raise DataError("no data file matches", where=given, fix=f"check the pattern; kinds: {', '.join(SUFFIXES)}")
    raise DataError("no such file or folder", where=given, fix=similar_files(path))


def read_records(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield `(line, record)`, or `(line, RecordProblem)`; lines count from 1 (records, for parquet).

    A file whose first character is `[` is one JSON array, any other text file is JSON Lines, whatever its suffix.
    Both are streamed; blank lines are no records.

    Raises:
        DataError: an array that is broken (records after the break cannot be told apart), or an unreadable file.
    """
    with said_if_unreadable(path):
        kind = file_kind(path)
        if kind == "parquet":
            batches = (batch.to_pylist() for batch in parquet_batches(path, _PARQUET_BATCH_RECORDS))
            yield from enumerate(itertools.chain.from_iterable(batches), 1)
        elif kind == "array":
            yield from array_records(path)
        else:
            with path.open("rb") as file:
                yield from line_records(file, path)


@contextlib.contextmanager
def said_if_unreadable(path: Path) -> Iterator[None]:
    """Turn the system's errors into DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", where=str(path), fix="check the file") from error


def file_kind(path: Path) -> str:
    """parquet, array or lines: how the records of a file are told apart. May raise OSError."""
    if path.suffix.lower() == ".parquet":
        return "parquet"
    return "array" if first_character(path) == b"[" else "lines"


def first_character(path: Path) -> bytes:
    """The first byte that is no white space; empty where there is none. `[` tells an array of records from lines."""
    with path.open("rb") as file:
        block = file.read(4096).removeprefix(codecs.BOM_UTF8)
        while block:
            if block := block.lstrip(b" \t\r\n"):
                return block[:1]
            block = file.read(4096)
    return b""


def line_records(lines: Iterable[bytes], path: Path, *, is_start: bool = True) -> Iterator[tuple[int, Any]]:
    """The records of JSON Lines as in `read_records`, with lines counted from 1.

    Args:
        path: for messages.
        is_start: whether the first line is the file's first.
    """
    for line, raw in enumerate(lines, 1):
        if line == 1 and is_start:
            raw = raw.removeprefix(codecs.BOM_UTF8)
            if raw.strip() == b"{":
                raise DataError(
                    "is one JSON object over several lines",
                    where=f"{path}:1",
                    fix="write one record per line (.jsonl), or a JSON array of records",
                )
        if raw.strip():
            yield line, decode_record(raw.rstrip(b"\r\n"))


def decode_record(raw: bytes) -> Any:
    """The record on a line of JSON Lines, or the RecordProblem that says why there is none."""
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return RecordProblem("not UTF-8", f"byte {error.start + 1} of the line")
    except json.JSONDecodeError as error:
        return RecordProblem("broken JSON", f"{error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of nested brackets
        return RecordProblem("broken JSON", str(error).split(";")[0])


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
        raise DataError(f"is no parquet file: {error}", where=str(path), fix="write the file again") from error
