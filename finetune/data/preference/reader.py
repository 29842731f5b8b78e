"""Convert preference records to conversations with two answers, or with one answer and its label.

A pair is in one of two forms:

- `chosen` and `rejected` after a prompt, each as a string, a turn or a list of turns, or as whole
  conversations (TRL, and LLaMA-Factory's alpaca and ShareGPT records with `ranking`)
- an ordinary record with `rejected_response` or `rejected_messages` (ms-swift)

A label, for KTO, is a true or false `label` (TRL, ms-swift) or `kto_tag` (LLaMA-Factory) in an
ordinary record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from finetune.data.formats import (
    LABEL_KEYS,
    Conversation,
    Message,
    alpaca_prompt,
    checked,
    detect_format,
    difficulty_of,
    kind_of,
    leading_system,
    read_turns,
    refuse_media,
    to_conversation,
    tools_of,
)
from finetune.data.records import RecordReader
from finetune.data.report import RecordProblem

PreferenceForm = Literal["pairs", "labels"]

_BOTH_KEYS = ("chosen", "rejected")
_OTHER_KEYS = ("rejected_messages", "rejected_response")  # in an ordinary record
_SIDE_KEYS = _BOTH_KEYS + _OTHER_KEYS
# a format of pairs; the others are ordinary ones with another answer
_CHOSEN = "chosen and rejected"
_WHOLE = ("system", "user")  # a side that begins with such a turn has its prompt


@dataclass(frozen=True)
class Preference(Conversation):
    """A prompt with two answers, or with one that has a label. `messages` are the prompt and the
    chosen answer.

    Of the answers only what follows the prompt is trained; turns that both sides begin with belong
    to the prompt.
    """

    prompt_turns: int = 0  # the first turns, of both
    # the prompt and the other answer; empty where there is a label
    rejected: tuple[Message, ...] = ()
    label: bool | None = None  # whether the answer is a good one


@dataclass(frozen=True)
class PreferenceReader(RecordReader):
    """Reads the records of a run on pairs or on labels as `Preference`."""

    preference: PreferenceForm = "pairs"

    def _renamed(self, record: Any) -> Mapping[str, Any]:
        """Make a side that is one turn a list of it: like the lists of other formats, it is
        searched for media.
        """
        renamed = dict(super()._renamed(record))
        if _has(renamed, ("chosen_messages",)):  # LLaMA-Factory v1
            for key in _BOTH_KEYS:
                renamed.setdefault(key, renamed.pop(f"{key}_messages", None))
        for key in _SIDE_KEYS:
            if isinstance(renamed.get(key), Mapping):
                renamed[key] = [renamed[key]]
        return renamed

    def _detect(self, record: Mapping[str, Any]) -> str:
        self._refuse_other_kind(record)
        if self.preference == "pairs" and not _has(record, _OTHER_KEYS):
            if not _has(record, _BOTH_KEYS):
                keys = ", ".join(sorted(map(str, record))[:8]) or "none"
                what = (
                    f"keys are {keys}; a pair has 'chosen' and 'rejected', or 'rejected_response'"
                    " beside an answer (python -m finetune.sft trains on single answers)"
                )
                raise RecordProblem("unknown format", what)
            return _CHOSEN
        name = detect_format(record, self.columns)
        if name == "text":
            raise RecordProblem(
                "unknown format", "a plain text has no answer that could be better or worse"
            )
        return name

    def _to_conversation(
        self, record: Mapping[str, Any], form: str, difficulties: Sequence[str] | None
    ) -> Conversation:
        self._refuse_other_kind(record)
        if form == _CHOSEN:
            refuse_media(record)
            difficulty = difficulty_of(record, difficulties, self.difficulty_field)
            return _pair(_both_sides(record), difficulty, record)
        found = to_conversation(record, form, difficulties, self.difficulty_field)
        if self.preference == "labels":
            return _labelled(record, found, form)
        return _pair(_with_rejected(record, found.messages), found.difficulty, record)

    def _refuse_other_kind(self, record: Mapping[str, Any]) -> None:
        """Refuse labels in a run on pairs, and pairs in a run on labels."""
        pair, label = _has(record, _SIDE_KEYS), _has(record, LABEL_KEYS)
        if self.preference == "pairs" and label and not pair:
            what = (
                "it has a label and one answer; --loss kto trains on such records, the other losses"
                " on pairs"
            )
            raise RecordProblem("a label, not a pair", what)
        if self.preference == "labels" and pair:
            what = (
                "it has two answers; --loss kto trains on one answer with a label, the other losses"
                " on pairs"
            )
            raise RecordProblem("a pair, not a label", what)


def reader_of(form: PreferenceForm | None) -> Callable[..., RecordReader]:
    """Return the function that makes the reader of a run's records; form None: ordinary records."""
    return RecordReader if form is None else partial(PreferenceReader, preference=form)


