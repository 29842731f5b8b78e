"""Which lines of a log speak of a failure, and of which cause: entries against lines."""

from __future__ import annotations

import re
from collections import defaultdict

from finetune.commands.diagnose.evidence import Evidence, LogEvidence
from finetune.commands.diagnose.knowledge import Kind, Symptom, knowledge
from finetune.commands.diagnose.line_kinds import (
    form,
    is_failure,
    is_of,
    line_kind,
    match_of,
    matching_symptom,
    passing_frame,
)
from finetune.commands.diagnose.log_facts import facts_in, facts_of
from finetune.commands.diagnose.log_lines import SURVIVED_STEPS, LineKind, LogFile, LogLine
from finetune.commands.diagnose.log_process import (
    TRACEBACK_LINES,
    Process,
    continues,
    without_quotes,
)
from finetune.commands.diagnose.places import readable, symptom_of_place
from finetune.commands.diagnose.survival import result_of, was_only_said

# Of one symptom on one rank in one attempt the first lines are kept and the others counted.
KEPT_LINES = 3
# Lines between that an engine or Slurm ends all processes and that the shell says so.
QUIT_LINES = 50
OWN_WHERE, OWN_FIX = "  where: ", "  fix:   "


def scan_log(file: LogFile) -> LogEvidence:
    """Return all that a log tells. Raises OSError if it cannot be read."""
    scan = _Scan(file)
    for line in file.lines(scan.kind_of):
        scan.take(line)
    found = scan.found
    found.lines, found.steps, found.trained_until = file.count, file.steps, file.trained_until()
    found.result = result_of(file.last)
    told = scan.error or scan.last_frame  # a traceback may be pasted without its end
    if told and not found.evidence and not _went_on(found, told):
        entry = knowledge().named["unexplained"]
        found.evidence.append(Evidence(entry, told, {"line": told.text.strip()}, scan.attempt))
    if (broken_off := file.broken_off()) and not found.done:
        entry = knowledge().named["broken_off"]
        found.evidence.append(Evidence(entry, broken_off, {}, scan.attempt))
    if scan.is_foreign and not found.of_a_run:
        found.evidence.clear()
    return found


def _went_on(found: LogEvidence, line: LogLine) -> bool:
    """Whether a log has a step after a line, or a good end anywhere."""
    after = sum(found.steps.values()) > sum(line.steps_before.values())
    said = max(found.finished, found.trained, found.ended, found.served) >= 0
    return after or said or found.result is not None


