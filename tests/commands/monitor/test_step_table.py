"""The steps of a long run by column, against a list of their lines."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.runs import step_table
from finetune.runs.step_table import StepTable

OTHERS = st.none() | st.booleans() | st.text(max_size=2)
VALUES = OTHERS | st.integers(-(10**20), 10**20) | st.floats() | st.just(10**400)
LINES = st.lists(
    st.tuples(st.integers(0, 60), st.dictionaries(st.sampled_from("abcd"), VALUES)), max_size=80
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from((1, 3, 1000)), LINES)
def test_it_has_what_a_list_of_the_lines_has(block: int, lines: list[tuple[int, dict[str, Any]]]):
    records = [{"step": step, **more} for step, more in lines]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_table, "BLOCK_LINES", block)
        table = StepTable(records)
    kept: list[dict[str, Any]] = []
    for record in records:
        while kept and kept[-1]["step"] >= record["step"]:
            kept.pop()
        kept.append(record)
    assert table.steps.tolist() == [record["step"] for record in kept] and len(table) == len(kept)
    assert table.last == (kept[-1] if kept else {})
    assert list(table.recent) == kept[len(kept) - len(table.recent) :]
    for name in "abcd":
        numbers = [(r["step"], r[name]) for r in kept if type(r.get(name)) in (int, float)]
        known = [point for point in table.points(name) if abs(point[1]) < 2**53]
        assert known == [point for point in numbers if abs(point[1]) < 2**53]
        missing = [record["step"] not in dict(table.points(name)) for record in kept]
        assert [math.isnan(value) for value in table.column(name)] == missing
