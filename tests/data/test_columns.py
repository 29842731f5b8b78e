"""Prompt and completion, plain text, and the data's own names for what formats know."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_models import SPECIALS, TEMPLATES, family, make_tokenizer
from launching import ROOT
from sample_rows import write_rows as write

from finetune.commands.evaluate.prompts import read_prompts
from finetune.config.fields import DataSource
from finetune.config.resolution import resolve
from finetune.data.encoding.render import Renderer
from finetune.data.records import RecordReader
from finetune.data.report import RecordProblem
from finetune.errors import DataError, FinetuneError

HUB = [("user", "What is a hub?", True), ("assistant", "A repeater.", True)]


def read(record: dict[str, Any], **columns: str) -> list[tuple[str, str, bool]]:
    reader = RecordReader(source=DataSource(path="rows.jsonl", columns=columns or None))
    ((_, _, found),) = reader.conversations([(1, record)])
    if isinstance(found, RecordProblem):
        raise found
    return [(message.role, message.content, message.trained) for message in found.messages]


def test_the_rows_of_the_page_are_read():
    page = (ROOT / "docs" / "reference" / "data.md").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in page.split("```jsonl\n")[1].split("```")[0].splitlines()]
    found = [read(row) for row in rows]
    assert found[0] == found[1] == found[3] == HUB
    assert found[2] == [("user", "What is this?\nA hub.", True), HUB[1]]
    assert found[4] == [(role, text, role == "assistant") for role, text, _ in HUB]
    assert found[5] == [("text", "A hub repeats what it hears on every port.", True)]
    row = {"question": "What is a hub?", "answer": "A repeater."}
    assert read(row, prompt="question", response="answer") == HUB
    assert "--columns prompt=question,response=answer" in page
    turns = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    context = read({"prompt": turns, "completion": [{"role": "assistant", "content": "a"}]})
    assert [text for role, text, trained in context if role == "assistant" and trained] == ["a"]


def test_mapped_names_tell_the_format_and_hide_others():
    row = {"instruction": "i", "output": "o", "prompt": "not this", "response": "A repeater."}
    assert read({**row, "q": "What is a hub?"}, prompt="q") == HUB
    with pytest.raises(RecordProblem, match="unknown format"):
        read({"prompt": "not this", "response": "a"}, prompt="q")
    # names are read at once, so that they may change places
    changed = read({"a": "x", "prompt": "y"}, prompt="a", completion="prompt")
    assert changed == [("user", "x", True), ("assistant", "y", True)]
    with pytest.raises(RecordProblem, match="keys are b; a record needs 'text' .*has text=a"):
        read({"b": "x"}, text="a")


NEEDED = ["--model", "m", "--data", "d", "--output-dir", "o"]


def test_wrong_columns_are_refused_by_the_command_line():
    for columns, said in (
        ("promt=q", "unknown column 'promt'; did you mean 'prompt'"),
        ("prompt=q,response=q", "the column 'q' is named twice"),
        ("prompt", "prompt= is half a column"),
    ):
        with pytest.raises(FinetuneError, match=said) as caught:
            resolve([*NEEDED, "--columns", columns], world_size=1)
        assert "--columns" in str(caught.value)


def test_a_column_that_no_row_has_is_refused_before_anything_is_written(tmp_path, prepare):
    rows = [{"question": "q", "answer": "a"}] * 3
    columns = {"prompt": "question", "response": "answer", "system": "persona"}
    path = write(tmp_path / "a.jsonl", rows)
    source = DataSource(path=str(path), columns=columns)
    with pytest.raises(DataError, match="'persona', which --columns reads as 'system'") as caught:
        prepare(source)
    assert caught.value.where == f"{path}:1"
    assert not [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]
    write(path, [*rows, {**rows[0], "persona": "s"}])
    plain = [{"prompt": "q", "response": "a"}] * 3
    expected = write(tmp_path / "b.jsonl", [*plain, {**plain[0], "system": "s"}])
    assert prepare(source).fingerprint == prepare(expected).fingerprint


def test_plain_text_is_trained_whole_with_the_end_token_and_cut_texts_are_counted(
    tmp_path, prepare
):
    tokenizer = family("chatml")
    texts = ["什么是路由器？ A router.", "because " * 100, f"ended{tokenizer.eos_token}"]
    path = write(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    samples = prepare(path, cutoff_len=40)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    expected = [[*ids[0], tokenizer.eos_token_id], ids[1][:40], ids[2]]
    for index, (found, supervised) in enumerate(samples[index] for index in range(3)):
        assert found.tolist() == expected[index]
        assert supervised.tolist() == [False] + [True] * (len(found) - 1)
    assert (samples.report.cut_texts, samples.report.cut_text_tokens) == (1, len(ids[1]) - 39)
    assert ("texts cut", f"1 ({len(ids[1]) - 39} tokens)") in samples.report.lines()
    tokenizer = family("llama3")
    begins = tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id
    assert begins == (prepare(path, tokenizer=tokenizer)[0][0][0] == tokenizer.bos_token_id)


def test_plain_text_needs_an_end_token():
    tokenizer = make_tokenizer(TEMPLATES["chatml"], SPECIALS["chatml"])
    tokenizer.eos_token = None
    ((_, _, conversation),) = RecordReader().conversations([(1, {"text": "a"})])
    with pytest.raises(RecordProblem, match="no end token"):
        Renderer(tokenizer, 64)(conversation)


def test_eval_asks_nothing_of_plain_text_and_compares_with_the_mapped_column(tmp_path):
    def prompts(rows: list[Any], field: str, **columns: str) -> list[tuple[Any, ...]]:
        reader = RecordReader(source=DataSource(path="c.jsonl", columns=columns or None))
        path = write(tmp_path / "c.jsonl", rows)
        found = read_prompts([(path, reader)], field, list(range(len(rows))))
        return [(one.messages[0]["content"], one.answer, one.consistent) for one in found]

    assert prompts([{"text": "a"}, {"text": "b"}], "answer") == []
    # As GSM8K has it: the answer field is the whole response, with the answer behind its mark.
    rows = [{"question": "q", "answer": "2 and 2\n#### 4"}, {"question": "r", "answer": "a hub"}]
    mapped = {"prompt": "question", "response": "answer"}
    assert prompts(rows, "answer", **mapped) == [("q", "4", True), ("r", "a hub", True)]
    # The data's own `gold`; `response` is not its name for anything.
    rows = [{"question": "q", "answer": "so\nAnswer: 4", "gold": 5}]
    assert prompts(rows, "gold", **mapped) == [("q", "5", False)]
    assert prompts(rows, "response", **mapped)[0][1] is None
