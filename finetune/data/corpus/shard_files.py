"""Token files on disk: which they are, and whether they can be what they are taken for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from finetune.config.names import nearest
from finetune.data.corpus.shard_header import (
    DTYPES,
    INDEX_DTYPE,
    PLAN_FILE,
    PLAN_FORMAT,
    TOKENIZER_FOLDER,
    TokenHeader,
    dtype_for,
    header_path,
    index_path,
    read_header,
)
from finetune.data.reading.files import expand_each, glob_files, named_twice
from finetune.errors import DataError
from finetune.storage.durable_files import hash_file

# llm.c and modded-nanogpt put 256 int32 before the ids; the first is this (llm.c,
# dev/data/data_common.py).
_FOREIGN_MAGIC, _FOREIGN_HEADER_BYTES = 20240520, 1024
_LOOKED_AT_IDS = 4096


def find_shards(
    source: str | Path | Sequence[str | Path], split: str | None = None
) -> tuple[Path, ...]:
    """The .bin files that a file, a folder, a glob or a list of them names; within one sorted by
    name.

    Raises:
        DataError: nothing there; `Problems` for several.
    """
    sources = [source] if isinstance(source, (str, Path)) else source
    found = expand_each(sources, lambda given: _find(given, split))
    if not found:
        raise DataError("no token files were named", fix="give a .bin file, a folder or a glob")
    if twice := named_twice(found):
        raise DataError("token files are named twice", ", ".join(twice), "name each file once")
    return tuple(found)


def _find(given: str, split: str | None) -> list[Path]:
    path = Path(given).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        pattern = f"*{split}*.bin" if split else "*.bin"
        found = sorted(
            one for one in path.glob(pattern) if one.is_file() and not one.name.startswith(".")
        )
        if not found:
            raise DataError(
                f"the folder holds no {pattern} file",
                given,
                "run `python -m finetune prepare` first",
            )
        return found
    if matches := [one for one in glob_files(path) if one.suffix == ".bin"]:
        return matches
    guess = nearest(path.name, [one.name for one in path.parent.glob("*.bin")])
    fix = (
        f"did you mean {path.parent / guess}?"
        if guess
        else "`python -m finetune prepare` makes token files from text"
    )
    raise DataError("there is no such token file", given, fix)


def checked_header(path: Path, vocab_size: int | None, tokenizer_hash: str | None) -> TokenHeader:
    """The header of a shard after every check that does not read its ids.

    Raises:
        DataError: unfinished, truncated, of another tokenizer or vocabulary, or bare and not what
            it seems.
    """
    size_bytes = path.stat().st_size
    header = read_header(path)
    if header is None:
        return _header_of_raw(path, size_bytes, vocab_size)
    if size_bytes != header.size_bytes:
        state = "truncated" if size_bytes < header.size_bytes else "longer than it should be"
        raise DataError(
            f"the file is {state}: {size_bytes} bytes, and {header.tokens} {header.dtype} tokens in"
            f" its header are {header.size_bytes}",
            str(path),
            "copy it again whole, or run `python -m finetune prepare` again",
        )
    if tokenizer_hash is not None and header.tokenizer_hash != tokenizer_hash:
        raise DataError(
            f"the file was made with another tokenizer ({header.tokenizer_hash[:12]}) than the"
            f" run's ({tokenizer_hash[:12]}): its ids would mean other text",
            str(path),
            f"use the tokenizer that lies beside it ({path.parent / TOKENIZER_FOLDER}), or prepare"
            " the data again",
        )
    if vocab_size is not None and header.vocabulary > vocab_size:
        raise DataError(
            f"the file has ids up to {header.vocabulary - 1}, and the model a vocabulary of"
            f" {vocab_size}",
            str(path),
            f"use a vocabulary size of at least {header.vocabulary}",
        )
    return header


def check_finished(folder: Path) -> None:
    """DataError: the folder's preparation was stopped before its end."""
    try:
        content = json.loads((folder / PLAN_FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return  # ValueError: not ours; our own file is only ever replaced as a whole
    if (
        isinstance(content, dict)
        and content.get("format") == PLAN_FORMAT
        and content.get("finished") is None
    ):
        raise DataError(
            "the data in this folder is not completely prepared",
            str(folder),
            "run the same `python -m finetune prepare` again: it resumes where it was stopped",
        )


def _header_of_raw(path: Path, size_bytes: int, vocab_size: int | None) -> TokenHeader:
    """A file of bare ids: uint16 for a vocabulary of at most 65,536, else uint32; one document."""
    if size_bytes == 0:
        raise DataError("the file is empty", str(path), "name a file with tokens")
    if vocab_size is None:
        raise DataError(
            f"the file has no header ({header_path(path).name}), so its vocabulary is unknown",
            str(path),
            "give --vocab-size, the number of ids of the tokenizer that made it",
        )
    dtype = dtype_for(vocab_size)
    item_bytes = np.dtype(DTYPES[dtype]).itemsize
    if size_bytes % item_bytes:
        raise DataError(
            f"the file is {size_bytes} bytes, which is no multiple of {item_bytes} ({dtype} for"
            f" {vocab_size} ids)",
            str(path),
            "copy it again whole; a vocabulary of at most 65,536 ids means uint16, a larger one"
            " uint32",
        )
    _refuse_foreign(path, dtype)
    return TokenHeader(dtype, size_bytes // item_bytes, 1, vocab_size)


def _refuse_foreign(path: Path, dtype: str) -> None:
    """Forms of other programs that would be silently read as wrong tokens."""
    with path.open("rb") as file:
        head = file.read(_LOOKED_AT_IDS * 2)
    if len(head) >= 4 and int.from_bytes(head[:4], "little") == _FOREIGN_MAGIC:
        raise DataError(
            f"the file begins with the {_FOREIGN_HEADER_BYTES}-byte header of llm.c, which would be"
            " read as tokens",
            str(path),
            f"take it off: tail -c +{_FOREIGN_HEADER_BYTES + 1} {path.name} > bare-{path.name}",
        )
    pairs = np.frombuffer(head[: len(head) // 4 * 4], dtype="<u2").reshape(-1, 2)
    if dtype == "uint16" and len(pairs) >= 64 and not pairs[:, 1].any() and pairs[:, 0].any():
        raise DataError(
            "every second uint16 is 0: the file probably holds 32-bit ids",
            str(path),
            "convert it with numpy: numpy.fromfile(OLD, 'u4').astype('u2').tofile(NEW)",
        )


def check_alike(paths: tuple[Path, ...], headers: tuple[TokenHeader, ...]) -> None:
    """DataError: shards of one stream that are of different preparations."""
    for path, header in zip(paths, headers, strict=True):
        for name, title in (
            ("tokenizer_hash", "tokenizer"),
            ("vocabulary", "vocabulary"),
            ("dtype", "number format"),
        ):
            here, there = getattr(header, name), getattr(headers[0], name)
            if here != there:
                raise DataError(
                    f"the files are of two kinds: {title} {there or 'unknown'} and"
                    f" {here or 'unknown'}",
                    f"{paths[0]} and {path}",
                    "name files of one preparation only",
                )


def read_index(path: Path, header: TokenHeader) -> np.ndarray:
    """Where the documents of a shard start, int64 `(documents + 1,)`; a bare file is one document.

    Raises:
        DataError: an index that is missing, truncated, or does not fit its shard.
    """
    if not header.sha256:
        return np.array([0, header.tokens], dtype=np.int64)
    source = index_path(path)
    fix = "copy it again with its .bin, or run `python -m finetune prepare` again"
    try:
        starts = np.fromfile(source, dtype=INDEX_DTYPE).astype(np.int64, copy=False)
    except OSError as error:
        raise DataError(
            f"the document index cannot be read: {error.strerror}", str(source), fix
        ) from error
    size_bytes, wanted_bytes = source.stat().st_size, 8 * (header.documents + 1)
    if size_bytes != wanted_bytes:
        what = (
            f"has {size_bytes} bytes, and {header.documents} documents in the header need"
            f" {wanted_bytes}"
        )
        raise DataError(f"the document index {what}", str(source), fix)
    if starts[0] != 0 or starts[-1] != header.tokens or (np.diff(starts) <= 0).any():
        raise DataError("the document index does not fit its shard", str(source), fix)
    return starts


def damage(path: Path, header: TokenHeader) -> str | None:
    """What is wrong with a finished shard, by size and SHA-256 of its two files; None where nothing
    is.
    """
    tokens = (path, header.size_bytes, header.sha256)
    index = (index_path(path), 8 * (header.documents + 1), header.index_sha256)
    for file, size_bytes, digest in (tokens, index):
        if not file.is_file():
            return f"{file.name} is missing"
        if file.stat().st_size != size_bytes:
            return f"{file.name} has {file.stat().st_size} bytes instead of {size_bytes}"
        if hash_file(file) != digest:
            return f"{file.name} was changed: its SHA-256 is not the header's"
    return None
