"""Forms of preference data: what each says, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.config.fields import DataSource
from finetune.data.formats import Conversation, Message
from finetune.data.preference.reader import Preference, PreferenceForm, PreferenceReader
from finetune.data.records import RecordReader
from finetune.data.report import RecordProblem
from finetune.data.selection import content_hash


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


USER, GOOD, BAD = turn("user", "q"), turn("assistant", "a"), turn("assistant", "b")
HUMAN, GPT_GOOD, GPT_BAD = (
    {"from": role, "value": text} for role, text in (("human", "q"), ("gpt", "a"), ("gpt", "b"))
)
SYSTEM, EARLIER = turn("system", "s"), [turn("user", "q0"), turn("assistant", "a0")]
OTHER_USER, OTHER_SYSTEM = turn("user", "z"), turn("system", "z")
TURNS = [SYSTEM, *EARLIER, USER]
CALL = turn("assistant", None, tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])
RESULT = turn("tool", "r")
TEXTS = {"chosen": "a", "rejected": "b"}
WHOLE = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}


def read(record: Any, form: PreferenceForm = "pairs", **options: Any) -> Preference:
    ((_, _, found),) = PreferenceReader(**options, preference=form).conversations([(1, record)])
    if isinstance(found, RecordProblem):
        raise found
    assert isinstance(found, Preference)
    return found


def written(turns: tuple[Message, ...]) -> str:
    """`user:q *assistant:a`: trained turns with a star."""
    return " ".join(
        f"{'*' * (m.trained and m.role == 'assistant')}{m.role}:{m.content}" for m in turns
    )


PAIRS: list[dict[str, Any]] = [
    {"prompt": "q", **TEXTS},
    {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    WHOLE,
    {"prompt": "q", **WHOLE},
    {"prompt": "q", "messages": [USER, GOOD], **WHOLE},  # UltraFeedback
    {"chosen_messages": [USER, GOOD], "rejected_messages": [USER, BAD]},  # LLaMA-Factory v1
    {"instruction": "q", "input": "", **TEXTS},
    {"conversations": [HUMAN], "chosen": GPT_GOOD, "rejected": GPT_BAD},
    {"messages": [USER, GOOD], "rejected_response": "b"},
    {"prompt": "q", "response": "a", "rejected_response": "b"},
    {"prompt": "q", **TEXTS, "rejected_response": None, "label": None},
]
WITH_HISTORY: list[dict[str, Any]] = [
    {"prompt": TURNS, "chosen": [GOOD], "rejected": [BAD]},
    # the system turn is the prompt's
    {"prompt": TURNS, "chosen": [*TURNS[1:], GOOD], "rejected": [*TURNS[1:], BAD]},
    {"chosen": [*TURNS, GOOD], "rejected": [*TURNS, BAD]},
    {"prompt": "q", "chosen": [*TURNS, GOOD], "rejected": [*TURNS, BAD]},
    {"system": "s", "prompt": TURNS[1:], **TEXTS},
    {"system": "s", "instruction": "q", "history": [["q0", "a0"]], **TEXTS},
    {"messages": [*TURNS, GOOD], "rejected_response": "b"},
    {
        "messages": [*TURNS[:2], {**EARLIER[1], "weight": 0}, USER, GOOD],
        "rejected_messages": [*TURNS, BAD],
    },
]


def test_forms_of_pairs():
    for records, before in ((PAIRS, ""), (WITH_HISTORY, "system:s user:q0 assistant:a0 ")):
        for record in records:
            found = read(record)
            assert written(found.messages) == f"{before}user:q *assistant:a", record
            assert written(found.rejected) == f"{before}user:q *assistant:b", record
            assert found.prompt_turns == len(found.messages) - 1 and found.label is None
    hashes = {content_hash(read(record)) for record in PAIRS}
    swapped = read({"prompt": "q", "chosen": "b", "rejected": "a"})
    good, bad = (
        read({"prompt": "q", "completion": "a", "label": label}, "labels")
        for label in (True, False)
    )
    others = (swapped, good, bad, Conversation(good.messages))
    assert len(hashes) == 1 and len(hashes | set(map(content_hash, others))) == 5


LABELS: list[dict[str, Any]] = [
    {"prompt": "q", "completion": "a", "label": True},
    {"prompt": "q", "response": "a", "label": True},
    {"conversations": [HUMAN, GPT_GOOD], "kto_tag": True},
    {"instruction": "q", "output": "a", "kto_tag": True},
    {"prompt": "q", "completion": "a", "response": None, "label": "True", "kto_tag": None},
]


def test_forms_of_labels():
    for record in LABELS:
        found = read(record, "labels")
        assert written(found.messages) == "user:q *assistant:a" and not found.rejected
        key = "label" if "label" in record else "kto_tag"
        assert found.label is True and read({**record, key: False}, "labels").label is False
    # of a conversation the last answer is judged, with its steps
    found = read({"messages": [*TURNS, GOOD], "label": False}, "labels")
    assert written(found.messages) == "system:s user:q0 assistant:a0 user:q *assistant:a"
    steps = {"tools": [{"name": "f"}], "completion": [CALL, RESULT, GOOD], "label": True}
    found = read({"prompt": [*EARLIER, USER], **steps}, "labels")
    assert written(found.messages[2:]) == "user:q *assistant: tool:r *assistant:a"


REFUSED_PAIRS: list[tuple[Any, str]] = [
    ({"prompt": "q", "chosen": "a", "rejected": []}, "no answer: 'rejected' is empty"),
    ({"prompt": "q", "chosen": "a", "rejected": 7}, "wrong type: 'rejected' is a number"),
    ({"prompt": "q", "chosen": "a", "rejected": "a"}, "equal answers"),
    ({"prompt": "q", "chosen": "a"}, "missing side: no 'rejected'"),
    ({"prompt": "q", "chosen": "a", "rejected": " \n"}, "empty answer: 'rejected': turn 2"),
    (TEXTS, "no prompt: 'chosen' is an answer"),
    ({"prompt": "other", **WHOLE}, "prompt mismatch"),
    ({"prompt": TURNS} | dict.fromkeys(TEXTS, [OTHER_SYSTEM, *TURNS[1:], GOOD]), "prompt mismatch"),
    (
        {"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, GOOD, OTHER_USER, GOOD]},
        "prompt mismatch.*turn 3, where 'chosen' is by the user",
    ),
    ({"chosen": [USER, GOOD], "rejected": [USER, GOOD, USER, BAD]}, "'chosen' has nothing behind"),
    ({"prompt": "q", "chosen": "a", "rejected": [{**BAD, "weight": 0}]}, "no answer: .*weight 0"),
    ({"messages": [USER, GOOD], "rejected_response": "b", "rejected_messages": [USER]}, "two answ"),
    ({"prompt": "q", "completion": "a", "label": True}, "a label, not a pair: .*--loss kto"),
    ({"prompt": "q", "completion": "a"}, "unknown format: .*finetune.sft trains on single answers"),
]
REFUSED_LABELS: list[tuple[Any, str]] = [
    ({"prompt": "q", "completion": "a", "label": 1}, "the label is a number; it is true or"),
    ({"prompt": "q", "completion": "a"}, "no label"),
    ({"prompt": "q", "completion": "a", "label": True, "kto_tag": True}, "two labels"),
    ({"text": "a", "label": True}, "unknown format: a plain text"),
    ({"prompt": "q", **TEXTS}, "a pair, not a label: .*--loss kto"),
]


@pytest.mark.parametrize(
    ("form", "good", "refused"),
    [("pairs", PAIRS[0], REFUSED_PAIRS), ("labels", LABELS[0], REFUSED_LABELS)],
)
def test_what_is_refused(form: PreferenceForm, good: Any, refused: list[tuple[Any, str]]):
    for record, problem in refused:
        with pytest.raises(RecordProblem, match=problem):
            read(record, form)
        # The same behind records that have shown the form.
        reader = PreferenceReader(preference=form)
        *_, (_, _, found) = reader.conversations([(1, good), (2, record)])
        assert isinstance(found, RecordProblem)


def test_records_of_another_kind_of_run_name_it():
    for record, said in (
        ({"prompt": "q", **TEXTS}, "for python -m finetune.dpo"),
        ({"messages": [USER], "chosen": GOOD}, "for python -m finetune.dpo"),
        ({"prompt": "q", "completion": "a", "label": False}, "python -m finetune.dpo --loss kto"),
    ):
        ((_, _, problem),) = RecordReader().conversations([(1, record)])
        assert isinstance(problem, RecordProblem) and said in str(problem)
    record = {"prompt": "q", "completion": "a", "label": True}
    ((_, _, found),) = RecordReader().conversations([(1, record)])
    assert isinstance(found, Conversation)


def test_columns_and_difficulty_are_read_as_for_fine_tuning():
    record = {"question": "q", "good": "a", "bad": "b", "stage": "x", "ok": False}
    columns = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    source = DataSource(path="a", columns=columns)
    found = read(record, source=source, difficulties=("x",), difficulty_field="stage")
    assert written(found.rejected) == "user:q *assistant:b" and found.difficulty == "x"
    judged = {"prompt": "question", "completion": "good", "label": "ok"}
    assert read(record, "labels", source=DataSource(path="a", columns=judged)).label is False
