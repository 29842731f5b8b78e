"""Samples of data files, what is said of bad ones, and the cache under change and damage."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    with pytest.raises(ValueError, match="read-only"):
        samples[0][0][0] = 0


def test_a_record_without_difficulty_is_bad_if_others_have_one(tmp_path, leveled):
    path = write(tmp_path / "a.jsonl", [GOOD, {"instruction": "q", "output": "b"}])
    with pytest.raises(DataError, match="1 of 2 records cannot be(.|\n)*:2: no difficulty"):
        leveled(path)


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
    for options in ({"num_proc": 2}, {"tokenizer": padding}):
        assert f"tokenized data: reusing {folder}\n" in said(**options)
    brief = TEMPLATES["chatml"].replace("helpful", "brief")
    for options, change in (
        ({"cutoff_len": 48}, "cutoff_len 64 -> 48"),
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


DAMAGE: list[tuple[str, Callable[[Path], Any]]] = [
    ("damaged", lambda folder: os.truncate(folder / "offsets.npy", 0)),
    ("missing", lambda folder: (folder / "levels.npy").unlink()),
    ("missing", lambda folder: (folder / "meta.json").unlink()),
    ("unreadable", lambda folder: (folder / "meta.json").write_text("{", encoding="utf-8")),
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
    """A rank that opens an entry and notes every hash; with `meet`, it waits there for others."""
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


def test_an_entry_is_checked_once_a_node_and_start(tmp_path):
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


def test_where_the_cache_is(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.default_cache_dir() == tmp_path / ".cache/finetune/samples"
