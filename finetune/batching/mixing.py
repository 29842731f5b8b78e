"""Sources mixed by weight: how many samples of each source and difficulty every global batch has.

The curriculum comes first: what a global batch has of each difficulty is `plan_counts`, whatever
the sources. Within a difficulty the sources that have samples of it share by their weights. The
target of a source after a step is the sum of its shares in the samples of every difficulty so far;
where every source has every difficulty that is used, that is its weight's share of all samples.

Difficulties that the same sources have are one group, and `round_cumulative` deals the group's
samples to them: each source has had the floor or the ceiling of its target in the group. Where no
source shares two groups with others, that is the floor or the ceiling of its whole target. Else
errors of several groups may add up to a sample: then samples are passed on between sources within
the step (`_even_out`), which keeps all but rare steps below one sample. That has no proof: the
tests hold random plans of such sources below two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

from finetune.batching.rounding import round_cumulative
from finetune.config.fields import DataSource, source_names
from finetune.errors import DataError, raise_problems

_INT64_ROOM = 1 << 61
# 2^64 / golden ratio: multiples of it are spread evenly over the integers modulo 2^64
_GOLDEN = 0x9E3779B97F4A7C15
_ALMOST_ONE = 1 - 1e-9  # sums of errors are floats


@dataclass(frozen=True)
class Mix:
    """Sources, each a run of samples one after another, and their weights.

    Raises:
        DataError: a source without samples.
    """

    names: tuple[str, ...]
    weights: tuple[float | Literal["natural"], ...]  # above 0; natural is the number of samples
    starts: tuple[int, ...]  # the first sample of each source, and the number of samples

    def __post_init__(self) -> None:
        raise_problems(
            [
                DataError(
                    "no sample of this source is left to be mixed",
                    where=name,
                    fix="remove it from data, or see above why its records were dropped",
                )
                for name, size in zip(self.names, self.sizes, strict=True)
                if not size
            ]
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each source."""
        return tuple(end - start for start, end in zip(self.starts, self.starts[1:], strict=False))

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """The weights as exact shares that sum to 1: of the decimals that the user wrote."""
        pairs = zip(self.weights, self.sizes, strict=True)
        exact = [
            Fraction(size) if weight == "natural" else Fraction(repr(weight))
            for weight, size in pairs
        ]
        return tuple(weight / sum(exact) for weight in exact)


def mix_of(sources: Sequence[DataSource], starts: Sequence[int]) -> Mix | None:
    """The mix of the entries of `data` whose samples begin at `starts`; None where they are not
    mixed.
    """
    weights = tuple(source.weight for source in sources if source.weight is not None)
    return Mix(source_names(sources), weights, tuple(starts)) if weights else None


@dataclass(frozen=True)
class SourceDraws:
    """What a run has of a source that is mixed.

    Attributes:
        weight: its share by the weights.
        expected: the share it can have, which differs where it has no sample of a difficulty that
            is used.
        draws: samples of the whole run.
        passes: how often the run goes through the source's samples of each difficulty, by name;
            those it draws.
    """

    name: str
    samples: int
    weight: float
    expected: float
    draws: int
    passes: dict[str, float]


@dataclass(frozen=True)
class _Group:
    """Difficulties that the same sources have, the share of each of those, and the samples of every
    step.
    """

    difficulties: np.ndarray  # int (k,)
    sources: np.ndarray  # int (m,)
    shares: tuple[Fraction, ...]  # (m,), sum 1
    totals: np.ndarray  # int64 (steps,)


