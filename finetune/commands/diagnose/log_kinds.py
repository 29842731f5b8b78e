"""What a line of a log is: a training step, a line that a rule or their reading depends on, or
neither.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from finetune.commands.diagnose.log_facts import FACT_WORDS, facts_in, renumbers_devices
from finetune.commands.diagnose.log_reading import LineKind
from finetune.commands.diagnose.log_words import (
    EXCEPTION,
    FAILURE,
    NOT_A_NUMBER,
    OWN_ERROR,
    QUIET_LEVEL,
    STEP,
    STRUCTURE,
    TRAINED,
)
from finetune.commands.diagnose.knowledge import Symptom, knowledge


def line_kind(text: str, facts: Collection[str]) -> LineKind:
    """Whether any entry, or anything that entries depend on, is in a line.

    Args:
        facts: what the log is about, of `FACTS`.
    """
    if STEP.search(text) and not any(
        form.search(text) for form in (NOT_A_NUMBER, TRAINED, EXCEPTION)
    ):
        return "step"
    if (
        matching_symptom(text, facts) is not None
        or is_failure(text)
        or any(form.search(text) for form in STRUCTURE)
    ):
        return "line"
    lowered = text.lower()
    if renumbers_devices(text) is not None:
        return "line"
    return "line" if any(word in lowered for word in FACT_WORDS) and facts_in(text) else ""


def matching_symptom(
    text: str, facts: Collection[str]
) -> tuple[Symptom, re.Match[str]] | None:
    """The surest rule; of several the nearest to the root."""
    lowered = text.lower()
    matches = [
        (s, match) for s in knowledge().possible(lowered) if (match := s.found_in(text, lowered)) is not None
        and (not s.when or s.when in facts)
    ]
    if QUIET_LEVEL.search(text) and not any(s.in_warnings for s, _ in matches if not s.needs):
        # what a warning is the reason of
        matches = [pair for pair in matches if pair[0].needs] or matches
    outranked = {cause for symptom, _ in matches for cause in symptom.outranks}
    matches = [pair for pair in matches if pair[0].cause not in outranked] or matches
    return min(matches, key=_order, default=None)


def _order(pair: tuple[Symptom, re.Match[str]]) -> tuple[bool, float, int]:
    """An entry for what the log is about comes first, then the surest, then the nearest kind."""
    symptom, _ = pair
    return not symptom.when, -symptom.confidence, symptom.kind


def is_failure(text: str) -> bool:
    """Whether the line reports a failure, of whatever cause."""
    return bool(EXCEPTION.match(text) or OWN_ERROR.match(text) or FAILURE.search(text))
