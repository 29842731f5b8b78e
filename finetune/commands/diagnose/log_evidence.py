"""Which lines of a log speak of a failure, and of which cause: rules against lines, with what surrounds them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from finetune.commands.diagnose.log_facts import FACT_WORDS, facts_in
from finetune.commands.diagnose.log_reading import LineKind, LogFile, LogLine
from finetune.commands.diagnose.symptoms.base import Kind, Symptom
from finetune.commands.diagnose.symptoms.rules import ENDED_BADLY, EXPLAINED_BY_RUN, SYMPTOMS, UNEXPLAINED

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
        evidence: in the order of the log.
        facts: settings and sizes that the log mentions: the run's own numbers.
        steps: logged training steps, by rank.
        finished: how many of `evidence` came before the run reported that it was done.
    """

    evidence: list[Evidence] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    steps: Mapping[int | None, int] = field(default_factory=dict)
    finished: int = 0


_STEP = re.compile(r"""\bloss['"]?(?:\s*[:=]\s*|\s+)['"]?-?\d""")
_NOT_A_NUMBER = re.compile(r"\b(?:nan|inf)\b", re.IGNORECASE)
_FINISHED = re.compile(r"^\[SUCCESS\] done: |'train_runtime':|Training completed\. Do not forget to share")
_RESTART = re.compile(r"will restart worker group|\[(?:INFO|WARNING)\] (?:starting again|restart)")
_SUMMARY_RANK = re.compile(r"^ +rank +: (?P<rank>\d+) \(local_rank: \d+\)")
_OWN_WHERE, _OWN_FIX = "  where: ", "  fix:   "
# A diagnosis that the launcher wrote into the log, in any language: it quotes lines and speaks of other causes.
_DIAGNOSIS_TITLE = re.compile(r"^\d+\. \w+  \(.+ [01]\.\d\d\)$")
_DIAGNOSIS_LINE = re.compile(r"^ {3}\S")
_FRAME = re.compile(r'^\s+File ".*", line \d+')
_BOILERPLATE = re.compile(r"Possible Cause:|Solution:")
_LEAVES_BOILERPLATE = re.compile(
    r"^\s+TraceBack |^\[?(?:ERROR|INFO|WARNING|W|E)\b|^\[PID: |^E[A-Z0-9]\d\d\d\d\b|^\S*Error\b|^Traceback "
)
_QUIET_LEVEL = re.compile(
    r"^\[?[IWD]\d{3,4} \d\d:\d\d:|\[(?:INFO|DEBUG|WARNING|SUCCESS|NOTICE|TRACE)\]|\bNCCL INFO\b|[ |](?:INFO|WARNING|DEBUG) *(?:-|\|)"
    r"|^(?:INFO|WARNING|DEBUG)[: ]|\b\w*Warning: |(?i:\bwarning: )|\[warn\]"
    r"|retry loop|will retry|[Rr]etrying\b"
)
_EXCEPTION = re.compile(
    r"^(?P<exception>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Timeout|Failure|Expired|NotFound|Group))(?::|$)"
)
# Exceptions that end a process because something else did.
_CASCADE_EXCEPTIONS = re.compile(
    r"(?:ChildFailedError|SignalException|SystemExit|BrokenPipeError|GeneratorExit|ProcessExitedException"
    r"|CalledProcessError|ProcessRaisedException)(?::|$)|The Inner error is reported as above"
    r"|(?:NPU|HCCL|OPS|GRAPH) function error|HCCL error in|ACL stream synchronize failed"
)
_IGNORED = re.compile(r"^Exception ignored in|^--- Logging error ---|^Exception in thread (?!MainThread)")
# Others begin a line like ours with a time, a module or a file.
_OWN_ERROR = re.compile(r"^\[ERROR\] (?:rank \d+: )?(?P<error>(?!20\d\d-|[A-Z]+\(|\[)\S.*)")
_FAILURE = re.compile(
    r"^Segmentation fault|^Fatal Python error|core dumped|^Aborted|^terminate called|^Bus error|^\S+: error: "
    r"|^bash: .*(?:not found|denied)|^\S+: can't open file|^srun: error: .*[Ee]xited|^ +exitcode +: -?[1-9]"
    r"|exits with return code = -?[1-9]|\bERR\d\d\d\d\d\b|\bE[A-Z0-9]\d\d\d\d(?::|\))|failed \(exitcode: -?[1-9]"
)

