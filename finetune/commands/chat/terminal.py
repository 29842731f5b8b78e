"""One conversation on a terminal: the commands, the answers as they come, and what may reach the
terminal.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from finetune.commands.chat.sessions import ChatSession
from finetune.errors import ConfigError, FinetuneError
from finetune.runtime.language import N_, _

if TYPE_CHECKING:
    from finetune.data.tools import Call
    from finetune.inference.answer import Answer
    from finetune.inference.generation import Generator
    from finetune.inference.sampling import Sampling

HELP = N_("""/reset            forget the conversation; the system prompt stays
/system [TEXT]    set the system prompt and begin anew; without TEXT: show it
/save FILE        write the conversation to a file
/load FILE        resume a conversation from a file
/stats            tokens and speed so far
/help             this list
/quit             leave (also Ctrl-D)

Several lines: end a line with a backslash, or put the text between lines of \"\"\".
Ctrl-C stops the answer. A line that begins with // is sent with one slash.""")
STATS = N_(
    """last answer: {prompt} prompt tokens, {generated} generated in {seconds:.1f} s ({rate:.1f} tokens/s), \
first after {first:.2f} s
all {answers} answers: {tokens} tokens in {all_seconds:.1f} s
context: {used} of {context} tokens"""
)

# A model's words must not move the cursor, set the clipboard or hide text: what a terminal would
# act on is shown.
_INVISIBLE = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
_INVISIBLE[0x7F] = "\u2421"
# C1 controls, line and paragraph separators, and what turns the direction of writing.
_INVISIBLE |= {
    code: f"<U+{code:04X}>"
    for code in (
        *range(0x80, 0xA0),
        0x061C,
        0x200E,
        0x200F,
        *range(0x2028, 0x202F),
        *range(0x2066, 0x206A),
    )
}


def visible(text: str) -> str:
    """Text without characters that a terminal acts on; newline and tab stay."""
    return text.translate(_INVISIBLE)


class Quit(Exception):
    """The user leaves."""


