"""Forms of preference data: what each says, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.config.fields import DataSource
from finetune.data.formats import Conversation, Message
from finetune.data.preference.reader import Preference, PreferenceForm, PreferenceReader
from finetune.data.report import RecordProblem
from finetune.data.selection import content_hash

USER, GOOD, BAD = (
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
    {"role": "assistant", "content": "b"},
)
HUMAN, GPT_GOOD, GPT_BAD = (
    {"from": "human", "value": "q"},
    {"from": "gpt", "value": "a"},
    {"from": "gpt", "value": "b"},
)
SYSTEM = {"role": "system", "content": "s"}
EARLIER = [{"role": "user", "content": "q0"}, {"role": "assistant", "content": "a0"}]
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "content": "r"}


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


PAIRS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "turns": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "one turn": {"prompt": [USER], "chosen": GOOD, "rejected": BAD},
    "whole": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "whole with prompt": {"prompt": "q", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "whole with the prompt's turns": {
        "prompt": [USER],
        "chosen": [USER, GOOD],
        "rejected": [USER, BAD],
    },
    "ultrafeedback": {
        "prompt": "q",
        "messages": [USER, GOOD],
        "chosen": [USER, GOOD],
        "rejected": [USER, BAD],
    },
    "alpaca": {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"},
    "sharegpt": {"conversations": [HUMAN], "chosen": GPT_GOOD, "rejected": GPT_BAD},
    "messages": {"messages": [USER], "chosen": GOOD, "rejected": BAD},
    "rejected_response": {"messages": [USER, GOOD], "rejected_response": "b"},
    "rejected_messages": {"messages": [USER, GOOD], "rejected_messages": [USER, BAD]},
    "with prompt and response": {"prompt": "q", "response": "a", "rejected_response": "b"},
    "empty columns": {
        "prompt": "q",
        "chosen": "a",
        "rejected": "b",
        "rejected_response": None,
        "label": None,
    },
}


@pytest.mark.parametrize("name", PAIRS)
def test_forms_of_pairs(name: str) -> None:
    found = read(PAIRS[name])
    assert (
        written(found.messages) == "user:q *assistant:a"
        and written(found.rejected) == "user:q *assistant:b"
    )
    assert found.prompt_turns == 1 and found.label is None


def test_earlier_turns_and_system_texts_are_the_prompt() -> None:
    shown = "system:s user:q0 assistant:a0 user:q *assistant:"
    turns = [SYSTEM, *EARLIER, USER]
    for record in (
        {"prompt": turns, "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": turns, "chosen": [*turns, GOOD], "rejected": [*turns, BAD]},
        {
            "prompt": turns,
            "chosen": [*turns[1:], GOOD],
            "rejected": [*turns[1:], BAD],
        },  # the system turn is the prompt's
        {"chosen": [*turns, GOOD], "rejected": [*turns, BAD]},
        {"prompt": "q", "chosen": [*turns, GOOD], "rejected": [*turns, BAD]},
        {"system": "s", "chosen": [*turns[1:], GOOD], "rejected": [*turns[1:], BAD]},
        {"system": "s", "prompt": turns[1:], "chosen": "a", "rejected": "b"},
        {
            "system": "s",
            "instruction": "q",
            "history": [["q0", "a0"]],
            "chosen": "a",
            "rejected": "b",
        },
        {"system": "s", "conversations": turns[1:], "chosen": GPT_GOOD, "rejected": GPT_BAD},
        {"messages": [*turns, GOOD], "rejected_response": "b"},
        {"messages": [*turns, GOOD], "rejected_messages": [*turns, BAD]},
        {
            "messages": [*turns[:2], {**EARLIER[1], "weight": 0}, USER, GOOD],
            "rejected_messages": [*turns, BAD],
        },
    ):
        found = read(record)
        assert (written(found.messages), written(found.rejected)) == (
            shown + "a",
            shown + "b",
        ), record


def test_turns_that_both_sides_begin_with_are_context() -> None:
    tools = [{"name": "f"}]
    found = read(
        {
            "tools": tools,
            "prompt": [USER],
            "chosen": [CALL, RESULT, GOOD],
            "rejected": [CALL, RESULT, BAD],
        }
    )
    assert (
        written(found.rejected) == "user:q assistant: tool:r *assistant:b" and len(found.tools) == 1
    )
    assert found.prompt_turns == 3 and found.messages[2].call_id == found.messages[1].calls[0].id
    found = read(
        {"tools": tools, "prompt": [USER], "chosen": [CALL, RESULT, GOOD], "rejected": [BAD]}
    )
    assert written(found.messages) == "user:q *assistant: tool:r *assistant:a"
    assert (
        read({"prompt": "q", "chosen": {**GOOD, "reasoning_content": "t"}, "rejected": GOOD})
        .messages[1]
        .reasoning
    )


LABELS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "q", "completion": "a", "label": True},
    "turns": {"prompt": [USER], "completion": [GOOD], "label": True},
    "messages": {"messages": [USER, GOOD], "label": True},
    "sharegpt": {"conversations": [HUMAN, GPT_GOOD], "kto_tag": True},
    "alpaca": {"instruction": "q", "output": "a", "kto_tag": True},
    "csv": {"prompt": "q", "completion": "a", "response": None, "label": "True", "kto_tag": None},
}


@pytest.mark.parametrize("name", LABELS)
def test_forms_of_labels(name: str) -> None:
    found = read(LABELS[name], "labels")
    assert (
        written(found.messages) == "user:q *assistant:a"
        and found.label is True
        and not found.rejected
    )
    key = "label" if "label" in LABELS[name] else "kto_tag"
    assert read({**LABELS[name], key: False}, "labels").label is False


def test_of_a_labelled_conversation_the_last_answer_is_judged() -> None:
    found = read({"messages": [SYSTEM, *EARLIER, USER, GOOD], "label": False}, "labels")
    assert written(found.messages) == "system:s user:q0 assistant:a0 user:q *assistant:a"
    steps = {
        "tools": [{"name": "f"}],
        "prompt": [*EARLIER, USER],
        "completion": [CALL, RESULT, GOOD],
        "label": True,
    }
    assert (
        written(read(steps, "labels").messages)
        == "user:q0 assistant:a0 user:q *assistant: tool:r *assistant:a"
    )


REFUSED: list[tuple[PreferenceForm, Any, str]] = [
    ("pairs", {"prompt": "q", "chosen": "a", "rejected": "a"}, "equal answers"),
    ("pairs", {"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "equal answers"),
    ("pairs", {"prompt": "q", "chosen": "a"}, "missing side: no 'rejected'"),
    ("pairs", {"prompt": "q", "rejected": "a"}, "missing side: no 'chosen'"),
    ("pairs", {"prompt": "q", "chosen": "a", "rejected": " \n"}, "empty answer: 'rejected': turn 2"),
    ("pairs", {"prompt": "q", "chosen": "a", "rejected": []}, "no answer: 'rejected' is empty"),
    ("pairs", {"prompt": " ", "chosen": "a", "rejected": "b"}, "empty question"),
    ("pairs", {"chosen": "a", "rejected": "b"}, "no prompt: 'chosen' is an answer"),
    ("pairs", {"prompt": "q", "chosen": "a", "rejected": 7}, "wrong type: 'rejected' is a number"),
    ("pairs", {"prompt": 7, "chosen": "a", "rejected": "b"}, "wrong type: 'prompt' is a number"),
    ("pairs", {"prompt": "other", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "prompt mismatch"),
    ("pairs", {"prompt": [SYSTEM, USER], "chosen": [{**SYSTEM, "content": "z"}, USER, GOOD],
               "rejected": [{**SYSTEM, "content": "z"}, USER, BAD]}, "prompt mismatch"),
    ("pairs", {"chosen": [USER, GOOD], "rejected": [{**USER, "content": "z"}, BAD]}, "prompt mismatch"),
    ("pairs", {"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, GOOD, {**USER, "content": "z"}, GOOD]},
     "prompt mismatch.*turn 3, where 'chosen' is by the user"),
    ("pairs", {"chosen": [USER, GOOD], "rejected": [USER, GOOD, USER, BAD]}, "no answer: 'chosen' has nothing behind"),
    ("pairs", {"chosen": [USER, GOOD], "rejected": [USER]}, "no answer: 'rejected'"),
    ("pairs", {"prompt": "q", "chosen": "a", "rejected": [{**BAD, "weight": 0}]}, "no answer: .*weight 0"),
    ("pairs", {"messages": [USER, GOOD], "rejected_response": "b", "rejected_messages": [USER, BAD]}, "two answers"),
    ("pairs", {"prompt": "q", "completion": "a", "label": True}, "a label, not a pair: .*--loss kto"),
    ("pairs", {"prompt": "q", "completion": "a"}, "unknown format: .*'chosen' and 'rejected'"),
    ("pairs", ["q"], "wrong type: the record is a list"),
    ("pairs", {"prompt": "q", "chosen": {**GOOD, "images": ["x.png"]}, "rejected": "b"}, "unsupported key: .*images"),
    ("labels", {"prompt": "q", "completion": "a", "label": 1}, "wrong type: the label is a number; it is true or"),
    ("labels", {"prompt": "q", "completion": "a", "label": "good"}, "wrong type: the label is a text"),
    ("labels", {"prompt": "q", "completion": "a"}, "no label"),
    ("labels", {"prompt": "q", "completion": "a", "label": True, "kto_tag": True}, "two labels"),
    ("labels", {"prompt": "q", "completion": "", "label": True}, "empty answer"),
    ("labels", {"text": "a", "label": True}, "unknown format: a plain text"),
    ("labels", {"prompt": "q", "chosen": "a", "rejected": "b"}, "a pair, not a label: .*--loss kto"),
    ("labels", {"chosen": [USER, GOOD], "rejected": [USER, BAD]}, "a pair, not a label"),
    ("labels", "q", "wrong type: the record is a text"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "record", "problem"), REFUSED)
def test_what_is_refused(form: PreferenceForm, record: Any, problem: str) -> None:
    with pytest.raises(RecordProblem, match=problem) as caught:
        read(record, form)
    # The same behind records that have shown the form.
    reader = PreferenceReader(preference=form)
    good = PAIRS["texts"] if form == "pairs" else LABELS["texts"]
    *_, (_, _, found) = reader.conversations([(1, good), (2, record)])
    assert isinstance(found, RecordProblem)
    if caught.value.kind != "unknown format" and "text" not in record:
        assert found.kind in (caught.value.kind, "unknown format", "missing side")


def test_columns_media_and_difficulty_are_read_as_for_fine_tuning() -> None:
    record = {"question": "q", "good": "a", "bad": "b", "stage": "x"}
    columns = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    found = read(
        record,
        source=DataSource(path="a", columns=columns),
        difficulties=("x",),
        difficulty_field="stage",
    )
    assert written(found.rejected) == "user:q *assistant:b" and found.difficulty == "x"
    found = read(
        record, source=DataSource(path="a", columns=columns, difficulty="y"), difficulties=("y",)
    )
    assert found.difficulty == "y"
    judged = {"prompt": "question", "completion": "good", "label": "ok"}
    assert (
        read({**record, "ok": False}, "labels", source=DataSource(path="a", columns=judged)).label
        is False
    )
    seen = {"prompt": "<image>q", "chosen": {"role": "assistant", "content": [{"type": "text", "text": "a"},
            {"type": "image_url", "image_url": "x"}]}, "rejected": "b"}  # fmt: skip
    found = read(seen, on_media="drop-media")
    assert written(found.messages) == "user:q *assistant:a" and found.had_media
    with pytest.raises(RecordProblem, match="has images, video or sound"):
        read(seen, on_media="drop-row")


def test_equal_records_are_those_that_say_the_same_in_any_form() -> None:
    hashes = {content_hash(read(record)) for record in PAIRS.values()}
    assert len(hashes) == 1
    swapped = read({"prompt": "q", "chosen": "b", "rejected": "a"})
    labels = [
        read({"prompt": "q", "completion": "a", "label": label}, "labels")
        for label in (True, False)
    ]
    plain = Conversation(labels[0].messages)
    assert len(hashes | {content_hash(found) for found in (swapped, *labels, plain)}) == 5


def test_the_rows_of_the_page_are_read() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "data.md").read_text(
        encoding="utf-8"
    )
    blocks = [block.split("```")[0] for block in page.split("```jsonl\n")[2:4]]
    pairs, labels = ([json.loads(line) for line in block.splitlines()] for block in blocks)
    found = [read(row) for row in pairs]
    questions = {"What is a hub?", "What is this?\nA hub."}
    assert len(found) == 7 and {one.messages[0].content for one in found} == questions
    assert {written(one.messages[1:]) for one in found} == {"*assistant:A repeater."}
    assert {written(one.rejected[1:]) for one in found} == {"*assistant:A router."}
    assert [read(row, "labels").label for row in labels] == [True, False]
