"""Records of every format, good and bad, and files of every kind."""

from __future__ import annotations

import json
import logging
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from sample_rows import expand_paths

from finetune.config.fields import did_you_mean
from finetune.data.formats import Conversation, Message, detect_format, to_conversation
from finetune.data.reading.files import read_records
from finetune.data.report import ProblemLog, RecordProblem
from finetune.errors import DataError, Problems

LEVELS = ("explain", "reasoning", "topology")
ALPACA = {"instruction": "q", "output": "a"}


def read(row: Any, difficulties: tuple[str, ...] | None = LEVELS) -> Conversation:
    return to_conversation(row, detect_format(row), difficulties)


def turns(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in conversation.messages]


def sharegpt(*pairs: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": text} for role, text in pairs], **more}


def messages(*pairs: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in pairs], **more}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (ALPACA, [("user", "q"), ("assistant", "a")]),
        ({**ALPACA, "input": "more"}, [("user", "q\nmore"), ("assistant", "a")]),
        ({**ALPACA, "input": None, "system": "", "id": 7}, [("user", "q"), ("assistant", "a")]),
        ({"instruction": "", "input": "i", "output": "a"}, [("user", "i"), ("assistant", "a")]),
        (
            {**ALPACA, "system": "s", "history": [["q0", "a0"]]},
            [
                ("system", "s"),
                ("user", "q0"),
                ("assistant", "a0"),
                ("user", "q"),
                ("assistant", "a"),
            ],
        ),
        (sharegpt(("human", "q"), ("gpt", "a")), [("user", "q"), ("assistant", "a")]),
        (
            sharegpt(("system", ""), ("user", "q"), ("Assistant", "a"), system=""),
            [("system", ""), ("user", "q"), ("assistant", "a")],
        ),
        (
            sharegpt(("human", "q"), ("gpt", "a"), system="s"),
            [("system", "s"), ("user", "q"), ("assistant", "a")],
        ),
        (
            {"conversations": messages(("user", "q"), ("assistant", "a"))["messages"]},
            [("user", "q"), ("assistant", "a")],
        ),
        (
            messages(
                ("developer", "s"),
                ("user", "q"),
                ("assistant", "a"),
                ("tool", "r"),
                ("assistant", "b"),
            ),
            [("system", "s"), ("user", "q"), ("assistant", "a"), ("tool", "r"), ("assistant", "b")],
        ),
        (
            messages(
                ("user", [{"type": "text", "text": "q"}, {"type": "text", "text": "r"}]),
                ("assistant", "a"),
            ),
            [("user", "qr"), ("assistant", "a")],
        ),
    ],
)
def test_good_rows(row: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert turns(read(row)) == expected


@pytest.mark.parametrize("nothing", [None, [], "", "[]", {}])
def test_empty_columns_of_tools_and_images_say_nothing(nothing: Any) -> None:
    assert turns(read({**ALPACA, "tools": nothing, "images": nothing})) == turns(read(ALPACA))


def test_weight_and_reasoning() -> None:
    row = messages(("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b"))
    row["messages"][1]["weight"] = 0
    row["messages"][3] |= {"weight": 1, "reasoning_content": "t", "tool_calls": []}
    assert read(row).messages[1::2] == (
        Message("assistant", "a", trained=False),
        Message("assistant", "b", True, "t"),
    )


BAD = [
    (None, "wrong type: the record is null"),
    (["q", "a"], "wrong type: the record is a list"),
    ({"body": "q", "label": 1}, "unknown format: keys are body, label"),
    ({"text": " \n"}, "empty text"),
    ({"text": ["q"]}, "wrong type: 'text' is a list"),
    ({"text": "\ud83d"}, "not UTF-8: turn 1"),
    ({"prompt": "q"}, "no answer: no 'completion' or 'response'"),
    (
        {"prompt": "q", "completion": "a", "response": "a"},
        "two answers: 'completion' and 'response'",
    ),
    (
        {"prompt": "q", "completion": [{"role": "assistant", "content": "a"}]},
        "wrong type: of 'prompt' and 'completion'",
    ),
    (
        {"prompt": [{"role": "user", "content": "q"}], "completion": []},
        "no answer: 'completion' is empty",
    ),
    ({"question": "q", "answer": "a"}, "unknown format: keys are answer, question"),
    ({}, "unknown format: keys are none"),
    ({"instruction": "q"}, "no answer: no 'output'"),
    (
        {"instruction": "q", "chosen": "a", "rejected": "b"},
        "a pair of answers, for python -m finetune.dpo",
    ),
    (
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        "a pair of answers, for python -m finetune.dpo",
    ),
    ({"instruction": "q", "output": None}, "no answer"),
    ({"instruction": "q", "output": ""}, "empty answer"),
    ({"instruction": "q", "output": " \n"}, "empty answer: turn 2"),
    ({"instruction": "", "output": "a"}, "empty question: turn 1"),
    ({"instruction": "q", "output": 42}, "wrong type: 'output' is a number, not a text"),
    ({"instruction": True, "output": "a"}, "wrong type: 'instruction' is true/false"),
    ({**ALPACA, "input": {"a": 1}}, "wrong type: 'input' is an object"),
    ({**ALPACA, "system": ["s"]}, "wrong type: 'system' is a list"),
    ({**ALPACA, "history": "q"}, "wrong type: 'history' is a text"),
    ({**ALPACA, "history": [["q"]]}, "wrong type: 'history' must be a list of"),
    ({**ALPACA, "history": [["q", None]]}, "wrong type: 'history' must be a list of"),
    ({**ALPACA, "history": [["q", ""]]}, "empty answer: turn 2"),
    (
        {**ALPACA, "difficulty": "Topology"},
        "unknown difficulty: 'Topology', not one of .*; did you mean 'topology'",
    ),
    ({**ALPACA, "difficulty": "expl"}, "unknown difficulty: .*did you mean 'explain'"),
    ({**ALPACA, "difficulty": ["explain"]}, "wrong type: 'difficulty' is a list"),
    ({**ALPACA, "difficulty": True}, "wrong type: 'difficulty' is true/false"),
    ({"instruction": "q", "output": "\ud83d"}, "not UTF-8: turn 2"),
    (sharegpt(), "no answer: 'conversations' is empty"),
    (sharegpt(("system", "s"), ("human", "q"), ("gpt", "a"), system="t"), "two system texts"),
    ({"conversations": "q"}, "wrong type: 'conversations' is a text"),
    (sharegpt(("human", "q")), "no answer: no turn is by the assistant"),
    (
        sharegpt(("human", "q"), ("gpt", "a"), ("human", "q")),
        "no answer: the last turn is by the user",
    ),
    (
        sharegpt(("gpt", "a"), ("human", "q"), ("gpt", "a")),
        "roles out of order: turn 1 is assistant, at the start",
    ),
    (
        sharegpt(("human", "q"), ("human", "q"), ("gpt", "a")),
        "roles out of order: turn 2 is user, after user",
    ),
    (
        sharegpt(("human", "q"), ("gpt", "a"), ("gpt", "a")),
        "roles out of order: turn 3 is assistant, after assistant",
    ),
    (
        sharegpt(("human", "q"), ("system", "s"), ("gpt", "a")),
        "roles out of order: turn 2 is system, after user",
    ),
    (sharegpt(("human", "q"), ("gtp", "a")), "unknown role: .* is by 'gtp'; did you mean 'gpt'"),
    (sharegpt(("human", 5), ("gpt", "a")), "wrong type: conversations.0.: 'value' is a number"),
    ({"conversations": ["q", "a"]}, r"wrong type: conversations\[0\] is a text, not an object"),
    ({"messages": [{"content": "q"}]}, r"wrong type: messages\[0\] has no role"),
    (messages(("user", "q"), ("assistant", None)), r"no answer: messages\[1\] has no 'content'"),
    (
        messages(("user", [{"type": "image_url"}]), ("assistant", "a")),
        "unsupported key: .* 'image_url'.*--on-media",
    ),
    *(
        ({**row, key: value}, rf"unsupported key: the record has '{key}'")
        for row in (
            ALPACA,
            sharegpt(("human", "q"), ("gpt", "a")),
            messages(("user", "q"), ("assistant", "a")),
        )
        for key, value in (("images", ["a.png"]), ("videos", ["a.mp4"]))
    ),
    *(
        (
            {
                "messages": [
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "content": "a", **key},
                ]
            },
            "unsupported",
        )
        for key in ({"reasoning_details": ["t"]}, {"images": [b"png"]})
    ),
    (
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "a", "weight": 0},
            ]
        },
        "no answer: every answer has weight 0",
    ),
    (
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "a", "weight": 0.5},
            ]
        },
        "wrong type: .*'weight' must be 0 or 1",
    ),
]


