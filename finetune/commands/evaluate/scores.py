"""What an evaluation found: values with what each record adds to them, whether models differ by
more than chance, and the tables. Needs no torch.

Models are compared by a paired bootstrap over the records. Both were measured on the same records.
Records are drawn with replacement, as many as there are; each draw has its difference of the two
values (Efron and Tibshirani 1993, ch. 13 and 16; for systems compared on one test set: Koehn 2004,
https://aclanthology.org/W04-3250). A value over tokens or bytes is a ratio of two sums, and so it
is in each draw: records with more tokens count for more, and how many tokens a draw has varies.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

logger = logging.getLogger("finetune")


@dataclass(frozen=True)
class Measure:
    """One value of a model; with `sums` and `weights`, `(records,)` each, it is their ratio over
    the records.
    """

    name: str  # loss, exact match, accuracy, margin, bits per byte, or a metric of lm_eval
    of: str  # the difficulty, text or task; "all"
    value: float
    stderr: float | None = None
    sums: np.ndarray | None = None
    weights: np.ndarray | None = None

    @classmethod
    def ratio(
        cls, name: str, of: str, sums: np.ndarray, weights: np.ndarray, stderr: float | None = None
    ) -> Measure:
        known = weights > 0
        sums, weights = sums[known].astype(np.float64), weights[known].astype(np.float64)
        return cls(name, of, float(sums.sum() / weights.sum()), stderr, sums, weights)


def ratios(
    name: str,
    groups: Sequence[str | None],
    sums: np.ndarray,
    weights: np.ndarray,
    records: np.ndarray | None = None,
) -> list[Measure]:
    """The measure of each group, in their order, and of all; of what is no group's only the latter.

    Args:
        groups: of each of the n parts.
        sums, weights: `(n,)`.
        records: int `(n,)`: the record that each part is of, drawn as a whole; None: each its own.
    """
    of_part = np.array(groups, dtype=object)
    numbers = (
        np.arange(len(sums)) if records is None else np.unique(records, return_inverse=True)[1]
    )
    members = {str(group): of_part == group for group in dict.fromkeys(groups) if group is not None}
    members["all"] = np.ones(len(sums), dtype=bool)
    return [
        Measure.ratio(
            name,
            group,
            np.bincount(numbers[its], sums[its]),
            np.bincount(numbers[its], weights[its]),
        )
        for group, its in members.items()
        if weights[its].sum() > 0
    ]


@dataclass
class Score:
    """Sums over some samples."""

    samples: int = 0  # whose loss was taken
    targets: int = 0  # their supervised tokens; of pairs those of the chosen answers
    loss_sum: float = 0.0  # of the targets
    answered: int = 0  # answers that were checked
    correct: int = 0  # of those, the right ones
    pairs: int = 0  # samples with a chosen and a rejected answer
    preferred: int = 0  # of those, whose chosen answer has the higher mean log-probability
    margin_sum: float = 0.0  # by how much, of all pairs

    def __add__(self, other: Score) -> Score:
        return Score(
            *(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__)
        )

    @property
    def loss(self) -> float | None:
        """Per target."""
        return self.loss_sum / self.targets if self.targets else None

    def to_dict(self) -> dict[str, Any]:
        loss = self.loss
        perplexity = None if loss is None else _perplexity(loss)
        losses = {
            "samples": self.samples,
            "targets": self.targets,
            "loss": loss,
            "perplexity": perplexity,
        }
        exact_match = self.correct / self.answered if self.answered else None
        known = {
            **losses,
            "answered": self.answered,
            "correct": self.correct,
            "exact_match": exact_match,
        }
        if not self.pairs:
            return known
        return {
            **known,
            "accuracy": self.preferred / self.pairs,
            "margin": self.margin_sum / self.pairs,
        }


@dataclass
class ModelScores:
    """One model's scores by difficulty; samples without difficulty are under None."""

    name: str
    role: str  # base, adapter or model
    difficulties: dict[str | None, Score] = field(default_factory=dict)
    # all of the comparison, those of the records too
    measures: list[Measure] = field(default_factory=list)
    tasks: list[dict[str, Any]] = field(default_factory=list)  # of lm_eval, a metric each
    text: dict[str, Any] | None = None  # bits per byte, of all texts and by text

    @property
    def overall(self) -> Score:
        return sum(self.difficulties.values(), Score())

    def of(self, difficulty: str | None) -> Score:
        return self.difficulties.setdefault(difficulty, Score())

    def to_dict(self) -> dict[str, Any]:
        named = {
            name: score.to_dict() for name, score in self.difficulties.items() if name is not None
        }
        scores = {"overall": self.overall.to_dict(), "levels": named}
        return {
            "name": self.name,
            "role": self.role,
            **scores,
            "text": self.text,
            "tasks": self.tasks,
        }


