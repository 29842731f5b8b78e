"""eval against the run's own evaluation, transformers' own answers, hand-written answers, and what
users get wrong.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_records
from hypothesis import given
from hypothesis import strategies as st
from launching import ROOT

from finetune.__main__ import main as finetune
from finetune.commands.evaluate.options import EvalOptions
from finetune.commands.evaluate.prompts import find_answer, normalize, same_answer, spread
from finetune.commands.evaluate.scores import ModelScores, Score, markdown_table, tables
from finetune.config.options import read_options

DATA = ROOT / "data_samples"
FROZEN = ROOT / "tests" / "frozen" / "eval.txt"


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("1 + 1 = 2.\nAnswer: 2", "2"),
        ("一加一。\n答案：2", "2"),
        ("Answer: 3\nNo, wait.\nAnswer: 4 ms\nDone.", "4 ms"),
        ("<think>\nAnswer: 9\n</think>\nAnswer: 8", "8"),
        ("**Answer:** `10.0.0.0/8`", "`10.0.0.0/8`"),
        ("- Final answer: yes", "yes"),
        ("2 + 2\n#### 4", "4"),
        ("just this", "just this"),
        (
            "The answer: none at the beginning of a line",
            "The answer: none at the beginning of a line",
        ),
        ("Answer:", None),
        ("  \n", None),
    ],
)
def test_where_the_answer_is(text: str, answer: str | None):
    assert find_answer(text) == answer


@pytest.mark.parametrize(
    ("given_answer", "expected"),
    [
        ("163.80 MB", "163.8 MB"),
        ("150kB", "150 kB"),
        ("１５０　ｋＢ。", "150 kB"),
        ("1,440 min", "1440 min"),
        ("+7", "7"),
        ("-0", "0"),
        ("100", "100.0"),
        ("**`10.0.0.0/8`.**", "10.0.0.0/8"),
        ("Yes.", "yes"),
        ("S1-S3, S1-S5", "S1-S3，S1-S5"),
        ("上海、武汉", "上海，武汉"),
        ("40 µs", "40 us"),
        ("84.640 %", "84.64%"),
        ("80 Mbit/s", "80Mbit/s"),
    ],
)
def test_what_is_the_same(given_answer: str, expected: str):
    assert same_answer(given_answer, expected) and same_answer(expected, given_answer)


@pytest.mark.parametrize(
    ("given_answer", "expected"),
    [
        (None, "2"),
        ("150", "150 kB"),
        ("150 kB", "150 KB"),
        ("150 kB", "150000 B"),
        ("8 Mb", "8 MB"),
        ("10.0.0.0", "10.0.0.00"),
        ("10.1", "10.1.0.0"),
        ("/21", "21"),
        ("R1", "R10"),
        ("1.1", "11"),
        ("-5", "5"),
        ("1，440", "1440"),
        ("S1-S5, S1-S3", "S1-S3, S1-S5"),
        ("S1-S3", "S1-S3, S1-S5"),
        ("2001:db8::1", "2001:db8::01"),
        ("no", "yes"),
        ("2 or 3", "2"),
    ],
)
def test_what_is_another_answer(given_answer: str | None, expected: str):
    assert not same_answer(given_answer, expected)


@given(
    st.integers(-(10**12), 10**12),
    st.integers(0, 6),
    st.integers(0, 4),
    st.sampled_from(["", "ms", "%", "kB"]),
)
def test_a_number_is_its_value(digits: int, places: int, zeros: int, unit: str):
    """Trailing zeros, thousands and the space before the unit do not count; the next number
    does.
    """
    sign, whole, rest = "-" * (digits < 0), *divmod(abs(digits), 10**places)
    fraction = f".{rest:0{places}}" if places else ""
    plain = f"{sign}{whole}{fraction}{unit}"
    padded = f"{sign}{whole:,}{fraction}{'0' * zeros if places else ''} {unit}"
    assert normalize(plain) == normalize(padded)
    other = f"{sign}{whole + 1}{fraction}{unit}"
    assert normalize(plain) != normalize(other)


def test_every_bundled_record_gives_its_own_answer_and_no_others():
    rows = [
        json.loads(line)
        for name in ("train", "valid")
        for line in (DATA / f"{name}.jsonl").open(encoding="utf-8")
    ]
    rows = [row for row in rows if "answer" in row]
    assert len(rows) == 1000
    for row, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        assert same_answer(find_answer(row["output"]), row["answer"])
        same = row["answer"].casefold() == other["answer"].casefold()
        assert same_answer(find_answer(row["output"]), other["answer"]) == same


# ---------------------------------------------------------------- which rows, which sums


@given(st.lists(st.integers(-1, 3), min_size=1, max_size=40), st.integers(1, 50))
def test_levels_are_taken_in_turn(levels: list[int], count: int):
    places = spread(np.array(levels), count)
    assert list(places) == sorted(set(places.tolist())) and len(places) == min(count, len(levels))
    taken = [sum(levels[place] == level for place in places) for level in set(levels)]
    there = [levels.count(level) for level in set(levels)]
    most = max(taken)
    # A level has fewer than another only by one, or because it has no more.
    assert all(t >= most - 1 or t == n for t, n in zip(taken, there, strict=True))
    for level in set(levels):  # the first ones of each
        mine = [place for place, name in enumerate(levels) if name == level]
        assert [place for place in places if levels[place] == level] == mine[
            : taken[list(set(levels)).index(level)]
        ]


def test_sums_and_table():
    model = ModelScores(
        "m|1",
        "model",
        {"a": Score(2, 10, 20.0, 2, 1), "b": Score(1, 30, 15.0), None: Score(1, 0, 0)},
    )
    everything = model.to_dict()["overall"]
    assert everything["loss"] == 35 / 40 and everything["perplexity"] == pytest.approx(
        math.exp(35 / 40)
    )
    assert (
        everything["exact_match"] == 0.5 and model.to_dict()["levels"]["b"]["exact_match"] is None
    )
    (lines,) = tables([model], [])
    table = markdown_table(lines).splitlines()
    assert table[2] == "| a | m\\|1 | 2 | 10 | 2.0000 | 7.389 | 50.0% (1/2) |"
    assert table[4].startswith("| all | m\\|1 | 4 | 40 | 0.8750 |") and len(table) == 5
    # beyond a float: JSON has no infinity
    assert Score(1, 1, 900.0).to_dict()["perplexity"] is None


# ---------------------------------------------------------------- a run


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory: pytest.TempPathFactory, write_rows: Callable) -> Path:
    """Nine rows on three levels; the first six have an answer, and a system prompt is among
    them.
    """
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
    before = dict(os.environ)
    run(
        {
            "model": str(tiny_model),
            "data": str(tiny_data),
            "valid_data": str(rows_file),
            "output_dir": str(folder / "run"),
            "cache_dir": str(folder / "cache"),
            "device_type": "cpu",
            "dtype": "float32",
            "max_steps": 4,
            "save_steps": 2,
            "eval_steps": 2,
            "global_batch_size": 6,
            "cutoff_len": 110,  # some rows are longer
            "learning_rate": 1e-2,
            "report_to": "none",
        }
    )
    os.environ.clear()
    os.environ.update(before)
    return folder / "run"


def evaluate(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    # the tests' own
    cache = [] if "--cache-dir" in arguments else ["--cache-dir", os.environ["HF_DATASETS_CACHE"]]
    code = finetune(["eval", *map(str, arguments), "--device-type", "cpu", "--json", *cache])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


@pytest.mark.frozen
def test_the_losses_are_the_runs_own(
    run_folder: Path, rows_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Before, in the middle and after the run, per level, by another plan; and the answers of all
    of them.
    """
    out, checkpoint = tmp_path / "out", run_folder / "checkpoint-2"
    result = evaluate(
        capsys, "--adapter", run_folder, checkpoint, "--base", "--data", rows_file, "--output", out,
        "--generate", "all", "--max-new-tokens", 5,
    )  # fmt: skip
    events = [json.loads(line) for line in (run_folder / "events.jsonl").open(encoding="utf-8")]
    measured = {event["step"]: event for event in events if event["event"] == "eval"}
    assert [model["role"] for model in result["models"]] == ["base", "adapter", "adapter"]
    for model, step in zip(result["models"], (0, 4, 2), strict=True):
        assert model["overall"]["loss"] == pytest.approx(measured[step]["eval_loss"], rel=1e-5)
        assert set(model["levels"]) == {"explain", "reasoning", "topology"}
        for level, score in model["levels"].items():
            assert score["loss"] == pytest.approx(measured[step][f"eval_loss/{level}"], rel=1e-5)
            assert score["samples"] == 3 and score["answered"] == 2
    assert measured[4]["eval_loss"] < measured[0]["eval_loss"]
    losses = [
        one for one in result["differences"] if (one["measure"], one["of"]) == ("loss", "all")
    ]
    # the base and each adapter, and the first adapter and the other
    steps = [(0, 4), (0, 2), (4, 2)]
    for found, (first, second) in zip(losses, steps, strict=True):
        difference = measured[second]["eval_loss"] - measured[first]["eval_loss"]
        assert found["difference"] == pytest.approx(difference, abs=1e-5)
        assert found["low"] < difference < found["high"] and found["records"] == 9
    assert {(one["measure"], one["of"]) for one in result["differences"]} == {
        (measure, level)
        for measure in ("loss", "exact match")
        for level in ("explain", "reasoning", "topology", "all")
    }
    assert json.loads((out / "evaluation.json").read_text()) == result
    lines = [json.loads(line) for line in (out / "generations.jsonl").open(encoding="utf-8")]
    assert len(lines) == 27 and (out / "table.md").read_text().count("\n") == 2 + 3 * 4 + 1 + 2 + 8
    frozen = dict(
        line.split(": ")
        for line in FROZEN.read_text().splitlines()
        if ": " in line and line[0] != "#"
    )
    shapes = {
        "top": result, "data": result["data"], "settings": result["settings"], "model": result["models"][0],
        "score": result["models"][0]["overall"], "generation": lines[0],
    }  # fmt: skip
    for name, shape in shapes.items():
        assert set(shape) == set(frozen[name].split()), name
    assert str(tmp_path) not in json.dumps(result) and str(run_folder.parent) not in json.dumps(
        result
    )


