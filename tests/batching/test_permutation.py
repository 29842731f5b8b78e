"""Permutations: bijective, keyed, the same in every version."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.batching.permutation import EXACT_LIMIT, MAX_SIZE, Permutation, random_words


def everything(size: int, *key: int, **options: int) -> np.ndarray:
    return Permutation(size, *key, **options)(np.arange(size))


@settings(deadline=None)
@given(
    st.integers(1, 5000), st.lists(st.integers(-(2**70), 2**70), max_size=4), st.integers(0, 5000)
)
def test_every_position_once_on_both_sides_of_the_limit(
    size: int, key: list[int], limit: int
) -> None:
    assert np.array_equal(np.sort(everything(size, *key, exact_limit=limit)), np.arange(size))


@pytest.mark.parametrize("limit", [0, EXACT_LIMIT])
def test_any_position_alone_is_what_it_is_among_all_and_each_part_of_the_key_matters(
    limit: int,
) -> None:
    whole = everything(1000, 5, exact_limit=limit)
    alone = Permutation(1000, 5, exact_limit=limit)
    for position in np.random.default_rng(0).permutation(1000)[:100]:
        assert alone(np.array([position])) == whole[[position]]
    keys = [(1, 2, 3), (1, 2, 4), (2, 1, 3), (1, 23), (12, 3), (1, 2), (-1, 2, 3)]
    orders = {tuple(everything(500, *key, exact_limit=limit).tolist()) for key in keys}
    assert len(orders) == len(keys)


def test_the_order_is_pinned() -> None:
    """These values are in runs that people resume: if they change, ORDER_VERSION must."""
    assert everything(10, 42, 1).tolist() == [3, 4, 8, 1, 0, 7, 5, 2, 6, 9]
    assert everything(10, 42, 1, exact_limit=0).tolist() == [7, 0, 3, 2, 5, 9, 1, 6, 8, 4]
    assert random_words(2, 42).tolist() == [5055796468497514509, 16672108002848039104]


def test_what_is_outside_is_refused() -> None:
    for size in (0, MAX_SIZE + 1):
        with pytest.raises(ValueError, match="size is"):
            Permutation(size, 1)
    for position in (-1, 10):
        with pytest.raises(ValueError, match="not all inside"):
            Permutation(10, 1)(np.array([0, position]))
    assert Permutation(10, 1)(np.array([], dtype=np.int64)).tolist() == []
