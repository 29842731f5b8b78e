"""Which samples are optimizer step k: a pure function of data, schedule, global batch size, number
of steps and seed.

Nothing here knows how many devices there are, and nothing is remembered between steps: to resume at
step k is to ask for step k.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from finetune.batching.curriculum import Schedule, count_difficulties, plan_counts, portions
from finetune.batching.mixing import Mix, SourceDraws, plan_cells, source_draws
from finetune.batching.permutation import EXACT_LIMIT, Permutation, exact_order
from finetune.errors import DataError, raise_problems

ORDER_VERSION = 1  # part of the fingerprint: raise it when the same arguments give another order
# keep the random streams of steps, difficulties and cells apart
_STEP_KEY, _DIFFICULTY_KEY, _CELL_KEY = 0, 1, 2
_PASSES_HELD = 16  # permutations kept in memory, or two for each cell where that is more
_MARKED = 256  # steps between those before which it is noted what was taken


@dataclass(frozen=True)
class _Cell:
    """Samples that share one order: those of a difficulty or, if sources are mixed, those of a
    difficulty within one source.
    """

    start: int  # its samples are `_members[start : start + size]`
    size: int
    key: tuple[int, ...]  # of its permutations


class GlobalBatches:
    """The global batches of a run.

    A difficulty with n samples is passed through again and again. Each pass is a separate
    permutation, so no sample of a difficulty comes again before every other has come as often. The
    k-th sample over the whole run is at position k mod n of pass k div n. Inside a step the
    difficulties are shuffled. If sources are mixed, the same holds for each difficulty within each
    source. These are the cells below; without mixing, a cell is a difficulty.

    Args:
        difficulty_of_sample: int[N], the index of each sample's difficulty in
            `schedule.difficulties`.
        schedule: difficulties and stages; `uniform_schedule()` for training without curriculum.
        total_steps: optimizer steps of the whole run, also when it is resumed.
        mix: sources and their weights; None: the samples are one whole.
        by_difficulty: int[N], `numpy.argsort(difficulty_of_sample, kind="stable")` if it is known
            already.
        exact_limit: see `Permutation`; for tests.

    Raises:
        DataError: a difficulty with weight has no samples, or a sample has an index that is no
            difficulty.
    """

    def __init__(
        self,
        difficulty_of_sample: np.ndarray,
        schedule: Schedule,
        global_batch_size: int,
        total_steps: int,
        seed: int,
        *,
        mix: Mix | None = None,
        by_difficulty: np.ndarray | None = None,
        exact_limit: int = EXACT_LIMIT,
    ) -> None:
        difficulty_of_sample = np.asarray(difficulty_of_sample)
        self.schedule = schedule
        self.seed = seed
        self.global_batch_size = global_batch_size
        self.total_steps = total_steps
        self.samples_per_difficulty = _samples_per_difficulty(difficulty_of_sample, schedule)
        # The samples by difficulty, those of one in the order of the data: one source's are one
        # after another there. With one difficulty that is each sample at its own place, and None.
        self._members: np.ndarray | None = by_difficulty
        if len(schedule.difficulties) == 1:
            self._members = None
        elif by_difficulty is None:
            self._members = np.argsort(difficulty_of_sample, kind="stable")
        starts = np.concatenate([[0], np.cumsum(self.samples_per_difficulty)])
        self._difficulties_digest = _digest(difficulty_of_sample)
        self.counts = plan_counts(schedule, total_steps, global_batch_size)
        self.mix = mix
        self._cell_counts = self.counts
        self._cells = _cells_of_difficulties(self.samples_per_difficulty, starts)
        if mix is not None:
            self._held = _samples_per_cell(mix, starts, self._members)
            self._table = plan_cells(self.counts, self._held > 0, mix.shares)
            self._cell_counts = self._table.reshape(total_steps, -1)
            self._cells = _cells_of_sources(self._held, starts)
        self._taken_at_marks = _taken_at_marks(self._cell_counts)
        self._stages = schedule.stage_of_steps(total_steps)
        self._exact_limit = exact_limit
        self._passes: dict[tuple[int, int], Permutation] = {}

    def __len__(self) -> int:
        return self.total_steps

    def indices(self, step: int) -> np.ndarray:
        """Return the samples of a step, counted from 0 (else IndexError): int64[global_batch_size]
        dataset indices.
        """
        self._check(step)
        counts = self._cell_counts[step]
        taken = self._taken_before(step)
        cells = np.flatnonzero(counts).tolist()
        parts = [self._take(cell, int(taken[cell]), int(counts[cell])) for cell in cells]
        batch = np.concatenate(parts)
        if len(cells) == 1:
            return batch
        # Slot i takes a cell from the shuffled multiset; the slots of a cell take its samples in
        # order.
        order = exact_order(self.global_batch_size, self.seed, _STEP_KEY, step)
        cell_of_slot = np.repeat(np.arange(len(counts)), counts)[order]
        shuffled = np.empty_like(batch)
        shuffled[np.argsort(cell_of_slot, kind="stable")] = batch
        return shuffled

    def drawn(self) -> np.ndarray:
        """Which samples are in any step: bool[N]."""
        found = np.zeros(int(self.samples_per_difficulty.sum()), dtype=bool)
        for cell, taken in enumerate(self._cell_counts.sum(axis=0).tolist()):
            if taken:
                found[self._take(cell, 0, min(taken, self._cells[cell].size))] = True
        return found

    def stage(self, step: int) -> int:
        """Return the index of the stage that contains the middle of a step."""
        self._check(step)
        return int(self._stages[step])

    def passes(self) -> dict[str, float]:
        """Return how many times the run goes through each difficulty; 0 if no step has it."""
        passes = {}
        for number, name in enumerate(self.schedule.difficulties):
            taken = int(self.counts[:, number].sum())
            passes[name] = taken / int(self.samples_per_difficulty[number]) if taken else 0.0
        return passes

    def source_draws(self) -> list[SourceDraws]:
        """Return what the run draws from each source; empty if none are mixed."""
        if self.mix is None:
            return []
        return source_draws(self.mix, self._held, self._table, self.schedule.difficulties)

    @property
    def unused(self) -> dict[str, int]:
        """Samples by difficulty that no step can have, as its weight is zero in every stage."""
        used = self.schedule.ever_used()
        samples = self.samples_per_difficulty.tolist()
        names = self.schedule.difficulties
        return {names[at]: samples[at] for at in np.flatnonzero(~used) if samples[at]}

    def fingerprint(self) -> str:
        """SHA-256 of everything that decides the order. Equal fingerprints mean equal global
        batches at every step.
        """
        facts: dict[str, Any] = {
            "version": ORDER_VERSION,
            "seed": self.seed,
            "global_batch_size": self.global_batch_size,
            "total_steps": self.total_steps,
            "schedule": self.schedule.canonical(),
            "levels": self._difficulties_digest,
            "exact_limit": self._exact_limit,
        }
        if self.mix is not None:
            shares = [str(share) for share in self.mix.shares]
            facts["sources"] = [shares, [int(start) for start in self.mix.starts]]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode("utf-8")).hexdigest()

    def _check(self, step: int) -> None:
        if not 0 <= step < self.total_steps:
            raise IndexError(
                f"step {step} is not one of the {self.total_steps} steps, counted from 0"
            )

    def _taken_before(self, step: int) -> np.ndarray:
        """Samples of each cell in the steps before: int64[cells]."""
        mark = step // _MARKED
        return self._taken_at_marks[mark] + self._cell_counts[mark * _MARKED : step].sum(
            axis=0, dtype=np.int64
        )

    def _take(self, cell: int, first: int, count: int) -> np.ndarray:
        """`count` samples of a cell, in order, from number `first` of the whole run:
        int64[count].
        """
        size = self._cells[cell].size
        # Numbers over the whole run, so that a step may hold the end of one pass and the beginning
        # of the next.
        numbers = np.arange(first, first + count)
        passes = numbers // size
        parts = [
            self._pass(cell, number)(numbers[passes == number] - number * size)
            for number in range(int(passes[0]), int(passes[-1]) + 1)
        ]
        places = self._cells[cell].start + np.concatenate(parts)
        return places if self._members is None else self._members[places]

    def _pass(self, cell: int, number: int) -> Permutation:
        """Return the order of a cell in one pass. The ones made last are kept: steps usually come
        in order.
        """
        key = (cell, number)
        if key not in self._passes:
            while len(self._passes) >= max(_PASSES_HELD, 2 * len(self._cells)):
                del self._passes[next(iter(self._passes))]
            found = self._cells[cell]
            self._passes[key] = Permutation(
                found.size, self.seed, *found.key, number, exact_limit=self._exact_limit
            )
        return self._passes[key]


def _cells_of_difficulties(samples: np.ndarray, starts: np.ndarray) -> list[_Cell]:
    """Return the cells of int64[difficulties] samples."""
    return [
        _Cell(int(starts[difficulty]), int(size), (_DIFFICULTY_KEY, difficulty))
        for difficulty, size in enumerate(samples)
    ]


def _cells_of_sources(held: np.ndarray, starts: np.ndarray) -> list[_Cell]:
    """Return the cells of int64[sources, difficulties] samples, source by source."""
    first = starts[:-1] + np.cumsum(held, axis=0) - held
    return [
        _Cell(int(first[place]), int(held[place]), (_CELL_KEY, *map(int, place)))
        for place in np.ndindex(*held.shape)
    ]


def _samples_per_cell(mix: Mix, starts: np.ndarray, members: np.ndarray | None) -> np.ndarray:
    """Count the samples of each source and difficulty: int64[sources, difficulties].

    Args:
        starts: where each difficulty begins in `members`, and the number of samples.
        members: the samples by difficulty; None if there is one difficulty.
    """
    if members is None:
        return np.array(mix.sizes, dtype=np.int64)[:, None]
    held = []
    for start, end in itertools.pairwise(starts.tolist()):
        ends = np.searchsorted(members[start:end], mix.starts)
        held.append(np.diff(ends))
    return np.stack(held, axis=1)


def _taken_at_marks(counts: np.ndarray) -> np.ndarray:
    """Samples of each cell before every step that is a multiple of _MARKED: int64[marks, cells]."""
    marks = np.arange(0, len(counts), _MARKED)
    sums = np.add.reduceat(counts, marks, axis=0, dtype=np.int64)
    return np.cumsum(sums, axis=0) - sums


def count_steps(
    samples: int, global_batch_size: int, num_epochs: float, max_steps: int | None = None
) -> int:
    """Optimizer steps of a run: max_steps, or ceil(num_epochs x samples / global_batch_size). Every
    batch is full.
    """
    if max_steps is not None:
        return max_steps
    return math.ceil(Fraction(repr(float(num_epochs))) * samples / global_batch_size)


def _samples_per_difficulty(difficulty_of_sample: np.ndarray, schedule: Schedule) -> np.ndarray:
    """Samples of each difficulty, int64[difficulties], checked against the schedule."""
    count = len(schedule.difficulties)
    parts = portions(difficulty_of_sample)
    if not all(((part >= 0) & (part < count)).all() for part in parts):
        outside = np.flatnonzero((difficulty_of_sample < 0) | (difficulty_of_sample >= count))
        first = int(outside[0])
        raise DataError(
            f"{len(outside):,} samples have a difficulty that is not one of 0..{count - 1}",
            where=f"sample {first}, difficulty {difficulty_of_sample[first]}",
            fix=(
                "use the indices of the schedule's difficulties:"
                f" {', '.join(schedule.difficulties)}"
            ),
        )
    samples = count_difficulties(difficulty_of_sample, count)
    raise_problems(schedule.empty_difficulties(samples))
    return samples


def _digest(difficulty_of_sample: np.ndarray) -> str:
    """Return the SHA-256 of the difficulties as little-endian int64."""
    digest = hashlib.sha256()
    for portion in portions(difficulty_of_sample):
        digest.update(portion.astype("<i8").tobytes())
    return digest.hexdigest()
