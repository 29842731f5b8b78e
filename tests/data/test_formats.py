"""Records of every format, good and bad, and the list of the bad ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from finetune.data.formats import Conversation, Message, detect_format, to_conversation
from finetune.data.report import ProblemLog, RecordProblem
from finetune.errors import DataError

LEVELS = ("explain", "reasoning", "topology")
ALPACA = {"instruction": "q", "output": "a"}
Q, A = ("user", "q"), ("assistant", "a")


def read(row: Any, difficulties: tuple[str, ...] | None = LEVELS) -> Conversation:
    return to_conversation(row, detect_format(row), difficulties)


def turns(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in conversation.messages]


def sharegpt(*pairs: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": text} for role, text in pairs], **more}


def messages(*pairs: tuple[str, Any], **of_the_last: Any) -> dict[str, Any]:
    """Turns, of which the last has more keys."""
    found = [{"role": role, "content": text} for role, text in pairs]
    return {"messages": [*found[:-1], found[-1] | of_the_last]}


GOOD = [
    ({**ALPACA, "input": "more"}, [("user", "q\nmore"), A]),
    ({**ALPACA, "input": None, "system": "", "id": 7}, [Q, A]),
    (
        {**ALPACA, "system": "s", "history": [["q0", "a0"]]},
        [("system", "s"), ("user", "q0"), ("assistant", "a0"), Q, A],
    ),
    (
        sharegpt(("system", ""), ("user", "q"), ("Assistant", "a"), system=""),
        [("system", ""), Q, A],
    ),
    (sharegpt(("human", "q"), ("gpt", "a"), system="s"), [("system", "s"), Q, A]),
    ({"conversations": messages(Q, A)["messages"]}, [Q, A]),
    ({"messages": json.dumps(messages(Q, A)["messages"])}, [Q, A]),
    (
        messages(("developer", "s"), Q, A, ("tool", "r"), ("assistant", "b")),
        [("system", "s"), Q, A, ("tool", "r"), ("assistant", "b")],
    ),
    (messages(("user", [{"text": "q"}, {"type": "text", "value": "r"}]), A), [("user", "qr"), A]),
    *(({**ALPACA, "tools": empty, "images": empty}, [Q, A]) for empty in (None, [], "", "[]", {})),
]


@pytest.mark.parametrize(("row", "expected"), GOOD)
def test_good_rows(row, expected: list[tuple[str, str]]):
    assert turns(read(row)) == expected


def test_weight_and_reasoning():
    """vLLM answers with `reasoning`, gpt-oss's template reads `thinking`."""
    row = messages(Q, A, Q, ("assistant", "b"), weight=1.0, tool_calls=[])
    row["messages"][1]["loss_weight"] = 0.0
    assert read(row).messages[1::2] == (Message(*A, trained=False), Message("assistant", "b"))
    thought = Message(*A, True, "t")
    for key in ("reasoning_content", "reasoning", "thinking"):
        assert read(messages(Q, A, **{key: "t"})).messages[1] == thought
    assert read(messages(Q, A, reasoning_content="t", thinking="t")).messages[1] == thought
    parts = [{"type": "reasoning", "value": "t"}, {"type": "text", "value": "a"}]
    assert read(messages(Q, ("assistant", parts))).messages[1] == thought


