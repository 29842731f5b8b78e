"""`python -m finetune inspect --audit`: each finding against rows that were made so."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from chat_models import SPECIALS, TEMPLATES, make_tokenizer
from sample_rows import write_rows as write

from finetune.commands.inspect.command import main
from finetune.data import parts
from finetune.errors import FinetuneError

WORDS = [f"word{number}" for number in range(2000)]
Rows = list[dict[str, Any]]


@pytest.fixture
def rows() -> Rows:
    generator = random.Random(0)
    texts = [" ".join(generator.choices(WORDS, k=40)) for _ in range(120)]
    pairs = zip(texts[::2], texts[1::2], strict=True)
    return [{"prompt": asked, "completion": said} for asked, said in pairs]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(TEMPLATES["chatml"], SPECIALS["chatml"]).save_pretrained(folder)
    return folder


@pytest.fixture
def audited(model: Path, tmp_path: Path, capsys) -> Any:
    def call(path: Path, words: str, as_json: bool = True) -> Any:
        given = f"--model {model} --data {path} --cache-dir {tmp_path / 'cache'} --audit {words}"
        assert main([*given.split(), *(["--json"] if as_json else [])]) == 0
        shown = capsys.readouterr().out
        return json.loads(shown) if as_json else shown

    return call


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_wrong_with_rows_is_found(rows, audited, tmp_path, monkeypatch, workers):
    monkeypatch.setattr(parts, "PART_BYTES", 2000)
    near = {**rows[3], "completion": rows[3]["completion"].upper().replace("WORD", "word", 1) + "."}
    leak = " ".join(rows[7]["completion"].split()[5:19])
    data = [
        *rows, {**rows[1], "id": "again"}, near, {"prompt": "q", "completion": ""},
        {"prompt": "什么是路由器?", "completion": "转发数据包"}, {"prompt": "w " * 100, "completion": "a"},
    ]  # fmt: skip
    path = write(tmp_path / "train.jsonl", data)
    held_out = [{"prompt": "Say", "completion": f"so: {leak}!"}, rows[9], rows[9]]
    valid = write(tmp_path / "valid.jsonl", held_out)
    unseen = [{"question": f"q {number}", "choices": ["no such words"]} for number in range(3)]
    benchmark = write(tmp_path / "benchmark.jsonl", [*unseen, {"question": "x", "answer": [leak]}])
    words = f"--valid-data {valid} --benchmark {benchmark} --cutoff-len 160"
    found = audited(path, f"{words} --preprocessing-num-workers {workers}")
    assert found["records"] == 65 and found["unusable"] == {"empty answer": 1}
    assert found["over_cutoff"]["prompts_trimmed"] >= 1
    assert found["exact_duplicates"] == found["near_duplicates"] == 1
    assert found["exact_examples"] == [[f"{path}:61", f"{path}:2"]]
    assert found["near_examples"] == [[f"{path}:62", f"{path}:4"]]
    assert found["scripts"] == {"Latin": 63, "Chinese": 1}
    first, second = found["overlap"]
    assert (first["records"], first["found"], first["training_records"]) == (3, 3, 2)
    assert first["examples"][:2] == [[f"{valid}:1", f"{path}:8"], [f"{valid}:2", f"{path}:10"]]
    assert second == {
        "name": str(benchmark), "records": 4, "found": 1, "training_records": 1,
        "examples": [[f"{benchmark}:4", f"{path}:8"]],
    }  # fmt: skip
    shown = audited(path, words, as_json=False)
    for text in ("exact duplicates", "1 (1.5%)", f"{path}:61 says the same as {path}:2"):
        assert text in shown


ROUTER = "路由器在不同的网络之间转发数据包"
FORM = "Answer the following question with one of the four choices and say why you think so"


def test_what_is_no_leak(rows: Rows, audited: Any, tmp_path: Path):
    def overlap(train: Rows, held_out: Rows, option: str = "--valid-data") -> tuple[int, int]:
        path = write(tmp_path / "train.jsonl", train)
        other = write(tmp_path / "other.jsonl", held_out)
        (found,) = audited(path, f"{option} {other}")["overlap"]
        return found["records"], found["found"]

    # texts that are too short to compare
    assert overlap(rows, [{"question": "2 + 2?", "answer": "4"}], "--benchmark") == (1, 0)
    # a form of words
    asked = [{**row, "prompt": f"{FORM} {row['prompt']}"} for row in rows]
    assert overlap(asked[:40], asked[40:]) == (20, 0)
    # Chinese is compared by characters
    train = [{"prompt": "问", "completion": f"因为{ROUTER}。"}]
    valid = [{"prompt": "甲", "completion": f"{ROUTER}吗"}, {"prompt": "乙", "completion": "否"}]
    assert overlap(train, valid) == (2, 1)


def test_the_sides_of_a_split_are_compared(rows: Rows, audited: Any, tmp_path: Path):
    grouped = [{**row, "group": number} for number, row in enumerate(rows)]
    grouped += [{**row, "prompt": f"So {row['prompt']}"} for row in grouped]
    path = write(tmp_path / "train.jsonl", grouped)
    (overlap,) = audited(path, "--valid-split 0.3")["overlap"]
    assert 10 < overlap["found"] < overlap["records"] and "--valid-split 0.3" in overlap["name"]
    (overlap,) = audited(path, "--valid-split 0.3 --split-by group")["overlap"]
    assert overlap["found"] == 0 and overlap["records"] > 10


def test_options_of_the_audit_belong_to_it():
    with pytest.raises(FinetuneError, match="--benchmark belongs to --audit"):
        main(["--model", "m", "--data", "d", "--benchmark", "b.jsonl"])
