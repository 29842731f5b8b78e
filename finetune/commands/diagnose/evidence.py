"""What is taken from logs: lines that show symptoms, and what one log tells as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from finetune.commands.diagnose.log_reading import LogLine, Moment
from finetune.commands.diagnose.log_words import CODE_ONLY
from finetune.commands.diagnose.knowledge import Symptom


@dataclass
class Evidence:
    """A line that shows a symptom.

    Attributes:
        values: for placeholders: what the line says, the rank, and of an error of this package
            where and fix.
        attempt: 0 for the log's first start, one more after every restart in it.
        count: lines like it on this rank.
        quiet: its line calls itself a warning or information.
        ends_traceback: it is what a traceback ends with.
        in_request: that traceback goes through the code of a server, and one had answered requests
            before.
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
    def code_only(self) -> bool:
        """Whether the line tells a call and the number that it returned, not why."""
        return CODE_ONLY.search(self.line.text) is not None


@dataclass
class LogEvidence:
    """What one log tells.

    Attributes:
        evidence: in the order of the log.
        facts: settings and sizes that the log mentions: the run's own numbers.
        steps: logged training steps, by rank.
        trained_until: since when each rank logged as many steps as show that it survived what came
            before.
        finished: how many of `evidence` came before the run reported that it was done.
        done: when it, or a script around it, said so; None where none did.
        trained: how many came before it said so; -1 where nothing did.
        ended: how many came before anything in it said that something ended or went on well; -1
            where nothing did.
        preparing: the last progress of data being made ready, None where it came to its end.
        batches: how many batches each rank said it has, or had when it was through.
        served: how many came before a server answered a request for work; -1 where none did.
        said_well: how many came before the last thing in it that said that all ended well; -1 where
            nothing did.
        result: among the last lines what tells of work that was done: its line's number, its text,
            and whether the log ends with it.
        left: how many came before a process, of a run that had said it was done, ended well; -1
            where none did.
    """

    evidence: list[Evidence] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    steps: Mapping[int | None, int] = field(default_factory=dict)
    trained_until: Mapping[int | None, Moment] = field(default_factory=dict)
    finished: int = 0
    done: Moment | None = None
    trained: int = -1
    ended: int = -1
    served: int = -1
    left: int = -1
    said_well: int = -1
    result: tuple[int, str, bool] | None = None
    preparing: LogLine | None = None
    batches: dict[int, int] = field(default_factory=dict)
