"""`python -m finetune chat`: talk to a model in the terminal, or ask it one thing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from finetune.commands.chat.sessions import ChatSession
from finetune.commands.chat.terminal import TerminalChat, visible
from finetune.config.fields import setting
from finetune.config.options import read_options
from finetune.errors import ConfigError, ExitCode
from finetune.inference.options import ModelOptions
from finetune.inference.sampling import Sampling
from finetune.runtime.language import pick_language, speak

if TYPE_CHECKING:
    from finetune.inference.generation import Generator

sampling_option = partial(setting, group="sampling")
talk_option = partial(setting, group="conversation")


class ChatOptions(ModelOptions):
    usage: ClassVar[str] = "python -m finetune chat --model FOLDER|ID [--prompt TEXT] [--flag value ...]"
    summary: ClassVar[str] = """Talk to a model in the terminal; in the chat, /help lists the commands.
Sampling that is not given is as the model's generation_config.json says."""
    epilog: ClassVar[str] = "Exit code: 0 done; 1 an answer failed; 2 refused; 130 interrupted."
    groups: ClassVar[tuple[str, ...]] = ("model", "sampling", "conversation")

    temperature: float | None = sampling_option(None, unit="X", description="0 takes the likeliest token always.")
    top_p: float | None = sampling_option(None, unit="X", description="Draw from the likeliest tokens with this share.")
    top_k: int | None = sampling_option(None, unit="N", description="Draw from this many likeliest tokens; 0 for all.")
    repetition_penalty: float | None = sampling_option(None, unit="X", description="1 for none.")
    max_new_tokens: int | None = sampling_option(None, unit="N", description="Most tokens of an answer.")
    seed: int | None = sampling_option(None, unit="N", description="The same seed gives the same answer.")
    system: str = talk_option("", unit="TEXT", shown_default="none", description="System prompt.")
    prompt: str | None = talk_option(
        None, unit="TEXT", description="Print the answer to this and leave; - reads stdin."
    )
    raw: bool = talk_option(False, description="With --prompt: continue the bare text, without template.")
    lang: Literal["en", "zh"] | None = talk_option(
        None, unit="en|zh", shown_default="the locale's", description="Of the chat's own texts."
    )

    def problems(self) -> list[tuple[str, str]]:
        found = super().problems()
        if self.raw and (self.prompt is None or self.system):
            found.append(("--raw continues one text", "use it with --prompt and without --system"))
        try:
            Sampling().changed(**self.sampling())
        except ConfigError as error:
            found.append((error.what, error.fix))
        return found

    def sampling(self) -> dict[str, Any]:
        """The sampling options; None where the model's own setting counts."""
        names = ("temperature", "top_p", "top_k", "repetition_penalty", "max_new_tokens", "seed")
        return {name: getattr(self, name) for name in names}


def ask_once(generator: Generator, session: ChatSession, prompt: str, sampling: Sampling, *, raw: bool) -> int:
    """Print the answer to one prompt. Ctrl-C: 130, as shells have it."""
    if not raw:
        session.ask(prompt)
    stream = generator.stream(prompt if raw else session.messages, sampling)
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


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0: done; 1: an answer failed; 2: refused before the model was loaded or asked."""
    options = read_options(ChatOptions, argv)
    speak(pick_language(options.lang))
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    if prompt is not None and not prompt.strip():
        raise ConfigError("the prompt is empty", "--prompt", "give a text, or - and a text on standard input")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that has not all characters gets question marks
    from finetune.runtime.device import probe_torch_npu

    probe_torch_npu()
    from finetune.inference.generation import load_for_generation

    with load_for_generation(**options.loading(), max_batch=1) as generator:
        sampling = generator.default_sampling.changed(**options.sampling())
        session = ChatSession(options.system)
        if prompt is not None:
            return ask_once(generator, session, prompt.rstrip("\n"), sampling, raw=options.raw)
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() edits lines and remembers them, in memory only)
        TerminalChat(generator, sampling, session).run()
    return int(ExitCode.DONE)
