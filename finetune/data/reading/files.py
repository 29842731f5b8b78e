"""Data files: which they are, their hashes, and their records one by one with line numbers."""

from __future__ import annotations

import codecs
import glob
import itertools
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.config.fields import DataSource
from finetune.config.files import similar_files
from finetune.data.reading.file_kinds import (
    BATCHES,
    KINDS_IN_WORDS,
    UniqueKeys,
    array_records,
    batch_records,
    csv_records,
    file_kind,
    is_data_file,
    open_text,
    suffixes,
    text_records,
    wrap_read_errors,
)
from finetune.data.reading.hub_data import hub_files
from finetune.data.report import NOT_UTF8, RecordProblem
from finetune.errors import DataError, FinetuneError, raise_problems

logger = logging.getLogger("finetune")

_BATCH_RECORDS = 1024  # of parquet and arrow
# What `Dataset.save_to_disk` and `DatasetDict.save_to_disk` write next to the data.
_STATE_FILE, _INFO_FILE, _SPLITS_FILE = "state.json", "dataset_info.json", "dataset_dict.json"


@dataclass(frozen=True)
class DataFile:
    """A file, and the entry of `data` that names it.

    Attributes:
        source: the entry; its `max_samples` is what the files before this one have left of it.
        number: of the entry.
    """

    path: Path
    source: DataSource
    number: int


def expand_sources(entries: Sequence[str | Path | DataSource]) -> tuple[DataFile, ...]:
    """Return the files of all entries in order, each with its entry; within a folder or glob sorted
    by name.

    Names of data sets are those of `hub_data`. Folders are searched to the bottom for data files;
    hidden files and folders are left out. One that `save_to_disk` of `datasets` wrote has the files
    that it names.

    Raises:
        DataError: a path that does not exist, holds no data file, or is of another kind; several
            together.
    """
    sources = [
        entry if isinstance(entry, DataSource) else DataSource(path=os.fspath(entry))
        for entry in entries
    ]
    groups = expand_each([source.path for source in sources], _expand)
    files = tuple(
        DataFile(path, part, number)
        for number, (source, paths) in enumerate(zip(sources, groups, strict=True))
        for path, part in _limited(source, paths)
    )
    if not files:
        raise DataError(
            "no data files were named", where="--data", fix="give --data a file, a folder or a glob"
        )
    if twice := named_twice([file.path for file in files]):
        logger.warning(
            "read more than once, as asked: %s (name a file once to train on it once)",
            ", ".join(twice),
        )
    return files


def _limited(source: DataSource, paths: Sequence[Path]) -> Iterator[tuple[Path, DataSource]]:
    """Yield the files that hold an entry's first `max_samples` records, each with its share."""
    left = source.max_samples
    for path in paths:
        yield path, source.model_copy(update={"max_samples": left})
        if left is not None and path != paths[-1]:
            left -= sum(1 for _ in read_records(path, left))
            if not left:
                return


def expand_each(
    paths: Sequence[str | Path], expand: Callable[[str], list[Path]]
) -> list[list[Path]]:
    """Return the files that each path names; errors of several paths are reported together."""
    groups: list[list[Path]] = []
    problems: list[FinetuneError] = []
    for path in paths:
        try:
            groups.append(expand(str(path)))
        except DataError as problem:
            problems.append(problem)
    raise_problems(problems)
    return groups


def named_twice(files: Sequence[Path]) -> list[str]:
    """Return the files that are in the list more than once, by name."""
    return sorted(str(file) for file, times in Counter(files).items() if times > 1)


def visible_files(folder: Path) -> list[Path]:
    """Return the files of a folder and its subfolders, sorted by name, without hidden files and
    folders.
    """
    found = []
    for path in folder.rglob("*"):
        names = path.relative_to(folder).parts
        if path.is_file() and not any(name.startswith(".") for name in names):
            found.append(path)
    return sorted(found)


def glob_files(pattern: Path) -> list[Path]:
    """Return the files that a glob names, sorted by name; ** matches folders at any depth."""
    matches = map(Path, glob.glob(str(pattern), recursive=True))
    return sorted(path for path in matches if path.is_file())


def _expand(given: str) -> list[Path]:
    """Turn one path, glob or name of a data set into files."""
    if (named := hub_files(given)) is not None:
        return named
    path = Path(given).expanduser()
    if path.is_dir():
        found = [inside for inside in visible_files(path) if _is_data(inside)]
        # A text file next to data describes the data (README.txt).
        data = [inside for inside in found if suffixes(inside)[0] != ".txt"]
        files = _saved_files(path) or data or found
        if not files:
            raise DataError(
                "the folder holds no data file", where=given, fix=f"kinds: {KINDS_IN_WORDS}"
            )
        return files
    if path.exists():
        if not is_data_file(path):
            raise DataError(
                f"{path.suffix or 'a file without suffix'} is not a known kind of data file",
                where=given,
                fix=f"use one of {KINDS_IN_WORDS}",
            )
        return [path]
    if matches := [match for match in glob_files(path) if _is_data(match)]:
        return matches
    if glob.has_magic(given):
        raise DataError(
            "no data file matches", where=given, fix=f"check the pattern; kinds: {KINDS_IN_WORDS}"
        )
    raise DataError("no such file or folder", where=given, fix=similar_files(path))


