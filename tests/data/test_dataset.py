"""Samples of data files, what is said of bad ones, and the cache under change, damage and several
processes at once.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_models import SPECIALS, TEMPLATES, family, make_tokenizer
from sample_rows import write_rows as write

from finetune.config.fields import DataSource
from finetune.data import cache
from finetune.data.samples import Samples
from finetune.errors import DataError

LEVELS = ("explain", "reasoning", "topology")
QUESTIONS = ("What is a router?", "什么是交换机？", "Which port does BGP use? " * 5)
GOOD = {"instruction": "q", "output": "a", "difficulty": "explain"}
Prepare = Callable[..., Samples]


def rows_of(count: int, difficulty: bool = True) -> list[dict[str, Any]]:
    return [
        {"instruction": f"{n} {QUESTIONS[n % 3]}", "output": f"answer {n} " + "because " * (n % 7)}
        | ({"difficulty": LEVELS[n % 3]} if difficulty else {})
        for n in range(count)
    ]


@pytest.fixture
def leveled(prepare: Prepare) -> Prepare:
    return lambda *sources, **options: prepare(*sources, **{"difficulties": LEVELS} | options)


def folders(cache_dir: Path) -> list[Path]:
    return [path for path in cache_dir.iterdir() if path.is_dir()]


def contents(samples: Samples) -> list[Any]:
    read = [samples[index] for index in range(len(samples))]
    return [samples.fingerprint, *((ids.tolist(), mask.tolist()) for ids, mask in read)]


def test_samples_are_read_only_maps_that_are_sent_as_a_path(tmp_path, leveled):
    samples = leveled(write(tmp_path / "a.jsonl", rows_of(200)))
    types = (samples.lengths, samples.supervised_counts, samples.difficulties, samples.record_ids)
    assert [array.dtype for array in (*samples[0], *types)] == ["i4", "?", "i4", "i4", "i2", "i8"]
    assert samples[-1][0].tolist() == samples[199][0].tolist()
    for index in (200, -201):
        with pytest.raises(IndexError):
            samples[index]
    sent = pickle.dumps(samples)
    assert len(sent) < 2_000 < samples.lengths.sum()
    assert contents(pickle.loads(sent)) == contents(samples)
    (folder,) = folders(tmp_path / "cache")
    suffixes = [path.suffix for path in folder.iterdir()]
    assert sorted(suffixes) == [".bin"] * 2 + [".json"] + [".npy"] * 8, "no scratch files"
    for path in folder.glob("*.npy"):
        np.load(path, allow_pickle=False)
    with pytest.raises(ValueError, match="read-only"):
        samples[0][0][0] = 0


def test_bad_rows_are_refused_by_line_or_dropped_and_counted(tmp_path, leveled):
    unlabelled, empty = {"instruction": "q", "output": "b"}, {**GOOD, "output": " "}
    path = write(tmp_path / "a.jsonl", [GOOD, "{broken", "", empty, unlabelled, GOOD])
    with pytest.raises(DataError) as caught:
        leveled(path)
    said = [line.strip().removeprefix(f"{path}:") for line in str(caught.value).splitlines()]
    assert said[0].startswith("3 of 5 records cannot be trained on") and said[1:4] == [
        "2: broken JSON: Expecting property name enclosed in double quotes at column 2",
        "4: empty answer: turn 2",
        "5: no difficulty: other records have a 'difficulty', this one has none",
    ]
    assert caught.value.exit_code == 2 and not folders(tmp_path / "cache"), "nothing stays behind"
    samples = leveled(path, on_bad_row="drop")
    assert samples.record_ids.tolist() == [0, 4], "blank lines are no rows, bad rows are"
    assert samples.location(1).endswith(":6")
    report = samples.report
    assert report.dropped == {"broken JSON": 1, "empty answer": 1, "no difficulty": 1}
    assert (report.records_read, report.records_kept) == (5, 2)
    assert {"dropped: broken JSON", "difficulty explain"} <= dict(report.lines()).keys()
    assert report.table().row_count == len(report.lines())


def test_rows_that_the_template_refuses_and_data_without_any(tmp_path, prepare):
    refused = {**GOOD, "system": "s"}
    options = {"tokenizer": family("gemma"), "on_bad_row": "drop"}
    path = write(tmp_path / "a.jsonl", [GOOD, refused, GOOD])
    with pytest.raises(DataError, match="a.jsonl:2: refused by the chat template: System role"):
        prepare(path, tokenizer=family("gemma"))
    samples = prepare(path, **options)
    assert samples.record_ids.tolist() == [0, 2]
    assert samples.report.dropped == {"refused by the chat template": 1}
    for rows, said in (
        ([], "hold no record"),
        ([refused], r"no record is left to train on \(1 refused by the chat template\)"),
        ([{"instruction": "q"}], r"no record is left to train on \(1 no answer\)"),
    ):
        with pytest.raises(DataError, match=said):
            prepare(write(tmp_path / "b.jsonl", rows), **options)
    with pytest.raises(ValueError, match="on_bad_row"):
        prepare(path, on_bad_row="skip")


def test_levels_may_be_absent_or_not_asked_for(tmp_path, leveled):
    plain = rows_of(4, difficulty=False)
    samples = leveled(write(tmp_path / "a.jsonl", plain))
    assert samples.difficulties.tolist() == [-1] * 4
    assert not samples.report.difficulty_field_found and not samples.report.records_per_difficulty
    mixed = write(tmp_path / "b.jsonl", [*rows_of(2), *plain[:2], {**GOOD, "difficulty": "x"}])
    samples = leveled(mixed, difficulties=None)
    assert samples.difficulties.tolist() == [-1] * 5 and samples.difficulty_names == ()
    with pytest.raises(DataError, match="2 no difficulty, 1 unknown difficulty"):
        leveled(mixed)
    renamed = [{**row, "stage": row.pop("difficulty")} for row in rows_of(3)]
    samples = leveled(write(tmp_path / "c.jsonl", renamed), difficulty_field="stage")
    assert samples.difficulties.tolist() == [0, 1, 2]


def test_a_source_is_its_files_and_may_set_their_difficulty(tmp_path, leveled):
    (tmp_path / "many").mkdir()
    names = ("many/a.jsonl", "many/b.jsonl", "c.jsonl")
    paths = [write(tmp_path / name, rows_of(3)) for name in names]
    unlabelled = write(tmp_path / "none.jsonl", rows_of(4, difficulty=False))
    hard = DataSource(path=str(unlabelled), difficulty=LEVELS[2])
    samples = leveled(tmp_path / "many", hard, paths[2])
    assert samples.source_starts == (0, 6, 10, 13)
    assert pickle.loads(pickle.dumps(samples)).source_starts == (0, 6, 10, 13)
    assert samples.difficulties.tolist() == [0, 1, 2] * 2 + [2] * 4 + [0, 1, 2]
    assert samples.location(7) == f"{unlabelled}:2"
    instead = leveled(DataSource(path=str(paths[2]), difficulty=LEVELS[0]))
    assert instead.difficulties.tolist() == [0, 0, 0], "not their own, which the cache may hold"
    assert leveled(paths[2]).difficulties.tolist() == [0, 1, 2]
    one_by_one = leveled(*paths[:2], hard, paths[2])
    assert one_by_one.source_starts == (0, 3, 6, 10, 13)
    assert one_by_one.fingerprint == samples.fingerprint


def test_a_record_may_have_no_room_or_several_samples(tmp_path, leveled):
    def record(*contents: str, **more: Any) -> dict[str, Any]:
        roles = ("user", "assistant") * len(contents)
        turns = zip(roles, contents, strict=False)
        return {"messages": [{"role": role, "content": text} for role, text in turns], **more}

    long, short = record(*["q", "a"] * 13), record("q", "a")
    for turn in long["messages"][1:-2:2]:
        turn["weight"] = 0
    samples = leveled(write(tmp_path / "a.jsonl", [long, short]), cutoff_len=40)
    assert samples.record_ids.tolist() == [1]
    assert samples.report.dropped == {"no room for an answer within cutoff_len": 1}
    thought = record(*["q", "<think>\nt\n</think>\n\na"] * 3, difficulty="reasoning")
    files = write(tmp_path / "b.jsonl", [GOOD]), write(tmp_path / "c.jsonl", [thought])
    samples = leveled(*files, tokenizer=family("qwen3"), cutoff_len=200)
    assert samples.record_ids.tolist() == samples.difficulties.tolist() == [0, 1, 1, 1]
    assert (samples.report.records_kept, samples.report.samples) == (2, 4)
    assert samples.report.records_per_difficulty == {"explain": 1, "reasoning": 1, "topology": 0}


def test_what_is_probably_wrong_is_said_with_its_remedy(tmp_path, prepare, caplog):
    path = write(tmp_path / "a.jsonl", [{"instruction": "q <|user|> q", "output": "a " * 60}])

    def said(**options: Any) -> list[str]:
        caplog.clear()
        prepare(path, **options)
        return [record.message for record in caplog.records if record.levelname == "WARNING"]

    for _ in range(2):  # made, then from the cache
        unended, spelled = said(tokenizer=family("glm4"), cutoff_len=512)
        assert unended.startswith("1 of 1 samples train no end-of-turn token")
        assert "--template" in unended
        assert spelled.startswith("1 of 1 records spell special tokens of the tokenizer in their")
    (cut,) = said(cutoff_len=48)
    assert cut.startswith("1 of 1 samples lost the end of an answer to the cutoff")
    assert not said(cutoff_len=512), "what is right is silent"


# The cache ------------------------------------------------------------------------------------------------------------


def test_fingerprints_follow_the_samples_not_the_paths(tmp_path, leveled):
    rows = rows_of(9)
    path = write(tmp_path / "a.jsonl", rows)
    base = leveled(path).fingerprint
    (tmp_path / "parts").mkdir()
    write(tmp_path / "parts/1.jsonl", rows[:4])
    write(tmp_path / "parts/2.jsonl", ["", *rows[4:]])
    assert leveled(tmp_path / "parts").fingerprint == base, "the same rows in two files"
    assert leveled(path, num_proc=2, cache_dir=tmp_path / "other").fingerprint == base
    changed = [
        leveled(write(tmp_path / "b.jsonl", rows[::-1])),
        leveled(path, cutoff_len=40),
        leveled(path, difficulties=None),
        leveled(path, difficulties=LEVELS[::-1]),
        leveled(path, tokenizer=family("mistral")),
    ]
    assert len({base, *(samples.fingerprint for samples in changed)}) == 6


def test_hits_and_misses_are_said_with_their_reason(tmp_path, prepare, caplog):
    path = write(tmp_path / "a.jsonl", rows_of(5))
    caplog.set_level(logging.INFO, "finetune")

    def said(**options: Any) -> str:
        caplog.clear()
        prepare(path, **options)
        return caplog.text

    def chatml(template: str = TEMPLATES["chatml"], stops: tuple[str, ...] = ()) -> Any:
        tokenizer = make_tokenizer(template, SPECIALS["chatml"])
        tokenizer.model_stop_tokens = stops
        return tokenizer

    first = said()
    assert "making" in first and "the first of its kind" in first
    (folder,) = folders(tmp_path / "cache")
    # the number of processes changes nothing, nor what the tokenizer is to pad and cut
    padding = chatml()
    padding.pad_token = padding.eos_token
    padding("some text", truncation=True, max_length=4, padding="max_length")
    for options in ({}, {"num_proc": 2}, {"tokenizer": padding}):
        assert f"tokenized data: reusing {folder}\n" in said(**options)
    brief = TEMPLATES["chatml"].replace("helpful", "brief")
    for options, change in (
        ({"cutoff_len": 48}, "cutoff_len 64 -> 48"),
        ({"on_bad_row": "drop"}, "drop_bad_rows False -> True"),
        ({"tokenizer": family("mistral")}, "tokenizer changed, template changed"),
        ({"tokenizer": chatml(brief)}, "template changed"),
        ({"tokenizer": chatml(stops=("<|im_end|>",))}, "tokenizer changed"),
    ):
        assert f"(compared with the nearest earlier data: {change})" in said(**options)
    write(path, rows_of(6))
    assert "nearest earlier data: data changed)" in said()


def test_an_older_entry_may_go_while_it_is_compared(tmp_path, monkeypatch):
    """Another process has found it damaged: that was "the cache cannot be written"."""
    gone = tmp_path / "older" / "meta.json"
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [gone])
    assert cache._what_changed(tmp_path, {"data": "b"}) == "the first of its kind"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGE: list[tuple[str, Callable[[Path], Any]]] = [
    ("damaged", lambda folder: flip(folder / "tokens-00000.bin")),
    ("damaged", lambda folder: os.truncate(folder / "offsets.npy", 0)),
    ("missing", lambda folder: (folder / "levels.npy").unlink()),
    ("missing", lambda folder: (folder / "meta.json").unlink()),
    ("unreadable", lambda folder: (folder / "meta.json").write_text("{", encoding="utf-8")),
    ("unreadable", lambda folder: (folder / "meta.json").write_text("[]", encoding="utf-8")),
    ("missing", lambda folder: [path.unlink() for path in folder.iterdir()]),
]


def test_a_damaged_entry_is_found_and_made_again(tmp_path, prepare, caplog):
    path = write(tmp_path / "a.jsonl", rows_of(7))
    expected = contents(prepare(path))
    (folder,) = folders(tmp_path / "cache")
    caplog.set_level(logging.INFO, "finetune")
    for word, damage in DAMAGE:
        caplog.clear()
        damage(folder)
        assert contents(prepare(path)) == expected
        assert "making" in caplog.text and word in caplog.text


def _open_as(rank: int, node: str, folder: Path, meet: Any) -> None:
    """A rank that hashes a data file and opens an entry, with every hash noted; with `meet`, it
    waits there for other nodes.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "8"}
    cache.socket.gethostname = lambda: node
    plain = cache.hash_files

    def noted(paths: list[Path]) -> list[str]:
        for path in paths:
            with (folder / "hashed").open("a") as file:
                file.write(f"{path.name}\n")
            if meet is not None:
                meet.wait(60)
        return plain(paths)

    cache.source_hashes([folder / "source"], folder)
    cache.hash_files = noted
    cache.source_hashes([folder / "source"], folder)
    cache.open_or_make(folder / "cache", {"data": "1"}, _make_two)


