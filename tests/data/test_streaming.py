"""Preparation in parts, processes and shards against one plain loop; after a kill."""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import re
import shutil
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet
import pytest
from chat_models import family
from sample_rows import write_rows as write

from finetune.batching.curriculum import choose_schedule
from finetune.batching.sampler import GlobalBatches
from finetune.data import cache, parts, report
from finetune.data import samples as sample_arrays
from finetune.data.dataset import Samples, prepare_samples
from finetune.data.encoding.render import Renderer
from finetune.data.formats import detect_format, to_conversation
from finetune.data.reading.files import read_records
from finetune.data.records import RecordReader
from finetune.data.report import RecordProblem
from finetune.errors import DataError
from finetune.storage import durable_files

CUTOFF = 40
LEVELS = ("explain", "reasoning", "topology")


def rows_of(count: int, labelled: bool = True) -> list[dict[str, Any]]:
    return [
        {"instruction": f"{n} What is a router?", "output": "because " * (n % 7) + f"answer {n}"}
        | ({"difficulty": LEVELS[n % 3]} if labelled else {})
        for n in range(count)
    ]


def prepare(paths: Path | list[Path], cache_dir: Path, workers: int = 1, **options: Any) -> Samples:
    options = {"cutoff_len": CUTOFF, "difficulties": LEVELS} | options
    tokenizer = options.pop("tokenizer", family("chatml"))
    paths = paths if isinstance(paths, list) else [paths]
    return prepare_samples(paths, tokenizer, cache_dir=cache_dir, num_proc=workers, **options)


def contents_of(samples: Samples) -> dict[str, Any]:
    """All that is known of each sample, the report and the order of its reasons."""
    found = []
    for index in range(len(samples)):
        ids, mask = samples[index]
        level = int(samples.difficulties[index])
        place = int(samples.record_ids[index]), samples.location(index)
        found.append((ids.tolist(), mask.tolist(), *place, None if level < 0 else LEVELS[level]))
    facts = asdict(samples.report)
    reasons = list(facts["dropped"])
    return {"samples": found, "report": facts, "reasons": reasons, "print": samples.fingerprint}


def make_tiny(patch: pytest.MonkeyPatch) -> None:
    """Parts of a line or two, shards of a sample or two; in forked processes too."""
    patch.setattr(parts, "PART_BYTES", 90)
    patch.setattr(parts, "PART_RECORDS", 2)
    patch.setattr(sample_arrays, "SHARD_TOKENS", 60)


@pytest.fixture
def tiny_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny(monkeypatch)


# The reference --------------------------------------------------------------------------------------------------------


def plain_samples(files: list[Path]) -> list[Any]:
    """The samples by one loop over all records after another, without the bad ones."""
    renderer = Renderer(family("gemma"), CUTOFF)
    found, number, labelled = [], -1, False
    for path in files:
        form = None
        for line, record in read_records(path):
            number += 1
            try:
                if isinstance(record, RecordProblem):
                    raise record
                if form is None or not isinstance(record, dict):
                    form = detect_format(record)
                conversation = to_conversation(record, form, LEVELS)
                labelled |= conversation.difficulty is not None
                rendered = renderer(conversation)
            except RecordProblem:
                continue
            place = number, f"{path}:{line}", conversation.difficulty
            found += [
                (sample.input_ids.tolist(), sample.supervised.tolist(), *place)
                for sample in rendered
                if sample.supervised.any()
            ]
    return [sample for sample in found if sample[-1] is not None or not labelled]


def streamed(files: list[Path], drop: bool, cache_dir: Path, workers: int = 1) -> dict[str, Any]:
    on_bad_row = "drop" if drop else "refuse"
    samples = prepare(files, cache_dir, workers, tokenizer=family("gemma"), on_bad_row=on_bad_row)
    found = [samples[index] for index in range(len(samples))]
    assert samples.lengths.tolist() == [len(ids) for ids, _ in found]
    assert samples.supervised_counts.tolist() == [mask.sum() for _, mask in found]
    order = np.argsort(samples.difficulties, kind="stable")
    assert samples.by_difficulty.tolist() == order.tolist()
    assert samples.highest_id == max(int(ids.max()) for ids, _ in found)
    for limit in (0, samples.highest_id):
        first = next(n for n, (ids, _) in enumerate(found) if (ids >= limit).any())
        highest = int(found[first][0][found[first][0] >= limit][0])
        assert samples.first_above(limit) == (highest, samples.location(first))
    facts = samples.report
    assert facts.samples == len(found) and facts.longest_tokens == samples.lengths.max()
    assert facts.tokens == samples.lengths.sum()
    assert facts.records_kept + sum(facts.dropped.values()) == facts.records_read
    return contents_of(samples)


