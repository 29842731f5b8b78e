"""The same rows in every kind of file, compressed or not, give the same samples; and what is broken
is said.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from chat_models import family
from sample_rows import expand_paths
from sample_rows import write_rows as write

from finetune.data import parts
from finetune.data.dataset import Samples, prepare_samples
from finetune.data.reading.files import read_records
from finetune.data.records import RecordReader
from finetune.data.report import RecordProblem
from finetune.errors import DataError

ROWS = [
    {
        "prompt": f'"{number}", what?\n又',
        "completion": "because " * (number % 5) + "end",
        "system": "",
    }
    for number in range(20)
]


def lines_of(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def csv_of(rows: list[dict[str, Any]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return b"\xef\xbb\xbf" + text.getvalue().encode()


def write_arrow(path: Path, rows: list[dict[str, Any]], *, stream: bool) -> None:
    table = pa.Table.from_pylist(rows)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(path, table.schema) as writer:
        writer.write_table(table)


COMPRESS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda raw: pa.Codec("zstd").compress(raw, asbytes=True),
}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    plain = {"a.jsonl": lines_of(ROWS), "a.json": json.dumps(ROWS).encode(), "a.csv": csv_of(ROWS)}
    packed = {
        name + end: pack(raw) for name, raw in plain.items() for end, pack in COMPRESS.items()
    }
    for name, raw in (plain | packed).items():
        (tmp_path / name).write_bytes(raw)
    pa.parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    write_arrow(tmp_path / "file.arrow", ROWS, stream=False)
    write_arrow(tmp_path / "stream.arrow", ROWS, stream=True)
    return {path.name: path for path in tmp_path.iterdir()}


def prepared(path: Path, cache: Path, **options: Any) -> Samples:
    return prepare_samples(
        [path], family("gemma"), cutoff_len=64, cache_dir=cache, num_proc=1, **options
    )


def test_every_kind_gives_the_same_records_and_samples(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 200)
    monkeypatch.setattr(parts, "PART_RECORDS", 3)
    assert len(files) == 18
    expected = prepared(files["a.jsonl"], tmp_path / "cache")
    for name, path in files.items():
        assert [record for _, record in read_records(path)] == ROWS, name
        read = [
            entry for part in parts.parts_of([path], [RecordReader()]) for entry in part.read()[0]
        ]
        assert [record for _, record in read] == ROWS, name
        if name in ("a.jsonl.zst", "a.csv", "stream.arrow"):
            assert prepared(path, tmp_path / "cache").fingerprint == expected.fingerprint, name


def test_parts_of_what_cannot_be_cut_are_small(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part goes through a pipe: one of a large batch must not take all of it along."""
    import pickle

    monkeypatch.setattr(parts, "PART_BYTES", 200)
    monkeypatch.setattr(parts, "PART_RECORDS", 2)
    for name in ("a.jsonl.gz", "a.csv", "file.arrow", "stream.arrow"):
        found = list(parts.parts_of([files[name]], [RecordReader()]))
        assert len(found) > 3 and [part.start == 1 for part in found] == [True] + [False] * (
            len(found) - 1
        )
        assert sum(part.size_bytes for part in found) == files[name].stat().st_size
    large = files["a.csv"].parent / "large.arrow"
    write_arrow(large, ROWS * 500, stream=True)
    assert (
        max(len(pickle.dumps(part)) for part in parts.parts_of([large], [RecordReader()])) < 10_000
    )


def test_lines_are_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 50)
    rows = [*ROWS[:3], "{broken", ROWS[4]]
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(write(tmp_path / "a.jsonl", rows).read_bytes()))
    for path in (tmp_path / "a.jsonl", packed):
        with pytest.raises(DataError, match=rf"{path}:4: broken JSON"):
            prepared(path, tmp_path / "cache")
    table = tmp_path / "a.csv"
    table.write_text('prompt,completion\nq,"two\nlines"\n\nq\nq,a\n', encoding="utf-8")
    found = list(read_records(table))
    assert [line for line, _ in found] == [2, 5, 6] and isinstance(found[1][1], RecordProblem)
    with pytest.raises(DataError, match=rf"{table}:5: broken CSV: 1 fields under 2 names"):
        prepared(table, tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "raw", "said"),
    [
        ("a.jsonl.gz", b"plain", "cannot be read: Not a gzipped file"),
        (
            "a.jsonl.gz",
            gzip.compress(lines_of(ROWS))[:-20],
            "cannot be read: Compressed file ended",
        ),
        ("a.jsonl.xz", b"plain", "cannot be read: Input format not supported"),
        ("a.jsonl.bz2", b"plain", "cannot be read: Invalid data"),
        ("a.jsonl.zst", b"plain", "cannot be read: ZSTD"),
        ("a.arrow", b"plain text", "is no Arrow file"),
        ("a.arrow", b"", "is no Arrow file|cannot be read"),
        ("a.csv", b"", "has no header of different names"),
        ("a.csv", b"prompt,prompt\n", "has no header of different names"),
        ("a.csv", b'prompt,completion\nq,"open\n', "broken CSV"),
        ("a.csv", b"prompt,completion\nq,\xff\n", "is not UTF-8"),
        ("a.parquet.gz", b"", r"\.gz is not a known kind"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, raw: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(DataError, match=said) as caught:
        prepared(tmp_path / name, tmp_path / "cache")
    assert str(tmp_path / name) in caught.value.where


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_time_that_python_has_not_is_said(tmp_path: Path, kind: str) -> None:
    times = pa.array([300_000_000_000], pa.timestamp("s"))
    table = pa.table({"prompt": ["q"], "completion": ["a"], "when": times})
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pa.parquet.write_table(table, path)
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    for read in (lambda: prepared(path, tmp_path / "cache"), lambda: list(read_records(path))):
        with pytest.raises(DataError, match="has a value that cannot be read") as caught:
            read()
        assert caught.value.where == str(path)


def test_folders_that_datasets_saved(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "saved", num_shards=3)
    found = expand_paths([tmp_path / "saved"])
    assert [path.suffix for path in found] == [".arrow"] * 3
    assert [record for path in found for _, record in read_records(path)] == ROWS
    assert expand_paths([tmp_path]) == found, "what describes the data is not read as data"
    write_arrow(tmp_path / "saved" / "cache-0.arrow", ROWS, stream=True)
    assert expand_paths([tmp_path / "saved"]) == found, "what was computed of it is not either"
    datasets.DatasetDict(train=rows).save_to_disk(tmp_path / "one")
    assert [record for _, record in read_records(*expand_paths([tmp_path / "one"]))] == ROWS
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "two")
    with pytest.raises(DataError, match="holds the splits train, test") as caught:
        expand_paths([tmp_path / "two"])
    assert "two/train" in caught.value.fix
    (tmp_path / "saved" / "state.json").write_text("{}", encoding="utf-8")
    with pytest.raises(DataError, match="looks like a saved data set"):
        expand_paths([tmp_path / "saved"])