def plan_cells(counts: np.ndarray, held: np.ndarray, shares: Sequence[Fraction]) -> np.ndarray:
    """Samples of each source and difficulty in each global batch.

    Args:
        counts: int64[steps, difficulties], of `plan_counts`.
        held: bool[sources, difficulties], whether the source has samples of the difficulty; of each
            that is ever used, one has.
        shares: of the sources.

    Returns: unsigned integers [steps, sources, difficulties]; over the sources they sum to
        `counts`. A pure function.
    """
    groups = list(_groups(counts, held, shares))
    drawn = [_deal(group) for group in groups]
    several = sum(
        np.bincount(group.sources, minlength=len(held))
        for group in groups
        if len(group.sources) > 1
    )
    if np.max(several) > 1:
        _even_out(groups, drawn, len(held))
    # As small as a global batch allows: of a long run this is the largest thing in memory.
    dtype = np.min_scalar_type(int(counts.sum(axis=1).max()))
    cells = np.zeros((len(counts), *held.shape), dtype=dtype)
    for group, rows in zip(groups, drawn, strict=True):
        table = _table(rows, counts[:, group.difficulties])
        for place, source in enumerate(group.sources.tolist()):
            cells[:, source, group.difficulties] = table[:, place]
    return cells


def source_draws(
    mix: Mix, held: np.ndarray, cells: np.ndarray, difficulties: Sequence[str]
) -> list[SourceDraws]:
    """What a run has of each source.

    Args:
        held: int64[sources, difficulties], the samples of each.
        cells: of `plan_cells`.
        difficulties: their names.
    """
    drawn = cells.sum(axis=0, dtype=np.int64)
    expected = [0.0] * len(mix.names)
    for group in _groups(drawn.sum(axis=0)[None], held > 0, mix.shares):
        for source, share in zip(group.sources.tolist(), group.shares, strict=True):
            expected[source] += float(share * int(group.totals.sum()) / int(drawn.sum()))
    return [
        SourceDraws(
            name=name,
            samples=mix.sizes[source],
            weight=float(mix.shares[source]),
            expected=expected[source],
            draws=int(drawn[source].sum()),
            passes={
                difficulties[at]: int(drawn[source, at]) / int(held[source, at])
                for at in np.flatnonzero(drawn[source]).tolist()
            },
        )
        for source, name in enumerate(mix.names)
    ]


def source_line(draws: SourceDraws) -> str:
    """What a table says of a source beside its name."""
    passes = ", ".join(f"{name} {times:.2f}" for name, times in draws.passes.items())
    shares = f"weight {draws.weight:.1%}, share {draws.expected:.1%}"
    return f"{draws.samples:,}; {shares}; {draws.draws:,} drawn; passes {passes or 'none'}"


def source_warnings(draws: Sequence[SourceDraws]) -> list[str]:
    """Where the weights are not what the sources have of the run."""
    found = []
    off = [one for one in draws if abs(one.expected - one.weight) > 1e-9]
    if off:
        parts = ", ".join(
            f"{one.name} is {one.expected:.1%} of the samples, not {one.weight:.1%}" for one in off
        )
        found.append(
            "the weights of the sources hold within each difficulty, and not every source has"
            f" samples of each that the curriculum uses: {parts}"
        )
    return found


def _groups(counts: np.ndarray, held: np.ndarray, shares: Sequence[Fraction]) -> Iterator[_Group]:
    used = np.flatnonzero(counts.any(axis=0)).tolist()
    patterns = {
        difficulty: tuple(np.flatnonzero(held[:, difficulty]).tolist()) for difficulty in used
    }
    for sources in dict.fromkeys(patterns.values()):
        difficulties = np.array([one for one in used if patterns[one] == sources])
        whole = sum(shares[source] for source in sources)
        parts = tuple(shares[source] / whole for source in sources)
        yield _Group(difficulties, np.array(sources), parts, counts[:, difficulties].sum(axis=1))


def _deal(group: _Group) -> np.ndarray:
    """Samples of each source of the group in each step: int64[steps, m]."""
    if len(group.sources) == 1:
        return group.totals[:, None].copy()
    denominator = math.lcm(*(share.denominator for share in group.shares))
    units = [int(share * denominator) for share in group.shares]
    so_far = np.concatenate([[0], np.cumsum(group.totals)])
    dtype = np.int64 if int(so_far[-1]) * denominator < _INT64_ROOM else object
    return round_cumulative(
        so_far.astype(dtype)[:, None] * np.array(units, dtype=dtype), denominator
    )


