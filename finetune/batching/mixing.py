"""Sources mixed by weight: how many samples of each source and difficulty every global batch has.

The curriculum comes first: `plan_counts` decides how many samples of each difficulty a global batch
has. Within a difficulty, the sources that have samples of it share them by their weights. After a
step, the target of a source is the sum of its shares in each difficulty so far. If every source has
every difficulty that is used, that is the share of all samples that its weight gives.

Difficulties that the same sources have form one group. `round_cumulative` deals the group's samples
to these sources: each source has had the floor or the ceiling of its target in the group. If no
source shares two groups with others, that is the floor or the ceiling of its whole target.
Otherwise errors of several groups may add up to a sample. Then `_even_out` moves samples between
sources within the step, which keeps the error below one sample in all but rare steps. There is no
proof; tests check that the error of random plans of such sources stays below two.
"""

from __future__ import annotations

import itertools
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
        what = "no sample of this source is left to be mixed"
        fix = "remove it from data, or see above why its records were dropped"
        sizes = zip(self.names, self.sizes, strict=True)
        raise_problems([DataError(what, name, fix) for name, size in sizes if not size])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each source."""
        return tuple(end - start for start, end in itertools.pairwise(self.starts))

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """The weights as exact shares that sum to 1: of the decimals that the user wrote."""
        exact = [
            Fraction(size) if weight == "natural" else Fraction(repr(weight))
            for weight, size in zip(self.weights, self.sizes, strict=True)
        ]
        return tuple(weight / sum(exact) for weight in exact)


def mix_of(sources: Sequence[DataSource], starts: Sequence[int]) -> Mix | None:
    """Return the mix of the entries of `data` whose samples begin at `starts`; None if they are not
    mixed.
    """
    weights = tuple(source.weight for source in sources if source.weight is not None)
    return Mix(source_names(sources), weights, tuple(starts)) if weights else None


@dataclass(frozen=True)
class SourceDraws:
    """What a run draws from a mixed source.

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
    """Difficulties that the same sources have, with the share of each source and the samples of
    every step.
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
    shared = [group.sources for group in groups if len(group.sources) > 1]
    several = sum(np.bincount(sources, minlength=len(held)) for sources in shared)
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
    """Return what a run draws from each source.

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
    found = []
    for source, name in enumerate(mix.names):
        passes = {
            difficulties[at]: int(drawn[source, at]) / int(held[source, at])
            for at in np.flatnonzero(drawn[source]).tolist()
        }
        weight = float(mix.shares[source])
        draws = int(drawn[source].sum())
        found.append(SourceDraws(name, mix.sizes[source], weight, expected[source], draws, passes))
    return found


def source_line(draws: SourceDraws) -> str:
    """Describe a source in a table, next to its name."""
    passes = ", ".join(f"{name} {times:.2f}" for name, times in draws.passes.items())
    shares = f"weight {draws.weight:.1%}, share {draws.expected:.1%}"
    return f"{draws.samples:,}; {shares}; {draws.draws:,} drawn; passes {passes or 'none'}"


def source_warnings(draws: Sequence[SourceDraws]) -> list[str]:
    """Warn if sources cannot have the share that their weight asks for."""
    off = [
        f"{one.name} is {one.expected:.1%} of the samples, not {one.weight:.1%}"
        for one in draws
        if abs(one.expected - one.weight) > 1e-9
    ]
    if not off:
        return []
    return [
        "the weights of the sources hold within each difficulty, and not every source has"
        f" samples of each that the curriculum uses: {', '.join(off)}"
    ]


def _groups(counts: np.ndarray, held: np.ndarray, shares: Sequence[Fraction]) -> Iterator[_Group]:
    difficulties_of: dict[tuple[int, ...], list[int]] = {}
    for difficulty in np.flatnonzero(counts.any(axis=0)).tolist():
        sources = tuple(np.flatnonzero(held[:, difficulty]).tolist())
        difficulties_of.setdefault(sources, []).append(difficulty)
    for sources, difficulties in difficulties_of.items():
        whole = sum(shares[source] for source in sources)
        parts = tuple(shares[source] / whole for source in sources)
        totals = counts[:, difficulties].sum(axis=1)
        yield _Group(np.array(difficulties), np.array(sources), parts, totals)


