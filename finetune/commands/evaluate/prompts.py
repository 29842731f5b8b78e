"""Data records as prompts: the messages, the difficulty, and the answer that can be checked.

A text gives its answer after the last `Answer:`, `答案：` or `####` (GSM8K's mark) that begins a
line; a text without such a mark is the answer. Two answers are equal if they are equal after these
rules, and no others:

- full-width characters become ASCII; surrounding white space, quotes, bold marks and a final period
  are dropped;
- a number is its value: 163.80 is 163.8, and 1,440 is 1440. This applies only to a number alone or
  before a unit: addresses, prefixes, versions and names with digits (10.0.0.0, /21, R10) are text;
- a unit is kept with its case: 150 kB is 150kB, but not 150, 150 KB or 150000 B. Only µs is us;
- text is compared case-insensitively, the items of a list in order, with any kind of comma between.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.formats import Message
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

    record: int  # number, from 0 through all files in order
    difficulty: str | None
    turns: tuple[Message, ...]  # before the last answer
    tools: Tools  # that may be called
    answer: str | None  # the expected answer; None if there is none to check
    consistent: bool  # whether the record's own output gives that answer

    @property
    def messages(self) -> list[Mapping[str, str]]:
        """The turns as role and content."""
        return [{"role": message.role, "content": message.content} for message in self.turns]


def find_difficulties(
    paths: Sequence[Path], field: str, known: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the difficulties that records name: those in `known` first, then in order of
    appearance.

    Raises:
        ConfigError: more than `MOST_DIFFICULTIES`: the field is not a difficulty.
    """
    found: dict[str, None] = {}
    for path in paths:
        for _line, record in read_records(path):
            value = record.get(field) if isinstance(record, Mapping) else None
            if isinstance(value, (str, int)) and not isinstance(value, bool) and str(value).strip():
                found[str(value).strip()] = None
    if len(found) > MOST_DIFFICULTIES:
        raise ConfigError(
            f"'{field}' has {len(found):,} different values, at most {MOST_DIFFICULTIES} can be"
            " difficulties",
            "--difficulty-field",
            "name a field with a few values, or one that no record has",
        )
    names = [name for name in known if name in found]
    return tuple(dict.fromkeys([*names, *found]))


_PAIR_KEYS = ("rejected", "rejected_response", "rejected_messages")


def has_pairs(path: Path, columns: Mapping[str, str] | None) -> bool:
    """Return whether the first record of a file has a rejected answer.

    Args:
        columns: our key -> the data's key for it.
    """
    record = next((record for _, record in read_records(path)), None)
    names = [(columns or {}).get(key, key) for key in _PAIR_KEYS]
    return isinstance(record, Mapping) and any(record.get(name) is not None for name in names)


def read_prompts(
    files: Iterable[tuple[Path, RecordReader]], answer_field: str, records: Sequence[int]
) -> list[EvalPrompt]:
    """Return the prompts of the records with these numbers, counted as in training. Plain text has
    none.

    Args:
        files: each with the reader of its records.
        answer_field: the data's own key, before columns are renamed.

    Raises:
        DataError: an answer that is neither string nor number.
    """
    wanted = set(records)
    prompts = []
    number = -1
    for path, reader in files:
        for line, record, conversation in reader.file(path):
            number += 1
            # `prepare_samples` has reported bad records.
            if number not in wanted or isinstance(conversation, RecordProblem):
                continue
            if conversation.plain_text is not None:
                continue
            answer = _answer(record, reader, answer_field, f"{path}:{line}")
            *turns, last = conversation.messages
            prompts.append(
                EvalPrompt(
                    record=number,
                    difficulty=conversation.difficulty,
                    turns=tuple(turns),
                    tools=conversation.tools,
                    answer=answer,
                    consistent=answer is None or same_answer(find_answer(last.content), answer),
                )
            )
    return prompts


def _answer(
    record: Mapping[str, Any], reader: RecordReader, answer_field: str, location: str
) -> str | None:
    """Return the expected answer. If the field is the response, it is the answer that it gives."""
    answer = reader.value_of(record, answer_field)
    for ours, theirs in reader.columns.items():
        if theirs == answer_field:
            is_response = ours in _RESPONSES and isinstance(answer, str)
            return find_answer(answer) if is_response else None
    if answer is None:
        return None
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise DataError(
            f"'{answer_field}' is {type(answer).__name__}; it must be a text or a number",
            location,
            "write the answer as a text, or name another field as --answer-field",
        )
    return str(answer).strip() or None


def warn_of_other_answers(prompts: Sequence[EvalPrompt], answer_field: str) -> None:
    """Warn about records whose output gives a different answer than the expected one."""
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
    """Choose `count` of N items, taking difficulties in turn and the first items of each.

    Args:
        difficulties: int `(N,)`.
        count: None for all.

    Returns:
        Positions in ascending order.
    """
    if count is None or count >= len(difficulties):
        return np.arange(len(difficulties))
    turn = np.empty(len(difficulties), dtype=np.int64)  # number of earlier items of its difficulty
    for difficulty in np.unique(difficulties):
        members = np.flatnonzero(difficulties == difficulty)
        turn[members] = np.arange(len(members))
    return np.sort(np.lexsort((difficulties, turn))[:count])


def spread_evenly(difficulties: np.ndarray, count: int) -> np.ndarray:
    """Choose as `spread`, but evenly spaced items of each difficulty instead of its first."""
    taken = difficulties[spread(difficulties, count)]
    positions = []
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
# The full-width forms of ASCII are one range of Unicode; the others are not.
_ASCII = {0xFF01 + offset: 0x21 + offset for offset in range(94)}
_ASCII |= str.maketrans("\u3000。、−µμ", " .,-uu")
_QUOTES = "\"'`*“”‘’「」 \t"


def find_answer(text: str) -> str | None:
    """Return the answer that a text gives, unchanged, or None if it is empty."""
    text = text.rpartition("</think>")[2]
    marks = list(_MARK.finditer(text))
    if marks:
        text = text[marks[-1].end() :].lstrip(" \t").partition("\n")[0]
    return text.strip() or None


def normalize(answer: str) -> tuple[str, ...]:
    """Return the answer's items in canonical form."""
    # A full-width comma separates items and never thousands.
    text = _THOUSANDS.sub(lambda found: found.group().replace(",", ""), answer.strip())
    text = _trim(text.translate(_ASCII))
    return tuple(_item(item) for item in text.split(","))


def same_answer(given: str | None, expected: str) -> bool:
    """Return whether an answer is the expected one."""
    return given is not None and normalize(given) == normalize(expected)


def _item(text: str) -> str:
    text = " ".join(_trim(text).split())
    quantity = _QUANTITY.fullmatch(text)
    if quantity is None:
        return text.casefold()
    return f"{_number(quantity[1])} {quantity[2] or ''}".strip()


def _number(text: str) -> str:
    """Drop zeros, sign and point that do not change the value; exact for any length."""
    whole, _, fraction = text.lstrip("+-").partition(".")
    whole = whole.lstrip("0") or "0"
    fraction = fraction.rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return f"-{value}" if text.startswith("-") and value != "0" else value


def _trim(text: str) -> str:
    """Drop surrounding quotes and bold marks, and a final period."""
    while (shorter := text.strip(_QUOTES).removesuffix(".")) != text:
        text = shorter
    return text