class _Scan:
    """One log against the entries, line by line."""

    def __init__(self, file: LogFile) -> None:
        self.found = LogEvidence()
        self.is_foreign = False
        self.error: LogLine | None = None  # the last line that speaks of one
        self.last_frame: LogLine | None = None
        self._facts = facts_of(file.head)
        self._processes: dict[tuple[str, int | None], Process] = defaultdict(Process)
        self._kept: dict[tuple[object, ...], list[Evidence]] = defaultdict(list)
        self._killed_by_launcher: set[str] = set()
        self._quit_all: LogLine | None = None  # it was said that all are ended because one failed
        self.attempt = 0
        self._summary_rank: int | None = None
        self._in_diagnosis = False
        self._tests_from: int | None = None  # the evidence before tests began

    def kind_of(self, text: str) -> LineKind:
        """Return whether to take a line; notes whether it is of a run."""
        kind = line_kind(text, self._facts)
        foreign = is_of("foreign", text)
        self.is_foreign |= foreign
        self.found.of_a_run |= kind == "step" or (not foreign and is_of("run", text))
        return kind

    def take(self, line: LogLine) -> None:
        """Take what a line tells."""
        line = without_quotes(line)
        text, process = line.text, self._process_of(line)
        if is_of("other_program", text) or process.quotes_data(line):
            return
        self._note_told(line)
        self._drop_what_ended(line)
        quoted = self._in_diagnosis and is_of("diagnosis_line", text)
        self._in_diagnosis = quoted or is_of("diagnosis_title", text)
        if self._in_diagnosis:
            return
        if is_of("tests_passed", text):
            if self._tests_from is not None:
                del self.found.evidence[self._tests_from :]
            self._tests_from = self.error = self.last_frame = None
            return
        if self._tests_from is None and is_of("tests_begin", text):
            self._tests_from = len(self.found.evidence)
        finished = self._note_end(line)
        if is_of("restart", text) and not self._raises(text):
            self.found.ended = len(self.found.evidence)
            self.attempt += 1
            self._processes.clear()
            self._quit_all = None
        elif finished:
            return
        elif match := match_of("summary_rank", text):
            self._summary_rank = int(match["rank"])
        elif text.startswith((OWN_WHERE, OWN_FIX)):
            self._add_error_detail(process, text)
        elif is_of("chained", text):
            process.chained = process.last if process.last and process.last.is_unknown else None
        elif is_of("ignored", text):
            process.ignored = True
        elif is_of("frame", text):
            process.relevant_part(line)
            self.last_frame = line
        elif part := process.relevant_part(line):
            if is_of("error_word", part) and not any(
                is_of(kind, part) for kind in ("quiet", "service", "tests_begin")
            ):
                self.error = line
            self._match(process, line, part)

    def _raises(self, text: str) -> bool:
        return is_of("exception", text) or matching_symptom(text, self._facts) is not None

    def _note_told(self, line: LogLine) -> None:
        """Note what the line tells that is no evidence by itself."""
        text = line.text
        for name, value in facts_in(text).items():
            self.found.facts.setdefault(name, value)
        if is_of("served", text):
            self.found.served = len(self.found.evidence)
        if forced := match_of("forced_kill", text):
            self._killed_by_launcher.add(forced["pid"])
        if is_of("quit_all", text) or is_of("task_failed", text):
            self._quit_all = line

    def _drop_what_ended(self, line: LogLine) -> None:
        """Drop evidence of which the line says that it was got over."""
        for piece in [piece for piece in self.found.evidence if piece.symptom.until]:
            same = piece.line.rank == line.rank and piece.line.node == line.node
            if same and re.search(piece.symptom.until, line.text):
                self.found.evidence.remove(piece)

    def _note_end(self, line: LogLine) -> bool:
        """Note that something ended well. Returns whether the run reported that it is done."""
        text, so_far = line.text, len(self.found.evidence)
        finished, said = is_of("finished", text), match_of("trained", text)
        if finished or (said and not form("denied").search(text, 0, said.start())):
            self.found.done, self.found.done_at = True, line.seconds
            self.found.trained = self.found.ended = so_far
        if finished:
            self.found.finished = so_far
        if is_of("ended_well", text):
            self.found.ended = so_far
            self.found.left |= self.found.trained >= 0
        return finished

    def _process_of(self, line: LogLine) -> Process:
        """Return its process; a new one if training has gone on since its last line."""
        process = self._processes[line.node, line.rank]
        if line.steps_since(process.steps) >= SURVIVED_STEPS:
            process = self._processes[line.node, line.rank] = Process()
        process.steps = line.steps_before
        return process

    def _add_error_detail(self, process: Process, text: str) -> None:
        """Take where an error of this package was, or its fix, from the lines after it."""
        last = process.last
        if last is None:
            return
        if text.startswith(OWN_WHERE):
            last.values.setdefault("error_where", text.removeprefix(OWN_WHERE))
            return
        last.values.setdefault("error_fix", text.removeprefix(OWN_FIX))
        own = match_of("own_error", last.line.text)
        if own and last.symptom.id in ("unexplained", "ended_badly"):
            last.symptom = knowledge().named["explained_by_run"]
            last.values["error"] = own["error"]

    def _match(self, process: Process, line: LogLine, text: str) -> None:
        within = line.number - process.frame_at < TRACEBACK_LINES
        frames = process.places() if within else []
        matched = matching_symptom(text, self._facts, frames)
        if matched is None and text[:1].isspace() and not is_failure(text):
            return  # between the frames of a traceback and what it ends with
        process.frame_at = -TRACEBACK_LINES
        ends = within and is_of("ends_traceback", text)
        raised = process.code.startswith(("raise ", "assert "))
        quiet = is_of("quiet", text) and not (ends and raised)  # a warning that was raised
        exception = is_of("exception", text) or ends
        service = is_of("service", text)
        if (matched is None or matched[0].kind != Kind.MACHINE) and (
            (quiet and is_of("handled", text)) or (matched and service)
        ):
            return
        if matched is not None and (not quiet or matched[0].in_warnings):
            symptom, match = matched
            # of a thread or an object of a process that ends
            if process.ignored and symptom.kind >= Kind.PEER_LOST:
                process.ignored = False
                return
            # A trailing _ lets several alternatives of one pattern name the same value.
            given = {n.rstrip("_"): v for n, v in match.groupdict().items() if v is not None}
            values = {name: value.rstrip(". ") for name, value in given.items()}
            if symptom.frames and (frame := passing_frame(symptom, frames)):
                values["frame"] = readable(frame)
            if process.chained in self.found.evidence:
                self.found.evidence.remove(process.chained)
            if symptom.kind == Kind.KILLED and self._was_forced(line, values.get("pid")):
                symptom, values = knowledge().named["ended_badly"], {}
        elif not quiet and not service and (exception or is_failure(text)):
            if exception and process.ignored:
                process.ignored = False
                return
            symptom, values = self._unknown(process, line, text, process.frames if within else [])
        else:
            return
        process.ignored = False
        made = Evidence(symptom, line, values, self.attempt, quiet=quiet)
        made.ends_traceback = within and exception
        made.in_request = made.ends_traceback and self.found.served >= 0
        # else it is a warning, what a library printed, or may pass
        process.failed |= not (made.is_remark or symptom.needs or symptom.passing)
        self._keep(process, made)

    def _unknown(
        self, process: Process, line: LogLine, text: str, frames: list[str]
    ) -> tuple[Symptom, dict[str, str]]:
        """Return the entry for a failure that no entry knows by its words."""
        exception = bool(frames) or is_of("exception", text)
        consequence = is_of("cascade", text)
        last = process.last if process.last and process.last.is_unknown else None
        again = last is not None and continues(line, last.line)
        if last and frames and not consequence and was_only_said(last):
            again = True  # what was printed before did not end the process
            self.found.evidence = [piece for piece in self.found.evidence if piece is not last]
        if (
            (process.failed and not again)
            or consequence
            or not (exception or is_of("own_error", text))
        ):
            return knowledge().named["ended_badly"], {}
        return symptom_of_place(frames, process.code, text)

    def _was_forced(self, line: LogLine, pid: str | None) -> bool:
        """Whether the launcher, an engine or the scheduler said that it ends this process."""
        if pid is not None:
            return pid in self._killed_by_launcher
        quit_all = self._quit_all
        if quit_all is None or line.number - quit_all.number > QUIT_LINES:
            return False
        return line.steps_since(quit_all.steps_before) == 0

    def _keep(self, process: Process, evidence: Evidence) -> None:
        symptom, line = evidence.symptom, evidence.line
        rank = line.rank if self._summary_rank is None else self._summary_rank
        evidence.values.setdefault("line", line.text.strip())
        if rank is not None:
            evidence.values.setdefault("rank", str(rank))
        last = process.last
        # An error that was only the beginning of this line, of processes that share the log.
        if last in self.found.evidence and last.is_unknown and continues(line, last.line):
            self.found.evidence.remove(last)
        differs = evidence.values.get(symptom.differs)
        kept = self._kept[id(symptom), line.node, line.rank, self.attempt, differs]
        if len(kept) < KEPT_LINES:
            kept.append(evidence)
            self.found.evidence.append(evidence)
            process.last = evidence
            return
        kept[-1].count += 1
        # what was got over before has come back
        if line.steps_before != kept[-1].line.steps_before:
            kept[-1].line = line
            self.found.evidence.remove(kept[-1])
            self.found.evidence.append(kept[-1])
