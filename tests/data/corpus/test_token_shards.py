"""Token shards: their form on disk, reading across them, and what is refused."""

from __future__ import annotations

import hashlib
import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune.data.corpus.token_shards import (
    ShardKind,
    ShardWriter,
    TokenShards,
    dtype_for,
    index_path,
    tokenizer_folder,
)
from finetune.errors import DataError, Problems

HASH = "ab" * 32
OTHER_HASH = "cd" * 32


def write_shards(
    folder: Path, documents: list[Any], split="train", vocabulary=1000, most=10**9, tokenizer=HASH
):
    folder.mkdir(exist_ok=True)
    kind = ShardKind(dtype_for(vocabulary), vocabulary, tokenizer, 1, most)
    writer = ShardWriter(folder, split, kind, [])
    for number, ids in enumerate(documents):
        writer.add(np.array(ids, dtype=kind.dtype), 0, number)
    writer.finish()


def refused(*args, **kwargs) -> str:
    with pytest.raises((DataError, Problems)) as caught:
        TokenShards(*args, **kwargs)
    assert caught.value.exit_code == 2
    return str(caught.value)


# ---------------------------------------------------------------- the form


def test_the_form_on_disk_is_frozen(tmp_path):
    """Other programs read these files: what stands here may only grow with a new version number."""
    write_shards(tmp_path, [[1, 5, 6], [1, 999]])
    names = [f"train-00000.{suffix}" for suffix in ("bin", "index", "json")]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    ids = b"\x01\0\x05\0\x06\0\x01\0\xe7\x03"
    index = b"".join(n.to_bytes(8, "little") for n in (0, 3, 5))
    assert (tmp_path / "train-00000.bin").read_bytes() == ids
    assert (tmp_path / "train-00000.index").read_bytes() == index
    assert json.loads((tmp_path / "train-00000.json").read_text()) == {
        "format": "finetune tokens",
        "version": 1,
        "dtype": "uint16",
        "tokens": 5,
        "documents": 2,
        "vocabulary": 1000,
        "tokenizer_hash": HASH,
        "separator_id": 1,
        "sha256": hashlib.sha256(ids).hexdigest(),
        "index_sha256": hashlib.sha256(index).hexdigest(),
        "continues_at": [0, 2],
    }


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize("most", [1, 40, 1000])
def test_shards_read_as_one_stream(tmp_path, most: int):
    lengths = np.random.default_rng(most).integers(1, 12, 30)
    ids = np.arange(lengths.sum()) % 1000
    starts = [0, *np.cumsum(lengths).tolist()]
    write_shards(tmp_path, [ids[a:b] for a, b in itertools.pairwise(starts)], most=most)
    shards = TokenShards(tmp_path)
    assert shards.tokens == len(shards) == len(ids)
    assert shards.documents.dtype == np.int64 and shards.documents.tolist() == starts
    for start, stop in itertools.product([0, 1, *starts[-9:], 60], [61, 70, *starts[-8:]]):
        if start <= stop:
            assert shards.slice(start, stop).tolist() == ids[start:stop].tolist()
    shards.verify()


def test_slices_sources_and_copies(tmp_path):
    write_shards(tmp_path, [[1, n] for n in range(9)], most=6)
    write_shards(tmp_path, [[1, 77]], split="val")
    shards = TokenShards(tmp_path, split="train")
    assert shards.tokens == 18
    assert shards.slice(3, 3).tolist() == [] and shards.slice(1, 1).dtype == np.int32
    for start, stop in ((-1, 2), (0, 19), (2, 1)):
        with pytest.raises(IndexError):
            shards.slice(start, stop)
    assert TokenShards(tmp_path, split="val").slice(0, 2).tolist() == [1, 77]
    assert TokenShards(str(tmp_path / "train-*.bin")).fingerprint == shards.fingerprint
    write_shards(tmp_path / "other", [[1, n] for n in range(8)], most=6)
    assert TokenShards(tmp_path / "other").fingerprint != shards.fingerprint
    names = [tmp_path / "train-00002.bin", str(tmp_path / "train-00000.bin")]
    assert TokenShards(names).slice(0, 12).tolist() == [1, 6, 1, 7, 1, 8, 1, 0, 1, 1, 1, 2]
    assert tokenizer_folder(tmp_path) is None
    (tmp_path / "tokenizer").mkdir()
    assert tokenizer_folder(tmp_path / "train-00000.bin") == tmp_path / "tokenizer"
    write_shards(tmp_path / "large", [list(range(1000)) * 100], vocabulary=65_537)
    shards = TokenShards(tmp_path / "large")
    assert shards.headers[0].dtype == "uint32" and dtype_for(65_536) == "uint16"
    shards.slice(0, 10)
    copy = pickle.dumps(shards)
    assert len(copy) < 5000, "a copy for another process carries no tokens"
    assert pickle.loads(copy).slice(99_990, 100_000).tolist() == list(range(990, 1000))


def test_bare_files_need_the_vocabulary_and_are_one_document(tmp_path):
    np.array([3, 500, 7], "<u2").tofile(tmp_path / "train.bin")
    np.array([3, 70_000, 7], "<u4").tofile(tmp_path / "big.bin")
    for name in ("train.json", "prepare.json"):  # files of others beside it
        (tmp_path / name).write_text('{"rows": 2}')
    shards = TokenShards(tmp_path / "train.bin", vocab_size=501)
    assert shards.slice(0, 3).tolist() == [3, 500, 7] and shards.documents.tolist() == [0, 3]
    assert shards.headers[0].tokenizer_hash == "" and shards.headers[0].separator_id is None
    assert TokenShards(tmp_path / "big.bin", vocab_size=100_000).slice(1, 2).tolist() == [70_000]
    assert "--vocab-size" in refused(tmp_path / "train.bin")


