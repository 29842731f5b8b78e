"""Chat templates with limits: a template is a program that came with the model, and a server runs
it for each request.

transformers' sandbox keeps it from the system, not from computing for ever ({% for %} in {% for %})
or filling the memory ('%2000000000d', a text doubled again and again). Nothing inside a process
stops all of that, so it runs in one of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from finetune.errors import DataError

RENDER_SECONDS = 5.0
MEMORY_BYTES = 512 << 20
CHARACTERS = 16 << 20
START_SECONDS = 120.0
COMMAND = (sys.executable, "-m", "finetune.inference.template_process")


def limit_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let the tokenizer render its chat template in a process with limits from now on.

    A tokenizer class with a way of its own keeps it: it has none of these programs, or runs code of
    the model anyway.
    """
    if type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template:
        tokenizer.apply_chat_template = TemplateProcess(
            tokenizer.special_tokens_map, RENDER_SECONDS
        ).render


class TemplateProcess:
    """Renders chat templates in a process of its own; a new one is started after one had to be
    ended.

    `variables` are those of every template: the special tokens.
    """

    def __init__(self, variables: Mapping[str, Any], seconds: float) -> None:
        self._variables = dict(variables)
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._start()  # at once: it gets ready while the model is loaded

    def render(
        self,
        turns: Sequence[Mapping[str, Any]],
        *,
        chat_template: str,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """As the tokenizer's `apply_chat_template`.

        Raises:
            jinja2.TemplateError: the template refuses the messages or fails on them.
            DataError: it takes more time or memory or writes more than it may.
        """
        assert not tokenize
        variables = {**self._variables, "add_generation_prompt": add_generation_prompt}
        with self._lock:
            asked = {
                "source": chat_template,
                "turns": list(turns),
                "tools": tools,
                "variables": variables,
            }
            answer = self._ask(asked)
        if answer["is"] == "refused":
            raise jinja2.TemplateError(answer["reason"])
        if answer["is"] == "exceeded":
            raise _exceeded(answer["reason"])
        return answer["text"]

    def _ask(self, message: Mapping[str, Any]) -> dict[str, str]:
        if self._process is None:
            self._start()
        if not self._ready:
            self._read_line(START_SECONDS, "did not start")
            self._ready = True
        self._write_line(message)
        return json.loads(
            self._read_line(self._seconds, f"took longer than {self._seconds:g} seconds")
        )

    def _start(self) -> None:
        self._process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._ready = False
        self._write_line({"memory_bytes": MEMORY_BYTES, "characters": CHARACTERS})

    def _write_line(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; reading its answer says so
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _read_line(self, seconds: float, late: str) -> bytes:
        """Its next line; it is ended if none comes."""
        assert self._process is not None and self._process.stdout is not None
        pipe, line, end = self._process.stdout.fileno(), bytearray(), time.monotonic() + seconds
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
            part = os.read(pipe, 1 << 20) if readable else b""
            if not part:
                self.close()
                raise _exceeded("ended its process" if readable else late)
            line += part
        return bytes(line)

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _exceeded(reason: str) -> DataError:
    return DataError(
        f"the model's chat template {reason}",
        "messages",
        "shorten the conversation, or serve with another --template",
    )
