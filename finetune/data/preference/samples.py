"""Samples of preferences: like those of fine-tuning, with where the first of two documents ends, or
with labels.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from finetune.data.reading.sources import DataFile
from finetune.data.sample_shards import PREFERENCE_ARRAYS
from finetune.data.samples import Samples


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
        self.first_lengths, self.first_supervised, self.labels = (
            np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False))
            for name in PREFERENCE_ARRAYS
        )
