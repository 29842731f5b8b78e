"""Token shards, a public file format (frozen by a test), as one stream: found, mapped into memory,
and checked before and while they are read.

NAME.bin    the ids, one after another, little-endian: uint16 if every id is below 65,536, else
            uint32
NAME.index  int64, little-endian, (documents + 1,): where each document starts, and the
            number of tokens
NAME.json   the header, `TokenHeader`

The `.bin` is the last of the three to get its name, so a shard under its name is whole.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from finetune.config.names import nearest
from finetune.data.reading.files import expand_each, glob_files, named_twice
from finetune.data.shards import damage
from finetune.errors import DataError, FinetuneError, raise_problems
from finetune.storage.durable_files import hash_file, read_bytes

FORMAT = "finetune tokens"
# What `python -m finetune prepare` writes next to the shards; its "finished" is null until all is
# written.
PLAN_FILE, PLAN_FORMAT, PLAN_VERSION = "prepare.json", "finetune prepared data", 1
TOKENIZER_FOLDER = "tokenizer"
VERSION = 1
IDS_OF_UINT16 = 1 << 16
INDEX_DTYPE = "<i8"
DTYPES = {"uint16": "<u2", "uint32": "<u4"}
_LIMIT_BYTES = 1 << 20
_MAKE_AGAIN = "delete the shard's .bin, .index and .json and run `python -m finetune prepare` again"


def dtype_for(vocabulary: int) -> str:
    """The name of the smallest data type that holds every id of a vocabulary."""
    return "uint16" if vocabulary <= IDS_OF_UINT16 else "uint32"


@dataclass(frozen=True)
class TokenHeader:
    """What is known of one shard, or of several as one."""

    dtype: str  # uint16 or uint32
    tokens: int
    documents: int  # a file without header counts as one document
    vocabulary: int  # number of ids; every id is below it
    tokenizer_hash: str = ""  # see `tokenizer.tokenizer_hash`; empty where it is unknown
    separator_id: int | None = None  # the id every document starts with; None where it is unknown
    sha256: str = ""  # of the .bin; of several shards, of their list
    index_sha256: str = ""  # of the .index
    # (unit, document in it) of the input after the last document; for restarts
    continues_at: tuple[int, int] = (0, 0)

    @property
    def size_bytes(self) -> int:
        """Of the .bin file."""
        return self.tokens * np.dtype(DTYPES[self.dtype]).itemsize

    def to_json(self) -> str:
        """The content of NAME.json."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1) + "\n"


def header_path(path: Path) -> Path:
    """NAME.json of NAME.bin."""
    return path.with_suffix(".json")


def index_path(path: Path) -> Path:
    """NAME.index of NAME.bin."""
    return path.with_suffix(".index")


