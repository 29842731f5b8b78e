"""What is taken from logs: lines that show symptoms, and what one log tells as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from finetune.commands.diagnose.knowledge import Symptom
from finetune.commands.diagnose.log_lines import LogLine


@dataclass(eq=False)
class Evidence:
    """A line that shows a symptom.

    Attributes:
        values: for placeholders: what the line says, the rank, and of an error of this package
            where and fix.
        attempt: 0 for the log's first start, one more after every restart in it.
        count: lines like it on this rank.
        quiet: its line calls itself a warning or information.
        ends_traceback: it is what a traceback ends with.
        in_request: that traceback is a server's, which had answered requests before.
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
    def place(self) -> str:
        """The id of its entry, if that is asked for by name."""
        return self.symptom.id

    @property
    def is_unknown(self) -> bool:
        """Whether no entry knows it by its words."""
        return not self.symptom.patterns


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
        evidence: in the order of the log.
        facts: settings and sizes that the log mentions: the run's own numbers.
        lines: that are not empty.
        of_a_run: a line is of a run of this kind.
        steps: logged training steps, by rank.
        trained_until: by rank the time since which it logged as many steps as show that it survived
            what came before.
        done_at: the time at which the run said that it was done.
        finished: the run reported that it was done.
        trained: a trainer or a script said so.
        ended: anything ended well or started again.
        left: whether a process ended well after that the training was done.
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