def _table(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Whole numbers with these sums in every step: int64[steps, m, k] of int64[steps, m] and
    int64[steps, k].

    The samples of a step lie on a circle, by source; laid over it by difficulty, and turned a
    little further in each step, they meet in proportion to both in the long run.
    """
    totals = rows.sum(axis=1)
    turns = np.arange(len(rows), dtype=np.uint64) * np.uint64(_GOLDEN) >> np.uint64(32)
    turned = (turns * totals.astype(np.uint64) >> np.uint64(32)).astype(np.int64)
    row_ends, column_ends = np.cumsum(rows, axis=1), np.cumsum(columns, axis=1)
    table = np.zeros((*rows.shape, columns.shape[1]), dtype=np.int64)
    for i in range(rows.shape[1]):
        end = row_ends[:, i] + turned
        for j in range(columns.shape[1]):
            first, last = column_ends[:, j] - columns[:, j], column_ends[:, j]
            for row_end in (end, end - totals):
                overlap = np.minimum(row_end, last) - np.maximum(row_end - rows[:, i], first)
                table[:, i, j] += np.maximum(overlap, 0)
    return table


def _even_out(groups: Sequence[_Group], drawn: Sequence[np.ndarray], sources: int) -> None:
    """Pass samples on within a step, in place, where a source is a whole sample off its target over
    all groups.
    """
    errors = np.zeros((len(drawn[0]), sources))
    for group, rows in zip(groups, drawn, strict=True):
        targets = np.cumsum(group.totals)[:, None] * np.array(
            [float(share) for share in group.shares]
        )
        errors[:, group.sources] += np.cumsum(rows, axis=0) - targets
    passed = np.zeros(sources)  # from each source to others so far, as what it has more of since
    step = _next_off(errors, passed, 0)
    while step is not None:
        now = errors[step] + passed
        while path := _path(groups, drawn, step, now):
            for number, giver, taker in path:
                places = groups[number].sources.tolist()
                drawn[number][step, places.index(giver)] -= 1
                drawn[number][step, places.index(taker)] += 1
                for source, change in ((giver, -1), (taker, 1)):
                    passed[source] += change
                    now[source] += change
        step = _next_off(errors, passed, step + 1)


def _next_off(errors: np.ndarray, passed: np.ndarray, first: int) -> int | None:
    """The first step from `first` on after which a source is a whole sample off."""
    for begin in range(first, len(errors), 1024):
        off = (np.abs(errors[begin : begin + 1024] + passed) >= _ALMOST_ONE).any(axis=1)
        if off.any():
            return begin + int(off.argmax())
    return None


def _path(
    groups: Sequence[_Group], drawn: Sequence[np.ndarray], step: int, errors: np.ndarray
) -> list[tuple[int, int, int]] | None:
    """(group, giver, taker) of each sample to pass on, from a source that has too many to one that
    has too few.

    None where no source is a whole sample off, or none can be brought nearer without another going
    further off.
    """
    order = np.argsort(-errors, kind="stable").tolist()
    for giver in order:
        found: dict[int, list[tuple[int, int, int]]] = {giver: []}
        queue = [giver]
        for source in queue:
            for number, group in enumerate(groups):
                places = group.sources.tolist()
                if source in places and drawn[number][step, places.index(source)]:
                    for other in places:
                        if other not in found:
                            found[other] = [*found[source], (number, source, other)]
                            queue.append(other)
        taker = min(found, key=lambda source: (errors[source], source))
        off = errors[giver] >= _ALMOST_ONE or errors[taker] <= -_ALMOST_ONE
        if off and errors[giver] - errors[taker] > 1 + 1e-9:
            return found[taker]
    return None
