"""What the lines of one process have been about: a traceback, fixed advice, quoted data, an error
before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from finetune.commands.diagnose.evidence import Evidence
from finetune.commands.diagnose.log_reading import LogLine
from finetune.commands.diagnose.log_words import (
    AT_POSITIONS,
    BOILERPLATE,
    CHAT_BEGINS,
    CHAT_ENDS,
    CRASHED_THREAD,
    DATA,
    EVALUATES,
    EXCEPTION,
    FENCE,
    FRAME,
    GATHERS_STATE,
    HEADING,
    LEAVES_BOILERPLATE,
    LOADS_ONTO_DEVICE,
    OF_A_PACKAGE,
    OF_SAVING,
    OF_TORCH_LOAD,
    OWN_ERROR,
    OWN_FIX,
    OWN_WHERE,
    PACKAGE_FRAME,
    QUOTED_DATA,
    QUOTED_INSTANCE,
    RAISES,
    READS_RECORDS,
    SERVES_HTTP,
    TABLE_ROW,
    UNDER_LOADER,
    UNLIKE_SIZES,
)
from finetune.commands.diagnose.knowledge import Symptom, knowledge
from finetune.commands.diagnose.places import frame_parts

# A conversation in training data that is not closed is taken to be over after as many lines.
CHAT_LINES = 60
HEADED_LINES = 4  # of an example, under its heading
# Lines, of other processes too, between the last frame of a traceback and what it ends with.
TRACEBACK_LINES = 60


class Process:
    """What the lines of one process have been about so far."""

    def __init__(self) -> None:
        self.in_frame = self.in_boilerplate = self.ignored = False
        self.frame_indent = 0
        self.frame_at = -TRACEBACK_LINES  # the line of the last frame of a traceback
        self.frames: list[str] = []  # of that traceback, outermost first
        self.at_positions = False  # the code of that frame takes embeddings of positions
        self.code = ""  # the source line of its innermost frame
        self.raised = False  # its innermost frame ends in `raise` or `assert`
        self.last: Evidence | None = None  # what a following where or fix belongs to
        self.failed = False  # a failure of this process in this attempt was seen
        # an unknown error that the next one is said to come from
        self.chained: Evidence | None = None
        self.chat_until = 0  # the line up to which a conversation is quoted
        self.fence_until = 0  # and what stands between ``` and ```
        self.quoted_at = -1  # the last line of quoted data
        self.in_crashed_thread = False  # in the stack of the thread in which Python crashed
        self.steps: Mapping[int | None, int] = {}  # logged before its last line


def is_data(process: Process, line: LogLine) -> bool:
    """Whether the line quotes training data or generated text rather than reporting anything."""
    within = line.number <= max(process.chat_until, process.fence_until)
    if FENCE.match(line.text):
        process.fence_until = 0 if line.number <= process.fence_until else line.number + CHAT_LINES
        return True
    if HEADING.match(line.text):
        process.chat_until = max(process.chat_until, line.number + HEADED_LINES)
        return True
    if CHAT_ENDS.search(line.text):
        process.chat_until = 0
    if (begins := list(CHAT_BEGINS.finditer(line.text))) and not CHAT_ENDS.search(
        line.text, begins[-1].end()
    ):
        process.chat_until = line.number + CHAT_LINES
    quotes = DATA.search(line.text) and not EXCEPTION.match(line.text)
    # A piece of a traceback in quoted text has no first line. Code under a frame may look like
    # data, but is indented.
    piece = line.number == process.quoted_at + 1 and bool(
        FRAME.match(line.text) or EXCEPTION.match(line.text)
    )
    if piece or (quotes and not line.text[:1].isspace()):
        process.quoted_at = line.number
    return within or bool(begins) or bool(TABLE_ROW.match(line.text) or quotes or piece)


def without_quotes(line: LogLine) -> LogLine:
    """The line without prompts, answers and records that it quotes."""
    text = QUOTED_INSTANCE.sub("", line.text)
    if text == line.text:
        text = QUOTED_DATA.sub(r"\1", text)
    return line if text == line.text else replace(line, text=text)


def _note_crashed(process: Process, text: str) -> None:
    """Name in the last evidence, of a crash, the package whose frame is the innermost of the
    crashed thread.
    """
    if thread := CRASHED_THREAD.match(text):
        process.in_crashed_thread = thread["crashed"] == "Current thread"
    elif process.in_crashed_thread and FRAME.match(text):
        process.in_crashed_thread = False
        if (
            (frame := PACKAGE_FRAME.match(text))
            and process.last
            and process.last.symptom.cause == "native_crash"
        ):
            process.last.values.setdefault("library", frame["package"])


def record_frame(process: Process) -> str | None:
    """The innermost frame of the traceback that reads records, `collate (train.py, line 41)`; None
    without one.
    """
    for number in reversed(range(len(process.frames))):
        frame = process.frames[number]
        own = not OF_A_PACKAGE.search(frame)
        called = own and any(UNDER_LOADER.search(outer) for outer in process.frames[:number])
        if called or READS_RECORDS.search(frame):
            file, place, function = frame_parts(frame)
            return f"{function} ({file}, {place})"
        if own:
            return None
    return None


def _work_outside_training(process: Process) -> dict[str, str]:
    """The function of evaluation, of loading or of gathering a checkpoint that the traceback goes
    through, if any.
    """
    gathering = _innermost(process, GATHERS_STATE)
    if gathering == "summon_full_params" and not any(
        OF_SAVING.search(frame) for frame in process.frames
    ):
        gathering = None  # to generate, or to look at gradients
    works = {
        "evaluation": _innermost(process, EVALUATES),
        "loading": _loading(process),
        "gathering": gathering,
    }
    return {work: function for work, function in works.items() if function}


def _innermost(process: Process, form: re.Pattern[str]) -> str | None:
    return next(
        (match["function"] for frame in reversed(process.frames) if (match := form.search(frame))),
        None,
    )


def _loading(process: Process) -> str | None:
    """The function that calls torch.load, where the traceback ends in its moving tensors to a
    device.
    """
    if not any(LOADS_ONTO_DEVICE.search(frame) for frame in process.frames):
        return None
    number = next(n for n, frame in enumerate(process.frames) if OF_TORCH_LOAD.search(frame))
    return frame_parts(process.frames[number - 1])[2] if number else "torch.load"


def relevant_part(process: Process, line: LogLine) -> str:
    """The part of the line that is about this failure: no quoted source code, no fixed advice."""
    text = line.text
    _note_crashed(process, text)
    indent = len(text) - len(text.lstrip())
    if FRAME.match(text):
        if process.frame_at <= 0:
            process.frames = []
        process.frames.append(text.strip())
        process.in_frame, process.frame_at, process.frame_indent = True, line.number, indent
        process.raised = process.at_positions = False
        process.code = ""
        return ""
    if process.in_frame and indent > process.frame_indent:
        process.raised |= RAISES.match(text) is not None
        process.code = process.code or text.strip()
        process.at_positions |= AT_POSITIONS.match(text) is not None
        return ""
    process.in_frame = False
    if process.in_boilerplate and not LEAVES_BOILERPLATE.search(text):
        return ""
    cut = BOILERPLATE.search(text)
    process.in_boilerplate = cut is not None
    return text[: cut.start()] if cut else text


def told_by_traceback(
    process: Process, symptom: Symptom, values: dict[str, str]
) -> tuple[Symptom, dict[str, str]]:
    """The symptom of the exception that ends a traceback, and its values, with what the frames tell
    of them.
    """
    if symptom.cause == "device_oom" and (work := _work_outside_training(process)):
        values |= work
        if "loading" in work:
            values.pop("holder", None)  # the other ranks of this run
    if symptom.cause == "port_in_use" and through_server(process):
        symptom = knowledge().named["http_port"]
    return symptom, values


def through_server(process: Process) -> bool:
    """Whether the traceback goes through the code of an HTTP server."""
    return any(SERVES_HTTP.search(frame) for frame in process.frames)


def sizes_of_sample(process: Process, text: str, warned: Sequence[set[str]]) -> dict[str, str]:
    """Tokens of a sample and the model's maximum, where these are the sizes that do not fit; empty
    where not.

    Args:
        warned: pairs of them that tokenizers warned of.
    """
    sizes = UNLIKE_SIZES.search(text)
    if sizes is None:
        return {}
    tokens, limit = sizes["tokens"], sizes["limit"]
    at_positions = sizes["dimension"] == "1" and process.at_positions and int(tokens) > int(limit)
    if {tokens, limit} not in warned and not at_positions:
        return {}
    return {"tokens": max(tokens, limit, key=int), "limit": min(tokens, limit, key=int)}


def was_only_said(evidence: Evidence | None) -> bool:
    """Whether it is an exception that no rule knows, without a traceback, of a line that names no
    rank.
    """
    if evidence is None or evidence.symptom.patterns or evidence.line.rank is not None:
        return False
    return not evidence.ends_traceback and EXCEPTION.match(evidence.line.text) is not None


def continues(line: LogLine, piece: LogLine) -> bool:
    """Whether an earlier line is the beginning of this one."""
    return len(piece.text) < len(line.text) and line.text.startswith(piece.text.rstrip())


def add_error_detail(process: Process, text: str) -> None:
    """Take where an error of this package was, or its fix, from the lines after it."""
    last = process.last
    if last is None:
        return
    name = "error_where" if text.startswith(OWN_WHERE) else "error_fix"
    last.values.setdefault(name, text.removeprefix(OWN_WHERE).removeprefix(OWN_FIX))
    own = OWN_ERROR.match(last.line.text)
    if name == "error_fix" and own and last.symptom.id in ("unexplained", "ended_badly"):
        last.symptom = knowledge().named["explained_by_run"]
        last.values.setdefault("error", own["error"])
