"""All that was measured in one table: a line a measure, a column a model, and how models differ.
Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from finetune.commands.evaluate.measures import Measure
from finetune.commands.evaluate.scores import ModelScores
from finetune.commands.evaluate.significance import Difference


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