# Ended by the launcher because another process had failed: no news.
_CHAINED = re.compile(r"^(?:During handling of the above exception|The above exception was the direct cause)")
_FORCED_KILL = re.compile(r"process (?P<pid>\d+) via \S+, forcefully exiting via \S*SIGKILL")
# Training data, prompts and generated text speak of anything.
_CHAT_BEGINS = re.compile(r"<\|(?:im_start|start_header_id|user|system)\|>|\[INST\]|<start_of_turn>")
_CHAT_ENDS = re.compile(r"<\|(?:im_end|eot_id|endoftext|end)\|>|\[/INST\]|<end_of_turn>|</s>")
CHAT_LINES = 60
_DATA = re.compile(
    r"""^\W*(?:["']?(?:instruction|input|output|prompt|completion|response|question|answer|content|text|messages"""
    r"""|conversations?|generated(?: text)?|generation|prediction|reference|target|sample|example|user|assistant|human)"""
    r"""(?: ?#?\d+)?["']?) ?(?::|=|\|).*\w|"(?:role|messages|conversations|instruction)": """,
    re.IGNORECASE,
)
# A log without any of these is another program's: what its lines say of disks and connections is not about a run.
_RUN = re.compile(
    r"(?i:torch|cuda|nccl|hccl|\bnpu|gpu|ascend|deepspeed|accelerate|transformers|tokenizer|safetensors|huggingface|wandb"
    r"|python|finetune|pytorch|\brank|slurm|srun|\bloss|epoch|DataLoader|gloo|c10d|xla|mpirun|sbatch)"
    r"|Traceback \(most recent|\.py\b|\bERR\d{5}\b|\[Errno \d|(?<!\w)E[A-Z0-9]\d{4}\b|\b_?[A-Z]\w*Error\b|OOMKilled|std::bad_alloc"
    r"|^\[(?:ERROR|WARNING|INFO)\] |^the run\b|^(?:ba|z)?sh: |exitcode|oom-kill|^(?:\S+: line \d+: +)?\d* ?Killed\b|NVRM|Segmentation fault|GLIBC"
)
_FOREIGN = re.compile(
    r"^\s+at [\w.$]+\(|\bjavax?\.\w|\bnpm (?:ERR|error)|nginx|mysqld|postgres|sshd|httpd|\[error\] \d+#\d+:"
)

# What tells how to read other lines.
_STRUCTURE = (
    *(_FRAME, _BOILERPLATE, _FINISHED, _RESTART, _SUMMARY_RANK, _IGNORED, _DIAGNOSIS_TITLE),
    *(_FORCED_KILL, _CHAINED, _CHAT_BEGINS, _CHAT_ENDS),
    re.compile(f"TraceBack|^{_OWN_WHERE}|^{_OWN_FIX}"),
)


class _Process:
    """What the lines of one process have been about so far."""

    def __init__(self) -> None:
        self.in_frame = self.in_boilerplate = self.ignored = False
        self.last: Evidence | None = None  # what a following where or fix belongs to
        self.failed = False  # a failure of this process in this attempt was seen
        self.chained: Evidence | None = None  # an unknown error that the next one is said to come from
        self.chat_until = 0  # the line up to which a conversation is quoted


def scan_log(file: LogFile) -> LogEvidence:
    """All that a log tells. Raises OSError where it cannot be read."""
    scan = _Scan()
    for line in file.lines(scan.kind_of):
        scan.take(line)
    scan.found.steps = file.steps
    if not scan.of_a_run:
        scan.found.evidence.clear()
    return scan.found