def _make_two(folder: Path) -> dict[str, Any]:
    for name in ("a", "b"):
        (folder / name).write_text(name)
    return {}


def _open_on(nodes: str, folder: Path, *, together: bool = False) -> str:
    """The first letters of files that were hashed, when a rank opened the entry on each node."""
    context = multiprocessing.get_context("fork")
    meet = context.Barrier(len(nodes)) if together else None
    (folder / "hashed").write_text("")
    processes = [
        context.Process(target=_open_as, args=(rank, node, folder, meet))
        for rank, node in enumerate(nodes)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    return "".join(sorted(name[0] for name in (folder / "hashed").read_text().split()))


def test_an_entry_is_checked_once_a_node_and_start(tmp_path, monkeypatch):
    (tmp_path / "source").write_text("s")
    assert _open_on("0000", tmp_path) == "ab", "made once, not read again by who waited"
    assert _open_on("0000", tmp_path) == "", "the same launcher's"
    assert _open_on("1111", tmp_path) == "ab"
    (folder,) = folders(tmp_path / "cache")
    state = (folder / "a").stat()
    (folder / "a").write_text("x")
    os.utime(folder / "a", ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    # Damaged: seen on one node, looked at again under the lock for making, and made anew.
    assert _open_on("0000", tmp_path) == "aaabbb"
    assert (folder / "a").read_text() == "a"
    assert _open_on("1111", tmp_path) == "ab", "which is news on the other node"
    # Side by side: each waits in the middle of its check for the others to have come as far.
    assert _open_on("234", tmp_path, together=True) == "aaabbb"
    hashed: list[Path] = []
    plain = cache.hash_files
    monkeypatch.setattr(cache, "hash_files", lambda paths: hashed.extend(paths) or plain(paths))
    cache.open_or_make(tmp_path / "cache", {"data": "1"}, _make_two)
    assert len(hashed) == 2, "a start without launcher trusts nobody"


def _make_forever(folder: Path) -> dict[str, Any]:
    (folder / "half.npy").write_bytes(b"half")
    signal.pause()
    return {}


def test_what_ends_while_making_leaves_nothing_in_the_way(tmp_path):
    def fail(folder: Path) -> dict[str, Any]:
        (folder / "half.npy").write_bytes(b"half")
        raise DataError("bad rows")

    parts = {"data": "1"}
    with pytest.raises(DataError, match="bad rows"):
        cache.open_or_make(tmp_path, parts, fail)
    assert {path.suffix for path in tmp_path.iterdir()} == {".lock"}
    process = multiprocessing.get_context("fork").Process(
        target=cache.open_or_make, args=(tmp_path, parts, _make_forever)
    )
    process.start()
    while not list(tmp_path.glob(".making-*/half.npy")):
        assert process.is_alive()
        time.sleep(0.01)
    process.kill()
    process.join()
    folder = cache.open_or_make(tmp_path, parts, _make_two)
    assert sorted(cache.read_meta(folder)["files"]) == ["a", "b", "half.npy"]
    assert cache.find(tmp_path, parts) == folder and cache.find(tmp_path, {"data": "2"}) is None
    assert not list(tmp_path.glob(".making-*"))


def test_where_the_cache_is_and_that_it_cannot_be_written(tmp_path, caplog, monkeypatch):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    caplog.set_level(logging.INFO, "finetune")
    cache.open_or_make(tmp_path / "cache", {"data": "1"}, _make_two, what="references")
    assert [record.message.split(":")[0] for record in caplog.records] == ["references"]
    with pytest.raises(DataError, match="the cache of references cannot be written") as caught:
        cache.open_or_make(tmp_path / "file" / "cache", {"data": "1"}, _make_two, what="references")
    assert "--cache-dir" in caught.value.fix
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.default_cache_dir() == tmp_path / "finetune/samples"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.default_cache_dir() == tmp_path / ".cache/finetune/samples"
