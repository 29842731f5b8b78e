"""What a run survived is no failure: it trained on, or reported that it was done, in the same log
or in another.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from finetune.commands.diagnose.evidence import Evidence, LogEvidence
from finetune.commands.diagnose.log_kinds import is_failure
from finetune.commands.diagnose.log_prefixes import decode, strip_prefixes
from finetune.commands.diagnose.log_process import was_only_said
from finetune.commands.diagnose.log_reading import SURVIVED_STEPS, LogLine, Moment
from finetune.commands.diagnose.log_words import EXCEPTION, NO_RESULT, PROMPT, RESULT
from finetune.commands.diagnose.knowledge import Kind

# Clocks of nodes and the buffers of their outputs differ by less than this, as a rule.
CLOCK_SLACK_SECONDS = 10.0
# So many logged steps of other processes: they do not go on for that long without one that died.
SURVIVED_STEPS_OF_OTHERS = 10
# What failed is not followed by as many lines and a result.
LINES_AFTER = 3
AFTER_THE_END = (Kind.MACHINE, Kind.KILLED, Kind.UNEXPLAINED, Kind.CASCADE)


def standing_evidence(logs: Sequence[LogEvidence]) -> list[Evidence]:
    """Evidence that the run did not survive, in the order of the logs."""
    left = [
        (log, [e for number, e in enumerate(log.evidence) if not _survived_here(e, number, log)])
        for log in logs
    ]
    ends = [log.done for log, of_log in left if log.done and log.steps and not of_log]
    return [
        e for log, of_log in left for e in of_log if not _survived_elsewhere(e, log, logs, ends)
    ]


def result_of(last: Iterable[tuple[int, bytes]]) -> tuple[int, str, bool] | None:
    """The last result among a log's last lines, the number of its line, and whether the log ends
    with it; else None.

    Prompts of shells are no lines, and one more may follow, if it speaks of no failure.
    """
    lines = [(number, strip_prefixes(decode(raw))[0].strip()) for number, raw in last]
    said = [line for line in lines if not PROMPT.match(line[1])]
    for number, text in reversed(said):
        if RESULT.search(text) and not NO_RESULT.search(text):
            return number, text, number >= said[-2:][0][0] and not NO_RESULT.search(said[-1][1])
    return None


def ends_well(log: LogEvidence) -> bool:
    """Whether it goes on after all that was found in it, to a result; and no training in it ended
    there.

    Processes that were only ended, after a result, ended with it.
    """
    if log.result is None:
        return False
    if not log.steps and all(
        e.symptom.kind == Kind.CASCADE and not e.ends_traceback for e in log.evidence
    ):
        return True
    last = max((piece.line.number for piece in log.evidence), default=0)
    before = sum(log.evidence[-1].line.steps_before.values()) if log.evidence else 0
    trains_on = not log.steps or sum(log.steps.values()) > before
    return trains_on and log.result[2] and log.result[0] - last >= LINES_AFTER


def _survived_here(evidence: Evidence, number: int, log: LogEvidence) -> bool:
    """Whether its own log goes on: with steps, of that process too if it logs any, or with the end
    of the run.
    """
    rank, before = evidence.line.rank, evidence.line.steps_before
    after = {logging: count - before.get(logging, 0) for logging, count in log.steps.items()}
    most = max(after.values(), default=0)
    if evidence.symptom.in_training and not any(before.values()):
        return True
    if evidence.symptom.needs and evidence.symptom.lasting:
        return False
    if most >= (SURVIVED_STEPS if after.get(rank, most) > 0 else SURVIVED_STEPS_OF_OTHERS):
        return True
    later = log.evidence[number + 1 :]
    went_on = most > 0 or number < log.ended or _has_traceback(later)
    if evidence.symptom.passing and not evidence.ends_traceback and went_on:
        return True
    if evidence.symptom.lasting:
        return False
    said = was_only_said(evidence) and (
        most > 0 or number < max(log.ended, log.trained, log.served)
    )
    if (said or (_is_of_request(evidence) and number < log.served)) and not _is_the_reason(later):
        return True
    # What is stopped or complains when the training is over, and whoever ran it says that all went
    # well.
    after_its_end = 0 <= log.trained <= number and log.steps
    if (
        after_its_end
        and evidence.symptom.kind in AFTER_THE_END
        and (number < log.ended or not _is_an_end(evidence))
    ):
        return True
    if after_its_end and evidence.symptom.by_order:  # someone ended what was left of it
        return True
    # of a job whose program had ended well
    if 0 <= log.left <= number and evidence.symptom.cause == "preempted":
        return True
    if (
        log.said_well == len(log.evidence)
        and not log.steps
        and not any(_fails(piece) for piece in log.evidence)
    ):
        return True  # of a program that trains nothing, and said in the end that all went well
    return number < log.finished or (most > 0 and number < log.ended)


def _fails(evidence: Evidence) -> bool:
    """Whether it says that a program ended, or that the machine or the scheduler did something to
    it.
    """
    kind, text = evidence.symptom.kind, evidence.line.text
    return (
        evidence.ends_traceback
        or kind in AFTER_THE_END
        or is_failure(text)
        or EXCEPTION.match(text) is not None
    )


def _has_traceback(later: Sequence[Evidence]) -> bool:
    """Whether a program was started, and failed by itself."""
    return any(e.ends_traceback and e.symptom.kind <= Kind.UNEXPLAINED for e in later)


def _is_of_request(evidence: Evidence) -> bool:
    """Whether it may be one request's: nothing that ends a server, and no rule knows it but as of
    records.
    """
    known = evidence.symptom.patterns and not evidence.symptom.cause.startswith("dataset_")
    return evidence.in_request and not known and evidence.line.rank is None


def _is_the_reason(later: Sequence[Evidence]) -> bool:
    """Whether processes ended afterwards for which nothing else gives a reason."""
    failures = [e for e in later if not (was_only_said(e) or e.quiet)]
    return bool(failures) and all(e.symptom.kind > Kind.UNEXPLAINED for e in failures)


def _is_an_end(evidence: Evidence) -> bool:
    """Whether it tells of a process that ended, and not only that something complained."""
    return (
        evidence.symptom.kind in (Kind.MACHINE, Kind.KILLED)
        or EXCEPTION.match(evidence.line.text) is not None
    )


def _survived_elsewhere(
    evidence: Evidence, own: LogEvidence, logs: Sequence[LogEvidence], ends: Sequence[Moment]
) -> bool:
    """Whether another log goes on: by time with steps, or by time or its role with the end of the
    run.

    Args:
        ends: when logs of training ended well; none of them is the evidence's own.
    """
    line, kind = evidence.line, evidence.symptom.kind
    tells = line.rank is not None and any(line.rank in log.steps for log in logs)
    others = [log.trained_until.items() for log in logs if log is not own]
    later = [
        moment for moments in others for rank, moment in moments if not tells or rank == line.rank
    ]
    if any(_is_before(line, moment, -CLOCK_SLACK_SECONDS) for moment in later):
        return True
    if evidence.symptom.lasting or not ends:
        return False
    timed = [done for done in ends if line.seconds is not None and done.seconds is not None]
    # who looks on reports what happened to others, too, and what was stopped because the run was
    # done
    if timed:
        slack = CLOCK_SLACK_SECONDS if kind in (Kind.MACHINE, Kind.KILLED, Kind.CASCADE) else 0.0
        return any(_is_before(line, done, slack) for done in timed)
    # Without times to compare, of a log that trains nothing: what no rank says and no program of
    # Python ended with is about something else, or got over.
    told = kind == Kind.MACHINE or own.evidence.index(evidence) < own.ended
    return not own.steps and (told or (line.rank is None and not EXCEPTION.match(line.text)))


def _is_before(line: LogLine, moment: Moment, slack: float) -> bool:
    if line.seconds is None or moment.seconds is None:
        return False
    latest = line.seconds if slack > 0 else line.bounds[1]
    if not (line.year_known and moment.year_known):
        latest = nearest_year(latest, moment.seconds)
    return latest <= moment.seconds + slack


def nearest_year(seconds: float, reference: float) -> float:
    """The time on the same day and hour of the year in which it is nearest to another."""
    year, *rest = time.localtime(reference)[:1] + time.localtime(seconds)[1:8]
    made = [time.mktime((near, *rest, -1)) + seconds % 1 for near in (year - 1, year, year + 1)]  # type: ignore[arg-type]
    return min(made, key=lambda when: abs(when - reference))
