"""What commands write to a terminal holds only what they mean: names of files and words of logs
come from others.

A file's name may hold an escape sequence as well as a log may. So it is not left to each text: the
streams of a command take out what a terminal would obey, and `console` does where colours and bars
are drawn.
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

# What a line may break behind: a word, or a command in backticks, with its spaces; a Chinese
# character.
_PIECE = re.compile(r"(?:`[^`]*`|[^\s\u2e80-\uffef])+\s*|[\u2e80-\uffef]\s*|\s+")
_NOT_FIRST = "，。、；：？！）」』】》"


class PlainStream(io.TextIOWrapper):
    """A stream over another one's bytes; `unfiltered` is the other one."""

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
    """Filter what is written to stdout and stderr where they are terminals; a file gets everything
    as it is.
    """
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
                stream.detach()  # else it would close the other one's bytes when it goes
        sys.stdout, sys.stderr = before


@contextlib.contextmanager
def libraries_to_stderr() -> Iterator[None]:
    """What is written to stdout meanwhile, from C too, goes to stderr: stdout is for the command's
    own answer.
    """
    # The gloo of torch 2.10 says there which ranks have met, and NCCL what NCCL_DEBUG asks for.
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)  # what C has written into its buffer only
        os.dup2(own, 1)
        os.close(own)


def console(*, stderr: bool = False, **settings: Any) -> Console:
    """rich's console, with its own escape sequences and nobody else's."""
    from rich.console import Console
    from rich.segment import Segment

    class PlainConsole(Console):
        def render(self, renderable: Any, options: Any = None) -> Any:
            for segment in super().render(renderable, options):
                yield (
                    segment
                    if segment.control
                    else Segment(plain_lines(segment.text), segment.style)
                )

    stream = sys.stderr if stderr else sys.stdout
    return PlainConsole(file=getattr(stream, "unfiltered", stream), **settings)


def write_filled(text: str) -> None:
    """Write lines to stdout; where it is a terminal, long ones break between words and go on
    indented.
    """
    if sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
        text = "\n".join(row for line in text.splitlines() for row in filled(line, columns))
    sys.stdout.write(text.rstrip("\n") + "\n")


def filled(line: str, columns: int) -> list[str]:
    """A line in rows of at most so many columns, longer words excepted; later rows are indented by
    4 more.
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
