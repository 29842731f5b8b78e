"""Data records as prompts: the messages, the difficulty, and the answer that can be checked.

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

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.formats import Conversation, Message
from finetune.data.reading.files import read_records
from finetune.data.records import RecordReader
from finetune.data.report import RecordProblem
from finetune.data.tools import Tools
from finetune.errors import ConfigError, DataError

logger = logging.getLogger("finetune")

MOST_DIFFICULTIES = 50
_RESPONSES = ("response", "completion", "output")  # keys of formats


@dataclass(frozen=True)
class EvalPrompt:
    """One record to answer."""

    record: int  # its number, from 0 through the files in order
    difficulty: str | None
    turns: tuple[Message, ...]  # before the last answer
    tools: Tools  # that may be called
    answer: str | None  # what a right answer says; None where that cannot be checked
    consistent: bool  # whether the record's own output gives that answer

    @property
    def messages(self) -> tuple[Mapping[str, str], ...]:
        """The turns as role and content."""
        return tuple({"role": message.role, "content": message.content} for message in self.turns)


def find_difficulties(
    paths: Sequence[Path], field: str, known: Sequence[str] = ()
) -> tuple[str, ...]:
    """The difficulties that records name: those of `known` that occur, then others as they come.

    Raises:
        ConfigError: so many that it is no difficulty.
    """
    found: Counter[str] = Counter()
    for path in paths:
        for _line, record in read_records(path):
            value = record.get(field) if isinstance(record, Mapping) else None
            if isinstance(value, (str, int)) and not isinstance(value, bool) and str(value).strip():
                found[str(value).strip()] += 1
    if len(found) > MOST_DIFFICULTIES:
        raise ConfigError(
            f"'{field}' has {len(found):,} different values, at most {MOST_DIFFICULTIES} can be"
            " difficulties",
            "--difficulty-field",
            "name a field with a few values, or one that no record has",
        )
    return (
        *(name for name in known if name in found),
        *(name for name in found if name not in known),
    )


_PAIR_KEYS = ("rejected", "rejected_response", "rejected_messages")


def has_pairs(path: Path, columns: Mapping[str, str] | None) -> bool:
    """Whether the first record of a file has a rejected answer.

    Args:
        columns: our key -> the key that the data has for it.
    """
    record = next((record for _, record in read_records(path)), None)
    names = [(columns or {}).get(key, key) for key in _PAIR_KEYS]
    return isinstance(record, Mapping) and any(record.get(name) is not None for name in names)


def read_prompts(
    files: Iterable[tuple[Path, RecordReader]], answer_field: str, records: Sequence[int]
) -> list[EvalPrompt]:
    """The prompts of the records with these numbers, which are known to be good; counted as for
    training.

    A plain text asks nothing, and has none.

    Args:
        files: each with how its records are read.
        answer_field: the data's own key, whatever it is read as.

    Raises:
        DataError: an answer that is neither text nor number.
    """
    wanted, prompts, number = set(records), [], -1
    for path, reader in files:
        for line, record, found in reader.file(path):
            number += 1
            # `prepare_samples` has reported what is bad.
            if (
                number in wanted
                and not isinstance(found, RecordProblem)
                and found.plain_text is None
            ):
                answer = _answer(record, reader, answer_field)
                prompts.append(_prompt(number, f"{path}:{line}", found, answer_field, answer))
    return prompts


def _answer(record: Mapping[str, Any], reader: RecordReader, answer_field: str) -> Any:
    """What a record has under the data's own key; where that is the response, the answer that it
    gives.
    """
    answer = reader.value_of(record, answer_field)
    read_as = next(
        (ours for ours, theirs in reader.columns.items() if theirs == answer_field), None
    )
    if read_as is None:
        return answer
    return find_answer(answer) if read_as in _RESPONSES and isinstance(answer, str) else None


def _prompt(
    number: int, location: str, conversation: Conversation, answer_field: str, answer: Any
) -> EvalPrompt:
    *before, last = conversation.messages
    if answer is not None and (
        isinstance(answer, bool) or not isinstance(answer, (str, int, float))
    ):
        raise DataError(
            f"'{answer_field}' is {type(answer).__name__}; it must be a text or a number",
            location,
            "write the answer as a text, or name another field as --answer-field",
        )
    answer = None if answer is None else str(answer).strip() or None
    return EvalPrompt(
        record=number,
        difficulty=conversation.difficulty,
        turns=tuple(before),
        tools=conversation.tools,
        answer=answer,
        consistent=answer is None or same_answer(find_answer(last.content), answer),
    )


def warn_of_other_answers(prompts: Sequence[EvalPrompt], answer_field: str) -> None:
    """Warn of records whose output gives another answer than is compared with."""
    wrong = [prompt.record for prompt in prompts if not prompt.consistent]
    if wrong:
        logger.warning(
            "%d records have another '%s' than their own output gives, first record %d: repeating"
            " the output counts as wrong (fix: end outputs with 'Answer: ...', or correct the"
            " field)",
            len(wrong),
            answer_field,
            wrong[0],
        )


def spread(difficulties: np.ndarray, count: int | None) -> np.ndarray:
    """Positions of `count` of N items, taken from the difficulties, int (N,), in turn, in order
    within each.
    """
    if count is None or count >= len(difficulties):
        return np.arange(len(difficulties))
    turn = np.empty(len(difficulties), dtype=np.int64)  # how many of its difficulty come before it
    for difficulty in np.unique(difficulties):
        members = np.flatnonzero(difficulties == difficulty)
        turn[members] = np.arange(len(members))
    return np.sort(np.lexsort((difficulties, turn))[:count])


def spread_evenly(difficulties: np.ndarray, count: int) -> np.ndarray:
    """As `spread`, with those of each difficulty an even choice of all that it has instead of its
    first.
    """
    taken, positions = difficulties[spread(difficulties, count)], []
    for difficulty in np.unique(taken):
        members = np.flatnonzero(difficulties == difficulty)
        quota = int((taken == difficulty).sum())
        positions.append(members[np.arange(quota) * len(members) // quota])
    return np.sort(np.concatenate(positions))


# ---------------------------------------------------------------- answers

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


def normalize(answer: str) -> tuple[str, ...]:
    """The answer's items in the one form that equal answers share."""
    # A full-width comma separates items and never thousands.
    text = _THOUSANDS.sub(lambda found: found.group().replace(",", ""), answer.strip())
    text = _trim(text.translate(_ASCII))
    return tuple(_item(item) for item in text.split(","))


def same_answer(given: str | None, expected: str) -> bool:
    """Whether an answer is the expected one."""
    return given is not None and normalize(given) == normalize(expected)


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
