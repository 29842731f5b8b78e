"""From evidence to findings: the root of a failure first, its consequences named under it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from finetune.commands.diagnose.evidence import Evidence, LogEvidence
from finetune.commands.diagnose.log_facts import with_next_values
from finetune.commands.diagnose.log_words import PREPARING
from finetune.commands.diagnose.survival import (
    CLOCK_SLACK_SECONDS,
    ends_well,
    nearest_year,
    standing_evidence,
)
from finetune.commands.diagnose.knowledge import Kind, Symptom, fill, knowledge
from finetune.plain_text import mask_secrets, plain_text
from finetune.runtime.language import _

# Lines of other processes between those of one error.
SAME_ERROR_LINES = 100
# A log without times: lines of several processes that belong together are not farther apart.
ORDER_SLACK_LINES = 400
# Who watches from outside reports that much later, at most: a scheduler that a node failed, a pod
# that it was killed.
LATE_SECONDS = 600.0
# What the machine said longer ago than this did not bring about what failed now.
STALE_SECONDS = 2 * 3600.0
EVIDENCE_LINES = 6
EVIDENCE_CHARACTERS = 400
WEAK_CONFIDENCE = 0.5
# What is reduced or broadcast has as many numbers on every rank.
_REDUCED = re.compile(r"OpType=(?:ALLREDUCE|BROADCAST|REDUCE), NumelIn=(\d+)")
# Below it a symptom explains what its own process reported later, not what that reported before.
LEADING_CONFIDENCE = 0.65


@dataclass
class Finding:
    """A cause of a failure.

    Attributes:
        cause: its id, of the list in docs/reference/diagnosis.md.
        confidence: 0 to 1.
        evidence: `LOG:LINE: text`, secrets masked.
        rank: the rank that shows it first, None where no line tells.
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
    """Told by where an exception was raised, not by what it says: whether starting again cures it
    is not known.
    """


class _Group:
    """All evidence of one cause: `first` is the earliest of its nearest kind, `clearest` the surest
    of that kind.
    """

    def __init__(self, evidence: Sequence[Evidence]) -> None:
        self.kind = min(e.symptom.kind for e in evidence)
        self.evidence = sorted(evidence, key=_order)
        nearest = [e for e in self.evidence if e.symptom.kind == self.kind]
        self.first = nearest[0]
        self.cause = self.first.symptom.cause
        self.clearest = max(nearest, key=lambda e: e.symptom.confidence)  # the earliest of those
        self.confidence = self.clearest.symptom.confidence


def rank_findings(
    logs: Sequence[LogEvidence], facts: dict[str, str] | None = None
) -> tuple[list[Finding], Finding | None]:
    """The causes that all logs together show, best first; without any who stopped the run, or what
    it got over.

    Args:
        logs: in the order given; their times are compared as they stand.
        facts: settings of the run that are known from elsewhere.
    """
    known = {name: value for log in reversed(logs) for name, value in log.facts.items()} | (
        facts or {}
    )
    standing = standing_evidence(logs)
    _give_years(standing)
    if any(log.ended >= 0 for log in logs) and all(
        e.quiet and e.symptom.kind == Kind.CASCADE for e in standing
    ):
        return [], None  # processes that end one after the other warn of it
    standing = _without_bare_codes(standing)
    _say_who_prepared(standing, logs)
    _say_unequal_batches(standing, logs)
    last = [
        e
        for e in standing
        if e.attempt == max(o.attempt for o in standing if o.line.source == e.line.source)
    ]
    groups = _groups(last)
    if groups and all(group.kind > Kind.UNEXPLAINED for group in groups):
        # the last attempt only waited for something that went wrong in an earlier one
        groups = _groups(standing)
    kept = [group for group in groups if not any(_explains(other, group) for other in groups)]
    if any(group.kind < Kind.CASCADE for group in kept):
        kept = [group for group in kept if group.first.symptom.id != "retried"]
    stopped = [group for group in kept if group.cause == "interrupted"]  # no failure
    kept = [group for group in kept if group not in stopped]
    # that a process ended badly is then no news
    if any(group.cause != "unknown" for group in kept):
        kept = [group for group in kept if group.first.symptom.id != "ended_badly"]
    kept.sort(key=lambda group: (group.confidence < WEAK_CONFIDENCE, _order(group.first)))
    findings = [_finding(group, known) for group in kept or stopped]
    if findings:
        known_roots = {finding.cause for finding in findings} | {
            "unknown",
            "interrupted",
        }
        findings[0].consequences = sorted({group.cause for group in groups} - known_roots)
    if not kept or not findings:
        return [], findings[0] if findings else None
    speaking = [log for log in logs if log.evidence]
    if all(ends_well(log) for log in speaking):
        return [], _got_over(findings[0], speaking[-1].result)
    return findings, None