def read_header(path: Path) -> TokenHeader | None:
    """The header of a .bin file; None where there is no file of that name, or it is no header of
    ours.

    Raises:
        DataError: a header of ours that cannot be read, of another version, or with a value that
            cannot be.
    """
    source = header_path(path)
    try:
        content = json.loads(read_bytes(source, _LIMIT_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(
            f"the header cannot be read: {error.strerror}", str(source), _MAKE_AGAIN
        ) from error
    except ValueError as error:
        raise DataError(f"the header is no JSON: {error}", str(source), _MAKE_AGAIN) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return None
    if content.get("version") != VERSION:
        raise DataError(
            f"the header has version {content.get('version')!r}, and this program reads version"
            f" {VERSION}",
            str(source),
            "use the version of finetune that wrote it, or prepare the data again",
        )
    values: dict[str, Any] = {field.name: content.get(field.name) for field in fields(TokenHeader)}
    wrong = [f"{name} is {value!r}" for name, value in values.items() if not _RULES[name](value)]
    if wrong:
        raise DataError(f"the header is damaged: {', '.join(wrong)}", str(source), _MAKE_AGAIN)
    values["continues_at"] = tuple(values["continues_at"])
    return TokenHeader(**values)


def _count(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


def _hash(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


_RULES = {
    "dtype": lambda value: value in DTYPES,
    "tokens": lambda value: _count(value, 1),
    "documents": lambda value: _count(value, 1),
    "vocabulary": lambda value: _count(value, 1),
    "tokenizer_hash": _hash,
    "separator_id": lambda value: value is None or _count(value),
    "sha256": _hash,
    "index_sha256": _hash,
    "continues_at": lambda value: (
        isinstance(value, list) and len(value) == 2 and all(map(_count, value))
    ),
}


# ---------------------------------------------------------------- files and their checks


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
    groups = expand_each(sources, lambda given: _find(given, split))
    found = tuple(itertools.chain.from_iterable(groups))
    if not found:
        raise DataError("no token files were named", fix="give a .bin file, a folder or a glob")
    if twice := named_twice(found):
        raise DataError("token files are named twice", ", ".join(twice), "name each file once")
    return found


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


def shard_damage(path: Path, header: TokenHeader) -> str | None:
    """What is wrong with a finished shard, by size and SHA-256 of its two files; None if nothing
    is.
    """
    return damage(
        {
            path: (header.size_bytes, header.sha256),
            index_path(path): (8 * (header.documents + 1), header.index_sha256),
        }
    )


class TokenShards:
    """A stream of tokens over one or several .bin files in order of their names. Copies to
    processes are small.

    Args:
        source: a file, a folder, a glob, or a list of them.
        split: of a folder, which files: "train" (`*train*.bin`), "val" (`*val*.bin`), None: all.
        vocab_size: number of ids of the model; needed for files without header, and no file may
            have more.
        tokenizer_hash: the tokenizer of the run; None: not compared.
        embeddings: of the model, where it may have fewer than its tokenizer has ids; an id above is
            refused when read.

    Attributes:
        paths: the files.
        headers: their headers; those of files without one are made from their size and
            `vocab_size`.
        tokens: how many there are in all.

    Raises:
        DataError: missing, empty, truncated or unfinished files, another tokenizer, other number of
            ids, no header and no `vocab_size`; `Problems` for several.
    """

    def __init__(
        self,
        source: str | Path | Sequence[str | Path],
        *,
        split: str | None = None,
        vocab_size: int | None = None,
        tokenizer_hash: str | None = None,
        embeddings: int | None = None,
    ) -> None:
        self.embeddings = embeddings
        self.paths = find_shards(source, split)
        for folder in dict.fromkeys(path.parent for path in self.paths):
            check_finished(folder)
        problems: list[FinetuneError] = []
        headers: list[TokenHeader] = []
        for path in self.paths:
            try:
                headers.append(checked_header(path, vocab_size, tokenizer_hash))
            except DataError as problem:
                problems.append(problem)
        raise_problems(problems)
        self.headers = tuple(headers)
        check_alike(self.paths, self.headers)
        self._ends = np.cumsum([header.tokens for header in self.headers], dtype=np.int64)
        self._maps: dict[int, np.ndarray] = {}
        self.tokens = int(self._ends[-1])

    def __len__(self) -> int:
        return self.tokens

    def __getstate__(self) -> dict[str, Any]:
        # a memory map would be copied as a whole to another process
        return {**self.__dict__, "_maps": {}}

    @cached_property
    def header(self) -> TokenHeader:
        """The stream as if it were one shard; `sha256` is the fingerprint."""
        first = self.headers[0]
        return TokenHeader(
            first.dtype,
            self.tokens,
            sum(header.documents for header in self.headers),
            first.vocabulary,
            first.tokenizer_hash,
            first.separator_id,
            self.fingerprint,
        )

    @cached_property
    def fingerprint(self) -> str:
        """What the stream holds, as 64 hexadecimal digits: from the headers, not from names and
        places.
        """
        known = [
            [header.sha256 or hash_file(path), header.dtype, header.tokens, header.vocabulary]
            for path, header in zip(self.paths, self.headers, strict=True)
        ]
        return hashlib.sha256(
            json.dumps([known, self.headers[0].tokenizer_hash]).encode()
        ).hexdigest()

    @cached_property
    def documents(self) -> np.ndarray:
        """int64 `(documents + 1,)`: where each document starts, and at the end the number of
        tokens.

        Raises:
            DataError: an index that is missing, truncated, or does not fit its shard.
        """
        parts = [np.zeros(1, dtype=np.int64)]
        offset = 0
        for path, header in zip(self.paths, self.headers, strict=True):
            parts.append(read_index(path, header)[1:] + offset)
            offset += header.tokens
        return np.concatenate(parts)

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop` of the stream as int32 `(stop - start,)`, across shards.

        Raises:
            IndexError: the interval is not inside the stream.
            DataError: an id beyond the vocabulary, with its place; or a file that shrank.
        """
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens {start} to {stop} of a stream of {self.tokens}")
        parts = []
        number = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            begin = int(self._ends[number]) - self.headers[number].tokens
            end = min(stop, int(self._ends[number]))
            parts.append(self._part(number, start - begin, end - begin))
            start, number = end, number + 1
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int32), *parts])

    def verify(self) -> None:
        """Read everything once: the SHA-256 of every headed shard and its index, and every id.

        Raises:
            DataError: what is damaged; `Problems` for several.
        """
        problems: list[FinetuneError] = []
        for number, (path, header) in enumerate(zip(self.paths, self.headers, strict=True)):
            try:
                fault = shard_damage(path, header) if header.sha256 else None
                if fault:
                    raise DataError(
                        fault, str(path), "copy it again, or run `python -m finetune prepare` again"
                    )
                for start in range(0, header.tokens, 1 << 22):
                    self._part(number, start, min(start + (1 << 22), header.tokens))
            except DataError as problem:
                problems.append(problem)
        raise_problems(problems)

    def _part(self, number: int, start: int, stop: int) -> np.ndarray:
        header = self.headers[number]
        if number not in self._maps:
            shape = (header.tokens,)
            try:
                self._maps[number] = np.memmap(
                    self.paths[number], DTYPES[header.dtype], "r", shape=shape
                )
            # ValueError: shorter than when it was opened first
            except (OSError, ValueError) as error:
                raise DataError(
                    f"the shard cannot be read: {error}",
                    str(self.paths[number]),
                    "do not change shards in use",
                ) from error
        ids = self._maps[number][start:stop]
        known = min(header.vocabulary, self.embeddings or header.vocabulary)
        if len(ids) and int(ids.max()) >= known:
            position = int(np.argmax(ids >= known))
            raise DataError(
                f"token {start + position} is {int(ids[position])}, and the vocabulary has"
                f" {known} ids",
                str(self.paths[number]),
                "use the vocabulary size of the tokenizer that made the file, or prepare the data"
                " again",
            )
        return ids.astype(np.int32)


def tokenizer_folder(
    source: str | Path | Sequence[str | Path], split: str | None = None
) -> Path | None:
    """The tokenizer that `prepare` saved next to the shards, or None."""
    folder = find_shards(source, split)[0].parent / TOKENIZER_FOLDER
    return folder if folder.is_dir() else None
