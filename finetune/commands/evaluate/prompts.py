"""Data records as prompts: the messages, the difficulty, and the answer that can be checked."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finetune.commands.evaluate.answers import find_answer, same_answer
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
