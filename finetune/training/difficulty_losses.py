"""What training lost per difficulty, between two lines of the log."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch


class DifficultyLosses:
    """Adds up losses and supervised tokens per difficulty.

    Args:
        names: of the difficulties; empty where samples have none.
        device: where losses are.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = tuple(names)
        self._losses = torch.zeros(len(self.names), device=device)
        self._tokens = np.zeros(len(self.names), dtype=np.int64)

    def add(self, losses: torch.Tensor, tokens: np.ndarray) -> None:
        """A step's: summed losses of this rank's microbatches, tokens of the global batch; both `(difficulties,)`."""
        self._losses += losses
        self._tokens += tokens

    def take(self, sum_over_ranks: Callable[[torch.Tensor], None]) -> dict[str, float]:
        """Tokens, share of the tokens and mean loss of each difficulty since the last call. Every rank calls."""
        if not self.names:
            return {}
        sum_over_ranks(self._losses)
        facts: dict[str, float] = {}
        total = max(1, int(self._tokens.sum()))
        for name, loss, tokens in zip(self.names, self._losses.tolist(), self._tokens.tolist(), strict=True):
            facts[f"tokens/{name}"], facts[f"share/{name}"] = tokens, round(tokens / total, 4)
            if tokens:
                facts[f"loss/{name}"] = loss / tokens
        self._losses.zero_()
        self._tokens[:] = 0
        return facts
