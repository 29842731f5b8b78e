"""Best-fit packing: against the rule written down plainly, and what must hold of any documents."""

from __future__ import annotations

import numpy as np
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
