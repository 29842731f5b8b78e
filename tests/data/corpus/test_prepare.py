"""`prepare`: its bytes against a reference; kills, processes and bad input."""

from __future__ import annotations

import errno
import functools
import hashlib
import itertools
import json
import logging
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from file_system_calls import PowerLoss, breaking, killed_at, watched
from launching import ROOT
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from finetune.__main__ import main as command
from finetune.data import worker_pool as processes
from finetune.data.corpus import documents as corpus
from finetune.data.corpus import preparation as tokens_prepare
from finetune.data.corpus.preparation import (
    Prepared,
    PrepareSettings,
    UnitReader,
    prepare_tokens,
    split_bound,
    tokenizer_texts,
)
from finetune.data.corpus.token_shards import (
    ShardKind,
    ShardWriter,
    TokenShards,
    finished_shards,
    tokenizer_folder,
)
from finetune.data.corpus.tokenizer import (
    bytes_per_token,
    open_tokenizer,
    separator_of,
    tokenizer_hash,
)
from finetune.data.encoding.spans import ChatTemplate
from finetune.data.formats import Message
from finetune.errors import DataError, FinetuneError, StateError
from finetune.storage.run_lock import RunLock

SENTENCE = "the model reads text, and 42 löwen jagen 北京 nachts def f(x):"
WORDS = [*SENTENCE.split(" "), "\n\t", ""]


def make_texts(number: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=rng.randrange(1, 60))) for _ in range(number)]
    return [*texts, "<|im_end|> is text", "\x00\ufffd\U0001f600\u202e", "a\r\nb\n\n  c", "\ufeffx"]


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    lines = (json.dumps({field: text, "n": 1}) + "\n" for text in texts)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def prepare(data: Any, folder: Path, *, workers: int = 1, **changes: Any) -> Prepared:
    changes = {"vocab_size": 300, "valid_fraction": 0.2, "shard_tokens": 700} | changes
    paths = tuple(map(str, data if isinstance(data, list) else [data]))
    return prepare_tokens(paths, folder, PrepareSettings(**changes), num_workers=workers)