@pytest.mark.parametrize(("row", "said"), BAD)
def test_bad_rows(row: Any, said: str) -> None:
    with pytest.raises(RecordProblem, match=said):
        read(row)


def test_a_file_has_one_form() -> None:
    with pytest.raises(
        RecordProblem, match="unknown format: no 'instruction', which the records before it"
    ):
        to_conversation(sharegpt(("human", "q"), ("gpt", "a")), "alpaca")


def test_levels() -> None:
    assert read({**ALPACA, "difficulty": " topology "}).difficulty == "topology"
    assert read({**ALPACA, "difficulty": 2}, ("1", "2")).difficulty == "2"
    assert read({**ALPACA, "difficulty": ""}).difficulty is None
    assert read({**ALPACA, "difficulty": "anything"}, None).difficulty is None
    row = {**ALPACA, "stage": "explain"}
    assert to_conversation(row, "alpaca", LEVELS, "stage").difficulty == "explain"


# Files --------------------------------------------------------------------------------------------------------------


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_lines_are_counted_and_blank_ones_are_no_rows(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"a": "\xe2\x80\xa8"}\n{"a": 3}'
    )
    assert list(read_records(path)) == [(1, {"a": 1}), (4, {"a": "\u2028"}), (5, {"a": 3})]


def test_broken_lines_are_rows_with_a_problem(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", b'{"a": 1}\n{"a": \n\xff\n[1, 2\n' + b"[" * 100_000 + b'\n{"a": 2}\n'
    )
    rows = list(read_records(path))
    assert [line for line, _ in rows] == [1, 2, 3, 4, 5, 6]
    assert [str(row) for _, row in rows[1:4]] == [
        "broken JSON: Expecting value at column 7",
        "not UTF-8: byte 1 of the line",
        "broken JSON: Expecting ',' delimiter at column 6",
    ]
    assert rows[4][1].kind == "broken JSON" and rows[5] == (6, {"a": 2})


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_the_first_character_tells_an_array_from_lines(tmp_path: Path, name: str) -> None:
    array = '\n[{"a": 1},\n\n  {"a":\n 2}\n,{"a": "]"} ]\n'
    assert list(read_records(write(tmp_path / name, array))) == [
        (2, {"a": 1}),
        (4, {"a": 2}),
        (6, {"a": "]"}),
    ]
    assert list(read_records(write(tmp_path / name, '{"a": 1}\n{"a": 2}\n'))) == [
        (1, {"a": 1}),
        (2, {"a": 2}),
    ]
    assert list(read_records(write(tmp_path / name, "[]"))) == []
    assert list(read_records(write(tmp_path / name, ""))) == []


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ('[{"a": 1},\n{"a": 2,}\n]', 2, "broken JSON"),
        ('[{"a": 1}\n{"a": 2}]', 2, "a comma or ] is missing"),
        ('[{"a": 1},\n]', 2, "Expecting value"),
        ('[{"a": 1}', 1, "a comma or ] is missing"),
        ('[{"a": 1}] []', 1, "text after the closing"),
        ("[", 1, "Expecting value"),
    ],
)
def test_a_broken_array_cannot_go_on(tmp_path: Path, text: str, line: int, said: str) -> None:
    path = write(tmp_path / "a.json", text)
    with pytest.raises(DataError, match=said) as caught:
        list(read_records(path))
    assert caught.value.where == f"{path}:{line}"


