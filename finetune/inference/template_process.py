"""The process that renders chat templates for a server. `limited_template.py` starts it and
exchanges lines with it.

JSON, a line each. First {"memory_bytes": most beyond what is there at the start, "characters": most
of a text}, which {"is": "ready"} answers; then {"source": template, "turns": [...], "tools": [...]
or null, "variables": {...}}, which one of these answers:

    {"is": "text", "text": ...}
    {"is": "refused", "reason": ...}       the template refuses the messages or fails on them
    {"is": "exceeded", "reason": ...}      it takes more than it may
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from finetune.runtime.launch_environment import LaunchWorld
from finetune.runtime.parent_watchdog import die_with_launcher


def main() -> int:
    """Answer until the input ends."""
    die_with_launcher(LaunchWorld(0, 0, 1, 1, launched=True))
    # Ctrl-C reaches the whole terminal; our input ends in order
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get between our lines
    limits = json.loads(sys.stdin.buffer.readline())
    import transformers.utils.chat_template_utils  # noqa: F401  before the limit: what it takes is not the template's

    _limit_memory(limits["memory_bytes"])
    _say(out, {"is": "ready"})
    for line in sys.stdin.buffer:
        _say(out, _render(json.loads(line), limits))
    return 0


def _say(out: Any, message: dict[str, str]) -> None:
    out.write(json.dumps(message).encode() + b"\n")
    out.flush()


def _render(asked: dict[str, Any], limits: dict[str, int]) -> dict[str, str]:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        (text,), _ = render_jinja_template(
            conversations=[asked["turns"]],
            chat_template=asked["source"],
            tools=asked["tools"],
            **asked["variables"],
        )
        if len(text) > limits["characters"]:
            return {
                "is": "exceeded",
                "reason": f"writes {len(text)} characters; at most {limits['characters']} may be",
            }
        return {"is": "text", "text": text}
    except MemoryError:
        return {
            "is": "exceeded",
            "reason": f"needs more than {limits['memory_bytes'] >> 20} MiB of memory",
        }
    except Exception as error:  # a template may raise anything; it is said where it was asked for
        return {
            "is": "refused",
            "reason": (str(error).splitlines() or [type(error).__name__])[0][:200],
        }


def _limit_memory(more_bytes: int) -> None:
    """Where the system offers it; elsewhere the time limit is what holds."""
    if sys.platform != "linux":
        return
    import resource

    with open("/proc/self/statm", encoding="ascii") as file:
        used_bytes = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + more_bytes, used_bytes + more_bytes))


if __name__ == "__main__":
    sys.exit(main())
