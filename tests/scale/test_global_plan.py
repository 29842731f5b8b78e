"""The plan of a global batch: the same as one sample at a time."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import ROOT

from finetune.batching import microbatch_schedule
from finetune.batching.microbatch_schedule import schedule_microbatches

sys.path.append(str(ROOT / "exhaustive" / "scale"))
from schedule_by_heap import schedule_by_heap

LENGTHS = st.one_of(
    st.lists(st.integers(1, 100), max_size=300),
    st.lists(st.sampled_from([1, 1, 1, 1000]), max_size=300),
    st.integers(0, 400).map(lambda count: [7] * count),
)


def same(lengths: np.ndarray, devices: int, **limit: int) -> bool:
    made = schedule_microbatches(lengths, devices, **limit)
    rows = [[one.tolist() for one in rank] for rank in made.microbatches]
    return rows == schedule_by_heap(lengths, devices, **limit)


@settings(deadline=None, max_examples=60)
@given(LENGTHS, st.sampled_from([1, 2, 3, 8, 60]), st.integers(0, 2000), st.integers(1, 9))
def test_the_plan_is_that_of_one_sample_at_a_time(
    lengths: list[int], devices: int, room: int, samples: int
):
    of_step = np.array(lengths, dtype=np.int64)
    assert same(of_step, devices, token_budget=int(of_step.max(initial=1)) + room)
    assert same(of_step, devices, samples_per_microbatch=samples)


def test_more_than_65_536_microbatches_keep_their_order():
    """Sorted 16 bits after 16 bits."""
    numbers = np.random.default_rng(0).integers(0, 200_000, 100_000)
    order = microbatch_schedule._stable_order(numbers)
    assert np.array_equal(order, np.argsort(numbers, kind="stable"))


def test_a_start_plans_a_bounded_number_of_samples():
    from finetune.training.executor import looked_at_steps

    class Batches(list):
        """Steps, each of so many samples."""

        @property
        def batches(self) -> SimpleNamespace:
            return SimpleNamespace(indices=lambda step: range(self[step]))

    assert looked_at_steps(Batches([64] * 100)) == range(100)
    assert len(looked_at_steps(Batches([64] * 100_000))) == 400
    many = looked_at_steps(Batches([320_000] * 1000))
    assert 4 <= len(many) <= 7 and many.stop == 1000
