"""What is taken from logs: lines that show symptoms, and what one log tells as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from finetune.commands.diagnose.knowledge import Symptom
from finetune.commands.diagnose.line_kinds import is_of
from finetune.commands.diagnose.log_lines import LogLine

# Causes that libraries also mention at their import, though nothing fails.
_REMARKS = ("missing_package", "package_mismatch", "flash_attn_missing")


@dataclass(eq=False)
class Evidence:
    """A line that shows a symptom.

    Attributes:
        values: for placeholders: what the line says, the rank, and of an error of this package
            where and fix.
        attempt: 0 for the log's first start, one more after every restart in it.
        count: lines like it on this rank. quiet: its line calls itself a warning or information.
        ends_traceback: it ends a traceback; in_request: of a server that had answered before.
    """

    symptom: Symptom
    line: LogLine
    values: dict[str, str]
    attempt: int
    count: int = 1
    quiet: bool = False
    ends_traceback: bool = False
    in_request: bool = False

    @property
    def is_unknown(self) -> bool:
        """Whether no entry knows it by its words."""
        return not self.symptom.patterns

    @property
    def is_exception(self) -> bool:
        return self.ends_traceback or is_of("exception", self.line.text)

    @property
    def is_remark(self) -> bool:
        """Whether it may be only what a library prints at its import."""
        return self.symptom.cause in _REMARKS and not self.is_exception


@dataclass(frozen=True)
class Result:
    """A line that tells of work that was done, and whether its log ends with it."""

    number: int
    text: str
    at_end: bool


@dataclass
class LogEvidence:
    """What one log tells.

    The numbers say how many of `evidence` came before something was said; -1 if nothing said it.

    Attributes:
        facts: settings and sizes that the log mentions: the run's own numbers.
        lines: that are not empty.
        steps: logged training steps, by rank.
        trained_until: by rank the time since which it logged enough steps to have survived.
        done, done_at: it was said that the run is done, and when.
        finished: the run reported it. trained: a trainer or a script said it.
        ended: anything ended well or started again. left: a process ended well after `trained`.
        served: a server answered a request for work.
        result: among the last lines what tells of work that was done.
    """

    evidence: list[Evidence] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    lines: int = 0
    of_a_run: bool = False
    steps: Mapping[int | None, int] = field(default_factory=dict)
    trained_until: Mapping[int | None, float] = field(default_factory=dict)
    done: bool = False
    done_at: float | None = None
    finished: int = -1
    trained: int = -1
    ended: int = -1
    left: bool = False
    served: int = -1
    result: Result | None = None
