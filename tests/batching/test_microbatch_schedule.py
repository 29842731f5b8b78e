"""Microbatches: everything once, within the budget, balanced, as many on every rank."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from finetune.batching.microbatch_schedule import (
    MicrobatchSchedule,
    _min_microbatches,
    schedule_microbatches,
    summarise,
)
from finetune.errors import DataError


def rows_of(plan: MicrobatchSchedule) -> list[list[list[int]]]:
    return [[microbatch.tolist() for microbatch in rank] for rank in plan.microbatches]


def check(plan: MicrobatchSchedule, lengths: np.ndarray, world_size: int) -> None:
    """What holds for every plan, computed again from the microbatches."""
    assert plan.world_size == world_size == len(plan.microbatches)
    assert {len(rank) for rank in plan.microbatches} == {plan.micro_steps} and plan.micro_steps >= 1
    microbatches = [microbatch for rank in plan.microbatches for microbatch in rank]
    assert all(microbatch.dtype == np.int64 and microbatch.ndim == 1 for microbatch in microbatches)
    assert sorted(np.concatenate(microbatches).tolist()) == list(range(len(lengths)))
    tokens = [[int(lengths[microbatch].sum()) for microbatch in rank] for rank in plan.microbatches]
    assert plan.microbatch_tokens.tolist() == tokens
    assert plan.tokens == int(lengths.sum())
    assert plan.padding_tokens == int(plan.computed_tokens.sum()) - plan.tokens >= 0
    assert 0 <= plan.packing_efficiency <= 1
    assert plan.imbalance >= 1 and plan.lockstep_imbalance >= plan.imbalance - 1e-12
    # Microbatches of like weight share a micro-step: none is heavier than the lightest before.
    by_step = plan.computed_tokens.T.tolist()
    assert all(min(before) >= max(after) for before, after in pairwise(by_step))


LENGTHS = st.lists(st.integers(1, 100), max_size=120).map(
    lambda values: np.array(values, dtype=np.int64)
)


@settings(deadline=None, max_examples=100)
@given(LENGTHS, st.integers(1, 9), st.integers(0, 300))
# two microbatches of 10 are all that fits: a bound that is loose shows
@example(np.array([5, 3, 5, 3, 4]), 2, 5)
def test_packed_plans(lengths: np.ndarray, world_size: int, room: int) -> None:
    budget = int(lengths.max(initial=1)) + room
    plan = schedule_microbatches(lengths, world_size, token_budget=budget)
    check(plan, lengths, world_size)
    assert plan.microbatch_tokens.max() <= budget
    assert plan.padding_tokens == 0
    assert plan.capacity_tokens == budget * world_size * plan.micro_steps
    fewest = max(1, -(-_min_microbatches(np.sort(lengths)[::-1], budget) // world_size))
    assert plan.micro_steps <= max(1, -(-len(lengths) // world_size))
    assert plan.micro_steps <= 2 * fewest


@settings(deadline=None, max_examples=100)
@given(LENGTHS, st.integers(1, 9), st.integers(1, 12))
def test_padded_plans(lengths: np.ndarray, world_size: int, samples_per_microbatch: int) -> None:
    plan = schedule_microbatches(lengths, world_size, samples_per_microbatch=samples_per_microbatch)
    check(plan, lengths, world_size)
    microbatches = [microbatch for rank in plan.microbatches for microbatch in rank]
    filled = [microbatch for microbatch in microbatches if len(microbatch)]
    assert max(map(len, microbatches)) <= samples_per_microbatch
    assert len(microbatches) == world_size * max(
        1, -(-len(lengths) // (samples_per_microbatch * world_size))
    )
    assert sum(len(microbatch) < samples_per_microbatch for microbatch in filled) <= 1
    paid = [
        [len(microbatch) * int(lengths[microbatch].max(initial=0)) for microbatch in rank]
        for rank in plan.microbatches
    ]
    assert plan.computed_tokens.tolist() == paid
    # Sorted by length: no microbatch reaches into the range of another.
    spans = sorted((lengths[one].min(), lengths[one].max()) for one in filled)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


def fewest_by_search(items: list[int], budget: int, loads: tuple[int, ...] = ()) -> int:
    """The optimum by trying every placement."""
    if not items:
        return len(loads)
    first, *rest = items
    ways = {tuple(sorted((*loads, first)))}
    for number, load in enumerate(loads):
        if load + first <= budget:
            ways.add(tuple(sorted((*loads[:number], load + first, *loads[number + 1 :]))))
    return min(fewest_by_search(rest, budget, way) for way in ways)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(0, 30))
def test_the_lower_bound_is_one_and_the_plan_is_near_the_optimum(
    items: list[int], room: int
) -> None:
    items, budget = sorted(items, reverse=True), max(items) + room
    best = fewest_by_search(items, budget)
    assert _min_microbatches(np.array(items), budget) <= best
    found = schedule_microbatches(np.array(items), 1, token_budget=budget).micro_steps
    assert best <= found <= best + 1


def test_plans_by_hand() -> None:
    # 4 microbatches of 10 for 2 ranks: 9 | 8 1 | 6 2 | 5 3, largest first, every other micro-step
    # dealt backwards.
    plan = schedule_microbatches(np.array([1, 2, 3, 5, 6, 8, 9]), 2, token_budget=10)
    assert plan.microbatch_tokens.tolist() == [[9, 8], [9, 8]]
    assert rows_of(plan) == [[[6], [2, 3]], [[0, 5], [1, 4]]]
    assert plan.packing_efficiency == 34 / 40
    assert plan.imbalance == plan.lockstep_imbalance == 1.0
    # Microbatches 9+8, 3+2 and 1: padded 18, 6 and 1. The rank that had the 18 gets the empty one.
    plan = schedule_microbatches(np.array([1, 9, 2, 8, 3]), 2, samples_per_microbatch=2)
    assert rows_of(plan) == [[[1, 3], []], [[2, 4], [0]]]
    assert plan.computed_tokens.tolist() == [[18, 0], [6, 1]]
    assert plan.padding_tokens == 2 and plan.packing_efficiency == 23 / 25
    # of equal lengths the earlier comes first
    assert rows_of(schedule_microbatches(np.full(6, 5), 2, token_budget=10))[0][0] == [0, 4]


def test_samples_above_the_budget_are_named() -> None:
    with pytest.raises(DataError) as caught:
        schedule_microbatches(np.array([5, 12, 3, 11]), 2, token_budget=10)
    assert caught.value.where == "position 1 with 12 tokens, position 3 with 11 tokens"
    assert "budget of a microbatch, 10" in caught.value.what


def test_calls_that_mean_nothing_are_refused() -> None:
    both = {"token_budget": 5, "samples_per_microbatch": 5}
    budget = {"token_budget": 5}
    for lengths, world_size, way in (
        *(([1, 2], 2, way) for way in ({}, both, {"token_budget": 0})),
        ([1, 0], 2, budget),
        ([1], 0, budget),
    ):
        with pytest.raises(ValueError, match="token_budget"):
            schedule_microbatches(np.array(lengths), world_size, **way)


def test_summary_of_some_steps() -> None:
    steps = [np.array([10, 1, 1, 1]), np.array([5, 5, 5, 5])]
    given = {"token_budget": 10, "samples_per_microbatch": 2}
    packed = summarise(steps, 1, **given, packing=True)
    assert (packed.steps, packed.rows_per_rank, packed.tokens) == (2, (2, 2.0, 2), 16.5)
    assert (packed.fill, packed.heaviest_row_tokens, packed.padding_share) == (33 / 40, 10, 0)
    # Padded: 10+1 -> 20 and 1+1 -> 2, then 5+5 twice: 9 of 42 tokens are padding.
    padded = summarise(steps, 1, **given, packing=False)
    assert packed.padded_padding_share == padded.padding_share == 9 / 42
    assert padded.heaviest_row_tokens == 20
    with pytest.raises(ValueError, match="no global batch"):
        summarise([], 1, **given, packing=True)