def _deal(group: _Group) -> np.ndarray:
    """Return the samples of each source of the group in each step: int64[steps, m]."""
    if len(group.sources) == 1:
        return group.totals[:, None].copy()
    denominator = math.lcm(*(share.denominator for share in group.shares))
    units = [int(share * denominator) for share in group.shares]
    so_far = np.concatenate([[0], np.cumsum(group.totals)])
    dtype = np.int64 if int(so_far[-1]) * denominator < _INT64_ROOM else object
    targets = so_far.astype(dtype)[:, None] * np.array(units, dtype=dtype)
    return round_cumulative(targets, denominator)


def _table(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Find whole numbers with these sums in every step.

    Args:
        rows: int64[steps, m], samples of each source.
        columns: int64[steps, k], samples of each difficulty.

    Returns:
        int64[steps, m, k].

    Imagine the samples of a step on a circle, sorted by source, and over it on a second circle,
    sorted by difficulty. The second is turned a little further in each step, so in the long run
    sources and difficulties meet in proportion to both.
    """
    totals = rows.sum(axis=1)
    half = np.uint64(32)
    turns = np.arange(len(rows), dtype=np.uint64) * np.uint64(_GOLDEN) >> half
    turned = (turns * totals.astype(np.uint64) >> half).astype(np.int64)
    row_ends = np.cumsum(rows, axis=1)
    column_ends = np.cumsum(columns, axis=1)
    table = np.zeros((*rows.shape, columns.shape[1]), dtype=np.int64)
    for i in range(rows.shape[1]):
        end = row_ends[:, i] + turned
        for j in range(columns.shape[1]):
            last = column_ends[:, j]
            first = last - columns[:, j]
            for row_end in (end, end - totals):
                overlap = np.minimum(row_end, last) - np.maximum(row_end - rows[:, i], first)
                table[:, i, j] += np.maximum(overlap, 0)
    return table


def _even_out(groups: Sequence[_Group], drawn: Sequence[np.ndarray], sources: int) -> None:
    """Pass samples on within a step, in place, if a source is a whole sample off its target over
    all groups.

    Args:
        drawn: for each group what `_deal` returned.
        sources: how many there are.
    """
    errors = np.zeros((len(drawn[0]), sources))
    for group, rows in zip(groups, drawn, strict=True):
        shares = np.array([float(share) for share in group.shares])
        targets = np.cumsum(group.totals)[:, None] * shares
        errors[:, group.sources] += np.cumsum(rows, axis=0) - targets
    passed = np.zeros(sources)  # from each source to others so far, as what it has more of since
    step = _next_off(errors, passed, 0)
    while step is not None:
        now = errors[step] + passed
        while path := _path(groups, drawn, step, now):
            for number, giver, taker in path:
                places = groups[number].sources.tolist()
                for source, change in ((giver, -1), (taker, 1)):
                    drawn[number][step, places.index(source)] += change
                    passed[source] += change
                    now[source] += change
        step = _next_off(errors, passed, step + 1)


def _next_off(errors: np.ndarray, passed: np.ndarray, first: int) -> int | None:
    """Return the first step from `first` on after which a source is a whole sample off.

    Args:
        errors: float64[steps, sources], samples too many after each step.
        passed: float64[sources], what was passed on in the steps before `first`.
    """
    for begin in range(first, len(errors), 1024):
        here = np.abs(errors[begin : begin + 1024] + passed)
        off = (here >= _ALMOST_ONE).any(axis=1)
        if off.any():
            return begin + int(off.argmax())
    return None


def _path(
    groups: Sequence[_Group], drawn: Sequence[np.ndarray], step: int, errors: np.ndarray
) -> list[tuple[int, int, int]] | None:
    """Find samples to pass on, from a source that has too many to one that has too few.

    Args:
        errors: float64[sources], samples too many after this step.

    Returns:
        (group, giver, taker) of each sample. None if no source is a whole sample off, or none can
        be brought nearer without moving another one further off.
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