def content(folder: Path) -> dict[str, bytes]:
    """Every file but the lock, hidden ones included."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def texts_of(folder: Path, split: str) -> list[str]:
    shards = TokenShards(folder, split=split)
    tokenizer = open_tokenizer(tokenizer_folder(folder))
    starts = shards.documents
    firsts = {int(shards.slice(start, start + 1)[0]) for start in starts[:-1]}
    assert firsts == {separator_of(tokenizer)}
    return [tokenizer.decode(shards.slice(a + 1, b)) for a, b in itertools.pairwise(starts)]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("data") / "texts.jsonl", make_texts(60))


@pytest.fixture(scope="module")
def prepared(data: Path, tmp_path_factory) -> Path:
    """`data` prepared in one go by one process. Read only."""
    folder = tmp_path_factory.mktemp("prepared") / "out"
    prepare(data, folder)
    return folder


@pytest.fixture
def copied(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared, tmp_path / "copied")


@pytest.fixture(scope="module")
def borrowed(prepared: Path) -> dict[str, Any]:
    """Settings that take the tokenizer over, which is made once."""
    return {"tokenizer": str(prepared / "tokenizer")}


# ---------------------------------------------------------------- what is made


def test_the_result_is_that_of_the_definition(data: Path, prepared: Path):
    """Split, order, ids and shard ends, computed once more; and every document comes back."""
    tokenizer = open_tokenizer(prepared / "tokenizer")
    texts = [json.loads(line)["text"] for line in data.read_text(encoding="utf-8").splitlines()]
    expected: dict[str, list[list[int]]] = {"train": [[]], "val": [[]]}
    for text in texts:
        inner = hashlib.sha256(text.encode()).digest()
        digest = hashlib.sha256(inner + (42).to_bytes(8, "little")).digest()
        split = "val" if int.from_bytes(digest[:8], "little") < 0.2 * 2**64 else "train"
        ids = [tokenizer.bos_token_id, *tokenizer(text, split_special_tokens=True)["input_ids"]]
        shards = expected[split]
        if shards[-1] and len(shards[-1]) + len(ids) > 700:
            shards.append([])
        shards[-1] += ids
    assert len(expected["train"]) > 2
    for split, shards in expected.items():
        found = sorted(prepared.glob(f"{split}-*.bin"))
        assert [np.fromfile(path, "<u2").tolist() for path in found] == shards
    train, val = texts_of(prepared, "train"), texts_of(prepared, "val")
    assert sorted(train + val) == sorted(texts)
    assert [text for text in texts if text in set(val)] == val and val
    TokenShards(prepared).verify()


def test_a_single_document_is_trained_on(borrowed, tmp_path, caplog):
    (tmp_path / "one.json").write_text('[{"content": "only this"}, {"content": " "}]')
    prepare(tmp_path / "*.json", tmp_path / "one", **borrowed, text_field="content")
    assert texts_of(tmp_path / "one", "train") == ["only this"]
    assert not list((tmp_path / "one").glob("val*")) and "only one document" in caplog.text


def test_units_of_any_size_hold_every_line_once(tmp_path, monkeypatch):
    """Text is cut at ends of lines and never inside a character."""
    lines = ["\ufeffx", "", "löwen 北京 \U0001f600", "\u2028", " ", "0" * 40, "\x00", "last"]
    rows = write_jsonl(tmp_path / "r.jsonl", lines)
    for newline, unit_bytes in itertools.product(["\n", "\r\n", ""], range(1, 60)):
        monkeypatch.setattr(corpus, "UNIT_BYTES", unit_bytes)
        text = newline.join(lines)
        (tmp_path / "t.txt").write_bytes(text.encode())
        parts, found = (
            [
                text
                for unit in corpus.units_of([path])
                for _, text in corpus.documents_of(unit, "text")
            ]
            for path in (tmp_path / "t.txt", rows)
        )
        assert found == lines and "".join(parts) == text.removeprefix("\ufeff")
        left = "".join(parts)
        for part in parts:
            left = left[len(part) :]
            assert part.endswith("\n") or "\n" not in left


# ---------------------------------------------------------------- the tokenizer


def test_the_tokenizer_has_what_chat_and_padding_need(prepared: Path):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(prepared / "tokenizer")
    assert len(tokenizer) == 300 and tokenizer.get_vocab()["<|pad|>"] == tokenizer.pad_token_id == 0
    assert tokenizer.bos_token == "<|endoftext|>" and tokenizer.eos_token == "<|im_end|>"
    messages = [Message("user", "Hi"), Message("assistant", "Ho")]
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n"
    assert ChatTemplate(tokenizer).render(messages) == text
    assert tokenizer(text)["input_ids"].count(tokenizer.eos_token_id) == 2
    sizes = bytes_per_token(tokenizer)
    assert sizes.shape == (300,) and sizes[:4].tolist() == [0, 0, 0, 0] and (sizes[4:] >= 1).all()
    for text in make_texts(20, seed=9):
        ids = tokenizer(text, split_special_tokens=True)["input_ids"]
        assert sizes[[1, *ids]].sum() == len(text.encode())
    before = tokenizer_hash(tokenizer)
    assert TokenShards(prepared, tokenizer_hash=before).headers[0].separator_id == 1
    tokenizer.chat_template = "other"
    assert tokenizer_hash(tokenizer) == before
    tokenizer.add_tokens(["<|new|>"])
    assert tokenizer_hash(tokenizer) != before


def test_bytes_per_token_of_sentencepiece_kind():
    """A vocabulary with byte fallback and a mark for the space, as Llama 2's."""
    vocabulary = [("<unk>", 0.0), ("\u2581the", -1.0), ("<0x0A>", -2.0), ("ö", -3.0)]
    backend = Tokenizer(models.Unigram(vocabulary, 0, True))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    assert bytes_per_token(tokenizer).tolist() == [0, 4, 1, 2]
    with pytest.raises(DataError, match="no token to put between documents"):
        separator_of(tokenizer)


