"""Best-fit packing: against the rule written down plainly, and what must hold of any documents."""

from __future__ import annotations

import bisect
import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.corpus.windows import pack_best_fit


def by_the_rule(lengths: list[int], size: int) -> list[list[int]]:
    """One document after another, as the module's first lines say it."""
    left = [(min(length, size), number) for number, length in enumerate(lengths)]
    windows: list[list[int]] = []
    while True:
        window, room = [], size
        while room and left:
            fitting = [one for one in left if one[0] <= room]
            length = max(fitting)[0] if fitting else min(left)[0]
            taken = next(one for one in left if one[0] == length)
            left.remove(taken)
            window.append(taken[1])
            room -= min(room, length)
        if room:
            return windows
        windows.append(window)


def packed(lengths: list[int], size: int) -> list[list[int]]:
    documents, firsts = pack_best_fit(np.array(lengths, dtype=np.int64), size)
    assert firsts[0] == 0 and firsts[-1] == len(documents)
    return [documents[a:b].tolist() for a, b in zip(firsts, firsts[1:], strict=False)]


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(
        st.lists(st.integers(1, 40), max_size=60),
        # many of a length: several windows at once
        st.lists(st.sampled_from([1, 2, 5, 9, 31]), max_size=120),
        st.lists(st.integers(6, 8), max_size=60),
    ),
    st.integers(3, 33),
)
def test_it_is_the_rule(lengths: list[int], size: int):
    assert packed(lengths, size) == by_the_rule(lengths, size)


def test_sizes_around_what_sixteen_bits_hold():
    for size in (70_000, 1 << 16, (1 << 16) - 1):
        lengths = [size, 1, size - 1, 200_000, 3, size - 2]
        assert packed(lengths, size) == by_the_rule(lengths, size) == [[0], [3], [2, 1], [5, 4]]


def test_less_is_cut_than_from_a_buffer_of_a_thousand():
    """The loader of nanochat on one process: the same rule, over what is in its buffer, which long
    documents fill.
    """
    lengths = np.random.default_rng(0).lognormal(6.2, 1.0, 300_000).astype(np.int64) + 2
    size, buffer, cut, used = 2049, [], 0, 0
    following = iter(lengths.tolist())
    with contextlib.suppress(StopIteration):
        while True:
            room = size
            while room:
                while len(buffer) < 1000:
                    bisect.insort(buffer, next(following))
                fitting = bisect.bisect_right(buffer, room) - 1
                taken = buffer.pop(max(0, fitting))
                cut += max(0, taken - room)
                room -= min(room, taken)
            used += size
    documents, firsts = pack_best_fit(lengths, size)
    assert cut / (cut + used) == pytest.approx(0.294, abs=0.002)
    assert 1 - (len(firsts) - 1) * size / lengths.sum() == pytest.approx(0.141, abs=0.002)
    # every window full, no document twice, none without room
    assert len(np.unique(documents)) == len(documents)
    clipped = np.minimum(lengths, size)
    sums = np.add.reduceat(clipped[documents], firsts[:-1])
    assert (sums >= size).all() and (sums == size).mean() > 0.9
    assert (sums - clipped[documents[firsts[1:] - 1]] < size).all()