def _has(record: Mapping[str, Any], keys: Sequence[str]) -> bool:
    return any(record.get(key) is not None for key in keys)


# ---------------------------------------------------------------------- labels


def _labelled(record: Mapping[str, Any], conversation: Conversation, form: str) -> Preference:
    """Add the label to an ordinary conversation, and separate its prompt from the answer."""
    given = [record[key] for key in LABEL_KEYS if record.get(key) is not None]
    if len(given) != 1:
        raise RecordProblem(
            "two labels" if given else "no label",
            f"a record needs one of {' or '.join(LABEL_KEYS)}",
        )
    (label,) = given
    if isinstance(label, str):  # as CSV has them
        label = {"true": True, "false": False}.get(label.strip().lower())
    if not isinstance(label, bool):
        raise RecordProblem("wrong type", f"the label is {kind_of(given[0])}; it is true or false")
    answer_turns = 1
    if form == "prompt-completion":
        completion = record.get("completion")
        if completion is None:
            completion = record["response"]
        if not isinstance(completion, str):
            answer_turns = len(completion)
    prompt_turns = len(conversation.messages) - answer_turns
    messages = _answered(conversation.messages, prompt_turns, "the record")
    return Preference(
        messages,
        conversation.difficulty,
        conversation.tools,
        prompt_turns=prompt_turns,
        label=label,
    )


# ---------------------------------------------------------------------- pairs

_Sides = tuple[Sequence[Message], Sequence[Message]]


def _pair(sides: _Sides, difficulty: str | None, record: Mapping[str, Any]) -> Preference:
    """Separate the prompt from the answers: the prompt is the turns that both begin with."""
    chosen, rejected = sides
    shared = _shared(chosen, rejected)
    if shared == len(chosen) == len(rejected):
        raise RecordProblem("equal answers", "'chosen' and 'rejected' say the same")
    for side, name in ((chosen, "chosen"), (rejected, "rejected")):
        if shared == len(side):
            raise RecordProblem(
                "no answer", f"'{name}' has nothing behind the turns that both have"
            )
        if not shared or side[shared].role != "assistant":
            what = (
                f"they first differ in turn {shared + 1}, where {name!r} is by the"
                f" {side[shared].role}, not an answer"
            )
            raise RecordProblem(
                "prompt mismatch", f"'chosen' and 'rejected' answer different prompts: {what}"
            )
    return Preference(
        _answered(chosen, shared, "'chosen'"),
        difficulty,
        tools_of(record),
        prompt_turns=shared,
        rejected=_answered(rejected, shared, "'rejected'"),
    )


