"""A corpus: files -> units of input of about a MiB -> documents. Units are read alone, in any
process, in any order.
"""

from __future__ import annotations

import codecs
import glob
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.config.files import similar_files
from finetune.config.names import nearest
from finetune.data.corpus.parquet_files import read_texts, row_groups
from finetune.data.problems import RecordProblem
from finetune.data.reading.file_kinds import first_character
from finetune.data.reading.files import (
    decode_record,
    expand_each,
    glob_files,
    named_twice,
    read_records,
    visible_files,
)
from finetune.errors import DataError

logger = logging.getLogger("finetune")

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


@dataclass(frozen=True)
class Piece:
    """A part of one file that is read as a whole."""

    path: str
    kind: str  # "text" (one document), "lines" (JSON Lines), "array" (a JSON array) or "parquet"
    # start, stop: bytes of the file; for lines, those that start in here; for parquet, a row group
    start: int
    stop: int
    size_bytes: int  # the piece's share of its file, for the progress


Unit = tuple[Piece, ...]


def find_files(paths: Sequence[str]) -> tuple[Path, ...]:
    """Turn files, folders and globs into files, in the order given; within a folder or glob sorted
    by name.

    A folder is searched to the bottom for records and for text by suffix (`RECORD_SUFFIXES`,
    `TEXT_SUFFIXES`), hidden files and folders left out; a file or a glob names text of any suffix.

    Raises:
        DataError: nothing there, or compressed files; `Problems` for several.
    """
    files = expand_each(paths, _expand)
    packed = [path for path in files if path.suffix.lower() in _PACKED_SUFFIXES]
    if packed:
        more = f" and {len(packed) - 1} more" if len(packed) > 1 else ""
        raise DataError(f"compressed files are not read{more}", str(packed[0]), "unpack them first")
    if twice := named_twice(files):
        logger.warning("read more than once, as asked: %s", ", ".join(twice[:5]))
    return tuple(files)


def _expand(given: str) -> list[Path]:
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
    """A data set from a hub has a README beside its parquet files."""
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
    open_unit: list[Piece] = []
    size_bytes = 0
    for path in files:
        try:
            pieces = _pieces(path)
        except OSError as error:
            raise DataError(
                f"cannot be read: {error.strerror or error}", str(path), "check the file"
            ) from error
        for piece in pieces:
            if open_unit and size_bytes + piece.size_bytes > UNIT_BYTES:
                yield tuple(open_unit)
                open_unit, size_bytes = [], 0
            open_unit.append(piece)
            size_bytes += piece.size_bytes
    if open_unit:
        yield tuple(open_unit)


def _pieces(path: Path) -> Iterator[Piece]:
    size_bytes = path.stat().st_size
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        groups = row_groups(path)
        for group in range(groups):
            yield Piece(str(path), "parquet", group, group + 1, size_bytes // groups)
    elif suffix in RECORD_SUFFIXES and first_character(path) == b"[":
        yield Piece(str(path), "array", 0, size_bytes, size_bytes)
    else:
        kind = "lines" if suffix in RECORD_SUFFIXES else "text"
        for start in range(0, size_bytes, UNIT_BYTES):
            stop = min(start + UNIT_BYTES, size_bytes)
            yield Piece(str(path), kind, start, stop, stop - start)


# file, line (record for parquet) from 1; 0 where it is the file as a whole
Location = tuple[str, int]


def documents_of(unit: Unit, text_field: str) -> Iterator[tuple[Location, str | RecordProblem]]:
    """The documents of a unit in order, each with its location; `RecordProblem` for a record that
    is none.

    A document with nothing but white space is given too: the caller leaves it out and counts it.

    Raises:
        DataError: a file that cannot be read, or a broken JSON array or parquet file.
    """
    for piece in unit:
        try:
            for line, found in _READERS[piece.kind](piece, text_field):
                yield (piece.path, line), found
        except OSError as error:
            raise DataError(
                f"cannot be read: {error.strerror or error}", piece.path, "check the file"
            ) from error


def _read_text(piece: Piece, text_field: str) -> Iterator[tuple[int, str | RecordProblem]]:
    with open(piece.path, "rb") as file:
        start, stop = _cut(file, piece.start), _cut(file, piece.stop)
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
    """Where a text file is cut near a byte: after the next end of a line, else between two
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


def _read_lines(piece: Piece, text_field: str) -> Iterator[tuple[int, str | RecordProblem]]:
    """The records of the lines that start in the piece."""
    with open(piece.path, "rb") as file:
        if piece.start:
            file.seek(piece.start - 1)
            file.readline()  # the rest of the line that the piece before has read
        before: int | None = None  # lines before the piece; counted when a problem needs its line
        line = 0
        while file.tell() < piece.stop and (raw := file.readline()):
            line += 1
            if not piece.start and line == 1:
                raw = raw.removeprefix(codecs.BOM_UTF8)
            if not raw.strip():
                continue
            found = _text_of(decode_record(raw.rstrip(b"\r\n")), text_field)
            if isinstance(found, RecordProblem) and before is None:
                before = _lines_before(piece)
            yield line + (before or 0), found


def _lines_before(piece: Piece) -> int:
    """How many lines start before the piece."""
    if not piece.start:
        return 0
    lines, left, last = 0, piece.start, b""
    with open(piece.path, "rb") as file:
        while left and (block := file.read(min(left, 1 << 20))):
            lines += block.count(b"\n")
            left -= len(block)
            last = block[-1:]
    return lines + (last != b"\n")


def _read_array(piece: Piece, text_field: str) -> Iterator[tuple[int, str | RecordProblem]]:
    for line, record in read_records(Path(piece.path)):
        yield line, _text_of(record, text_field)


def _read_parquet(piece: Piece, text_field: str) -> Iterator[tuple[int, str | RecordProblem]]:
    for record, value in read_texts(Path(piece.path), piece.start, text_field):
        yield (
            record,
            (
                value
                if isinstance(value, RecordProblem)
                else _text_of({text_field: value}, text_field)
            ),
        )


_READERS = {
    "text": _read_text,
    "lines": _read_lines,
    "array": _read_array,
    "parquet": _read_parquet,
}


def _text_of(record: Any, text_field: str) -> str | RecordProblem:
    if isinstance(record, RecordProblem):
        return record
    if not isinstance(record, dict):
        return RecordProblem("not an object", f"a {type(record).__name__}")
    if text_field not in record:
        fields = ", ".join(map(str, record))
        return RecordProblem(
            f"no field {text_field}", f"its fields are {fields}{_meant(text_field, record)}"
        )
    value = record[text_field]
    if not isinstance(value, str):
        return RecordProblem(f"{text_field} is no text", f"a {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can write what UTF-8 cannot
        return RecordProblem("half of a surrogate pair", f"character {error.start + 1} of the text")
    return value


def _meant(text_field: str, known: Sequence[str] | dict[str, Any]) -> str:
    guess = nearest(text_field, map(str, known))
    return f"; did you mean --text-field {guess}?" if guess else ""
