"""Documents packed into windows of one size without padding: the longest that fits, and cut only
where none does.

The rule: a document longer than a window is cut to one. A window takes the longest document left
that fits into its room, again and again; where none fits, it takes the shortest left, cut to the
room. Of documents of one length the first comes first. Documents left at the end that fill no
window are in none.

nanochat's loader does so within a buffer of 1,000 documents of a process; here the buffer is the
whole stream, so the windows are a function of it alone. Only lengths count, so windows of the same
lengths are made at once, as in the histogram packing of Krell et al. 2021 (arXiv 2107.02027): the
work grows with the window's size, and with the number of documents only that of a few passes of
numpy.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter

import numpy as np

# A length and how many documents of it a window takes, in the order that it takes them.
Pattern = list[tuple[int, int]]


def pack_best_fit(lengths: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Which documents each window holds.

    Args:
        lengths: int `(documents,)`: tokens of each document, at least 1.
        size: tokens of a window.

    Returns: int32 or int64 `(placed,)`: the documents, one window's after another's; the last of a
        window may be cut. int64 `(windows + 1,)`: where the documents of each window begin among
        them, then `placed`.
    """
    # numpy sorts 16-bit numbers by radix, in one pass.
    clipped = np.minimum(lengths, size).astype(np.uint16 if size < 1 << 16 else np.int64)
    by_length = np.argsort(clipped, kind="stable").astype(
        np.int32 if len(lengths) < 1 << 31 else np.int64, copy=False
    )
    counts = np.bincount(clipped, minlength=size + 1)
    # of each length, the place of its next document in `by_length`
    following = (np.cumsum(counts) - counts).tolist()
    left = counts.tolist()
    present = np.flatnonzero(counts).tolist()  # the lengths that are left, rising
    members, widths, repeats = [by_length[:0]], [], []
    while pattern := _next_pattern(present, left, size):
        uses: Counter[int] = Counter()
        for length, number in pattern:
            uses[length] += number
        windows = min(left[length] // number for length, number in uses.items())
        columns = []
        for length, number in pattern:
            taken = following[length] + windows * number
            columns.append(by_length[following[length] : taken].reshape(windows, number))
            following[length] = taken
        for length, number in uses.items():
            left[length] -= windows * number
            if not left[length]:
                del present[bisect_left(present, length)]
        members.append(np.concatenate(columns, axis=1).ravel())
        widths.append(sum(uses.values()))
        repeats.append(windows)
    firsts = np.concatenate([[0], np.cumsum(np.repeat(widths, repeats), dtype=np.int64)])
    return np.concatenate(members), firsts.astype(np.int64)


def _next_pattern(present: list[int], left: list[int], size: int) -> Pattern:
    """The lengths of the next window, and of those after it as long as enough documents of each are
    left.

    Empty where what is left fills no window.
    """
    pattern: Pattern = []
    room, shorter = size, len(present)
    while room and (shorter := bisect_right(present, room, 0, shorter) - 1) >= 0:
        length = present[shorter]
        number = min(room // length, left[length])
        pattern.append((length, number))
        room -= length * number
    if not room:
        return pattern
    taken = dict(pattern)
    shortest = next((length for length in present if left[length] > taken.get(length, 0)), None)
    if shortest is None:
        return []
    if pattern and pattern[-1][0] == shortest:
        return [*pattern[:-1], (shortest, taken[shortest] + 1)]
    return [*pattern, (shortest, 1)]
