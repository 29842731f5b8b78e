"""Kinds of data files by their names, compression, and the records of those that are not JSON."""

from __future__ import annotations

import bz2
import codecs
import contextlib
import csv
import gzip
import io
import json
import lzma
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from finetune.data.reading.arrow_nulls import may_have_fillers, without_fillers
from finetune.data.report import NOT_UTF8, RecordProblem
from finetune.errors import DataError

if TYPE_CHECKING:
    from pyarrow import RecordBatch

TEXT_SUFFIXES = (".json", ".jsonl", ".csv", ".txt")
SUFFIXES = (*TEXT_SUFFIXES, ".parquet", ".arrow")


_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
KINDS_IN_WORDS = (
    f"{', '.join(SUFFIXES)}; of the first four also with {', '.join(_COMPRESSIONS)} behind"
)


def is_data_file(path: Path) -> bool:
    """Return whether the name is that of a supported file type."""
    suffix, compression = suffixes(path)
    return suffix in (TEXT_SUFFIXES if compression else SUFFIXES)


def is_compressed(path: Path) -> bool:
    """Return whether a file must be read from its beginning; parquet and arrow compress inside."""
    return bool(suffixes(path)[1])


def suffixes(path: Path) -> tuple[str, str]:
    """`.jsonl` and `.gz` of `rows.jsonl.gz`; the second is empty if nothing compresses the file."""
    last = path.suffix.lower()
    if last not in _COMPRESSIONS:
        return last, ""
    return path.with_suffix("").suffix.lower(), last


@contextlib.contextmanager
def wrap_read_errors(path: Path) -> Iterator[None]:
    """Turn the errors of the system and of compression into DataError."""
    try:
        yield
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"cannot be read: {reason}", where=str(path), fix="check the file"
        ) from error


# First bytes of files whose content does not match their name, and the fix.
_SIGNATURES = {
    codecs.BOM_UTF16_LE: ("UTF-16 text", "save it as UTF-8 (iconv -f UTF-16 -t UTF-8)"),
    codecs.BOM_UTF16_BE: ("UTF-16 text", "save it as UTF-8 (iconv -f UTF-16 -t UTF-8)"),
    b"\x1f\x8b": ("compressed by gzip", "add .gz to its name"),
    b"BZh": ("compressed by bzip2", "add .bz2 to its name"),
    b"\xfd7zXZ\x00": ("compressed by xz", "add .xz to its name"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "add .zst to its name"),
    b"PK\x03\x04": ("a zip archive", "unpack it and name the files inside"),
    b"PAR1": ("parquet", "call it .parquet"),
    b"ARROW1": ("Arrow", "call it .arrow"),
}


def check_encoding(path: Path) -> None:
    """Refuse a text file whose first bytes show that it is something else.

    Raises:
        DataError: it is UTF-16, compressed, an archive, or a columnar file.
    """
    with open_text(path) as file:
        first = file.read(8)
    for signature, (kind, fix) in _SIGNATURES.items():
        if first.startswith(signature):
            raise DataError(f"is {kind}, and its name says text", where=str(path), fix=fix)


class UniqueKeys:
    """A hook for `json` that makes each object a dict and notes a key that an object has twice.

    Attributes:
        repeated: the first such key; empty if there is none.
    """

    def __init__(self) -> None:
        self.repeated = ""

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Make the dict of one object."""
        made = dict(pairs)
        if len(made) < len(pairs) and not self.repeated:
            names = [name for name, _ in pairs]
            self.repeated = next(name for name in names if names.count(name) > 1)
        return made

    def checked(self, value: Any) -> Any:
        """Return the record that was read, or a RecordProblem if a key came twice."""
        if not self.repeated:
            return value
        return RecordProblem("key given twice", f"{self.repeated!r}; which one is meant?")


def open_text(path: Path) -> IO[bytes]:
    """Open the file's bytes, decompressed. Errors are wrapped as in `wrap_read_errors`, also while
    reading.
    """
    compression = suffixes(path)[1]
    if compression == ".zst":
        import pyarrow

        # The wheels of pyarrow have zstd; Python before 3.14 has not.
        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    openers: dict[str, Any] = {
        ".gz": gzip.open,
        ".bz2": bz2.open,
        ".xz": lzma.open,
    }
    return cast("IO[bytes]", openers.get(compression, open)(path, "rb"))


def file_kind(path: Path) -> str:
    """Return how a file's records are separated: parquet, arrow, csv, txt, array or lines.

    May raise as `open_text`.
    """
    suffix = suffixes(path)[0]
    if suffix in (".parquet", ".arrow"):
        return suffix[1:]
    check_encoding(path)
    if suffix in (".csv", ".txt"):
        return suffix[1:]
    return "array" if first_character(path) == b"[" else "lines"


def first_character(path: Path) -> bytes:
    """Return the first byte that is not white space; empty if there is none. `[` starts an array of
    records.
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
        DataError: no header, a name twice in it, broken quotes (the records after them cannot be
            separated), not UTF-8.
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


