"""Token shards, a public file format (frozen by a test): written one after another, each
atomically, and read as one stream, checked before and while they are read.

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
import logging
import re
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from finetune.config.fields import nearest
from finetune.data.reading.files import expand_each, glob_files, named_twice
from finetune.data.shards import ShardFile, damage
from finetune.errors import DataError, FinetuneError, StateError, raise_problems
from finetune.storage.durable_files import (
    hash_file,
    read_bytes,
    remove_tree,
    replace_file,
    sync_folder,
)

logger = logging.getLogger("finetune")

FORMAT = "finetune tokens"
# What `python -m finetune prepare` writes next to the shards; its "finished" is null until all is
# written.
PLAN_FILE, PLAN_FORMAT, PLAN_VERSION = "prepare.json", "finetune prepared data", 1
TOKENIZER_FOLDER = "tokenizer"
VERSION = 1
IDS_OF_UINT16 = 1 << 16
INDEX_DTYPE = "<i8"
DTYPES = {"uint16": "<u2", "uint32": "<u4"}
LIMIT_BYTES = 1 << 20  # of a header or a plan
SPLITS = ("train", "val")
SHARD_NAME = re.compile(r"\.?(train|val)-\d{5}\.(bin|index|json)(\.tmp)?")
_MAX_SHARDS = 100_000  # five digits: names sort as numbers do
_MAKE_AGAIN = "delete the shard's .bin, .index and .json and run `python -m finetune prepare` again"


def dtype_for(vocabulary: int) -> str:
    """Return the name of the smallest data type that holds every id of a vocabulary."""
    return "uint16" if vocabulary <= IDS_OF_UINT16 else "uint32"


@dataclass(frozen=True)
class TokenHeader:
    """Facts about one shard."""

    dtype: str  # uint16 or uint32
    tokens: int
    documents: int  # a file without header counts as one document
    vocabulary: int  # number of ids; every id is below it
    tokenizer_hash: str = ""  # see `tokenizer.tokenizer_hash`; empty where it is unknown
    separator_id: int | None = None  # the id every document starts with; None where it is unknown
    sha256: str = ""  # of the .bin
    index_sha256: str = ""  # of the .index
    # (unit, document in it) of the input after the last document; for restarts
    continues_at: tuple[int, int] = (0, 0)

    @property
    def size_bytes(self) -> int:
        """Size of the .bin file in bytes."""
        return self.tokens * np.dtype(DTYPES[self.dtype]).itemsize

    def to_json(self) -> str:
        """Return the content of NAME.json."""
        return (
            json.dumps(
                {
                    "format": FORMAT,
                    "version": VERSION,
                    **asdict(self),
                },
                indent=1,
            )
            + "\n"
        )


def header_path(path: Path) -> Path:
    """NAME.json of NAME.bin."""
    return path.with_suffix(".json")


def index_path(path: Path) -> Path:
    """NAME.index of NAME.bin."""
    return path.with_suffix(".index")


def read_header(path: Path) -> TokenHeader | None:
    """Read the header of a .bin file; None if it does not exist or is not in our format.

    Raises:
        DataError: our header cannot be read, has another version, or has an impossible value.
    """
    source = header_path(path)
    try:
        content = json.loads(read_bytes(source, LIMIT_BYTES))
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
    names = [field.name for field in fields(TokenHeader)]
    values: dict[str, Any] = {name: content.get(name) for name in names}
    wrong = [f"{name} is {value!r}" for name, value in values.items() if not _is_valid(name, value)]
    if wrong:
        raise DataError(f"the header is damaged: {', '.join(wrong)}", str(source), _MAKE_AGAIN)
    values["continues_at"] = tuple(values["continues_at"])
    return TokenHeader(**values)


def _is_valid(name: str, value: Any) -> bool:
    """Return whether a field of a header may have this value."""
    if name == "dtype":
        return value in DTYPES
    if name in ("tokenizer_hash", "sha256", "index_sha256"):
        return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None
    if name == "continues_at":
        return isinstance(value, list) and len(value) == 2 and all(map(_is_count, value))
    if name == "separator_id":
        return value is None or _is_count(value)
    return _is_count(value) and value > 0


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


# ---------------------------------------------------------------- files and their checks


# llm.c and modded-nanogpt put 256 int32 before the ids; the first is this (llm.c,
# dev/data/data_common.py).
_FOREIGN_MAGIC, _FOREIGN_HEADER_BYTES = 20240520, 1024
_LOOKED_AT_IDS = 4096


def find_shards(
    source: str | Path | Sequence[str | Path], split: str | None = None
) -> tuple[Path, ...]:
    """Return the .bin files that a file, a folder, a glob or a list of them names; within one
    sorted by name.

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
    """Find the .bin files that one path or glob names."""
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
    """Return the header of a shard after every check that does not read its ids.

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
    """Describe a file of bare ids: uint16 for a vocabulary of at most 65,536, otherwise uint32; one
    document.
    """
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
    """Reject formats of other programs that would silently be read as wrong tokens."""
    with path.open("rb") as file:
        head = file.read(_LOOKED_AT_IDS * 2)
    if len(head) >= 4 and int.from_bytes(head[:4], "little") == _FOREIGN_MAGIC:
        raise DataError(
            f"the file begins with the {_FOREIGN_HEADER_BYTES}-byte header of llm.c, which would be"
            " read as tokens",
            str(path),
            f"take it off: tail -c +{_FOREIGN_HEADER_BYTES + 1} {path.name} > bare-{path.name}",
        )
    ids = np.frombuffer(head[: len(head) // 4 * 4], dtype="<u2")
    is_32_bit = len(ids) >= 128 and not ids[1::2].any() and ids[::2].any()
    if dtype == "uint16" and is_32_bit:
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
    """Read where a shard's documents start, int64 `(documents + 1,)`; a bare file is one document.

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
    size_bytes = source.stat().st_size
    wanted_bytes = 8 * (header.documents + 1)
    if size_bytes != wanted_bytes:
        raise DataError(
            f"the document index has {size_bytes} bytes, and {header.documents} documents in the"
            f" header need {wanted_bytes}",
            str(source),
            fix,
        )
    rises = (np.diff(starts) > 0).all()
    if starts[0] != 0 or starts[-1] != header.tokens or not rises:
        raise DataError("the document index does not fit its shard", str(source), fix)
    return starts


