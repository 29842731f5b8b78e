"""Data records as prompts: the messages, the difficulty, and the answer that can be checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finetune.commands.evaluate.answers import find_answer, same_answer
from finetune.data.files import read_records
from finetune.data.formats import Conversation
from finetune.data.problems import RecordProblem
from finetune.data.records import RecordReader
from finetune.errors import ConfigError, DataError

MOST_DIFFICULTIES = 50


@dataclass(frozen=True)
class EvalPrompt:
    """One record to answer."""

    record: int  # its number, from 0 through the files in order
    difficulty: str | None
    messages: tuple[Mapping[str, str], ...]  # the turns before the last answer, as role and content
    answer: str | None  # what a right answer says; None where that cannot be checked
    consistent: bool  # whether the record's own output gives that answer


def find_difficulties(paths: Sequence[Path], field: str, known: Sequence[str] = ()) -> tuple[str, ...]:
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
            f"'{field}' has {len(found):,} different values, at most {MOST_DIFFICULTIES} can be difficulties",
            "--difficulty-field",
            "name a field with a few values, or one that no record has",
        )
    return (*(name for name in known if name in found), *(name for name in found if name not in known))


def read_prompts(
    paths: Sequence[Path], reader: RecordReader, answer_field: str, records: Sequence[int]
) -> list[EvalPrompt]:
    """The prompts of the records with these numbers, which are known to be good; counted as for training.

    A plain text asks nothing, and has none.

    Raises:
        DataError: an answer that is neither text nor number.
    """
    wanted, prompts, number = set(records), [], -1
    for path in paths:
        for line, record, found in reader.file(path):
            number += 1
            # `prepare_samples` has reported what is bad.
            if number in wanted and not isinstance(found, RecordProblem) and found.plain_text is None:
                prompts.append(_prompt(number, f"{path}:{line}", record, found, answer_field))
    return prompts


def _prompt(
    number: int, location: str, record: Mapping[str, Any], conversation: Conversation, answer_field: str
) -> EvalPrompt:
    *before, last = conversation.messages
    answer = record.get(answer_field)
    if answer is not None and (isinstance(answer, bool) or not isinstance(answer, (str, int, float))):
        raise DataError(
            f"'{answer_field}' is {type(answer).__name__}; it must be a text or a number",
            location,
            "write the answer as a text, or name another field as --answer-field",
        )
    answer = None if answer is None else str(answer).strip() or None
    return EvalPrompt(
        record=number,
        difficulty=conversation.difficulty,
        messages=tuple({"role": message.role, "content": message.content} for message in before),
        answer=answer,
        consistent=answer is None or same_answer(find_answer(last.content), answer),
    )


def spread(difficulties: np.ndarray, count: int | None) -> np.ndarray:
    """Positions of `count` of N items, taken from the difficulties, int (N,), in turn, in order within each."""
    if count is None or count >= len(difficulties):
        return np.arange(len(difficulties))
    turn = np.empty(len(difficulties), dtype=np.int64)  # how many of its difficulty come before it
    for difficulty in np.unique(difficulties):
        members = np.flatnonzero(difficulties == difficulty)
        turn[members] = np.arange(len(members))
    return np.sort(np.lexsort((difficulties, turn))[:count])