def _shared(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """Count the turns that both begin with; an answer in a prompt is context, even if its weights
    differ.
    """
    shared = 0
    for one, other in zip(chosen, rejected, strict=False):
        if replace(one, trained=True) != replace(other, trained=True):
            break
        shared += 1
    return shared


def _answered(messages: Sequence[Message], prompt_turns: int, where: str) -> tuple[Message, ...]:
    """Return the turns with those of the prompt as context."""
    if not messages[prompt_turns].trained:
        raise RecordProblem(
            "no answer", f"{where}: the first answer behind the prompt has weight 0"
        )
    prompt = [replace(message, trained=False) for message in messages[:prompt_turns]]
    return (*prompt, *messages[prompt_turns:])


def _both_sides(record: Mapping[str, Any]) -> _Sides:
    """`chosen` and `rejected` as whole conversations."""
    prompt = _prompt(record)
    sides = []
    for key in _BOTH_KEYS:
        if record.get(key) is None:
            raise RecordProblem("missing side", f"no '{key}'")
        sides.append(_whole(record, key, prompt))
    chosen, rejected = sides
    if prompt:
        _check_prompt(prompt, chosen[: _shared(chosen, rejected)])
    return chosen, rejected


def _with_rejected(record: Mapping[str, Any], chosen: Sequence[Message]) -> _Sides:
    """Return an ordinary record, and its other answer, or another conversation."""
    keys = [key for key in _OTHER_KEYS if record.get(key) is not None]
    if len(keys) != 1:
        what = "'rejected_messages' and 'rejected_response'" if keys else "no 'rejected_response'"
        raise RecordProblem("two answers" if keys else "missing side", what)
    prompt = [replace(message, trained=True) for message in chosen[:-1]]
    return chosen, _whole(record, keys[0], prompt)


def _prompt(record: Mapping[str, Any]) -> list[Message]:
    """Return the prompt that both sides answer; empty if it is part of the sides."""
    for key in ("prompt", "conversations", "instruction", "messages"):
        if not record.get(key):
            continue
        if key == "instruction":
            return alpaca_prompt(record)
        if key == "prompt" and isinstance(record[key], str):
            return [*leading_system(record), Message("user", record[key])]
        return read_turns(record, key)
    return []


def _whole(record: Mapping[str, Any], key: str, prompt: list[Message]) -> list[Message]:
    """Return the prompt and a side's turns, or only the side if it is a whole conversation; in a
    valid order.
    """
    value = record[key]
    if isinstance(value, str):
        answer = [Message("assistant", value)]
    elif isinstance(value, (list, tuple)):
        answer = read_turns({key: value}, key, len(prompt)) if value else []
    else:
        raise RecordProblem(
            "wrong type", f"'{key}' is {kind_of(value)}, not a text, a turn or a list of turns"
        )
    if not answer:
        raise RecordProblem("no answer", f"'{key}' is empty")
    if answer[0].role not in _WHOLE:
        if not prompt:
            raise RecordProblem(
                "no prompt", f"'{key}' is an answer, and the record has no 'prompt'"
            )
        turns = [*prompt, *answer]
    else:
        turns = read_turns(record, key)
        if prompt and prompt[0].role == "system" != turns[0].role:
            turns.insert(0, prompt[0])
    try:
        return checked(turns)
    except RecordProblem as problem:
        raise RecordProblem(problem.kind, f"'{key}': {problem.detail}") from None


def _check_prompt(prompt: Sequence[Message], shared: Sequence[Message]) -> None:
    """Check that the prompt of a record is the beginning of its sides, if these are whole
    conversations, or the end of that beginning.
    """
    named = [replace(message, trained=True) for message in prompt if message.role != "system"]
    turns = [replace(message, trained=True) for message in shared if message.role != "system"]
    named_systems = [message for message in prompt if message.role == "system"]
    systems = [message for message in shared if message.role == "system"]
    places = range(len(turns) - len(named) + 1)
    is_inside = any(turns[place : place + len(named)] == named for place in places)
    if not is_inside or named_systems not in ([], systems):
        raise RecordProblem(
            "prompt mismatch",
            "the turns that 'chosen' and 'rejected' begin with are not the prompt",
        )