def shard_damage(path: Path, header: TokenHeader) -> str | None:
    """Return what is wrong with a finished shard, by size and SHA-256 of its files; None if nothing
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
    def fingerprint(self) -> str:
        """Hash of the stream's content, as 64 hexadecimal digits: from the headers, not from names
        and paths.
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
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

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
        """Read tokens `start` to `stop` of one shard, as int32.

        Raises:
            DataError: an id beyond the vocabulary, or a file that shrank.
        """
        header = self.headers[number]
        path = str(self.paths[number])
        if number not in self._maps:
            try:
                self._maps[number] = np.memmap(
                    path, DTYPES[header.dtype], "r", shape=(header.tokens,)
                )
            # ValueError: shorter than when it was opened first
            except (OSError, ValueError) as error:
                raise DataError(
                    f"the shard cannot be read: {error}", path, "do not change shards in use"
                ) from error
        ids = self._maps[number][start:stop]
        known = min(header.vocabulary, self.embeddings or header.vocabulary)
        if len(ids) and int(ids.max()) >= known:
            position = int(np.argmax(ids >= known))
            raise DataError(
                f"token {start + position} is {int(ids[position])}, and the vocabulary has"
                f" {known} ids",
                path,
                "use the vocabulary size of the tokenizer that made the file, or prepare the data"
                " again",
            )
        return ids.astype(np.int32)


def tokenizer_folder(
    source: str | Path | Sequence[str | Path], split: str | None = None
) -> Path | None:
    """Return the tokenizer that `prepare` saved next to the shards, or None."""
    folder = find_shards(source, split)[0].parent / TOKENIZER_FOLDER
    return folder if folder.is_dir() else None


# ---------------------------------------------------------------- writing


@dataclass(frozen=True)
class ShardKind:
    """Facts that all shards of one preparation share; see `TokenHeader`."""

    dtype: str
    vocabulary: int
    tokenizer_hash: str
    separator_id: int
    shard_tokens: int


