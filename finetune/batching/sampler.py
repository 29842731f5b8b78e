"""Which samples are optimizer step k: a pure function of data, schedule, global batch size, number of steps and seed.

Nothing here knows how many devices there are, and nothing is remembered between steps: to resume at step k is to ask
for step k.
"""

from __future__ import annotations

import hashlib
import json
import math
from fractions import Fraction

import numpy as np

from finetune.batching.curriculum import Schedule, count_difficulties, plan_counts, portions
from finetune.batching.permutation import EXACT_LIMIT, Permutation, exact_order
from finetune.errors import DataError, raise_problems

ORDER_VERSION = 1  # part of the fingerprint: raise it when the same arguments give another order
_STEP_KEY, _DIFFICULTY_KEY = 0, 1  # keep the random streams of steps and of difficulties apart
_PASSES_HELD = 16  # permutations kept in memory, or two for each difficulty where that is more


class GlobalBatches:
    """The global batches of a run.

    The k-th sample of a difficulty over the whole run is the one at position k mod n of the difficulty's pass k div n,
    where n is the number of its samples and each pass is a permutation of its own: no sample of a difficulty comes
    again before every other has come as often. Inside a step the difficulties are shuffled.

    Args:
        difficulty_of_sample: int[N], the index of each sample's difficulty in `schedule.difficulties`.
        schedule: difficulties and stages; `uniform_schedule()` for training without curriculum.
        total_steps: optimizer steps of the whole run, not of what is left of it.
        by_difficulty: int[N], `numpy.argsort(difficulty_of_sample, kind="stable")` where that is there already.
        exact_limit: see `Permutation`; for tests.

    Raises:
        DataError: a difficulty with weight has no samples, or a sample has an index that is no difficulty.
    """

    def __init__(
        self,
        difficulty_of_sample: np.ndarray,
        schedule: Schedule,
        global_batch_size: int,
        total_steps: int,
        seed: int,
        *,
        by_difficulty: np.ndarray | None = None,
        exact_limit: int = EXACT_LIMIT,
    ) -> None:
        difficulty_of_sample = np.asarray(difficulty_of_sample)
        self.schedule, self.seed = schedule, seed
        self.global_batch_size, self.total_steps = global_batch_size, total_steps
        self.samples_per_difficulty = _samples_per_difficulty(difficulty_of_sample, schedule)
        # The samples of difficulty l are _members[_starts[l] : _starts[l + 1]], in the order of the data.
        # With one difficulty that is each sample at its own place, and None.
        self._members: np.ndarray | None = by_difficulty
        if len(schedule.difficulties) == 1:
            self._members = None
        elif by_difficulty is None:
            self._members = np.argsort(difficulty_of_sample, kind="stable")
        self._starts = np.concatenate([[0], np.cumsum(self.samples_per_difficulty)])
        self._difficulties_digest = _digest(difficulty_of_sample)
        self.counts = plan_counts(schedule, total_steps, global_batch_size)
        self._taken_before = np.cumsum(self.counts, axis=0) - self.counts
        self._stages = schedule.stage_of_steps(total_steps)
        self._exact_limit = exact_limit
        self._passes: dict[tuple[int, int], Permutation] = {}

    def __len__(self) -> int:
        return self.total_steps

    def indices(self, step: int) -> np.ndarray:
        """The samples of a step, counted from 0 (else IndexError): int64[global_batch_size] dataset indices."""
        self._check(step)
        counts = self.counts[step]
        batch = np.concatenate([self._take(difficulty, step) for difficulty in np.flatnonzero(counts).tolist()])
        if np.count_nonzero(counts) == 1:
            return batch
        # Slot i takes a difficulty from the shuffled multiset; the slots of a difficulty take its samples in order.
        order = exact_order(self.global_batch_size, self.seed, _STEP_KEY, step)
        difficulty_of_slot = np.repeat(np.arange(len(counts)), counts)[order]
        shuffled = np.empty_like(batch)
        shuffled[np.argsort(difficulty_of_slot, kind="stable")] = batch
        return shuffled

    def stage(self, step: int) -> int:
        """The index of the stage that the middle of a step lies in."""
        self._check(step)
        return int(self._stages[step])

    def passes(self) -> dict[str, float]:
        """How many times the whole run goes through each difficulty; 0 for one that no step has."""
        taken = self.counts.sum(axis=0)
        return {
            name: int(count) / int(samples) if count else 0.0
            for name, count, samples in zip(self.schedule.difficulties, taken, self.samples_per_difficulty, strict=True)
        }

    @property
    def unused(self) -> dict[str, int]:
        """Samples by difficulty that no step can have, as its weight is zero in every stage."""
        used = self.schedule.ever_used()
        counts = zip(self.schedule.difficulties, self.samples_per_difficulty.tolist(), used, strict=True)
        return {name: samples for (name, samples, is_used) in counts if samples and not is_used}

    def fingerprint(self) -> str:
        """SHA-256 of everything that decides the order. Equal fingerprints mean equal global batches at every step."""
        facts = {
            "version": ORDER_VERSION,
            "seed": self.seed,
            "global_batch_size": self.global_batch_size,
            "total_steps": self.total_steps,
            "schedule": self.schedule.canonical(),
            "levels": self._difficulties_digest,
            "exact_limit": self._exact_limit,
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode("utf-8")).hexdigest()

    def _check(self, step: int) -> None:
        if not 0 <= step < self.total_steps:
            raise IndexError(f"step {step} is not one of the {self.total_steps} steps, counted from 0")

    def _take(self, difficulty: int, step: int) -> np.ndarray:
        """The samples of a difficulty in a step, in order: int64[counts[step, difficulty]]."""
        size, start = int(self.samples_per_difficulty[difficulty]), int(self._starts[difficulty])
        first = int(self._taken_before[step, difficulty])
        # Numbers over the whole run, so that a step may hold the end of one pass and the beginning of the next.
        numbers = np.arange(first, first + int(self.counts[step, difficulty]))
        passes = numbers // size
        parts = [
            self._pass(difficulty, number)(numbers[passes == number] - number * size)
            for number in range(int(passes[0]), int(passes[-1]) + 1)
        ]
        places = np.concatenate(parts)
        return places if self._members is None else self._members[start + places]

    def _pass(self, difficulty: int, number: int) -> Permutation:
        """The order of a difficulty in one pass. The ones made last are kept: steps usually come in order."""
        key = (difficulty, number)
        if key not in self._passes:
            while len(self._passes) >= max(_PASSES_HELD, 2 * len(self.schedule.difficulties)):
                del self._passes[next(iter(self._passes))]
            size = int(self.samples_per_difficulty[difficulty])
            self._passes[key] = Permutation(size, self.seed, _DIFFICULTY_KEY, *key, exact_limit=self._exact_limit)
        return self._passes[key]


