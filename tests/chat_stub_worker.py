"""A worker without a model: it speaks like finetune.commands.serve.worker_process and answers as
the last message asks.

say TEXT        writes TEXT, a few characters at a time
slow N          writes N words, 20 a second
die             the process ends by SIGKILL
refuse          refuses the prompt as too long
fail            the answer fails
call NAME JSON  calls the tool NAME with these arguments
history         writes the prompt and the tools that it was given, as JSON
anything else   comes back as it is
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

_lock = threading.Lock()
_cancelled: set[str] = set()


def say(message: dict) -> None:
    with _lock:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


def answer(identity: str, prompt: object, sampling: dict, tools: list) -> None:
    words = prompt[-1]["content"] if isinstance(prompt, list) else str(prompt)
    kind, _, rest = words.partition(" ")
    calls = []
    if kind == "call" and tools:
        name, _, arguments = rest.partition(" ")
        function = {"name": name, "arguments": arguments}
        calls, words = [{"id": "c00000001", "type": "function", "function": function}], ""
    if kind == "history":
        words = json.dumps({"prompt": prompt, "tools": tools})
    if kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "refuse":
        error = {"what": "the prompt is too long", "where": "prompt", "fix": ""}
        say({"is": "refused", "id": identity, "kind": "PromptTooLong", "error": error})
        return
    say({"is": "accepted", "id": identity, "prompt_tokens": 5})
    if kind == "fail":
        say({"is": "error", "id": identity, "message": "the answer failed: made to"})
        return
    if kind == "slow":
        pieces, pause = [f"word{number} " for number in range(int(rest))], 0.05
    else:
        text, pause = rest if kind == "say" else words, 0.0
        pieces = [text[at : at + 7] for at in range(0, len(text), 7)]
    pieces = pieces[: sampling["max_new_tokens"]]
    text = ""
    for piece in pieces:
        if identity in _cancelled:
            return
        text += piece
        say({"is": "piece", "id": identity, "text": piece})
        time.sleep(pause)
    reason = "tool_calls" if calls else "stop"
    end = {"is": "end", "id": identity, "text": text, "finish_reason": reason, "calls": calls}
    say({**end, "prompt_tokens": 5, "completion_tokens": len(pieces)})


def show_life() -> None:
    while True:
        time.sleep(0.2)
        say({"is": "alive"})


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    if settings.get("model") == "broken":
        error = {"what": "no such model", "where": "--model", "fix": "another"}
        say({"is": "failed", "error": error})
        return
    sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": None}
    threading.Thread(target=show_life, daemon=True).start()
    say({"is": "ready", "name": "stub", "context_tokens": 4096, "sampling": sampling})
    for line in sys.stdin:
        message = json.loads(line)
        if message["do"] == "cancel":
            _cancelled.add(message["id"])
        else:
            arguments = (message["id"], message["prompt"], message["sampling"], message["tools"])
            threading.Thread(target=answer, args=arguments, daemon=True).start()
    os._exit(0)


if __name__ == "__main__":
    main()
