"""What a run survived is no failure: it trained on, or reported that it was done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from finetune.commands.diagnose.evidence import Evidence, LogEvidence, Result
from finetune.commands.diagnose.knowledge import Kind
from finetune.commands.diagnose.line_kinds import is_of
from finetune.commands.diagnose.log_lines import SURVIVED_STEPS
from finetune.commands.diagnose.log_prefixes import decode, strip_prefixes

# Clocks of nodes and the buffers of their outputs differ by less than this, as a rule.
CLOCK_SLACK_SECONDS = 10.0
# So many logged steps of other processes: they do not go on for that long without one that died.
SURVIVED_STEPS_OF_OTHERS = 10
# What failed is not followed by as many lines and a result.
LINES_AFTER = 3
# What is said of processes that are ended when the training is over.
AFTER_THE_END = (Kind.MACHINE, Kind.KILLED, Kind.UNEXPLAINED, Kind.CASCADE)


def standing_evidence(logs: Sequence[LogEvidence]) -> list[Evidence]:
    """Return the evidence that the run did not survive, in the order of the logs."""
    return [
        piece
        for log in logs
        for number, piece in enumerate(log.evidence)
        if not _survived_here(piece, number, log) and not _survived_elsewhere(piece, log, logs)
    ]


def _survived_here(piece: Evidence, number: int, log: LogEvidence) -> bool:
    """Whether its own log goes on: with steps, of that process if it logs any, or a good end."""
    rank, before, symptom = piece.line.rank, piece.line.steps_before, piece.symptom
    after = {logging: count - before.get(logging, 0) for logging, count in log.steps.items()}
    most = max(after.values(), default=0)
    if symptom.in_training and not any(before.values()):
        return True
    if most >= (SURVIVED_STEPS if after.get(rank, most) > 0 else SURVIVED_STEPS_OF_OTHERS):
        return not (symptom.needs and symptom.lasting)
    if symptom.lasting:
        return False
    later = log.evidence[number + 1 :]
    went_on = most > 0 or number < log.ended
    started = any(e.ends_traceback and e.symptom.kind <= Kind.UNEXPLAINED for e in later)
    if symptom.passing and not piece.ends_traceback and (went_on or started):
        return True
    # an exception that was only printed, and one request's, of a server that went on
    printed = was_only_said(piece) and (went_on or number < log.served)
    of_request = piece.is_unknown or symptom.cause.startswith("dataset_")
    if printed or (piece.in_request and of_request and number < log.served):
        return not _is_the_reason(later)
    # helpers and rests of a run that had said that it was done
    if 0 <= log.trained <= number and log.steps and symptom.kind in AFTER_THE_END:
        left = symptom.by_order or (symptom.cause == "preempted" and log.left)
        return left or number < log.ended or not _is_an_end(piece)
    return number < log.finished or (most > 0 and number < log.ended)


def was_only_said(piece: Evidence) -> bool:
    """Whether it is an unknown exception without traceback, of a line that names no rank."""
    said = piece.is_unknown and piece.line.rank is None and not piece.ends_traceback
    return said and is_of("exception", piece.line.text)


def _is_the_reason(later: Sequence[Evidence]) -> bool:
    """Whether processes ended afterwards for which nothing else gives a reason."""
    failures = [piece for piece in later if not (was_only_said(piece) or piece.quiet)]
    return bool(failures) and all(piece.symptom.kind > Kind.UNEXPLAINED for piece in failures)


def _is_an_end(piece: Evidence) -> bool:
    """Whether it tells of a process that ended, and not only that something complained."""
    by_others = piece.symptom.kind in (Kind.MACHINE, Kind.KILLED)
    return by_others or is_of("exception", piece.line.text)


def _survived_elsewhere(piece: Evidence, own: LogEvidence, logs: Sequence[LogEvidence]) -> bool:
    """Whether another log goes on: with steps after it by time, or with the end of the run."""
    line, kind = piece.line, piece.symptom.kind
    others = [log for log in logs if log is not own]
    tells = line.rank is not None and any(line.rank in log.steps for log in logs)
    later = [
        seconds
        for log in others
        for rank, seconds in log.trained_until.items()
        if not tells or rank == line.rank
    ]
    if line.seconds is not None and line.seconds <= max(later, default=0.0) - CLOCK_SLACK_SECONDS:
        return True
    ends = [log.done_at for log in others if log.done and log.steps and not log.evidence]
    if piece.symptom.lasting or not ends:
        return False
    # who looks on reports what happened to others, too, and what was stopped when the run was done
    slack = CLOCK_SLACK_SECONDS if kind in (Kind.MACHINE, Kind.KILLED, Kind.CASCADE) else 0.0
    timed = [end for end in ends if end is not None]
    if timed and line.seconds is not None:
        return any(line.seconds <= end + slack for end in timed)
    # Without times to compare, of a log that trains nothing: what no rank says and no program of
    # Python ended with is about something else, or was got over.
    told = kind == Kind.MACHINE or own.evidence.index(piece) < own.ended
    raised = is_of("exception", line.text)
    return not own.steps and (told or (line.rank is None and not raised))


def result_of(last: Iterable[tuple[int, bytes]]) -> Result | None:
    """Return the last result among a log's last lines; None without any.

    Prompts of shells are no lines, and one more may follow, if it speaks of no failure.
    """
    lines = [(number, strip_prefixes(decode(raw))[0].strip()) for number, raw in last]
    said = [line for line in lines if not is_of("prompt", line[1])]
    for number, text in reversed(said):
        if is_of("result", text) and not is_of("no_result", text):
            at_end = number >= said[-2:][0][0] and not is_of("no_result", said[-1][1])
            return Result(number, text, at_end)
    return None


def ends_well(log: LogEvidence) -> bool:
    """Whether it goes on after all that was found in it to a result, and trains on if it trains.

    Processes that were only ended, after a result, ended with it.
    """
    result = log.result
    if result is None:
        return False
    if not log.steps and all(
        piece.symptom.kind == Kind.CASCADE and not piece.ends_traceback for piece in log.evidence
    ):
        return True
    last = max((piece.line.number for piece in log.evidence), default=0)
    before = sum(log.evidence[-1].line.steps_before.values()) if log.evidence else 0
    trains_on = not log.steps or sum(log.steps.values()) > before
    return trains_on and result.at_end and result.number - last >= LINES_AFTER
