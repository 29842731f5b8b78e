"""Logs written after failures that people posted in public issue trackers.

They were labelled before the command was run on them. `remedy_words` are regular expressions of
advice that would have helped, `wrong_words` of advice that would have misled. Healthy logs must have
no finding. `pytest -s` prints the table of docs/reference/diagnosis.md.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from finetune.commands.diagnose.command import diagnose_logs
from finetune.commands.diagnose.knowledge import SURENESS

SERIES = Path(__file__).parent / "series"
LABELS = {
    name: tomllib.loads((SERIES / name / "labels.toml").read_text(encoding="utf-8"))
    for name in ("posted_ascend", "posted_other", "posted_later", "posted_last")
}


def verdict(path: Path, label: dict[str, Any]) -> tuple[str, str]:
    """Return how the first answer does, and the answer."""
    findings = diagnose_logs([path])
    if not findings:
        return "silent", ""
    first = findings[0]
    answer = f"{first.cause} {first.confidence}: {first.explanation}\n{first.fix}"
    step = first.fix.split("\n")[0]  # what is tried first
    if any(re.search(words, step, re.IGNORECASE) for words in label.get("wrong_words", ())):
        return ("wrong, certain" if first.confidence >= SURENESS["certain"] else "wrong"), answer
    if any(re.search(words, first.fix, re.IGNORECASE) for words in label["remedy_words"]):
        return "right", answer
    return ("unknown" if first.cause == "unknown" else "half"), answer


def test_what_people_posted(capsys: pytest.CaptureFixture[str]) -> None:
    ascend, others, missed = Counter[str](), Counter[str](), []
    for series, labels in LABELS.items():
        for label in labels["log"]:
            told, answer = verdict(SERIES / series / label["file"], label)
            is_ascend = label.get("ascend", series == "posted_ascend")
            (ascend if is_ascend else others)[told] += 1
            if told != "right":
                missed.append(f"{told}: {label['file']}: {label['cause']}\n    {answer}")
    every = ascend + others
    with capsys.disabled():
        print("\n| logs | right | half | unknown | wrong | silent |\n|---|--:|--:|--:|--:|--:|")
        for name, told in (("Ascend", ascend), ("others", others), ("all", every)):
            wrong = told["wrong"] + told["wrong, certain"]
            figures = (told["right"], told["half"], told["unknown"], wrong, told["silent"])
            print(f"| {told.total()} {name} |", " | ".join(map(str, figures)), "|")
    assert every["right"] >= 0.85 * every.total(), "\n".join(missed)
    assert ascend["right"] >= 0.8 * ascend.total(), "\n".join(missed)
    assert not every["wrong, certain"], "\n".join(missed)


def test_a_healthy_log_has_no_finding() -> None:
    for series, labels in LABELS.items():
        for label in labels["healthy"]:
            assert diagnose_logs([SERIES / series / label["file"]]) == [], label["file"]
