"""Which lines of a log speak of a failure, and of which cause: rules against lines, with what stands around them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from finetune.commands.diagnose.log_facts import FACT_WORDS, facts_in
from finetune.commands.diagnose.log_reading import LogFile, LogLine, Sort
from finetune.commands.diagnose.symptoms.base import Symptom, fixed_words, grams, rarest
from finetune.commands.diagnose.symptoms.rules import ENDED_BADLY, SAID_BY_RUN, SYMPTOMS, UNEXPLAINED

# Of one symptom on one rank in one attempt the first lines are kept and the others counted.
KEPT_LINES = 3


@dataclass
class Evidence:
    """A line that shows a symptom.

    Attributes:
        values: for placeholders: what the line says, the rank, and of an error of this package where and fix.
        attempt: 0 for the log's first start, one more after every restart in it.
        count: lines like it on this rank.
    """

    symptom: Symptom
    line: LogLine
    values: dict[str, str]
    attempt: int
    count: int = 1


@dataclass
class LogEvidence:
    """What one log tells.

    Attributes:
        source: the log's name.
        evidence: in the order of the log.
        facts: settings and sizes that the log mentions: the run's own numbers.
        steps: logged training steps.
        attempt: number of the last attempt.
        finished: how many of `evidence` came before the run said that it was done.
    """

    source: str
    evidence: list[Evidence] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    attempt: int = 0
    finished: int = 0


_STEP = re.compile(r"""\bloss['"]?(?:\s*[:=]\s*|\s+)['"]?-?\d""")
_NOT_A_NUMBER = re.compile(r"\b(?:nan|inf)\b", re.IGNORECASE)
_FINISHED = re.compile(r"^\[SUCCESS\] done: |'train_runtime':|Training completed\. Do not forget to share")
_RESTART = re.compile(r"will restart worker group|\[(?:INFO|WARNING)\] (?:starting again|restart)")
_SUMMARY_RANK = re.compile(r"^ +rank +: (?P<rank>\d+) \(local_rank: \d+\)")
_OWN_WHERE, _OWN_FIX = "  where: ", "  fix:   "
# A diagnosis that the launcher put into the log: it quotes lines and speaks of other causes.
_DIAGNOSIS = re.compile(r"^   (?:why|fix|seen|follows from it|原因|解决|证据|由此引起): ")
_FRAME = re.compile(r'^\s+File ".*", line \d+')
_BOILERPLATE = re.compile(r"Possible Cause:|Solution:")
_LEAVES_BOILERPLATE = re.compile(
    r"^\s+TraceBack |^\[?(?:ERROR|INFO|WARNING|W|E)\b|^\[PID: |^E[A-Z0-9]\d\d\d\d\b|^\S*Error\b|^Traceback "
)
_QUIET_LEVEL = re.compile(
    r"\[(?:INFO|DEBUG|WARNING|SUCCESS|NOTICE|TRACE)\]|\bNCCL INFO\b|[ |](?:INFO|WARNING|DEBUG) *(?:-|\|)"
    r"|^(?:INFO|WARNING|DEBUG)[: ]|\b\w*Warning: |(?i:\bwarning: )|\[warn\]"
    r"|retry loop|will retry|[Rr]etrying\b"
)
_EXCEPTION = re.compile(
    r"^(?P<exception>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Timeout|Failure|Expired|NotFound|Group))(?::|$)"
)
# Exceptions that end a process because something else did.
_AFTERMATH_EXCEPTIONS = re.compile(
    r"(?:ChildFailedError|SignalException|KeyboardInterrupt|SystemExit|BrokenPipeError|GeneratorExit|ProcessExitedException"
    r"|CalledProcessError|ProcessRaisedException)(?::|$)|The Inner error is reported as above"
    r"|(?:NPU|HCCL|OPS|GRAPH) function error|HCCL error in|ACL stream synchronize failed"
)
_IGNORED = re.compile(r"^Exception ignored in|^--- Logging error ---|^Exception in thread (?!MainThread)")
# Others begin a line like ours with a time, a module or a file.
_OWN_ERROR = re.compile(r"^\[ERROR\] (?:rank \d+: )?(?P<said>(?!20\d\d-|[A-Z]+\(|\[)\S.*)")
_FAILURE = re.compile(
    r"^Segmentation fault|^Fatal Python error|core dumped|^Aborted|^terminate called|^Bus error|^\S+: error: "
    r"|^bash: .*(?:not found|denied)|^\S+: can't open file|^srun: error: .*[Ee]xited|^ +exitcode +: -?[1-9]"
    r"|exits with return code = -?[1-9]|\bERR\d\d\d\d\d\b|\bE[A-Z0-9]\d\d\d\d(?::|\))|failed \(exitcode: -?[1-9]"
)


class _Teller:
    """What a process was in the middle of saying."""

    def __init__(self) -> None:
        self.in_frame = self.in_boilerplate = self.ignored = False
        self.last: Evidence | None = None  # what a following where or fix belongs to
        self.failed = False  # a failure of this process in this attempt was seen


