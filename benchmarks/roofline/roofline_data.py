"""Training data of a trace: documents of one length, all of them in every step."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from finetune.batching.curriculum import Schedule, uniform_schedule


def _some_tokens(count: int) -> np.ndarray:
    """Different ones: a device computes faster with equal numbers."""
    return np.random.default_rng(0).integers(0, 1000, count, dtype=np.int32)


class Documents:
    """Samples of one length, for training's data."""

    def __init__(self, count: int, tokens: int, supervised: float) -> None:
        self.lengths = np.full(count, tokens)
        mask = np.arange(tokens) >= round((1 - supervised) * tokens)
        mask[0] = False  # the first token is no target
        self.sample = (_some_tokens(tokens), mask)
        self.supervised_counts = np.full(count, int(mask.sum()))
        self.record_ids = np.arange(count)
        self.difficulties = np.full(count, -1)
        self.source_starts = (0, count)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        return self.sample


class Windows(Documents):
    """Windows of pretraining: one token more than targets, all of them targets."""

    cut_tokens, stream = 0, SimpleNamespace(tokens=1)

    def __init__(self, count: int, tokens: int) -> None:
        super().__init__(count, tokens, 1.0)
        self.sample = (_some_tokens(tokens + 1), None)
        self.supervised_counts = self.lengths


@dataclass(frozen=True)
class EveryStep:
    """All samples in every step."""

    samples: int
    total_steps: int

    @property
    def global_batch_size(self) -> int:
        return self.samples

    @property
    def schedule(self) -> Schedule:
        return uniform_schedule()

    def indices(self, step: int) -> np.ndarray:
        return np.arange(self.samples)

    def stage(self, step: int) -> int:
        return 0