class TerminalChat:
    """A conversation on a terminal, which may continue one from `session`.

    `read` reads a line with a prompt and raises EOFError at the end of input; answers go to `out`.
    """

    def __init__(
        self,
        generator: Generator,
        sampling: Sampling,
        session: ChatSession,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        read: Callable[[str], str] = input,
        out: TextIO | None = None,
    ) -> None:
        self.generator = generator
        self.sampling = sampling
        self.session = session
        self.tools = tools
        # Its own colours; and `visible` shows what other commands leave out.
        self._read = read
        self._out = out or getattr(sys.stdout, "unfiltered", sys.stdout)
        # answer, seconds to the first piece, seconds in all
        self.answers: list[tuple[Answer, float, float]] = []
        self._colour = self._out.isatty() and "NO_COLOR" not in os.environ

    def run(self) -> None:
        """Until the user leaves."""
        self._notice(
            _("{model} · /help lists the commands, /quit leaves").format(model=self.generator.name)
        )
        while True:
            try:
                text = self._read_turn()
                if text.startswith("/") and not text.startswith("//"):
                    self._command(text)
                elif text.strip():
                    self.ask(text[1:] if text.startswith("//") else text)
            except KeyboardInterrupt:
                self._write("\n")
                self._notice(_("/quit leaves"))
            except (EOFError, Quit):
                self._write("\n")
                return
            except FinetuneError as error:
                self._notice(str(error))

    def ask(self, question: str) -> None:
        """Write the answer as it comes; results of tools that it calls are asked for. Ctrl-C ends
        it and keeps what was written.

        Raises:
            FinetuneError: the prompt is refused or the answer failed; the question is forgotten
            then. EOFError, KeyboardInterrupt: instead of a result; likewise.
        """
        self.session.ask(question)
        try:
            while calls := self._answer():
                for call in calls:
                    shown = visible(f"{call.name} {json.dumps(call.arguments, ensure_ascii=False)}")
                    self._notice(_("calls {call}").format(call=shown))
                    asked = _("result of {name}: ").format(name=visible(call.name))
                    self.session.result(call, self._read(asked))
        except (FinetuneError, EOFError, KeyboardInterrupt):
            self.session.take_back()
            raise

    def _answer(self) -> tuple[Call, ...]:
        """Write one answer; the calls that it ends with."""
        began = time.monotonic()
        first = stream = None
        try:
            stream = self.generator.stream(self.session.messages, self.sampling, tools=self.tools)
            while True:
                try:
                    for piece in stream:
                        first = first or time.monotonic()
                        self._write(visible(piece))
                    break
                except KeyboardInterrupt:
                    stream.cancel()  # the pieces end, and the answer is what was written
        except FinetuneError:
            if stream is not None:
                self._write("\n")
            raise
        answer = stream.answer
        assert answer is not None
        self._write("\n")
        self.session.answer(answer.text, answer.calls)
        now = time.monotonic()
        self.answers.append((answer, (first or now) - began, now - began))
        if answer.finish_reason == "cancelled":
            self._notice(_("stopped"))
        elif answer.finish_reason == "length":
            self._notice(
                _(
                    "cut: the answer is as long as allowed (--max-new-tokens, or the model's"
                    " context)"
                )
            )
        return answer.calls

    def _read_turn(self) -> str:
        """One line, or several."""
        lines = [self._read("> ")]
        if lines[0].strip() == '"""':
            lines = []
            while (line := self._read("… ")).strip() != '"""':
                lines.append(line)
            return "\n".join(lines)
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._read("… "))
        return "\n".join(lines)

    # ------------------------------------------------------------ commands

    def _command(self, line: str) -> None:
        name, _space, argument = line.partition(" ")
        argument = argument.strip()
        if name == "/reset":
            self.session.reset()
            self._notice(_("the conversation is forgotten"))
        elif name == "/system":
            self._system(argument)
        elif name == "/save":
            path = _path(argument, name)
            self.session.save(path, model=self.generator.name)
            self._notice(
                _("saved {turns} turns to {path}").format(
                    turns=len(self.session.turns) // 2, path=path
                )
            )
        elif name == "/load":
            path = _path(argument, name)
            self.session = ChatSession.load(path)
            self._notice(
                _("loaded {turns} turns from {path}").format(
                    turns=len(self.session.turns) // 2, path=path
                )
            )
        elif name == "/stats":
            self._stats()
        elif name == "/help":
            self._write(_(HELP) + "\n")
        elif name in ("/quit", "/exit"):
            raise Quit
        else:
            raise ConfigError(
                f"there is no command {visible(name)}", fix="/help lists them; // sends a slash"
            )

    def _system(self, text: str) -> None:
        if not text:
            self._notice(visible(self.session.system) or _("no system prompt"))
            return
        self.session = ChatSession(text)
        self._notice(_("system prompt set; the conversation begins anew"))

    def _stats(self) -> None:
        if not self.answers:
            self._notice(_("no answer yet"))
            return
        last, first_seconds, seconds = self.answers[-1]
        text = _(STATS).format(
            prompt=last.prompt_tokens,
            generated=last.completion_tokens,
            seconds=seconds,
            rate=last.completion_tokens / seconds,
            first=first_seconds,
            answers=len(self.answers),
            tokens=sum(answer.completion_tokens for answer, _first, _whole in self.answers),
            all_seconds=sum(whole for _answer, _first, whole in self.answers),
            used=last.prompt_tokens + last.completion_tokens,
            context=self.generator.context_tokens,
        )
        self._notice(text)

    # ------------------------------------------------------------ output

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def _notice(self, text: str) -> None:
        """Write what is ours, not the model's."""
        self._write(f"\033[2m{text}\033[0m\n" if self._colour else f"[{text}]\n")


def _path(name: str, command: str) -> Path:
    if not name:
        raise ConfigError("no file is named", command, f"{command} FILE")
    return Path(name).expanduser()
