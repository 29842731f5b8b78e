"""What a run says before its first step: what became of the rows, how they will be executed, what is trained."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from finetune.batching.execution_plan import PlanSummary, summarise

if TYPE_CHECKING:
    from finetune.data.steps import StepRows

# Global batches that are planned for the table: enough for the mean, cheap for a run of any length.
SUMMARISED_STEPS = 50


def plan_summary(rows: StepRows, *, token_budget: int, samples_per_row: int) -> PlanSummary:
    """Rows, fill, imbalance and padding of an even choice of the run's steps.

    Args:
        token_budget, samples_per_row: of the way of making rows that the run does not take, to compare.
    """
    stride = max(1, len(rows) // SUMMARISED_STEPS)
    lengths = [rows.samples.lengths[rows.batches.indices(step)] for step in range(0, len(rows), stride)]
    return summarise(
        lengths,
        rows.execution.world_size,
        token_budget=rows.execution.token_budget or token_budget,
        samples_per_row=rows.execution.samples_per_row or samples_per_row,
        packing=rows.execution.token_budget is not None,
    )


def startup_lines(summary: PlanSummary, facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The table's rows about execution, as (name, value) texts."""
    fewest, mean, most = summary.rows_per_rank
    rows = f"{fewest}" if fewest == most else f"{fewest} to {most}, {mean:.1f} on average"
    return [
        *((name, str(value)) for name, value in facts.items()),
        ("rows per process and step", rows),
        ("tokens per step", f"{summary.tokens:,.0f}"),
        ("fill of rows", f"{summary.fill:.0%}"),
        ("heaviest row", f"{summary.heaviest_row_tokens:,} tokens"),
        ("imbalance over processes", f"{summary.imbalance:.3f}"),
        ("padding here", f"{summary.padding_share:.0%} of computed tokens"),
        ("padding of a padded run", f"{summary.padded_padding_share:.0%}"),
    ]


def print_table(title: str, lines: list[tuple[str, str]]) -> None:
    """Print a two-column table to stderr."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column("what")
    table.add_column("how much", justify="right")
    for name, value in lines:
        table.add_row(name, value)
    Console(file=sys.stderr).print(table)
