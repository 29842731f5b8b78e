"""What a line of a log is: `line_kinds.toml`, and the entries that match it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path

from finetune.commands.diagnose.knowledge import Symptom, knowledge
from finetune.commands.diagnose.log_facts import FACT_WORDS, facts_in
from finetune.commands.diagnose.log_lines import LineKind


@cache
def form(name: str) -> re.Pattern[str]:
    """Return the regular expression of a kind of line."""
    kind = _kinds()[name]
    flags = re.IGNORECASE if kind.get("ignore_case") else 0
    return re.compile("|".join(kind["match"]), flags)


@cache
def _kinds() -> dict[str, dict[str, list[str]]]:
    path = Path(__file__).with_name("line_kinds.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))


@cache
def _changes_reading() -> tuple[str, ...]:
    return tuple(name for name, kind in _kinds().items() if kind.get("look"))


def is_of(name: str, text: str) -> bool:
    """Whether a line is of a kind."""
    return form(name).search(text) is not None


def match_of(name: str, text: str) -> re.Match[str] | None:
    return form(name).search(text)


def line_kind(text: str, facts: Collection[str]) -> LineKind:
    """Return whether a line is a step, or any entry or its reading depends on it.

    Args:
        facts: what the log is about, of `FACTS`.
    """
    if is_of("step", text) and not any(
        is_of(name, text) for name in ("not_a_number", "trained", "exception")
    ):
        return "step"
    if is_of("frame", text):
        return "frame"
    if (
        matching_symptom(text, facts) is not None
        or is_failure(text)
        or any(is_of(name, text) for name in _changes_reading())
    ):
        return "line"
    lowered = text.lower()
    return "line" if any(word in lowered for word in FACT_WORDS) and facts_in(text) else ""


def matching_symptom(
    text: str, facts: Collection[str], frames: Sequence[str] = ()
) -> tuple[Symptom, re.Match[str]] | None:
    """Return the entry that answers a line, with its match.

    Args:
        facts: what the log is about, of `FACTS`.
        frames: of the traceback that the line ends.
    """
    lowered = text.lower()
    matches = [
        (entry, match)
        for entry in knowledge().possible(lowered)
        if (match := entry.found_in(text, lowered)) is not None
        and (not entry.when or entry.when in facts)
        and (not entry.frames or passing_frame(entry, frames))
    ]
    if is_of("quiet", text) and not any(s.in_warnings for s, _ in matches if not s.needs):
        # what a warning is the reason of
        matches = [pair for pair in matches if pair[0].needs] or matches
    outranked = {cause for entry, _ in matches for cause in entry.outranks}
    matches = [pair for pair in matches if pair[0].cause not in outranked] or matches
    return min(matches, key=_order, default=None)


def passing_frame(entry: Symptom, frames: Sequence[str]) -> str | None:
    """Return the innermost frame that one of the entry's `frames` matches."""
    return next(
        (f for f in reversed(frames) if any(re.search(pattern, f) for pattern in entry.frames)),
        None,
    )


def _order(pair: tuple[Symptom, re.Match[str]]) -> tuple[int, float, int]:
    """An entry for this context comes first, then the surest, then the nearest kind."""
    symptom, _ = pair
    conditions = bool(symptom.when) + bool(symptom.frames)
    return -conditions * (symptom.sure != "guess"), -symptom.confidence, symptom.kind


def is_failure(text: str) -> bool:
    """Whether the line reports a failure, of whatever cause."""
    return any(is_of(name, text) for name in ("exception", "own_error", "failure"))
