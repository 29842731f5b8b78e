"""Samples on disk: arrays that are memory-mapped, so that one sample costs a slice and all of them
no memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data import cache
from finetune.data.reading.sources import DataFile
from finetune.data.report import DataReport
from finetune.data.sample_shards import SAMPLE_ARRAYS, TOKEN_ARRAYS, map_tokens


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
        fingerprint: hash of the samples themselves: equal for equal data, wherever it lies.
        highest_id: of all tokens.
        report: what became of the records.
        source_starts: the first sample of each entry of `data`, and the number of samples: an
            entry's samples lie one after another.
    """

    def __init__(self, folder: Path, files: tuple[DataFile, ...]) -> None:
        self._folder = folder
        self._files = files
        meta = cache.read_meta(folder)
        # As plain arrays, for what is computed of a np.memmap is one by name.
        arrays = {
            name: np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False))
            for name in SAMPLE_ARRAYS
        }
        self._offsets = arrays["offsets"]
        self._places = arrays["places"]
        # of each shard, and the end
        self._first_samples = [0, *accumulate(samples for samples, _ in meta["shards"])]
        self._first_tokens = [0, *accumulate(tokens for _, tokens in meta["shards"])]
        self._tokens, self._supervised = (
            [map_tokens(folder, name, shard) for shard in range(len(meta["shards"]))]
            for name in TOKEN_ARRAYS
        )
        self.lengths: np.ndarray = arrays["lengths"]
        self.supervised_counts: np.ndarray = arrays["supervised_counts"]
        self.difficulties: np.ndarray = arrays["levels"]
        self.by_difficulty: np.ndarray = arrays["order"]
        self.record_ids: np.ndarray = arrays["row_ids"]
        self.difficulty_names: tuple[str, ...] = tuple(meta["level_names"])
        self.fingerprint: str = meta["fingerprint"]
        self.highest_id: int = meta["highest_id"]
        self.report = DataReport(**meta["report"])
        first_files = [
            bisect_left(files, number, key=lambda file: file.number)
            for number in range(files[-1].number + 2)
        ]
        self.source_starts = tuple(bisect_left(self._places[:, 0], file) for file in first_files)

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
        begin, end = (self._offsets[index : index + 2] - self._first_tokens[shard]).tolist()
        return self._tokens[shard][begin:end], self._supervised[shard][begin:end]

    def location(self, index: int) -> str:
        """`file:line` of the record that sample `index` came from."""
        file, line = self._places[index]
        return f"{self._files[file].path}:{line}"

    def first_above(self, limit: int) -> tuple[int, str]:
        """The first token id that is `limit` or more, and where its record lies; there is one (see
        `highest_id`).
        """
        shard = next(number for number, tokens in enumerate(self._tokens) if tokens.max() >= limit)
        place = int(np.argmax(self._tokens[shard] >= limit))
        sample = int(np.searchsorted(self._offsets, self._first_tokens[shard] + place, "right")) - 1
        return int(self._tokens[shard][place]), self.location(sample)

    def __reduce__(self) -> tuple[Any, ...]:
        # the maps are opened again, not copied through a pipe
        return type(self), (self._folder, self._files)
