"""Global batches: their order, and what decides it. What every batch has: test_mixing.py."""

from __future__ import annotations

import numpy as np
import pytest
from schedules import GUIDE

from finetune.batching.curriculum import Schedule, Stage, uniform_schedule
from finetune.batching.sampler import GlobalBatches, count_steps
from finetune.errors import DataError, FinetuneError


def stream(batches: GlobalBatches) -> list[np.ndarray]:
    return [batches.indices(step) for step in range(len(batches))]


def test_levels_are_shuffled_inside_a_step() -> None:
    difficulties = np.repeat([0, 1, 2], 500)
    batches = GlobalBatches(difficulties, GUIDE, 100, 100, 42)
    kinds = np.stack([difficulties[batches.indices(step)] for step in range(70, 100)])
    assert len({tuple(kind) for kind in kinds.tolist()}) == 30
    # Wherever in the batch one looks, the share of topology is near its 40%: here 300 draws,
    # standard error 3%.
    for first in range(0, 100, 10):
        assert 0.28 < (kinds[:, first : first + 10] == 2).mean() < 0.52


def test_the_seed_the_data_and_the_schedule_decide_and_the_fingerprint_says_so() -> None:
    difficulties = np.repeat([0, 1, 2], 50)
    other = Schedule(GUIDE.difficulties, (Stage(1.0, (1, 1, 1)),))
    runs = [
        GlobalBatches(difficulties, GUIDE, 8, 20, 42),
        GlobalBatches(difficulties, GUIDE, 8, 20, 43),
        GlobalBatches(difficulties[::-1], GUIDE, 8, 20, 42),
        GlobalBatches(difficulties, other, 8, 20, 42),
        GlobalBatches(difficulties, GUIDE, 4, 20, 42),
        GlobalBatches(difficulties, GUIDE, 8, 21, 42),
    ]
    assert len({run.fingerprint() for run in runs}) == len(runs)
    assert len({tuple(np.concatenate(stream(run)).tolist()) for run in runs}) == len(runs)
    again = GlobalBatches(difficulties.astype(np.int16), GUIDE, 8, 20, 42)
    assert again.fingerprint() == runs[0].fingerprint()
    assert np.array_equal(np.concatenate(stream(again)), np.concatenate(stream(runs[0])))


def test_the_order_is_pinned() -> None:
    """These values are in runs that people resume: if they change, ORDER_VERSION must."""
    batches = GlobalBatches(np.arange(30) % 3, GUIDE, 8, 10, 42)
    assert batches.indices(0).tolist() == [6, 24, 15, 16, 12, 0, 3, 22]
    assert batches.indices(9).tolist() == [20, 29, 19, 1, 6, 10, 14, 18]
    assert [batches.stage(step) for step in range(10)] == [0] * 3 + [1] * 4 + [2] * 3
    for step in (-1, 10):
        for asked in (batches.indices, batches.stage):
            with pytest.raises(IndexError):
                asked(step)


def test_levels_without_samples_and_samples_without_a_level_are_refused() -> None:
    with pytest.raises(FinetuneError) as caught:
        GlobalBatches(np.zeros(5, dtype=int), GUIDE, 4, 10, 1)
    assert "'reasoning'" in str(caught.value) and "'topology'" in str(caught.value)
    for difficulty in (-1, 3):
        with pytest.raises(DataError, match="sample 3"):
            GlobalBatches(np.array([0, 1, 2, difficulty]), GUIDE, 4, 10, 1)


def test_memory_stays_bounded_over_many_passes() -> None:
    batches = GlobalBatches(np.zeros(4, dtype=int), uniform_schedule(), 4, 500, 1)
    stream(batches)
    assert len(batches._passes) <= 16


def test_steps_of_a_run() -> None:
    assert [
        count_steps(*given)
        for given in ((100, 10, 1), (101, 10, 1), (3, 32, 0.1), (1000, 10, 0.07))
    ] == [10, 11, 1, 7]
    assert count_steps(5, 2, 9, 4) == 4
