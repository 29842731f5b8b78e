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


def text_of(generator: random.Random, words: int = 40) -> str:
    return " ".join(generator.choices(WORDS, k=words))


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    generator = random.Random(0)
    return [
        {"prompt": text_of(generator), "completion": text_of(generator), "id": number}
        for number in range(60)
    ]


@pytest.fixture
def audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    make_tokenizer(TEMPLATES["chatml"], SPECIALS["chatml"]).save_pretrained(tmp_path / "model")

    def call(path: Path, *more: str, json_wanted: bool = True) -> Any:
        given = [
            "--model",
            str(tmp_path / "model"),
            "--data",
            str(path),
            "--cache-dir",
            str(tmp_path / "cache"),
        ]
        assert main([*given, "--audit", *more, *(["--json"] if json_wanted else [])]) == 0
        shown = capsys.readouterr().out
        return json.loads(shown) if json_wanted else shown

    return call


@pytest.mark.parametrize("workers", ["1", "2"])
def test_what_is_wrong_with_rows_is_found(
    rows: list[dict[str, Any]],
    audited: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: str,
) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 2000)
    near = {**rows[3], "completion": rows[3]["completion"].upper().replace("WORD", "word", 1) + "."}
    leak = " ".join(rows[7]["completion"].split()[5:19])
    data = [
        *rows, {**rows[1], "id": "again"}, near, {"prompt": "q", "completion": ""},
        {"prompt": "什么是路由器?", "completion": "转发数据包"}, {"prompt": "w " * 100, "completion": "a"},
    ]  # fmt: skip
    path = write(tmp_path / "train.jsonl", data)
    valid = write(
        tmp_path / "valid.jsonl",
        [{"prompt": "Say", "completion": f"so: {leak}!"}, rows[9], rows[9]],
    )
    unseen = [{"question": f"q {number}", "choices": ["no such words"]} for number in range(3)]
    benchmark = write(tmp_path / "benchmark.jsonl", [*unseen, {"question": "x", "answer": [leak]}])
    more = ("--valid-data", str(valid), "--benchmark", str(benchmark), "--cutoff-len", "160")
    found = audited(path, *more, "--preprocessing-num-workers", workers)
    assert found["records"] == 65 and found["unusable"] == {"empty answer": 1}
    assert found["over_cutoff"]["prompts_trimmed"] >= 1
    assert found["exact_duplicates"] == 1 and found["exact_examples"] == [
        [f"{path}:61", f"{path}:2"]
    ]
    assert found["near_duplicates"] == 1 and found["near_examples"] == [[f"{path}:62", f"{path}:4"]]
    assert found["scripts"] == {"Latin": 63, "Chinese": 1}
    first, second = found["overlap"]
    assert (first["records"], first["found"], first["training_records"]) == (3, 3, 2)
    assert first["examples"][:2] == [[f"{valid}:1", f"{path}:8"], [f"{valid}:2", f"{path}:10"]]
    assert second == {
        "name": str(benchmark), "records": 4, "found": 1, "training_records": 1,
        "examples": [[f"{benchmark}:4", f"{path}:8"]],
    }  # fmt: skip


def test_chinese_is_compared_by_characters(audited: Any, tmp_path: Path) -> None:
    said = "路由器在不同的网络之间转发数据包"
    path = write(tmp_path / "train.jsonl", [{"prompt": "问", "completion": f"因为{said}。"}])
    valid = write(
        tmp_path / "valid.jsonl",
        [{"prompt": "甲", "completion": f"{said}吗"}, {"prompt": "乙", "completion": "否"}],
    )
    (overlap,) = audited(path, "--valid-data", str(valid))["overlap"]
    assert (overlap["records"], overlap["found"]) == (2, 1)


def test_texts_that_are_too_short_to_compare(
    rows: list[dict[str, Any]], audited: Any, tmp_path: Path
) -> None:
    benchmark = write(tmp_path / "benchmark.jsonl", [{"question": "2 + 2?", "answer": "4"}])
    (overlap,) = audited(write(tmp_path / "train.jsonl", rows), "--benchmark", str(benchmark))[
        "overlap"
    ]
    assert (overlap["records"], overlap["found"], overlap["training_records"]) == (1, 0, 0)


def test_a_form_of_words_is_no_leak(
    rows: list[dict[str, Any]], audited: Any, tmp_path: Path
) -> None:
    form = "Answer the following question with one of the four choices and say why you think so"
    asked = [{**row, "prompt": f"{form} {row['prompt']}"} for row in rows]
    path = write(tmp_path / "train.jsonl", asked[:40])
    (overlap,) = audited(path, "--valid-data", str(write(tmp_path / "valid.jsonl", asked[40:])))[
        "overlap"
    ]
    assert overlap["found"] == 0 and overlap["records"] == 20


def test_the_sides_of_a_split_are_compared(
    rows: list[dict[str, Any]], audited: Any, tmp_path: Path
) -> None:
    path = write(
        tmp_path / "train.jsonl",
        [*rows, *({**row, "prompt": f"So {row['prompt']}"} for row in rows)],
    )
    (overlap,) = audited(path, "--valid-split", "0.3")["overlap"]
    assert 10 < overlap["found"] < overlap["records"] and "--valid-split 0.3" in overlap["name"]
    rows = [{**row, "group": number} for number, row in enumerate(rows)]
    path = write(
        tmp_path / "grouped.jsonl",
        [*rows, *({**row, "prompt": f"So {row['prompt']}"} for row in rows)],
    )
    (overlap,) = audited(path, "--valid-split", "0.3", "--split-by", "group")["overlap"]
    assert overlap["found"] == 0 and overlap["records"] > 10


def test_rows_with_media_are_read_as_training_reads_them(
    rows: list[dict[str, Any]], audited: Any, tmp_path: Path
) -> None:
    pictured = [{**row, "image": "a.png"} for row in rows[:5]]
    path = write(tmp_path / "train.jsonl", [*rows[5:20], *pictured, pictured[0]])
    valid = str(write(tmp_path / "valid.jsonl", [{**pictured[1], "image": "b.png"}, rows[30]]))
    found = audited(path, "--on-media", "drop-media", "--valid-data", valid)
    assert found["exact_duplicates"] == 1 and found["unusable"] == {}
    assert found["overlap"][0]["found"] == 1
    found = audited(path, "--on-media", "drop-row")
    assert found["exact_duplicates"] == 0 and found["unusable"] == {"images, video or sound": 6}


def test_difficulties_of_entries_are_not_read_without_a_curriculum(
    rows: list[dict[str, Any]], tmp_path: Path, audited: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "train.jsonl", rows)
    config = {"model": str(tmp_path / "model"), "data": [{"path": str(path), "difficulty": "hard"}]}
    settings = {**config, "use_curriculum": False, "cache_dir": str(tmp_path / "cache")}
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    for options in (["--audit", "--json"], ["--rows", "0"]):
        assert main(["--config", str(tmp_path / "run.yaml"), *options]) == 0
    assert '"records": 60' in capsys.readouterr().out


def test_the_table(rows: list[dict[str, Any]], audited: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", [*rows, rows[0]])
    shown = audited(path, json_wanted=False)
    assert (
        "exact duplicates" in shown
        and "1 (1.6%)" in shown
        and f"{path}:61 says the same as {path}:1" in shown
    )


def test_options_of_the_audit_belong_to_it() -> None:
    for option in (["--json"], ["--benchmark", "b.jsonl"]):
        with pytest.raises(FinetuneError, match=f"{option[0]} belongs to --audit"):
            main(["--model", "m", "--data", "d", *option])
