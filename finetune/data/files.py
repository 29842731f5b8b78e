"""Data files: which they are, their hashes, and their records one by one with line numbers."""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from finetune.config.config_files import similar_files
from finetune.data.problems import RecordProblem
from finetune.errors import DataError, FinetuneError, raise_problems

logger = logging.getLogger("finetune")

SUFFIXES = (".json", ".jsonl", ".parquet")
_NO_SPACE = re.compile(r"[^ \t\r\n]")
_PARQUET_BATCH_RECORDS = 1024


def expand_paths(paths: Sequence[str | Path]) -> tuple[Path, ...]:
    """Turn files, folders and globs into files, in the order given; within a folder or glob sorted by name.

    Folders are searched to the bottom for .json, .jsonl and .parquet files; hidden files and folders are left out.

    Raises:
        DataError: a path that does not exist, holds no data file, or is of another kind; several together.
    """
    if isinstance(paths, (str, Path)):
        paths = [paths]
    files = expand_each(paths, _expand)
    if not files:
        raise DataError("no data files were named", where="--data", fix="give --data a file, a folder or a glob")
    if twice := named_twice(files):
        logger.warning("read more than once, as asked: %s (name a file once to train on it once)", ", ".join(twice))
    return tuple(files)


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


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_records(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield `(line, record)`, or `(line, RecordProblem)`; lines count from 1 (records, for parquet).

    A file whose first character is `[` is one JSON array, any other text file is JSON Lines, whatever its suffix.
    JSON Lines are streamed; blank lines are no records. An array is decoded record by record from its text.

    Raises:
        DataError: an array that is broken (records after the break cannot be told apart), or an unreadable file.
    """
    try:
        if path.suffix.lower() == ".parquet":
            yield from _parquet_records(path)
        elif first_character(path) == b"[":
            yield from _array_records(path)
        else:
            yield from _line_records(path)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", where=str(path), fix="check the file") from error


def first_character(path: Path) -> bytes:
    """The first byte that is no white space; empty where there is none. `[` tells an array of records from lines."""
    with path.open("rb") as file:
        block = file.read(4096).removeprefix(codecs.BOM_UTF8)
        while block:
            if block := block.lstrip(b" \t\r\n"):
                return block[:1]
            block = file.read(4096)
    return b""


def _line_records(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for line, raw in enumerate(file, 1):
            if line == 1:
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


def _array_records(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        text = path.read_bytes().removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"is not UTF-8 at byte {error.start}", where=str(path), fix="save the file as UTF-8") from error
    decoder = json.JSONDecoder()
    position = _past_space(text, 0) + 1  # after "["
    line, counted = 1, 0
    expected = "value or ]"
    while True:
        position = _past_space(text, position)
        line += text.count("\n", counted, position)
        counted = position
        following = text[position : position + 1]
        if following == "]" and expected in ("value or ]", ", or ]"):
            break
        if expected == ", or ]":
            if following != ",":
                raise _broken_array(path, line, "a comma or ] is missing after a record")
            position, expected = position + 1, "value"
            continue
        try:
            record, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            at = line + text.count("\n", counted, getattr(error, "pos", counted))
            raise _broken_array(path, at, getattr(error, "msg", str(error))) from error
        yield line, record
        expected = ", or ]"
    if text[position + 1 :].strip(" \t\r\n"):
        raise _broken_array(path, line, "there is text after the closing ]")


def _past_space(text: str, position: int) -> int:
    found = _NO_SPACE.search(text, position)
    return found.start() if found else len(text)


def _broken_array(path: Path, line: int, reason: str) -> DataError:
    return DataError(
        f"broken JSON: {reason}",
        where=f"{path}:{line}",
        fix="correct the array; only .jsonl files, one record per line, can leave out a broken one",
    )


def _parquet_records(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        number = 0
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=_PARQUET_BATCH_RECORDS):
            for record in batch.to_pylist():
                number += 1
                yield number, record
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"is no parquet file: {error}", where=str(path), fix="write the file again") from error
