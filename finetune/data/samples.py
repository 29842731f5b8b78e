"""Samples on disk: written in shards that survive a kill, then read as memory-mapped arrays. One
sample costs a slice, and all of them no memory.

A shard is finished by its state, a JSON file with what is needed to resume after it and what its
files hash to. What belongs to no finished shard is written again. In the end the rows of all shards
become one array for each of their fields.
"""

from __future__ import annotations

import hashlib
import json
import logging
from bisect import bisect_left, bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data import cache
from finetune.data.reading.files import DataFile
from finetune.data.report import DataReport
from finetune.data.shards import ShardFile, damage
from finetune.storage.durable_files import replace_file, save_array

logger = logging.getLogger("finetune")

SHARD_TOKENS = 16 << 20  # at most, except for the last part that goes into it
SCRATCH = "scratch"  # folder for what is removed at the end
# Facts about a sample in addition to its tokens. They are its record's number, the number and line
# of the file, the difficulty's index, and the numbers of tokens and targets. For the other fields
# see `PreferenceSamples`.
ROW = np.dtype(
    [
        ("row_ids", "<i8"),
        ("files", "<i4"),
        ("lines", "<i8"),
        ("levels", "<i2"),
        ("lengths", "<i4"),
        ("supervised_counts", "<i4"),
        ("first_lengths", "<i4"),
        ("first_supervised", "<i4"),
        ("labels", "<i1"),
    ]
)
_PREFERENCE_FIELDS = ("first_lengths", "first_supervised", "labels")
# Files of a shard. The rows are removed at the end.
_DTYPES = {
    "tokens": np.dtype(np.int32),
    "supervised": np.dtype(np.bool_),
    f"{SCRATCH}/rows": ROW,
}
TOKEN_BYTES = 5  # of a token, in all files that stay
# What a fingerprint is of, in this order. Where records are in which file is not part of it.
_HASHED = ("levels", "offsets", "row_ids", "supervised", "supervised_counts", "tokens")


def _shard_file(folder: Path, name: str, shard: int) -> Path:
    """`tokens-00000.bin`, ...: bare numbers."""
    return folder / f"{name}-{shard:05d}.bin"


def _map_shard(folder: Path, name: str, shard: int) -> np.ndarray:
    """One array of a shard, read-only."""
    return np.asarray(np.memmap(_shard_file(folder, name, shard), _DTYPES[name], mode="r"))


def _map_array(folder: Path, name: str) -> np.ndarray:
    """One array over all samples, read-only.

    As a plain array, because numpy makes what it computes of an np.memmap one by name.
    """
    return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False))