def test_special_tokens_in_documents_are_text_unless_asked(tmp_path):
    turns = "<|im_start|>user\nquestion {}<|im_end|>\n<|im_start|>assistant\nanswer<|im_end|>\n"
    data = write_jsonl(tmp_path / "chats.jsonl", [turns.format(number) for number in range(60)])
    prepare(data, tmp_path / "text")
    prepare(data, tmp_path / "chat", special_tokens=True)
    tokenizer = open_tokenizer(tokenizer_folder(tmp_path / "chat"))
    marks = ["<|im_start|>", "<|im_end|>"]
    for folder, of_each in (("text", 0), ("chat", 2)):
        shards = TokenShards(tmp_path / folder, split="train")
        ids = shards.slice(0, shards.tokens).tolist()
        counts = [ids.count(number) for number in tokenizer.convert_tokens_to_ids(marks)]
        assert counts == [of_each * (len(shards.documents) - 1)] * 2
    with pytest.raises(StateError, match="special_tokens was True, now None"):
        prepare(data, tmp_path / "chat")


def test_the_tokenizer_sees_no_validation_document(data: Path, prepared: Path):
    units = list(corpus.units_of([data]))
    reader = UnitReader("text", 42, split_bound(0.2))
    seen = list(tokenizer_texts(units, reader, 1.0))
    assert seen == texts_of(prepared, "train")
    assert set(tokenizer_texts(units, reader, 0.5)) < set(seen)


# ---------------------------------------------------------------- kills, processes, damage


def test_several_processes_give_the_same_bytes(data: Path, prepared: Path, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "UNIT_BYTES", 900)
    found = prepare(data, tmp_path / "two", workers=2)
    assert len(found.scan.digests) > 8
    ends = ("bin", "index", "tokenizer.json")
    two, one = (
        {name: raw for name, raw in content(folder).items() if name.endswith(ends)}
        for folder in (tmp_path / "two", prepared)
    )
    assert two == one


@pytest.mark.parametrize("torn", [False, True], ids=["between calls", "within a write"])
def test_a_killed_preparation_goes_on_to_the_same_bytes(
    data, borrowed, tmp_path, monkeypatch, torn
):
    """Killed again and again at random calls, in the same folder, until it is through."""
    monkeypatch.setattr(corpus, "UNIT_BYTES", 900)
    monkeypatch.setattr("finetune.data.shards._BUFFER_BYTES", 300)
    with breaking(10**9, errno.EIO) as calls:
        prepare(data, tmp_path / "whole", **borrowed)
    most = 20 if torn else len(calls)
    expected = content(tmp_path / "whole")
    rng = random.Random(11 + torn)
    kills = 0
    for attempt in range(2):
        folder = tmp_path / f"killed{attempt}"
        work = functools.partial(prepare, data, folder, **borrowed)
        while kills < 4 * (attempt + 1) and killed_at(rng.randrange(most), work, torn=torn):
            kills += 1
            if not list(folder.glob("*.bin")):
                continue
            if json.loads((folder / "prepare.json").read_bytes())["finished"] is None:
                with pytest.raises(DataError, match="not completely prepared"):
                    TokenShards(folder)
            else:  # killed after its last write
                assert content(folder) == expected
        work()
        assert content(folder) == expected
    assert kills >= 4


def test_power_loss_leaves_no_shard_that_is_not_whole(tmp_path):
    """At every call: a .bin under its name has its header, index and ids."""
    folder = tmp_path / "out"
    folder.mkdir()
    kind = ShardKind("uint16", 300, "ab" * 32, 1, 40)
    states = set()

    def look(disk: PowerLoss) -> None:
        for names_kept in ("all", "none", "below"):
            shutil.rmtree(tmp_path / "after", ignore_errors=True)
            disk.restore(tmp_path / "after", names_kept=names_kept)
            shards = list((tmp_path / "after").glob("*.bin"))
            assert len(finished_shards(tmp_path / "after", "train", kind)) == len(shards)
            states.add(len(shards))

    disk = PowerLoss(folder, look)
    with watched(disk.hook):
        writer = ShardWriter(folder, "train", kind, [])
        for number in range(9):
            writer.add(np.arange(1, 12, dtype="uint16"), 0, number)
        writer.finish()
    assert states == {0, 1, 2, 3}


