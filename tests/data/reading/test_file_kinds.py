"""Which files there are; the same rows in every kind of file give the same samples."""

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
from sample_rows import expand_paths
from sample_rows import write_rows as write

from finetune.config.fields import DataSource
from finetune.data import parts
from finetune.data.reading.files import read_records
from finetune.data.records import RecordReader
from finetune.data.report import ProblemLog
from finetune.errors import DataError, Problems

ANSWERS = ["because " * (number % 5) + "end" for number in range(20)]
ROWS = [
    {"prompt": f'"{number}", what?\n又', "completion": answer, "system": ""}
    for number, answer in enumerate(ANSWERS)
]


def lines_of(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def csv_of(rows: list[dict[str, Any]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return b"\xef\xbb\xbf" + text.getvalue().encode()


def write_arrow(path: Path, table: pa.Table, *, stream: bool = True) -> Path:
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(path, table.schema) as writer:
        writer.write_table(table)
    return path


COMPRESS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda raw: pa.Codec("zstd").compress(raw, asbytes=True),
}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    plain = {"a.jsonl": lines_of(ROWS), "a.json": json.dumps(ROWS).encode(), "a.csv": csv_of(ROWS)}
    packed = {"a.jsonl" + end: pack(plain["a.jsonl"]) for end, pack in COMPRESS.items()}
    for name, raw in (plain | packed).items():
        (tmp_path / name).write_bytes(raw)
    table = pa.Table.from_pylist(ROWS)
    pa.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    write_arrow(tmp_path / "file.arrow", table, stream=False)
    write_arrow(tmp_path / "stream.arrow", table)
    return {path.name: path for path in tmp_path.iterdir()}


def test_every_kind_gives_the_same_records_whole_and_cut(
    files: dict[str, Path], prepare, monkeypatch
):
    monkeypatch.setattr(parts, "PART_BYTES", 200)
    monkeypatch.setattr(parts, "PART_RECORDS", 3)
    expected = prepare(files["a.jsonl"])
    first = prepare(DataSource(path=str(files["a.jsonl"]), max_samples=7))
    assert len(files) == 10 and (len(first), first.report.records_read) == (7, 7)
    for name, path in files.items():
        assert [record for _, record in read_records(path)] == ROWS, name
        read = [
            entry for part in parts.parts_of([path], [RecordReader()]) for entry in part.read()[0]
        ]
        assert [record for _, record in read] == ROWS, name
        for most in (1, 4, 7, 25):
            reader = RecordReader(source=DataSource(path=str(path), max_samples=most))
            cut = [entry for part in parts.parts_of([path], [reader]) for entry in part.read()[0]]
            assert cut == list(read_records(path))[:most], (name, most)
        if name in ("a.jsonl.zst", "a.csv", "stream.arrow"):
            assert prepare(path).fingerprint == expected.fingerprint, name
            cut = prepare(DataSource(path=str(path), max_samples=7))
            assert cut.fingerprint == first.fingerprint, name


def test_first_records_of_an_entry_of_several_files(tmp_path, prepare):
    """An entry's limit counts over its files, and what follows is not read."""
    (tmp_path / "books").mkdir()
    for name, rows in (("a", ROWS[:4]), ("b", [*ROWS[4:7], "{broken"]), ("c", ROWS[7:10])):
        write(tmp_path / "books" / f"{name}.jsonl", rows)
    other = DataSource(path=str(write(tmp_path / "other.jsonl", ROWS[10:12])))
    found = prepare(DataSource(path=str(tmp_path / "books"), max_samples=6), other)
    expected = prepare(DataSource(path=str(write(tmp_path / "cut.jsonl", ROWS[:6]))), other)
    assert found.fingerprint == expected.fingerprint and found.record_ids.tolist() == list(range(8))
    assert found.location(5) == f"{tmp_path}/books/b.jsonl:2"
    assert found.location(6) == f"{tmp_path}/other.jsonl:1"
    with pytest.raises(DataError, match="broken JSON"):
        prepare(DataSource(path=str(tmp_path / "books"), max_samples=8))


# Lines, arrays and text -----------------------------------------------------------------------------------------------


def raw_file(path: Path, raw: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw.encode() if isinstance(raw, str) else raw)
    return path


def test_lines_are_counted_and_broken_ones_are_rows_with_a_problem(tmp_path):
    bom = b"\xef\xbb\xbf"  # files that were joined have one in the middle
    good = bom + b'{"a": 1}\r\n\n  \n{"a": "\xe2\x80\xa8"}\n' + bom + b'{"a": 3}'
    found = list(read_records(raw_file(tmp_path / "a.jsonl", good)))
    assert found == [(1, {"a": 1}), (4, {"a": "\u2028"}), (5, {"a": 3})]
    bad = b'{"a": 1}\n{"a": \n\xff\n[1, 2\n' + b"[" * 100_000 + b'\n{"a": 2}\n'
    rows = list(read_records(raw_file(tmp_path / "b.jsonl", bad)))
    assert [line for line, _ in rows] == [1, 2, 3, 4, 5, 6]
    assert [str(row) for _, row in rows[1:4]] == [
        "broken JSON: Expecting value at column 7",
        "not UTF-8: byte 1 of the line",
        "broken JSON: Expecting ',' delimiter at column 6",
    ]
    assert rows[4][1].kind == "broken JSON" and rows[5] == (6, {"a": 2})
    raw_file(tmp_path / "c.jsonl", '{"text": "路由器"}\n'.encode("gbk"))
    ((_, problem),) = read_records(tmp_path / "c.jsonl")
    log = ProblemLog()
    log.add((0, 1), "c.jsonl:1", problem)
    with pytest.raises(DataError, match="it reads as GBK") as caught:
        log.refuse(1)
    assert caught.value.fix.startswith("save the file as UTF-8 (iconv -f GBK")


def test_lines_are_those_of_the_file(tmp_path, prepare, monkeypatch):
    monkeypatch.setattr(parts, "PART_BYTES", 50)
    plain = write(tmp_path / "a.jsonl", [*ROWS[:3], "{broken", ROWS[4]])
    packed = raw_file(tmp_path / "a.jsonl.gz", gzip.compress(plain.read_bytes()))
    table = raw_file(tmp_path / "a.csv", 'prompt,completion\nq,"two\nlines"\n\nq\nq,a\n')
    assert [line for line, _ in read_records(table)] == [2, 5, 6]
    for path, said in (
        (plain, "4: broken JSON"),
        (packed, "4: broken JSON"),
        (table, "5: broken CSV: 1 fields under 2 names"),
    ):
        with pytest.raises(DataError, match=f"1 of . records (.|\n)*{path}:{said}"):
            prepare(path)


def test_a_broken_array_cannot_go_on(tmp_path):
    for text, line, said in (
        ('[{"a": 1},\n{"a": 2,}\n]', 2, "broken JSON"),
        ('[{"a": 1}\n{"a": 2}]', 2, "a comma or ] is missing"),
        ('[{"a": 1}] []', 1, "text after the closing"),
        (json.dumps({"data": ROWS}, indent=2), 1, "one JSON object over several lines"),
    ):
        path = raw_file(tmp_path / "a.json", text)
        with pytest.raises(DataError, match=said) as caught:
            list(read_records(path))
        assert caught.value.where == f"{path}:{line}"


@pytest.mark.parametrize("form", ["{}\n", '[{}, {{"text": "b"}}]'])
def test_a_key_given_twice_is_refused(tmp_path, form: str):
    text = '{"messages": [{"role": "user", "content": "q", "content": "r"}]}'
    path = raw_file(tmp_path / "a.json", form.format(text))
    (_, problem), *others = read_records(path)
    assert str(problem) == "key given twice: 'content'; which one is meant?"
    assert [record for _, record in others] == ([{"text": "b"}] if others else [])


def test_an_array_may_have_the_name_of_lines(tmp_path):
    path = raw_file(tmp_path / "a.jsonl", '\n[{"a": 1},\n\n  {"a":\n 2}\n,{"a": "]"} ]\n')
    assert list(read_records(path)) == [(2, {"a": 1}), (4, {"a": 2}), (6, {"a": "]"})]
    assert list(read_records(raw_file(tmp_path / "b.json", ""))) == []


def test_lines_of_plain_text(tmp_path, prepare):
    """Each line that is not blank is a text record, whatever its end."""
    lines = ["\ufeffFirst line.", "", "  ", "  second, indented", "[1]", '{"text": "nor this"}']
    records = [{"text": line.removeprefix("\ufeff")} for line in lines if line.strip()]
    found = prepare(raw_file(tmp_path / "book.txt", "\r\n".join(lines)))
    assert found.fingerprint == prepare(write(tmp_path / "book.jsonl", records)).fingerprint
    assert found.location(1) == f"{tmp_path}/book.txt:4"
    with pytest.raises(DataError, match="not UTF-8"):
        prepare(raw_file(tmp_path / "book.txt", "\xe9t\xe9\n".encode("latin-1")))


# What is broken -------------------------------------------------------------------------------------------------------


def test_broken_files_are_named(tmp_path, prepare):
    for name, raw, said in (
        ("a.jsonl.gz", b"plain", "cannot be read: Not a gzipped file"),
        (
            "a.jsonl.gz",
            gzip.compress(lines_of(ROWS), mtime=0)[:-20],
            "cannot be read: Compressed file end",
        ),
        ("a.jsonl.zst", b"plain", "cannot be read: ZSTD"),
        ("a.arrow", b"plain text", "is no Arrow file"),
        ("a.parquet", b"{}", "is no parquet file"),
        ("a.csv", b"", "has no header of different names"),
        ("a.csv", b'prompt,completion\nq,"open\n', "broken CSV"),
        ("a.csv", b"prompt,completion\nq,\xff\n", "is not UTF-8"),
        ("a.parquet.gz", b"", r"\.gz is not a known kind"),
        ("a.jsonl", '{"text": "a"}\n'.encode("utf-16"), "is UTF-16 text"),
        ("a.csv", gzip.compress(b'{"text": "a"}\n', mtime=0), "is compressed by gzip"),
    ):
        path = raw_file(tmp_path / name, raw)
        with pytest.raises(DataError, match=said) as caught:
            prepare(path)
        assert str(path) in caught.value.where


def test_columns_that_cannot_be_read_are_said(tmp_path, prepare):
    """A time that Python has not, and two columns of one name."""
    times = pa.array([300_000_000_000], pa.timestamp("s"))
    tables = {
        "has a value that cannot be read": pa.table({"prompt": ["q"], "when": times}),
        "has the column 'a' twice": pa.table([["q"], ["1"], ["2"]], ["prompt", "a", "a"]),
    }
    for said, table in tables.items():
        pa.parquet.write_table(table, tmp_path / "a.parquet")
        for path in (tmp_path / "a.parquet", write_arrow(tmp_path / "a.arrow", table)):
            with pytest.raises(DataError, match=said) as caught:
                prepare(path)
            assert caught.value.where == str(path)


# Which files there are ------------------------------------------------------------------------------------------------


def test_files_folders_and_globs(tmp_path, caplog):
    names = "b.jsonl a.json sub/c.parquet .hidden.jsonl .git/d.jsonl README.md e.txt"
    for name in names.split():
        raw_file(tmp_path / name, "x")
    found = [path.relative_to(tmp_path).as_posix() for path in expand_paths([str(tmp_path)])]
    assert found == ["a.json", "b.jsonl", "sub/c.parquet"], "a text beside data describes the data"
    given = [str(tmp_path / name) for name in ("b.jsonl", "*.json", "**/*.parquet")]
    assert [path.name for path in expand_paths(given)] == ["b.jsonl", "a.json", "c.parquet"]
    literal = raw_file(tmp_path / "books" / "a[1].txt", "x")
    assert expand_paths([literal]) == expand_paths([literal.parent]) == (literal,)
    expand_paths([str(literal), str(literal.parent)])
    assert "read more than once" in caplog.text


def test_missing_files_are_reported_together(tmp_path):
    raw_file(tmp_path / "train.jsonl", "x")
    raw_file(tmp_path / "notes.md", "x")
    (tmp_path / "empty").mkdir()
    names = ["trian.jsonl", "notes.md", "empty", "*.parquet"]
    with pytest.raises(Problems) as caught:
        expand_paths([str(tmp_path / name) for name in names])
    missing, kind, folder, pattern = map(str, caught.value.problems)
    assert "did you mean" in missing and "train.jsonl" in missing
    assert ".md is not a known kind" in kind and ".txt" in kind
    assert "holds no" in folder and "no data file matches" in pattern
    assert caught.value.exit_code == 2
    with pytest.raises(DataError, match="no data files were named"):
        expand_paths([])


def test_folders_that_datasets_saved(tmp_path):
    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "saved", num_shards=3)
    found = expand_paths([tmp_path / "saved"])
    assert [path.suffix for path in found] == [".arrow"] * 3
    assert [record for path in found for _, record in read_records(path)] == ROWS
    assert expand_paths([tmp_path]) == found, "what describes the data is not read as data"
    write_arrow(tmp_path / "saved" / "cache-0.arrow", pa.Table.from_pylist(ROWS))
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
