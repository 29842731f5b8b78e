"""The paired bootstrap against all draws that there are, scipy's, exact tests of few records, and
its own promise.
"""

from __future__ import annotations

import io
import itertools
import re

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from finetune.commands.evaluate.scores import (
    FEWEST_DIFFERING,
    Measure,
    ModelScores,
    compare,
    comparison,
    paired_bootstrap,
    ratios,
    rich_table,
    tables,
)


def token_losses(
    count: int, seed: int, shift: float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Summed losses of two models on records of very different lengths, and their targets."""
    generator = np.random.default_rng(seed)
    targets = generator.integers(1, 200, count)
    first = generator.normal(2.0, 0.5, count) * targets
    return first, first + generator.normal(shift, 0.4, count) * targets, targets.astype(np.float64)


def test_against_every_draw_that_there_is():
    first, second, weights = token_losses(5, seed=3, shift=-0.2)
    draws = np.array(list(itertools.product(range(5), repeat=5)))
    every = (second - first)[draws].sum(axis=1) / weights[draws].sum(axis=1)
    low, high, p = paired_bootstrap(first, second, weights)
    width = np.quantile(every, 0.975) - np.quantile(every, 0.025)
    assert low == pytest.approx(np.quantile(every, 0.025), abs=0.03 * width)
    assert high == pytest.approx(np.quantile(every, 0.975), abs=0.03 * width)
    assert p == pytest.approx(2 * min((every <= 0).mean(), (every >= 0).mean()), abs=0.02)


def test_against_scipy():
    first, second, weights = token_losses(150, seed=0, shift=-0.05)

    def statistic(
        first: np.ndarray, second: np.ndarray, weights: np.ndarray, axis: int
    ) -> np.ndarray:
        return (second.sum(axis=axis) - first.sum(axis=axis)) / weights.sum(axis=axis)

    theirs = stats.bootstrap(
        (first, second, weights), statistic, paired=True, vectorized=True, method="percentile", n_resamples=10_000,
        rng=np.random.default_rng(1),
    ).confidence_interval  # fmt: skip
    low, high, _ = paired_bootstrap(first, second, weights)
    width = theirs.high - theirs.low
    assert low == pytest.approx(theirs.low, abs=0.03 * width) and high == pytest.approx(
        theirs.high, abs=0.03 * width
    )


@pytest.mark.parametrize(("won", "lost"), [(20, 20), (22, 15), (25, 12), (30, 10), (40, 5)])
def test_shares_against_mcnemar(won: int, lost: int):
    """The exact test of answers that only one of the two models has right."""
    first = np.array([0.0] * won + [1.0] * lost + [1.0] * 30 + [0.0] * 30)
    second = np.array([1.0] * won + [0.0] * lost + [1.0] * 30 + [0.0] * 30)
    exact = stats.binomtest(won, won + lost).pvalue
    *interval, p = paired_bootstrap(first, second, np.ones(len(first)))
    assert p == pytest.approx(exact, rel=0.5, abs=0.002) and (p < 0.05) == (exact < 0.05)
    assert (interval[0] > 0) == (p < 0.05)


def test_losses_against_a_permutation_test():
    for seed, shift in ((0, 0.0), (1, -0.1), (2, -0.15)):
        first, second, weights = token_losses(80, seed, shift)
        numerators = second - first
        signs = np.random.default_rng(9).choice([-1, 1], (20_000, 80))
        exact = (np.abs(signs @ numerators) >= abs(numerators.sum())).mean()
        assert paired_bootstrap(first, second, weights)[2] == pytest.approx(exact, abs=0.05)


def test_the_interval_holds_the_truth_as_often_as_it_says():
    """600 experiments of 100 records each, with a true difference, and with none."""
    for shift, name in ((-0.1, "interval"), (0.0, "p-value")):
        held = []
        for seed in range(600):
            low, high, p = paired_bootstrap(
                *token_losses(100, seed, shift), resamples=1000, seed=seed
            )
            held.append(low <= shift <= high if name == "interval" else p >= 0.05)
        # Of 600 with 0.95 each, 0.93 to 0.97 is where 98 of 100 such counts are; percentiles are a
        # little narrow.
        assert 0.92 < np.mean(held) < 0.975, name


def test_models_that_do_the_same_do_not_differ():
    first, _, weights = token_losses(50, seed=0)
    assert paired_bootstrap(first, first, weights) == (0.0, 0.0, 1.0)
    again = token_losses(50, seed=1)
    assert paired_bootstrap(*again) == paired_bootstrap(*again)


def test_many_records_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch):
    whole = paired_bootstrap(*token_losses(300, seed=5, shift=-0.1))
    monkeypatch.setattr("finetune.commands.evaluate.scores._DRAWN_AT_ONCE", 7 * 300)
    assert paired_bootstrap(*token_losses(300, seed=5, shift=-0.1)) == pytest.approx(
        whole, abs=0.01
    )


def test_parts_of_a_record_are_drawn_together():
    """Two samples of one record are one; a value is the ratio of sums, not the mean of ratios."""
    sums, weights = np.array([1.0, 9.0, 4.0, 6.0]), np.array([1, 3, 1, 1])
    one, other, overall = ratios(
        "loss", ["a", "a", "b", None], sums, weights, records=np.array([7, 7, 8, 9])
    )
    assert (one.of, one.value, one.sums.tolist(), one.weights.tolist()) == (
        "a",
        10 / 4,
        [10.0],
        [4.0],
    )
    assert (other.of, other.value, overall.of, overall.value) == ("b", 4.0, "all", 20 / 6)
    assert overall.sums.tolist() == [10.0, 4.0, 6.0]
    # A difficulty of that name does not stand beside the sum of all.
    assert [found.value for found in ratios("loss", ["all", "b"], sums[:2], weights[:2])] == [
        10 / 4,
        3.0,
    ]


def model(name: str, role: str, right: list[int]) -> ModelScores:
    found = ModelScores(name, role)
    found.measures = [Measure.ratio("exact match", "all", np.array(right), np.ones(len(right)))]
    found.measures.append(Measure("bleu", "task", 0.5, 0.1))
    return found


def test_which_models_are_compared(caplog: pytest.LogCaptureFixture):
    right = [[0] * 60, [1] * 30 + [0] * 30, [1] * 40 + [0] * 20]
    models = [
        model("base m", "base", right[0]),
        model("a", "adapter", right[1]),
        model("b", "adapter", right[2]),
    ]
    found = compare(models)
    assert [(one.first, one.second) for one in found] == [
        ("base m", "a"),
        ("base m", "b"),
        ("a", "b"),
    ]
    assert [one.differing for one in found] == [30, 40, 10] and {one.records for one in found} == {
        60
    }
    assert all(one.low < one.difference < one.high and one.p < 0.001 for one in found)
    assert [(one.first, one.second) for one in compare(models[1:])] == [
        ("a", "b")
    ] and not caplog.records
    lines = comparison(models, found)
    assert lines[0] == (
        "measure",
        "of",
        "records",
        "base m",
        "a",
        "b",
        "a - base m",
        "b - base m",
        "b - a",
    )
    assert lines[1][:6] == ("exact match", "all", "60", "0.0000", "0.5000", "0.6667")
    assert lines[2] == ("bleu", "task", "-", *["0.5000 ± 0.1000"] * 3, "-", "-", "-")
    assert compare(models[:1]) == [] and comparison(models[:1], []) == []


@pytest.mark.parametrize("columns", [80, 200])
def test_the_tables_fit_the_terminal(columns: int):
    models = [
        model("base tiny-qwen3", "base", [0] * 60),
        model("office", "adapter", [1] * 30 + [0] * 30),
    ]
    console = Console(width=columns, file=io.StringIO())
    for lines in tables(models, compare(models)):
        console.print(rich_table(lines, console))
    shown = console.file.getvalue()
    assert (
        "…" not in shown
        and "base tiny-qwen3" in shown
        and max(map(len, shown.splitlines())) <= columns
    )
    assert re.search(r"\[\+\d\.\d+, \+\d\.\d+\]", shown), "an interval in one piece"
    assert ("┃" in shown) == (columns == 200)


def test_few_records_are_said(caplog: pytest.LogCaptureFixture):
    few = FEWEST_DIFFERING - 5
    (found,) = compare(
        [model("a", "model", [0] * 40), model("b", "model", [1] * few + [0] * (40 - few))]
    )
    assert found.p < 0.05 < stats.binomtest(few, few).pvalue
    assert "fewer than 10 records differ in exact match of all" in caplog.text


def test_nothing_is_said_of_a_model_that_gives_nan() -> None:
    ones = np.ones(20)
    models = [ModelScores("a", "base"), ModelScores("b", "adapter")]
    for model, values in zip(models, (np.arange(20.0), np.full(20, np.nan)), strict=True):
        model.measures.append(Measure.ratio("loss", "all", values, ones))
    assert compare(models) == []