def count_steps(samples: int, global_batch_size: int, num_epochs: float, max_steps: int | None = None) -> int:
    """Optimizer steps of a run: max_steps, or ceil(num_epochs x samples / global_batch_size). Every batch is full."""
    if max_steps is not None:
        return max_steps
    return math.ceil(Fraction(repr(float(num_epochs))) * samples / global_batch_size)


def _samples_per_difficulty(difficulty_of_sample: np.ndarray, schedule: Schedule) -> np.ndarray:
    """Samples of each difficulty, int64[difficulties], checked against the schedule."""
    count = len(schedule.difficulties)
    if not all(((portion >= 0) & (portion < count)).all() for portion in portions(difficulty_of_sample)):
        outside = np.flatnonzero((difficulty_of_sample < 0) | (difficulty_of_sample >= count))
        first = int(outside[0])
        raise DataError(
            f"{len(outside):,} samples have a difficulty that is not one of 0..{count - 1}",
            where=f"sample {first}, difficulty {difficulty_of_sample[first]}",
            fix=f"use the indices of the schedule's difficulties: {', '.join(schedule.difficulties)}",
        )
    samples = count_difficulties(difficulty_of_sample, count)
    raise_problems(schedule.empty_difficulties(samples))
    return samples


def _digest(difficulty_of_sample: np.ndarray) -> str:
    digest = hashlib.sha256()
    for portion in portions(difficulty_of_sample):
        digest.update(portion.astype("<i8").tobytes())
    return digest.hexdigest()