def _got_over(finding: Finding, result: tuple[int, str, bool] | None) -> Finding:
    """What a log speaks of that goes on to a result: no failure, but worth a word."""
    assert result is not None
    explanation = _(
        "The log goes on to a result (line {line}: {text}), so that what it speaks of before was"
        " got over, or is only quoted. Otherwise it would mean: {explanation}"
    ).format(
        line=result[0],
        text=mask_secrets(plain_text(result[1][:80])),
        explanation=finding.explanation,
    )
    fix = _("If something did fail there, give that part of the log alone.")
    return replace(finding, confidence=0.0, explanation=explanation, fix=fix, consequences=[])


def _give_years(evidence: Sequence[Evidence]) -> None:
    """Lines of logs that tell no year are of the year in which they are nearest to the others."""
    dated = [e.line.seconds for e in evidence if e.line.year_known and e.line.seconds is not None]
    for piece in evidence if dated else ():
        line = piece.line
        if line.seconds is not None and not line.year_known:
            moved = nearest_year(line.seconds, dated[0]) - line.seconds
            earliest, latest = line.bounds
            piece.line = replace(
                line, seconds=line.seconds + moved, bounds=(earliest + moved, latest + moved)
            )


def _without_bare_codes(evidence: Sequence[Evidence]) -> list[Evidence]:
    """Without the lines that only tell that a call failed, where their process says near them
    why.
    """
    by_process: dict[tuple[str, int | None, str], list[Evidence]] = {}
    for piece in evidence:
        if piece.symptom.kind != Kind.CASCADE and not piece.code_only and not piece.symptom.needs:
            by_process.setdefault((piece.line.source, piece.line.rank, piece.line.node), []).append(
                piece
            )

    def is_said_better(piece: Evidence) -> bool:
        line, sure = piece.line, piece.symptom.confidence
        return piece.code_only and any(
            other.symptom.confidence >= sure
            and abs(other.line.number - line.number) <= SAME_ERROR_LINES
            for other in by_process.get((line.source, line.rank, line.node), ())
        )

    return [piece for piece in evidence if not is_said_better(piece)]


def _say_who_prepared(evidence: Sequence[Evidence], logs: Sequence[LogEvidence]) -> None:
    """Of time-outs of collectives while one rank still made data ready, and no step was logged
    since: say so.
    """
    lines = [
        log.preparing for log in logs if log.preparing and log.preparing.steps_before == log.steps
    ]
    progress = PREPARING.search(lines[-1].text) if lines else None
    if progress is None:
        return
    values = {"progress": f"{progress['work'].strip()}: {progress['percent']}%"}
    if lines[-1].rank is not None:
        values["preparing_rank"] = str(lines[-1].rank)
    _say_of_time_outs(evidence, knowledge().named["waited_for_data"], values)


def _say_unequal_batches(evidence: Sequence[Evidence], logs: Sequence[LogEvidence]) -> None:
    """Of time-outs of collectives where ranks said that they have unequal numbers of batches: say
    so.
    """
    batches = {rank: count for log in logs for rank, count in log.batches.items()}
    if len(set(batches.values())) < 2:
        return
    few, many = (
        min(batches, key=lambda rank: batches[rank]),
        max(batches, key=lambda rank: batches[rank]),
    )
    told = _("rank {few}: {fewest}, rank {many}: {most}").format(
        few=few, fewest=batches[few], many=many, most=batches[many]
    )
    _say_of_time_outs(evidence, knowledge().named["unequal_batches"], {"batches": told})


def _say_of_time_outs(
    evidence: Sequence[Evidence], symptom: Symptom, values: dict[str, str]
) -> None:
    """Make this the reason of the time-outs of its cause."""
    for piece in evidence:
        if piece.symptom.cause == symptom.cause and piece.symptom.kind == Kind.TIMEOUT:
            piece.symptom = symptom
            piece.values |= values


def _groups(evidence: Sequence[Evidence]) -> list[_Group]:
    counts, values = Counter[int](), defaultdict[int, set[str]](set)
    for piece in evidence:
        counts[id(piece.symptom)] += piece.count
        values[id(piece.symptom)].add(piece.values.get(piece.symptom.differs, "").lower())
    reasons = [piece for piece in evidence if not piece.symptom.needs]
    present = {piece.symptom.cause for piece in reasons} | {
        piece.values.get("reason", "") for piece in reasons
    }
    by_cause: dict[str, list[Evidence]] = {}
    for piece in evidence:
        symptom, number = piece.symptom, id(piece.symptom)
        if symptom.needs and not present.intersection(symptom.needs):
            continue
        if counts[number] >= symptom.at_least and (not symptom.differs or len(values[number]) > 1):
            by_cause.setdefault(symptom.cause, []).append(piece)
    return [_Group(pieces) for pieces in by_cause.values()]


def _order(evidence: Evidence) -> tuple[float, int]:
    seconds = evidence.line.seconds
    return (float("inf") if seconds is None else seconds), evidence.line.number