class _Scan:
    """One log against the rules, line by line."""

    def __init__(self) -> None:
        self.found = LogEvidence()
        self.of_a_run = False
        self._processes: dict[tuple[str, int | None], _Process] = defaultdict(_Process)
        self._kept: dict[tuple[object, ...], list[Evidence]] = defaultdict(list)
        self._killed_by_launcher: set[str] = set()
        self._attempt = 0
        self._summary_rank: int | None = None
        self._in_diagnosis = False

    def kind_of(self, text: str) -> LineKind:
        """Which lines to take; notes whether any is of a run."""
        kind = line_kind(text)
        if not self.of_a_run:
            self.of_a_run = kind == "step" or bool(_RUN.search(text) and not _FOREIGN.search(text))
        return kind

    def take(self, line: LogLine) -> None:
        """Take what a line tells."""
        text, process = line.text, self._processes[line.node, line.rank]
        if _is_data(process, line):
            return
        for name, value in facts_in(text).items():
            self.found.facts.setdefault(name, value)
        if forced := _FORCED_KILL.search(text):
            self._killed_by_launcher.add(forced["pid"])
        quoted = self._in_diagnosis and _DIAGNOSIS_LINE.match(text)
        self._in_diagnosis = bool(quoted or _DIAGNOSIS_TITLE.match(text))
        if self._in_diagnosis:
            return
        if _RESTART.search(text):
            self._attempt += 1
            self._processes.clear()
        elif _FINISHED.search(text):
            self.found.finished = len(self.found.evidence)
        elif match := _SUMMARY_RANK.match(text):
            self._summary_rank = int(match["rank"])
        elif text.startswith((_OWN_WHERE, _OWN_FIX)):
            _add_error_detail(process, text)
        elif _CHAINED.match(text):
            process.chained = process.last if process.last and process.last.symptom is UNEXPLAINED else None
        elif _IGNORED.match(text):
            process.ignored = True
        elif text := _relevant_part(process, text):
            self._match(process, line, text)

    def _match(self, process: _Process, line: LogLine, text: str) -> None:
        quiet = _QUIET_LEVEL.search(text) is not None
        matched = _matching_symptom(text)
        if matched is not None and (not quiet or matched[0].in_warnings):
            symptom, match = matched
            # A trailing _ lets several alternatives of one pattern name the same value.
            values = {name.rstrip("_"): value for name, value in match.groupdict().items() if value is not None}
            process.ignored = False
            if process.chained in self.found.evidence:
                self.found.evidence.remove(process.chained)
            if symptom.kind == Kind.KILLED and values.get("pid") in self._killed_by_launcher:
                symptom, values = ENDED_BADLY, {}
        elif not quiet and _is_failure(text):
            exception = _EXCEPTION.match(text)
            if exception and process.ignored:
                process.ignored = False
                return
            torn = (
                process.last is not None and process.last.symptom is UNEXPLAINED and _continues(line, process.last.line)
            )
            cascade = (
                (process.failed and not torn)
                or _CASCADE_EXCEPTIONS.search(text)
                or not (exception or _OWN_ERROR.match(text))
            )
            symptom, values = ENDED_BADLY if cascade else UNEXPLAINED, {}
        else:
            return
        process.failed = True
        self._keep(process, Evidence(symptom, line, values, self._attempt))

    def _drop_torn(self, last: Evidence | None, line: LogLine) -> None:
        """Drop an error that was only the beginning of this line, written twice by processes that share the log."""
        if (
            last is not None
            and last.symptom is UNEXPLAINED
            and _continues(line, last.line)
            and last in self.found.evidence
        ):
            self.found.evidence.remove(last)

    def _keep(self, process: _Process, evidence: Evidence) -> None:
        rank = evidence.line.rank if self._summary_rank is None else self._summary_rank
        evidence.values.setdefault("line", evidence.line.text.strip())
        if rank is not None:
            evidence.values.setdefault("rank", str(rank))
        symptom, line = evidence.symptom, evidence.line
        self._drop_torn(process.last, line)
        kept = self._kept[id(symptom), line.node, line.rank, evidence.attempt, evidence.values.get(symptom.differs)]
        if len(kept) >= KEPT_LINES:
            last = kept[-1]
            last.count += 1
            if line.steps_before != last.line.steps_before:  # what was got over before has come back
                last.line = line
                self.found.evidence.remove(last)
                self.found.evidence.append(last)
            return
        kept.append(evidence)
        self.found.evidence.append(evidence)
        process.last = evidence


def _continues(line: LogLine, piece: LogLine) -> bool:
    return len(piece.text) < len(line.text) and line.text.startswith(piece.text.rstrip())


def _add_error_detail(process: _Process, text: str) -> None:
    """Take where an error of this package was, or its fix, from the lines after it."""
    last = process.last
    if last is None:
        return
    name = "error_where" if text.startswith(_OWN_WHERE) else "error_fix"
    last.values.setdefault(name, text.removeprefix(_OWN_WHERE).removeprefix(_OWN_FIX))
    own = _OWN_ERROR.match(last.line.text)
    if name == "error_fix" and own and last.symptom in (UNEXPLAINED, ENDED_BADLY):
        last.symptom = EXPLAINED_BY_RUN
        last.values.setdefault("error", own["error"])


def _is_data(process: _Process, line: LogLine) -> bool:
    """Whether the line quotes training data or generated text rather than reporting anything."""
    within = line.number <= process.chat_until
    if _CHAT_ENDS.search(line.text):
        process.chat_until = 0
    if (begins := list(_CHAT_BEGINS.finditer(line.text))) and not _CHAT_ENDS.search(line.text, begins[-1].end()):
        process.chat_until = line.number + CHAT_LINES
    return within or bool(begins) or _DATA.search(line.text) is not None


def _relevant_part(process: _Process, text: str) -> str:
    """The part of the line that is about this failure: no quoted source code, no fixed advice."""
    if _FRAME.match(text):
        process.in_frame = True
        return ""
    if process.in_frame and text.startswith("    "):
        return ""
    process.in_frame = False
    if process.in_boilerplate and not _LEAVES_BOILERPLATE.search(text):
        return ""
    cut = _BOILERPLATE.search(text)
    process.in_boilerplate = cut is not None
    return text[: cut.start()] if cut else text


def line_kind(text: str) -> LineKind:
    """Whether any rule, or anything that rules depend on, is in a line."""
    if _STEP.search(text) and not _NOT_A_NUMBER.search(text):
        return "step"
    if _matching_symptom(text) is not None or _is_failure(text) or any(form.search(text) for form in _STRUCTURE):
        return "line"
    lowered = text.lower()
    return "line" if any(word in lowered for word in FACT_WORDS) and facts_in(text) else ""


def _matching_symptom(text: str) -> tuple[Symptom, re.Match[str]] | None:
    """The surest rule; of several the nearest to the root."""
    lowered = text.lower()
    matches = [(s, match) for s in SYMPTOMS if (match := s.match(text, lowered)) is not None]
    return min(matches, key=lambda pair: (-pair[0].confidence, pair[0].kind), default=None)


def _is_failure(text: str) -> bool:
    return bool(_EXCEPTION.match(text) or _OWN_ERROR.match(text) or _FAILURE.search(text))