def shard_path(folder: Path, split: str, number: int) -> Path:
    """`train-00000.bin`, `val-00000.bin`, ..."""
    return folder / f"{split}-{number:05d}.bin"


class ShardWriter:
    """Documents -> shards of one split, in order.

    A shard ends before the document that would bring it above `shard_tokens`; a longer document
    fills a shard alone.

    Args:
        folder: where the shards go; only this writer writes shards of its split there.
        finished: headers of the existing shards; writing resumes after them.
    """

    _file: ShardFile | None  # of the unfinished shard
    _tokens: int
    _starts: array[int]

    def __init__(
        self, folder: Path, split: str, kind: ShardKind, finished: list[TokenHeader]
    ) -> None:
        self.folder = folder
        self.split = split
        self.kind = kind
        self.headers = list(finished)
        self._begin()

    @property
    def position(self) -> tuple[int, int]:
        """(unit, document in it) of the input from which this split resumes."""
        return self.headers[-1].continues_at if self.headers else (0, 0)

    def add(self, ids: np.ndarray, unit: int, document: int) -> None:
        """Append one document (its separator included) that is number `document` of an input
        unit.
        """
        if self._tokens and self._tokens + len(ids) > self.kind.shard_tokens:
            self.finish()
        if self._file is None:
            self._file = ShardFile(shard_path(self.folder, self.split, len(self.headers)))
        self._file.write(ids.astype(DTYPES[self.kind.dtype], copy=False))
        self._starts.append(self._tokens)
        self._tokens += len(ids)
        self._continues_at = (unit, document + 1)

    def finish(self) -> None:
        """Give the shard its name, durably: index, header, then the tokens. Nothing without a
        document.
        """
        if self._file is None:
            return
        index = np.array([*self._starts, self._tokens], dtype=INDEX_DTYPE).tobytes()
        header = TokenHeader(
            self.kind.dtype,
            self._tokens,
            len(self._starts),
            self.kind.vocabulary,
            self.kind.tokenizer_hash,
            self.kind.separator_id,
            self._file.finish(),
            hashlib.sha256(index).hexdigest(),
            self._continues_at,
        )
        replace_file(index_path(self._file.path), index)
        replace_file(header_path(self._file.path), header.to_json().encode())
        self._file.publish()
        self.headers.append(header)
        self._begin()

    def close(self) -> None:
        """Let go of a shard that is not finished."""
        if self._file is not None:
            self._file.close()

    def _begin(self) -> None:
        if len(self.headers) >= _MAX_SHARDS:
            raise DataError(
                f"more than {_MAX_SHARDS} shards are needed",
                str(self.folder),
                "raise --shard-tokens",
            )
        self._file = None
        self._tokens = 0
        self._starts = array("q")


def finished_shards(folder: Path, split: str, kind: ShardKind) -> list[TokenHeader]:
    """Return the finished shards of a split up to the first that is missing or damaged, by SHA-256.

    A damaged shard is logged; it and all after it are to be made again: each begins where the one
    before it ended.

    Raises:
        StateError: shards of another tokenizer.
    """
    kept: list[TokenHeader] = []
    while (path := shard_path(folder, split, len(kept))).is_file():
        header = None
        try:
            header = read_header(path)
            fault = "its header is missing" if header is None else shard_damage(path, header)
        except DataError as problem:
            fault = problem.what
        if header is None or fault:
            logger.warning("%s is made again: %s", path, fault)
            break
        if (header.tokenizer_hash, header.vocabulary) != (kind.tokenizer_hash, kind.vocabulary):
            raise StateError(
                "the tokenizer in the output folder is not the one the shards were made with",
                str(path),
                "put the tokenizer folder back as it was, or prepare into another --output-dir",
            )
        kept.append(header)
    return kept


def remove_unfinished(folder: Path, split: str, kept: int) -> None:
    """Remove the files of all shards of a split but the first `kept` ones."""
    whole = {shard_path(folder, split, number).stem for number in range(kept)}
    for file in sorted(folder.iterdir()):
        is_of_split = SHARD_NAME.fullmatch(file.name) and file.name.lstrip(".").startswith(split)
        if is_of_split and file.stem not in whole:
            remove_tree(file, missing_ok=True)
    sync_folder(folder)
