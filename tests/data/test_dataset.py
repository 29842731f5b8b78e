"""Samples against rendering row by row; the report; the cache under change, damage and several
processes at once.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_models import SPECIALS, TEMPLATES, family, make_tokenizer, render
from file_system_calls import watched
from rich.console import Console
from sample_rows import write_rows as write

from finetune.config.fields import DataSource
from finetune.data import cache
from finetune.data.dataset import Samples, prepare_samples
from finetune.data.encoding.render import Renderer
from finetune.data.encoding.templates import template_source
from finetune.data.formats import Conversation, Message, detect_format, to_conversation
from finetune.data.report import RecordProblem
from finetune.errors import DataError

LEVELS = ("explain", "reasoning", "topology")
QUESTIONS = ("What is a router?", "什么是交换机？", "Which port does BGP use? " * 5)


def rows_of(count: int, difficulty: bool = True) -> list[dict[str, Any]]:
    return [
        {
            "instruction": f"{number} {QUESTIONS[number % 3]}",
            "output": f"answer {number} " + "because " * (number % 7),
        }
        | ({"difficulty": LEVELS[number % 3]} if difficulty else {})
        for number in range(count)
    ]


@pytest.fixture
def prepare(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    def call(*paths: Path, **options: Any) -> Samples:
        options = {
            "cutoff_len": 64,
            "difficulties": LEVELS,
            "cache_dir": tmp_path / "cache",
            "num_proc": 1,
        } | options
        return prepare_samples(paths, options.pop("tokenizer", family("chatml")), **options)

    return call


def test_samples_equal_rendering_each_row(tmp_path: Path, prepare: Any) -> None:
    rows = rows_of(40)
    files = write(tmp_path / "a.jsonl", rows[:15]), write(tmp_path / "b.jsonl", rows[15:])
    samples = prepare(*files)
    renderer = Renderer(family("chatml"), 64)
    expected = [renderer(to_conversation(row, detect_format(row), LEVELS))[0] for row in rows]
    assert len(samples) == 40
    for index, sample in enumerate(expected):
        input_ids, supervised = samples[index]
        assert input_ids.dtype == np.int32 and supervised.dtype == np.bool_
        assert input_ids.tolist() == sample.input_ids.tolist()
        assert supervised.tolist() == sample.supervised.tolist()
    assert samples.lengths.tolist() == [len(sample.input_ids) for sample in expected]
    assert samples.lengths.dtype == samples.supervised_counts.dtype == np.int32
    assert samples.supervised_counts.tolist() == [
        int(sample.supervised.sum()) for sample in expected
    ]
    assert (
        samples.difficulties.tolist() == [number % 3 for number in range(40)]
        and samples.difficulties.dtype == np.int16
    )
    assert samples.record_ids.tolist() == list(range(40)) and samples.record_ids.dtype == np.int64
    assert samples.location(0) == f"{files[0]}:1" and samples.location(15) == f"{files[1]}:1"
    assert samples[-1][0].tolist() == samples[39][0].tolist()
    for index in (40, -41):
        with pytest.raises(IndexError):
            samples[index]
    report = samples.report
    assert report.records_read == report.records_kept == report.samples == 40
    assert (
        report.tokens == samples.lengths.sum()
        and report.supervised_tokens == samples.supervised_counts.sum()
    )
    assert report.longest_tokens == samples.lengths.max()
    assert report.trimmed_records == sum(sample.trimmed_tokens > 0 for sample in expected) > 0
    assert report.trimmed_tokens == sum(sample.trimmed_tokens for sample in expected)
    assert (
        report.records_per_difficulty == {"explain": 14, "reasoning": 13, "topology": 13}
        and report.dropped == {}
    )


BAD_ROWS = [
    {"instruction": "q", "output": "a", "difficulty": "explain"},
    "{broken",
    {"instruction": "q", "difficulty": "explain"},
    "",
    {"instruction": "q", "output": " ", "difficulty": "explain"},
    {"instruction": "q", "output": "a", "difficulty": "expain"},
    {"instruction": "q", "output": "b"},
    {"instruction": "q", "output": 3, "difficulty": "explain"},
    {"instruction": "q", "output": "c", "difficulty": "topology"},
]


def test_bad_rows_are_refused_by_line(tmp_path: Path, prepare: Any) -> None:
    path = write(tmp_path / "a.jsonl", BAD_ROWS)
    with pytest.raises(DataError) as caught:
        prepare(path)
    said = str(caught.value).splitlines()
    assert said[0].startswith("6 of 8 records cannot be trained on")
    assert [line.strip() for line in said[1:7]] == [
        f"{path}:2: broken JSON: Expecting property name enclosed in double quotes at column 2",
        f"{path}:3: no answer: no 'output'",
        f"{path}:5: empty answer: turn 2",
        (
            f"{path}:6: unknown difficulty: 'expain', not one of explain, reasoning, topology; did"
            " you mean 'explain'?"
        ),
        f"{path}:7: no difficulty: other records have a 'difficulty', this one has none",
        f"{path}:8: wrong type: 'output' is a number, not a text",
    ]
    assert caught.value.exit_code == 2
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()], (
        "nothing stays behind"
    )


def test_bad_rows_are_dropped_and_counted_and_ids_count_them(tmp_path: Path, prepare: Any) -> None:
    samples = prepare(write(tmp_path / "a.jsonl", BAD_ROWS), on_bad_row="drop")
    assert samples.record_ids.tolist() == [0, 7], "blank lines are no rows, bad rows are"
    assert samples.location(1).endswith(":9")
    assert samples.report.dropped == {
        "broken JSON": 1,
        "no answer": 1,
        "empty answer": 1,
        "unknown difficulty": 1,
        "wrong type": 1,
        "no difficulty": 1,
    }
    assert (samples.report.records_read, samples.report.records_kept) == (8, 2)
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(samples.report.table())
    text = console.export_text()
    assert (
        "dropped: broken JSON" in text
        and "difficulty topology" in text
        and "supervised tokens" in text
    )


def test_rows_that_the_template_refuses(tmp_path: Path, prepare: Any) -> None:
    good = {"instruction": "q", "output": "a", "difficulty": "explain"}
    path = write(tmp_path / "a.jsonl", [good, {**good, "system": "s"}, good])
    with pytest.raises(
        DataError, match=r"a.jsonl:2: refused by the chat template: System role not supported"
    ):
        prepare(path, tokenizer=family("gemma"))
    samples = prepare(path, tokenizer=family("gemma"), on_bad_row="drop")
    assert samples.record_ids.tolist() == [0, 2] and samples.report.dropped == {
        "refused by the chat template": 1
    }
    with pytest.raises(
        DataError, match=r"no record is left to train on \(1 refused by the chat template\)"
    ):
        prepare(
            write(tmp_path / "b.jsonl", [{**good, "system": "s"}]),
            tokenizer=family("gemma"),
            on_bad_row="drop",
        )


def test_levels_may_be_absent_or_not_asked_for(tmp_path: Path, prepare: Any) -> None:
    samples = prepare(write(tmp_path / "a.jsonl", rows_of(4, difficulty=False)))
    assert samples.difficulties.tolist() == [-1] * 4
    assert not samples.report.difficulty_field_found and samples.report.records_per_difficulty == {}
    mixed = write(
        tmp_path / "b.jsonl",
        [*rows_of(2), *rows_of(2, difficulty=False), {**rows_of(1)[0], "difficulty": "x"}],
    )
    samples = prepare(mixed, difficulties=None)
    assert samples.difficulties.tolist() == [-1] * 5 and samples.difficulty_names == ()
    with pytest.raises(DataError, match="2 no difficulty, 1 unknown difficulty"):
        prepare(mixed)
    renamed = [{**row, "stage": row.pop("difficulty")} for row in rows_of(3)]
    samples = prepare(write(tmp_path / "c.jsonl", renamed), difficulty_field="stage")
    assert samples.difficulties.tolist() == [0, 1, 2]


def test_a_source_is_its_files_and_may_set_their_difficulty(tmp_path: Path, prepare: Any) -> None:
    (tmp_path / "many").mkdir()
    paths = [
        write(tmp_path / name, rows_of(3)) for name in ("many/a.jsonl", "many/b.jsonl", "c.jsonl")
    ]
    write(tmp_path / "none.jsonl", rows_of(4, difficulty=False))
    hard = DataSource(path=str(tmp_path / "none.jsonl"), difficulty=LEVELS[2])
    samples = prepare(tmp_path / "many", hard, paths[2])
    assert (
        samples.source_starts == (0, 6, 10, 13) == pickle.loads(pickle.dumps(samples)).source_starts
    )
    assert samples.difficulties.tolist() == [0, 1, 2] * 2 + [2] * 4 + [0, 1, 2]
    assert samples.location(7) == f"{tmp_path / 'none.jsonl'}:2"
    instead = prepare(DataSource(path=str(paths[2]), difficulty=LEVELS[0]))
    assert instead.difficulties.tolist() == [0, 0, 0], "not their own, which the cache may hold"
    assert prepare(paths[2]).difficulties.tolist() == [0, 1, 2]
    one_by_one = prepare(*paths[:2], hard, paths[2])
    assert (
        one_by_one.source_starts == (0, 3, 6, 10, 13)
        and one_by_one.fingerprint == samples.fingerprint
    )


def test_empty_data_is_an_error(tmp_path: Path, prepare: Any) -> None:
    with pytest.raises(DataError, match="hold no record"):
        prepare(write(tmp_path / "a.jsonl", []))
    with pytest.raises(DataError, match=r"no record is left to train on \(1 no answer\)"):
        prepare(write(tmp_path / "b.jsonl", [{"instruction": "q"}]), on_bad_row="drop")
    with pytest.raises(DataError, match="no such file"):
        prepare(tmp_path / "nowhere.jsonl")
    with pytest.raises(ValueError, match="on_bad_row"):
        prepare(tmp_path / "b.jsonl", on_bad_row="skip")


def test_a_row_without_room_for_its_answer_is_dropped_and_counted(
    tmp_path: Path, prepare: Any
) -> None:
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "weight": 0},
    ] * 12
    long = {
        "messages": [
            *turns,
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a"},
        ]
    }
    short = {"messages": long["messages"][-2:]}
    samples = prepare(write(tmp_path / "a.jsonl", [long, short]), cutoff_len=40)
    assert samples.record_ids.tolist() == [1]
    assert samples.report.dropped == {"no room for an answer within cutoff_len": 1}


def test_a_conversation_may_make_several_samples_of_one_row(tmp_path: Path, prepare: Any) -> None:
    turns = [("user", "q"), ("assistant", "<think>\nt\n</think>\n\na")] * 3
    row = {
        "messages": [{"role": role, "content": content} for role, content in turns],
        "difficulty": "reasoning",
    }
    files = write(tmp_path / "a.jsonl", rows_of(1)), write(tmp_path / "b.jsonl", [row])
    samples = prepare(*files, tokenizer=family("qwen3"), cutoff_len=200)
    assert samples.record_ids.tolist() == [0, 1, 1, 1] and samples.difficulties.tolist() == [
        0,
        1,
        1,
        1,
    ]
    assert (samples.report.records_kept, samples.report.samples) == (2, 4)
    assert samples.report.records_per_difficulty == {"explain": 1, "reasoning": 1, "topology": 0}


def test_what_is_probably_wrong_is_said_with_its_remedy(
    tmp_path: Path, prepare: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.jsonl", [{"instruction": "q <|user|> q", "output": "a " * 60}])
    for _ in range(2):  # made, then from the cache
        caplog.clear()
        with caplog.at_level(logging.WARNING, "finetune"):
            prepare(path, tokenizer=family("glm4"), cutoff_len=512)
        assert [record.message[:60] for record in caplog.records] == [
            "1 of 1 samples train no end-of-turn token, so the model will",
            "1 of 1 records spell special tokens of the tokenizer in thei",
        ]
        assert "--template" in caplog.records[0].message
    caplog.clear()
    with caplog.at_level(logging.WARNING, "finetune"):
        prepare(path, cutoff_len=48)
    assert [record.message for record in caplog.records] == [
        "1 of 1 samples lost the end of an answer to the cutoff; a larger --cutoff-len keeps them"
        " whole"
    ]
    with caplog.at_level(logging.WARNING, "finetune"):
        caplog.clear()
        prepare(path, cutoff_len=512)
        assert not caplog.records, "what is right is silent"


def test_the_template_is_the_tokenizers(tmp_path: Path, prepare: Any) -> None:
    tokenizer = make_tokenizer(template_source("alpaca"), SPECIALS["chatml"])
    samples = prepare(write(tmp_path / "a.jsonl", rows_of(1)), tokenizer=tokenizer)
    assert tokenizer.decode(samples[0][0]).startswith("<s>### Instruction:\n0 What is a router?")


# The cache ----------------------------------------------------------------------------------------------------------


def test_fingerprints_follow_the_samples_not_the_paths(tmp_path: Path, prepare: Any) -> None:
    rows = rows_of(9)
    base = prepare(write(tmp_path / "a.jsonl", rows)).fingerprint
    assert prepare(write(tmp_path / "elsewhere.jsonl", rows)).fingerprint == base
    (tmp_path / "parts").mkdir()
    write(tmp_path / "parts/1.jsonl", rows[:4])
    write(tmp_path / "parts/2.jsonl", ["", *rows[4:]])
    assert prepare(tmp_path / "parts").fingerprint == base, "the same rows in two files"
    assert (
        prepare(tmp_path / "a.jsonl", num_proc=2, cache_dir=tmp_path / "other").fingerprint == base
    )
    changed = [
        prepare(write(tmp_path / "b.jsonl", rows[::-1])),
        prepare(write(tmp_path / "c.jsonl", rows[:-1])),
        prepare(tmp_path / "a.jsonl", cutoff_len=40),
        prepare(tmp_path / "a.jsonl", difficulties=None),
        prepare(tmp_path / "a.jsonl", difficulties=LEVELS[::-1]),
        prepare(tmp_path / "a.jsonl", tokenizer=family("mistral")),
    ]
    assert len({base, *(samples.fingerprint for samples in changed)}) == 7


def test_hits_and_misses_are_said_with_their_reason(
    tmp_path: Path, prepare: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.jsonl", rows_of(5))

    def said(**options: Any) -> str:
        caplog.clear()
        with caplog.at_level(logging.INFO, "finetune"):
            prepare(path, **options)
        return "\n".join(
            record.message for record in caplog.records if record.levelno == logging.INFO
        )

    assert "making" in said() and "the first of its kind" in caplog.text
    folder = next(entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir())
    assert said() == f"tokenized data: reusing {folder}"
    assert said(num_proc=2) == f"tokenized data: reusing {folder}", (
        "the number of processes changes nothing"
    )
    assert "(compared with the nearest earlier data: cutoff_len 64 -> 48)" in said(cutoff_len=48)
    assert "nearest earlier data: drop_bad_rows False -> True)" in said(on_bad_row="drop")
    assert "nearest earlier data: tokenizer changed, template changed)" in said(
        tokenizer=family("mistral")
    )
    template = TEMPLATES["chatml"].replace("helpful", "brief")
    assert "nearest earlier data: template changed)" in said(
        tokenizer=make_tokenizer(template, SPECIALS["chatml"])
    )
    write(path, rows_of(6))
    assert "nearest earlier data: data changed)" in said()


def test_an_older_entry_may_go_while_it_is_compared(tmp_path: Path) -> None:
    """Another process has found it damaged, and makes it anew: that was "the cache cannot be
    written".
    """
    looks = 0

    def hook(name: str, original: Any, args: Any, named: Any) -> Any:
        nonlocal looks
        looks += 1
        if looks == goes_at:
            shutil.rmtree(older)
        return original(*args, **named)

    goes_at, every = 0, 1
    while goes_at < every:
        older = tmp_path / str(goes_at) / "older"
        older.mkdir(parents=True)
        (older / "meta.json").write_text('{"parts": {"data": "a"}}')
        looks = 0
        with watched(hook):
            assert cache._what_changed(older.parent, {"data": "b"}).endswith(
                ("data changed", "of its kind")
            )
        every = max(every, looks + 1) if goes_at == 0 else every
        goes_at += 1
    assert every > 3


def test_the_tokenizers_padding_and_truncation_are_not_part_of_it(
    tmp_path: Path, prepare: Any
) -> None:
    path = write(tmp_path / "a.jsonl", rows_of(3))
    tokenizer = make_tokenizer(TEMPLATES["chatml"], SPECIALS["chatml"])
    first = prepare(path, tokenizer=tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer("some text", truncation=True, max_length=4, padding="max_length")
    assert prepare(path, tokenizer=tokenizer).fingerprint == first.fingerprint
    assert len([entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]) == 1
    assert prepare(path, tokenizer=tokenizer)[0][0].tolist() == first[0][0].tolist()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a flipped bit": lambda folder: flip(folder / "tokens-00000.bin"),
    "a flipped bit of a mask": lambda folder: flip(folder / "supervised-00000.bin"),
    "cut off": lambda folder: os.truncate(folder / "row_ids.npy", 100),
    "emptied": lambda folder: os.truncate(folder / "offsets.npy", 0),
    "a missing array": lambda folder: (folder / "levels.npy").unlink(),
    "no meta data": lambda folder: (folder / "meta.json").unlink(),
    "broken meta data": lambda folder: (folder / "meta.json").write_text("{", encoding="utf-8"),
    "other meta data": lambda folder: (folder / "meta.json").write_text("[]", encoding="utf-8"),
    "an empty folder": lambda folder: [path.unlink() for path in folder.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_found_and_made_again(
    tmp_path: Path, prepare: Any, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.jsonl", rows_of(7))
    before = prepare(path)
    expected = [
        (ids.tolist(), mask.tolist()) for ids, mask in (before[index] for index in range(7))
    ]
    fingerprint = before.fingerprint
    folder = next(entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir())
    del before
    DAMAGE[damage](folder)
    with caplog.at_level(logging.INFO, "finetune"):
        after = prepare(path)
    assert "making" in caplog.text and any(
        word in caplog.text for word in ("damaged", "missing", "unreadable")
    )
    assert after.fingerprint == fingerprint
    assert [
        (ids.tolist(), mask.tolist()) for ids, mask in (after[index] for index in range(7))
    ] == expected


def _prepare_elsewhere(arguments: tuple[Path, Path, float]) -> tuple[str, int]:
    path, cache_dir, start = arguments
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("finetune")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    time.sleep(max(0.0, start - time.time()))
    samples = prepare_samples(
        [path],
        family("chatml"),
        cutoff_len=64,
        difficulties=LEVELS,
        cache_dir=cache_dir,
        num_proc=1,
    )
    return samples.fingerprint, sum("data: making" in record for record in records)


def test_processes_that_start_together_tokenize_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rows_of(300))
    family("chatml")
    work = [(path, tmp_path / "cache", time.time() + 0.5)] * 4
    with multiprocessing.get_context("fork").Pool(4) as pool:
        results = pool.map(_prepare_elsewhere, work, chunksize=1)
    assert len({fingerprint for fingerprint, _ in results}) == 1
    assert sum(made for _, made in results) == 1


def _open_as(rank: int, node: str, cache_dir: Path, log: Path, meet: Any) -> None:
    """A rank that opens the entry, with every hash of a file noted; with `meet`, it waits there for
    other nodes.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "8"}
    cache.socket.gethostname = lambda: node
    plain = cache.hash_files

    def noted(paths: list[Path]) -> list[str]:
        for path in paths:
            with log.open("a") as file:
                file.write(f"{path.name}\n")
            if meet is not None:
                meet.wait(60)
        return plain(paths)

    cache.hash_files = noted
    cache.open_or_make(cache_dir, {"data": "1"}, _make_two)


