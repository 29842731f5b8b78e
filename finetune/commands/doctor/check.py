"""What a check reports: a verdict, what was found and the fix, in the language of the user."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from finetune.errors import FinetuneError, Problems

Verdict = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Check:
    """The outcome of one check. Created with a name and values; one of its methods decides it.

    The methods take strings with placeholders, which the values and the method's `words` fill.

    Attributes:
        name: a stable name, for machines and for looking it up in the documentation.
        verdict: "ok"; "warn": works, but probably not as intended; "fail": the run will not start
            or will crash; "skip": the check does not apply here (`what` explains why).
        what: what was found, with the numbers.
        fix: what to do; None for ok and skip.
        values: the numbers behind `what`, plain JSON.
    """

    name: str
    verdict: Verdict = "skip"
    what: str = ""
    fix: str | None = None
    values: dict[str, Any] = field(default_factory=dict)

    def ok(self, what: str, /, **words: Any) -> Check:
        return self._decided("ok", what, None, words)

    def skip(self, what: str, /, **words: Any) -> Check:
        return self._decided("skip", what, None, words)

    def warn(self, what: str, fix: str, /, **words: Any) -> Check:
        return self._decided("warn", what, fix, words)

    def fail(self, what: str, fix: str, /, **words: Any) -> Check:
        return self._decided("fail", what, fix, words)

    def _decided(
        self, verdict: Verdict, what: str, fix: str | None, words: dict[str, Any]
    ) -> Check:
        words = self.values | words
        what = what.format(**words)
        fix = None if fix is None else fix.format(**words)
        return replace(
            self,
            verdict=verdict,
            what=what,
            fix=fix,
        )


def failed(name: str, error: FinetuneError) -> list[Check]:
    """Return a failed check for each problem that an error reports; its texts are English in both
    languages.
    """
    problems = error.problems if isinstance(error, Problems) else [error]
    checks = []
    for problem in problems:
        what = f"{problem.what} ({problem.where})" if problem.where else problem.what
        checks.append(Check(name, "fail", what, problem.fix or problem.what))
    return checks


def worst(checks: Iterable[Check]) -> Verdict:
    """Return the worst verdict: fail, then warn, then ok; skip if all checks were skipped."""
    found = {check.verdict for check in checks}
    order: tuple[Verdict, ...] = ("fail", "warn", "ok")
    return next((verdict for verdict in order if verdict in found), "skip")
