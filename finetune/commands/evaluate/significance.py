"""Whether two models differ by more than chance: a paired bootstrap over the records. Needs no
torch.

Both models were measured on the same records. Records are drawn with replacement, as many as there
are; each draw has its difference of the two values (Efron and Tibshirani 1993, ch. 13 and 16; for
systems compared on one test set: Koehn 2004, https://aclanthology.org/W04-3250). A value over
tokens or bytes is a ratio of two sums, and so it is in each draw: records with more tokens count
for more, and how many tokens a draw has varies.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from finetune.commands.evaluate.scores import ModelScores

logger = logging.getLogger("finetune")

RESAMPLES, SEED, CONFIDENCE = 10_000, 0, 0.95
FEWEST_DIFFERING = 10  # records: with fewer a bootstrap finds too much certain
_DRAWN_AT_ONCE = 1 << 22  # records: two arrays of 32 MiB


@dataclass(frozen=True)
class Difference:
    """`second` minus `first`, with its interval, and the share of chance in it."""

    measure: str
    of: str
    first: str
    second: str
    records: int
    differing: int  # records that the two models differ on
    difference: float
    low: float
    high: float
    p: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def paired_bootstrap(
    first: np.ndarray,
    second: np.ndarray,
    weights: np.ndarray,
    *,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> tuple[float, float, float]:
    """The interval (of `CONFIDENCE`, by percentiles) of sum(second - first) / sum(weights), and the
    p-value for 0.

    The p-value is two-sided: twice the share of draws on the rarer side of 0, those at 0 with it.
    Below 0.05 it has 0 outside of the interval.

    Args:
        first, second, weights: float `(records,)`; of a share the weights are 1.
    """
    numerators, count = second - first, len(weights)
    generator, found = np.random.default_rng(seed), np.empty(resamples)
    at_once = max(1, _DRAWN_AT_ONCE // count)
    for start in range(0, resamples, at_once):
        drawn = generator.integers(count, size=(min(at_once, resamples - start), count))
        found[start : start + len(drawn)] = numerators[drawn].sum(axis=1) / weights[drawn].sum(
            axis=1
        )
    low, high = np.quantile(found, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]).tolist()
    rarer = min((found <= 0).sum(), (found >= 0).sum())
    return low, high, min(1.0, 2 * float(rarer + 1) / (resamples + 1))


def compare(models: Sequence[ModelScores]) -> list[Difference]:
    """The base against each other model, and the first of those against the others; what has two
    records or more.
    """
    pairs = [(models[0], other) for other in models[1:]]
    if models and models[0].role == "base":
        pairs += [(models[1], other) for other in models[2:]]
    found = [difference for first, second in pairs for difference in _differences(first, second)]
    few = [one for one in found if one.p < 1 - CONFIDENCE and one.differing < FEWEST_DIFFERING]
    if few:
        logger.warning(
            "fewer than %d records differ in %s: such p-values are too small (fix: more held-out"
            " records)",
            FEWEST_DIFFERING,
            ", ".join(dict.fromkeys(f"{one.measure} of {one.of}" for one in few)),
        )
    return found


def _differences(first: ModelScores, second: ModelScores) -> list[Difference]:
    others = {(measure.name, measure.of): measure for measure in second.measures}
    found = []
    for ours in first.measures:
        theirs = others.get((ours.name, ours.of))
        if ours.sums is None or theirs is None or theirs.sums is None or len(ours.sums) < 2:
            continue
        if not (np.isfinite(ours.sums).all() and np.isfinite(theirs.sums).all()):
            continue  # nothing can be said of a model that gives NaN
        assert ours.weights is not None and np.array_equal(ours.weights, theirs.weights), (
            "not the same records"
        )
        found.append(
            Difference(
                ours.name,
                ours.of,
                first.name,
                second.name,
                len(ours.sums),
                int((ours.sums != theirs.sums).sum()),
                theirs.value - ours.value,
                *paired_bootstrap(ours.sums, theirs.sums, ours.weights),
            )
        )
    return found
