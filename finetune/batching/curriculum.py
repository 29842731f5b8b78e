"""The curriculum: how many samples of each difficulty every global batch has.

A schedule is a sequence of stages over the progress of the run, from 0 to 1. Global batch k of T
(from 0) covers the progress from k / T to (k + 1) / T. Its target for a difficulty is the integral
of the difficulty's weight over that interval. So a stage boundary inside a global batch counts for
the part that it covers. Targets are exact rational numbers, from the decimals that the user wrote:
0.3 is three tenths. `plan_counts` turns them into whole samples, with an error below one sample for
every difficulty after every global batch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from finetune.batching.rounding import round_cumulative
from finetune.config.fields import CurriculumConfig
from finetune.errors import DataError, FinetuneError, raise_problems

FEW_SAMPLES = 1000  # a difficulty with fewer is warned about
UNIFORM_DIFFICULTY = "all"
_INT64_ROOM = 1 << 61
_PORTION = 1 << 18
_CURRICULUM_SETTINGS = frozenset({"use_curriculum", "curriculum", "difficulty_field"})

logger = logging.getLogger("finetune")


@dataclass(frozen=True)
class Stage:
    """An interval of progress with its own mix. It begins where the stage before it ends."""

    until: float  # the progress at which it ends, above 0 and at most 1
    mix: tuple[float, ...]  # one weight per difficulty, in any unit: 80/20/0 is 0.8/0.2/0
    # "step": the mix holds throughout. "linear": it moves in a straight line from the mix of the
    # stage before, which it has at its beginning, to its own, which it has at its end.
    ramp: str = "step"


@dataclass(frozen=True)
class Schedule:
    """Difficulties and the stages that mix them; `CurriculumConfig` checks what users write."""

    difficulties: tuple[str, ...]
    stages: tuple[Stage, ...]

    def weights(self, progress: float) -> np.ndarray:
        """Shares at a progress from 0 to 1: float64[difficulties]. A boundary belongs to the later
        stage.
        """
        ends = [stage.until for stage in self.stages]
        index = min(int(np.searchsorted(ends, progress, side="right")), len(ends) - 1)
        mix = np.array(self.shares(index), dtype=np.float64)
        if self.stages[index].ramp == "step":
            return mix
        start = ends[index - 1]
        before = np.array(self.shares(index - 1), dtype=np.float64)
        return before + (mix - before) * min(1.0, (progress - start) / (ends[index] - start))

    def shares(self, stage: int) -> tuple[Fraction, ...]:
        """Return the mix of a stage as exact shares that sum to 1."""
        mix = [_exact(weight) for weight in self.stages[stage].mix]
        return tuple(weight / sum(mix) for weight in mix)

    def stage_of_steps(self, total_steps: int) -> np.ndarray:
        """Return the stage that contains the middle of each step: int64[total_steps]."""
        # A step k is before a boundary b when k + 1/2 < b T: those are the first ceil(b T - 1/2)
        # steps.
        half = Fraction(1, 2)
        ends = [math.ceil(_exact(stage.until) * total_steps - half) for stage in self.stages[:-1]]
        return np.searchsorted(np.array(ends, dtype=np.int64), np.arange(total_steps), side="right")

    def ever_used(self) -> np.ndarray:
        """Return which difficulties ever have a weight above zero: bool[difficulties]."""
        mixes = [stage.mix for stage in self.stages]
        return np.array([any(weights) for weights in zip(*mixes, strict=True)])

    def empty_difficulties(self, samples_per_difficulty: np.ndarray) -> list[FinetuneError]:
        """Return a problem for each difficulty that ever has weight but has no samples in
        int[difficulties].
        """
        return [
            DataError(
                f"difficulty '{name}' has weight in the curriculum but the data has no sample"
                " of it",
                where="curriculum.stages",
                fix=f"add records of difficulty '{name}', or give it weight 0 in every stage",
            )
            for name, used, samples in zip(
                self.difficulties, self.ever_used(), samples_per_difficulty, strict=True
            )
            if used and not samples
        ]

    def canonical(self) -> dict[str, Any]:
        """Return what decides the counts, as plain JSON: the same for 80/20 and 0.8/0.2."""
        stages = [
            {
                "until": str(_exact(stage.until)),
                "mix": [str(share) for share in self.shares(number)],
                "ramp": stage.ramp,
            }
            for number, stage in enumerate(self.stages)
        ]
        return {"levels": list(self.difficulties), "stages": stages}


def uniform_schedule() -> Schedule:
    """Training without curriculum: one difficulty, one stage."""
    return Schedule((UNIFORM_DIFFICULTY,), (Stage(1.0, (1.0,)),))


def schedule_of(curriculum: CurriculumConfig) -> Schedule:
    """Return the schedule of a run file's curriculum."""
    stages = [Stage(stage.until, stage.mix, stage.ramp) for stage in curriculum.stages]
    return Schedule(curriculum.levels, tuple(stages))


