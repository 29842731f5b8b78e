"""The records of a JSON array one by one, with their lines; of a file of any size only some of the
text is held.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from finetune.data.reading.file_kinds import open_text
from finetune.errors import DataError

CHUNK_BYTES = 1 << 20
# What a text that goes on may still change: the end of a number ("1." of "1.5", "1e+" of "1e+5"),
# and where an error is found that is none (before the rest of "-Infinity", of "\ud83d\ude00").
_TAIL = 16
_NO_SPACE = re.compile(r"[^ \t\r\n]")


def array_records(path: Path) -> Iterator[tuple[int, Any]]:
    """`(line, record)` of a file that begins with `[`; lines count from 1.

    Raises:
        DataError: the array is broken (records after the break cannot be told apart), or not UTF-8.
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
        self._json = json.JSONDecoder()
        self._read_bytes = 0  # without the mark at the beginning, which is no text
        self._ended = False
        self.text = ""
        self.position = 0
        # the line at that place of `text`
        self._line = 1
        self._counted = 0

    def skip_space(self) -> None:
        """Go on to what is no white space, or to the end."""
        while True:
            found = _NO_SPACE.search(self.text, self.position)
            self.position = found.start() if found else len(self.text)
            if found or not self._extend():
                return

    def decode(self) -> Any:
        """The value that begins here; go on to its end."""
        while True:
            try:
                value, end = self._json.raw_decode(self.text, self.position)
            except (ValueError, RecursionError) as error:
                if self._may_go_on(error) and self._extend():
                    continue
                raise self.broken(
                    getattr(error, "pos", self.position), getattr(error, "msg", str(error))
                ) from error
            if len(self.text) - end < _TAIL and self._extend():
                continue
            self.position = end
            return value

    def line_at(self, place: int) -> int:
        """The line of a place in `text` that is not before those asked for so far."""
        self._line += self.text.count("\n", self._counted, place)
        self._counted = place
        return self._line

    def broken(self, place: int | None, reason: str, line: int | None = None) -> DataError:
        """The error for what is wrong at a place; text that is not UTF-8, wherever, is raised
        instead.
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

    def _may_go_on(self, error: ValueError | RecursionError) -> bool:
        """Whether more text may make it right: it ends inside a text, or near where the error
        is.
        """
        if not isinstance(error, json.JSONDecodeError):
            return False
        return error.msg.startswith("Unterminated string") or len(self.text) - error.pos < _TAIL

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
