"""Prompt and completion, plain text, and the data's own names for what formats know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_models import SPECIALS, TEMPLATES, family, make_tokenizer
from sample_rows import write_rows as write

from finetune.commands.evaluate.prompts import read_prompts
from finetune.config.fields import COLUMNS, DataSource
from finetune.config.resolution import resolve
from finetune.data import formats
from finetune.data.dataset import Samples, prepare_samples
from finetune.data.encoding.render import Renderer
from finetune.data.preference import reader as preference_reader
from finetune.data.records import RecordReader
from finetune.data.report import RecordProblem
from finetune.errors import DataError, FinetuneError

DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "data.md"
HUB = [("user", "What is a hub?", True), ("assistant", "A repeater.", True)]


def read(record: dict[str, Any], **columns: str) -> list[tuple[str, str, bool]]:
    reader = RecordReader(source=DataSource(path="rows.jsonl", columns=columns or None))
    ((_, _, found),) = reader.conversations([(1, record)])
    if isinstance(found, RecordProblem):
        raise found
    return [(message.role, message.content, message.trained) for message in found.messages]


def prepared(
    tmp_path: Path, rows: list[Any], columns: dict[str, str] | None = None, **options: Any
) -> Samples:
    path = write(tmp_path / "rows.jsonl", rows)
    options = {"cutoff_len": 64, "cache_dir": tmp_path / "cache", "num_proc": 1} | options
    return prepare_samples(
        [DataSource(path=str(path), columns=columns)],
        options.pop("tokenizer", family("chatml")),
        **options,
    )


def test_the_rows_of_the_page_are_read() -> None:
    page = DOCS.read_text(encoding="utf-8")
    rows = [json.loads(line) for line in page.split("```jsonl\n")[1].split("```")[0].splitlines()]
    found = [read(row) for row in rows]
    assert found[0] == found[1] == found[3] == HUB
    assert found[2] == [("user", "What is this?\nA hub.", True), HUB[1]]
    assert found[4] == [(role, text, role == "assistant") for role, text, _ in HUB]
    assert found[5] == [("text", "A hub repeats what it hears on every port.", True)]
    assert (
        read(
            {"question": "What is a hub?", "answer": "A repeater."},
            prompt="question",
            response="answer",
        )
        == HUB
    )
    assert "--columns prompt=question,response=answer" in page


def test_answers_in_a_prompt_are_context() -> None:
    turns = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    found = read({"prompt": turns, "completion": [{"role": "assistant", "content": "a"}]})
    assert [role for role, _, trained in found if trained] == ["assistant"] and found[-1] == (
        "assistant",
        "a",
        True,
    )


def test_mapped_names_tell_the_format_and_hide_others() -> None:
    row = {
        "instruction": "i",
        "output": "o",
        "prompt": "not this",
        "q": "What is a hub?",
        "response": "A repeater.",
    }
    assert read(row, prompt="q") == HUB
    assert read({"a": "x", "prompt": "y"}, prompt="a", completion="prompt") == [
        ("user", "x", True),
        ("assistant", "y", True),
    ], "names are read at once, so that they may change places"
    with pytest.raises(
        RecordProblem,
        match="unknown format: keys are b; a record needs 'text' .*--columns has text=a",
    ):
        read({"b": "x"}, text="a")


def test_every_name_that_a_format_reads_can_be_mapped() -> None:
    readers = (formats, preference_reader)
    source = "".join(Path(str(module.__file__)).read_text(encoding="utf-8") for module in readers)
    assert {key for key, _ in formats.FORMATS.values()} <= set(COLUMNS)
    assert all(f'"{name}"' in source for name in COLUMNS)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("promt=q", "unknown column 'promt'; did you mean 'prompt'"),
        ("prompt=q,prompt=r", "the column 'prompt' is named twice"),
        ("prompt=q,response=q", "the column 'q' is named twice"),
        ("prompt", "prompt= is half a column"),
    ],
)
def test_wrong_columns_are_refused_by_the_command_line(columns: str, said: str) -> None:
    with pytest.raises(FinetuneError, match=said) as caught:
        resolve(
            ["--model", "m", "--data", "d", "--output-dir", "o", "--columns", columns], world_size=1
        )
    assert "--columns" in str(caught.value)


def test_columns_of_a_file_and_of_a_flag_are_the_same(tmp_path: Path) -> None:
    run_file = tmp_path / "run.yaml"
    run_file.write_text("columns: {prompt: question, response: answer}\n", encoding="utf-8")
    needed = ["--model", "m", "--data", "d", "--output-dir", "o"]
    by_file = resolve([*needed, "--config", str(run_file)], world_size=1).config
    by_flag = resolve(
        [*needed, "--columns", "prompt=question, response=answer"], world_size=1
    ).config
    assert by_file.columns == by_flag.columns == {"prompt": "question", "response": "answer"}
    own = (DataSource(path="b", columns={"text": "t"}), DataSource(path="c", columns={}))
    entries = by_flag.model_copy(update={"data": ("a", *own)})
    assert [source.columns for source in entries.sources] == [by_flag.columns, {"text": "t"}, {}], (
        "its own count first"
    )


def test_a_column_that_no_row_has_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    rows = [{"question": "q", "answer": "a"}] * 3
    columns = {"prompt": "question", "response": "answer", "system": "persona"}
    with pytest.raises(
        DataError, match="no record has 'persona', which --columns reads as 'system'"
    ) as caught:
        prepared(tmp_path, rows, columns=columns)
    assert caught.value.where == f"{tmp_path / 'rows.jsonl'}:1"
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    samples = prepared(tmp_path, [*rows, {**rows[0], "persona": "s"}], columns=columns)
    plain = [{"prompt": "q", "response": "a"}] * 3 + [
        {"prompt": "q", "response": "a", "system": "s"}
    ]
    assert samples.fingerprint == prepared(tmp_path, plain).fingerprint


def test_plain_text_is_trained_whole_with_the_end_token_and_cut_texts_are_counted(
    tmp_path: Path,
) -> None:
    tokenizer = family("chatml")
    texts = ["什么是路由器？ A router.", "because " * 100, f"ended{tokenizer.eos_token}"]
    samples = prepared(tmp_path, [{"text": text} for text in texts], cutoff_len=40)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    end = tokenizer.eos_token_id
    assert [samples[index][0].tolist() for index in range(3)] == [
        [*ids[0], end],
        ids[1][:40],
        ids[2],
    ]
    assert all(
        samples[index][1].tolist() == [False] + [True] * (len(samples[index][0]) - 1)
        for index in range(3)
    )
    report = samples.report
    assert (report.cut_texts, report.cut_text_tokens) == (1, len(ids[1]) + 1 - 40)
    assert ("texts cut", f"1 ({len(ids[1]) + 1 - 40} tokens)") in report.lines()


def test_plain_text_begins_as_the_tokenizer_begins_a_text(tmp_path: Path) -> None:
    tokenizer = family("llama3")
    begins = tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id
    ((first, *_),) = [
        prepared(tmp_path, [{"text": "a router"}], tokenizer=tokenizer)[0][0].tolist()
    ]
    assert begins == (first == tokenizer.bos_token_id)


def test_eval_asks_nothing_of_plain_text(tmp_path: Path) -> None:
    rows = [
        {"prompt": "q", "completion": "Answer: a", "answer": "a"},
        {"prompt": "r", "completion": "b"},
    ]
    questions = read_prompts(
        [(write(tmp_path / "a.jsonl", rows), RecordReader())], "answer", [0, 1]
    )
    assert [(prompt.messages[0]["content"], prompt.answer) for prompt in questions] == [
        ("q", "a"),
        ("r", None),
    ]
    texts = [(write(tmp_path / "b.jsonl", [{"text": "a"}, {"text": "b"}]), RecordReader())]
    assert read_prompts(texts, "answer", [0, 1]) == []


def test_eval_compares_with_the_column_that_is_read_as_the_response(tmp_path: Path) -> None:
    """As GSM8K has it: the answer field is the whole response, which gives the answer behind its
    mark.
    """
    rows = [{"question": "q", "answer": "2 and 2\n#### 4"}, {"question": "r", "answer": "a hub"}]
    columns = {"prompt": "question", "response": "answer"}
    mapped = RecordReader(source=DataSource(path="c.jsonl", columns=columns))
    prompts = read_prompts([(write(tmp_path / "c.jsonl", rows), mapped)], "answer", [0, 1])
    assert [(prompt.answer, prompt.consistent) for prompt in prompts] == [
        ("4", True),
        ("a hub", True),
    ]
    # A name that the mapping gives to another key: the data's own `gold`, and `response` is not its
    # name for anything.
    rows = [{"question": "q", "answer": "so\nAnswer: 4", "gold": 5}]
    files = [(write(tmp_path / "d.jsonl", rows), mapped)]
    assert [(prompt.answer, prompt.consistent) for prompt in read_prompts(files, "gold", [0])] == [
        ("5", False)
    ]
    assert read_prompts(files, "response", [0])[0].answer is None
    # Asked for the question, nobody is to give the answer.
    turned = RecordReader(
        source=DataSource(path="d.jsonl", columns={"prompt": "answer", "response": "question"})
    )
    assert read_prompts([(files[0][0], turned)], "answer", [0])[0].answer is None


def test_plain_text_needs_an_end_token() -> None:
    tokenizer = make_tokenizer(TEMPLATES["chatml"], SPECIALS["chatml"])
    tokenizer.eos_token = None
    ((_, _, conversation),) = RecordReader().conversations([(1, {"text": "a"})])
    with pytest.raises(RecordProblem, match="no end token"):
        Renderer(tokenizer, 64)(conversation)
