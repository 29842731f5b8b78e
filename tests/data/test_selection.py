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
from finetune.data.selection import Selection, content_hash, selection_of
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


def test_a_share_is_those_below_it(tmp_path, prepare, monkeypatch):
    monkeypatch.setattr(parts, "PART_BYTES", 300)
    monkeypatch.setattr(sample_arrays, "SHARD_TOKENS", 100)
    rows = rows_of(range(60))
    path = write(tmp_path / "a.jsonl", rows)
    train, valid = (
        prepare(path, num_proc=2, selection=Selection(side, 0.2)) for side in ("train", "valid")
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
    samples = prepare(path, selection=Selection(drop_duplicates=True))
    assert ids(samples) == list(range(80)) and samples.report.duplicates == 80
    assert ("duplicates dropped", "80") in samples.report.lines()
    path = write(tmp_path / "b.jsonl", rows[:6])
    with pytest.raises(DataError, match="leaves no record for validation of 6") as caught:
        prepare(path, selection=Selection("train", 1e-9))
    assert caught.value.where == f"{path}:1"


def test_a_group_is_one_whatever_kind_of_file_its_number_is_from():
    def group(value: Any) -> int:
        ((_, record, found),) = RecordReader().conversations(
            [(1, {**rows_of([1])[0], "chat": value})]
        )
        assert not isinstance(found, RecordProblem)
        return Selection("train", 0.5, "chat").key(0, record, found, RecordReader())[2]

    assert group(1) == group(1.0) == group("1") and group(1.5) == group("1.5")
    assert len({group(1), group(2), group("01"), group(1.5), group(True)}) == 5
    for missing in (None, "", float("nan")):
        with pytest.raises(RecordProblem, match="no group: no 'chat', which --split-by names"):
            group(missing)
    reader = RecordReader(source=DataSource(path="a", columns={"system": "persona", "prompt": "q"}))
    row = {"system": "s", "persona": "p", "q": "q", "completion": "a"}
    ((_, record, _),) = reader.conversations([(1, row)])
    found = [reader.value_of(record, name) for name in ("persona", "completion", "system")]
    assert found == ["p", "a", None], "a hidden key is not another"


def test_a_chosen_record_that_went_bad_is_not_left_out_silently(tmp_path):
    path = write(tmp_path / "a.jsonl", [*rows_of(range(2)), {"prompt": "question"}])
    job = PartJob(Renderer(family("gemma"), 64), (RecordReader(),), (), Selection("train", 0.5))
    (part,) = parts.parts_of([path], [RecordReader()])
    with pytest.raises(DataError, match="record 3 .* was good when it was checked"):
        job((part, Wanted(0, 0, np.ones(3, dtype=bool))))


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


def test_what_does_not_agree_is_refused():
    hidden = {"valid_split": 3, "split_by": "system", "columns": {"system": "persona"}}
    for options, said in (
        ({"valid_split": 0.1, "valid_data": "v"}, "valid_split and valid_data are both given"),
        ({"split_by": "chat"}, "split_by is given, and nothing is split"),
        (hidden, "split_by is system, a name that columns gives to 'persona'"),
        ({"valid_split": 0}, "valid_split"),
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
