"""Tools in records: the forms of calls and results, what is refused, and nulls that Arrow adds."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finetune.data.formats import Conversation, detect_format, to_conversation
from finetune.data.reading.files import read_records
from finetune.data.report import RecordProblem
from finetune.data.tools import Call

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ANSWER = {"role": "assistant", "content": "It is sunny."}


def read(record: Any) -> Conversation:
    return to_conversation(record, detect_format(record))


def call(name: str, arguments: Any, identity: str | None = None) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return made if identity is None else {"id": identity, **made}


def openai(*turns: dict[str, Any], tools: Any = (WEATHER, CLOCK)) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "q"}, *turns], "tools": list(tools)}


def calling(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


def result(content: str, identity: str | None = None) -> dict[str, Any]:
    more = {} if identity is None else {"tool_call_id": identity}
    return {"role": "tool", "content": content, **more}


def sharegpt(*turns: tuple[str, str], **more: Any) -> dict[str, Any]:
    turns = (("human", "q"), *turns)
    return {"conversations": [{"from": role, "value": text} for role, text in turns], **more}


def test_both_forms_say_the_same():
    weather = Call("weather", {"city": "Bern", "days": 2}, "a")
    calls = calling(call("weather", json.dumps(weather.arguments), "a"), call("clock", "", "b"))
    ours = read(openai(calls, result("12:00", "b"), result("sun", "a"), ANSWER))
    listed = [{"name": "weather", "arguments": weather.arguments}, {"name": "clock"}]
    functions = json.dumps([WEATHER["function"], CLOCK["function"]])
    results = (("observation", "sun"), ("observation", "12:00"))
    theirs = read(
        sharegpt(("function_call", json.dumps(listed)), *results, ("gpt", "a"), tools=functions)
    )
    assert ours.tools == theirs.tools == (WEATHER, CLOCK)
    assert ours.messages[1].calls == (weather, Call("clock", {}, "b"))
    assert [(found.name, found.arguments) for found in theirs.messages[1].calls] == [
        (found.name, found.arguments) for found in ours.messages[1].calls
    ]
    assert [(m.content, m.call_id, m.name) for m in ours.messages[2:4]] == [
        ("12:00", "b", "clock"),
        ("sun", "a", "weather"),
    ]
    # Without ids results answer in the order of the calls, with ids that every template takes.
    answers = theirs.messages[2:4]
    assert [(m.content, m.name) for m in answers] == [("sun", "weather"), ("12:00", "clock")]
    assert all(len(m.call_id) == 9 and m.call_id.isalnum() for m in answers)
    assert answers[0].call_id != answers[1].call_id


def test_older_names_one_call_alone_and_calls_at_the_end():
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "function_call": {"name": "clock", "arguments": "{}"}},
        {"role": "function", "name": "clock", "content": "12:00"},
        ANSWER,
    ]
    conversation = read({"messages": turns, "functions": [CLOCK["function"]]})
    assert conversation.tools == (CLOCK,)
    assert conversation.messages[2].call_id == conversation.messages[1].calls[0].id
    assert [m.role for m in conversation.messages] == ["user", "assistant", "tool", "assistant"]
    last = read(openai(calling(call("clock", {}), content="I look."))).messages[-1]
    assert (last.content, len(last.calls)) == ("I look.", 1)
    # Calls that a record writes into the content itself stay as they are.
    written = read(openai({**ANSWER, "content": "<call>"}, result("r"), ANSWER, tools=()))
    assert written.messages[2].name == ""


C, C_A, C_B = (call("clock", {}, identity) for identity in (None, "a", "b"))
BAD = [
    (openai(calling(call("clock", "[1]"))), r"wrong type: .*arguments is no object"),
    (openai(calling({**C, "id": 7})), r"wrong type: .*id is not a text"),
    ({**openai(ANSWER), "tools": "7"}, "wrong type: 'tools' is no list"),
    (openai(calling(C), {"role": "user", "content": "?"}, ANSWER), "call without result: the"),
    (openai(calling(C), result("r"), result("s"), ANSWER), "result of no call"),
    (openai(calling(C_A), result("r", "b"), ANSWER), "result of no call: .* has an id"),
    (openai(calling(C_A, C_B), result("r", "a"), result("s", "a"), ANSWER), "duplicate id"),
    (openai(calling(call("clock", "{"))), r"broken JSON: .*\[0\].arguments is a text"),
    (openai(calling({"function": {}})), r"wrong type: .*has no name of a function"),
    (openai({**ANSWER, "tool_calls": 7}), r"wrong type: .*is no list of calls"),
    (openai(calling(C, function_call={"name": "clock"})), "unsupported key: .*has tool_calls and"),
    (openai({"role": "user", "content": "q", "tool_calls": [C]}, ANSWER), "unsupported key"),
    (openai(ANSWER, tools=[{"type": "retrieval", "name": "x"}]), "is of type 'retrieval'"),
    (openai(ANSWER, tools=[CLOCK, CLOCK]), "tool named twice: 'tools'"),
    ({**openai(ANSWER), "tools": "not JSON"}, "broken JSON: 'tools' is a text"),
    ({**openai(ANSWER), "functions": [CLOCK]}, "the record has 'tools' and 'functions'"),
    (sharegpt(("function_call", "{}")), "no answer: .* calls nothing"),
]


@pytest.mark.parametrize(("record", "said"), BAD)
def test_bad_calls_results_and_tools_are_named(record, said: str):
    with pytest.raises(RecordProblem, match=said):
        read(record)


# Nulls of Arrow, where a call has the arguments of all functions ------------------------------------------------------


def with_schemas(function: str, arguments: dict[str, Any]) -> dict[str, Any]:
    schemas = {
        "weather": {
            "city": {"type": "string"},
            "days": {"type": "array", "items": {"type": "object"}},
        },
        "time": {"zone": {"anyOf": [{"type": "null"}, {"type": "string"}]}},
    }
    tools = [
        {"name": name, "parameters": {"type": "object", "properties": properties}}
        for name, properties in schemas.items()
    ]
    return openai(calling(call(function, arguments)), tools=tools)


RECORDS = [
    with_schemas("weather", {"city": "Bern", "days": [{"hour": 1}]}),
    with_schemas("time", {"zone": None}),
]


def test_columns_give_the_conversations_of_json_lines(tmp_path):
    """A null that the function's schema allows stays, as do arguments and tools that are texts."""
    as_text = with_schemas("weather", {})
    as_text["messages"][1]["tool_calls"][0]["function"]["arguments"] = '{"zone": null}'
    as_text["tools"] = json.dumps(as_text["tools"])
    for records in (RECORDS, [as_text]):
        path = tmp_path / "rows.parquet"
        pq.write_table(pa.Table.from_pylist(records), path)
        found = [read(record) for _, record in read_records(path)]
        assert found == [read(record) for record in records]
    filled = pa.Table.from_pylist(RECORDS).to_pylist()[0]["messages"][1]["tool_calls"]
    assert filled[0]["function"]["arguments"]["zone"] is None, "Arrow itself adds it"
