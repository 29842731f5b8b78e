"""Output of commands to a terminal, without escape sequences from file names and logs.

The name of a file can contain an escape sequence, and so can a log. Single messages do not have to
handle that: the streams of a command remove what a terminal would interpret, and `console` does for
colors and bars.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import re
import shutil
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from finetune.plain_text import plain_lines

if TYPE_CHECKING:
    from rich.console import Console

# A line may break after these: a word, or a command in backticks, with its spaces; a Chinese
# character.
_PIECE = re.compile(r"(?:`[^`]*`|[^\s\u2e80-\uffef])+\s*|[\u2e80-\uffef]\s*|\s+")
_NOT_FIRST = "，。、；：？！）」』】》"


class PlainStream(io.TextIOWrapper):
    """A stream over the bytes of another stream, `unfiltered`."""

    def __init__(self, unfiltered: TextIO) -> None:
        super().__init__(
            unfiltered.buffer,
            encoding=unfiltered.encoding,
            errors=unfiltered.errors,
            line_buffering=True,
        )
        self.unfiltered = unfiltered

    def write(self, text: str) -> int:
        super().write(plain_lines(text))
        return len(text)


@contextlib.contextmanager
def plain_streams() -> Iterator[None]:
    """Filter stdout and stderr if they are terminals; a file gets everything unchanged."""
    before = sys.stdout, sys.stderr
    for name, stream in zip(("stdout", "stderr"), before, strict=True):
        if (
            isinstance(stream, io.TextIOWrapper)
            and not isinstance(stream, PlainStream)
            and stream.isatty()
        ):
            setattr(sys, name, PlainStream(stream))
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, PlainStream) and stream.unfiltered in before:
                stream.flush()
                # otherwise it would close the other stream's bytes when it is freed
                stream.detach()
        sys.stdout, sys.stderr = before


@contextlib.contextmanager
def libraries_to_stderr() -> Iterator[None]:
    """Send stdout, from C too, to stderr within a block: stdout is for the command's own result."""
    # On stdout, torch 2.10's gloo prints which ranks are connected, and NCCL what NCCL_DEBUG
    # requests.
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)  # what is only in C's buffer
        os.dup2(own, 1)
        os.close(own)


def console(*, stderr: bool = False, **settings: Any) -> Console:
    """Return rich's console, with its own escape sequences and no others."""
    from rich.console import Console
    from rich.segment import Segment

    class PlainConsole(Console):
        def render(self, renderable: Any, options: Any = None) -> Any:
            for segment in super().render(renderable, options):
                if not segment.control:
                    segment = Segment(plain_lines(segment.text), segment.style)
                yield segment

    stream = sys.stderr if stderr else sys.stdout
    return PlainConsole(file=getattr(stream, "unfiltered", stream), **settings)


def write_filled(text: str) -> None:
    """Write lines to stdout; if it is a terminal, break long lines between words and indent the
    rest.
    """
    if sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
        text = "\n".join(row for line in text.splitlines() for row in filled(line, columns))
    sys.stdout.write(text.rstrip("\n") + "\n")


def filled(line: str, columns: int) -> list[str]:
    """Break a line into rows of at most `columns`, except for longer words; later rows are indented
    by 4 more.
    """
    from rich.cells import cell_len

    indent = " " * (len(line) - len(line.lstrip()) + 4)
    rows, row = [], ""
    for piece in _PIECE.findall(line):
        if row.strip() and piece[0] not in _NOT_FIRST and cell_len(row + piece.rstrip()) > columns:
            rows.append(row.rstrip())
            row = indent
        row += piece
    return [*rows, row.rstrip()]
