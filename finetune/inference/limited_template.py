"""Chat templates with limits: a template is a program that came with the model, and a server runs
it for each request.

transformers' sandbox protects the system, but not against endless computation ({% for %} in
{% for %}) or full memory ('%2000000000d', a string doubled again and again). Nothing inside a
process stops all of that, so templates are rendered in a separate process: `main` of this module.

The two exchange JSON, one object a line. The first line holds the limits; `{"ready": true}` answers
it. Each further line is a template with its messages, answered by one of

    {"text": ...}
    {"refused": reason}       the template rejects the messages or fails on them
    {"exceeded": reason}      it needs more than the limits allow
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2

from finetune.errors import DataError
from finetune.runtime.launch_environment import LaunchWorld
from finetune.runtime.parent_watchdog import die_with_launcher

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RENDER_SECONDS = 5.0
MEMORY_BYTES = 512 << 20
CHARACTERS = 16 << 20
START_SECONDS = 120.0
COMMAND = (sys.executable, "-m", "finetune.inference.limited_template")


def limit_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let the tokenizer render its chat template in a process with limits from now on.

    A tokenizer class with its own `apply_chat_template` keeps it: it has no such template, or runs
    code of the model anyway.
    """
    from transformers import PreTrainedTokenizerBase

    if type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template:
        process = TemplateProcess(tokenizer.special_tokens_map, RENDER_SECONDS)
        tokenizer.apply_chat_template = process.render


class TemplateProcess:
    """Renders chat templates in a separate process, which is replaced after it had to be killed.

    Args:
        variables: variables of every template: the special tokens.
        seconds: maximum time for one template.
    """

    def __init__(self, variables: Mapping[str, Any], seconds: float) -> None:
        self._variables = dict(variables)
        self._seconds = seconds
        self._lock = threading.Lock()
        self._ready = False
        # started now: it gets ready while the model is loaded
        self._process: subprocess.Popen[bytes] | None = self._started()

    def render(
        self,
        turns: Sequence[Mapping[str, Any]],
        *,
        chat_template: str,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Replace the tokenizer's `apply_chat_template`.

        Raises:
            jinja2.TemplateError: the template rejects the messages or fails on them.
            DataError: it exceeds a limit.
        """
        assert not tokenize
        request = {
            "conversations": [list(turns)],
            "chat_template": chat_template,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            **self._variables,
        }
        with self._lock:
            if self._process is None:
                self._process = self._started()
            if not self._ready:
                self._read_line(self._process, START_SECONDS, "did not start")
                self._ready = True
            _write_line(self._process, request)
            late = f"took longer than {self._seconds:g} seconds"
            answer = json.loads(self._read_line(self._process, self._seconds, late))
        if "refused" in answer:
            raise jinja2.TemplateError(answer["refused"])
        if "exceeded" in answer:
            raise _exceeded(answer["exceeded"])
        return answer["text"]

    def _started(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._ready = False
        _write_line(process, {"memory_bytes": MEMORY_BYTES, "characters": CHARACTERS})
        return process

    def _read_line(self, process: subprocess.Popen[bytes], seconds: float, late: str) -> bytes:
        """Return the next line of the process, which is killed if none comes."""
        assert process.stdout is not None
        pipe = process.stdout.fileno()
        line = bytearray()
        end = time.monotonic() + seconds
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
            part = os.read(pipe, 1 << 20) if readable else b""
            if not part:
                self.close()
                raise _exceeded("ended its process" if readable else late)
            line += part
        return bytes(line)

    def close(self) -> None:
        """Kill the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _write_line(process: subprocess.Popen[bytes], message: Mapping[str, Any]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended; reading its answer reports that
        process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.flush()


def _exceeded(reason: str) -> DataError:
    return DataError(
        f"the model's chat template {reason}",
        "messages",
        "shorten the conversation, or serve with another --template",
    )


# ---------------------------------------------------------------- in the process


def main() -> None:
    """Answer until the input ends."""
    die_with_launcher(LaunchWorld(0, 0, 1, 1, launched=True))
    # Ctrl-C reaches all processes of the terminal; this one ends when its input does
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # what a library prints must not get between our lines
    limits = json.loads(sys.stdin.buffer.readline())
    # Before the limit: the memory that the import takes is not the template's.
    import transformers.utils.chat_template_utils  # noqa: F401

    _limit_memory(limits["memory_bytes"])
    print('{"ready": true}', file=out, flush=True)
    for line in sys.stdin.buffer:
        print(json.dumps(_render(json.loads(line), limits)), file=out, flush=True)


def _render(request: dict[str, Any], limits: dict[str, int]) -> dict[str, str]:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        (text,), _ = render_jinja_template(**request)
    except MemoryError:
        return {"exceeded": f"needs more than {limits['memory_bytes'] >> 20} MiB of memory"}
    except Exception as error:  # a template may raise anything; the server reports it
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        return {"refused": first_line[:200]}
    if len(text) > limits["characters"]:
        limit = limits["characters"]
        return {"exceeded": f"writes {len(text)} characters; at most {limit} may be"}
    return {"text": text}


def _limit_memory(more_bytes: int) -> None:
    """Limit the address space on Linux; elsewhere only the time limit holds."""
    if sys.platform != "linux":
        return
    import resource

    with open("/proc/self/statm", encoding="ascii") as file:
        used_bytes = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + more_bytes, used_bytes + more_bytes))


if __name__ == "__main__":
    main()
