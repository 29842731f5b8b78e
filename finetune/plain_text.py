"""What may be shown of a text that others wrote: nothing that a terminal would obey, and no password of an address."""

from __future__ import annotations

import re

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)")
# C0 but tab, DEL, C1 (U+009B begins an escape sequence too), line separators, and what turns the direction of writing.
CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_PASSWORD = re.compile(r"(?<=://)[^/\s@]*:[^/\s@]*(?=@)")


def plain_text(text: str) -> str:
    """A line without what a terminal would obey: escape sequences, control characters, turned writing directions."""
    if text.isprintable():
        return text
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", _ESCAPES.sub("", text))


def plain_lines(text: str) -> str:
    """As `plain_text`, for several lines: newlines stay, and the carriage returns of a progress bar."""
    if text.isprintable():
        return text
    return "".join(part if part in "\r\n" else plain_text(part) for part in re.split(r"([\r\n])", text))


def mask_passwords(text: str) -> str:
    """User and password of every address (`http://user:password@mirror`) replaced by ***."""
    return _PASSWORD.sub("***", text)