def _explains(root: _Group, other: _Group) -> bool:
    if root is other or root.cause in other.first.symptom.outranks:
        return False
    by_order = root.first.symptom.by_order or other.first.symptom.by_order
    if {root.kind, other.kind} == {Kind.VAGUE, Kind.UNEXPLAINED} or (
        by_order and {root.kind, other.kind} <= {Kind.KILLED, Kind.VAGUE, Kind.UNEXPLAINED}
    ):
        return _earlier(root.first, other.first)
    if {root.kind, other.kind} == {Kind.PEER_LOST, Kind.TIMEOUT} and _in_order(
        root.first, other.first
    ):
        return _earlier(root.first, other.first)
    nearer = root.kind < other.kind or other.cause in root.first.symptom.outranks
    return nearer and _not_later(root.first, other.first)


def _in_order(first: Evidence, second: Evidence) -> bool:
    """Whether it can be told which of the two came first."""
    if first.symptom.reported_late or second.symptom.reported_late:
        return False
    one, two = first.line, second.line
    if one.source == two.source:
        return True
    return (
        one.seconds is not None
        and two.seconds is not None
        and abs(one.seconds - two.seconds) > CLOCK_SLACK_SECONDS
    )


def _earlier(first: Evidence, second: Evidence) -> bool:
    one, two = first.line, second.line
    if one.source == two.source and (one.rank == two.rank or one.seconds == two.seconds):
        return one.number < two.number
    return _order(first) < _order(second)


def _not_later(first: Evidence, second: Evidence) -> bool:
    one, two = first.line, second.line
    timed = one.seconds is not None and two.seconds is not None
    between = two.bounds[1] - one.bounds[0] if timed else 0.0  # at most
    if (
        first.symptom.kind == Kind.MACHINE
        and (two.seconds or 0.0) - (one.seconds or 0.0) > STALE_SECONDS
        and timed
    ):
        return False
    if first.symptom.reported_late and (
        one.source == two.source or second.symptom.kind >= Kind.KILLED
    ):
        return one.source == two.source or between >= -LATE_SECONDS
    weak = first.symptom.kind == Kind.UNEXPLAINED or first.symptom.confidence < LEADING_CONFIDENCE
    if weak and one.source == two.source and one.rank == two.rank:
        return one.number <= two.number
    if one.source == two.source and one.number < two.number:
        return True  # whatever clocks their programs print
    if timed:
        return between >= -CLOCK_SLACK_SECONDS
    return one.source != two.source or one.number <= two.number + ORDER_SLACK_LINES


def _finding(group: _Group, facts: dict[str, str]) -> Finding:
    clearest = group.clearest
    symptom, others = clearest.symptom, [e for e in group.evidence if e is not clearest]
    own = {"rank", "holder"} if "device" in clearest.values else {"rank"}
    elsewhere = {
        name: value for e in reversed(others) for name, value in e.values.items() if name not in own
    }
    values = with_next_values(
        facts | elsewhere | clearest.values | _differing_calls(group.evidence)
    )
    why, do = symptom.texts()
    explanation = fill(why, values)
    fix = " ".join(filter(None, (fill(step, values) for step in do)))
    if "error_fix" in values and symptom.id != "explained_by_run":
        fix += " " + _("The run itself advises: {fix}").format(fix=values["error_fix"])
    rank = clearest.values.get("rank")
    return (FindingByPlace if symptom.id.startswith("place_") else Finding)(
        symptom.cause,
        group.confidence,
        [_quote(e) for e in [clearest, *others][:EVIDENCE_LINES]],
        mask_secrets(explanation),
        mask_secrets(fix),
        None if rank is None else int(rank),
    )


def _differing_calls(evidence: Sequence[Evidence]) -> dict[str, str]:
    """The operations, with sizes, that ranks waited in under one sequence number, where they are
    not the same.
    """
    calls: dict[str, set[str]] = {}
    for piece in evidence:
        if "operation" in piece.values and "PG ID" not in piece.line.text:
            numbers = _REDUCED.search(piece.line.text)
            size = f" {int(numbers[1]):,}" if numbers else ""
            calls.setdefault(piece.values.get("sequence", ""), set()).add(
                piece.values["operation"] + size
            )
    return next(
        ({"calls": ", ".join(sorted(names))} for names in calls.values() if len(names) > 1), {}
    )


def _quote(evidence: Evidence) -> str:
    text = mask_secrets(evidence.line.text.strip())
    if len(text) > EVIDENCE_CHARACTERS:
        text = text[: EVIDENCE_CHARACTERS * 3 // 4] + " ... " + text[-EVIDENCE_CHARACTERS // 4 :]
    rank = "" if evidence.line.rank is None else f" (rank {evidence.line.rank})"
    more = f" (x{evidence.count})" if evidence.count > 1 else ""
    return f"{plain_text(str(evidence.line.source))}:{evidence.line.number}{rank}: {text}{more}"
