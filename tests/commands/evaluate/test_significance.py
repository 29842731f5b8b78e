"""The paired bootstrap against all draws, and what it says of few records."""

from __future__ import annotations

import io
import itertools
import re

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from finetune.commands.evaluate.scores import (
    Measure,
    ModelScores,
    compare,
    comparison,
    paired_bootstrap,
    ratios,
    rich_table,
    tables,
)


def token_losses(count: int, seed: int, shift: float = 0.0) -> list[np.ndarray]:
    """Summed losses of two models on records of very different lengths, and their targets."""
    generator = np.random.default_rng(seed)
    targets = generator.integers(1, 200, count)
    first = generator.normal(2.0, 0.5, count) * targets
    return [first, first + generator.normal(shift, 0.4, count) * targets, targets.astype(float)]


def test_against_every_draw_that_there_is(monkeypatch: pytest.MonkeyPatch):
    """Many records are drawn in parts."""
    monkeypatch.setattr("finetune.commands.evaluate.scores._DRAWN_AT_ONCE", 7 * 5)
    first, second, weights = token_losses(5, seed=3, shift=-0.2)
    draws = np.array(list(itertools.product(range(5), repeat=5)))
    every = (second - first)[draws].sum(axis=1) / weights[draws].sum(axis=1)
    low, high, p = paired_bootstrap(first, second, weights)
    edges = np.quantile(every, [0.025, 0.975])
    assert (low, high) == pytest.approx(edges, abs=0.03 * (edges[1] - edges[0]))
    assert p == pytest.approx(2 * min((every <= 0).mean(), (every >= 0).mean()), abs=0.02)


def test_models_that_do_the_same_do_not_differ():
    first, second, weights = token_losses(50, seed=0)
    assert paired_bootstrap(first, first, weights) == (0.0, 0.0, 1.0)
    assert paired_bootstrap(first, second, weights) == paired_bootstrap(first, second, weights)


def test_parts_of_a_record_are_drawn_together():
    """Two samples of one record are one; a value is the ratio of sums, not the mean of ratios."""
    sums, weights = np.array([1.0, 9.0, 4.0, 6.0]), np.array([1, 3, 1, 1])
    records = np.array([7, 7, 8, 9])
    found = ratios("loss", ["a", "a", "b", None], sums, weights, records)
    assert [(one.of, one.value) for one in found] == [("a", 10 / 4), ("b", 4.0), ("all", 20 / 6)]
    assert (found[0].sums.tolist(), found[0].weights.tolist()) == ([10.0], [4.0])
    assert found[2].sums.tolist() == [10.0, 4.0, 6.0]
    # A difficulty of that name does not stand beside the sum of all.
    assert [one.value for one in ratios("x", ["all", "b"], sums[:2], weights[:2])] == [10 / 4, 3.0]


def model(name: str, role: str, right: int, records: int = 60) -> ModelScores:
    """With so many right answers."""
    values = np.arange(records) < right
    measures = [Measure.ratio("exact match", "all", values, np.ones(records))]
    return ModelScores(name, role, measures=[*measures, Measure("bleu", "task", 0.5, 0.1)])


def test_which_models_are_compared(caplog: pytest.LogCaptureFixture):
    models = [model("base m", "base", 0), model("a", "adapter", 30), model("b", "adapter", 40)]
    found = compare(models)
    pairs = [("base m", "a"), ("base m", "b"), ("a", "b")]
    assert [(one.first, one.second) for one in found] == pairs
    assert [(one.differing, one.records) for one in found] == [(30, 60), (40, 60), (10, 60)]
    assert all(one.low < one.difference < one.high and one.p < 0.001 for one in found)
    assert [(one.first, one.second) for one in compare(models[1:])] == pairs[2:]
    assert not caplog.records
    lines = comparison(models, found)
    names = ("base m", "a", "b", "a - base m", "b - base m", "b - a")
    assert lines[0] == ("measure", "of", "records", *names)
    assert lines[1][:6] == ("exact match", "all", "60", "0.0000", "0.5000", "0.6667")
    assert lines[2] == ("bleu", "task", "-", *["0.5000 ± 0.1000"] * 3, "-", "-", "-")
    assert compare(models[:1]) == [] and comparison(models[:1], []) == []


@pytest.mark.parametrize("columns", [80, 200])
def test_the_tables_fit_the_terminal(columns: int):
    models = [model("base tiny-qwen3", "base", 0), model("office", "adapter", 30)]
    console = Console(width=columns, file=io.StringIO())
    for lines in tables(models, compare(models)):
        console.print(rich_table(lines, console))
    shown = console.file.getvalue()
    assert "…" not in shown and "base tiny-qwen3" in shown
    assert max(map(len, shown.splitlines())) <= columns
    assert re.search(r"\[\+\d\.\d+, \+\d\.\d+\]", shown), "an interval in one piece"
    assert ("┃" in shown) == (columns == 200)


def test_few_records_are_said_and_nan_is_not_compared(caplog: pytest.LogCaptureFixture):
    (found,) = compare([model("a", "model", 0, 40), model("b", "model", 5, 40)])
    assert found.p < 0.05 < stats.binomtest(5, 5).pvalue
    assert "fewer than 10 records differ in exact match of all" in caplog.text
    numbers, nan = (
        ModelScores(name, "model", measures=[Measure.ratio("loss", "all", values, np.ones(20))])
        for name, values in (("a", np.arange(20.0)), ("b", np.full(20, np.nan)))
    )
    assert compare([numbers, nan]) == []