def plan_counts(schedule: Schedule, total_steps: int, global_batch_size: int) -> np.ndarray:
    """Samples of each difficulty in each global batch: int64[total_steps, difficulties].

    A step sums to global_batch_size. After every global batch each difficulty has had the floor or
    the ceiling of its target; in a global batch throughout which its weight is zero it has none. A
    pure function: no seed, no state.

    Raises:
        ValueError: total_steps or global_batch_size below 1.
    """
    if total_steps < 1 or global_batch_size < 1:
        raise ValueError(
            f"total_steps {total_steps} and global_batch_size {global_batch_size} must be at"
            " least 1"
        )
    if len(schedule.difficulties) == 1:
        return np.full((total_steps, 1), global_batch_size, dtype=np.int64)
    pieces = _target_pieces(schedule, total_steps, global_batch_size)
    every = [polynomial for _, _, polynomials in pieces for polynomial in polynomials]
    denominator = math.lcm(*(factor.denominator for polynomial in every for factor in polynomial))
    bound = max(
        sum(abs(factor) * total_steps**power for power, factor in enumerate(polynomial))
        for polynomial in every
    )
    dtype = np.int64 if bound * denominator < _INT64_ROOM else object
    targets = np.zeros((total_steps + 1, len(schedule.difficulties)), dtype=dtype)
    for first, last, polynomials in pieces:
        steps = np.arange(first, last + 1).astype(dtype)
        for difficulty, polynomial in enumerate(polynomials):
            constant, slope, bend = (int(factor * denominator) for factor in polynomial)
            targets[first : last + 1, difficulty] = (
                constant + steps * slope + (steps * steps * bend if bend else 0)
            )
    return round_cumulative(targets, denominator)


def build_schedule(
    config: Any, difficulties: np.ndarray, record_ids: np.ndarray | None = None
) -> tuple[Schedule, np.ndarray]:
    """Call `choose_schedule` for a run, and log its warnings.

    A curriculum is the default: data without difficulties is worth a warning only if a setting
    asks for one.
    """
    schedule, difficulty_ids, warnings = choose_schedule(config, difficulties, record_ids)
    is_asked_for = not _CURRICULUM_SETTINGS.isdisjoint(config.model_fields_set)
    if warnings and schedule == uniform_schedule() and not is_asked_for:
        logger.info("no sample has a '%s': uniform sampling", config.difficulty_field)
        return schedule, difficulty_ids
    for warning in warnings:
        logger.warning("%s", warning)
    return schedule, difficulty_ids