def test_the_answers_are_transformers_own(
    run_folder: Path,
    rows_file: Path,
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    """Token by token what plain transformers and peft say to each prompt alone; batched or not
    makes no difference.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    results = []
    for size in (4, 1):
        out = tmp_path / f"out{size}"
        flags = (
            "--generate",
            "all",
            "--max-new-tokens",
            12,
            "--batch-size",
            size,
            "--output",
            out,
            "--base",
        )
        result = evaluate(capsys, "--model", run_folder, "--data", rows_file, *flags)
        results.append((result, (out / "generations.jsonl").read_text(encoding="utf-8")))
    assert results[0] == results[1]
    tokenizer = AutoTokenizer.from_pretrained(run_folder)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    expected = [_plain_answers(base, tokenizer, rows_file)]
    expected.append(
        _plain_answers(PeftModel.from_pretrained(base, run_folder).eval(), tokenizer, rows_file)
    )
    lines = [json.loads(line) for line in results[0][1].splitlines()]
    said = [
        [line["text"] for line in lines if line["model"] == name["name"]]
        for name in results[0][0]["models"]
    ]
    # A character that the last token only begins is left out.
    expected = [[text.rstrip("\ufffd") for text in texts] for texts in expected]
    assert said == expected and said[0] != said[1]
    assert [line["row"] for line in lines] == [*range(9), *range(9)]
    assert {line["correct"] for line in lines[:6]} <= {True, False} and lines[6]["correct"] is None


def _plain_answers(model, tokenizer, rows_file: Path) -> list[str]:
    ends = [
        tokenizer.eos_token_id,
        *tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]),
    ]
    texts = []
    for line in rows_file.open(encoding="utf-8"):
        row = json.loads(line)
        turns = [{"role": "system", "content": row["system"]}] if "system" in row else []
        inputs = tokenizer.apply_chat_template(
            [*turns, {"role": "user", "content": row["instruction"]}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        with torch.inference_mode():
            ids = model.generate(
                **inputs, do_sample=False, max_new_tokens=12, pad_token_id=tokenizer.pad_token_id,
                eos_token_id=[end for end in ends if end is not None],
            )  # fmt: skip
        texts.append(
            tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        )
    return texts


def test_a_part_of_the_rows_and_no_answers(
    tiny_model: Path, rows_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A part is the sum of its rows: four of nine, and the table is for people."""
    flags = ("--model", tiny_model, "--data", rows_file, "--cache-dir", tmp_path)
    result = evaluate(capsys, *flags, "--max-samples", 4, "--generate", 0)
    assert {name: score["samples"] for name, score in result["models"][0]["levels"].items()} == {
        "explain": 2, "reasoning": 1, "topology": 1,
    }  # fmt: skip
    assert result["models"][0]["overall"]["answered"] == 0 and result["data"]["questions"] == 0
    assert (
        finetune(
            [
                "eval",
                *map(str, flags),
                "--generate",
                "2",
                "--max-new-tokens",
                "2",
                "--device-type",
                "cpu",
            ]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert out.startswith("| difficulty | model | samples |") and "were cut off" in err
    instruction = json.loads(rows_file.read_text(encoding="utf-8").splitlines()[0])["instruction"]
    assert instruction not in out + err


# ---------------------------------------------------------------- refused


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert finetune(["eval", "--device-type", "cpu", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert not out and "Traceback" not in err and "fix:" in err
    return err


def test_bad_input_is_refused_with_words(
    tiny_model: Path,
    run_folder: Path,
    rows_file: Path,
    write_rows: Callable,
    tmp_path: Path,
    capsys,
):
    ok = ("--model", tiny_model, "--data", rows_file, "--cache-dir", tmp_path / "cache")
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "thesis.tex").touch()
    assert "nothing is overwritten" in refused(capsys, *ok, "--output", taken)
    assert "no base to compare with" in refused(capsys, *ok, "--base")
    assert "no such file" in refused(
        capsys, "--model", tiny_model, "--data", tmp_path / "none.jsonl"
    )
    assert "no adapter is there" in refused(capsys, *ok, "--adapter", tmp_path)
    rows = make_records(60)
    for number, row in enumerate(rows):
        row["difficulty"] = str(number)
    many = write_rows(tmp_path / "many.jsonl", rows)
    assert "at most 50 can be difficulties" in refused(
        capsys, "--model", tiny_model, "--data", many
    )
    wrong = write_rows(
        tmp_path / "wrong.jsonl", [*make_records(1), {**make_records(1)[0], "answer": ["1"]}]
    )
    said = refused(
        capsys, "--model", tiny_model, "--data", wrong, "--cache-dir", tmp_path / "cache"
    )
    assert "'answer' is list" in said and "wrong.jsonl:2" in said
    assert [path.name for path in taken.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data", "x.jsonl", "--generate", "some"], "generate is 'some'"),
        (["--data", "x.jsonl", "--max-samples", "0"], "max_samples is 0"),
        (["--data", "x.jsonl", "--max-new-tokens", "x"], "max_new_tokens is 'x'"),
        ([], "nothing to evaluate on"),
    ],
)
def test_bad_flags_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert message in refused(capsys, "--model", "m", *flags)


def test_data_and_adapters_are_collected():
    words = [
        "--data",
        "a",
        "b",
        "--adapter",
        "x",
        "--data=c",
        "--adapter",
        "y",
        "z",
        "--generate",
        "7",
        "--output",
        "o",
    ]
    options = read_options(EvalOptions, words)
    assert (options.data, options.adapter) == (("a", "b", "c"), ("x", "y", "z"))
    assert options.generate == 7 and options.output == Path("o")


def test_a_wrong_answer_field_is_said(
    tiny_model: Path, write_rows: Callable, tmp_path: Path, capsys
):
    rows = [{**row, "output": "Answer: 1", "answer": "2"} for row in make_records(2)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    flags = [
        "--generate",
        "1",
        "--max-new-tokens",
        "1",
        "--device-type",
        "cpu",
        "--cache-dir",
        str(tmp_path),
    ]
    assert finetune(["eval", "--model", str(tiny_model), "--data", str(data), *flags]) == 0
    assert (
        "1 records have another 'answer' than their own output gives, first record 0"
        in capsys.readouterr().err
    )
