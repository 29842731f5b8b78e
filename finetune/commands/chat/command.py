"""`python -m finetune chat`: talk to a model in the terminal, or ask it one thing."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from finetune.commands.chat.sessions import ChatSession
from finetune.commands.chat.terminal import TerminalChat, visible
from finetune.config.fields import PathOption, setting
from finetune.config.options import read_options
from finetune.data.report import RecordProblem
from finetune.data.tools import protocol_calls, read_tools
from finetune.errors import INTERRUPTED, ConfigError, DataError, ExitCode
from finetune.inference.options import ModelOptions
from finetune.inference.sampling import Sampling
from finetune.runtime.language import _, pick_language, speak
from finetune.storage.durable_files import read_bytes

if TYPE_CHECKING:
    from finetune.inference.generation import Generator

_LARGEST_TOOLS_BYTES = 1 << 20

sampling_option = partial(setting, group="sampling")
talk_option = partial(setting, group="conversation")


class ChatOptions(ModelOptions):
    usage: ClassVar[str] = (
        "python -m finetune chat --model FOLDER|ID [--prompt TEXT] [--flag value ...]"
    )
    summary: ClassVar[
        str
    ] = """Talk to a model in the terminal; in the chat, /help lists the commands.
Sampling that is not given is as the model's generation_config.json says."""
    epilog: ClassVar[str] = "Exit code: 0 done; 1 an answer failed; 2 refused; 130 interrupted."
    groups: ClassVar[tuple[str, ...]] = ("model", "sampling", "conversation")

    temperature: float | None = sampling_option(
        None, unit="X", description="0 takes the likeliest token always."
    )
    top_p: float | None = sampling_option(
        None, unit="X", description="Draw from the likeliest tokens with this share."
    )
    top_k: int | None = sampling_option(
        None, unit="N", description="Draw from this many likeliest tokens; 0 for all."
    )
    repetition_penalty: float | None = sampling_option(None, unit="X", description="1 for none.")
    max_new_tokens: int | None = sampling_option(
        None, unit="N", description="Most tokens of an answer."
    )
    seed: int | None = sampling_option(
        None, unit="N", description="The same seed gives the same answer."
    )
    system: str = talk_option(
        "",
        unit="TEXT",
        shown_default="none",
        description="System prompt.",
    )
    prompt: str | None = talk_option(
        None, unit="TEXT", description="Print the answer to this and leave; - reads stdin."
    )
    tools: PathOption | None = talk_option(
        None,
        unit="FILE",
        shown_default="none",
        description="JSON list of functions that answers may call; results are asked for.",
    )
    raw: bool = talk_option(
        False, description="With --prompt: continue the bare text, without template."
    )
    lang: Literal["en", "zh"] | None = talk_option(
        None, unit="en|zh", shown_default="the locale's", description="Of the chat's own texts."
    )

    def problems(self) -> list[tuple[str, str]]:
        found = super().problems()
        if self.raw and (self.prompt is None or self.system or self.tools):
            found.append(
                (
                    "--raw continues one text",
                    "use it with --prompt and without --system and --tools",
                )
            )
        try:
            Sampling().changed(**self.sampling())
        except ConfigError as error:
            found.append((error.what, error.fix))
        return found

    def sampling(self) -> dict[str, Any]:
        """Return the sampling options; None if the model's own setting counts."""
        names = ("temperature", "top_p", "top_k", "repetition_penalty", "max_new_tokens", "seed")
        return {name: getattr(self, name) for name in names}


def load_tools(path: Path | None) -> list[dict[str, Any]]:
    """Return the functions of a file, in the form of OpenAI's protocol.

    Raises:
        DataError: it cannot be read, or is no list of functions.
    """
    if path is None:
        return []
    fix = "give a JSON list of functions with name, description and parameters"
    try:
        given = json.loads(read_bytes(path, _LARGEST_TOOLS_BYTES))
        return [dict(tool) for tool in read_tools(given, "the file")]
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", str(path), fix) from error
    except (ValueError, RecursionError, RecordProblem) as error:  # not JSON, or no functions
        raise DataError(f"not a list of tools: {error}", str(path), fix) from error


def ask_once(
    generator: Generator,
    session: ChatSession,
    prompt: str,
    sampling: Sampling,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    raw: bool,
) -> int:
    """Print the answer to one prompt, and its calls as a line of JSON. Ctrl-C: 130, as shells have
    it.
    """
    if not raw:
        session.ask(prompt)
    stream = generator.stream(prompt if raw else session.messages, sampling, tools=tools)
    show = visible if sys.stdout.isatty() else str  # a file or pipe gets what the model wrote
    try:
        for piece in stream:
            sys.stdout.write(show(piece))
            sys.stdout.flush()
    except KeyboardInterrupt:
        stream.cancel()
        sys.stdout.write("\n")
        return INTERRUPTED
    calls = stream.answer.calls if stream.answer else ()
    sys.stdout.write("\n" if stream.answer is None or stream.answer.text or not calls else "")
    if calls:
        sys.stdout.write(show(json.dumps(protocol_calls(calls), ensure_ascii=False)) + "\n")
    return int(ExitCode.DONE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. 0: done; 1: an answer failed; 2: refused before the model was loaded or
    asked.
    """
    options = read_options(ChatOptions, argv)
    speak(pick_language(options.lang))
    tools = load_tools(options.tools)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    if prompt is not None and not prompt.strip():
        raise ConfigError(
            "the prompt is empty", "--prompt", "give a text, or - and a text on standard input"
        )
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # a terminal that has not all characters gets question marks
            stream.reconfigure(errors="replace")
    from finetune.runtime.launch_environment import probe_torch_npu

    probe_torch_npu()
    from finetune.inference.generation import load_for_generation

    if sys.stderr.isatty():
        name = visible(str(options.model or options.adapter))
        sys.stderr.write(_("loading {model}").format(model=name) + "\n")
    with load_for_generation(**options.loading(), max_batch=1) as generator:
        sampling = generator.default_sampling.changed(**options.sampling())
        session = ChatSession(options.system)
        if tools:
            # raises where its template writes no calls
            generator.render([{"role": "user", "content": "?"}], tools)
        if prompt is not None:
            return ask_once(
                generator, session, prompt.rstrip("\n"), sampling, tools=tools, raw=options.raw
            )
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() edits lines and remembers them, in memory only)
        TerminalChat(generator, sampling, session, tools=tools).run()
    return int(ExitCode.DONE)