def test_what_is_finished_is_kept_and_what_is_damaged_is_made_again(
    data: Path, prepared: Path, copied: Path, caplog
):
    """The second shard is lost: the first keeps its inode, the others come back."""
    path = copied / "train-00001.bin"
    path.unlink()
    inode = (copied / "train-00000.bin").stat().st_ino
    assert prepare(data, copied).made == len(list(prepared.glob("train-*.bin"))) - 1
    assert content(copied) == content(prepared)
    raw = bytearray(path.read_bytes())
    raw[10] ^= 1
    path.write_bytes(raw)
    (copied / "val-00000.json").write_text("{")
    prepare(data, copied)
    assert content(copied) == content(prepared)
    assert "train-00001.bin was changed" in caplog.text
    assert (copied / "train-00000.bin").stat().st_ino == inode


def test_a_folder_being_mended_is_not_taken_for_whole(data: Path, prepared: Path, copied: Path):
    (copied / "train-00001.bin").unlink()
    names = {path.name for path in prepared.glob("*.bin")}
    seen = set()
    for number in range(0, 400, 40):
        if not killed_at(number, lambda: prepare(data, copied)):
            break
        try:
            TokenShards(copied)
            whole = {path.name for path in copied.glob("*.bin")} == names
            assert whole or not (copied / ".train-00001.bin.tmp").exists()
            seen.add("readable")
        except DataError as error:
            assert "not completely" in str(error)
            seen.add("refused")
    prepare(data, copied)
    assert content(copied) == content(prepared) and "refused" in seen


