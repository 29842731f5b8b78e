"""From evidence to findings: the root of a failure first, its consequences named under it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from finetune.commands.diagnose.evidence import Evidence, LogEvidence
from finetune.commands.diagnose.knowledge import SURENESS, Kind, fill
from finetune.commands.diagnose.line_kinds import is_of
from finetune.commands.diagnose.log_facts import with_next_values
from finetune.commands.diagnose.survival import CLOCK_SLACK_SECONDS, ends_well, standing_evidence
from finetune.plain_text import mask_secrets, plain_text
from finetune.runtime.language import _

# Lines of other processes between those of one error.
SAME_ERROR_LINES = 100
# A log without times: lines of several processes that belong together are not farther apart.
ORDER_SLACK_LINES = 400
# Who watches from outside reports that much later, at most: a scheduler that a node failed.
LATE_SECONDS = 600.0
# A line without a time of its own is at most so much later than the last one that has it.
UNTIMED_SECONDS = 600.0
STEPS_SHOWN = 3
EVIDENCE_LINES = 6
EVIDENCE_CHARACTERS = 400
# Below it a symptom explains what its own process reported later, not what it reported before.
LEADING_CONFIDENCE = SURENESS["likely"]


@dataclass
class Finding:
    """A cause of a failure.

    Attributes:
        cause: its id, of the list in docs/reference/diagnosis.md.
        confidence: 0.9 certain, 0.7 likely, 0.4 a guess; 0 what the run got over.
        evidence: `LOG:LINE: text`, secrets masked.
        fix: steps to take, the surest first, a line each.
        rank: the rank that shows it first, None if no line tells.
        consequences: causes whose lines are in the logs too, and that follow from this one.
    """

    cause: str
    confidence: float
    evidence: list[str]
    explanation: str
    fix: str
    rank: int | None = None
    consequences: list[str] = field(default_factory=list)


@dataclass
class FindingByPlace(Finding):
    """Told by where an exception was raised: whether starting again cures it is not known."""


class _Group:
    """All evidence of a cause: the earliest of its nearest kind, and the surest of that kind."""

    def __init__(self, evidence: Sequence[Evidence]) -> None:
        self.kind = min(piece.symptom.kind for piece in evidence)
        self.evidence = sorted(evidence, key=_order)
        nearest = [piece for piece in self.evidence if piece.symptom.kind == self.kind]
        self.first = nearest[0]
        self.cause = self.first.symptom.cause
        self.outranks = {cause for piece in nearest for cause in piece.symptom.outranks}
        # of equally sure ones that whose entry is for this context
        self.clearest = max(
            nearest,
            key=lambda e: (e.symptom.confidence, bool(e.symptom.when or e.symptom.frames)),
        )
        self.confidence = self.clearest.symptom.confidence


def rank_findings(
    logs: Sequence[LogEvidence], facts: dict[str, str] | None = None
) -> tuple[list[Finding], Finding | None]:
    """Return the causes that all logs together show, best first.

    Without any, the second value is who stopped the run, or what it got over.

    Args:
        logs: in the order given; their times are compared as they stand.
        facts: settings of the run that are known from elsewhere.
    """
    known = {name: value for log in reversed(logs) for name, value in log.facts.items()}
    known |= facts or {}
    standing = standing_evidence(logs)
    if any(log.ended >= 0 for log in logs) and all(
        piece.quiet and piece.symptom.kind == Kind.CASCADE for piece in standing
    ):
        return [], None  # processes that end one after the other warn of it
    standing = _without_bare_codes(standing)
    groups = _groups(_of_last_attempts(standing))
    if groups and all(group.kind > Kind.UNEXPLAINED for group in groups):
        # the last attempt only waited for something that went wrong in an earlier one
        groups = _groups(standing)
    groups = [group for group in groups if not any(_is_remark(group, o) for o in groups)]
    kept = [group for group in groups if not any(_explains(other, group) for other in groups)]
    stopped = [group for group in kept if group.cause == "interrupted"]  # no failure
    kept = [group for group in kept if group not in stopped]
    # that a process ended badly is then no news
    if any(group.cause != "unknown" for group in kept):
        kept = [group for group in kept if group.first.symptom.id != "ended_badly"]
    if any(group.kind < Kind.CASCADE for group in kept):
        kept = [group for group in kept if group.first.symptom.id != "retried"]
    kept.sort(key=lambda group: (group.confidence < LEADING_CONFIDENCE, _order(group.first)))
    findings = [_finding(group, known) for group in kept or stopped]
    if not findings:
        return [], None
    roots = {finding.cause for finding in findings} | {"unknown", "interrupted"}
    findings[0].consequences = sorted({group.cause for group in groups} - roots)
    if not kept:
        return [], findings[0]
    speaking = [log for log in logs if log.evidence]
    if all(ends_well(log) for log in speaking):
        return [], _got_over(findings[0], speaking[-1])
    return findings, None


def _is_remark(group: _Group, other: _Group) -> bool:
    """Whether a group is only what a library prints at its import, and the other an exception."""
    if not all(piece.is_remark for piece in group.evidence):
        return False
    first, last = group.first, other.evidence[-1]
    ends = last.ends_traceback and last.symptom.kind <= Kind.UNEXPLAINED
    return ends and _process(last) == _process(first) and last.line.number > first.line.number


def _got_over(finding: Finding, log: LogEvidence) -> Finding:
    """Return what a log speaks of that goes on to a result: no failure, but worth a word."""
    assert log.result is not None
    told = _(
        "The log goes on to a result (line {line}: {text}), so that what it speaks of before was"
        " got over, or is only quoted. Otherwise it would mean: {explanation}"
    )
    text = mask_secrets(plain_text(log.result.text[:80]))
    explanation = told.format(line=log.result.number, text=text, explanation=finding.explanation)
    fix = _("If something did fail there, give that part of the log alone.")
    return replace(finding, confidence=0.0, explanation=explanation, fix=fix, consequences=[])


def _of_last_attempts(evidence: Sequence[Evidence]) -> list[Evidence]:
    last: dict[str, int] = {}
    for piece in evidence:
        last[piece.line.source] = max(piece.attempt, last.get(piece.line.source, 0))
    return [piece for piece in evidence if piece.attempt == last[piece.line.source]]


def _without_bare_codes(evidence: Sequence[Evidence]) -> list[Evidence]:
    """Drop lines that only tell that a call failed, if their process says near them why."""
    by_process: dict[tuple[str, int | None, str], list[Evidence]] = defaultdict(list)
    for piece in evidence:
        tells = piece.symptom.kind != Kind.CASCADE and not piece.symptom.needs
        if tells and not is_of("code_only", piece.line.text):
            by_process[_process(piece)].append(piece)

    def is_said_better(piece: Evidence) -> bool:
        return is_of("code_only", piece.line.text) and any(
            _is_surer(other, piece)
            and abs(other.line.number - piece.line.number) <= SAME_ERROR_LINES
            for other in by_process[_process(piece)]
        )

    return [piece for piece in evidence if not is_said_better(piece)]


def _is_surer(other: Evidence, piece: Evidence) -> bool:
    one, two = other.symptom, piece.symptom
    equal = one.confidence == two.confidence and two.kind >= Kind.VAGUE
    return equal or one.confidence > two.confidence


def _process(piece: Evidence) -> tuple[str, int | None, str]:
    return piece.line.source, piece.line.rank, piece.line.node


def _groups(evidence: Sequence[Evidence]) -> list[_Group]:
    counts, values = Counter[int](), defaultdict[int, set[str]](set)
    for piece in evidence:
        counts[id(piece.symptom)] += piece.count
        values[id(piece.symptom)].add(piece.values.get(piece.symptom.differs, "").lower())
    reasons = [piece for piece in evidence if not piece.symptom.needs]
    present = {piece.symptom.cause for piece in reasons}
    present |= {piece.values.get("reason", "") for piece in reasons}
    by_cause: dict[str, list[Evidence]] = defaultdict(list)
    for piece in evidence:
        symptom, number = piece.symptom, id(piece.symptom)
        if symptom.needs and not present.intersection(symptom.needs):
            continue
        if counts[number] >= symptom.at_least and (not symptom.differs or len(values[number]) > 1):
            by_cause[symptom.cause].append(piece)
    return [_Group(pieces) for pieces in by_cause.values()]


def _order(evidence: Evidence) -> tuple[float, int]:
    seconds = evidence.line.seconds
    return (float("inf") if seconds is None else seconds), evidence.line.number


def _explains(root: _Group, other: _Group) -> bool:
    one, two = root.first.symptom, other.first.symptom
    if root is other or root.cause in other.outranks:
        return False
    kinds = {root.kind, other.kind}
    vague = {Kind.KILLED, Kind.VAGUE, Kind.UNEXPLAINED}
    if kinds == {Kind.VAGUE, Kind.UNEXPLAINED} or (
        (one.by_order or two.by_order) and kinds <= vague
    ):
        return _earlier(root.first, other.first)
    if kinds == {Kind.PEER_LOST, Kind.TIMEOUT} and _in_order(root.first, other.first):
        return _earlier(root.first, other.first)
    nearer = root.kind < other.kind or other.cause in root.outranks
    return nearer and _not_later(root.first, other.first)


def _in_order(first: Evidence, second: Evidence) -> bool:
    """Whether it can be told which of the two came first."""
    if first.symptom.reported_late or second.symptom.reported_late:
        return False
    one, two = first.line, second.line
    if one.source == two.source:
        return True
    if one.seconds is None or two.seconds is None:
        return False
    return abs(one.seconds - two.seconds) > CLOCK_SLACK_SECONDS


def _earlier(first: Evidence, second: Evidence) -> bool:
    one, two = first.line, second.line
    if one.source == two.source and (one.rank == two.rank or one.seconds == two.seconds):
        return one.number < two.number
    return _order(first) < _order(second)


def _not_later(first: Evidence, second: Evidence) -> bool:
    """Whether the first may have brought about the second."""
    one, two, symptom = first.line, second.line, first.symptom
    same_log = one.source == two.source
    timed = one.seconds is not None and two.seconds is not None
    between = (two.seconds or 0.0) - (one.seconds or 0.0)
    if symptom.reported_late and (same_log or second.symptom.kind >= Kind.KILLED):
        return same_log or between >= -LATE_SECONDS
    weak = symptom.kind == Kind.UNEXPLAINED or symptom.confidence < LEADING_CONFIDENCE
    if weak and same_log and one.rank == two.rank:
        return one.number <= two.number
    if same_log and one.number < two.number:
        return True  # whatever clocks their programs print
    if timed:
        return between >= -(CLOCK_SLACK_SECONDS if two.has_time else UNTIMED_SECONDS)
    return not same_log or one.number <= two.number + ORDER_SLACK_LINES


def _finding(group: _Group, facts: dict[str, str]) -> Finding:
    clearest = group.clearest
    symptom = clearest.symptom
    others = [piece for piece in group.evidence if piece is not clearest]
    elsewhere = {name: value for piece in reversed(others) for name, value in piece.values.items()}
    elsewhere.pop("rank", None)
    values = with_next_values(facts | elsewhere | clearest.values)
    why, do = symptom.texts()
    steps = [step for step in (fill(text, values).strip() for text in do) if step]
    if "error_fix" in values and symptom.id != "explained_by_run":
        steps.insert(0, _("The run itself advises: {fix}").format(fix=values["error_fix"]))
    rank = clearest.values.get("rank")
    return (FindingByPlace if symptom.id.startswith("place_") else Finding)(
        symptom.cause,
        group.confidence,
        [_quote(piece) for piece in [clearest, *others][:EVIDENCE_LINES]],
        mask_secrets(fill(why, values)),
        mask_secrets("\n".join(steps[:STEPS_SHOWN])),
        int(rank) if rank and re.fullmatch(r"\d{1,9}", rank) else None,
    )


def _quote(evidence: Evidence) -> str:
    """A line of evidence; a long one is cut around what its entry matched."""
    text = mask_secrets(evidence.line.text.strip())
    found = evidence.symptom.found_in(text, text.lower())
    if len(text) > EVIDENCE_CHARACTERS:
        middle = (found.start() + found.end()) // 2 if found else 0
        begin = max(0, min(middle - EVIDENCE_CHARACTERS // 2, len(text) - EVIDENCE_CHARACTERS))
        end = begin + EVIDENCE_CHARACTERS
        cut = text[begin:end]
        text = f"{'... ' if begin else ''}{cut}{' ...' if end < len(text) else ''}"
    line = evidence.line
    rank = "" if line.rank is None else f" (rank {line.rank})"
    more = f" (x{evidence.count})" if evidence.count > 1 else ""
    return f"{plain_text(line.source)}:{line.number}{rank}: {text}{more}"
