"""`python -m finetune chat`: talk to a model in the terminal, or ask it one thing."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from finetune.commands.chat import texts
from finetune.commands.chat.sessions import Conversation
from finetune.errors import ConfigError, ExitCode, FinetuneError
from finetune.inference.flags import add_sampling_flags, make_parser, sampling_changes, with_dashes
from finetune.runtime.language import Language, Text, pick_language

if TYPE_CHECKING:
    from finetune.inference.generation import Answer, Generator
    from finetune.inference.sampling import Sampling

# A model's words must not move the cursor, set the clipboard or hide text: what a terminal would act on is shown.
_INVISIBLE = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
_INVISIBLE[0x7F] = "\u2421"
# C1 controls, line and paragraph separators, and what turns the direction of writing.
_INVISIBLE |= {
    code: f"<U+{code:04X}>"
    for code in (*range(0x80, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
}


def visible(text: str) -> str:
    """Text without characters that a terminal acts on; newline and tab stay."""
    return text.translate(_INVISIBLE)


class Ending(Exception):
    """The user leaves."""


class TerminalChat:
    """One conversation on a terminal.

    Args:
        generator: the model.
        sampling: how it answers.
        conversation: may have turns already.
        read: reads a line with a prompt; raises EOFError at the end of input.
        out: where answers go.
        language: of what is not the model's.
    """

    def __init__(
        self,
        generator: Generator,
        sampling: Sampling,
        conversation: Conversation,
        *,
        read: Callable[[str], str] = input,
        out: TextIO | None = None,
        language: Language = "en",
    ) -> None:
        self.generator, self.sampling, self.conversation = generator, sampling, conversation
        self.language: Language = language
        self._read, self._out = read, out or sys.stdout
        self.answers: list[tuple[Answer, float, float]] = []  # answer, seconds to the first piece, seconds in all
        self._colour = self._out.isatty() and "NO_COLOR" not in os.environ

    def run(self) -> None:
        """Until the user leaves."""
        self._tell(texts.GREETING, model=self.generator.name)
        while True:
            try:
                text = self._read_turn()
                if text.startswith("/") and not text.startswith("//"):
                    self._command(text)
                elif text.strip():
                    self.ask(text[1:] if text.startswith("//") else text)
            except KeyboardInterrupt:
                self._write("\n")
                self._tell(texts.HOW_TO_LEAVE)
            except (EOFError, Ending):
                self._write("\n")
                return
            except FinetuneError as error:
                self._say(str(error))

    def ask(self, question: str) -> None:
        """Write the answer as it comes. Ctrl-C keeps what is there.

        Raises:
            FinetuneError: the prompt is refused or the answer failed; the question is forgotten then.
        """
        self.conversation.ask(question)
        began = time.monotonic()
        first = None
        try:
            stream = self.generator.stream(self.conversation.messages, self.sampling)
        except FinetuneError:
            self.conversation.take_back()
            raise
        try:
            while True:
                try:
                    for piece in stream:
                        first = first or time.monotonic()
                        self._write(visible(piece))
                    break
                except KeyboardInterrupt:
                    stream.cancel()  # the pieces end, and the answer is what was written
        except FinetuneError:
            self.conversation.take_back()
            self._write("\n")
            raise
        answer = stream.answer
        assert answer is not None
        self._write("\n")
        self.conversation.answer(answer.text)
        now = time.monotonic()
        self.answers.append((answer, (first or now) - began, now - began))
        if answer.finish_reason == "cancelled":
            self._tell(texts.STOPPED)
        elif answer.finish_reason == "length":
            self._tell(texts.CUT)

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
        name, _, rest = line.partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "/reset": self._reset,
            "/system": self._system,
            "/save": self._save,
            "/load": self._load,
            "/stats": self._stats,
            "/help": lambda _: self._write(texts.HELP[self.language] + "\n"),
            "/quit": self._quit,
            "/exit": self._quit,
        }
        if name not in commands:
            raise ConfigError(f"there is no command {visible(name)}", fix="/help lists them; // sends a slash")
        commands[name](rest.strip())

    def _reset(self, _: str) -> None:
        self.conversation.reset()
        self._tell(texts.FORGOTTEN)

    def _system(self, text: str) -> None:
        if not text:
            self._say(visible(self.conversation.system) or texts.NO_SYSTEM[self.language])
            return
        self.conversation = Conversation(text)
        self._tell(texts.SYSTEM_SET)

    def _save(self, name: str) -> None:
        path = _path(name, "/save")
        self.conversation.save(path, model=self.generator.name)
        self._tell(texts.SAVED, turns=len(self.conversation.turns) // 2, path=path)

    def _load(self, name: str) -> None:
        path = _path(name, "/load")
        self.conversation = Conversation.load(path)
        self._tell(texts.LOADED, turns=len(self.conversation.turns) // 2, path=path)

    def _stats(self, _: str) -> None:
        if not self.answers:
            self._tell(texts.NO_ANSWER)
            return
        last, first_seconds, seconds = self.answers[-1]
        self._tell(
            texts.STATS,
            prompt=last.prompt_tokens,
            generated=last.completion_tokens,
            seconds=seconds,
            rate=last.completion_tokens / seconds,
            first=first_seconds,
            answers=len(self.answers),
            tokens=sum(answer.completion_tokens for answer, _, _ in self.answers),
            all_seconds=sum(whole for _, _, whole in self.answers),
            used=last.prompt_tokens + last.completion_tokens,
            context=self.generator.context_tokens,
        )

    def _quit(self, _: str) -> None:
        raise Ending

    # ------------------------------------------------------------ output

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def _tell(self, text: Text, **values: object) -> None:
        self._say(text[self.language].format(**values))

    def _say(self, text: str) -> None:
        """Words that are ours, not the model's."""
        self._write(f"\033[2m{text}\033[0m\n" if self._colour else f"[{text}]\n")


