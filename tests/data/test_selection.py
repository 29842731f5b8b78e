"""Splits by hash and duplicates: against plain loops, and what must never change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chat_models import family
from launching import ROOT
from sample_rows import write_rows as write

from finetune.commands.curriculum.command import read_difficulties
from finetune.config.fields import DataSource
from finetune.config.run_config import RunConfig
from finetune.data import parts
from finetune.data import samples as sample_arrays
from finetune.data.encoding.render import Renderer
from finetune.data.passes import PartJob, Wanted
from finetune.data.records import RecordReader
from finetune.data.report import RecordProblem
from finetune.data.samples import Samples
from finetune.data.selection import KEYS, Selection, content_hash, selection_of
from finetune.errors import DataError, FinetuneError
from finetune.training.prepare import prepare_fine_tuning

LEVELS = ("explain", "reasoning", "topology")


def rows_of(numbers: Any) -> list[dict[str, Any]]:
    return [
        {"prompt": f"question {n}", "completion": f"answer {n}", "chat": n // 4, "id": str(n)}
        for n in numbers
    ]


def ids(samples: Samples) -> list[int]:
    return samples.record_ids.tolist()


def hash_of(row: dict[str, Any]) -> int:
    ((_, _, found),) = RecordReader().conversations([(1, row)])
    return content_hash(found)


def test_the_hash_of_a_record_stays_what_it_is():
    """A row that changes sides between versions would be trained on and then validated."""
    turns = [{"role": "user", "content": "什么?"}, {"role": "assistant", "content": "a"}]
    row = {"messages": turns, "id": 1}
    assert hash_of(row) == 3408316769697031731
    assert hash_of({"text": "a"}) == 17132129837837000639
    same = {"prompt": "什么?", "completion": "a", "difficulty": "explain"}
    assert hash_of(row) == hash_of(same), "what it says counts"
    assert hash_of(row) != hash_of({**same, "completion": "a "})
    assert len({hash_of({**row, "tools": [{"name": name}]}) for name in "fg"} | {hash_of(row)}) == 3


@pytest.mark.parametrize("workers", [1, 2])
def test_a_share_is_those_below_it(tmp_path, prepare, monkeypatch, workers: int):
    monkeypatch.setattr(parts, "PART_BYTES", 300)
    monkeypatch.setattr(sample_arrays, "SHARD_TOKENS", 100)
    rows = rows_of(range(60))
    path = write(tmp_path / "a.jsonl", rows)
    train, valid = (
        prepare(path, num_proc=workers, selection=Selection(side, 0.2))
        for side in ("train", "valid")
    )
    assert ids(valid) == [n for n, row in enumerate(rows) if hash_of(row) / 2**64 < 0.2]
    assert sorted(ids(train) + ids(valid)) == list(range(60)) and 2 < len(valid) < 30
    assert train.report.records_kept == len(train) and train.report.other_side == len(valid)
    assert ("on the other side of the split", str(len(valid))) in train.report.lines()
    write(path, [*rows_of(range(100, 140)), *rows])
    later = ids(prepare(path, selection=Selection("valid", 0.2)))
    assert [n - 40 for n in later if n >= 40] == ids(valid), "rows that were added move none"


def test_groups_and_equal_rows_stay_together(tmp_path, prepare):
    rows = rows_of(range(80))
    path = write(tmp_path / "a.jsonl", rows)
    train, valid = (
        {rows[n]["chat"] for n in ids(prepare(path, selection=Selection(side, 0.3, "chat")))}
        for side in ("train", "valid")
    )
    assert train.isdisjoint(valid) and train | valid == set(range(20))
    write(path, [*rows, *({**row, "id": f"again {row['id']}"} for row in rows)])
    valid = ids(prepare(path, selection=Selection("valid", 9)))
    smallest = sorted(range(80), key=lambda n: hash_of(rows[n]))[:5]
    assert sorted(valid) == sorted([*smallest, *(n + 80 for n in smallest)])
    rows = [{"q": f"question {n % 5}", "response": f"answer {n}"} for n in range(20)]
    source = DataSource(path=str(write(tmp_path / "b.jsonl", rows)), columns={"prompt": "q"})
    valid = ids(prepare(source, selection=Selection("valid", 0.4, "q")))
    assert valid and len({n % 5 for n in valid}) * 4 == len(valid), "by a mapped column"


def test_a_group_is_one_whatever_kind_of_file_its_number_is_from():
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
        with pytest.raises(RecordProblem, match="no group: no 'chat', which --split-by names"):
            group(missing)
    reader = RecordReader(source=DataSource(path="a", columns={"system": "persona", "prompt": "q"}))
    row = {"system": "s", "persona": "p", "q": "q", "completion": "a"}
    ((_, record, _),) = reader.conversations([(1, row)])
    found = [reader.value_of(record, name) for name in ("persona", "completion", "system")]
    assert found == ["p", "a", None], "a hidden key is not another"


def test_the_form_is_of_the_file_and_not_of_the_side(tmp_path, prepare):
    rows = [{"instruction": f"question {n}", "output": f"answer {n}"} for n in range(24)]
    for row in rows[1:6]:  # of no use: the file is of instructions
        row["messages"] = [{"role": "user", "content": "other"}]
    path = write(tmp_path / "a.jsonl", rows)
    train, valid = (prepare(path, selection=Selection(side, 0.5)) for side in ("train", "valid"))
    assert len(train) + len(valid) == 24 and len(train) and len(valid)


def test_a_chosen_record_that_went_bad_is_not_left_out_silently(tmp_path):
    path = write(tmp_path / "a.jsonl", [*rows_of(range(2)), {"prompt": "question"}])
    job = PartJob(Renderer(family("gemma"), 64), (RecordReader(),), (), Selection("train", 0.5))
    (part,) = parts.parts_of([path], [RecordReader()])
    with pytest.raises(DataError, match="record 3 .* was good when it was checked"):
        job((part, Wanted(0, 0, np.ones(3, dtype=bool))))


def test_a_split_that_leaves_nothing_is_refused(tmp_path, prepare):
    path = write(tmp_path / "a.jsonl", rows_of(range(6)))
    for split, side in ((1e-9, "validation"), (6, "training"), (0.9999999, "training")):
        with pytest.raises(DataError, match=f"leaves no record for {side} of 6") as caught:
            prepare(path, selection=Selection("train", split))
        assert caught.value.where == f"{path}:1"
    assert not [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]


def test_duplicates_are_dropped_and_counted(tmp_path, prepare):
    rows = rows_of([0, 1, 2, 1, 0, 3])
    turns = [("user", "question 0"), ("assistant", "answer 0")]
    again = {"messages": [{"role": role, "content": content} for role, content in turns]}
    files = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", [again])
    samples = prepare(*files, selection=Selection(drop_duplicates=True))
    assert ids(samples) == [0, 1, 2, 5] and samples.report.duplicates == 3
    assert ("duplicates dropped", "3") in samples.report.lines()


def test_what_is_chosen_of_keys():
    """Records without difficulty count where others have none either; the first of equal ones is
    taken before the split; equal hashes are on one side.
    """
    group = 2**64 // 5
    keys = [(0, 7, 0, True), (2, 8, 1, False), (4, 9, 2, True), (6, 7, 3, True), (8, 6, 2, True)]
    keys = np.array([(n, content, side * group, known) for n, content, side, known in keys], KEYS)
    for split, duplicates, train, valid in (
        (None, False, [0, 4, 6, 8], None),
        (None, True, [0, 4, 8], None),
        (0.3, False, [4, 6, 8], [0]),
        (0.5, True, [], [0, 4, 8]),
        (1, True, [4, 8], [0]),
        (2, False, [6], [0, 4, 8]),
    ):
        for side, expected in (("train", train), ("valid", valid)):
            selection = Selection(side, split, None, duplicates)
            if not train:
                with pytest.raises(DataError, match="leaves no record for training of 3"):
                    selection.choose(keys, 9, "data")
            elif expected is not None:
                assert np.flatnonzero(selection.choose(keys, 9, "data").mask).tolist() == expected
    keys["labelled"] = False
    assert (
        selection_of(RunConfig(model="m", data="d", output_dir="o")).choose(keys, 9, "d").mask.sum()
        == 5
    )


def test_the_schedule_is_of_the_training_side(tmp_path, prepare):
    numbered = enumerate(rows_of([*range(40), *range(9)]))
    rows = [row | {"difficulty": LEVELS[number % 3]} for number, row in numbered]
    path = write(tmp_path / "a.jsonl", rows)
    run = {"model": "m", "data": str(path), "output_dir": "o"}
    config = RunConfig(**run, valid_split=0.25, drop_duplicates=True)
    samples = prepare(path, selection=selection_of(config), difficulties=LEVELS)
    difficulties, record_ids, _, _ = read_difficulties(config)
    assert record_ids.tolist() == ids(samples) and len(record_ids) < 40
    assert difficulties.tolist() == samples.difficulties.tolist()
    write(path, [{**rows[0], "image": "a.png"}, {**rows[0], "completion": ""}, *rows])
    dropping = config.model_copy(update={"on_media": "drop-row", "on_bad_row": "drop"})
    (dropped,) = read_difficulties(dropping)[3]
    left = 40 - len(record_ids)
    assert dropped.startswith(f"{11 + left} of 51 records are dropped: ")
    reasons = ["1 empty answer", "1 with images", "9 duplicates", f"{left} on the other side"]
    assert all(reason in dropped for reason in reasons)
    with pytest.raises(DataError, match="'persona', which --columns reads as 'system'"):
        read_difficulties(RunConfig(**run, columns={"system": "persona"}))
    hard = {"path": str(write(tmp_path / "b.jsonl", rows_of(range(4)))), "difficulty": "hard"}
    plain = RunConfig(**run | {"data": [hard]}, use_curriculum=False)
    difficulties, record_ids, _, dropped = read_difficulties(plain)
    assert difficulties.tolist() == [-1] * 4 and record_ids.tolist() == [0, 1, 2, 3] and not dropped


def test_what_does_not_agree_is_refused():
    hidden = {"valid_split": 3, "split_by": "system", "columns": {"system": "persona"}}
    for options, said in (
        ({"valid_split": 0.1, "valid_data": "v"}, "valid_split and valid_data are both given"),
        ({"split_by": "chat"}, "split_by is given, and nothing is split"),
        (hidden, "split_by is system, a name that columns gives to 'persona'"),
        ({"valid_split": 0}, "valid_split"),
        ({"valid_split": 1.5}, "valid_split"),
    ):
        with pytest.raises((FinetuneError, ValueError), match=said):
            RunConfig(model="m", data="d", output_dir="o", **options)


def test_a_run_trains_on_one_side_and_validates_on_the_other(tmp_path):
    path = write(tmp_path / "a.jsonl", rows_of([*range(30), *range(5)]))
    settings = {"model": str(ROOT / "data_samples" / "tiny-qwen3"), "data": str(path)}
    settings |= {"output_dir": str(tmp_path / "run"), "cache_dir": str(tmp_path / "cache")}
    settings |= {"cutoff_len": 128, "preprocessing_num_workers": 1, "use_curriculum": False}
    plain = prepare_fine_tuning(RunConfig(**settings))
    split = prepare_fine_tuning(RunConfig(**settings, valid_split=6))
    once = prepare_fine_tuning(RunConfig(**settings, drop_duplicates=True))
    assert plain.valid is None and split.valid is not None and once.valid is None
    assert sorted([*split.train.record_ids, *split.valid.record_ids]) == list(range(35))
    assert (len(plain.train), len(once.train)) == (35, 30) and len(split.valid) >= 6
    identities = {prepared.identity["data"] for prepared in (plain, split, once)}
    assert len(identities) == 3, "a resumed run notices"
