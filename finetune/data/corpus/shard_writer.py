"""Writing token shards: whole or not at all, one after another, and resumed after a kill."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from finetune.data.corpus.shard_files import damage
from finetune.data.corpus.shard_header import (
    DTYPES,
    INDEX_DTYPE,
    TokenHeader,
    header_path,
    index_path,
    read_header,
)
from finetune.errors import DataError, StateError
from finetune.storage.durable_files import move, remove_tree, replace_file, sync_file, sync_folder

logger = logging.getLogger("finetune")

SPLITS = ("train", "val")
SHARD_NAME = re.compile(r"\.?(train|val)-\d{5}\.(bin|index|json)(\.tmp)?")
_MOST_SHARDS = 100_000  # five digits: names sort as numbers do
_BUFFER_BYTES = 4 << 20
Position = tuple[int, int]


@dataclass(frozen=True)
class ShardKind:
    """What all shards of one preparation share; see `TokenHeader`."""

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

    A shard ends before the document that would bring it above `shard_tokens`; a longer document has
    one of its own.

    Args:
        folder: where the shards go; only this writer writes shards of its split there.
        finished: headers of the shards that are there already; writing resumes after them.
    """

    def __init__(
        self, folder: Path, split: str, kind: ShardKind, finished: list[TokenHeader]
    ) -> None:
        self.folder = folder
        self.split = split
        self.kind = kind
        self.headers = list(finished)
        self._descriptor: int | None = None
        self._begin()

    @property
    def position(self) -> Position:
        """(unit, document in it) of the input from which this split resumes."""
        return self.headers[-1].continues_at if self.headers else (0, 0)

    def add(self, ids: np.ndarray, unit: int, document: int) -> None:
        """Append one document (its separator included) that is number `document` of an input
        unit.
        """
        if self._tokens and self._tokens + len(ids) > self.kind.shard_tokens:
            self.finish()
        self._buffer.append(ids)
        self._buffered_bytes += ids.nbytes
        self._starts.append(self._tokens)
        self._tokens += len(ids)
        self._continues_at = (unit, document + 1)
        if self._buffered_bytes >= _BUFFER_BYTES:
            self._flush()

    def finish(self) -> None:
        """Give the shard its name, durably: index, header, then the tokens. Nothing where it has no
        document.
        """
        if not self._tokens:
            return
        self._flush()
        path = self._path
        self.close()
        index = np.array([*self._starts, self._tokens], dtype=INDEX_DTYPE).tobytes()
        header = TokenHeader(
            self.kind.dtype,
            self._tokens,
            len(self._starts),
            self.kind.vocabulary,
            self.kind.tokenizer_hash,
            self.kind.separator_id,
            self._digest.hexdigest(),
            hashlib.sha256(index).hexdigest(),
            self._continues_at,
        )
        sync_file(self._temporary)
        replace_file(index_path(path), index)
        replace_file(header_path(path), header.to_json().encode())
        move(self._temporary, path)
        sync_folder(self.folder)
        self.headers.append(header)
        self._begin()

    def close(self) -> None:
        """Let go of the file; an unfinished shard stays under its temporary name and is begun anew
        next time.
        """
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _begin(self) -> None:
        if len(self.headers) >= _MOST_SHARDS:
            raise DataError(
                f"more than {_MOST_SHARDS} shards are needed",
                str(self.folder),
                "raise --shard-tokens",
            )
        self._buffer: list[np.ndarray] = []
        self._buffered_bytes = self._tokens = 0
        self._starts = array("q")
        self._digest = hashlib.sha256()
        self._continues_at = self.position

    @property
    def _path(self) -> Path:
        return shard_path(self.folder, self.split, len(self.headers))

    @property
    def _temporary(self) -> Path:
        return self._path.with_name(f".{self._path.name}.tmp")

    def _flush(self) -> None:
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(self._temporary, flags, 0o666)
        data = (
            np.concatenate(self._buffer).astype(DTYPES[self.kind.dtype], copy=False).tobytes()
            if self._buffer
            else b""
        )
        self._digest.update(data)
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]
        self._buffer = []
        self._buffered_bytes = 0


def finished_shards(folder: Path, split: str, kind: ShardKind) -> list[TokenHeader]:
    """The finished shards of a split up to the first that is not there whole, verified by SHA-256.

    A damaged shard is logged; it and all after it are to be made again: each begins where the one
    before it ended.

    Raises:
        StateError: shards of another tokenizer.
    """
    kept: list[TokenHeader] = []
    while True:
        path = shard_path(folder, split, len(kept))
        if not path.is_file():
            break
        try:
            header = read_header(path)
            fault = damage(path, header) if header is not None else "its header is missing"
        except DataError as problem:
            header, fault = None, problem.what
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


def remove_unfinished(folder: Path, split: str, kept: list[TokenHeader]) -> None:
    """Remove the files of all shards of a split but the first ones, which are kept."""
    paths = [shard_path(folder, split, number) for number in range(len(kept))]
    whole = {
        name
        for path in paths
        for name in (path.name, index_path(path).name, header_path(path).name)
    }
    for file in sorted(folder.iterdir()):
        if (
            SHARD_NAME.fullmatch(file.name)
            and file.name.lstrip(".").startswith(split)
            and file.name not in whole
        ):
            remove_tree(file, missing_ok=True)
    sync_folder(folder)