# ---------------------------------------------------------------- what is refused


def test_missing_and_unfinished_files_are_named(tmp_path):
    write_shards(tmp_path, [[1, 2]])
    said = refused(tmp_path / "train-0000.bin")
    assert "no such token file" in said and "did you mean" in said and "train-00000.bin" in said
    assert "finetune prepare" in refused(tmp_path / "nothing" / "x.bin")
    assert "*val*.bin" in refused(tmp_path, split="val")
    assert "named twice" in refused([tmp_path / "train-00000.bin", tmp_path])
    assert "no token files" in refused([])
    plan = {"format": "finetune prepared data", "version": 1, "finished": None}
    (tmp_path / "prepare.json").write_text(json.dumps(plan))
    for source in (tmp_path, tmp_path / "train-00000.bin"):
        assert "not completely prepared" in refused(source)


def test_sizes_that_do_not_fit(tmp_path):
    write_shards(tmp_path / "headed", [[1, 2, 3]])
    path = tmp_path / "headed" / "train-00000.bin"
    whole = path.read_bytes()
    for change, words in ((-1, "truncated"), (2, "longer")):
        path.write_bytes((whole + b"\0\0")[: 6 + change])
        said = refused(path)
        assert words in said and f"{6 + change} bytes" in said and "are 6" in said
    bare = tmp_path / "train.bin"
    for raw, vocab_size, words in (
        (b"\1\0\2", 10, "no multiple of 2"),
        (b"", 10, "is empty"),
    ):
        bare.write_bytes(raw)
        assert words in refused(bare, vocab_size=vocab_size)


def test_bare_files_of_other_forms_are_known(tmp_path):
    path = tmp_path / "train.bin"
    np.array([20240520, 1, 4, *range(400)], "<i4").tofile(path)
    assert "tail -c +1025" in refused(path, vocab_size=50_257)
    np.arange(1000, dtype="<u4").tofile(path)
    assert "32-bit" in refused(path, vocab_size=50_257)


def test_ids_beyond_the_vocabulary_are_found_while_reading(tmp_path):
    for position in (0, 3, 4, 7):
        ids = np.array([1, 2, 3, 4] * 2, "<u2")
        ids[position] = 10
        for name, part in zip(("a", "b"), np.split(ids, 2), strict=True):
            part.tofile(tmp_path / f"{name}-train.bin")
        shards = TokenShards(tmp_path, split="train", vocab_size=10)
        said = f"token {position % 4} is 10, and the vocabulary has 10 ids"
        with pytest.raises(DataError, match=said) as caught:
            shards.slice(0, 8)
        assert ("a-train.bin" if position < 4 else "b-train.bin") in caught.value.where
        with pytest.raises(DataError, match="is 10, and"):
            shards.verify()
    shards = TokenShards(tmp_path, split="train", vocab_size=10)
    (tmp_path / "a-train.bin").write_bytes(b"\1\0")  # it shrinks after it was opened
    with pytest.raises(DataError, match="cannot be read"):
        shards.slice(0, 8)


def test_another_tokenizer_or_vocabulary_is_refused(tmp_path):
    write_shards(tmp_path, [[1, 2]])
    assert TokenShards(tmp_path, tokenizer_hash=HASH, vocab_size=1000).tokens == 2
    assert TokenShards(tmp_path, vocab_size=1024).headers[0].vocabulary == 1000, "padded"
    said = refused(tmp_path, tokenizer_hash=OTHER_HASH)
    assert "another tokenizer" in said and HASH[:12] in said and OTHER_HASH[:12] in said
    assert "at least 1000" in refused(tmp_path, vocab_size=999)
    write_shards(tmp_path / "other", [[1, 2]], tokenizer=OTHER_HASH)
    assert "of two kinds: tokenizer" in refused([tmp_path, tmp_path / "other"])


def test_a_damaged_header_is_refused(tmp_path):
    write_shards(tmp_path, [[1, 2]])
    path = tmp_path / "train-00000.json"
    header = json.loads(path.read_text())
    for name, value, words in (
        ("dtype", "float16", "dtype is 'float16'"),
        ("tokens", -3, "tokens is -3"),
        ("tokenizer_hash", "x", "tokenizer_hash is 'x'"),
        ("version", 2, "version 2"),
    ):
        path.write_text(json.dumps(header | {name: value}))
        assert words in refused(tmp_path)
    path.write_text("{")
    assert "no JSON" in refused(tmp_path)
    path.unlink()
    path.mkdir()
    assert "the header cannot be read" in refused(tmp_path)


def test_damage_inside_is_found_by_verify(tmp_path):
    write_shards(tmp_path, [[1, 2], [1, 3]])
    for path in (tmp_path / "train-00000.bin", index_path(tmp_path / "train-00000.bin")):
        whole = path.read_bytes()
        path.write_bytes(whole[:-2] + b"\4\0")
        with pytest.raises(DataError, match=f"{path.name} was changed"):
            TokenShards(tmp_path).verify()
        path.write_bytes(whole)
    TokenShards(tmp_path).verify()
    path = index_path(tmp_path / "train-00000.bin")
    for starts, words in (
        ([0, 4], "16 bytes"),
        ([0, 2, 5], "does not fit"),
        ([0, 4, 4], "does not fit"),
        (None, "cannot be read"),
    ):
        path.unlink() if starts is None else np.array(starts, "<i8").tofile(path)
        with pytest.raises(DataError, match=words):
            TokenShards(tmp_path).documents  # noqa: B018
