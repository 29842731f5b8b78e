"""Preparation in parts, processes and shards against one plain loop; after a kill; and what a start
reads.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import multiprocessing
import os
import signal
import tempfile
import time
from collections import Counter
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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample_rows import write_rows as write

from finetune.batching.curriculum import choose_schedule
from finetune.batching.sampler import GlobalBatches
from finetune.data import cache, parts, report
from finetune.data import samples as sample_arrays
from finetune.data.dataset import Samples, prepare_samples
from finetune.data.encoding.render import Renderer
from finetune.data.formats import detect_format, to_conversation
from finetune.data.passes import NO_ROOM
from finetune.data.reading.files import read_records
from finetune.data.records import RecordReader
from finetune.data.report import DataReport, ProblemLog, RecordProblem
from finetune.errors import DataError
from finetune.storage import durable_files

CUTOFF = 40
LEVELS = ("explain", "reasoning", "topology")


def rows_of(count: int, labelled: bool = True) -> list[dict[str, Any]]:
    return [
        {
            "instruction": f"{number} What is a router?",
            "output": "because " * (number % 7) + f"answer {number}",
        }
        | ({"difficulty": LEVELS[number % 3]} if labelled else {})
        for number in range(count)
    ]


@pytest.fixture
def tiny_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a line or two, shards of a sample or two; the processes that are forked have them
    too.
    """
    monkeypatch.setattr(parts, "PART_BYTES", 90)
    monkeypatch.setattr(parts, "PART_RECORDS", 2)
    monkeypatch.setattr(sample_arrays, "SHARD_TOKENS", 60)


# The reference --------------------------------------------------------------------------------------------------------


def reference(files: list[Path], drop: bool) -> dict[str, Any]:
    """What preparation must give, by one loop over all records after another, all in memory."""
    renderer = Renderer(family("gemma"), CUTOFF)
    report, problems, unlabelled = DataReport(), ProblemLog(), ProblemLog()
    read = []
    for file, path in enumerate(files):
        form = None
        for line, record in read_records(path):
            report.records_read += 1
            place = ((file, line), f"{path}:{line}")
            try:
                if isinstance(record, RecordProblem):
                    raise record
                if form is None or not isinstance(record, dict):
                    form = detect_format(record)
                conversation = to_conversation(record, form, LEVELS, "difficulty")
            except RecordProblem as problem:
                problems.add(*place, problem)
                continue
            report.control_token_records += renderer.has_control_tokens(conversation)
            if conversation.difficulty is None:
                detail = "other records have a 'difficulty', this one has none"
                unlabelled.add(*place, RecordProblem("no difficulty", detail))
            report.difficulty_field_found |= conversation.difficulty is not None
            read.append((report.records_read - 1, place, conversation))
    if report.difficulty_field_found:
        problems.merge(unlabelled)
        read = [entry for entry in read if entry[2].difficulty is not None]
    if not report.records_read:
        raise DataError(
            "the data files hold no record",
            ", ".join(map(str, files)),
            "give --data files with records",
        )
    if not drop:
        problems.refuse(report.records_read)
    refused, samples, roomless = ProblemLog(), [], 0
    for row, place, conversation in read:
        try:
            rendered = renderer(conversation)
        except RecordProblem as problem:
            refused.add(*place, problem)
            continue
        kept = [sample for sample in rendered if sample.supervised.any()]
        roomless += not kept
        samples += [(row, place, conversation.difficulty, sample) for sample in kept]
    if not drop:
        refused.refuse(report.records_read)
    dropped = Counter(problems.counts) + refused.counts
    dropped[NO_ROOM] += roomless
    report.dropped = {reason: count for reason, count in dropped.items() if count}
    if not samples:
        reasons = ", ".join(f"{count} {reason}" for reason, count in report.dropped.items())
        fix = (
            "see the reasons; --on-bad-row refuse names the records, and a larger --cutoff-len"
            " gives answers room"
        )
        raise DataError(
            f"no record is left to train on ({reasons})", ", ".join(map(str, files)), fix
        )
    return {
        "samples": _as_lists(samples),
        "fingerprint": _fingerprint(samples),
        "report": _reported(report, samples),
    }


def _as_lists(samples: list[Any]) -> list[Any]:
    return [
        (sample.input_ids.tolist(), sample.supervised.tolist(), row, location, difficulty)
        for row, (_, location), difficulty, sample in samples
    ]


