"""Sources mixed by weight: shares and counts after every step, no repeat before exhaustion."""

from __future__ import annotations

import hashlib
import pickle
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import GUIDE, schedules

from finetune.batching.curriculum import uniform_schedule
from finetune.batching.mixing import Mix, plan_cells
from finetune.batching.sampler import GlobalBatches

WEIGHTS = st.sampled_from([1.0, 2.0, 3.0, 0.5, 0.1, 7.25, 1e-3, "natural"])


@st.composite
def mixed_runs(draw: st.DrawFn) -> tuple[GlobalBatches, np.ndarray, np.ndarray]:
    """A run of up to four sources, or unmixed, and source and difficulty of each sample."""
    schedule = uniform_schedule() if draw(st.integers(0, 4)) == 0 else draw(schedules())
    levels, mixed = len(schedule.difficulties), draw(st.integers(0, 4))
    sources = max(1, mixed)
    least = draw(st.integers(0, 1))  # 1: each source has each difficulty
    held = np.array([[draw(st.integers(least, 12)) for _ in range(levels)] for _ in range(sources)])
    held[0, held.sum(axis=0) == 0] = 1
    held[held.sum(axis=1) == 0, 0] = 1
    random = np.random.default_rng(draw(st.integers(0, 99)))
    level_of = np.concatenate(
        [random.permutation(np.repeat(np.arange(levels), row)) for row in held]
    )
    source_of = np.repeat(np.arange(sources), held.sum(axis=1))
    starts = (0, *np.cumsum(held.sum(axis=1)).tolist())
    mix = Mix(tuple("abcd"[:sources]), tuple(draw(WEIGHTS) for _ in range(sources)), starts)
    batches = GlobalBatches(
        level_of,
        schedule,
        draw(st.sampled_from([1, 2, 5, 16, 300])),
        draw(st.integers(1, 60)),
        draw(st.integers(-(2**63), 2**64)),
        mix=mix if mixed else None,
        exact_limit=draw(st.sampled_from([0, 5, 1 << 20])),
    )
    return batches, source_of, level_of


def targets_of(batches: GlobalBatches, held: np.ndarray) -> np.ndarray:
    """Each source's target after each step, written out plainly: [steps][sources] of fractions."""
    mix = batches.mix or Mix(("all",), (1.0,), (0, int(batches.samples_per_difficulty.sum())))
    weights = [
        Fraction(size) if weight == "natural" else Fraction(str(weight))
        for weight, size in zip(mix.weights, mix.sizes, strict=True)
    ]
    found, sums = [], [Fraction(0)] * len(weights)
    for counts in batches.counts.tolist():
        for level, count in enumerate(counts):
            whole = sum(weight for weight, has in zip(weights, held[:, level], strict=True) if has)
            for source, weight in enumerate(weights):
                sums[source] += count * weight / whole if held[source, level] else 0
        found.append(list(sums))
    return np.array(found, dtype=object)


@settings(deadline=None, max_examples=50)
@given(mixed_runs())
def test_counts_and_weights_hold_after_every_step_and_no_sample_comes_again_too_early(
    run: tuple[GlobalBatches, np.ndarray, np.ndarray],
) -> None:
    batches, source_of, level_of = run
    sources, levels = source_of[-1] + 1, len(batches.schedule.difficulties)
    cell_of = source_of * levels + level_of
    sizes = np.bincount(cell_of, minlength=sources * levels)
    held = sizes.reshape(sources, levels) > 0
    targets, drawn = targets_of(batches, held), np.zeros(sources, dtype=int)
    used_levels = batches.counts.any(axis=0)
    shared = [
        tuple(held[:, level]) for level in np.flatnonzero(used_levels) if held[:, level].sum() > 1
    ]
    # Where a source shares several sets of difficulties with others, rare steps are further off:
    # see mixing.py.
    apart = all(
        len({pattern for pattern in shared if pattern[source]}) < 2 for source in range(sources)
    )
    times, used = Counter[int](), np.zeros_like(sizes)
    in_order = [batches.indices(step) for step in range(len(batches))]
    for step, indices in enumerate(in_order):
        assert indices.shape == (batches.global_batch_size,) and indices.dtype == np.int64
        counts = np.bincount(level_of[indices], minlength=levels)
        assert counts.tolist() == batches.counts[step].tolist()
        drawn += np.bincount(source_of[indices], minlength=sources)
        assert max(map(abs, drawn.tolist() - targets[step])) < (1 if apart else 2)
        if batches.mix and held[:, used_levels].all():  # the weights alone are the target
            whole = (step + 1) * batches.global_batch_size
            assert [share * whole for share in batches.mix.shares] == list(targets[step])
        for index, cell in zip(indices.tolist(), cell_of[indices].tolist(), strict=True):
            assert times[index] == used[cell] // sizes[cell], f"sample {index} came too early"
            times[index] += 1
            used[cell] += 1
    found, names = batches.source_draws(), batches.schedule.difficulties
    assert [source.draws for source in found] == (drawn.tolist() if batches.mix else [])
    passes = (used / np.maximum(sizes, 1)).reshape(sources, levels).tolist()
    for source, row in zip(found, passes, strict=False):
        expected = {name: x for name, x in zip(names, row, strict=True) if x}
        assert source.passes == pytest.approx(expected)
    held_of_level = np.bincount(level_of, minlength=levels)
    passes = dict(zip(names, batches.counts.sum(axis=0) / held_of_level, strict=True))
    assert batches.passes() == pytest.approx(passes)
    weights = np.sum([stage.mix for stage in batches.schedule.stages], axis=0)
    held = zip(names, held_of_level, weights, strict=True)
    assert batches.unused == {name: size for name, size, weight in held if not weight}
    assert np.flatnonzero(batches.drawn()).tolist() == sorted(times)
    copy = pickle.loads(pickle.dumps(batches))  # a loader's worker process gets one
    for step in reversed(range(len(batches))):
        assert np.array_equal(copy.indices(step), in_order[step])


