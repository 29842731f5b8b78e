"""Data rows as questions: the prompt, the level, and the answer that can be checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finetune.commands.evaluate.answers import find_answer, same_answer
from finetune.data.files import read_rows
from finetune.data.formats import Conversation, detect_format, to_conversation
from finetune.data.problems import RowProblem
from finetune.errors import ConfigError, DataError

MOST_LEVELS = 50


@dataclass(frozen=True)
class Question:
    """One row to answer.

    Attributes:
        row: its number, from 0 through the files in order.
        level: its level, or None.
        messages: the turns before the last answer, as role and content.
        answer: what a right answer says; None where that cannot be checked.
        consistent: whether the row's own output gives that answer.
    """

    row: int
    level: str | None
    messages: tuple[Mapping[str, str], ...]
    answer: str | None
    consistent: bool


def find_levels(paths: Sequence[Path], field: str, known: Sequence[str] = ()) -> tuple[str, ...]:
    """The levels that rows name: those of `known` that occur, then others as they come.

    Raises:
        ConfigError: so many that it is no level.
    """
    found: Counter[str] = Counter()
    for path in paths:
        for _, row in read_rows(path):
            value = row.get(field) if isinstance(row, Mapping) else None
            if isinstance(value, (str, int)) and not isinstance(value, bool) and str(value).strip():
                found[str(value).strip()] += 1
    if len(found) > MOST_LEVELS:
        raise ConfigError(
            f"'{field}' has {len(found):,} different values, at most {MOST_LEVELS} can be levels",
            "--difficulty-field",
            "name a field with a few values, or one that no row has",
        )
    return (*(name for name in known if name in found), *(name for name in found if name not in known))


def read_questions(
    paths: Sequence[Path], levels: Sequence[str], field: str, answer_field: str, rows: Sequence[int]
) -> list[Question]:
    """The questions of the given rows, in order.

    Args:
        rows: numbers of rows that are known to be good.

    Raises:
        DataError: an answer that is neither text nor number.
    """
    wanted = set(rows)
    questions = []
    for number, place, row, conversation in _conversations(paths, levels, field):
        if number in wanted:
            questions.append(_question(number, place, row, conversation, answer_field))
    return questions


def _conversations(
    paths: Sequence[Path], levels: Sequence[str], field: str
) -> Iterator[tuple[int, str, Mapping[str, Any], Conversation]]:
    """(number, place, row, conversation) of every good row; they are counted as for training."""
    number = -1
    for path in paths:
        form = None
        for line, row in read_rows(path):
            number += 1
            try:
                if isinstance(row, RowProblem):
                    raise row
                form = form or detect_format(row)
                conversation = to_conversation(row, form, levels or None, field)
            except RowProblem:  # `prepare_samples` has reported it
                continue
            yield number, f"{path}:{line}", row, conversation


def _question(
    number: int, place: str, row: Mapping[str, Any], conversation: Conversation, answer_field: str
) -> Question:
    *before, last = conversation.messages
    answer = row.get(answer_field)
    if answer is not None and (isinstance(answer, bool) or not isinstance(answer, (str, int, float))):
        raise DataError(
            f"'{answer_field}' is {type(answer).__name__}; it must be a text or a number",
            place,
            "write the answer as a text, or name another field as --answer-field",
        )
    answer = None if answer is None else str(answer).strip() or None
    return Question(
        row=number,
        level=conversation.level,
        messages=tuple({"role": message.role, "content": message.content} for message in before),
        answer=answer,
        consistent=answer is None or same_answer(find_answer(last.content), answer),
    )


def spread(levels: np.ndarray, count: int | None) -> np.ndarray:
    """Positions of `count` items taken from the levels in turn, in order within each; all where there are no more.

    Args:
        levels: int (N,), the level of each item.
    """
    if count is None or count >= len(levels):
        return np.arange(len(levels))
    turn = np.empty(len(levels), dtype=np.int64)  # how many of its level come before it
    for level in np.unique(levels):
        members = np.flatnonzero(levels == level)
        turn[members] = np.arange(len(members))
    return np.sort(np.lexsort((levels, turn))[:count])