def test_one_pretty_object_is_explained(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", json.dumps({"data": [ALPACA]}, indent=2))
    with pytest.raises(DataError, match="one JSON object over several lines"):
        list(read_records(path))


def test_parquet(tmp_path: Path) -> None:
    rows = [
        messages(("user", "q"), ("assistant", "a")),
        messages(("user", "r"), ("assistant", "b")),
    ]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [(line, turns(read(row))) for line, row in read_records(tmp_path / "a.parquet")] == [
        (1, [("user", "q"), ("assistant", "a")]),
        (2, [("user", "r"), ("assistant", "b")]),
    ]
    with pytest.raises(DataError, match="is no parquet file"):
        list(read_records(write(tmp_path / "b.parquet", "{}")))


def test_lines_are_streamed(tmp_path: Path) -> None:
    row = json.dumps({"instruction": "q" * 1000, "output": "a"}) + "\n"
    path = write(tmp_path / "a.jsonl", row * 8_000)
    tracemalloc.start()
    rows = sum(1 for _ in read_records(path))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rows == 8_000 and peak_bytes < path.stat().st_size / 20


def test_files_folders_and_globs(tmp_path: Path) -> None:
    for name in (
        "b.jsonl",
        "a.json",
        "sub/c.parquet",
        ".hidden.jsonl",
        ".git/d.jsonl",
        "README.md",
    ):
        write(tmp_path / name, "x")
    found = [path.relative_to(tmp_path).as_posix() for path in expand_paths([str(tmp_path)])]
    assert found == ["a.json", "b.jsonl", "sub/c.parquet"]
    given = [str(tmp_path / "b.jsonl"), str(tmp_path / "*.json"), str(tmp_path / "**/*.parquet")]
    assert [path.name for path in expand_paths(given)] == ["b.jsonl", "a.json", "c.parquet"]
    literal = write(tmp_path / "a[1].jsonl", "x")
    assert expand_paths([literal]) == (literal,)


def test_missing_files_are_reported_together(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", "x")
    write(tmp_path / "notes.md", "x")
    (tmp_path / "empty").mkdir()
    names = ["trian.jsonl", "notes.md", "empty", "*.parquet"]
    with pytest.raises(Problems) as caught:
        expand_paths([str(tmp_path / name) for name in names])
    missing, kind, folder, pattern = map(str, caught.value.problems)
    assert "did you mean" in missing and "train.jsonl" in missing
    assert (
        ".md is not a known kind" in kind
        and ".txt" in kind
        and "holds no" in folder
        and "no data file matches" in pattern
    )
    assert caught.value.exit_code == 2


def test_a_file_given_twice_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.jsonl", "x")
    with caplog.at_level(logging.WARNING, "finetune"):
        assert len(expand_paths([str(path), str(tmp_path)])) == 2
    assert "read more than once" in caplog.text


def test_other_keys_are_answered_with_the_flag_that_names_them() -> None:
    log = ProblemLog()
    log.add((0, 1), "a.jsonl:1", RecordProblem("unknown format", "keys are answer, question"))
    with pytest.raises(DataError, match="--columns prompt=question,response=answer"):
        log.refuse(1)


def test_the_log_lists_the_first_ten_in_order_whatever_the_order_of_finding() -> None:
    log = ProblemLog()
    for line in reversed(range(1, 301)):
        log.add(
            (0, line),
            f"a.jsonl:{line}",
            RecordProblem("empty answer" if line % 2 else "no answer", "d"),
        )
    with pytest.raises(DataError) as caught:
        log.refuse(1000)
    text = str(caught.value)
    assert text.startswith(
        "300 of 1000 records cannot be trained on (150 no answer, 150 empty answer)"
    )
    assert [line.strip() for line in text.splitlines()[1:11]] == [
        f"a.jsonl:{line}: {'empty' if line % 2 else 'no'} answer: d" for line in range(1, 11)
    ]
    assert "... and 290 more" in text and "--on-bad-row drop" in text
    ProblemLog().refuse(3)


def test_a_reason_is_said_once_and_records_on_one_line_are_one() -> None:
    log = ProblemLog()
    for line in (1, 1, 1, 2, 3):
        log.add((0, line), f"a.json:{line}", RecordProblem("empty answer", "d"))
    with pytest.raises(DataError) as caught:
        log.refuse(9)
    lines = [line.strip() for line in str(caught.value).splitlines()[1:5]]
    assert lines == [
        "a.json:1: empty answer: d",
        "a.json:2: as above",
        "a.json:3: as above",
        "... and 2 more",
    ]


def test_nearest_ignores_case_and_says_nothing_for_nothing_near() -> None:
    assert did_you_mean("EXPLIAN", LEVELS) == "; did you mean 'explain'?"
    assert did_you_mean("xyz", LEVELS) == ""
