"""What an evaluation found, as numbers, a table and JSON. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from finetune.commands.evaluate.measures import Measure

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


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