class SampleWriter:
    """Parts of samples -> shards, in order.

    Args:
        folder: where they go; what a killed writer finished there is kept.

    Attributes:
        states: what `finish` was given for each finished shard, with its own `samples`, `tokens`
            and `files` (size in bytes and SHA-256 by name).
    """

    _files: list[ShardFile]  # of the unfinished shard
    _samples: int
    _tokens: int

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / SCRATCH).mkdir(exist_ok=True)
        self.states: list[dict[str, Any]] = []
        self._begin()
        while self._state_path.is_file():
            state = json.loads(self._state_path.read_bytes())
            fault = damage({folder / name: known for name, known in state["files"].items()})
            if fault:
                logger.warning("a shard of samples is made again: %s", fault)
                break
            self.states.append(state)

    @property
    def is_full(self) -> bool:
        return self._tokens >= SHARD_TOKENS

    def add(self, *arrays: np.ndarray) -> None:
        """Append samples: int32 tokens `(T,)`, bool targets `(T,)`, and `ROW` `(N,)`."""
        tokens, _supervised, rows = arrays
        if not len(rows):
            return
        if not self._files:
            self._files = [
                ShardFile(_shard_file(self.folder, name, len(self.states))) for name in _DTYPES
            ]
        for file, array in zip(self._files, arrays, strict=True):
            file.write(array)
        self._samples += len(rows)
        self._tokens += len(tokens)

    def finish(self, state: dict[str, Any]) -> None:
        """End the shard, if it has a sample.

        Args:
            state: what is needed to resume after the shard.
        """
        if not self._files:
            return
        files = {}
        for file in self._files:
            digest = file.finish()
            file.publish()
            files[str(file.path.relative_to(self.folder))] = [file.size_bytes, digest]
        state = {
            **state,
            "samples": self._samples,
            "tokens": self._tokens,
            "files": files,
        }
        replace_file(self._state_path, json.dumps(state).encode())
        self.states.append(state)
        self._begin()

    def close(self) -> None:
        """Let go of the files of a shard that is not finished."""
        for file in self._files:
            file.close()

    def write_arrays(self, *, of_preferences: bool) -> str:
        """Make the arrays over all samples; return a hash of tokens, targets, difficulties and
        record numbers.
        """
        shards = range(len(self.states))
        rows = [_map_shard(self.folder, f"{SCRATCH}/rows", shard) for shard in shards]

        def save(name: str, array: np.ndarray) -> None:
            save_array(self.folder / f"{name}.npy", array)

        for name in ROW.fields or ():
            if of_preferences or name not in _PREFERENCE_FIELDS:
                save(name, np.concatenate([shard[name] for shard in rows]))
        lengths = _map_array(self.folder, "lengths")
        save("offsets", np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
        save("order", np.argsort(_map_array(self.folder, "levels"), kind="stable"))
        digest = hashlib.sha256()
        for name in (*_HASHED, *(_PREFERENCE_FIELDS if of_preferences else ())):
            digest.update(name.encode())
            if name in _DTYPES:
                for shard in shards:
                    digest.update(_map_shard(self.folder, name, shard).data)
            else:
                digest.update(_map_array(self.folder, name).data)
        return digest.hexdigest()

    def _begin(self) -> None:
        self._files = []
        self._samples = self._tokens = 0

    @property
    def _state_path(self) -> Path:
        return self.folder / SCRATCH / f"state-{len(self.states):05d}.json"


class Samples:
    """The samples of a run, on disk: `samples[i]` costs a slice of a memory map.

    The arrays are read-only maps too: the processes of a node share the pages that they look at.

    Attributes:
        lengths: int32 (N,), tokens of each sample.
        supervised_counts: int32 (N,), targets of each sample (position 0 is never one).
        difficulties: int16 (N,), index into `difficulty_names`; -1 where the record has none.
        by_difficulty: int64 (N,), the samples of the first difficulty in order, then those of the
            second, ...
        record_ids: int64 (N,), the input record it came from, counted from 0 through the files in
            order.
        difficulty_names: the difficulties given to `prepare_samples`; empty if none were.
        fingerprint: hash of the samples themselves: equal for equal data, wherever it is stored.
        highest_id: of all tokens.
        report: what became of the records.
        source_starts: the first sample of each entry in `data`, then the number of samples. An
            entry's samples are consecutive.
    """

    def __init__(self, folder: Path, files: tuple[DataFile, ...]) -> None:
        self._folder = folder
        self._files = files
        meta = cache.read_meta(folder)
        self._offsets = _map_array(folder, "offsets")
        self._file_numbers = _map_array(folder, "files")
        self._lines = _map_array(folder, "lines")
        # of each shard, and the end
        self._first_samples = [0, *accumulate(samples for samples, _ in meta["shards"])]
        self._first_tokens = [0, *accumulate(tokens for _, tokens in meta["shards"])]
        shards = range(len(meta["shards"]))
        self._tokens = [_map_shard(folder, "tokens", shard) for shard in shards]
        self._supervised = [_map_shard(folder, "supervised", shard) for shard in shards]
        self.lengths = _map_array(folder, "lengths")
        self.supervised_counts = _map_array(folder, "supervised_counts")
        self.difficulties = _map_array(folder, "levels")
        self.by_difficulty = _map_array(folder, "order")
        self.record_ids = _map_array(folder, "row_ids")
        self.difficulty_names: tuple[str, ...] = tuple(meta["level_names"])
        self.fingerprint: str = meta["fingerprint"]
        self.highest_id: int = meta["highest_id"]
        self.report = DataReport(**meta["report"])
        starts = []
        for entry in range(files[-1].number + 2):
            first_file = bisect_left(files, entry, key=lambda file: file.number)
            starts.append(bisect_left(self._file_numbers, first_file))
        self.source_starts = tuple(starts)

    def __len__(self) -> int:
        return len(self.difficulties)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """`(input_ids int32 (T,), supervised bool (T,))` of one sample; both are read-only
        views.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        shard = bisect_right(self._first_samples, index) - 1
        offsets = self._offsets[index : index + 2] - self._first_tokens[shard]
        begin, end = offsets.tolist()
        return self._tokens[shard][begin:end], self._supervised[shard][begin:end]

    def location(self, index: int) -> str:
        """`file:line` of the record that sample `index` came from."""
        return f"{self._files[self._file_numbers[index]].path}:{self._lines[index]}"

    def first_above(self, limit: int) -> tuple[int, str]:
        """Return the first token id that is `limit` or more (see `highest_id`), and the location of
        its record.
        """
        shard = next(number for number, tokens in enumerate(self._tokens) if tokens.max() >= limit)
        tokens = self._tokens[shard]
        place = int(np.argmax(tokens >= limit))
        sample = bisect_right(self._offsets, self._first_tokens[shard] + place) - 1
        return int(tokens[place]), self.location(sample)

    def __reduce__(self) -> tuple[Any, ...]:
        # the maps are opened again, not copied through a pipe
        return type(self), (self._folder, self._files)


class PreferenceSamples(Samples):
    """The samples of a run on preferences, on disk.

    A pair's tokens are those of the document with the chosen answer, and behind them those of the
    other; both begin with the same prompt. A record with a label is one document.

    Attributes:
        first_lengths: int32 (N,), tokens of the first document of a pair; 0 where the sample is one
            document.
        first_supervised: int32 (N,), targets of that document.
        labels: int8 (N,), 1 for a good answer, 0 for a bad one; -1 for pairs.
    """

    def __init__(self, folder: Path, files: tuple[DataFile, ...]) -> None:
        super().__init__(folder, files)
        self.first_lengths = _map_array(folder, "first_lengths")
        self.first_supervised = _map_array(folder, "first_supervised")
        self.labels = _map_array(folder, "labels")
