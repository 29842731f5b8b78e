"""`prepare` on folders of parquet as FineWeb and ClimbMix come: many shards and row groups, and
what is broken.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from file_system_calls import killed_at

from finetune.data.corpus import documents, preparation
from finetune.data.corpus.preparation import Prepared, PrepareSettings, prepare_tokens
from finetune.errors import FinetuneError

TEXTS = [
    f"Document {number}: " + "löwen jagen 北京 nachts. " * (number % 5) for number in range(60)
]


def prepare(data: Path | str, folder: Path, *, workers: int = 1, **changes: Any) -> Prepared:
    settings = PrepareSettings(
        **({"vocab_size": 300, "valid_fraction": 0.2, "shard_tokens": 900} | changes)
    )
    return prepare_tokens((str(data),), folder, settings, num_workers=workers)


def shards_of(folder: Path) -> dict[str, bytes]:
    files = [
        *folder.glob("*.bin"),
        *folder.glob("*.index"),
        folder / "tokenizer" / "tokenizer.json",
    ]
    return {path.name: path.read_bytes() for path in files}


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict[str, bytes]:
    """The same documents as JSON Lines, prepared in one go."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "d.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    prepare(folder / "d.jsonl", folder / "out")
    return shards_of(folder / "out")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folders of shards whose schemas, compressions and row groups differ, with what a hub puts
    beside them.
    """
    data = tmp_path / "data"
    numbers = list(range(20))
    write(
        data / "CC-1" / "0.parquet",
        {"text": TEXTS[:20], "id": numbers},
        row_group_size=3,
        compression="snappy",
    )
    large = pa.array(TEXTS[20:40], pa.large_string())
    score = [{"edu": 0.5}] * 20
    write(
        data / "CC-1" / "1.parquet",
        {"score": score, "text": large},
        row_group_size=1,
        compression="zstd",
    )
    coded = pa.array(TEXTS[40:]).dictionary_encode()
    write(data / "CC-2" / "0.parquet", {"url": ["u"] * 20, "text": coded}, compression="none")
    write(data / "CC-2" / "1.parquet", {"text": pa.array([], pa.string())})
    (data / ".gitattributes").write_text("*.parquet filter=lfs")
    return data


@pytest.mark.parametrize("workers", [1, 2])
def test_folders_as_hubs_have_them(
    folder: Path, plain, tmp_path: Path, workers: int, caplog, monkeypatch
):
    monkeypatch.setattr(preparation, "_ENCODED_BYTES", 200)  # a row group in several parts
    caplog.set_level(logging.INFO, "finetune")
    found = prepare(folder, tmp_path / "out", workers=workers)
    assert shards_of(tmp_path / "out") == plain
    assert (found.scan.documents, found.scan.text_bytes) == (
        60,
        sum(len(text.encode()) for text in TEXTS),
    )
    assert "4 parquet files: 60 records in 29 row groups" in caplog.text
    glob = prepare(f"{folder}/CC-*/*.parquet", tmp_path / "out")
    assert glob.made == 0


def test_a_killed_preparation_goes_on_within_a_file(
    folder: Path, plain, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr("finetune.data.corpus.documents.UNIT_BYTES", 1)  # every row group is a unit
    prepare(folder, tmp_path / "whole")
    kept = set()
    for number in range(60, 400, 40):
        if not killed_at(number, lambda: prepare(folder, tmp_path / "out")):
            break
        kept.add(len(list((tmp_path / "out").glob("*.bin"))))
    prepare(folder, tmp_path / "out")
    assert len(kept) > 1 and shards_of(tmp_path / "out") == shards_of(tmp_path / "whole") == plain


def test_a_readme_beside_the_shards_is_said(folder: Path, tmp_path: Path, caplog):
    (folder / "README.md").write_text("# A data set")
    assert prepare(folder, tmp_path / "out").scan.documents == 61
    assert "README.md" in caplog.text and f"--data '{folder}/**/*.parquet'" in caplog.text


def error_of(data: Path, out: Path, **changes: Any) -> str:
    with pytest.raises(FinetuneError) as caught:
        prepare(data, out, **changes)
    assert not out.exists()
    return str(caught.value)


def test_every_bad_file_is_named_before_any_is_read(folder: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(
        preparation, "documents_of", lambda *given: pytest.fail("a record was read")
    )
    whole = write(folder / "CC-3" / "0.parquet", {"text": TEXTS}).read_bytes()
    (folder / "CC-3" / "0.parquet").write_bytes(whole[:-100])
    write(folder / "CC-3" / "1.parquet", {"texts": TEXTS})
    write(folder / "CC-3" / "2.parquet", {"text": list(range(5))})
    (folder / "CC-3" / "3.parquet").write_bytes(b"")
    message = error_of(folder, tmp_path / "out")
    for number, words in enumerate(
        ("was cut off", "did you mean --text-field texts?", "holds int64", "was cut off")
    ):
        assert f"CC-3/{number}.parquet" in message and words in message
    assert "4. " in message and "5. " not in message and "CC-1" not in message


@pytest.mark.parametrize(
    "options", [{"compression": "zstd"}, {"compression": "none", "write_page_checksum": True}]
)
def test_a_broken_page_is_named_with_its_row_group(tmp_path: Path, options: dict):
    """Without checksums only what cannot be unpacked is known to be broken."""
    path = write(
        tmp_path / "d.parquet", {"text": TEXTS}, row_group_size=20, use_dictionary=False, **options
    )
    raw = bytearray(path.read_bytes())
    column = pq.read_metadata(path).row_group(1).column(0)
    middle = column.data_page_offset + column.total_compressed_size // 2
    raw[middle] ^= 1
    path.write_bytes(raw)
    assert "row group 1 cannot be read" in error_of(path, tmp_path / "out")


def test_nulls_and_texts_that_are_none_are_counted(tmp_path: Path):
    broken = pa.array([b"good", b"caf\xe9", None, b" ", b"fine"], pa.binary()).view(pa.string())
    path = write(tmp_path / "d.parquet", {"content": broken}, row_group_size=2)
    message = error_of(path, tmp_path / "out", text_field="content")
    assert (
        f"{path}:2: not UTF-8: byte 4 of the text" in message
        and f"{path}:3: content is no text" in message
    )
    found = prepare(path, tmp_path / "out", text_field="content", drop_bad_rows=True)
    assert (found.scan.documents, found.scan.empty, found.scan.problems.total) == (2, 1, 2)


def test_the_footer_of_a_file_of_many_row_groups_is_read_a_few_times(tmp_path: Path, monkeypatch):
    path = write(tmp_path / "d.parquet", {"text": TEXTS * 5}, row_group_size=1)
    reads = []
    real = pq.read_metadata
    monkeypatch.setattr(pq, "read_metadata", lambda *given: reads.append(given) or real(*given))
    monkeypatch.setattr("finetune.data.corpus.documents.UNIT_BYTES", 1)
    assert len(prepare(path, tmp_path / "out").scan.digests) == 300 and len(reads) == 1


def test_the_footers_of_many_files_are_read_once_before_their_texts_are(folder: Path, monkeypatch):
    files = sorted(folder.rglob("*.parquet"))
    reads = []
    real = pq.read_metadata
    monkeypatch.setattr(pq, "read_metadata", lambda *given: reads.append(given) or real(*given))
    documents.check_parquet(files, "text")
    units = list(documents.units_of(files))
    assert len(units) > 0 and len(files) == 4 and len(reads) == 4


def test_row_groups_of_gigabytes_are_said(folder: Path, tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setattr(documents, "LARGE_GROUP_BYTES", 150)
    prepare(folder, tmp_path / "out")
    assert (
        "3 parquet files have row groups of more than 0 GiB" in caplog.text
        and "CC-1/0.parquet" in caplog.text
    )
