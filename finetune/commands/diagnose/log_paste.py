"""What people paste: text that a console wrote in another encoding, quoted or indented."""

from __future__ import annotations

import contextlib
import re
import textwrap
from typing import BinaryIO

# A longer text is a log as a program wrote it.
PASTE_BYTES = 64 << 10
_FENCED = re.compile(r"^\W{0,3}(?:```|~~~)[\w+-]*\s*?\n(.*?)^\W{0,3}(?:```|~~~)\s*$", re.M | re.S)


def as_written(first: bytes, file: BinaryIO) -> bytes:
    """Return the first block of a log as its program wrote it: in UTF-8, without quotes.

    Args:
        first: what was read so far.
        file: the rest, which is read too if the text has another encoding.
    """
    if first.startswith((b"\xff\xfe", b"\xfe\xff")) and b"\0" in first:  # PowerShell's
        return unquoted((first + file.read()).decode("utf-16", errors="replace")).encode()
    if len(first) >= PASTE_BYTES:
        return first
    for encoding in ("utf-8", "gb18030"):
        with contextlib.suppress(UnicodeDecodeError):
            return unquoted(first.decode(encoding)).encode()
    return first


def unquoted(text: str) -> str:
    """Return a text without the quotes or the indentation that all of it has.

    Of a text with code in fences, most of whose lines are fenced, the fenced lines are kept.
    """
    fenced = "".join(_FENCED.findall(text))
    if fenced.count("\n") * 2 > text.count("\n"):
        text = fenced
    lines = [line for line in text.splitlines() if line.strip()]
    if lines and all(re.match(r"\s*>+ ?(?!>)", line) for line in lines):
        text = re.sub(r"(?m)^\s*>+ ?", "", text)
    return textwrap.dedent(text)
