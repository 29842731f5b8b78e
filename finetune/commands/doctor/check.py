"""What a check says: a verdict, what was found, and what to do about it, in both languages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from finetune.errors import FinetuneError, Problems
from finetune.runtime.language import Language, Text

Verdict = Literal["ok", "warn", "fail", "skip"]
GIB = 1 << 30


@dataclass(frozen=True)
class Check:
    """The outcome of one check.

    Attributes:
        name: a stable name, for machines and for looking it up in the documentation.
        verdict: "ok"; "warn": works, but probably not as wanted; "fail": the run will not start or will die; "skip":
            not asked, because there is nothing here to ask (said why).
        what: what was found, with the numbers.
        fix: what to do; None for ok and skip.
        values: the numbers behind `what`, plain JSON.
    """

    name: str
    verdict: Verdict
    what: Text
    fix: Text | None = None
    values: dict[str, Any] = field(default_factory=dict)

    def to_json(self, language: Language) -> dict[str, Any]:
        return {
            "name": self.name,
            "verdict": self.verdict,
            "what": self.what[language],
            "fix": None if self.fix is None else self.fix[language],
            "values": self.values,
        }


def ok(name: str, en: str, zh: str, /, **values: Any) -> Check:
    return Check(name, "ok", Text(en=en, zh=zh), None, values)


def skip(name: str, en: str, zh: str) -> Check:
    return Check(name, "skip", Text(en=en, zh=zh))


def warn(name: str, what: tuple[str, str], fix: tuple[str, str], /, **values: Any) -> Check:
    """Args: `what` and `fix` are (English, Chinese)."""
    return Check(name, "warn", Text(en=what[0], zh=what[1]), Text(en=fix[0], zh=fix[1]), values)


def fail(name: str, what: tuple[str, str], fix: tuple[str, str], /, **values: Any) -> Check:
    """Args: `what` and `fix` are (English, Chinese)."""
    return Check(name, "fail", Text(en=what[0], zh=what[1]), Text(en=fix[0], zh=fix[1]), values)


def problems_of(error: FinetuneError) -> list[FinetuneError]:
    """The problems that an error reports together, or itself."""
    return error.problems if isinstance(error, Problems) else [error]


def failed(name: str, problem: FinetuneError) -> Check:
    """A check that failed with an error of the package; its words are English in both languages."""
    what = f"{problem.what} ({problem.where})" if problem.where else problem.what
    fix = problem.fix or problem.what
    return fail(name, (what, what), (fix, fix))


def worst(checks: Iterable[Check]) -> Verdict:
    """fail before warn before ok; skip for nothing but skipped checks."""
    found = {check.verdict for check in checks}
    order: tuple[Verdict, ...] = ("fail", "warn", "ok")
    return next((verdict for verdict in order if verdict in found), "skip")


def gib(size_bytes: float) -> str:
    """`1.5 GiB`; below one GiB in MiB."""
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB else f"{size_bytes / (1 << 20):.0f} MiB"
