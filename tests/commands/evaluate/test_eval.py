"""eval against the run's own evaluation, transformers' answers and hand-written ones."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import make_records
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.commands.evaluate.prompts import find_answer, normalize, same_answer
from finetune.commands.evaluate.scores import ModelScores, Score, markdown_table, tables


def test_where_the_answer_is():
    for text, answer in {
        "1 + 1 = 2.\nAnswer: 2": "2",
        "一加一。\n答案：2": "2",
        "Answer: 3\nNo, wait.\nAnswer: 4 ms\nDone.": "4 ms",
        "<think>\nAnswer: 9\n</think>\nAnswer: 8": "8",
        "**Answer:** `10.0.0.0/8`": "`10.0.0.0/8`",
        "- Final answer: yes": "yes",
        "2 + 2\n#### 4": "4",
        "The answer: not at the beginning": "The answer: not at the beginning",
        "Answer:": None,
        "  \n": None,
    }.items():
        assert find_answer(text) == answer, text


SAME = (
    "163.80 MB = 163.8 MB; 150kB = 150 kB; １５０　ｋＢ。 = 150 kB; 1,440 min = 1440 min; +7 = 7;"
    " -0 = 0; 100 = 100.0; **`10.0.0.0/8`.** = 10.0.0.0/8; Yes. = yes; S1-S3, S1-S5 = S1-S3，S1-S5;"
    " 上海、武汉 = 上海，武汉; 40 µs = 40 us; 84.640 % = 84.64%; 80 Mbit/s = 80Mbit/s"
)
OTHER = (
    "150 = 150 kB; 150 kB = 150 KB; 150 kB = 150000 B; 10.0.0.0 = 10.0.0.00; 10.1 = 10.1.0.0;"
    " /21 = 21; R1 = R10; 1.1 = 11; -5 = 5; 1，440 = 1440; S1-S5, S1-S3 = S1-S3, S1-S5;"
    " S1-S3 = S1-S3, S1-S5; 2001:db8::1 = 2001:db8::01; no = yes; 2 or 3 = 2"
)


def test_what_is_the_same_answer():
    for pairs, same in ((SAME, True), (OTHER, False)):
        for pair in pairs.split("; "):
            one, other = pair.split(" = ")
            assert same_answer(one, other) == same_answer(other, one) == same, pair
    assert not same_answer(None, "2")


@given(
    st.integers(-(10**12), 10**12),
    st.integers(0, 6),
    st.integers(0, 4),
    st.sampled_from(["", "ms", "%", "kB"]),
)
def test_a_number_is_its_value(digits: int, places: int, zeros: int, unit: str):
    """Trailing zeros, thousands and the space before the unit do not count."""
    sign, whole, rest = "-" * (digits < 0), *divmod(abs(digits), 10**places)
    fraction = f".{rest:0{places}}" if places else ""
    plain = normalize(f"{sign}{whole}{fraction}{unit}")
    assert plain == normalize(f"{sign}{whole:,}{fraction}{'0' * zeros if places else ''} {unit}")
    assert plain != normalize(f"{sign}{whole + 1}{fraction}{unit}")


def test_sums_and_table():
    scores = {"a": Score(2, 10, 20.0, 2, 1), "b": Score(1, 30, 15.0), None: Score(1, 0, 0)}
    model = ModelScores("m|1", "model", scores)
    found = model.to_dict()
    assert (found["overall"]["loss"], found["overall"]["exact_match"]) == (35 / 40, 0.5)
    assert found["overall"]["perplexity"] == pytest.approx(math.exp(35 / 40))
    assert found["levels"]["b"]["exact_match"] is None
    (lines,) = tables([model], [])
    table = markdown_table(lines).splitlines()
    assert table[2] == "| a | m\\|1 | 2 | 10 | 2.0000 | 7.389 | 50.0% (1/2) |"
    assert table[4].startswith("| all | m\\|1 | 4 | 40 | 0.8750 |") and len(table) == 5
    # beyond a float: JSON has no infinity
    assert Score(1, 1, 900.0).to_dict()["perplexity"] is None


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory: pytest.TempPathFactory, write_rows: Callable) -> Path:
    """Nine rows on three levels, some with a system prompt; the first six have an answer."""
    rows = make_records(9, seed=1)
    for number, row in enumerate(rows[:6]):
        row |= {"output": f"{row['output']}\nAnswer: {number}", "answer": number}
    return write_rows(tmp_path_factory.mktemp("eval") / "valid.jsonl", rows)


@pytest.fixture(scope="module")
def run_folder(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_data: Path, rows_file: Path
) -> Path:
    """A finished LoRA run with evaluations and a checkpoint in its middle."""
    from finetune import run

    folder = tmp_path_factory.mktemp("runs")
    paths = {"model": tiny_model, "data": tiny_data, "valid_data": rows_file}
    paths |= {"output_dir": folder / "run", "cache_dir": folder / "cache"}
    settings = {name: str(path) for name, path in paths.items()}
    settings |= {"device_type": "cpu", "dtype": "float32", "report_to": "none"}
    settings |= {
        "learning_rate": 1e-2,
        "global_batch_size": 6,
        "cutoff_len": 110,
    }  # some rows are longer
    before = dict(os.environ)
    run(settings | {"max_steps": 4, "save_steps": 2, "eval_steps": 2})
    os.environ.clear()
    os.environ.update(before)
    return folder / "run"


@pytest.mark.frozen
def test_the_losses_are_the_runs_own_and_the_answers_transformers(
    run_folder, rows_file, tiny_model, tmp_path, evaluate, frozen, plain_answer
):
    """Losses of the run; answers of plain transformers and peft to each prompt alone."""
    out, checkpoint = tmp_path / "out", run_folder / "checkpoint-2"
    flags = ("--data", rows_file, "--base", "--generate", "all", "--max-new-tokens", 12)
    result = evaluate("--adapter", run_folder, checkpoint, *flags, "--output", out)
    events = [json.loads(line) for line in (run_folder / "events.jsonl").open(encoding="utf-8")]
    measured = {event["step"]: event for event in events if event["event"] == "eval"}
    assert [model["role"] for model in result["models"]] == ["base", "adapter", "adapter"]
    levels = {"explain", "reasoning", "topology"}
    for model, step in zip(result["models"], (0, 4, 2), strict=True):
        assert model["overall"]["loss"] == pytest.approx(measured[step]["eval_loss"], rel=1e-5)
        assert set(model["levels"]) == levels
        for level, score in model["levels"].items():
            assert score["loss"] == pytest.approx(measured[step][f"eval_loss/{level}"], rel=1e-5)
            assert score["samples"] == 3 and score["answered"] == 2
    assert measured[4]["eval_loss"] < measured[0]["eval_loss"]

    by_measure = {}
    for one in result["differences"]:
        by_measure.setdefault((one["measure"], one["of"]), []).append(one)
    assert set(by_measure) == {(m, of) for m in ("loss", "exact match") for of in {*levels, "all"}}
    # the base and each adapter, and the first adapter and the other
    steps = [(0, 4), (0, 2), (4, 2)]
    for found, (first, second) in zip(by_measure["loss", "all"], steps, strict=True):
        difference = measured[second]["eval_loss"] - measured[first]["eval_loss"]
        assert found["difference"] == pytest.approx(difference, abs=1e-5)
        assert found["low"] < difference < found["high"] and found["records"] == 9

    assert json.loads((out / "evaluation.json").read_text()) == result
    assert (out / "table.md").read_text().count("\n") == 2 + 3 * 4 + 1 + 2 + 8
    lines = [json.loads(line) for line in (out / "generations.jsonl").open(encoding="utf-8")]
    assert [line["row"] for line in lines] == [*range(9)] * 3
    model = result["models"][0]
    shapes = {"top": result, "model": model, "score": model["overall"], "generation": lines[0]}
    shapes |= {"data": result["data"], "settings": result["settings"]}
    assert {name: set(shape) for name, shape in shapes.items()} == {n: frozen[n] for n in shapes}
    assert str(tmp_path) not in json.dumps(result)
    assert str(run_folder.parent) not in json.dumps(result)

    said = {model["name"]: [] for model in result["models"]}
    for line in lines:
        said[line["model"]].append(line["text"])
    tokenizer = AutoTokenizer.from_pretrained(run_folder)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    for answers in list(said.values())[:2]:  # of the base, and with the adapter
        for row, answer in zip(
            map(json.loads, rows_file.open(encoding="utf-8")), answers, strict=True
        ):
            turns = [{"role": "system", "content": row["system"]}] if "system" in row else []
            turns.append({"role": "user", "content": row["instruction"]})
            expected = plain_answer(plain, tokenizer, turns, max_new_tokens=12)
            # A character that the last token only begins is left out.
            assert answer == expected.rstrip("\ufffd")
        plain = PeftModel.from_pretrained(plain, run_folder).eval()
    assert len({tuple(answers) for answers in list(said.values())[:2]}) == 2
    assert lines[0]["correct"] in (True, False) and lines[6]["correct"] is None
    alone = tmp_path / "alone"
    flags += ("--batch-size", 1, "--output", alone)
    assert evaluate("--model", run_folder, *flags)["models"] == result["models"][:2]
    generated = (alone / "generations.jsonl").read_text(encoding="utf-8").splitlines()
    assert list(map(json.loads, generated)) == lines[:18]


def test_a_part_of_the_rows_and_of_the_answers(
    tiny_model: Path, rows_file: Path, write_rows: Callable, tmp_path: Path, evaluate, command
):
    flags = ("--model", tiny_model, "--data", rows_file)
    for generate, answered in (("answered", 4), (0, 0)):
        part = ("--max-samples", 4, "--generate", generate, "--max-new-tokens", 1)
        result = evaluate(*flags, *part)
        (model,) = result["models"]
        counts = [model["levels"][name]["samples"] for name in ("explain", "reasoning", "topology")]
        assert counts == [2, 1, 1]
        assert model["overall"]["answered"] == result["data"]["questions"] == answered
    # the table is for people; those with an answer are asked first
    out, err = command(*flags, "--generate", 2, "--max-new-tokens", 2)
    assert out.startswith("| difficulty | model | samples |") and "% (0/2) |" in out
    assert "were cut off" in err
    assert json.loads(rows_file.read_text("utf-8").splitlines()[0])["instruction"] not in out + err
    rows = [{**row, "output": "Answer: 1", "answer": "2"} for row in make_records(2)]
    wrong = write_rows(tmp_path / "rows.jsonl", rows)
    flags = ("--model", tiny_model, "--data", wrong, "--generate", 1, "--max-new-tokens", 1)
    assert "1 records have another 'answer' than their own output gives" in command(*flags)[1]


def test_bad_input_is_refused_with_words(tiny_model, rows_file, write_rows, tmp_path, refused):
    model = ("--model", tiny_model)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "thesis.tex").touch()
    rows = [{**row, "difficulty": str(number)} for number, row in enumerate(make_records(60))]
    many = write_rows(tmp_path / "many.jsonl", rows)
    wrong = write_rows(tmp_path / "wrong.jsonl", [rows[0], {**rows[1], "answer": ["1"]}])
    for flags, words in (
        (("--data", rows_file, "--output", taken), "nothing is overwritten"),
        (("--data", rows_file, "--base"), "no base to compare with"),
        (("--data", rows_file, "--adapter", tmp_path), "no adapter is there"),
        (("--data", many), "at most 50 can be difficulties"),
        (("--data", wrong), "'answer' is list"),
        (("--data", "x.jsonl", "--generate", "some"), "generate is 'some'"),
        ((), "nothing to evaluate on"),
    ):
        assert words in refused(*model, *flags), flags
    assert [path.name for path in taken.iterdir()] == ["thesis.tex"]
