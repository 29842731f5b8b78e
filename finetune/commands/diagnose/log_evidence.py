"""Which lines of a log speak of a failure, and of which cause: rules against lines, with what
surrounds them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from finetune.commands.diagnose.evidence import Evidence, LogEvidence
from finetune.commands.diagnose.log_facts import facts_in, holder_in, renumbers_devices
from finetune.commands.diagnose.log_kinds import is_failure, line_kind, matching_symptom
from finetune.commands.diagnose.log_process import (
    TRACEBACK_LINES,
    Process,
    add_error_detail,
    continues,
    is_data,
    record_frame,
    relevant_part,
    sizes_of_sample,
    through_server,
    told_by_traceback,
    was_only_said,
    without_quotes,
)
from finetune.commands.diagnose.log_reading import (
    SURVIVED_STEPS,
    LineKind,
    LogFile,
    LogLine,
    Moment,
)
from finetune.commands.diagnose.log_words import (
    BATCHES,
    CASCADE_EXCEPTIONS,
    CHAINED,
    DENIED,
    DIAGNOSIS_LINE,
    DIAGNOSIS_TITLE,
    ENDED_WELL,
    ENDS_TRACEBACK,
    EXCEPTION,
    FINISHED,
    FORCED_KILL,
    FOREIGN,
    HANDLED,
    IGNORED,
    OTHER_PROGRAM,
    OWN_ERROR,
    OWN_FIX,
    OWN_WHERE,
    PREPARING,
    QUIET_LEVEL,
    QUIT_ALL,
    RECORD_ERROR,
    RESTART,
    RUN,
    SERVED,
    SERVICE,
    SUMMARY_RANK,
    TASK_FAILED,
    TESTS_BEGIN,
    TESTS_ENDED,
    TESTS_PASSED,
    TESTS_RUN,
    TOO_LONG,
    TRAINED,
)
from finetune.commands.diagnose.survival import result_of
from finetune.commands.diagnose.knowledge import Kind, Symptom, knowledge
from finetune.commands.diagnose.places import symptom_of_place

# Of one symptom on one rank in one attempt the first lines are kept and the others counted.
KEPT_LINES = 3
# People paste the lines that they take for the cause: such a log need not look like a run's.
EXCERPT_LINES = 20
# Lines between that an engine or Slurm ends all processes and that the shell says so.
QUIT_LINES = 50

def _is_unknown(symptom: Symptom) -> bool:
    """Whether no entry knows it by its words."""
    return symptom.id == "unexplained" or symptom.id.startswith("place_")


def scan_log(file: LogFile) -> LogEvidence:
    """All that a log tells. Raises OSError where it cannot be read."""
    scan = _Scan(file.facts())
    for line in file.lines(scan.kind_of):
        scan.take(line)
    scan.found.steps, scan.found.trained_until = file.steps, file.trained_until()
    if file.broken_off is not None and scan.found.done is None:
        scan.found.evidence.append(Evidence(knowledge().named["broken_off"], file.broken_off, {}, scan.attempt))
    scan.found.result = result_of(file.last)
    scan.name_holders()
    if not scan.of_a_run and not scan.is_excerpt:
        scan.found.evidence.clear()
    return scan.found


@dataclass
class _BeforeTests:
    """What was known where tests began: what they print counts only where one of them failed."""

    found: LogEvidence
    killed_by_launcher: set[str]
    attempt: int
    summary_rank: int | None
    steps: Mapping[int | None, int]


class _Scan:
    """One log against the rules, line by line."""

    def __init__(self, facts: frozenset[str]) -> None:
        self.found = LogEvidence()
        self._facts = facts
        self.of_a_run = False
        self._lines = 0
        self._foreign = False
        self._processes: dict[tuple[str, int | None], Process] = defaultdict(Process)
        self._kept: dict[tuple[object, ...], list[Evidence]] = defaultdict(list)
        self._killed_by_launcher: set[str] = set()
        # where it was said that all are ended because one failed
        self._quit_all: LogLine | None = None
        self.attempt = 0
        self._summary_rank: int | None = None
        self._in_diagnosis = False
        self._before_tests: _BeforeTests | None = None
        self._holders: dict[tuple[str, str], str] = {}  # of a device's memory, by node and device
        self._renumbered = False
        # tokens and the model's maximum, as tokenizers warned of them
        self._too_long: list[set[str]] = []

    @property
    def is_excerpt(self) -> bool:
        """Whether these are a few lines that somebody has copied, and no other program's."""
        return self._lines <= EXCERPT_LINES and not self._foreign

    def kind_of(self, text: str) -> LineKind:
        """Which lines to take; notes whether any is of a run."""
        kind = line_kind(text, self._facts)
        if text.strip():
            self._lines += 1
            self._foreign = self._foreign or bool(FOREIGN.search(text))
        if not self.of_a_run:
            self.of_a_run = kind == "step" or bool(RUN.search(text) and not FOREIGN.search(text))
        return kind

    def take(self, line: LogLine) -> None:
        """Take what a line tells."""
        line = without_quotes(line)
        text, process = line.text, self._process_of(line)
        if holder := holder_in(text):
            self._holders.setdefault((line.node, holder[0]), holder[1])
        if renumbers_devices(text):
            self._renumbered = True
        if OTHER_PROGRAM.search(text) or is_data(process, line):
            return
        self._note_told(line, text)
        quoted = self._in_diagnosis and DIAGNOSIS_LINE.match(text)
        self._in_diagnosis = bool(quoted or DIAGNOSIS_TITLE.match(text))
        if self._in_diagnosis:
            return
        if TESTS_BEGIN.search(text) or (TESTS_RUN.search(text) and self._before_tests is None):
            self._begin_tests(line)
            return
        if TESTS_ENDED.search(text):
            before, self._before_tests = self._before_tests, None
            if TESTS_PASSED.search(text):
                if before is not None:
                    self._forget_since(before, line)
                return
        finished, said = FINISHED.search(text), TRAINED.search(text)
        trained = finished or (said and not DENIED.search(text, 0, said.start()))
        if trained:
            self.found.done = Moment(line.seconds, line.year_known)
            self.found.trained = len(self.found.evidence)
        if finished:
            self.found.finished = len(self.found.evidence)
        raises = EXCEPTION.match(text) or matching_symptom(text, self._facts) is not None
        restarted = RESTART.search(text) is not None and not raises
        ended_well = ENDED_WELL.search(text) is not None
        if trained or restarted or ended_well:
            self.found.ended = len(self.found.evidence)
        if ended_well:
            self.found.said_well = len(self.found.evidence)
        if ended_well and self.found.trained >= 0:
            self.found.left = len(self.found.evidence)
        if restarted:
            self.attempt += 1
            self._processes.clear()
            self._quit_all = None
        elif finished:
            return
        elif match := SUMMARY_RANK.match(text):
            self._summary_rank = int(match["rank"])
        elif text.startswith((OWN_WHERE, OWN_FIX)):
            add_error_detail(process, text)
        elif CHAINED.match(text):
            process.chained = (
                process.last if process.last and _is_unknown(process.last.symptom) else None
            )
        elif IGNORED.match(text):
            process.ignored = True
        elif text := relevant_part(process, line):
            self._match(process, line, text)

    def _note_told(self, line: LogLine, text: str) -> None:
        """Note what the line tells that is no evidence by itself."""
        if prepared := PREPARING.search(text):
            self.found.preparing = None if prepared["percent"] == "100" else line
        if line.rank is not None and (batches := BATCHES.search(text)):
            self.found.batches[line.rank] = int(batches["length"] or batches["done"])
        for name, value in facts_in(text).items():
            self.found.facts.setdefault(name, value)
        if too_long := TOO_LONG.search(text):
            self._too_long.append(set(too_long.groups()))
        if SERVED.search(text):
            self.found.served = len(self.found.evidence)
        if forced := FORCED_KILL.search(text):
            self._killed_by_launcher.add(forced["pid"])
        if QUIT_ALL.search(text) or TASK_FAILED.search(text):
            self._quit_all = line

    def name_holders(self) -> None:
        """Say who held the memory of the devices that ran out, where their numbers are those of the
        tables.
        """
        for piece in self.found.evidence if not self._renumbered else ():
            holder = self._holders.get((piece.line.node, piece.values.get("device", "")))
            if holder is not None:
                piece.values.setdefault("holder", holder)

    def _begin_tests(self, line: LogLine) -> None:
        """Remember what was found, which nothing that follows changes: tests are other
        processes.
        """
        self._kept.clear()
        self._processes.clear()
        found = replace(self.found, evidence=[*self.found.evidence], facts=dict(self.found.facts))
        self._before_tests = _BeforeTests(
            found,
            set(self._killed_by_launcher),
            self.attempt,
            self._summary_rank,
            line.steps_before,
        )

    def _forget_since(self, before: _BeforeTests, line: LogLine) -> None:
        """Drop all that was found since tests began: they all passed. Steps in them are none after
        what came before.
        """
        self._kept.clear()
        self._processes.clear()
        self.found = before.found
        self._killed_by_launcher = before.killed_by_launcher
        self._quit_all = None
        self.attempt = before.attempt
        self._summary_rank = before.summary_rank
        of_tests = {
            rank: count - before.steps.get(rank, 0) for rank, count in line.steps_before.items()
        }
        for piece in self.found.evidence:
            steps = {
                r: piece.line.steps_before.get(r, 0) + of_tests.get(r, 0) for r in line.steps_before
            }
            piece.line = replace(piece.line, steps_before=steps)

    def _process_of(self, line: LogLine) -> Process:
        """What its process has been about; nothing any more where training has gone on since."""
        process = self._processes[line.node, line.rank]
        if line.steps_since(process.steps) >= SURVIVED_STEPS:
            process = self._processes[line.node, line.rank] = Process()
        process.steps = line.steps_before
        return process

    def _match(self, process: Process, line: LogLine, text: str) -> None:
        quiet = QUIET_LEVEL.search(text) is not None
        service = SERVICE.search(text) is not None
        within, process.frame_at = (
            line.number - process.frame_at < TRACEBACK_LINES,
            -TRACEBACK_LINES,
        )
        if within and process.raised and ENDS_TRACEBACK.match(text):
            quiet = False  # a warning that was raised
        exception = EXCEPTION.match(text) or (within and ENDS_TRACEBACK.match(text))
        matched = matching_symptom(text, self._facts)
        if quiet and HANDLED.search(text) and (matched is None or matched[0].kind != Kind.MACHINE):
            return
        if matched is not None and service and matched[0].kind != Kind.MACHINE:
            return
        if matched is not None and (not quiet or matched[0].in_warnings):
            symptom, match = matched
            # of a thread or an object of a process that ends
            if process.ignored and symptom.kind >= Kind.PEER_LOST:
                process.ignored = False
                return
            # A trailing _ lets several alternatives of one pattern name the same value.
            values = {
                name.rstrip("_"): value.rstrip(". ")
                for name, value in match.groupdict().items()
                if value is not None
            }
            if within:
                symptom, values = told_by_traceback(process, symptom, values)
            if symptom.cause == "shape_mismatch" and (
                sizes := sizes_of_sample(process, text, self._too_long)
            ):
                symptom, values = knowledge().named["sample_too_long"], sizes
            process.ignored = False
            if process.chained in self.found.evidence:
                self.found.evidence.remove(process.chained)
            if symptom.kind == Kind.KILLED and self._was_forced(line, values.get("pid")):
                symptom, values = knowledge().named["ended_badly"], {}
        elif within and (error := RECORD_ERROR.match(text)) and (frame := record_frame(process)):
            symptom, values = knowledge().named["bad_record"], {"error": error["error"], "frame": frame}
        elif not quiet and not service and (exception or is_failure(text)):
            if exception and process.ignored:
                process.ignored = False
                return
            last = process.last if process.last and _is_unknown(process.last.symptom) else None
            torn = last is not None and continues(line, last.line)
            if within and exception and not CASCADE_EXCEPTIONS.search(text) and was_only_said(last):
                torn = True  # what was printed before did not end the process
                self.found.evidence = [piece for piece in self.found.evidence if piece is not last]
            cascade = (
                (process.failed and not torn)
                or CASCADE_EXCEPTIONS.search(text)
                or not (exception or OWN_ERROR.match(text))
            )
            symptom, values = knowledge().named["ended_badly" if cascade else "unexplained"], {}
            if not cascade and exception:
                frames = process.frames if within else []
                symptom, values = symptom_of_place(frames, process.code, text)
        else:
            return
        # else it is a warning, or may pass
        process.failed |= not (symptom.needs or symptom.passing)
        ends_traceback = within and bool(exception)
        in_request = ends_traceback and self.found.served >= 0 and through_server(process)
        how = {"quiet": quiet, "ends_traceback": ends_traceback, "in_request": in_request}
        self._keep(process, Evidence(symptom, line, values, self.attempt, **how))

    def _was_forced(self, line: LogLine, pid: str | None) -> bool:
        """Whether the launcher, an engine or the scheduler, just before, said that it ends this
        process.
        """
        if pid is not None:
            return pid in self._killed_by_launcher
        quit_all = self._quit_all
        if quit_all is None or line.number - quit_all.number > QUIT_LINES:
            return False
        return line.steps_since(quit_all.steps_before) == 0

    def _drop_torn(self, last: Evidence | None, line: LogLine) -> None:
        """Drop an error that was only the beginning of this line, written twice by processes that
        share the log.
        """
        if (
            last is not None
            and _is_unknown(last.symptom)
            and continues(line, last.line)
            and last in self.found.evidence
        ):
            self.found.evidence.remove(last)

    def _keep(self, process: Process, evidence: Evidence) -> None:
        rank = evidence.line.rank if self._summary_rank is None else self._summary_rank
        evidence.values.setdefault("line", evidence.line.text.strip())
        if rank is not None:
            evidence.values.setdefault("rank", str(rank))
        symptom, line = evidence.symptom, evidence.line
        self._drop_torn(process.last, line)
        kept = self._kept[
            id(symptom),
            line.node,
            line.rank,
            evidence.attempt,
            evidence.values.get(symptom.differs),
        ]
        if len(kept) >= KEPT_LINES:
            last = kept[-1]
            last.count += 1
            # what was got over before has come back
            if line.steps_before != last.line.steps_before:
                last.line = line
                self.found.evidence.remove(last)
                self.found.evidence.append(last)
            return
        kept.append(evidence)
        self.found.evidence.append(evidence)
        process.last = evidence