def text_records(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield `(line, record)` of plain text: each line that is not blank is a record of text.

    So does `load_dataset("text")`, which other tools read .txt files with.
    """
    with open_text(path) as file:
        for line, raw in enumerate(file, 1):
            raw = raw.removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n")
            if not raw.strip():
                continue
            try:
                yield line, {"text": raw.decode("utf-8")}
            except UnicodeDecodeError as error:
                yield line, RecordProblem(NOT_UTF8, f"byte {error.start + 1} of the line")


def parquet_batches(path: Path, records: int) -> Iterator[RecordBatch]:
    """Yield the records of a parquet file in batches of at most `records`.

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
    """Return the records of a batch as Python objects.

    Raises:
        DataError: two columns of one name, or a value that Python has not: a time beyond the year
            9999, a text that is not UTF-8.
    """
    names = batch.schema.names
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise DataError(
            f"has the column {twice[0]!r} twice", where=str(path), fix="name each column once"
        )
    try:
        records = batch.to_pylist()
        return list(map(without_fillers, records)) if may_have_fillers(batch.schema) else records
    except (OverflowError, ValueError) as error:
        what = f"has a value that cannot be read: {error}"
        raise DataError(
            what, where=str(path), fix="leave the column out, or write it as text"
        ) from error


def arrow_batches(path: Path, records: int) -> Iterator[RecordBatch]:
    """Yield the records of an Arrow IPC file or stream (`datasets` writes streams) in batches of at
    most `records`.

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
                    numbers = range(first, min(first + records, batch.num_rows))
                    # Copied: a slice sent to another process takes all of its batch along.
                    yield batch.take(pyarrow.array(numbers))
    except pyarrow.ArrowInvalid as error:
        raise DataError(
            f"is no Arrow file: {error}", where=str(path), fix="write the file again"
        ) from error


# kind -> what reads such a file in batches: (path, maximum records of a batch)
BATCHES = {"parquet": parquet_batches, "arrow": arrow_batches}

# ---------------------------------------------------------------- JSON arrays

CHUNK_BYTES = 1 << 20
# How close to the end of the text read so far a result may still change with more text. A number
# may change: "1." may become "1.5", "1e+" may become "1e+5". An error may turn out to be none, if
# the rest of "-Infinity" or "\ud83d\ude00" is still missing.
_TAIL = 16
_NO_SPACE = re.compile(r"[^ \t\r\n]")


def array_records(path: Path) -> Iterator[tuple[int, Any]]:
    """`(line, record)` of a file that begins with `[`; lines count from 1.

    Raises:
        DataError: the array is broken (the records after that cannot be separated), or not UTF-8.
        OSError: the file cannot be read.
    """
    with open_text(path) as file:
        text = _Text(file, path)
        text.skip_space()
        text.position += 1  # "["
        expected = "value or ]"
        while True:
            text.skip_space()
            following = text.text[text.position : text.position + 1]
            if following == "]" and expected in ("value or ]", ", or ]"):
                break
            if expected == ", or ]":
                if following != ",":
                    raise text.broken(text.position, "a comma or ] is missing after a record")
                text.position, expected = text.position + 1, "value"
                continue
            line = text.line_at(text.position)
            yield line, text.decode()
            expected = ", or ]"
        text.position += 1
        line = text.line_at(text.position)
        text.skip_space()
        if text.position < len(text.text):
            raise text.broken(None, "there is text after the closing ]", line)


class _Text:
    """A file's text from `position` on, as far as it was needed; what is behind is let go."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file = file
        self._path = path
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._json = json.JSONDecoder(object_pairs_hook=self._object)
        self._keys = UniqueKeys()
        self._read_bytes = 0  # without the mark at the beginning, which is no text
        self._ended = False
        self.text = ""
        self.position = 0
        # the line at that place of `text`
        self._line = 1
        self._counted = 0

    def skip_space(self) -> None:
        """Move to the next character that is no white space, or to the end."""
        while True:
            found = _NO_SPACE.search(self.text, self.position)
            self.position = found.start() if found else len(self.text)
            if found or not self._extend():
                return

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return self._keys(pairs)

    def decode(self) -> Any:
        """Return the value that begins here, or a RecordProblem, and move to its end."""
        while True:
            self._keys = UniqueKeys()
            try:
                value, end = self._json.raw_decode(self.text, self.position)
            except (ValueError, RecursionError) as error:
                # More text may make it right where it ends inside a text, or near the error.
                may_go_on = isinstance(error, json.JSONDecodeError) and (
                    error.msg.startswith("Unterminated string")
                    or len(self.text) - error.pos < _TAIL
                )
                if may_go_on and self._extend():
                    continue
                raise self.broken(
                    getattr(error, "pos", self.position), getattr(error, "msg", str(error))
                ) from error
            if len(self.text) - end < _TAIL and self._extend():
                continue
            self.position = end
            return self._keys.checked(value)

    def line_at(self, place: int) -> int:
        """Return the line of a position in `text`, which must not be before earlier queries."""
        self._line += self.text.count("\n", self._counted, place)
        self._counted = place
        return self._line

    def broken(self, place: int | None, reason: str, line: int | None = None) -> DataError:
        """Return the error for a problem at a position; if the text is not UTF-8 anywhere, that
        error is raised instead.
        """
        line = self.line_at(place) if place is not None else line
        while self._extend():
            self.position = len(self.text)
        return DataError(
            f"broken JSON: {reason}",
            where=f"{self._path}:{line}",
            fix=(
                "correct the array; only .jsonl files, one record per line, can leave out a"
                " broken one"
            ),
        )

    def _extend(self) -> bool:
        """Read on, as much again as is held; False at the end."""
        if self._ended:
            return False
        raw = self._file.read(max(CHUNK_BYTES, len(self.text) - self.position))
        self._ended = not raw
        if not self._read_bytes:
            raw = raw.removeprefix(codecs.BOM_UTF8)
        begin = self._read_bytes - len(self._decoder.getstate()[0])
        try:
            more = self._decoder.decode(raw, final=self._ended)
        except UnicodeDecodeError as error:
            raise DataError(
                f"is not UTF-8 at byte {begin + error.start}",
                where=str(self._path),
                fix="save the file as UTF-8",
            ) from error
        self._read_bytes += len(raw)
        if self._ended:
            return False
        self.line_at(self.position)
        self.text, self.position, self._counted = self.text[self.position :] + more, 0, 0
        return True
