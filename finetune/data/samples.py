"""Samples on disk: flat arrays that are memory-mapped, so that one sample costs a slice."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from finetune.data import cache
from finetune.data.report import DataReport
from finetune.storage.durable_files import save_array

if TYPE_CHECKING:
    from datasets import Dataset

# Tokens of all samples lie one after the other in `tokens` and `supervised`; sample i is offsets[i] to offsets[i + 1].
# `places` is (N, 2): file number and line of each sample's record. For the others see `Samples`.
ARRAYS = {
    "tokens": np.int32,
    "supervised": np.bool_,
    "offsets": np.int64,
    "places": np.int64,
    "row_ids": np.int64,
    "levels": np.int16,
    "supervised_counts": np.int32,
}


class Samples:
    """The samples of a run, on disk: `samples[i]` costs a slice of a memory map.

    Attributes:
        lengths: int32 (N,), tokens of each sample.
        supervised_counts: int32 (N,), targets of each sample (position 0 is never one).
        difficulties: int16 (N,), index into `difficulty_names`; -1 where the record has none.
        record_ids: int64 (N,), the input record it came from, counted from 0 through the files in order.
        difficulty_names: the difficulties given to `prepare_samples`; empty if none were.
        fingerprint: hash of the samples themselves: equal for equal data, wherever it lies.
        highest_id: of all tokens.
        report: what became of the records.
    """

    def __init__(self, folder: Path, sources: tuple[Path, ...]) -> None:
        self._folder, self._sources = folder, sources
        meta = cache.read_meta(folder)
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ARRAYS}
        self._tokens, self._supervised, self._offsets = arrays["tokens"], arrays["supervised"], arrays["offsets"]
        self._places = arrays["places"]
        self.lengths: np.ndarray = np.diff(self._offsets).astype(np.int32)
        self.supervised_counts: np.ndarray = np.array(arrays["supervised_counts"])
        self.difficulties: np.ndarray = np.array(arrays["levels"])
        self.record_ids: np.ndarray = np.array(arrays["row_ids"])
        self.difficulty_names: tuple[str, ...] = tuple(meta["level_names"])
        self.fingerprint: str = meta["fingerprint"]
        self.highest_id: int = meta["highest_id"]
        self.report = DataReport(**meta["report"])

    def __len__(self) -> int:
        return len(self.difficulties)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """`(input_ids int32 (T,), supervised bool (T,))` of one sample; both are read-only views."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        tokens = slice(self._offsets[index], self._offsets[index + 1])
        return self._tokens[tokens], self._supervised[tokens]

    def location(self, index: int) -> str:
        """`file:line` of the record that sample `index` came from."""
        file, line = self._places[index]
        return f"{self._sources[file]}:{line}"

    def first_above(self, limit: int) -> tuple[int, str]:
        """The first token id that is `limit` or more, and where its record lies; there is one (see `highest_id`)."""
        place = int(np.argmax(self._tokens >= limit))
        return int(self._tokens[place]), self.location(int(np.searchsorted(self._offsets, place, "right")) - 1)

    def __reduce__(self) -> tuple[Any, ...]:
        return Samples, (self._folder, self._sources)  # the maps are opened again, not copied through a pipe


def write_arrays(
    rendered: Dataset, columns: Mapping[str, np.ndarray], kept: np.ndarray, folder: Path
) -> dict[str, Any]:
    """Write the samples where `kept`, bool (N,), as `ARRAYS` into the folder.

    Args:
        rendered: has the columns input_ids and supervised, a list per sample.
        columns: row (the record's number), file, line, level (the difficulty's index), length and targets, `(N,)`.

    Returns:
        `content`, a hash of tokens, masks, difficulties and record ids, not of where records lie in which file; and
        `highest_id`, of the tokens.
    """
    lengths = columns["length"][kept].astype(np.int64)
    arrays: dict[str, np.ndarray] = {
        "offsets": np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
        "places": np.stack([columns["file"][kept], columns["line"][kept]], axis=1),
        "row_ids": columns["row"][kept],
        "levels": columns["level"][kept],
        "supervised_counts": columns["targets"][kept],
    }
    for name, values in arrays.items():
        arrays[name] = values.astype(ARRAYS[name])
        save_array(folder / f"{name}.npy", arrays[name])
    maps = {
        name: np.lib.format.open_memmap(folder / f"{name}.npy", "w+", ARRAYS[name], shape=(int(lengths.sum()),))
        for name in ("tokens", "supervised")
    }
    written = sample = highest_id = 0
    for table in rendered.with_format("arrow").iter(batch_size=1_000):
        wanted = table.filter(pa.array(kept[sample : sample + table.num_rows]))
        sample += table.num_rows
        ids, mask = (wanted.column(name).combine_chunks().flatten().to_numpy() for name in ("input_ids", "supervised"))
        highest_id = max(highest_id, int(ids.max(initial=0)))
        maps["tokens"][written : written + len(ids)] = ids
        maps["supervised"][written : written + len(ids)] = mask
        written += len(ids)
    arrays |= maps
    digest = hashlib.sha256()
    for name in sorted(set(ARRAYS) - {"places"}):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    for written_map in maps.values():
        written_map.flush()
    return {"content": digest.hexdigest(), "highest_id": highest_id}
