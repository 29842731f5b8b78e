"""Records that people bring: columns of Arrow, keys given twice, parts without type, other encodings,
records of another kind of run.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finetune.data.formats import Conversation, Message, detect_format, to_conversation
from finetune.data.preference.reader import PreferenceReader
from finetune.data.reading.files import read_records
from finetune.data.records import RecordReader
from finetune.data.report import ProblemLog, RecordProblem
from finetune.errors import DataError


def conversation(record: Any) -> Conversation:
    return to_conversation(record, detect_format(record))


# ---------------------------------------------------------------- nulls of Arrow


def calling(function: str, arguments: dict[str, Any]) -> dict[str, Any]:
    schemas = {
        "weather": {"city": {"type": "string"}},
        "time": {"zone": {"type": ["string", "null"]}, "at": {"type": "object"}},
    }
    return {
        "messages": [
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": function, "arguments": arguments}}],
            },
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": name, "parameters": {"type": "object", "properties": given}},
            }
            for name, given in schemas.items()
        ],
    }


RECORDS = [
    calling("weather", {"city": "Bern"}),
    calling("time", {"zone": "CET", "at": {"hour": 1}}),
]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_columns_give_the_conversations_of_json_lines(tmp_path: Path, suffix: str) -> None:
    table = pa.Table.from_pylist(RECORDS)
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    # Arrow itself adds the arguments of the other function
    assert (
        table.to_pylist()[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["zone"]
        is None
    )
    assert [conversation(record) for _, record in read_records(path)] == [
        conversation(record) for record in RECORDS
    ]


def test_a_null_that_the_schema_allows_stays(tmp_path: Path) -> None:
    pq.write_table(
        pa.Table.from_pylist([calling("time", {"zone": None}), RECORDS[1]]),
        tmp_path / "rows.parquet",
    )
    _, record = next(read_records(tmp_path / "rows.parquet"))
    (call,) = conversation(record).messages[1].calls
    assert call.arguments == {"zone": None}


def test_arguments_and_tools_as_text_are_left_alone(tmp_path: Path) -> None:
    record = calling("weather", {"city": "Bern"})
    function = record["messages"][1]["tool_calls"][0]["function"]
    function["arguments"] = '{"city": "Bern", "zone": null}'
    record["tools"] = json.dumps(record["tools"])
    pq.write_table(pa.Table.from_pylist([record]), tmp_path / "rows.parquet")
    ((_, read),) = read_records(tmp_path / "rows.parquet")
    assert conversation(read).messages[1].calls[0].arguments == {"city": "Bern", "zone": None}


# ---------------------------------------------------------------- keys given twice

TWICE = [
    ('{"instruction": "q", "output": "1", "output": "2"}', "output"),
    ('{"messages": [], "messages": [{"role": "user", "content": "q"}]}', "messages"),
    ('{"messages": [{"role": "user", "content": "q", "content": "r"}]}', "content"),
]


@pytest.mark.parametrize(("text", "key"), TWICE)
@pytest.mark.parametrize("form", ["{}\n", "[{}]", '[{{"text": "a"}}, {}, {{"text": "b"}}]'])
def test_a_key_given_twice_is_refused(tmp_path: Path, text: str, key: str, form: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(form.format(text), encoding="utf-8")
    read = [record for _, record in read_records(path)]
    (problem,) = [record for record in read if isinstance(record, RecordProblem)]
    assert str(problem) == f"key given twice: {key!r}; which one is meant?"
    assert len(read) == form.count("{}") + form.count("{{")


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    columns = pa.table([["q"], ["1"], ["2"]], names=["instruction", "output", "output"])
    pq.write_table(columns, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="has the column 'output' twice"):
        list(read_records(tmp_path / "rows.parquet"))


# ---------------------------------------------------------------- parts


def by(content: Any, **more: Any) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": content} | more,
        ]
    }


def test_parts_of_qwen_vl_and_llama_factory() -> None:
    answer = Message("assistant", "a b")
    assert conversation(by([{"text": "a "}, {"text": "b"}])).messages[1] == answer
    parts = [{"type": "text", "value": "a "}, {"type": "text", "value": "b"}]
    assert conversation(by(parts, loss_weight=1.0)).messages[1] == answer
    thinking = [{"type": "reasoning", "value": "t"}, *parts]
    assert conversation(by(thinking)).messages[1] == Message("assistant", "a b", True, "t")
    with pytest.raises(RecordProblem, match="every answer has weight 0"):
        conversation(by(parts, loss_weight=0.0))


def test_media_without_type_are_refused_by_name_or_left_out() -> None:
    record = by("a")
    record["messages"][0]["content"] = [{"image": "cat.png"}, {"text": "<image>What is it?"}]
    with pytest.raises(RecordProblem, match="a part of type 'image'; only text is trained"):
        conversation(record)
    ((_, _, read),) = RecordReader(on_media="drop-media").conversations([(1, record)])
    assert read.messages[0].content == "What is it?"


# ---------------------------------------------------------------- encodings


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ('{"text": "a"}\n'.encode("utf-16"), "is UTF-16 text"),
        (gzip.compress(b'{"text": "a"}\n', mtime=0), "is compressed by gzip"),
        (b"PK\x03\x04rest", "is a zip archive"),
    ],
    ids=["utf16", "gzip", "zip"],
)
@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_what_is_no_utf8_text_is_named(tmp_path: Path, content: bytes, what: str, suffix: str):
    path = tmp_path / f"rows.{suffix}"
    path.write_bytes(content)
    with pytest.raises(DataError, match=what):
        list(read_records(path))


def test_gbk_is_named_and_the_fix_is_to_save_the_file_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes('{"text": "路由器"}\n'.encode("gbk"))
    ((line, problem),) = read_records(path)
    assert str(problem).endswith("it reads as GBK")
    log = ProblemLog()
    log.add((0, line), f"{path}:{line}", problem)
    with pytest.raises(DataError) as caught:
        log.refuse(1)
    assert caught.value.fix.startswith("save the file as UTF-8 (iconv -f GBK")


def test_a_byte_order_mark_before_a_later_record_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\xef\xbb\xbf{"text": "b"}\n')
    assert [record["text"] for _, record in read_records(path)] == ["a", "b"]


# ---------------------------------------------------------------- records of another kind of run


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"chosen": [{"role": "user", "content": "q"}], "rejected": []},
        {"messages": [{"role": "user", "content": "q"}], "chosen": {"role": "assistant"}},
    ],
)
def test_pairs_given_to_sft_name_dpo(record: dict[str, Any]) -> None:
    ((_, _, problem),) = RecordReader().conversations([(1, record)])
    assert "for python -m finetune.dpo" in str(problem)


def test_labels_and_single_answers_name_their_kind_of_run() -> None:
    record = {"prompt": "q", "completion": "a"}
    ((_, _, read),) = RecordReader().conversations([(1, record | {"label": True})])
    assert isinstance(read, Conversation)
    ((_, _, problem),) = RecordReader().conversations([(1, record | {"label": False})])
    assert "python -m finetune.dpo --loss kto" in str(problem)
    ((_, _, problem),) = PreferenceReader().conversations([(1, record)])
    assert "python -m finetune.sft trains on single answers" in str(problem)


# ---------------------------------------------------------------- names of other tools


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_under_the_names_of_servers(key: str) -> None:
    """vLLM answers with `reasoning`, gpt-oss's template reads `thinking`."""
    answer = {"role": "assistant", "content": "a", key: "T"}
    found = conversation({"messages": [{"role": "user", "content": "q"}, answer]})
    assert found.messages[1].reasoning == "T"
    both = answer | {"reasoning_content": "T", "reasoning": None}
    assert conversation({"messages": [{"role": "user", "content": "q"}, both]}) == found
    other = answer | {"reasoning_content": "T", "reasoning": "U"}
    with pytest.raises(RecordProblem, match="'reasoning'.*, which differ"):
        conversation({"messages": [{"role": "user", "content": "q"}, other]})


