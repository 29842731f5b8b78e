"""Token shards as one stream: found, mapped into memory, and checked before and while they are
read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.corpus.shard_files import (
    check_alike,
    check_finished,
    checked_header,
    damage,
    find_shards,
    read_index,
)
from finetune.data.corpus.shard_header import DTYPES, TOKENIZER_FOLDER, TokenHeader
from finetune.data.corpus.tokenizer import bytes_per_token, tokenizer_hash
from finetune.errors import DataError, FinetuneError, raise_problems
from finetune.storage.durable_files import hash_file

__all__ = ["TokenShards", "bytes_per_token", "tokenizer_folder", "tokenizer_hash"]


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
            IndexError: the interval does not lie in the stream.
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
                fault = damage(path, header) if header.sha256 else None
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
    """The tokenizer that `prepare` saved beside the shards; None where there is none."""
    folder = find_shards(source, split)[0].parent / TOKENIZER_FOLDER
    return folder if folder.is_dir() else None
