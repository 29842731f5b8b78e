"""Random schedules, the guide's own, and targets by the definition: slow and exact."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import strategies as st

from finetune.batching.curriculum import Schedule, Stage

GUIDE = Schedule(
    ("explain", "reasoning", "topology"),
    (Stage(0.3, (80.0, 20.0, 0.0)), Stage(0.7, (40.0, 40.0, 20.0)), Stage(1.0, (25.0, 35.0, 40.0))),
)


@st.composite
def schedules(draw: st.DrawFn, most_levels: int = 6) -> Schedule:
    """2 to `most_levels` levels, 1 to 5 stages, ramps, weights from zero to odd floats."""
    difficulties = draw(st.integers(2, most_levels))
    weight = st.one_of(
        st.just(0.0), st.integers(1, 100).map(float), st.floats(1e-3, 1.0), st.just(1 / 3)
    )
    ends = sorted(draw(st.sets(st.integers(1, 99), max_size=4)))
    stages = []
    for number, end in enumerate([*(end / 100 for end in ends), 1.0]):
        mixes = st.lists(weight, min_size=difficulties, max_size=difficulties)
        mix = tuple(draw(mixes.filter(any)))
        ramp = draw(st.sampled_from(["step", "step", "linear"])) if number else "step"
        stages.append(Stage(end, mix, ramp))
    return Schedule(tuple("abcdefghijkl"[:difficulties]), tuple(stages))


def exact_targets(
    schedule: Schedule, total_steps: int, global_batch_size: int
) -> list[list[Fraction]]:
    """Cumulative targets after each step: the weights' integral, by midpoints of straight pieces."""
    ends = [Fraction(str(stage.until)) * total_steps for stage in schedule.stages]
    mixes = [[Fraction(str(weight)) for weight in stage.mix] for stage in schedule.stages]
    shares = [[weight / sum(mix) for weight in mix] for mix in mixes]
    sums, rows = [Fraction(0)] * len(schedule.difficulties), []
    for step in range(total_steps):
        for number, stage in enumerate(schedule.stages):
            start = ends[number - 1] if number else Fraction(0)
            low, high = max(Fraction(step), start), min(Fraction(step + 1), ends[number])
            if low < high:
                ramp = number if stage.ramp == "linear" else 0
                way = ((low + high) / 2 - start) / (ends[number] - start) if ramp else 1
                before = shares[ramp - 1] if ramp else shares[number]
                for level, (a, b) in enumerate(zip(before, shares[number], strict=True)):
                    sums[level] += global_batch_size * (high - low) * (a + (b - a) * way)
        rows.append(list(sums))
    return rows