def _is_data(path: Path) -> bool:
    """Return whether a file that was found, not named, holds data; what `save_to_disk` writes about
    the data does not.
    """
    if path.name in (_STATE_FILE, _INFO_FILE) and _is_saved(path.parent):
        return False
    return is_data_file(path) and path.name != _SPLITS_FILE


def _is_saved(folder: Path) -> bool:
    """Return whether `save_to_disk` wrote one data set there."""
    return (folder / _STATE_FILE).is_file() and (folder / _INFO_FILE).is_file()


def _saved_files(folder: Path) -> list[Path]:
    """Return the files of a data set that `save_to_disk` wrote there, in order; empty if the folder
    holds none.
    """
    try:
        if (folder / _SPLITS_FILE).is_file():
            splits = json.loads((folder / _SPLITS_FILE).read_bytes())["splits"]
            if len(splits) != 1:
                fix = f"name one of them, e.g. {folder / splits[0]}" if splits else "save it again"
                raise DataError(
                    f"holds the splits {', '.join(splits) or 'none'}", where=str(folder), fix=fix
                )
            folder = folder / splits[0]
        if not _is_saved(folder):
            return []
        entries = json.loads((folder / _STATE_FILE).read_bytes())["_data_files"]
        return [folder / entry["filename"] for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"looks like a saved data set and is none: {error!r}"
        raise DataError(what, where=str(folder), fix="save it again with save_to_disk") from error


def read_records(path: Path, most: int | None = None) -> Iterator[tuple[int, Any]]:
    """Yield `(line, record)`, or `(line, RecordProblem)`; lines count from 1 (records, for parquet
    and arrow).

    A file whose first character is `[` is one JSON array. Any other text file but .csv and .txt is
    JSON Lines, regardless of its suffix. All are streamed; blank lines are skipped.

    Args:
        most: maximum number of records; the rest of the file is not read.

    Raises:
        DataError: an array that is broken (the records after that cannot be separated), or an
            unreadable file.
    """
    return itertools.islice(_all_records(path), most)


def _all_records(path: Path) -> Iterator[tuple[int, Any]]:
    with wrap_read_errors(path):
        kind = file_kind(path)
        if kind in BATCHES:
            batches = BATCHES[kind](path, _BATCH_RECORDS)
            records = (batch_records(batch, path) for batch in batches)
            yield from enumerate(itertools.chain.from_iterable(records), 1)
        elif kind == "array":
            yield from array_records(path)
        elif kind == "csv":
            yield from csv_records(path)
        elif kind == "txt":
            yield from text_records(path)
        else:
            with open_text(path) as file:
                yield from line_records(file, path)


def lines_between(path: Path, start: int, stop: int) -> Iterator[bytes]:
    """Yield the lines of a file that start in these bytes."""
    with path.open("rb") as file:
        if start:
            file.seek(start - 1)
            file.readline()  # the rest of a line that starts before
        while file.tell() < stop and (line := file.readline()):
            yield line


def line_records(
    lines: Iterable[bytes], path: Path | None = None, *, is_start: bool = True
) -> Iterator[tuple[int, Any]]:
    """Yield the records of JSON Lines as in `read_records`, with lines counted from 1.

    Args:
        path: if given, a file that is one object over several lines is refused.
        is_start: whether the first line is the file's first.

    Raises:
        DataError: such a file.
    """
    for line, raw in enumerate(lines, 1):
        raw = raw.removeprefix(codecs.BOM_UTF8)  # files that were joined have one in the middle
        if line == 1 and is_start and path is not None and raw.strip() == b"{":
            raise DataError(
                "the file is one JSON object over several lines",
                where=f"{path}:1",
                fix="write one record per line (.jsonl), or a JSON array of records",
            )
        if raw.strip():
            yield line, decode_record(raw.rstrip(b"\r\n"))


def decode_record(raw: bytes) -> Any:
    """Return the record on a line of JSON Lines, or the RecordProblem that explains why there is
    none.
    """
    keys = UniqueKeys()
    try:
        return keys.checked(json.loads(raw.decode("utf-8"), object_pairs_hook=keys))
    except UnicodeDecodeError as error:
        return RecordProblem(NOT_UTF8, f"byte {error.start + 1} of the line{_other_encoding(raw)}")
    except json.JSONDecodeError as error:
        return RecordProblem("broken JSON", f"{error.msg} at column {error.colno}")
    # a number with thousands of digits; thousands of nested brackets
    except (ValueError, RecursionError) as error:
        return RecordProblem("broken JSON", str(error).split(";")[0])


def _other_encoding(raw: bytes) -> str:
    """Return a hint about a line that is JSON in the encoding of Chinese Windows."""
    try:
        json.loads(raw.decode("gb18030"))
    except ValueError:
        return ""
    return "; it reads as GBK"
