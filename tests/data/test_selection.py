"""Splits by hash and duplicates: against plain loops, and what must never change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_models import family
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_rows import write_rows as write

from finetune.commands.curriculum.command import read_difficulties
from finetune.config.fields import DataSource
from finetune.config.run_config import RunConfig
from finetune.data import parts
from finetune.data import samples as sample_arrays
from finetune.data.dataset import Samples, prepare_samples
from finetune.data.encoding.render import Renderer
from finetune.data.passes import PartJob, Wanted
from finetune.data.records import RecordReader
from finetune.data.report import RecordProblem
from finetune.data.selection import KEYS, Selection, content_hash, selection_of
from finetune.errors import DataError, FinetuneError
from finetune.training.prepare import prepare_fine_tuning

LEVELS = ("explain", "reasoning", "topology")


def rows_of(numbers: Any) -> list[dict[str, Any]]:
    return [
        {"prompt": f"question {n}", "completion": f"answer {n}", "chat": n // 4, "id": str(n)}
        for n in numbers
    ]


def prepared(path: Path, selection: Selection | None, workers: int = 1, **options: Any) -> Samples:
    options = {"cutoff_len": 64, "cache_dir": path.parent / "cache"} | options
    return prepare_samples(
        [path], family("gemma"), num_proc=workers, selection=selection, **options
    )


def sides(path: Path, workers: int = 1, **what: Any) -> tuple[list[int], list[int], Samples]:
    train, valid = (prepared(path, Selection(side, **what), workers) for side in ("train", "valid"))
    return train.record_ids.tolist(), valid.record_ids.tolist(), train


def hash_of(row: dict[str, Any]) -> int:
    ((_, _, found),) = RecordReader().conversations([(1, row)])
    return content_hash(found)


def test_the_hash_of_a_record_stays_what_it_is() -> None:
    """A row that changes sides between versions would be trained on and then validated."""
    row = {
        "messages": [{"role": "user", "content": "什么?"}, {"role": "assistant", "content": "a"}],
        "id": 1,
    }
    assert hash_of(row) == 3408316769697031731
    assert hash_of({"text": "a"}) == 17132129837837000639
    assert hash_of(row) == hash_of(
        {"prompt": "什么?", "completion": "a", "difficulty": "explain"}
    ), "what it says counts"
    assert hash_of(row) != hash_of({"prompt": "什么?", "completion": "a "})


@pytest.mark.parametrize("workers", [1, 2])
def test_a_share_is_those_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 300)
    monkeypatch.setattr(sample_arrays, "SHARD_TOKENS", 100)
    rows = rows_of(range(60))
    expected = [number for number, row in enumerate(rows) if hash_of(row) / 2**64 < 0.2]
    train, valid, samples = sides(write(tmp_path / "a.jsonl", rows), workers, valid_split=0.2)
    assert valid == expected and sorted(train + valid) == list(range(60)) and 2 < len(valid) < 30
    assert samples.report.records_kept == len(train) and samples.report.other_side == len(valid)
    assert ("on the other side of the split", str(len(valid))) in samples.report.lines()
    more = [*rows_of(range(100, 140)), *rows]
    _, later, _ = sides(write(tmp_path / "b.jsonl", more), workers, valid_split=0.2)
    assert [number - 40 for number in later if number >= 40] == valid, (
        "rows that were added move none"
    )


def test_a_number_is_the_smallest_hashes(tmp_path: Path) -> None:
    rows = rows_of(range(40))
    train, valid, _ = sides(write(tmp_path / "a.jsonl", rows), valid_split=7)
    smallest = sorted(range(40), key=lambda number: hash_of(rows[number]))[:7]
    assert valid == sorted(smallest) and sorted(train + valid) == list(range(40))


def test_groups_and_equal_rows_stay_together(tmp_path: Path) -> None:
    rows = rows_of(range(80))
    train, valid, _ = sides(write(tmp_path / "a.jsonl", rows), valid_split=0.3, split_by="chat")
    assert {rows[n]["chat"] for n in train}.isdisjoint(rows[n]["chat"] for n in valid) and valid
    equal = [{**row, "id": f"again {row['id']}"} for row in rows]
    train, valid, _ = sides(write(tmp_path / "b.jsonl", [*rows, *equal]), valid_split=9)
    assert len(valid) == 10 and {n % 80 for n in valid}.isdisjoint(n % 80 for n in train)


def test_a_group_may_be_a_mapped_column_and_must_be_there(tmp_path: Path) -> None:
    rows = [{"q": f"question {n % 5}", "response": f"answer {n}"} for n in range(20)]
    source = DataSource(path=str(write(tmp_path / "a.jsonl", rows)), columns={"prompt": "q"})
    options = {"cutoff_len": 64, "cache_dir": tmp_path / "cache", "num_proc": 1}
    valid = prepare_samples(
        [source], family("gemma"), selection=Selection("valid", 0.4, "q"), **options
    ).record_ids.tolist()
    assert valid and len({n % 5 for n in valid}) * 4 == len(valid)
    path = write(tmp_path / "b.jsonl", [*rows_of(range(9)), {"prompt": "q", "completion": "a"}])
    with pytest.raises(DataError, match=rf"{path}:10: no group: no 'chat', which --split-by names"):
        prepared(path, Selection("train", 0.4, "chat"))


def test_a_group_is_one_whatever_kind_of_file_its_number_is_from() -> None:
    def group(value: Any) -> int:
        ((_, record, found),) = RecordReader().conversations(
            [(1, {**rows_of([1])[0], "chat": value})]
        )
        assert not isinstance(found, RecordProblem)
        return Selection("train", 0.5, "chat").key(0, record, found, RecordReader())[2]

    assert group(1) == group(1.0) == group("1") and group(1.5) == group("1.5")
    assert len({group(1), group(2), group("01"), group(1.5), group(True)}) == 5
    assert group(2**60) == group(str(2**60)), "no digit is lost"
    for missing in (None, "", float("nan")):
        with pytest.raises(RecordProblem, match="no group"):
            group(missing)


def test_a_hidden_key_is_not_another(tmp_path: Path) -> None:
    reader = RecordReader(source=DataSource(path="a", columns={"system": "persona", "prompt": "q"}))
    ((_, record, _),) = reader.conversations(
        [(1, {"system": "s", "persona": "p", "q": "q", "completion": "a"})]
    )
    assert (
        reader.value_of(record, "persona") == "p" and reader.value_of(record, "completion") == "a"
    )
    assert reader.value_of(record, "system") is None


@pytest.mark.parametrize("side", ["train", "valid"])
def test_the_form_is_of_the_file_and_not_of_the_side(tmp_path: Path, side: Any) -> None:
    rows = [{"instruction": f"question {n}", "output": f"answer {n}"} for n in range(24)]
    for row in rows[1:6]:
        # of no use: the file is of instructions
        row["messages"] = [{"role": "user", "content": "other"}]
    path = write(tmp_path / "a.jsonl", rows)
    report = prepared(path, Selection(side, 0.5)).report
    assert (
        report.records_kept + report.other_side == report.records_read == 24
        and 0 < report.other_side < 24
    )


def test_a_chosen_record_that_went_bad_is_not_left_out_silently(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [*rows_of(range(2)), {"prompt": "question"}])
    job = PartJob(Renderer(family("gemma"), 64), (RecordReader(),), (), Selection("train", 0.5))
    (part,) = parts.parts_of([path], [RecordReader()])
    with pytest.raises(DataError, match="record 3 .* was good when it was checked"):
        job((part, Wanted(0, 0, np.ones(3, dtype=bool))))


@pytest.mark.parametrize(
    ("split", "side"), [(1e-9, "validation"), (6, "training"), (0.9999999, "training")]
)
def test_a_split_that_leaves_nothing_is_refused(tmp_path: Path, split: float, side: str) -> None:
    path = write(tmp_path / "a.jsonl", rows_of(range(6)))
    with pytest.raises(DataError, match=f"leaves no record for {side} of 6") as caught:
        prepared(path, Selection("train", split))
    assert caught.value.where == f"{path}:1"
    assert not [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]


def test_duplicates_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = rows_of([0, 1, 0, 2, 1, 0, 3])
    rows[2] = {
        "messages": [
            {"role": "user", "content": "question 0"},
            {"role": "assistant", "content": "answer 0"},
        ]
    }
    path = write(tmp_path / "a.jsonl", rows[:2] + rows[3:])
    other = write(tmp_path / "b.jsonl", rows[2:3])
    options = {"cutoff_len": 64, "cache_dir": tmp_path / "cache", "num_proc": 1}
    samples = prepare_samples(
        [path, other], family("gemma"), selection=Selection(drop_duplicates=True), **options
    )
    assert samples.record_ids.tolist() == [0, 1, 2, 5] and samples.report.duplicates == 3
    assert ("duplicates dropped", "3") in samples.report.lines()
    once = prepared(write(tmp_path / "c.jsonl", rows_of([0, 1, 2, 3])), None)
    assert [samples[index][0].tolist() for index in range(4)] == [
        once[index][0].tolist() for index in range(4)
    ]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 4), st.booleans()), min_size=1, max_size=30
    ),
    st.one_of(st.none(), st.floats(0.05, 0.95), st.integers(1, 6)),
    st.booleans(),
)
def test_selection_against_a_plain_loop(
    entries: list[tuple[int, int, bool]], split: float | None, duplicates: bool
) -> None:
    scale = 2**64 // 5
    keys = np.array(
        [(2 * n, c, g * scale, known) for n, (c, g, known) in enumerate(entries)], dtype=KEYS
    )
    rows = [
        (2 * n, c, g * scale)
        for n, (c, g, known) in enumerate(entries)
        if known or not any(e[2] for e in entries)
    ]
    if duplicates:
        rows = [
            row
            for place, row in enumerate(rows)
            if row[1] not in [before[1] for before in rows[:place]]
        ]
    if split is None:
        valid = set()
    elif split < 1:
        valid = {number for number, _, group in rows if group / 2**64 < split}
    else:
        limit = sorted(group for *_, group in rows)[min(int(split), len(rows)) - 1]
        valid = {number for number, _, group in rows if group <= limit}
    train = {number for number, *_ in rows} - valid
    chosen = {"train": train, "valid": valid}
    for side in ("train", "valid") if split is not None else ("train",):
        selection = Selection(side, split, None, duplicates)
        if split is not None and not (train and valid):
            with pytest.raises(DataError, match="leaves no record"):
                selection.choose(keys, 60, "data")
        else:
            assert (
                set(np.flatnonzero(selection.choose(keys, 60, "data").mask).tolist())
                == chosen[side]
            )


def test_a_killed_preparation_goes_on_with_the_same_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 300)
    monkeypatch.setattr(sample_arrays, "SHARD_TOKENS", 60)
    path = write(tmp_path / "a.jsonl", rows_of([*range(30), *range(10)]))
    selection = Selection("train", 0.3, None, True)
    expected = prepared(path, selection)
    finish = sample_arrays.SampleWriter.finish
    calls = []

    def killed(writer: Any, *arguments: Any) -> None:
        finish(writer, *arguments)
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(sample_arrays.SampleWriter, "finish", killed)
    with pytest.raises(KeyboardInterrupt):
        prepared(path, selection, cache_dir=tmp_path / "other")
    assert any((tmp_path / "other").glob(".making-*/*/state-*.json"))
    again = prepared(path, selection, cache_dir=tmp_path / "other")
    assert again.fingerprint == expected.fingerprint and again.report == expected.report


def test_the_schedule_is_of_the_training_side(tmp_path: Path) -> None:
    rows = [
        row | {"difficulty": LEVELS[number % 3]}
        for number, row in enumerate(rows_of([*range(40), *range(9)]))
    ]
    path = write(tmp_path / "a.jsonl", rows)
    config = RunConfig(
        model="m", data=str(path), output_dir="o", valid_split=0.25, drop_duplicates=True
    )
    samples = prepared(path, selection_of(config), difficulties=LEVELS)
    difficulties, record_ids, _, _ = read_difficulties(config)
    assert (
        record_ids.tolist() == samples.record_ids.tolist()
        and difficulties.tolist() == samples.difficulties.tolist()
    )
    assert len(record_ids) < 40
    with_media = [{**rows[0], "image": "a.png"}, {**rows[0], "completion": ""}, *rows]
    write(path, with_media)
    (dropped,) = read_difficulties(
        config.model_copy(update={"on_media": "drop-row", "on_bad_row": "drop"})
    )[3]
    left = 40 - len(record_ids)
    assert dropped.startswith(f"{11 + left} of 51 records are dropped: ")
    for said in (
        "1 empty answer",
        "1 with images",
        "9 duplicates",
        f"{left} on the other side of the split",
    ):
        assert said in dropped


def test_the_schedule_refuses_columns_as_training_does(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rows_of(range(3)))
    config = RunConfig(model="m", data=str(path), output_dir="o", columns={"system": "persona"})
    with pytest.raises(
        DataError, match="no record has 'persona', which --columns reads as 'system'"
    ):
        read_difficulties(config)


def test_difficulties_of_entries_are_not_read_without_a_curriculum(tmp_path: Path) -> None:
    data = {"path": str(write(tmp_path / "a.jsonl", rows_of(range(4)))), "difficulty": "hard"}
    config = RunConfig(model="m", data=[data], output_dir="o", use_curriculum=False)
    difficulties, record_ids, _, dropped = read_difficulties(config)
    assert difficulties.tolist() == [-1] * 4 and record_ids.tolist() == [0, 1, 2, 3] and not dropped


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"valid_split": 0.1, "valid_data": "v"}, "valid_split and valid_data are both given"),
        ({"split_by": "chat"}, "split_by is given, and nothing is split"),
        (
            {"valid_split": 3, "split_by": "system", "columns": {"system": "persona"}},
            "split_by is system, a name that columns gives to 'persona'",
        ),
        ({"valid_split": 0}, "valid_split"),
        ({"valid_split": 1.5}, "valid_split"),
    ],
)
def test_what_does_not_agree_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises((FinetuneError, ValueError), match=said):
        RunConfig(model="m", data="d", output_dir="o", **given)


def test_a_run_trains_on_one_side_and_validates_on_the_other(tmp_path: Path) -> None:
    rows = rows_of([*range(30), *range(5)])
    settings = {
        "model": str(Path(__file__).resolve().parents[2] / "data_samples" / "tiny-qwen3"),
        "data": str(write(tmp_path / "a.jsonl", rows)), "output_dir": str(tmp_path / "run"), "cutoff_len": 128,
        "cache_dir": str(tmp_path / "cache"), "preprocessing_num_workers": 1, "use_curriculum": False,
    }  # fmt: skip
    plain = prepare_fine_tuning(RunConfig(**settings))
    split = prepare_fine_tuning(RunConfig(**settings, valid_split=6))
    once = prepare_fine_tuning(RunConfig(**settings, drop_duplicates=True))
    assert plain.valid is None and split.valid is not None and once.valid is None
    assert (
        sorted([*split.train.record_ids, *split.valid.record_ids]) == list(range(35))
        and len(split.valid) >= 6
    )
    assert len(plain.train) == 35 and len(once.train) == 30
    assert len({prepared.identity["data"] for prepared in (plain, split, once)}) == 3, (
        "a resumed run notices"
    )