def _path(name: str, command: str) -> Path:
    if not name:
        raise ConfigError("no file is named", command, f"{command} FILE")
    return Path(name).expanduser()


def ask_once(generator: Generator, conversation: Conversation, prompt: str, sampling: Sampling, *, raw: bool) -> int:
    """Print the answer to one prompt. Ctrl-C: 130, as shells have it."""
    if not raw:
        conversation.ask(prompt)
    stream = generator.stream(prompt if raw else conversation.messages, sampling)
    show = visible if sys.stdout.isatty() else str  # a file or pipe gets what the model wrote
    try:
        for piece in stream:
            sys.stdout.write(show(piece))
            sys.stdout.flush()
    except KeyboardInterrupt:
        stream.cancel()
        sys.stdout.write("\n")
        return 130
    sys.stdout.write("\n")
    return int(ExitCode.DONE)


def make_chat_parser() -> argparse.ArgumentParser:
    parser = make_parser("chat", "Talk to a model in the terminal.", "In the chat, /help lists the commands.")
    add_sampling_flags(parser)
    talk = parser.add_argument_group("conversation")
    talk.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    talk.add_argument("--prompt", metavar="TEXT", help="ask this, print the answer and leave; - reads standard input")
    talk.add_argument("--raw", action="store_true", help="with --prompt: go on from the bare text, without template")
    talk.add_argument("--lang", choices=("en", "zh"), help="language of the chat's own words (the locale's)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0: done; 1: an answer failed; 2: refused before the model was loaded or asked."""
    options = make_chat_parser().parse_args(with_dashes(sys.argv[1:] if argv is None else argv))
    if options.raw and (options.prompt is None or options.system):
        raise ConfigError("--raw goes on from one text", "--raw", "use it with --prompt and without --system")
    changes, language = sampling_changes(options), pick_language(options.lang)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    if prompt is not None and not prompt.strip():
        raise ConfigError("the prompt is empty", "--prompt", "give a text, or - and a text on standard input")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that has not all characters gets question marks
    with _loaded(options, max_batch=1) as generator:
        sampling = generator.default_sampling.changed(**changes)
        conversation = Conversation(options.system)
        if prompt is not None:
            return ask_once(generator, conversation, prompt.rstrip("\n"), sampling, raw=options.raw)
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() edits lines and remembers them, in memory only)
        TerminalChat(generator, sampling, conversation, language=language).run()
    return int(ExitCode.DONE)


@contextlib.contextmanager
def _loaded(options: Any, *, max_batch: int) -> Iterator[Generator]:
    from finetune.runtime.device import probe_torch_npu

    probe_torch_npu()
    from finetune.inference.generation import load_for_generation

    with load_for_generation(
        options.model,
        options.adapter,
        options.device_type,
        options.dtype,
        template=options.template,
        max_batch=max_batch,
        context_tokens=options.context_tokens,
        trust_remote_code=options.trust_remote_code,
    ) as generator:
        yield generator
