"""What the lines of one process have been about: a traceback, fixed advice, quoted data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from finetune.commands.diagnose.evidence import Evidence
from finetune.commands.diagnose.line_kinds import form, is_of, match_of
from finetune.commands.diagnose.log_lines import LogLine

_ARROW = re.compile(r"^-+> ?\d+(?P<code> .*|$)")
# A conversation or a code block that is not closed is taken to be over after as many lines,
QUOTED_LINES = 60
HEADED_LINES = 4  # and an example under its heading.
# Lines, of other processes too, between the last frame of a traceback and what it ends with.
TRACEBACK_LINES = 60


@dataclass
class Process:
    """What the lines of one process have been about so far.

    Attributes:
        frames: of the traceback that is being printed, outermost first; the last is at `frame_at`.
        code: the source line of its innermost frame.
        ignored: the exception that follows does not end the process.
        last: its last evidence, to which a following `where` or `fix` belongs.
        chained: an unknown error that the next one is said to come from.
    """

    frames: list[str] = field(default_factory=list)
    frame_at: int = -TRACEBACK_LINES
    code: str = ""
    ignored: bool = False
    last: Evidence | None = None
    failed: bool = False
    chained: Evidence | None = None
    steps: Mapping[int | None, int] = field(default_factory=dict)
    _frame_indent: int = -1
    _in_advice: bool = False
    _quoted_until: int = 0
    _piece_at: int = -1

    def quotes_data(self, line: LogLine) -> bool:
        """Whether the line quotes training data or generated text rather than reporting."""
        text, number = line.text, line.number
        within = number <= self._quoted_until
        if is_of("fence", text):
            self._quoted_until = 0 if within else number + QUOTED_LINES
            return True
        if is_of("heading", text):
            self._quoted_until = max(self._quoted_until, number + HEADED_LINES)
            return True
        ends = match_of("chat_ends", text)
        begins = match_of("chat_begins", text)
        if ends:
            self._quoted_until = 0
        if begins and not (ends and ends.start() > begins.start()):
            self._quoted_until = number + QUOTED_LINES
        quotes = is_of("data", text) and not is_of("exception", text)
        # A piece of a traceback in quoted text has no first line. Code under a frame may look like
        # data, but is indented.
        piece = number == self._piece_at + 1 and (is_of("frame", text) or is_of("exception", text))
        if piece or (quotes and not text[:1].isspace()):
            self._piece_at = number
        return within or bool(begins) or is_of("table_row", text) or quotes or piece

    def places(self) -> list[str]:
        """Return the frames, the innermost with its source line."""
        if not self.code:
            return self.frames
        return [*self.frames[:-1], f"{self.frames[-1]}: {self.code}"]

    def relevant_part(self, line: LogLine) -> str:
        """Return what of the line is about this failure: no quoted code, no fixed advice."""
        text = line.text
        indent = len(text) - len(text.lstrip())
        if frame := match_of("frame", text):
            if self.frame_at <= 0:
                self.frames = []
            self.frames.append(frame_of(frame))
            self.frame_at, self._frame_indent, self.code = line.number, indent, ""
            return ""
        if self._frame_indent == 0 and (arrow := _ARROW.match(text)):  # a notebook's
            self.code, self.frame_at = arrow["code"].strip(), line.number
            return ""
        if 0 <= self._frame_indent < indent:
            if not text.lstrip()[0].isdigit():  # a notebook's line around the one that failed
                self.code = self.code or text.strip()
            return ""
        self._frame_indent = -1
        if self._in_advice and not is_of("advice_ends", text):
            return ""
        cut = match_of("advice", text)
        self._in_advice = cut is not None
        return text[: cut.start()] if cut else text


def frame_of(match: re.Match[str]) -> str:
    """Return a frame in Python's form: `File "PATH", line N, in FUNCTION`."""
    path, line = match["path"] or match["path_"], match["line"] or match["line_"] or "?"
    return f'File "{path}", line {line}, in {match["function"] or match["function_"] or "<module>"}'


def without_quotes(line: LogLine) -> LogLine:
    """Return the line without prompts, answers and records that it quotes."""
    text = form("quoted_instance").sub("", line.text)
    text = form("quoted_data").sub(r"\1", text) if text == line.text else text
    return line if text == line.text else replace(line, text=text)


def continues(line: LogLine, piece: LogLine) -> bool:
    """Whether an earlier line is the beginning of this one."""
    return len(piece.text) < len(line.text) and line.text.startswith(piece.text.rstrip())
