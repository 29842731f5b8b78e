"""The values that models are compared by, with what each record adds to them. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Measure:
    """One value of a model; with `sums` and `weights`, `(records,)` each, it is their ratio over
    the records.
    """

    name: str  # loss, exact match, accuracy, margin, bits per byte, or a metric of lm_eval
    of: str  # the difficulty, text or task; "all"
    value: float
    stderr: float | None = None
    sums: np.ndarray | None = None
    weights: np.ndarray | None = None

    @classmethod
    def ratio(
        cls, name: str, of: str, sums: np.ndarray, weights: np.ndarray, stderr: float | None = None
    ) -> Measure:
        known = weights > 0
        sums, weights = sums[known].astype(np.float64), weights[known].astype(np.float64)
        return cls(name, of, float(sums.sum() / weights.sum()), stderr, sums, weights)


def ratios(
    name: str,
    groups: Sequence[str | None],
    sums: np.ndarray,
    weights: np.ndarray,
    records: np.ndarray | None = None,
) -> list[Measure]:
    """The measure of each group, in their order, and of all; of what is no group's only the latter.

    Args:
        groups: of each of the n parts.
        sums, weights: `(n,)`.
        records: int `(n,)`: the record that each part is of, drawn as a whole; None: each its own.
    """
    of_part = np.array(groups, dtype=object)
    numbers = (
        np.arange(len(sums)) if records is None else np.unique(records, return_inverse=True)[1]
    )
    members = {str(group): of_part == group for group in dict.fromkeys(groups) if group is not None}
    members["all"] = np.ones(len(sums), dtype=bool)
    return [
        Measure.ratio(
            name,
            group,
            np.bincount(numbers[its], sums[its]),
            np.bincount(numbers[its], weights[its]),
        )
        for group, its in members.items()
        if weights[its].sum() > 0
    ]