def choose_schedule(
    config: Any, difficulties: np.ndarray, record_ids: np.ndarray | None = None
) -> tuple[Schedule, np.ndarray, list[str]]:
    """Choose the schedule of a run, and warn of what is probably not as it should be.

    Args:
        config: has `use_curriculum`, `difficulty_field`, and `curriculum` with `levels` and
            `stages` (each `until`, `mix`, `ramp`).
        difficulties: int[N], the index of each sample's difficulty in `config.curriculum.levels`,
            -1 for none.
        record_ids: int[N], the input record of each sample, for messages; by default its position.

    Returns:
        The schedule; int[N], the index of each sample's difficulty in `schedule.difficulties`,
        read-only; warnings.

    Raises:
        DataError: no samples; a sample without difficulty among samples with one; a difficulty with
            weight but without samples.
    """
    difficulties = np.asarray(difficulties)
    if not len(difficulties):
        raise DataError(
            "there are no samples to train on", fix="give --data files with records that are kept"
        )
    field = config.difficulty_field
    missing = sum(int((portion < 0).sum()) for portion in portions(difficulties))
    none = np.broadcast_to(np.int64(0), difficulties.shape)  # takes no memory
    if not config.use_curriculum:
        return uniform_schedule(), none, []
    schedule = schedule_of(config.curriculum)
    if missing == len(difficulties):
        names = " | ".join(schedule.difficulties)
        warning = (
            f"'{field}' field not found: none of the {len(difficulties):,} samples has a"
            " difficulty, so training is standard, with uniform sampling (fix: give every record a"
            f" '{field}' of {names}, or name the field that has it as difficulty_field, or set"
            " use_curriculum to false)"
        )
        return uniform_schedule(), none, [warning]
    if missing:
        samples = np.flatnonzero(difficulties < 0)
        records = np.unique(samples if record_ids is None else np.asarray(record_ids)[samples])
        more = ", ..." if len(records) > 10 else ""
        raise DataError(
            f"{missing:,} of {len(difficulties):,} samples have no '{field}': every record needs"
            " one, or none",
            where=f"records {', '.join(map(str, records[:10]))}{more} (counted from 0)",
            fix=f"add '{field}' to these records, remove them, or set use_curriculum to false",
        )
    counts = count_difficulties(difficulties, len(schedule.difficulties))
    raise_problems(schedule.empty_difficulties(counts))
    few = [
        f"difficulty '{name}' has {count:,}"
        for name, used, count in zip(
            schedule.difficulties, schedule.ever_used(), counts.tolist(), strict=True
        )
        if used and count < FEW_SAMPLES
    ]
    if not few:
        return schedule, difficulties, []
    warning = (
        f"fewer than {FEW_SAMPLES:,} samples of a difficulty: {', '.join(few)} (fix: add records,"
        " or expect repetition)"
    )
    return schedule, difficulties, [warning]


def count_difficulties(difficulties: np.ndarray, count: int) -> np.ndarray:
    """Count the samples of each of `count` difficulties: int64[count].

    Args:
        difficulties: int[N], the index of each sample's difficulty.
    """
    counts = np.zeros(count, dtype=np.int64)
    for portion in portions(difficulties):
        counts += np.bincount(portion.astype(np.int64), minlength=count)
    return counts


def portions(values: np.ndarray) -> Iterator[np.ndarray]:
    """Yield a long array in parts, so that what is computed of it in other types takes little
    memory.
    """
    return (values[begin : begin + _PORTION] for begin in range(0, len(values), _PORTION))


_Polynomial = tuple[Fraction, Fraction, Fraction]


def _target_pieces(
    schedule: Schedule, total_steps: int, global_batch_size: int
) -> list[tuple[int, int, list[_Polynomial]]]:
    """Return the cumulative targets of each stage as polynomials of the step.

    Returns:
        For each stage its first step, its last step, and for each difficulty the factors of 1,
        step and step squared.
    """
    pieces = []
    start = Fraction(0)
    sums = [Fraction(0)] * len(schedule.difficulties)
    for index, stage in enumerate(schedule.stages):
        end = _exact(stage.until) * total_steps
        after = schedule.shares(index)
        before = after if stage.ramp == "step" else schedule.shares(index - 1)
        polynomials: list[_Polynomial] = []
        for difficulty, (low, high) in enumerate(zip(before, after, strict=True)):
            # sums + G (low x + (high - low) x^2 / (2 length)) with x = step - start
            slope = global_batch_size * low
            bend = global_batch_size * (high - low) / (2 * (end - start))
            constant = sums[difficulty] - slope * start + bend * start * start
            polynomials.append((constant, slope - 2 * bend * start, bend))
            sums[difficulty] += slope * (end - start) + bend * (end - start) ** 2
        pieces.append((math.floor(start) + 1, math.floor(end), polynomials))
        start = end
    return pieces


def _exact(number: float | Fraction) -> Fraction:
    """Return the decimal that the user wrote, not the binary number nearest to it."""
    return number if isinstance(number, Fraction) else Fraction(repr(float(number)))
