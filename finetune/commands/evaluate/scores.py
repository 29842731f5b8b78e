"""What an evaluation found: values with each record's share of them, whether models differ by more
than chance, and the tables. Needs no torch.

Models are compared by a paired bootstrap over the records. Both were measured on the same records.
Records are drawn with replacement, as many as there are; each draw has its difference of the two
values (Efron and Tibshirani 1993, ch. 13 and 16; for systems compared on one test set: Koehn 2004,
https://aclanthology.org/W04-3250). A value per token or byte is a ratio of two sums in each draw
too: longer records count for more, and the number of tokens in a draw varies.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

logger = logging.getLogger("finetune")


@dataclass(frozen=True)
class Measure:
    """One value of a model, which is the ratio of `sums` to `weights` if they are given."""

    name: str  # loss, exact match, accuracy, margin, bits per byte, or a metric of lm_eval
    of: str  # the difficulty, text or task; "all"
    value: float
    stderr: float | None = None
    sums: np.ndarray | None = None  # (records,)
    weights: np.ndarray | None = None  # (records,)

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
    """Return the measure of each group, in their order, and of all.

    Args:
        groups: the group of each of the n parts; parts in group None count only in "all".
        sums, weights: `(n,)`.
        records: int `(n,)`, the record of each part, drawn as a whole; None: a record for each.
    """
    numbers = np.arange(len(sums))
    if records is not None:
        numbers = np.unique(records, return_inverse=True)[1]
    found = []
    for group in dict.fromkeys([*groups, "all"]):
        if group is None:
            continue
        members = np.full(len(sums), True)
        if group != "all":
            members = np.array(groups, dtype=object) == group
        if weights[members].sum() > 0:
            record_sums = np.bincount(numbers[members], sums[members])
            record_weights = np.bincount(numbers[members], weights[members])
            found.append(Measure.ratio(name, group, record_sums, record_weights))
    return found


def distinct_names(names: Sequence[str]) -> list[str]:
    """Number the names that occur more than once."""
    found = []
    for index, name in enumerate(names):
        if names.count(name) > 1:
            name = f"{name} ({names[: index + 1].count(name)})"
        found.append(name)
    return found


@dataclass
class Score:
    """Sums over some samples."""

    samples: int = 0  # samples with a loss
    targets: int = 0  # their supervised tokens; for pairs those of the chosen answers
    loss_sum: float = 0.0  # of the targets
    answered: int = 0  # answers that were checked
    correct: int = 0  # correct answers
    pairs: int = 0  # samples with a chosen and a rejected answer
    preferred: int = 0  # pairs whose chosen answer has the higher mean log-probability
    margin_sum: float = 0.0  # difference of the mean log-probabilities, summed over pairs

    def __add__(self, other: Score) -> Score:
        return Score(
            *(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__)
        )

    @property
    def loss(self) -> float | None:
        """Mean loss per target."""
        return self.loss_sum / self.targets if self.targets else None

    @property
    def perplexity(self) -> float | None:
        """None if it is beyond a float."""
        loss = self.loss
        return math.exp(loss) if loss is not None and loss < 700 else None

    def to_dict(self) -> dict[str, Any]:
        values = {
            "samples": self.samples,
            "targets": self.targets,
            "loss": self.loss,
            "perplexity": self.perplexity,
            "answered": self.answered,
            "correct": self.correct,
            "exact_match": self.correct / self.answered if self.answered else None,
        }
        if self.pairs:
            values["accuracy"] = self.preferred / self.pairs
            values["margin"] = self.margin_sum / self.pairs
        return values


@dataclass
class ModelScores:
    """One model's scores by difficulty; samples without difficulty are under None."""

    name: str
    role: str  # base, adapter or model
    difficulties: dict[str | None, Score] = field(default_factory=dict)
    measures: list[Measure] = field(default_factory=list)  # everything that is compared
    tasks: list[dict[str, Any]] = field(default_factory=list)  # of lm_eval, a metric each
    text: dict[str, Any] | None = None  # bits per byte, of all texts and of each

    @property
    def overall(self) -> Score:
        return sum(self.difficulties.values(), Score())

    def of(self, difficulty: str | None) -> Score:
        return self.difficulties.setdefault(difficulty, Score())

    def to_dict(self) -> dict[str, Any]:
        levels = {name: score.to_dict() for name, score in self.difficulties.items() if name}
        return {
            "name": self.name,
            "role": self.role,
            "overall": self.overall.to_dict(),
            "levels": levels,
            "text": self.text,
            "tasks": self.tasks,
        }


# ---------------------------------------------------------------- differences

RESAMPLES, SEED, CONFIDENCE = 10_000, 0, 0.95
FEWEST_DIFFERING = 10  # records; with fewer a bootstrap gives p-values that are too small
_DRAWN_AT_ONCE = 1 << 22  # records: two arrays of 32 MiB


@dataclass(frozen=True)
class Difference:
    """`second` minus `first`, with its confidence interval and p-value."""

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


