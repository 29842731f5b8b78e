"""Tools in records: the forms of calls and results, what is refused, and what is trained of
them.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from finetune.data.formats import Conversation, detect_format, to_conversation
from finetune.data.report import RecordProblem
from finetune.data.tools import Call

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CLOCK = {"type": "function", "function": {"name": "clock"}}


def read(record: dict[str, Any]) -> Conversation:
    return to_conversation(record, detect_format(record))


def call(name: str, arguments: Any, identity: str | None = None) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return made if identity is None else {"id": identity, **made}


def openai(*turns: dict[str, Any], tools: Any = (WEATHER, CLOCK)) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "q"}, *turns], "tools": list(tools)}


def calling(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


def result(content: str, identity: str | None = None) -> dict[str, Any]:
    return {"role": "tool", "content": content} | (
        {} if identity is None else {"tool_call_id": identity}
    )


ANSWER = {"role": "assistant", "content": "It is sunny."}
OPENAI = openai(
    calling(call("weather", '{"city": "Bern", "days": 2}', "a"), call("clock", "", "b")),
    result("12:00", "b"),
    result("sun", "a"),
    ANSWER,
)
SHAREGPT = {
    "conversations": [
        {"from": "human", "value": "q"},
        {
            "from": "function_call",
            "value": json.dumps(
                [
                    {"name": "weather", "arguments": {"city": "Bern", "days": 2}},
                    {"name": "clock", "arguments": {}},
                ]
            ),
        },
        {"from": "observation", "value": "sun"},
        {"from": "observation", "value": "12:00"},
        {"from": "gpt", "value": "It is sunny."},
    ],
    "tools": json.dumps([WEATHER["function"], CLOCK["function"]]),
}


def test_both_forms_say_the_same():
    ours, theirs = read(OPENAI), read(SHAREGPT)
    assert ours.tools == theirs.tools == (WEATHER, CLOCK)
    weather, clock = ours.messages[1].calls
    assert (weather, clock) == (
        Call("weather", {"city": "Bern", "days": 2}, "a"),
        Call("clock", {}, "b"),
    )
    assert [(found.name, found.arguments) for found in theirs.messages[1].calls] == [
        (found.name, found.arguments) for found in (weather, clock)
    ]
    assert [(m.content, m.call_id, m.name) for m in ours.messages if m.role == "tool"] == [
        ("12:00", "b", "clock"),
        ("sun", "a", "weather"),
    ]
    # Without ids results answer in the order of the calls, and ids are made that every template
    # takes.
    results = [m for m in theirs.messages if m.role == "tool"]
    assert [(m.content, m.name) for m in results] == [("sun", "weather"), ("12:00", "clock")]
    assert all(len(m.call_id) == 9 and m.call_id.isalnum() for m in results)
    assert len({m.call_id for m in results}) == 2


def test_older_names_and_one_call_alone():
    record = {
        "messages": [
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "content": None,
                "function_call": {"name": "clock", "arguments": "{}"},
            },
            {"role": "function", "name": "clock", "content": "12:00"},
            ANSWER,
        ],
        "functions": [CLOCK["function"]],
    }
    conversation = read(record)
    assert conversation.tools == (CLOCK,)
    assert conversation.messages[2].call_id == conversation.messages[1].calls[0].id
    assert [m.role for m in conversation.messages] == ["user", "assistant", "tool", "assistant"]


def test_a_conversation_may_end_with_a_call_and_an_answer_may_have_text_and_calls():
    assert read(openai(calling(call("clock", {})))).messages[-1].calls
    said = read(openai(calling(call("clock", {}), content="I look.")))
    assert (said.messages[-1].content, len(said.messages[-1].calls)) == ("I look.", 1)
    # Calls that a record writes into the content itself stay as they are.
    assert (
        read(openai({"role": "assistant", "content": "<call>"}, result("r"), ANSWER, tools=()))
        .messages[2]
        .name
        == ""
    )


BAD = [
    (
        openai(calling(call("clock", {})), {"role": "user", "content": "?"}, ANSWER),
        "call without result: the calls of",
    ),
    (
        openai(calling(call("clock", {}), call("weather", {})), result("r"), ANSWER),
        "call without result: .*turn 2: 2",
    ),
    (openai(calling(call("clock", {})), result("r"), result("s"), ANSWER), "result of no call"),
    (
        openai(calling(call("clock", {}, "a")), result("r", "b"), ANSWER),
        "result of no call: .* has an id",
    ),
    (
        openai(
            calling(call("clock", {}, "a"), call("clock", {}, "a")),
            result("r"),
            result("s"),
            ANSWER,
        ),
        "duplicate id",
    ),
    (
        openai(
            calling(call("clock", {}, "a"), call("clock", {}, "b")),
            result("r", "a"),
            result("s", "a"),
            ANSWER,
        ),
        "duplicate id",
    ),
    (
        openai(calling(call("clock", "{"))),
        r"broken JSON: messages\[1\].tool_calls\[0\].arguments is a text",
    ),
    (openai(calling(call("clock", "[1]"))), r"wrong type: .*arguments is no object"),
    (openai(calling({"function": {"arguments": {}}})), r"wrong type: .*has no name of a function"),
    (openai(calling(call("clock", {}) | {"id": 7})), r"wrong type: .*id is not a text"),
    (
        openai(calling(call("clock", {}), function_call={"name": "clock"})),
        "unsupported key: .*has tool_calls and func",
    ),
    (
        openai({"role": "user", "content": "q", "tool_calls": [call("clock", {})]}, ANSWER),
        "unsupported key",
    ),
    (openai(calling()), r"no answer: messages\[1\] has no 'content'"),
    (
        openai(ANSWER, tools=[{"type": "retrieval", "name": "x"}]),
        "unsupported key: .*is of type 'retrieval'",
    ),
    (
        openai(ANSWER, tools=[{"type": "function"}]),
        r"wrong type: 'tools'\[0\] is no function with a name",
    ),
    (openai(ANSWER, tools=[CLOCK, CLOCK]), "tool named twice: 'tools'"),
    ({**openai(ANSWER), "tools": "not JSON"}, "broken JSON: 'tools' is a text"),
    ({**openai(ANSWER), "tools": "7"}, "wrong type: 'tools' is no list"),
    (
        {**openai(ANSWER), "functions": [CLOCK["function"]]},
        "unsupported key: the record has 'tools' and 'functions'",
    ),
    (
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": "{}"},
            ]
        },
        "no answer",
    ),
    (
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": "call"},
            ]
        },
        "broken JSON",
    ),
]


@pytest.mark.parametrize(("record", "said"), BAD)
def test_bad_calls_results_and_tools_are_named(record: dict[str, Any], said: str):
    with pytest.raises(RecordProblem, match=said):
        read(record)