def result_of(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except DataError as error:
        return str(error)


GOOD = {"instruction": "q", "output": "a"}
EASY, HARD = ({**GOOD, "difficulty": level} for level in ("explain", "topology"))
TALK = [{"role": role, "content": "q"} for role in ("user", "model")]
MIXED = [
    EASY,
    {**HARD, "output": "because " * 30},
    {**HARD, "instruction": "什么是交换机？\n"},
    {**EASY, "output": "<start_of_turn> a </think>"},  # has the highest id
    {**EASY, "system": "the template has no place for this"},
    {"instruction": "q"},
    {**GOOD, "difficulty": "expain"},
    GOOD,
    3,
    {"messages": TALK * 3, "difficulty": "explain"},
]
LINES = [json.dumps(record).encode() for record in MIXED]
LINES[2:2] = [b"", b"{broken", b'{"instruction": "\xff"}', b"  ", b"null"]


def parquet_of(rows: list[dict[str, Any]]) -> bytes:
    sink = pa.BufferOutputStream()
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), sink, row_group_size=3)
    return sink.getvalue().to_pybytes()


CASES = [
    {
        "a.jsonl": b"\xef\xbb\xbf" + b"\r\n".join(LINES),
        "b.json": json.dumps(MIXED, indent=1).encode(),
        "c.parquet": parquet_of([EASY, HARD] * 4),
    },
    {"a.jsonl": b"\n".join([b"{}", LINES[-1], *LINES, b""])},  # another form first
    {"a.jsonl": b'{"instruction": "q"}\n'},
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_parts_and_processes_change_nothing(case: int, tmp_path, monkeypatch):
    for name, raw in CASES[case].items():
        (tmp_path / name).write_bytes(raw)
    files = sorted(tmp_path.iterdir())
    expected = {}
    for drop in (True, False):
        expected[drop] = result_of(streamed, files, drop, tmp_path / f"whole-{drop}")
        if isinstance(expected[drop], dict):
            assert expected[drop]["samples"] == plain_samples(files)
    make_tiny(monkeypatch)
    for drop, workers in ((True, 1), (True, 3), (False, 3)):
        cache_dir = tmp_path / f"cache-{drop}-{workers}"
        assert result_of(streamed, files, drop, cache_dir, workers) == expected[drop]
    left = [path for path in tmp_path.glob("*/.*") if path.is_dir()]
    assert not left, "neither what was made nor what was refused leaves anything"


def test_parts_have_whole_lines(tiny_parts: None, tmp_path):
    """However long: a line belongs to the part that it starts in."""
    long = {"instruction": "q", "output": "because " * 100}
    path = write(tmp_path / "a.jsonl", [long, "", *rows_of(3, labelled=False), long])
    for part_bytes in (90, 1, path.read_bytes().index(b"\n") + 1):
        parts.PART_BYTES = part_bytes
        found = list(parts.parts_of([path], [RecordReader()]))
        assert [part.start for part in found[1:]] == [part.stop for part in found[:-1]]
        assert found[-1].stop == path.stat().st_size
        read = [part.read() for part in found]
        assert sum(lines for _, lines in read) == 6
        records = [record for records, _ in read for _, record in records]
        assert records == [record for _, record in read_records(path)]


def test_a_fingerprint_is_that_of_before(tiny_parts: None, tmp_path):
    """Before there were parts; a run that is resumed compares them."""
    system = {**rows_of(1)[0], "system": "Be brief."}
    rows = [*rows_of(20), system, "{broken", *rows_of(9, labelled=False)]
    samples = prepare(
        write(tmp_path / "a.jsonl", rows), tmp_path / "cache", cutoff_len=48, on_bad_row="drop"
    )
    expected = "d103c6b5f684ecccebf7a62c7a9546602dbd18cdbd32e32584c6ab33b099a270"
    assert samples.fingerprint == expected


# After a kill ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache that a process left when it was killed with several shards finished. Read only."""
    plain = Renderer.__call__

    def slow(self: Renderer, conversation: Any) -> Any:
        time.sleep(0.01)
        return plain(self, conversation)

    folder = tmp_path_factory.mktemp("killed")
    path, cache_dir = write(folder / "a.jsonl", rows_of(60)), folder / "cache"
    with pytest.MonkeyPatch.context() as patch:
        make_tiny(patch)
        patch.setattr(Renderer, "__call__", slow)
        process = multiprocessing.get_context("fork").Process(
            target=prepare, args=(path, cache_dir, 2)
        )
        process.start()
    while len(list(cache_dir.glob(".making-*/scratch/state-*.json"))) < 4:
        assert process.is_alive()
        time.sleep(0.01)
    workers = psutil.Process(process.pid).children()
    process.kill()
    process.join()
    assert len(workers) == 2
    assert not psutil.wait_procs(workers, timeout=10)[1], "they do not outlive it"
    return cache_dir


@pytest.mark.parametrize("then", ["again", "with a damaged shard", "with other data"])
def test_what_was_finished_before_a_kill_is_not_made_again(
    tiny_parts: None, killed: Path, tmp_path, monkeypatch, then: str
):
    path = write(tmp_path / "a.jsonl", rows_of(60))
    shutil.copytree(killed, tmp_path / "cache")
    (left,) = (tmp_path / "cache").glob(".making-*/")
    states = [json.loads(file.read_bytes()) for file in sorted(left.glob("scratch/state-*.json"))]
    kept = len(states)
    if then == "with a damaged shard":
        damaged = left / "tokens-00002.bin"
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
        kept = 2
    elif then == "with other data":
        write(path, [*rows_of(59), rows_of(61)[60]])
        kept = 0
    rendered = []
    plain = Renderer.__call__
    noted = lambda self, talk: rendered.append(1) or plain(self, talk)  # noqa: E731
    monkeypatch.setattr(Renderer, "__call__", noted)
    samples = prepare(path, tmp_path / "cache")
    assert len(rendered) == 60 - (states[kept - 1]["records"] if kept else 0)
    assert contents_of(samples) == contents_of(prepare(path, tmp_path / "other"))
    assert len(list((tmp_path / "cache").glob(".making-*"))) == (then == "with other data")


def test_data_that_change_meanwhile_are_refused_and_the_pace_is_logged(
    tiny_parts: None, tmp_path, monkeypatch, caplog
):
    path = write(tmp_path / "a.jsonl", rows_of(20))
    plain = Renderer.__call__

    def changing(self: Renderer, conversation: Any) -> Any:
        write(path, rows_of(21))
        return plain(self, conversation)

    with monkeypatch.context() as patch:
        patch.setattr(Renderer, "__call__", changing)
        with pytest.raises(DataError, match="changed while they were read"):
            prepare(path, tmp_path / "cache")
    assert not [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]
    monkeypatch.setattr(report, "LOG_EVERY_SECONDS", 0)
    caplog.set_level(logging.INFO, "finetune")
    prepare(write(path, rows_of(20)), tmp_path / "cache")
    for said in ("checking data: 100%, 20 records, .* 0:00 left\n", "tokenizing data: 50%, 10 .*"):
        assert re.search(said, caplog.text)


# What a start reads and holds ---------------------------------------------------------------------------------------


def test_hashes_are_remembered_as_long_as_a_file_is_as_it_was(tmp_path, monkeypatch):
    path, other = write(tmp_path / "a.jsonl", ["x"]), write(tmp_path / "b.jsonl", ["y"])
    hashed: list[str] = []
    plain = durable_files.hash_file
    noted = lambda file: hashed.append(file.name) or plain(file)  # noqa: E731
    monkeypatch.setattr(durable_files, "hash_file", noted)

    def now_hashed() -> list[str]:
        hashed.clear()
        files = [path, other, path]
        expected = [
            hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.exists()
        ]
        assert cache.source_hashes(files, tmp_path) == expected
        return hashed

    young = ["a.jsonl", "b.jsonl"]  # one more write might look the same
    assert now_hashed() == now_hashed() == young
    monkeypatch.setattr(cache, "YOUNG_SECONDS", 0)
    assert now_hashed() == young and now_hashed() == []
    state = path.stat()
    write(path, ["z"])
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert now_hashed() == ["a.jsonl"], "the same size and time of change, put back"
    for notes in tmp_path.glob("sources.*.json"):
        notes.write_text('{"a": 1')
    assert now_hashed() == young
    path.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        now_hashed()


def private_array_bytes() -> int:
    """Of the arrays that were made since `tracemalloc.start()`; maps of files are none."""
    arrays = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    found = tracemalloc.take_snapshot().filter_traces([arrays])
    return sum(entry.size for entry in found.statistics("filename"))


def test_what_a_process_holds_does_not_grow_with_the_samples(tmp_path):
    stages = [SimpleNamespace(until=1.0, mix=(1, 1, 1), ramp="step")]
    curriculum = SimpleNamespace(levels=LEVELS, stages=stages)
    config = SimpleNamespace(
        use_curriculum=True, difficulty_field="difficulty", curriculum=curriculum
    )
    for count in (100, 300):
        path = write(tmp_path / f"{count}.jsonl", rows_of(count))
        prepare(path, tmp_path / "cache")
        tracemalloc.start()
        samples = prepare(path, tmp_path / "cache")
        schedule, ids, _ = choose_schedule(config, samples.difficulties, samples.record_ids)
        batches = GlobalBatches(ids, schedule, 10, 20, 1, by_difficulty=samples.by_difficulty)
        assert private_array_bytes() < 3000
        tracemalloc.stop()
        assert batches.fingerprint() == GlobalBatches(ids, schedule, 10, 20, 1).fingerprint()
