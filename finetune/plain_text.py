"""What may be shown of a text that others wrote: nothing that a terminal would obey, no password,
no key.
"""

from __future__ import annotations

import re

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)")
# C0 but tab, DEL, C1 (U+009B begins an escape sequence too), line separators, and what turns the
# direction of writing.
CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_PASSWORD = re.compile(r"(?<=://)[^/\s@]*:[^/\s@]*(?=@)")
_SECRETS = (
    re.compile(r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|xox[abpr]-|AKIA|glpat-|wandb_v1_)[A-Za-z0-9_-]{8,}"),
    re.compile(r"(?i)(?<=bearer )[\w.~+/=-]{8,}"),
    _PASSWORD,
    re.compile(r"""(?i)(?<![\w-])((?:[\w-]*(?:api[_-]?key|secret|passwd|password|token|access[_-]?key))["']?\s*[=:]\s*["']?)[^\s"',;]{6,}"""),
    re.compile(r"\b[0-9a-f]{40}\b"),
)  # fmt: skip


def plain_text(text: str) -> str:
    """Return a line without what a terminal would obey: escape sequences, control characters,
    turned writing directions.
    """
    if text.isprintable():
        return text
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", _ESCAPES.sub("", text))


def plain_lines(text: str) -> str:
    """Do the same as `plain_text` for several lines: newlines stay, and so do the carriage returns
    of a progress bar.
    """
    if text.isprintable():
        return text
    return "".join(
        part if part in "\r\n" else plain_text(part) for part in re.split(r"([\r\n])", text)
    )


def mask_passwords(text: str) -> str:
    """User and password of every address (`http://user:password@mirror`) replaced by ***."""
    return _PASSWORD.sub("***", text)


def mask_secrets(text: str) -> str:
    """Keys, tokens and passwords replaced by ***."""
    for form in _SECRETS:
        text = form.sub(lambda match: (match[1] if match.re.groups else "") + "***", text)
    return text
