"""The answer in a text, and whether it is the expected one. Needs no torch.

A text gives its answer after the last `Answer:`, `答案：` or `####` (GSM8K's mark) that begins a
line; a text without one is the answer as a whole. Two answers are the same if they are after this,
and only this:

- full-width signs are read as their ASCII ones, white space around them, quotes, bold and a final
  stop do not count;
- a number is its value: 163.80 is 163.8, and 1,440 is 1440. Only where it stands alone or before a
  unit: addresses, prefixes, versions and names with digits (10.0.0.0, /21, R10) are texts;
- a unit stays, with its case: 150 kB is 150kB, but neither 150 nor 150 KB nor 150000 B. Only µs is
  also us;
- texts are compared without regard to case; the items of a list in their order, whatever comma is
  between them.
"""

from __future__ import annotations

import re

_MARK = re.compile(
    r"^[\s*_#>-]*(?:(?:final\s+)?answer[\s*_]*[:：]|(?:最终)?答案[\s*_]*[:：]|#{4}\s)[*_]*",
    re.I | re.M,
)
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_QUANTITY = re.compile(r"([-+]?\d+(?:\.\d+)?)\s*([^\W\d_]+(?:/[^\W\d_]+)?|%|°[CF]?)?")
# Full-width forms of ASCII signs lie together; the others have places of their own.
_ASCII = {0xFF01 + offset: 0x21 + offset for offset in range(94)}
_ASCII |= {
    ord(sign): ord(ascii_sign)
    for sign, ascii_sign in {"\u3000": " ", "。": ".", "、": ",", "−": "-"}.items()
}
_ASCII |= {ord("µ"): ord("u"), ord("μ"): ord("u")}
_QUOTES = "\"'`*“”‘’「」 \t"


def find_answer(text: str) -> str | None:
    """The answer that a text gives, as it is written; None where it says nothing."""
    text = text.rpartition("</think>")[2]
    marks = list(_MARK.finditer(text))
    if marks:
        text = text[marks[-1].end() :].lstrip(" \t").partition("\n")[0]
    return text.strip() or None


def normalise(answer: str) -> tuple[str, ...]:
    """The answer's items in the one form that equal answers share."""
    # A full-width comma separates items and never thousands.
    text = _THOUSANDS.sub(lambda found: found.group().replace(",", ""), answer.strip())
    text = _trim(text.translate(_ASCII))
    return tuple(_item(item) for item in text.split(","))


def same_answer(given: str | None, expected: str) -> bool:
    """Whether an answer is the expected one."""
    return given is not None and normalise(given) == normalise(expected)


def _item(text: str) -> str:
    text = " ".join(_trim(text).split())
    quantity = _QUANTITY.fullmatch(text)
    if quantity is None:
        return text.casefold()
    return f"{_number(quantity[1])} {quantity[2] or ''}".strip()


def _number(text: str) -> str:
    """Without zeros, sign and point that change nothing; exact, however long it is."""
    whole, _, fraction = text.lstrip("+-").partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return f"-{value}" if text.startswith("-") and value != "0" else value


def _trim(text: str) -> str:
    """Without quotes and bold around it, and without a final stop."""
    while (shorter := text.strip(_QUOTES).removesuffix(".")) != text:
        text = shorter
    return text
