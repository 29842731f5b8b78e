"""The plan of a global batch one sample at a time, by the plainest means: a reference for tests."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from finetune.batching.microbatch_schedule import _BISECTIONS, _min_microbatches, _multiple

Ranks = list[list[list[int]]]


def schedule_by_heap(
    lengths: np.ndarray | Sequence[int],
    world_size: int,
    *,
    token_budget: int | None = None,
    samples_per_microbatch: int | None = None,
) -> Ranks:
    """For each rank, for each micro-step, the positions of its samples, rising."""
    lengths = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(-lengths, kind="stable").tolist()
    items = lengths[order].tolist()
    if samples_per_microbatch is not None:
        microbatch_of = [place // samples_per_microbatch for place in range(len(items))]
        count = _multiple(-(-len(items) // samples_per_microbatch), world_size)
    else:
        microbatch_of, count = _pack(items, world_size, token_budget or 0)
    members: Ranks = [[] for _ in range(count)]
    for position, microbatch in sorted(zip(order, microbatch_of, strict=True)):
        members[microbatch].append(position)
    sizes = [sum(int(lengths[position]) for position in member) for member in members]
    if samples_per_microbatch is not None:
        sizes = [
            len(member) * max((int(lengths[position]) for position in member), default=0)
            for member in members
        ]
    falling = sorted(range(count), key=lambda microbatch: -sizes[microbatch])
    ranks: Ranks = [[] for _ in range(world_size)]
    totals = [0] * world_size
    for micro_step in range(count // world_size):
        microbatches = falling[micro_step * world_size : (micro_step + 1) * world_size]
        takers = sorted(range(world_size), key=totals.__getitem__)
        if samples_per_microbatch is None:
            takers = list(range(world_size))[:: -1 if micro_step % 2 else 1]
        for rank, microbatch in zip(takers, microbatches, strict=True):
            ranks[rank].append(members[microbatch])
            totals[rank] += sizes[microbatch]
    return ranks


def _pack(items: list[int], world_size: int, budget: int) -> tuple[list[int], int]:
    fewest = _multiple(_min_microbatches(np.array(items, dtype=np.int64), budget), world_size)
    failed, count = fewest - world_size, fewest
    while len(placed := longest_first(items, count, budget)) < len(items):
        failed, count = count, count + _multiple(sum(items[len(placed) :]) // budget, world_size)
    for _ in range(_BISECTIONS):
        if count - failed == world_size:
            break
        middle = failed + (count - failed) // (2 * world_size) * world_size
        attempt = longest_first(items, middle, budget)
        if len(attempt) == len(items):
            count, placed = middle, attempt
        else:
            failed = middle
    return placed, count


def longest_first(items: list[int], count: int, budget: int) -> list[int]:
    """Microbatch of each item, the emptiest each time, of equals the first; ends before one that
    does not fit.
    """
    heap = [(0, microbatch) for microbatch in range(count)]
    placed: list[int] = []
    for tokens in items:
        filled, microbatch = heap[0]
        if filled + tokens > budget:
            break
        heapq.heapreplace(heap, (filled + tokens, microbatch))
        placed.append(microbatch)
    return placed