BAD = [
    ({**ALPACA, "input": {"a": 1}}, "wrong type: 'input' is an object"),
    ({**ALPACA, "history": "q"}, "wrong type: 'history' is a text"),
    ({"conversations": str([1])[:-1]}, "wrong type: 'conversations' is a text"),
    (sharegpt(("human", 5), ("gpt", "a")), "wrong type: conversations.0.: 'value' is a number"),
    (messages(("user", [{"image": "cat.png"}]), A), "a part of type 'image'; only text is trained"),
    (messages(("user", [{"type": "text"}]), A), "a content part of type 'text' has no text"),
    (messages(("user", [7]), A), "a content part is 'a number'"),
    (None, "wrong type: the record is null"),
    ({"body": "q", "label": 1}, "unknown format: keys are body, label"),
    ({"text": " \n"}, "empty text"),
    ({"text": "\ud83d"}, "not UTF-8: turn 1"),
    ({"prompt": "q", "completion": "a", "response": "a"}, "two answers: 'completion' and 'resp"),
    ({"prompt": "q", "completion": [{}]}, "wrong type: of 'prompt' and 'completion'"),
    ({"prompt": [{"role": "user", "content": "q"}], "completion": []}, "'completion' is empty"),
    ({"instruction": "q", "output": None}, "no answer: no 'output'"),
    ({"instruction": "q", "output": " \n"}, "empty answer: turn 2"),
    ({"instruction": "q", "output": 42}, "wrong type: 'output' is a number, not a text"),
    ({**ALPACA, "history": [["q"]]}, "wrong type: 'history' must be a list of"),
    ({**ALPACA, "difficulty": "Topology"}, "unknown difficulty: .*; did you mean 'topology'"),
    ({**ALPACA, "difficulty": True}, "wrong type: 'difficulty' is true/false"),
    (sharegpt(("system", "s"), ("human", "q"), ("gpt", "a"), system="t"), "two system texts"),
    (sharegpt(("human", "q")), "no answer: no turn is by the assistant"),
    (sharegpt(("human", "q"), ("gpt", "a"), ("human", "q")), "the last turn is by the user"),
    (sharegpt(("gpt", "a"), ("human", "q"), ("gpt", "a")), "turn 1 is assistant, at the start"),
    (sharegpt(("human", "q"), ("gtp", "a")), "unknown role: .* is by 'gtp'; did you mean 'gpt'"),
    ({"conversations": ["q", "a"]}, r"wrong type: conversations\[0\] is a text, not an object"),
    ({"messages": [{"content": "q"}]}, r"wrong type: messages\[0\] has no role"),
    (messages(Q, ("assistant", None)), r"no answer: messages\[1\] has no 'content'"),
    (messages(("user", [{"type": "image_url"}]), A), "unsupported key: .* 'image_url'.*--on-media"),
    (messages(Q, A, reasoning_details=[{"text": "t"}]), "'reasoning_content'"),  # OpenRouter's
    (messages(Q, A, function_calls="f(x=1)"), "'tool_calls'"),  # OLMo 3's
    (messages(Q, A, thinking="t", reasoning="u"), "'reasoning'.*, which differ"),
    (messages(Q, A, weight=0), "no answer: every answer has weight 0"),
    (messages(Q, A, loss_weight=0.5), "wrong type: .*'loss_weight' must be 0 or 1"),
]


@pytest.mark.parametrize(("row", "said"), BAD)
def test_bad_rows(row: Any, said: str):
    with pytest.raises(RecordProblem, match=said):
        read(row)


def test_difficulties():
    assert read({**ALPACA, "difficulty": " topology "}).difficulty == "topology"
    assert read({**ALPACA, "difficulty": 2}, ("1", "2")).difficulty == "2"
    assert read({**ALPACA, "difficulty": ""}).difficulty is None
    assert read({**ALPACA, "difficulty": "anything"}, None).difficulty is None
    row = {**ALPACA, "stage": "explain"}
    assert to_conversation(row, "alpaca", LEVELS, "stage").difficulty == "explain"


def refused(log: ProblemLog, records: int) -> list[str]:
    with pytest.raises(DataError) as caught:
        log.refuse(records)
    return [line.strip() for line in str(caught.value).splitlines()]


def test_the_log_lists_the_first_ten_in_whatever_order_they_are_found():
    log = ProblemLog()
    for line in reversed(range(1, 301)):
        problem = RecordProblem("empty answer" if line % 2 else "no answer", "d")
        log.add((0, line), f"a.jsonl:{line}", problem)
    first, *listed = refused(log, 1000)
    assert first == ("300 of 1000 records cannot be trained on (150 no answer, 150 empty answer):")
    assert listed[:10] == [
        f"a.jsonl:{line}: {'empty' if line % 2 else 'no'} answer: d" for line in range(1, 11)
    ]
    assert "... and 290 more" in listed[10] and "--on-bad-row drop" in listed[11]
    log = ProblemLog()
    log.refuse(3)
    for line in (1, 1, 1, 2, 3):
        log.add((0, line), f"a.json:{line}", RecordProblem("unknown format", "d"))
    lines = refused(log, 9)
    places = ["a.json:1: unknown format: d", "a.json:2: as above", "a.json:3: as above"]
    assert lines[1:5] == [*places, "... and 2 more"]
    assert "--columns prompt=question,response=answer" in lines[5]
