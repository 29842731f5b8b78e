"""Parse lines of a run's console, if only a copy of the console is available.

This package's own lines are understood. Lines of scripts that print `step 10/500 | loss: 3.2 |
tok/sec: 12,345` are understood as far as possible.
"""

from __future__ import annotations

import io
import re
import sys
from dataclasses import dataclass, field
from typing import Any

from finetune.plain_text import plain_text

_TIME = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[,.]\d+)? ")
_TAG = re.compile(r"\[(WARNING|ERROR)\] (?:rank (\d+): )?(.+)")
_STEP = re.compile(r"\bstep:? *(\d+) */ *(\d+)")
_NUMBER = r"([-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?|nan|inf)"
# name in a line of trainer_log.jsonl -> how a console shows it
_FACTS = {
    "loss": (re.compile(rf"\bloss:? {_NUMBER}", re.I),),
    "tokens_per_second": (
        re.compile(rf"{_NUMBER} tok/s", re.I),
        re.compile(rf"\btok/s(?:ec)?:? {_NUMBER}", re.I),
    ),
    "learning_rate": (re.compile(rf"\blr:? {_NUMBER}", re.I),),
    "step_seconds": (re.compile(rf"\bdt:? {_NUMBER} ?s\b", re.I),),
    "mfu": (re.compile(rf"\bmfu:? {_NUMBER}%", re.I),),
}
_STAGE = re.compile(r"\b(stage \d+/\d+)\b")
_ETA = re.compile(r"\bETA (?:(\d+):)?(\d+):(\d\d)\b")
_EVAL = re.compile(r"\bstep (\d+)  (eval_\S+ .*)")
_EVAL_FACT = re.compile(rf"(eval_\S+) {_NUMBER}(?!\S)")
_SAVED = re.compile(r"\bsaved (checkpoint-(\d+))\b")
_END = (
    ("done", re.compile(r"\[SUCCESS\] done: (\d+) steps")),
    ("stopped", re.compile(r"stopped by \S+ at step (\d+)")),
)


@dataclass
class ConsoleLine:
    """The values in one line; the others are empty."""

    # Fields as in trainer_log.jsonl, with `total_steps`, and `stage` and `eta_seconds` where the
    # line has them.
    step: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)  # fields as in an `eval` event
    checkpoint: dict[str, Any] = field(default_factory=dict)  # fields as in a `checkpoint` event
    end: str = ""  # the state in which the run ended
    warning: tuple[str, int, str] | None = None  # (level, rank, text) of a warning or an error


def print_anything() -> None:
    """Have what this terminal's encoding lacks printed as `?`, rather than end the command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def parse_console_line(raw: bytes) -> ConsoleLine:
    """Parse one line of a console or of a rank's log file, in any encoding."""
    # A progress bar writes over itself with carriage returns: the last state counts.
    text = plain_text(raw.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]).strip()
    text = _TIME.sub("", text, count=1) if _TIME.match(text) else text
    line = ConsoleLine()
    if tag := _TAG.match(text):
        line.warning = (tag[1], int(tag[2] or 0), tag[3].strip())
    line.end = next((state for state, pattern in _END if pattern.search(text)), "")
    if found := _SAVED.search(text):
        line.checkpoint = {"name": found[1], "step": int(found[2])}
    elif found := _EVAL.search(text):
        facts = {name: _number(value) for name, value in _EVAL_FACT.findall(found[2])}
        line.evaluation = {"step": int(found[1]), **facts}
    elif (found := _STEP.search(text)) and (facts := _step_facts(text)):
        line.step = {
            "step": int(found[1]),
            "total_steps": int(found[2]),
            **facts,
        }
    return line


def _step_facts(text: str) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for name, patterns in _FACTS.items():
        found = next(filter(None, (pattern.search(text) for pattern in patterns)), None)
        if found:
            facts[name] = _number(found[1])
    if not facts:
        return {}
    if facts.get("mfu") is not None:
        facts["mfu"] /= 100
    if stage := _STAGE.search(text):
        facts["stage"] = stage[1]
    if eta := _ETA.search(text):
        facts["eta_seconds"] = int(eta[1] or 0) * 3600 + int(eta[2]) * 60 + int(eta[3])
    return facts


def _number(text: str) -> float | None:
    """Parse a number; None for NaN and infinity, as in the run's own log."""
    value = float(text.replace(",", ""))
    return value if abs(value) < float("inf") else None