def test_a_source_has_the_mix_of_the_curriculum() -> None:
    """Sources and difficulties meet in proportion, in the long run of each stage."""
    level_of = np.tile(np.repeat([0, 1, 2], 200), 2)
    mix = Mix(("a", "b"), (3.0, 1.0), (0, 600, 1200))
    batches = GlobalBatches(level_of, GUIDE, 32, 400, 1, mix=mix)
    cells = np.zeros((2, 3))
    for step in range(400):
        indices = batches.indices(step)
        np.add.at(cells, ((indices >= 600).astype(int), level_of[indices]), 1)
    wanted = np.outer([0.75, 0.25], batches.counts.sum(axis=0))
    assert np.abs(cells - wanted).max() < 10, cells


def test_weights_and_borders_are_in_the_fingerprint_and_only_their_ratio_counts() -> None:
    def fingerprint(weights: tuple[float, ...] | None, border: int = 40) -> str:
        mix = None if weights is None else Mix(("a", "b"), weights, (0, border, 100))
        levels = np.zeros(100, dtype=int)
        return GlobalBatches(levels, uniform_schedule(), 8, 10, 1, mix=mix).fingerprint()

    one = fingerprint((3.0, 1.0))
    assert one == fingerprint((0.75, 0.25))
    assert len({one, fingerprint(None), fingerprint((1.0, 1.0)), fingerprint((3.0, 1.0), 50)}) == 4


def test_weights_too_fine_for_machine_integers_are_exact_too() -> None:
    shares = (Fraction("0.123456789123456789"), 1 - Fraction("0.123456789123456789"))
    counts = np.full((3000, 1), 977)
    cells = plan_cells(counts, np.ones((2, 1), dtype=bool), shares)[:, :, 0].astype(np.int64)
    for step, had in enumerate(np.cumsum(cells, axis=0)[:, 0].tolist(), 1):
        assert abs(had - shares[0] * 977 * step) < 1


def test_sources_that_share_several_difficulties_with_others_stay_within_a_sample() -> None:
    """Dealt out each for itself, the difficulties' errors add up: to 1.7 samples here."""
    held = np.array(
        [[True, True, True], [True, False, True], [True, True, False], [False, True, True]]
    )
    counts = np.random.default_rng(3).integers(1, 5, (200, 3))
    shares = [Fraction(weight, 21) for weight in (10, 7, 3, 1)]
    drawn = np.cumsum(plan_cells(counts, held, shares).astype(np.int64).sum(axis=2), axis=0)
    wanted = np.zeros((200, 4))
    for level in range(3):
        here = [
            float(share) if has else 0.0 for share, has in zip(shares, held[:, level], strict=True)
        ]
        wanted += np.cumsum(counts[:, level])[:, None] * np.array(here) / sum(here)
    assert np.abs(drawn - wanted).max() < 1


def test_the_order_is_that_of_earlier_versions() -> None:
    """Another order would be another run: raise ORDER_VERSION with it."""
    level_of = np.tile(np.repeat([0, 1, 2], [50, 30, 20]), 3)
    mix = Mix(("a", "b", "c"), (3.0, "natural", 12.5), (0, 100, 200, 300))
    batches = GlobalBatches(level_of, GUIDE, 24, 300, 42, mix=mix)
    digest = hashlib.sha256(
        b"".join(batches.indices(step).astype("<i8").tobytes() for step in range(300))
    )
    assert digest.hexdigest()[:16] == "f88e4e562e0da606"
