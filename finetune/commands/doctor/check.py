"""What a check reports: a verdict, what was found and the fix, in the language of the user."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from finetune.errors import FinetuneError, Problems

Verdict = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Check:
    """The outcome of one check.

    Attributes:
        name: a stable name, for machines and for looking it up in the documentation.
        verdict: "ok"; "warn": works, but probably not as wanted; "fail": the run will not start or
            will crash; "skip": the check does not apply here (`what` explains why).
        what: what was found, with the numbers.
        fix: what to do; None for ok and skip.
        values: the numbers behind `what`, plain JSON.
    """

    name: str
    verdict: Verdict
    what: str
    fix: str | None = None
    values: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def ok(name: str, what: str, /, **values: Any) -> Check:
    return Check(name, "ok", what, None, values)


def skip(name: str, what: str) -> Check:
    return Check(name, "skip", what)


def warn(name: str, what: str, fix: str, /, **values: Any) -> Check:
    return Check(name, "warn", what, fix, values)


def fail(name: str, what: str, fix: str, /, **values: Any) -> Check:
    return Check(name, "fail", what, fix, values)


def failed(name: str, error: FinetuneError) -> list[Check]:
    """Return a failed check for each problem that an error reports; its texts are English in both
    languages.
    """
    problems = error.problems if isinstance(error, Problems) else [error]
    return [
        fail(
            name,
            f"{problem.what} ({problem.where})" if problem.where else problem.what,
            problem.fix or problem.what,
        )
        for problem in problems
    ]


def worst(checks: Iterable[Check]) -> Verdict:
    """Return the worst verdict: fail, then warn, then ok; skip if all checks were skipped."""
    found = {check.verdict for check in checks}
    order: tuple[Verdict, ...] = ("fail", "warn", "ok")
    return next((verdict for verdict in order if verdict in found), "skip")