def _reported(report: DataReport, samples: list[Any]) -> dict[str, Any]:
    rendered = [sample for *_, sample in samples]
    report.samples, report.records_kept = len(samples), len({row for row, *_ in samples})
    report.tokens = sum(len(sample.input_ids) for sample in rendered)
    report.longest_tokens = max(len(sample.input_ids) for sample in rendered)
    report.supervised_tokens = sum(int(sample.supervised.sum()) for sample in rendered)
    report.trimmed_records = sum(sample.trimmed_tokens > 0 for sample in rendered)
    report.trimmed_tokens = sum(sample.trimmed_tokens for sample in rendered)
    report.dropped_turns = sum(sample.dropped_turns for sample in rendered)
    report.cut_answers = sum(sample.cut_answer for sample in rendered)
    report.unended_samples = sum(not sample.ends for sample in rendered)
    report.off_prompt_samples = sum(not sample.follows_prompt for sample in rendered)
    if report.difficulty_field_found:
        counts = Counter({row: difficulty for row, _, difficulty, _ in samples}.values())
        report.records_per_difficulty = {name: counts[name] for name in LEVELS}
    return asdict(report)


def _fingerprint(samples: list[Any]) -> str:
    levels = [
        -1 if difficulty is None else LEVELS.index(difficulty) for _, _, difficulty, _ in samples
    ]
    lengths = [len(sample.input_ids) for *_, sample in samples]
    arrays = {
        "levels": np.array(levels, np.int16),
        "offsets": np.cumsum([0, *lengths], dtype=np.int64),
        "row_ids": np.array([row for row, *_ in samples], np.int64),
        "supervised": np.concatenate([sample.supervised for *_, sample in samples]),
        "supervised_counts": np.array(
            [sample.supervised.sum() for *_, sample in samples], np.int32
        ),
        "tokens": np.concatenate([sample.input_ids for *_, sample in samples]).astype(np.int32),
    }
    digest = hashlib.sha256()
    for name, array in arrays.items():
        digest.update(name.encode() + array.tobytes())
    return hashlib.sha256(json.dumps([digest.hexdigest(), LEVELS]).encode()).hexdigest()


def streamed(files: list[Path], drop: bool, cache_dir: Path, workers: int) -> dict[str, Any]:
    samples = prepare_samples(
        files,
        family("gemma"),
        cutoff_len=CUTOFF,
        difficulties=LEVELS,
        on_bad_row="drop" if drop else "refuse",
        cache_dir=cache_dir,
        num_proc=workers,
    )
    assert samples.lengths.tolist() == [len(samples[index][0]) for index in range(len(samples))]
    assert samples.supervised_counts.tolist() == [
        samples[index][1].sum() for index in range(len(samples))
    ]
    assert (
        samples.by_difficulty.tolist() == np.argsort(samples.difficulties, kind="stable").tolist()
    )
    assert samples.highest_id == max(int(samples[index][0].max()) for index in range(len(samples)))
    place = int(np.argmax(samples.lengths))
    assert samples.first_above(0) == (int(samples[0][0][0]), samples.location(0)) and place >= 0
    found = []
    for index in range(len(samples)):
        ids, mask = samples[index]
        level = int(samples.difficulties[index])
        difficulty = None if level < 0 else LEVELS[level]
        found.append(
            (
                ids.tolist(),
                mask.tolist(),
                int(samples.record_ids[index]),
                samples.location(index),
                difficulty,
            )
        )
    return {"samples": found, "fingerprint": samples.fingerprint, "report": asdict(samples.report)}


def result_of(call: Callable[..., Any], *arguments: Any) -> Any:
    """What it gives, with the order of the reasons in the report; or what it says."""
    try:
        result = call(*arguments)
    except DataError as error:
        return str(error)
    return result | {"reasons": list(result["report"]["dropped"])}


TEXTS = st.sampled_from(
    ["q", "What is a router?", "什么是交换机？\n", "<start_of_turn> a", "because " * 30, "x"]
)
DIFFICULTY = st.sampled_from([{}, {"difficulty": "explain"}, {"difficulty": "topology"}])
ALPACA = st.builds(lambda q, a, d: {"instruction": q, "output": a} | d, TEXTS, TEXTS, DIFFICULTY)
MESSAGES = st.builds(
    lambda turns, d: (
        {
            "messages": [
                {"role": role, "content": text}
                for pair in turns
                for role, text in zip(("user", "model"), pair, strict=True)
            ]
        }
        | d
    ),
    st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3),
    DIFFICULTY,
)
BAD = st.sampled_from(
    [
        {"instruction": "q"},
        {"instruction": "q", "output": " "},
        {"instruction": "q", "output": "a", "difficulty": "expain"},
        {
            "instruction": "q",
            "output": "a",
            "system": "the template has no place for this",
            "difficulty": "explain",
        },
        {"text": "q"},
        3,
    ]
)
NO_RECORD = st.sampled_from([b"", b"  ", b"{broken", b'{"instruction": "\xff"}', b"{}", b"null"])
RECORDS = st.one_of(ALPACA, ALPACA, MESSAGES, BAD)
LINES = st.lists(st.one_of(RECORDS, RECORDS, RECORDS, NO_RECORD), max_size=10)