def _make_two(folder: Path) -> dict[str, Any]:
    for name in ("a", "b"):
        (folder / name).write_text(name)
    return {}


def _open_on(nodes: list[str], tmp_path: Path, *, together: bool = False) -> list[str]:
    """Names of the files that were hashed, when a rank opened the entry on each of the nodes
    named.
    """
    context = multiprocessing.get_context("fork")
    log, meet = tmp_path / "hashed", context.Barrier(len(nodes)) if together else None
    log.write_text("")
    processes = [
        context.Process(target=_open_as, args=(rank, node, tmp_path / "cache", log, meet))
        for rank, node in enumerate(nodes)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    return sorted(log.read_text().split())


def test_an_entry_is_checked_once_a_node_and_start(tmp_path: Path) -> None:
    assert _open_on(["n0"] * 4, tmp_path) == [
        "a",
        "b",
    ], "made once, and not read again by those who waited"
    assert _open_on(["n0"] * 4, tmp_path) == [], "the same launcher's"
    assert _open_on(["n1"] * 4, tmp_path) == ["a", "b"]
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    state = (folder / "a").stat()
    (folder / "a").write_text("x")
    os.utime(folder / "a", ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    # Damaged: seen on one node, looked at again under the lock for making, and made anew.
    assert _open_on(["n0"] * 4, tmp_path) == ["a"] * 3 + ["b"] * 3
    assert (folder / "a").read_text() == "a"
    assert _open_on(["n1"] * 4, tmp_path) == ["a", "b"], "which is news on the other node"


def test_nodes_check_an_entry_side_by_side(tmp_path: Path) -> None:
    """Each waits in the middle of its check for the others to have come as far."""
    cache.open_or_make(tmp_path / "cache", {"data": "1"}, _make_two)
    assert _open_on(["n0", "n1", "n2"], tmp_path, together=True) == ["a"] * 3 + ["b"] * 3


def test_a_start_without_launcher_trusts_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.open_or_make(tmp_path / "cache", {"data": "1"}, _make_two)
    hashed = []
    plain = cache.hash_files
    monkeypatch.setattr(
        cache,
        "hash_files",
        lambda paths: hashed.extend(p.name for p in paths) or plain(paths),
    )
    cache.open_or_make(tmp_path / "cache", {"data": "1"}, _make_two)
    assert hashed == ["a", "b"]


def test_a_process_killed_while_making_leaves_nothing_in_the_way(
    tmp_path: Path, prepare: Any
) -> None:
    parts = {"data": "1"}
    process = multiprocessing.get_context("fork").Process(
        target=cache.open_or_make, args=(tmp_path / "cache", parts, _make_forever)
    )
    process.start()
    while not list(tmp_path.glob("cache/.making-*/half.npy")):
        assert process.is_alive()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    folder = cache.open_or_make(
        tmp_path / "cache", parts, lambda folder: {"made": (folder / "x").write_text("x")}
    )
    assert cache.read_meta(folder)["made"] == 1
    assert not list(tmp_path.glob("cache/.making-*"))


def _make_forever(folder: Path) -> dict[str, Any]:
    (folder / "half.npy").write_bytes(b"half")
    time.sleep(60)
    return {}


def test_an_error_while_making_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(folder: Path) -> dict[str, Any]:
        (folder / "half.npy").write_bytes(b"half")
        raise DataError("bad rows")

    with pytest.raises(DataError, match="bad rows"):
        cache.open_or_make(tmp_path, {"data": "1"}, fail)
    assert {path.suffix for path in tmp_path.iterdir()} == {".lock"}


def test_a_cache_that_cannot_be_written_is_explained(tmp_path: Path, prepare: Any) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    with pytest.raises(DataError, match="cannot be written") as caught:
        prepare(write(tmp_path / "a.jsonl", rows_of(1)), cache_dir=tmp_path / "file" / "cache")
    assert "--cache-dir" in caught.value.fix


def test_the_cache_says_what_it_keeps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "finetune"):
        cache.open_or_make(tmp_path / "cache", {"data": "1"}, _make_two, what="references")
    assert [record.message.split(":")[0] for record in caplog.records] == ["references"]
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    with pytest.raises(DataError, match="the cache of references cannot be written"):
        cache.open_or_make(tmp_path / "file" / "cache", {"data": "1"}, _make_two, what="references")


def test_the_default_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.default_cache_dir() == tmp_path / "finetune/samples"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.default_cache_dir() == tmp_path / ".cache/finetune/samples"


def test_samples_are_sent_as_a_path_and_hold_no_pickles(tmp_path: Path, prepare: Any) -> None:
    samples = prepare(write(tmp_path / "a.jsonl", rows_of(200)))
    sent = pickle.dumps(samples)
    assert len(sent) < 2_000 < samples.lengths.sum()
    assert pickle.loads(sent)[7][0].tolist() == samples[7][0].tolist()
    folder = next(entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir())
    assert (
        sorted(path.suffix for path in folder.iterdir()) == [".bin"] * 2 + [".json"] + [".npy"] * 8
    ), "no scratch files"
    for path in folder.glob("*.npy"):
        np.load(path, allow_pickle=False)
    with pytest.raises(ValueError, match="read-only"):
        samples[0][0][0] = 0


def test_row_problems_do_not_quote_the_row() -> None:
    """Messages go to logs; what people wrote does not."""
    with pytest.raises(RecordProblem) as caught:
        to_conversation(
            {"messages": [{"role": "user", "content": "secret"}, {"role": "user", "content": "x"}]},
            "messages",
        )
    assert "secret" not in str(caught.value)
    thought = Conversation((Message("user", "q"), Message("assistant", "<think>secret</think>a")))
    with pytest.raises(RecordProblem) as caught:
        render(thought, family("deepseek"), 64)
    assert "secret" not in str(caught.value)