@pytest.mark.parametrize(
    ("turn", "fix"),
    [
        ({"function_calls": "f(x=1)"}, "'tool_calls'"),
        ({"functions": '[{"name": "f"}]'}, "'tools' of the record"),
        ({"reasoning_details": [{"text": "T"}]}, "'reasoning_content'"),
    ],
)
def test_keys_of_turns_that_hold_what_is_trained_are_not_left_out(
    turn: dict[str, Any], fix: str
) -> None:
    """As OLMo 3's tool data and OpenRouter's answers have them."""
    answer = {"role": "assistant", "content": "a"} | turn
    with pytest.raises(RecordProblem, match=fix):
        conversation({"messages": [{"role": "user", "content": "q"}, answer]})


def test_turns_as_json() -> None:
    """A column of CSV or Parquet often holds the list as a text; a text of Python is refused."""
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    found = conversation({"messages": json.dumps(turns)})
    assert found == conversation({"messages": turns})
    with pytest.raises(RecordProblem, match="is a text, not a list of turns"):
        conversation({"messages": str(turns)})


def test_pairs_of_llama_factorys_new_form() -> None:
    def side(answer: str) -> list[dict[str, Any]]:
        return [
            {"role": role, "content": [{"type": "text", "value": text}]}
            for role, text in (("user", "q"), ("assistant", answer))
        ]

    record = {"chosen_messages": side("good"), "rejected_messages": side("bad")}
    ((_, _, found),) = PreferenceReader().conversations([(1, record)])
    assert not isinstance(found, RecordProblem), found
    assert [found.messages[-1].content, found.rejected[-1].content] == ["good", "bad"]