@st.composite
def files_of_records(draw: st.DrawFn) -> list[tuple[str, bytes]]:
    """(suffix, content) of a few files."""
    files = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["lines", "lines", "array", "parquet"]))
        if kind == "lines":
            lines = [
                line if isinstance(line, bytes) else json.dumps(line).encode()
                for line in draw(LINES)
            ]
            end = draw(st.sampled_from([b"\n", b"\r\n"]))
            files.append(
                (
                    ".jsonl",
                    b"\xef\xbb\xbf" * draw(st.booleans())
                    + end.join(lines)
                    + end * draw(st.booleans()),
                )
            )
        elif kind == "array":
            files.append(
                (
                    ".json",
                    json.dumps(
                        draw(st.lists(RECORDS, max_size=7)), indent=draw(st.sampled_from([None, 1]))
                    ).encode(),
                )
            )
        else:
            sink = pa.BufferOutputStream()
            rows = draw(st.lists(ALPACA, min_size=1, max_size=7))
            schema = pa.schema(
                [(name, pa.string()) for name in ("instruction", "output", "difficulty")]
            )
            pyarrow.parquet.write_table(
                pa.Table.from_pylist(rows, schema=schema), sink, row_group_size=3
            )
            files.append((".parquet", sink.getvalue().to_pybytes()))
    return files


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(contents=files_of_records(), drop=st.booleans())
def test_parts_and_processes_change_nothing(
    tiny_parts: None, contents: list[tuple[str, bytes]], drop: bool
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = [folder / f"{number}{suffix}" for number, (suffix, _) in enumerate(contents)]
        for path, (_, content) in zip(files, contents, strict=True):
            path.write_bytes(content)
        expected = result_of(reference, files, drop)
        for workers in (1, 3):
            assert (
                result_of(streamed, files, drop, folder / f"cache-{workers}", workers) == expected
            )
        left = [
            path for path in folder.glob("cache-*/*") if path.is_dir() and path.name.startswith(".")
        ]
        assert not left, "neither what was made nor what was refused leaves anything"


def test_parts_have_whole_lines(tiny_parts: None, tmp_path: Path) -> None:
    """However long: a line belongs to the part that it starts in."""
    long = {"instruction": "q", "output": "because " * 100}
    path = write(tmp_path / "a.jsonl", [long, "", *rows_of(3, labelled=False), long])
    found = list(parts.parts_of([path], [RecordReader()]))
    assert [part.start for part in found[1:]] == [part.stop for part in found[:-1]]
    assert found[-1].stop == path.stat().st_size and len(found) > 10
    read = [part.read() for part in found]
    assert sum(bool(records) for records, _ in read) == 4
    assert sum(lines for _, lines in read) == 6
    assert [record for records, _ in read for _, record in records] == [
        record for _, record in read_records(path)
    ]


# Fingerprints by the way of before there were parts; a run that is resumed compares them.
FINGERPRINTS = {
    "chatml": "d103c6b5f684ecccebf7a62c7a9546602dbd18cdbd32e32584c6ab33b099a270",
    "gemma": "b1cde0a90b08fac5c0aeafc9e86d9e769c695cce6f37a4f525aec885b98fb625",
    "qwen3": "692fc6c8e95330f7fdded71d59e9c2f9f34082d5faf7d2b2650f238a7796584b",
    "mistral": "ea3b5b94c993d92e271d4a25797f9474e5a32eddc831d8a7b359c106e7b08e10",
}


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_fingerprints_are_those_of_before(tiny_parts: None, tmp_path: Path, name: str) -> None:
    rows = [
        *rows_of(20),
        {**rows_of(1)[0], "system": "Be brief."},
        "{broken",
        *rows_of(9, labelled=False),
    ]
    path = write(tmp_path / "a.jsonl", rows)
    options = {"cutoff_len": 48, "difficulties": LEVELS, "on_bad_row": "drop", "num_proc": 1}
    samples = prepare_samples([path], family(name), cache_dir=tmp_path / "cache", **options)
    assert samples.fingerprint == FINGERPRINTS[name]


# After a kill ---------------------------------------------------------------------------------------------------------


def prepare(path: Path, cache_dir: Path, workers: int) -> Samples:
    options = {
        "cutoff_len": CUTOFF,
        "difficulties": LEVELS,
        "cache_dir": cache_dir,
        "num_proc": workers,
    }
    return prepare_samples([path], family("chatml"), **options)


def _prepare_slowly(path: Path, cache_dir: Path) -> None:
    _slowed(lambda: time.sleep(0.01))
    prepare(path, cache_dir, 2)


def _slowed(before: Callable[[], Any]) -> None:
    plain = Renderer.__call__

    def slow(self: Renderer, conversation: Any) -> Any:
        before()
        return plain(self, conversation)

    Renderer.__call__ = slow  # type: ignore[method-assign]


def _killed_in_the_middle(path: Path, cache_dir: Path) -> Path:
    """The folder that a process left when it was killed with several shards finished."""
    process = multiprocessing.get_context("fork").Process(
        target=_prepare_slowly, args=(path, cache_dir)
    )
    process.start()
    while len(found := list(cache_dir.glob(".making-*/scratch/state-*.json"))) < 4:
        assert process.is_alive()
        time.sleep(0.01)
    workers = psutil.Process(process.pid).children()
    assert len(workers) == 2
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not psutil.wait_procs(workers, timeout=10)[1], "they do not outlive it"
    return found[0].parents[1]


def contents_of(samples: Samples) -> list[Any]:
    everything = [
        (samples[i][0].tolist(), samples[i][1].tolist(), samples.location(i))
        for i in range(len(samples))
    ]
    return [samples.fingerprint, asdict(samples.report), samples.record_ids.tolist(), everything]


@pytest.mark.parametrize("then", ["again", "with a damaged shard", "with other data"])
def test_what_was_finished_before_a_kill_is_not_made_again(
    tiny_parts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    path = write(tmp_path / "a.jsonl", rows_of(60))
    left = _killed_in_the_middle(path, tmp_path / "cache")
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
    monkeypatch.setattr(
        Renderer, "__call__", lambda self, talk: rendered.append(1) or plain(self, talk)
    )
    samples = prepare(path, tmp_path / "cache", 1)
    assert len(rendered) == 60 - (states[kept - 1]["records"] if kept else 0)
    monkeypatch.undo()
    assert contents_of(samples) == contents_of(prepare(path, tmp_path / "other", 1))
    assert len(list((tmp_path / "cache").glob(".making-*"))) == (then == "with other data")


def test_data_that_change_meanwhile_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", rows_of(3))
    plain = Renderer.__call__

    def changing(self: Renderer, conversation: Any) -> Any:
        write(path, rows_of(4))
        return plain(self, conversation)

    monkeypatch.setattr(Renderer, "__call__", changing)
    with pytest.raises(DataError, match="changed while they were read"):
        prepare(path, tmp_path / "cache", 1)
    assert not [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]


def test_how_fast_it_goes_is_said(
    tiny_parts: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(report, "LOG_EVERY_SECONDS", 0)
    with caplog.at_level(logging.INFO, "finetune"):
        prepare(write(tmp_path / "a.jsonl", rows_of(20)), tmp_path / "cache", 1)
    said = [record.message for record in caplog.records]
    assert any(
        line.startswith("checking data: 100%, 20 records, ") and line.endswith("0:00 left")
        for line in said
    )
    assert any(
        line.startswith("tokenizing data: 50%, 10 records, ") and " B a record, " in line
        for line in said
    )
    assert [
        line
        for line in said
        if line.startswith("tokenizing data: done in 0:0") and "by 1 processes" in line
    ]


# What a start reads ---------------------------------------------------------------------------------------------------


def _rank(rank: int, path: Path, cache_dir: Path, log: Path) -> None:
    """Opens the samples as a rank does; what it hashes and which files it opens is noted."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "8"}
    cache.YOUNG_SECONDS = 0
    parts.PART_BYTES, sample_arrays.SHARD_TOKENS = 2000, 500
    plain = durable_files.hash_file

    def hashed(file: Path) -> str:
        with log.open("a") as notes:
            notes.write(f"{file}\n")
        return plain(file)

    durable_files.hash_file = hashed
    prepare(path, cache_dir, 1)


def _start(ranks: int, *arguments: Any) -> None:
    """A launcher."""
    processes = [
        multiprocessing.get_context("fork").Process(target=_rank, args=(n, *arguments))
        for n in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0


def _hashed_by_a_start(path: Path, cache_dir: Path, log: Path) -> Counter[str]:
    log.write_text("")
    launcher = multiprocessing.get_context("fork").Process(
        target=_start, args=(8, path, cache_dir, log)
    )
    launcher.start()
    launcher.join()
    assert launcher.exitcode == 0
    return Counter(log.read_text().splitlines())


def test_eight_ranks_read_each_file_once_and_no_data_file_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rows_of(200))
    cold = _hashed_by_a_start(path, tmp_path / "cache", tmp_path / "log")
    assert cold.pop(str(path)) == 1 and set(cold.values()) == {1}
    (folder,) = (entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir())
    warm = _hashed_by_a_start(path, tmp_path / "cache", tmp_path / "log")
    files = [file for file in folder.iterdir() if file.name != "meta.json"]
    assert len(files) > 15, "shards"
    assert warm == Counter(map(str, files)), "the entry once, and no data file"
    write(path, rows_of(201))
    assert _hashed_by_a_start(path, tmp_path / "cache", tmp_path / "log")[str(path)] == 1


def test_hashes_are_remembered_as_long_as_a_file_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = write(tmp_path / "a.jsonl", ["x"]), write(tmp_path / "b.jsonl", ["y"])
    expected = [hashlib.sha256(file.read_bytes()).hexdigest() for file in (path, other, path)]
    hashed: list[str] = []
    plain = durable_files.hash_file
    monkeypatch.setattr(
        durable_files, "hash_file", lambda file: hashed.append(file.name) or plain(file)
    )

    def now_hashed() -> list[str]:
        hashed.clear()
        assert cache.source_hashes([path, other, path], tmp_path) == expected
        return hashed

    assert now_hashed() == now_hashed() == ["a.jsonl", "b.jsonl"], (
        "young: one more write might look the same"
    )
    monkeypatch.setattr(cache, "YOUNG_SECONDS", 0)
    assert now_hashed() == ["a.jsonl", "b.jsonl"] and now_hashed() == []
    state = path.stat()
    write(path, ["z"])
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    expected[0] = expected[2] = hashlib.sha256(b"z\n").hexdigest()
    assert now_hashed() == ["a.jsonl"], "the same size and time of change, put back"
    for notes in tmp_path.glob("sources.*.json"):
        notes.write_text('{"a": 1')
    assert now_hashed() == ["a.jsonl", "b.jsonl"]
    path.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        now_hashed()


# Memory ---------------------------------------------------------------------------------------------------------------


def private_array_bytes(*roots: Any) -> int:
    """Of the arrays that these objects lead to, those that are no maps of files."""
    seen: set[int] = set()
    waiting, total = list(roots), 0
    while waiting:
        here = waiting.pop()
        if id(here) in seen or isinstance(here, (type, type(gc))) or callable(here):
            continue
        seen.add(id(here))
        if isinstance(here, np.ndarray):
            owner = here
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            if owner.base is None and id(owner) not in seen:
                total += owner.nbytes
                seen.add(id(owner))
        else:
            waiting += gc.get_referents(here)
    return total


@pytest.mark.parametrize("labelled", [True, False])
def test_what_a_process_holds_does_not_grow_with_the_samples(
    tmp_path: Path, labelled: bool
) -> None:
    stages = [SimpleNamespace(until=1.0, mix=(1, 1, 1), ramp="step")]
    config = SimpleNamespace(
        use_curriculum=True,
        difficulty_field="difficulty",
        curriculum=SimpleNamespace(levels=LEVELS, stages=stages),
    )
    held = []
    for count in (300, 900):
        samples = prepare(
            write(tmp_path / f"{count}.jsonl", rows_of(count, labelled)), tmp_path / "cache", 1
        )
        schedule, ids, _ = choose_schedule(config, samples.difficulties, samples.record_ids)
        batches = GlobalBatches(ids, schedule, 10, 20, 1, by_difficulty=samples.by_difficulty)
        plain = GlobalBatches(np.array(ids), schedule, 10, 20, 1)
        for step in range(20):
            assert batches.indices(step).tolist() == plain.indices(step).tolist()
        assert batches.fingerprint() == plain.fingerprint()
        # orders of up to a million samples of a difficulty; above that nothing is held
        batches._passes.clear()
        held.append(private_array_bytes(samples, batches, ids))
    assert held[0] == held[1] < 3000