def test_a_full_disk_is_an_error_with_a_remedy(data: Path, borrowed, tmp_path, monkeypatch):
    def full(descriptor: int, block: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(FinetuneError, match="No space left") as caught:
        prepare(data, tmp_path / "out", **borrowed)
    assert caught.value.exit_code == 1 and "resumes" in caught.value.fix


def _dies(item: int) -> int:
    if item == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def test_results_come_in_order_and_a_killed_worker_is_an_error():
    taken = []
    with processes.ordered_map(abs, 2, start="fork") as apply:
        for number, (item, result) in enumerate(apply(taken.append(n) or n for n in range(30))):
            assert item == result == number and len(taken) <= number + 2 * processes._AHEAD
    assert len(taken) == 30
    with (
        pytest.raises(FinetuneError, match="ended by itself"),
        processes.ordered_map(_dies, 2, start="fork") as apply,
    ):
        list(apply(range(50)))


# ---------------------------------------------------------------- bad input


def error_of(data: Any, folder: Path, kind: type[FinetuneError] = DataError, **changes: Any) -> str:
    with pytest.raises(FinetuneError) as caught:
        prepare(data, folder, **changes)
    assert isinstance(caught.value, kind) and caught.value.exit_code == 2
    return str(caught.value)


def test_bad_rows_are_named_with_their_lines_and_may_be_dropped(borrowed, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "UNIT_BYTES", 40)  # the lines are counted across units
    good = [json.dumps({"text": f"row {number}"}) for number in range(8)]
    bad = ["{broken", '"just text"', '{"texts": "misspelt"}', '{"text": 5}', r'{"text": "\ud800"}']
    lines = [*good[:3], "", bad[0], good[3], *bad[1:4], *good[4:], bad[4]]
    (tmp_path / "d.jsonl").write_text("\r\n".join(lines), encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes("schön".encode("latin-1"))
    data = [tmp_path / "d.jsonl", tmp_path / "latin.txt"]
    message = error_of(data, tmp_path / "out", **borrowed)
    for words in (
        "d.jsonl:5: broken JSON",
        "d.jsonl:8: no field text: its fields are texts; did you mean --text-field texts?",
        "d.jsonl:14: half of a surrogate",
        "latin.txt: not UTF-8: byte 4",
        "6 of 14 records",
    ):
        assert words in message
    assert not (tmp_path / "out").exists()
    found = prepare(data, tmp_path / "out", **borrowed, drop_bad_rows=True)
    assert found.scan.documents == 8 and found.scan.problems.total == 6


def test_data_that_is_not_there(tmp_path, caplog):
    out = tmp_path / "out"
    (tmp_path / "empty").mkdir()
    for name, raw in (("a.txt", b" \n"), ("b.jsonl", b""), ("c.jsonl.gz", b"x")):
        (tmp_path / name).write_bytes(raw)
    for names, words in (
        (["a.tx"], "a.txt"),
        (["*.py"], "no file matches"),
        (["empty"], "no file that is known to be text"),
        (["a.txt", "b.jsonl", "a.txt"], "no document with text in 3 files"),
        (["c.jsonl.gz"], "unpack"),
    ):
        assert words in error_of([tmp_path / name for name in names], out)
    assert not out.exists() and "read more than once" in caplog.text


def test_a_folder_with_other_things_or_another_beginning(data: Path, copied: Path, tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.tex").write_text("x")
    assert "already holds other things: thesis.tex" in error_of(data, full, StateError)
    assert [path.name for path in full.iterdir()] == ["thesis.tex"]
    assert "seed was 42, now 43" in error_of(data, copied, StateError, seed=43)
    other = write_jsonl(tmp_path / "other.jsonl", make_texts(5))
    assert "begun with other data" in error_of(other, copied, StateError)
    tokenizer = copied / "tokenizer"
    shutil.rmtree(tokenizer)
    shutil.copytree(ROOT / "data_samples" / "tiny-qwen3", tokenizer)
    assert "not the one the shards were made with" in error_of(data, copied, StateError)
    plan = copied / "prepare.json"
    plan.write_text("{")
    assert "prepare.json is damaged" in error_of(data, copied, StateError)


def test_a_file_that_changes_meanwhile_and_two_at_once(data: Path, borrowed, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "d.jsonl", make_texts(10))
    real = tokens_prepare.finished_shards

    def change(*args: Any) -> Any:
        write_jsonl(path, make_texts(10, seed=1))
        return real(*args)

    monkeypatch.setattr(tokens_prepare, "finished_shards", change)
    message = error_of(path, tmp_path / "out", **borrowed)
    assert "changed while it was prepared" in message and "d.jsonl" in message
    monkeypatch.setattr(tokens_prepare, "_LOCK_WAIT_SECONDS", 0.0)
    with RunLock(tmp_path / "other"):
        assert "another run works in this folder" in error_of(data, tmp_path / "other", StateError)


# ---------------------------------------------------------------- parquet, as FineWeb and ClimbMix come

TEXTS = [
    f"Document {number}: " + "löwen jagen 北京 nachts. " * (number % 5) for number in range(60)
]


def write_parquet(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)
    return path


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Shards whose schemas, compressions and row groups differ, as a hub has them."""
    folder = tmp_path / "shards"
    first = {"text": TEXTS[:20], "id": list(range(20))}
    write_parquet(folder / "CC-1" / "0.parquet", first, row_group_size=3, compression="snappy")
    large = pyarrow.array(TEXTS[20:40], pyarrow.large_string())
    scored = {"score": [{"edu": 0.5}] * 20, "text": large}
    write_parquet(folder / "CC-1" / "1.parquet", scored, row_group_size=1, compression="zstd")
    coded = pyarrow.array(TEXTS[40:]).dictionary_encode()
    write_parquet(folder / "CC-2" / "0.parquet", {"url": ["u"] * 20, "text": coded})
    write_parquet(folder / "CC-2" / "1.parquet", {"text": pyarrow.array([], pyarrow.string())})
    (folder / ".gitattributes").write_text("*.parquet filter=lfs")
    return folder


def test_folders_as_hubs_have_them(shards: Path, borrowed, tmp_path, caplog, monkeypatch):
    plain = write_jsonl(tmp_path / "d.jsonl", TEXTS)
    prepare(plain, tmp_path / "plain", **borrowed)
    expected = {name: raw for name, raw in content(tmp_path / "plain").items() if "bin" in name}
    monkeypatch.setattr(tokens_prepare, "_ENCODED_BYTES", 200)  # a row group in several parts
    caplog.set_level(logging.INFO, "finetune")
    found = prepare(shards, tmp_path / "out", **borrowed)
    assert {name: raw for name, raw in content(found.folder).items() if "bin" in name} == expected
    assert "4 parquet files: 60 records in 29 row groups" in caplog.text
    monkeypatch.setattr(corpus, "LARGE_GROUP_BYTES", 150)
    (shards / "README.md").write_text("# A data set")
    assert prepare(shards, tmp_path / "read", **borrowed).scan.documents == 61
    assert "README.md" in caplog.text and f"--data '{shards}/**/*.parquet'" in caplog.text
    assert "3 parquet files have row groups of more than 0 GiB" in caplog.text


def test_every_bad_file_is_named_before_any_is_read(shards: Path, tmp_path, monkeypatch):
    unread = lambda *given: pytest.fail("a record was read")  # noqa: E731
    monkeypatch.setattr(tokens_prepare, "documents_of", unread)
    paths = [shards / "CC-3" / f"{number}.parquet" for number in range(4)]
    paths[0].parent.mkdir()
    paths[0].write_bytes((shards / "CC-1" / "0.parquet").read_bytes()[:-100])
    write_parquet(paths[1], {"texts": TEXTS})
    write_parquet(paths[2], {"text": list(range(5))})
    paths[3].write_bytes(b"")
    message = error_of(shards, tmp_path / "out", FinetuneError)
    said = ("was cut off", "did you mean --text-field texts?", "holds int64", "was cut off")
    for path, words in zip(paths, said, strict=True):
        assert str(path) in message and words in message
    assert "4. " in message and "5. " not in message and "CC-1" not in message


def test_broken_pages_nulls_and_texts_that_are_none(tmp_path):
    options: dict[str, Any] = {"row_group_size": 20, "use_dictionary": False}
    # Without checksums only what cannot be unpacked is known to be broken.
    for more in ({"compression": "zstd"}, {"compression": "none", "write_page_checksum": True}):
        path = write_parquet(tmp_path / "d.parquet", {"text": TEXTS}, **options, **more)
        raw = bytearray(path.read_bytes())
        column = pyarrow.parquet.read_metadata(path).row_group(1).column(0)
        raw[column.data_page_offset + column.total_compressed_size // 2] ^= 1
        path.write_bytes(raw)
        assert "row group 1 cannot be read" in error_of(path, tmp_path / "out")
    raw_texts = pyarrow.array([b"good", b"caf\xe9", None, b" ", b"fine"], pyarrow.binary())
    columns = {"content": raw_texts.view(pyarrow.string())}
    path = write_parquet(tmp_path / "d.parquet", columns, row_group_size=2)
    message = error_of(path, tmp_path / "out", text_field="content")
    assert f"{path}:2: not UTF-8: byte 4 of the text" in message
    assert f"{path}:3: content is no text" in message
    found = prepare(path, tmp_path / "out", text_field="content", drop_bad_rows=True)
    assert (found.scan.documents, found.scan.empty, found.scan.problems.total) == (2, 1, 2)


# ---------------------------------------------------------------- the command


def test_the_command_on_the_standard_library(tmp_path, capsys):
    """Real files: what any machine with Python has."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "x.png").write_bytes(b"\x89PNG")
    files = sorted(Path(json.__file__).parent.parent.glob("[a-c]*.py"))[:20]
    for path in files:
        shutil.copy(path, tmp_path / "lib")
    out = tmp_path / "out"
    words = ["--data", str(tmp_path / "lib"), "--output_dir", str(out), "--vocab-size=600"]
    assert command(["prepare", *words]) == 0
    said = capsys.readouterr().out
    assert "20 documents" in said and "600 ids" in said
    texts = [*texts_of(out, "train"), *texts_of(out, "val")]
    assert sorted(texts) == sorted(path.read_bytes().decode() for path in files)


NEEDED = ["--data", "x", "--output-dir", "y"]


def test_flags_that_are_refused(capsys):
    for words, expected in (
        ([*NEEDED, "--vocab-size", "259"], "too small,at least 260"),
        ([*NEEDED, "--tokenizer", "t", "--vocab-size", "500"], "has its own"),
        (["x.txt", "--output", "y"], "'x.txt' belongs to no flag,is called --output-dir here"),
    ):
        assert command(["prepare", *words]) == 2
        error = capsys.readouterr().err
        assert all(part in error for part in expected.split(",")), error


def test_ctrl_c_says_how_to_go_on(monkeypatch, capsys):
    def stopped(*args: Any, **kwargs: Any):
        raise KeyboardInterrupt

    monkeypatch.setattr(tokens_prepare, "prepare_tokens", stopped)
    assert command(["prepare", *NEEDED]) == 3
    assert "the same command resumes" in capsys.readouterr().err
