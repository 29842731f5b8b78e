"""Global batches: the right counts, no repeat before exhaustion, a pure function of the step."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import GUIDE, schedules

from finetune.batching.curriculum import Schedule, Stage, uniform_schedule
from finetune.batching.sampler import GlobalBatches, count_steps
from finetune.errors import DataError, FinetuneError


@st.composite
def runs(draw: st.DrawFn) -> GlobalBatches:
    """A schedule, levels of 1 to 40 samples in any order, up to 40 steps; small levels use the
    Feistel network too.
    """
    schedule = draw(schedules())
    sizes = [draw(st.integers(1, 40)) for _ in schedule.difficulties]
    difficulties = np.repeat(np.arange(len(sizes)), sizes)
    np.random.default_rng(draw(st.integers(0, 99))).shuffle(difficulties)
    return GlobalBatches(
        difficulties,
        schedule,
        draw(st.sampled_from([1, 2, 5, 16, 33])),
        draw(st.integers(1, 40)),
        draw(st.integers(-(2**63), 2**64)),
        exact_limit=draw(st.sampled_from([0, 20, 1 << 20])),
    )


def stream(batches: GlobalBatches) -> list[np.ndarray]:
    return [batches.indices(step) for step in range(len(batches))]


@settings(deadline=None, max_examples=80)
@given(runs(), st.randoms(use_true_random=False))
def test_each_batch_has_the_planned_counts_and_no_sample_repeats_before_exhaustion(
    batches: GlobalBatches, random: object
) -> None:
    level_of = np.empty(len(batches._members), dtype=np.int64)
    sizes = batches.samples_per_difficulty
    level_of[batches._members] = np.repeat(np.arange(len(sizes)), sizes)
    drawn, used = Counter[int](), np.zeros_like(sizes)
    in_order = stream(batches)
    for step, indices in enumerate(in_order):
        assert indices.shape == (batches.global_batch_size,) and indices.dtype == np.int64
        levels = level_of[indices]
        assert np.bincount(levels, minlength=len(sizes)).tolist() == batches.counts[step].tolist()
        for index, level in zip(indices.tolist(), levels.tolist(), strict=True):
            # As often as every other of its level has come at least: the passes that are complete.
            assert drawn[index] == used[level] // sizes[level], f"sample {index} came too early"
            drawn[index] += 1
            used[level] += 1
    passes = dict(zip(batches.schedule.difficulties, (used / sizes).tolist(), strict=True))
    assert batches.passes() == pytest.approx(passes)
    assert np.flatnonzero(batches.drawn()).tolist() == sorted(drawn)
    # any step at any time, in a loader's worker process too
    copy = pickle.loads(pickle.dumps(batches))
    steps = list(range(len(batches)))
    random.shuffle(steps)  # type: ignore[attr-defined]
    for step in steps:
        assert np.array_equal(batches.indices(step), in_order[step])
        assert np.array_equal(copy.indices(step), in_order[step])


def test_pass_boundary_inside_a_step_and_many_passes_in_one() -> None:
    batches = GlobalBatches(np.zeros(3, dtype=int), uniform_schedule(), 8, 3, 1)
    flat = np.concatenate(stream(batches))
    for start in range(0, 24, 3):
        assert sorted(flat[start : start + 3].tolist()) == [0, 1, 2]
    orders = {tuple(flat[start : start + 3].tolist()) for start in range(0, 24, 3)}
    assert len(orders) > 1, "each pass has an order of its own"
    assert batches.passes() == {"all": 8.0}


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


def test_samples_of_a_level_without_weight_never_appear_and_are_reported() -> None:
    schedule = Schedule(("a", "b", "c"), (Stage(1.0, (1, 0, 0)),))
    difficulties = np.array([1, 0, 1, 0, 0])
    batches = GlobalBatches(difficulties, schedule, 4, 10, 1)
    assert set(np.concatenate(stream(batches)).tolist()) == {1, 3, 4}
    assert batches.unused == {"b": 2}
    assert batches.passes() == {"a": pytest.approx(40 / 3), "b": 0.0, "c": 0.0}


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