def paired_bootstrap(
    first: np.ndarray,
    second: np.ndarray,
    weights: np.ndarray,
    *,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> tuple[float, float, float]:
    """Bootstrap sum(second - first) / sum(weights).

    The p-value is two-sided: twice the share of draws on the rarer side of 0, counting those at 0.
    If it is below 0.05, 0 is outside the interval.

    Args:
        first, second, weights: float `(records,)`; the weights of a share are 1.

    Returns:
        The percentile interval of `CONFIDENCE`, and the p-value of no difference.
    """
    numerators = second - first
    count = len(weights)
    generator = np.random.default_rng(seed)
    found = np.empty(resamples)
    at_once = max(1, _DRAWN_AT_ONCE // count)
    for start in range(0, resamples, at_once):
        drawn = generator.integers(count, size=(min(at_once, resamples - start), count))
        ratio = numerators[drawn].sum(axis=1) / weights[drawn].sum(axis=1)
        found[start : start + len(drawn)] = ratio
    low, high = np.quantile(found, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]).tolist()
    rarer = min((found <= 0).sum(), (found >= 0).sum())
    return low, high, min(1.0, 2 * float(rarer + 1) / (resamples + 1))


def compare(models: Sequence[ModelScores]) -> list[Difference]:
    """Compare the base with each other model, and the first of those with the rest, in measures of
    two records or more.
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
            continue  # a model that gives NaN cannot be compared
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
PAIR_HEADINGS = ("accuracy", "margin")
Line = tuple[bool, Sequence[str]]  # whether a rule follows, and the cells


def tables(models: Sequence[ModelScores], differences: Sequence[Difference]) -> list[list[Line]]:
    """Return the tables of the records and of the comparison, if there are any, headings first."""
    found = []
    if any(model.difficulties for model in models):
        found.append(_record_table(models))
    if lines := comparison(models, differences):
        found.append([(line is lines[0], line) for line in lines])
    return found


def _record_table(models: Sequence[ModelScores]) -> list[Line]:
    with_pairs = any(model.overall.pairs for model in models)
    lines: list[Line] = [(True, HEADINGS + (PAIR_HEADINGS if with_pairs else ()))]
    names = dict.fromkeys(name for model in models for name in model.difficulties if name)
    # Samples without a difficulty count in "all" only.
    for difficulty in [*names, "all"]:
        for model in models:
            score = model.overall if difficulty == "all" else model.of(difficulty)
            cells = [difficulty if model is models[0] else "", model.name]
            if score.loss is None:
                cells += ["0", "0", "-", "-"]
            else:
                cells += [f"{score.samples:,}", f"{score.targets:,}", f"{score.loss:.4f}"]
                cells.append("inf" if score.perplexity is None else f"{score.perplexity:,.3f}")
            cells.append(_share(score.correct, score.answered))
            if with_pairs:
                margin = f"{score.margin_sum / score.pairs:.4f}" if score.pairs else "-"
                cells += [_share(score.preferred, score.pairs), margin]
            lines.append((model is models[-1], cells))
    return lines


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%} ({part}/{whole})" if whole else "-"


def rich_table(lines: Sequence[Line], console: Console) -> Table:
    """Return a table for a terminal: with all its rules if they fit, else a narrow one with the
    intervals on separate rows.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table()
    narrow = Table(box=box.HORIZONTALS, padding=0)
    for number, heading in enumerate(lines[0][1]):
        for shown in (table, narrow):
            shown.add_column(heading, justify="left" if number < 2 else "right", overflow="fold")
    for last, cells in lines[1:]:
        table.add_row(*map(Text, cells), end_section=last)
        folded = [cell.replace(" [", "\n[").replace("], ", "],\n") for cell in cells]
        narrow.add_row(*map(Text, folded), end_section=last)
    width = console.measure(table, options=console.options.update(width=1000)).maximum
    return table if width <= console.width else narrow


def markdown_table(lines: Sequence[Line]) -> str:
    """Return the table as Markdown, for files and without a terminal."""
    rows = [cells for _last, cells in lines]
    rows.insert(1, ["---"] * 2 + ["---:"] * (len(rows[0]) - 2))
    found = ""
    for cells in rows:
        escaped = [cell.replace("|", "\\|") for cell in cells]
        found += f"| {' | '.join(escaped)} |\n"
    return found


def comparison(
    models: Sequence[ModelScores], differences: Sequence[Difference]
) -> list[tuple[str, ...]]:
    """Return the lines of the comparison, headings first; none for one model that was measured on
    records only.
    """
    if len(models) == 1 and not models[0].tasks and not models[0].text:
        return []
    known = [
        {(measure.name, measure.of): measure for measure in model.measures} for model in models
    ]
    pairs = list(dict.fromkeys((one.first, one.second) for one in differences))
    found = {(one.measure, one.of, one.first, one.second): one for one in differences}
    names = [model.name for model in models]
    lines = [("measure", "of", "records", *names, *(f"{b} - {a}" for a, b in pairs))]
    for name, of in dict.fromkeys(key for measures in known for key in measures):
        records = "-"
        cells = []
        for measures in known:
            measure = measures.get((name, of))
            cells.append(_value(measure))
            if measure is not None and measure.sums is not None and records == "-":
                records = f"{len(measure.sums):,}"
        cells += [_difference(found.get((name, of, *pair))) for pair in pairs]
        lines.append((name, of, records, *cells))
    return lines


def _value(measure: Measure | None) -> str:
    if measure is None:
        return "-"
    value = f"{measure.value:.4f}"
    return value if measure.stderr is None else f"{value} ± {measure.stderr:.4f}"


def _difference(found: Difference | None) -> str:
    if found is None:
        return "-"
    p = "p < 0.001" if found.p < 0.001 else f"p = {found.p:.3f}"
    return f"{found.difference:+.4f} [{found.low:+.4f}, {found.high:+.4f}], {p}"
