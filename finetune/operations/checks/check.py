"""What a check says: a verdict, what was found, and what to do about it, in both languages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from finetune.operations.language import Text

Verdict = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Check:
    """The outcome of one check.

    Attributes:
        name: a stable name, for machines and for looking it up in the documentation.
        verdict: "ok"; "warn": works, but probably not as wanted; "fail": the run will not start or will die; "skip":
            not asked, because there is nothing here to ask (said why).
        what: what was found, with the numbers.
        fix: what to do; None for ok, and where nothing is to be done.
        values: the numbers behind `what`, plain JSON.
    """

    name: str
    verdict: Verdict
    what: Text
    fix: Text | None = None
    values: dict[str, Any] = field(default_factory=dict)

    def to_json(self, language: Literal["en", "zh"]) -> dict[str, Any]:
        return {
            "name": self.name,
            "verdict": self.verdict,
            "what": self.what[language],
            "fix": None if self.fix is None else self.fix[language],
            "values": self.values,
        }


def worst(checks: Iterable[Check]) -> Verdict:
    """fail before warn before ok; skip for nothing but skipped checks."""
    found = {check.verdict for check in checks}
    order: tuple[Verdict, ...] = ("fail", "warn", "ok")
    return next((verdict for verdict in order if verdict in found), "skip")