class LogScan:
    """Reads one log against the rules.

    Args:
        symptoms: the rules.
    """

    def __init__(self, symptoms: Sequence[Symptom] = SYMPTOMS) -> None:
        self._symptoms = symptoms
        self._grams = {rarest(grams(word)) for s in symptoms for pattern in s.patterns for word in fixed_words(pattern)}
        self._tellers: dict[int | None, _Teller] = defaultdict(_Teller)
        self._kept: dict[tuple[int, int | None, int], list[Evidence]] = defaultdict(list)
        self._summary_rank: int | None = None
        self.found = LogEvidence("")

    def read(self, file: LogFile) -> LogEvidence:
        """All that the log tells. Raises OSError where it cannot be read."""
        self.found.source = file.source
        for line in file.lines(self.sort_of):
            self._take(line)
        self.found.steps = file.steps
        return self.found

    def sort_of(self, text: str) -> Sort:
        """Whether any rule, or anything that rules depend on, is in a line."""
        if _STEP.search(text) and not _NOT_A_NUMBER.search(text):
            return "step"
        if self._symptom(text) is not None or _is_structure(text) or _is_failure(text):
            return "line"
        lowered = text.lower()
        return "line" if any(word in lowered for word in FACT_WORDS) and facts_in(text) else ""

    def _symptom(self, text: str) -> tuple[Symptom, re.Match[str]] | None:
        """The rule that speaks most surely and most of the root."""
        lowered = text.lower()
        if self._grams.isdisjoint(grams(lowered)):
            return None
        matches = [(s, match) for s in self._symptoms if (match := s.match(text, lowered)) is not None]
        return min(matches, key=lambda pair: (pair[0].kind, -pair[0].confidence), default=None)

    def _take(self, line: LogLine) -> None:
        found, teller = self.found, self._tellers[line.rank]
        for name, value in facts_in(line.text).items():
            found.facts.setdefault(name, value)
        if _RESTART.search(line.text):
            found.attempt += 1
            self._tellers.clear()
        elif _FINISHED.search(line.text):
            found.finished = len(found.evidence)
        elif match := _SUMMARY_RANK.match(line.text):
            self._summary_rank = int(match["rank"])
        elif line.text.startswith((_OWN_WHERE, _OWN_FIX)):
            self._own_words(teller, line.text)
        elif _IGNORED.match(line.text):
            teller.ignored = True
        elif text := self._own_text(teller, line.text):
            self._match(teller, line, text)

    @staticmethod
    def _own_words(teller: _Teller, text: str) -> None:
        """What an error of this package says of where it is and of its remedy."""
        last = teller.last
        if last is None:
            return
        name = "said_where" if text.startswith(_OWN_WHERE) else "said_fix"
        last.values.setdefault(name, text.removeprefix(_OWN_WHERE).removeprefix(_OWN_FIX))
        own = _OWN_ERROR.match(last.line.text)
        if name == "said_fix" and own and last.symptom in (UNEXPLAINED, ENDED_BADLY):
            last.symptom = SAID_BY_RUN
            last.values.setdefault("said", own["said"])

    @staticmethod
    def _own_text(teller: _Teller, text: str) -> str:
        """The part of the line that was said about this failure: not quoted source code, not fixed advice."""
        if _DIAGNOSIS.match(text):
            return ""
        if _FRAME.match(text):
            teller.in_frame = True
            return ""
        if teller.in_frame and text.startswith("    "):
            return ""
        teller.in_frame = False
        if teller.in_boilerplate and not _LEAVES_BOILERPLATE.search(text):
            return ""
        cut = _BOILERPLATE.search(text)
        teller.in_boilerplate = cut is not None
        return text[: cut.start()] if cut else text

    def _match(self, teller: _Teller, line: LogLine, text: str) -> None:
        quiet = _QUIET_LEVEL.search(text) is not None
        matched = self._symptom(text)
        if matched is not None and (not quiet or matched[0].in_warnings):
            symptom, match = matched
            # A trailing _ lets several alternatives of one pattern name the same value.
            values = {name.rstrip("_"): value for name, value in match.groupdict().items() if value is not None}
            teller.ignored = False
        elif not quiet and _is_failure(text):
            exception = _EXCEPTION.match(text)
            if exception and teller.ignored:
                teller.ignored = False
                return
            aftermath = teller.failed or _AFTERMATH_EXCEPTIONS.search(text) or not (exception or _OWN_ERROR.match(text))
            symptom, values = ENDED_BADLY if aftermath else UNEXPLAINED, {}
        else:
            return
        teller.failed = True
        self._keep(teller, Evidence(symptom, line, values, self.found.attempt))

    def _keep(self, teller: _Teller, evidence: Evidence) -> None:
        rank = evidence.line.rank if self._summary_rank is None else self._summary_rank
        evidence.values.setdefault("line", evidence.line.text.strip())
        if rank is not None:
            evidence.values.setdefault("rank", str(rank))
        kept = self._kept[id(evidence.symptom), evidence.line.rank, evidence.attempt]
        if len(kept) >= KEPT_LINES:
            kept[-1].count += 1
            return
        kept.append(evidence)
        self.found.evidence.append(evidence)
        teller.last = evidence


def _is_structure(text: str) -> bool:
    return bool(
        _FRAME.match(text)
        or text.startswith((_OWN_WHERE, _OWN_FIX))
        or _BOILERPLATE.search(text)
        or "TraceBack" in text
        or _FINISHED.search(text)
        or _RESTART.search(text)
        or _SUMMARY_RANK.match(text)
        or _IGNORED.match(text)
    )


def _is_failure(text: str) -> bool:
    return bool(_EXCEPTION.match(text) or _OWN_ERROR.match(text) or _FAILURE.search(text))
