"""Who takes which samples of a global batch: rows for (rank, micro-step), the same on every rank without communication.

A row is what one device takes in one forward. Every rank has the same number of rows, because sharded training meets at
every layer of every row. All ranks wait for the heaviest row of a micro-step, so rows of like weight share a
micro-step, and within one the heavier rows go to the ranks that have had less.

Packing puts samples into rows under a token budget, longest first into the lightest row (LPT scheduling: Graham, 1969).
Padding puts samples of like length into rows of a fixed number of samples.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from finetune.errors import DataError

_BISECTIONS = 2  # a row less in a hundred is not worth another search


@dataclass(frozen=True, eq=False)
class ExecutionPlan:
    """One global batch on `world_size` ranks.

    Attributes:
        rows: for each rank, for each micro-step, int64[samples]: positions in the global batch, rising; empty where
            there is none.
        row_tokens: int64[ranks, micro-steps], real tokens of each row.
        row_paid_tokens: int64[ranks, micro-steps], tokens that a device computes for it: padding included.
        capacity_tokens: room of all rows: token budget x rows when packing, paid tokens when padding.
    """

    rows: tuple[tuple[np.ndarray, ...], ...]
    row_tokens: np.ndarray
    row_paid_tokens: np.ndarray
    capacity_tokens: int

    @property
    def world_size(self) -> int:
        return len(self.rows)

    @property
    def micro_steps(self) -> int:
        """Rows per rank."""
        return len(self.rows[0])

    @cached_property
    def tokens(self) -> int:
        """Real tokens of the global batch."""
        return int(self.row_tokens.sum())

    @property
    def padding_tokens(self) -> int:
        """Tokens computed for nothing."""
        return int(self.row_paid_tokens.sum()) - self.tokens

    @property
    def fill(self) -> float:
        """Real tokens / room of all rows, 0 to 1."""
        return self.tokens / self.capacity_tokens if self.capacity_tokens else 0.0

    @property
    def imbalance(self) -> float:
        """Tokens that the busiest rank computes / mean of the ranks; 1 is perfect."""
        return _over_mean(self.row_paid_tokens.sum(axis=1).max(), self.row_paid_tokens, self.world_size)

    @property
    def lockstep_imbalance(self) -> float:
        """The same where ranks meet after every row (ZeRO-3): heaviest rows of the micro-steps / mean of the ranks."""
        return _over_mean(self.row_paid_tokens.max(axis=0).sum(), self.row_paid_tokens, self.world_size)

    @property
    def heaviest_row_tokens(self) -> int:
        """Tokens computed for the heaviest row."""
        return int(self.row_paid_tokens.max())


def plan_rows(
    lengths: np.ndarray | Sequence[int],
    world_size: int,
    *,
    token_budget: int | None = None,
    samples_per_row: int | None = None,
) -> ExecutionPlan:
    """Assign the samples of one global batch to rows.

    Args:
        lengths: int[G], tokens of each sample, each at least 1.
        world_size: ranks.
        token_budget: pack rows of at most this many tokens. The number of rows is the smallest multiple of world_size
            that the search finds to fit.
        samples_per_row: pad rows of at most this many samples, sorted by length. Exactly one of the two is given.

    Raises:
        DataError: a sample is longer than the budget: its position and length are named.
        ValueError: not exactly one of the two ways, or a number below 1.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if (token_budget is None) == (samples_per_row is None):
        raise ValueError("give token_budget (packing) or samples_per_row (padding), one of them")
    limit = token_budget if samples_per_row is None else samples_per_row
    if limit < 1 or world_size < 1 or (len(lengths) and lengths.min() < 1):
        raise ValueError("token_budget, samples_per_row, world_size and every length must be at least 1")
    # Longest first; of equals the earlier first.
    order = np.argsort(-lengths, kind="stable")
    if samples_per_row is not None:
        row_of_rank = np.arange(len(lengths)) // samples_per_row
        row_count = _multiple(-(-len(lengths) // samples_per_row), world_size)
    else:
        row_of_rank, row_count = _pack(lengths[order], world_size, limit, order)
    row_of = np.empty(len(lengths), dtype=np.int64)
    row_of[order] = row_of_rank
    return _spread(lengths, row_of, row_count, world_size, token_budget)


def _pack(descending: np.ndarray, world_size: int, budget: int, order: np.ndarray) -> tuple[np.ndarray, int]:
    """Rows of samples that are sorted from long to short: (int64[G] row of each, number of rows)."""
    if len(descending) and descending[0] > budget:
        too_long = np.flatnonzero(descending > budget)
        shown = ", ".join(f"position {order[i]} with {descending[i]:,} tokens" for i in too_long[:10])
        raise DataError(
            f"{len(too_long)} samples of a global batch are longer than the token budget of a row, {budget:,}",
            where=shown + (", ..." if len(too_long) > 10 else ""),
            fix="raise the budget (micro_batch_size x cutoff_len) or shorten the samples with a lower cutoff_len",
        )
    items = descending.tolist()
    fewest = _multiple(_fewest_rows(descending, budget), world_size)
    # Too few rows: as many more as the samples that were left over fill, until it fits; then bisection of the last gap.
    failed, count = fewest - world_size, fewest
    while True:
        rows = _longest_first(items, count, budget)
        if len(rows) == len(items):
            break
        failed, count = count, count + _multiple(sum(items[len(rows) :]) // budget, world_size)
    for _ in range(_BISECTIONS):
        if count - failed == world_size:
            break
        middle = failed + (count - failed) // (2 * world_size) * world_size
        attempt = _longest_first(items, middle, budget)
        if len(attempt) == len(items):
            count, rows = middle, attempt
        else:
            failed = middle
    return np.array(rows, dtype=np.int64), count


def _fewest_rows(descending: np.ndarray, budget: int) -> int:
    """A number of rows that no packing can go below: the bound L2 of Martello and Toth (1990), and simpler ones."""
    if not len(descending):
        return 0
    # A sample above half the budget has a row of its own. Beside it goes nothing that is longer than what it leaves:
    # for every threshold, count the rows of the samples that leave less, and pour the samples from the threshold up to
    # half into the room left.
    sums = np.concatenate([[0], np.cumsum(descending)])
    above_half = int(np.searchsorted(-descending, -(budget // 2)))
    ends = np.arange(above_half, len(descending) + 1)
    thresholds = descending[np.maximum(ends - 1, 0)]
    alone = np.minimum(np.searchsorted(-descending, thresholds - budget), above_half)
    room = (above_half - alone) * budget - (sums[above_half] - sums[alone])
    poured = above_half + np.maximum(0, -((room - (sums[ends] - sums[above_half])) // budget))
    # Of the samples above budget / (n + 1) at most n share a row.
    shared = [-(-int(np.searchsorted(-descending, -(budget // (n + 1)))) // n) for n in range(2, 9)]
    return max(int(poured.max()), -(-int(sums[-1]) // budget), *shared)


def _longest_first(items: list[int], row_count: int, budget: int) -> list[int]:
    """Put each item, long to short, into the lightest row: their rows, up to the first item that does not fit."""
    # A row on the heap is one integer, tokens << shift | row: comparing and adding integers is the fastest that Python
    # does.
    shift = row_count.bit_length()
    mask, most = (1 << shift) - 1, ((budget + 1) << shift) - 1
    rows = list(range(min(row_count, len(items))))
    heap = [(tokens << shift) | row for row, tokens in zip(rows, items, strict=False)]
    heap.reverse()
    heap.sort()
    replace = heapq.heapreplace
    for tokens in items[row_count:]:
        lightest = heap[0]
        grown = lightest + (tokens << shift)
        if grown > most:
            break
        rows.append(lightest & mask)
        replace(heap, grown)
    return rows


def _spread(
    lengths: np.ndarray, row_of: np.ndarray, row_count: int, world_size: int, token_budget: int | None
) -> ExecutionPlan:
    """Give rows to ranks and micro-steps: the heaviest `world_size` rows are the first micro-step, and so on."""
    sizes = np.bincount(row_of, minlength=row_count)
    tokens = np.bincount(row_of, weights=lengths, minlength=row_count).astype(np.int64)
    if token_budget is None:
        longest = np.zeros(row_count, dtype=np.int64)
        np.maximum.at(longest, row_of, lengths)
        paid, capacity = longest * sizes, int((longest * sizes).sum())
    else:
        paid, capacity = tokens, row_count * token_budget
    slots = np.argsort(-paid, kind="stable").reshape(-1, world_size)
    if token_budget is None:
        slots = _lightest_rank_first(slots, paid)
    else:
        # Packed rows weigh nearly the same: dealing out every other micro-step backwards is enough, and faster.
        slots[1::2] = slots[1::2, ::-1].copy()
    slots = slots.T
    positions = np.argsort(row_of, kind="stable")
    ends = np.cumsum(sizes)
    starts, ends = (ends - sizes).tolist(), ends.tolist()
    rows = tuple(tuple([positions[starts[row] : ends[row]] for row in rank]) for rank in slots.tolist())
    return ExecutionPlan(rows, tokens[slots], paid[slots], capacity)


def _lightest_rank_first(micro_steps: np.ndarray, paid: np.ndarray) -> np.ndarray:
    """Rows of each micro-step, heavy to light, int64[micro-steps, ranks] -> the same at the ranks that take them."""
    totals = [0] * micro_steps.shape[1]
    slots = []
    for rows, tokens in zip(micro_steps.tolist(), paid[micro_steps].tolist(), strict=True):
        slot = [0] * len(totals)
        ranks = sorted(range(len(totals)), key=totals.__getitem__)
        for rank, row, row_tokens in zip(ranks, rows, tokens, strict=True):
            slot[rank] = row
            totals[rank] += row_tokens
        slots.append(slot)
    return np.array(slots, dtype=np.int64)


@dataclass(frozen=True)
class PlanSummary:
    """Execution plans of several global batches, for a start-up table. Shares and ratios are over all of them.

    Attributes:
        steps: how many global batches were planned.
        rows_per_rank: (fewest, mean, most) rows of a rank in a step.
        tokens: mean real tokens of a global batch.
        fill, imbalance, lockstep_imbalance: as in ExecutionPlan; imbalances are means.
        heaviest_row_tokens: over all steps.
        padding_share: tokens computed for nothing / tokens computed, of the plans themselves.
        padded_padding_share: the same for rows of `samples_per_row` samples: what a padded run pays.
    """

    steps: int
    rows_per_rank: tuple[int, float, int]
    tokens: float
    fill: float
    imbalance: float
    lockstep_imbalance: float
    heaviest_row_tokens: int
    padding_share: float
    padded_padding_share: float


def summarise(
    lengths_of_steps: Iterable[np.ndarray], world_size: int, *, token_budget: int, samples_per_row: int, packing: bool
) -> PlanSummary:
    """Plan each of some global batches, given the lengths of their samples, as the run would (`packing`) and padded.

    Raises:
        DataError: as plan_rows.
        ValueError: no global batch was given.
    """
    padded = [
        (lengths, plan_rows(lengths, world_size, samples_per_row=samples_per_row)) for lengths in lengths_of_steps
    ]
    plans = [plan_rows(lengths, world_size, token_budget=token_budget) if packing else plan for lengths, plan in padded]
    if not plans:
        raise ValueError("there is no global batch to summarise")
    rows = [plan.micro_steps for plan in plans]
    return PlanSummary(
        steps=len(plans),
        rows_per_rank=(min(rows), float(np.mean(rows)), max(rows)),
        tokens=float(np.mean([plan.tokens for plan in plans])),
        fill=_ratio(sum(plan.tokens for plan in plans), sum(plan.capacity_tokens for plan in plans)),
        imbalance=float(np.mean([plan.imbalance for plan in plans])),
        lockstep_imbalance=float(np.mean([plan.lockstep_imbalance for plan in plans])),
        heaviest_row_tokens=max(plan.heaviest_row_tokens for plan in plans),
        padding_share=_padding_share(plans),
        padded_padding_share=_padding_share([plan for _, plan in padded]),
    )


def _padding_share(plans: list[ExecutionPlan]) -> float:
    padding = sum(plan.padding_tokens for plan in plans)
    return _ratio(padding, padding + sum(plan.tokens for plan in plans))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _over_mean(most: np.ndarray, tokens: np.ndarray, world_size: int) -> float:
    total = int(tokens.sum())
    return float(most) * world_size / total if total else 1.0


def _multiple(count: int, world_size: int) -> int:
    """The smallest multiple of the world size that is at least `count` and at least one row for each rank."""
    return max(1, -(-count // world_size)) * world_size