def _perplexity(loss: float) -> float | None:
    """None where it is beyond a float."""
    return math.exp(loss) if loss < 700 else None


# ---------------------------------------------------------------- differences

RESAMPLES, SEED, CONFIDENCE = 10_000, 0, 0.95
FEWEST_DIFFERING = 10  # records: with fewer a bootstrap finds too much certain
_DRAWN_AT_ONCE = 1 << 22  # records: two arrays of 32 MiB


@dataclass(frozen=True)
class Difference:
    """`second` minus `first`, with its interval, and the share of chance in it."""

    measure: str
    of: str
    first: str
    second: str
    records: int
    differing: int  # records that the two models differ on
    difference: float
    low: float
    high: float
    p: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def paired_bootstrap(
    first: np.ndarray,
    second: np.ndarray,
    weights: np.ndarray,
    *,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> tuple[float, float, float]:
    """The interval (of `CONFIDENCE`, by percentiles) of sum(second - first) / sum(weights), and the
    p-value for 0.

    The p-value is two-sided: twice the share of draws on the rarer side of 0, those at 0 with it.
    Below 0.05 it has 0 outside of the interval.

    Args:
        first, second, weights: float `(records,)`; of a share the weights are 1.
    """
    numerators, count = second - first, len(weights)
    generator, found = np.random.default_rng(seed), np.empty(resamples)
    at_once = max(1, _DRAWN_AT_ONCE // count)
    for start in range(0, resamples, at_once):
        drawn = generator.integers(count, size=(min(at_once, resamples - start), count))
        found[start : start + len(drawn)] = numerators[drawn].sum(axis=1) / weights[drawn].sum(
            axis=1
        )
    low, high = np.quantile(found, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]).tolist()
    rarer = min((found <= 0).sum(), (found >= 0).sum())
    return low, high, min(1.0, 2 * float(rarer + 1) / (resamples + 1))


def compare(models: Sequence[ModelScores]) -> list[Difference]:
    """The base against each other model, and the first of those against the others; what has two
    records or more.
    """
    pairs = [(models[0], other) for other in models[1:]]
    if models and models[0].role == "base":
        pairs += [(models[1], other) for other in models[2:]]
    found = [difference for first, second in pairs for difference in _differences(first, second)]
    few = [one for one in found if one.p < 1 - CONFIDENCE and one.differing < FEWEST_DIFFERING]
    if few:
        logger.warning(
            "fewer than %d records differ in %s: such p-values are too small (fix: more held-out"
            " records)",
            FEWEST_DIFFERING,
            ", ".join(dict.fromkeys(f"{one.measure} of {one.of}" for one in few)),
        )
    return found


def _differences(first: ModelScores, second: ModelScores) -> list[Difference]:
    others = {(measure.name, measure.of): measure for measure in second.measures}
    found = []
    for ours in first.measures:
        theirs = others.get((ours.name, ours.of))
        if ours.sums is None or theirs is None or theirs.sums is None or len(ours.sums) < 2:
            continue
        if not (np.isfinite(ours.sums).all() and np.isfinite(theirs.sums).all()):
            continue  # nothing can be said of a model that gives NaN
        assert ours.weights is not None and np.array_equal(ours.weights, theirs.weights), (
            "not the same records"
        )
        found.append(
            Difference(
                ours.name,
                ours.of,
                first.name,
                second.name,
                len(ours.sums),
                int((ours.sums != theirs.sums).sum()),
                theirs.value - ours.value,
                *paired_bootstrap(ours.sums, theirs.sums, ours.weights),
            )
        )
    return found


# ---------------------------------------------------------------- tables

HEADINGS = ("difficulty", "model", "samples", "targets", "loss", "perplexity", "exact match")
PAIR_HEADINGS = ("accuracy", "margin")  # of pairs


def headings(models: Sequence[ModelScores]) -> tuple[str, ...]:
    """Of the table's columns."""
    return HEADINGS + (PAIR_HEADINGS if any(model.overall.pairs for model in models) else ())


def cells(models: Sequence[ModelScores]) -> Iterable[tuple[bool, tuple[str, ...]]]:
    """The lines of the table: whether it is the last of its difficulty, and its texts as `HEADINGS`
    says.
    """
    names = list(
        dict.fromkeys(name for model in models for name in model.difficulties if name is not None)
    )
    # Samples without difficulty are in "all"; a line of their own would say the same where no
    # sample has one.
    paired = len(headings(models)) > len(HEADINGS)
    for difficulty in [*names, "all"]:
        for number, model in enumerate(models):
            score = model.overall if difficulty == "all" else model.of(difficulty)
            yield (
                number == len(models) - 1,
                (
                    difficulty if number == 0 else "",
                    model.name,
                    *_figures(score),
                    *(_pair_figures(score) if paired else ()),
                ),
            )


def _figures(score: Score) -> tuple[str, ...]:
    losses = ("0", "0", "-", "-")
    if (loss := score.loss) is not None:
        perplexity = _perplexity(loss)
        shown = "inf" if perplexity is None else f"{perplexity:,.3f}"
        losses = (f"{score.samples:,}", f"{score.targets:,}", f"{loss:.4f}", shown)
    match = (
        f"{score.correct / score.answered:.1%} ({score.correct}/{score.answered})"
        if score.answered
        else "-"
    )
    return (*losses, match)


def _pair_figures(score: Score) -> tuple[str, ...]:
    if not score.pairs:
        return "-", "-"
    share = f"{score.preferred / score.pairs:.1%} ({score.preferred}/{score.pairs})"
    return share, f"{score.margin_sum / score.pairs:.4f}"


def tables(
    models: Sequence[ModelScores], comparison: Sequence[tuple[str, ...]]
) -> list[list[tuple[bool, tuple[str, ...]]]]:
    """The tables that there are: of the records, and the comparison. Lines as `cells` has them,
    headings first.
    """
    found = []
    if any(model.difficulties for model in models):
        found.append([(True, headings(models)), *cells(models)])
    if comparison:
        found.append([(number == 0, line) for number, line in enumerate(comparison)])
    return found


def rich_table(lines: Sequence[tuple[bool, tuple[str, ...]]], console: Console) -> Table:
    """A table for a terminal: with all its lines where there is room, else narrow, intervals on
    rows of their own.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table, narrow = Table(), Table(box=box.HORIZONTALS, padding=0)
    for number, heading in enumerate(lines[0][1]):
        for shown in (table, narrow):
            shown.add_column(heading, justify="left" if number < 2 else "right", overflow="fold")
    for last, texts in lines[1:]:
        table.add_row(*map(Text, texts), end_section=last)
        narrow.add_row(
            *(Text(text.replace(" [", "\n[").replace("], ", "],\n")) for text in texts),
            end_section=last,
        )
    wanted = console.measure(table, options=console.options.update(width=1000)).maximum
    return table if wanted <= console.width else narrow


def markdown_table(lines: Sequence[tuple[bool, tuple[str, ...]]]) -> str:
    """The same as Markdown: for files, and where there is no terminal."""
    (_, named), *rest = lines
    sides = ["---"] * 2 + ["---:"] * (len(named) - 2)
    rows = [named, sides, *(texts for _last, texts in rest)]
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in rows
    )


def comparison(
    models: Sequence[ModelScores], differences: Sequence[Difference]
) -> list[tuple[str, ...]]:
    """The lines of the table, headings first; empty where one model was measured on records
    alone.
    """
    if len(models) == 1 and not models[0].tasks and not models[0].text:
        return []
    known = [
        {(measure.name, measure.of): measure for measure in model.measures} for model in models
    ]
    pairs = list(dict.fromkeys((one.first, one.second) for one in differences))
    found = {(one.measure, one.of, one.first, one.second): one for one in differences}
    lines = [
        ("measure", "of", "records", *(m.name for m in models), *(f"{b} - {a}" for a, b in pairs))
    ]
    for name, of in dict.fromkeys(key for measures in known for key in measures):
        measured = [measures.get((name, of)) for measures in known]
        counts = [
            len(measure.sums)
            for measure in measured
            if measure is not None and measure.sums is not None
        ]
        differs = [found.get((name, of, *pair)) for pair in pairs]
        lines.append(
            (
                name,
                of,
                f"{counts[0]:,}" if counts else "-",
                *map(_value, measured),
                *map(_difference, differs),
            )
        )
    return lines


def _value(measure: Measure | None) -> str:
    if measure is None:
        return "-"
    return f"{measure.value:.4f}" + ("" if measure.stderr is None else f" ± {measure.stderr:.4f}")


def _difference(found: Difference | None) -> str:
    if found is None:
        return "-"
    p = "p < 0.001" if found.p < 0.001 else f"p = {found.p:.3f}"
    return f"{found.difference:+.4f} [{found.low:+.4f}, {found.high:+.4f}], {p}"
