"""`max_samples`: as with files that end there; and plain text, a record a line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from chat_models import family
from sample_rows import write_rows

from finetune.config.fields import DataSource, with_common
from finetune.data.dataset import prepare_samples
from finetune.data.reading.files import expand_sources
from finetune.data.samples import Samples
from finetune.errors import DataError

Rows = list[dict[str, str]]
ROWS: Rows = [{"instruction": f"q{number}", "output": f"a {number}"} for number in range(900)]


def write_gzip(path: Path, rows: Rows) -> Path:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


def write_array(path: Path, rows: Rows) -> Path:
    path.write_text(json.dumps(rows))
    return path


def write_parquet(path: Path, rows: Rows) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=100)
    return path


def write_arrow(path: Path, rows: Rows) -> Path:
    pyarrow.feather.write_feather(pa.Table.from_pylist(rows), path, compression="uncompressed")
    return path


KINDS = {
    "jsonl": write_rows,
    "jsonl.gz": write_gzip,
    "json": write_array,
    "parquet": write_parquet,
    "arrow": write_arrow,
}


def samples_of(place: Path, *sources: DataSource, **options: Any) -> Samples:
    return prepare_samples(
        sources, family("chatml"), cutoff_len=64, cache_dir=place / "cache", num_proc=1, **options
    )


@pytest.mark.parametrize("suffix", KINDS)
@pytest.mark.parametrize("most", [1, 256, 300, 899, 1000])
def test_first_records_of_a_file(suffix: str, most: int, tmp_path: Path) -> None:
    whole = KINDS[suffix](tmp_path / f"whole.{suffix}", ROWS)
    cut = KINDS[suffix](tmp_path / f"cut.{suffix}", ROWS[:most])
    found = samples_of(tmp_path, DataSource(path=str(whole), max_samples=most))
    expected = samples_of(tmp_path, DataSource(path=str(cut)))
    assert found.fingerprint == expected.fingerprint
    assert found.report.records_read == min(most, 900)
    last = len(found) - 1
    assert found.location(last).removeprefix(str(whole)) == expected.location(last).removeprefix(
        str(cut)
    )


def test_first_records_of_an_entry_of_several_files(tmp_path: Path) -> None:
    """An entry's limit counts over its files; the other entry and record numbers are as ever."""
    (tmp_path / "books").mkdir()
    for name, rows in (("a", ROWS[:40]), ("b", ROWS[40:70]), ("c", ROWS[70:100])):
        write_rows(tmp_path / "books" / f"{name}.jsonl", rows)
    other = DataSource(path=str(write_rows(tmp_path / "other.jsonl", ROWS[100:120])))
    books = DataSource(path=str(tmp_path / "books"), max_samples=55)
    found = samples_of(tmp_path, books, other, difficulties=None)
    cut = write_rows(tmp_path / "cut.jsonl", ROWS[:55])
    expected = samples_of(tmp_path, DataSource(path=str(cut)), other)
    assert found.fingerprint == expected.fingerprint
    assert found.record_ids.tolist() == list(range(75))
    assert found.location(54) == f"{tmp_path}/books/b.jsonl:15"
    assert found.location(55) == f"{tmp_path}/other.jsonl:1"


def test_what_follows_is_not_read(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", ROWS[:10])
    data.write_text(data.read_text() + "{broken\n")
    assert len(samples_of(tmp_path, DataSource(path=str(data), max_samples=10))) == 10
    with pytest.raises(DataError, match="broken JSON"):
        samples_of(tmp_path, DataSource(path=str(data), max_samples=11))


def test_an_entry_keeps_its_own_limit() -> None:
    sources = with_common([DataSource(path="a", max_samples=3), DataSource(path="b")], None, 7)
    assert [source.max_samples for source in sources] == [3, 7]


def test_lines_of_plain_text(tmp_path: Path) -> None:
    """Each line that is not blank is a text record, whatever its end."""
    lines = [
        "\ufeffFirst line.",
        "",
        "  ",
        "  second, indented",
        "[1] not JSON",
        '{"text": "nor this"}',
    ]
    (tmp_path / "book.txt").write_bytes("\r\n".join(lines).encode())
    records = [{"text": line.removeprefix("\ufeff")} for line in lines if line.strip()]
    expected = samples_of(
        tmp_path, DataSource(path=str(write_rows(tmp_path / "book.jsonl", records)))
    )
    found = samples_of(tmp_path, DataSource(path=str(tmp_path / "book.txt")))
    assert found.fingerprint == expected.fingerprint
    assert found.location(1) == f"{tmp_path}/book.txt:4"
    (tmp_path / "book.txt").write_bytes("\xe9t\xe9\n".encode("latin-1"))
    with pytest.raises(DataError, match="not UTF-8"):
        samples_of(tmp_path, DataSource(path=str(tmp_path / "book.txt")))


def test_text_beside_data_is_no_data(tmp_path: Path) -> None:
    """A README.txt in a folder of records; a folder of nothing but texts."""
    write_rows(tmp_path / "rows.txt.jsonl", ROWS[:2])
    (tmp_path / "README.txt").write_text("Rows of questions.\n")
    assert [file.path.name for file in expand_sources([tmp_path])] == ["rows.txt.jsonl"]
    (tmp_path / "rows.txt.jsonl").unlink()
    assert [file.path.name for file in expand_sources([tmp_path])] == ["README.txt"]
