"""A worker process: one model on one device. `workers.py` starts it and exchanges messages with it.

Each message is a line of JSON. The worker reads (standard input):

    {"do": "load", "model": ..., ...}             first; arguments of load_for_generation
    {"do": "answer", "id": ..., "prompt": ..., "tools": [...], "sampling": {...}}
    {"do": "cancel", "id": ...}

and writes (standard output):

    {"is": "ready", "name": ..., "context_tokens": ..., "sampling": {...}}
    {"is": "failed", "error": {...}}              instead of ready
    {"is": "accepted", "id": ..., "prompt_tokens": n}
    {"is": "refused", "id": ..., "kind": ..., "error": {...}}    instead of accepted
    {"is": "piece", "id": ..., "text": ...}
    {"is": "end", "id": ..., "text": the whole answer, "finish_reason": ..., "prompt_tokens": n,
        "completion_tokens": n, "calls": [...]}   tool calls in the form of the protocol
    {"is": "error", "id": ..., "message": ...}    the answer failed
    {"is": "alive"}                               a heartbeat, every CHECK_SECONDS

It exits when its input ends. If its engine fails for good, it exits with code 1 and is restarted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, BinaryIO

from finetune.errors import FinetuneError
from finetune.runtime.launch_environment import LaunchWorld
from finetune.runtime.parent_watchdog import die_with_launcher

if TYPE_CHECKING:
    from finetune.inference.answer import GenerationError
    from finetune.inference.generation import Answer, Generation, Generator

CPU_NICENESS = 5  # the process that serves the clients comes first
CHECK_SECONDS = 0.5


class Worker:
    """Handles the requests of one stream and writes events to another."""

    def __init__(self, generator: Generator, out: BinaryIO) -> None:
        self.generator = generator
        self._out = out
        self._lock = threading.Lock()
        self._running: dict[str, Generation] = {}

    def send(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        # the server has ended; then our input ends too
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._out.write(line)
            self._out.flush()

    def handle(self, message: dict[str, Any]) -> None:
        identity = message["id"]
        if message["do"] == "cancel":
            if (generation := self._running.pop(identity, None)) is not None:
                generation.cancel()
            return
        # Held until "accepted" is sent, which comes before all pieces. Reentrant, because an engine
        # that has ended reports its error while the answer starts.
        lock = threading.RLock()

        def on_piece(piece: str, answer: Answer | None, error: GenerationError | None) -> None:
            with lock:
                if answer is not None or error is not None:
                    self._running.pop(identity, None)
                for event in _events(identity, piece, answer, error):
                    self.send(event)

        with lock:
            try:
                given = message["sampling"]
                stop = {"stop": tuple(given["stop"])} if "stop" in given else {}
                sampling = self.generator.default_sampling.changed(**given | stop)
                generation = self.generator.start(
                    message["prompt"], sampling, on_piece, tools=message["tools"]
                )
            except FinetuneError as error:
                kind = type(error).__name__
                self.send(
                    {
                        "is": "refused",
                        "id": identity,
                        "kind": kind,
                        "error": describe(error),
                    }
                )
                return
            self._running[identity] = generation
            self.send(
                {
                    "is": "accepted",
                    "id": identity,
                    "prompt_tokens": generation.prompt_tokens,
                }
            )


def _events(
    identity: str, piece: str, answer: Answer | None, error: GenerationError | None
) -> list[dict[str, Any]]:
    from finetune.data.tools import protocol_calls

    if error is not None:
        return [
            {
                "is": "error",
                "id": identity,
                "message": error.what,
            }
        ]
    events: list[dict[str, Any]] = (
        [
            {
                "is": "piece",
                "id": identity,
                "text": piece,
            }
        ]
        if piece
        else []
    )
    if answer is not None:
        end = dataclasses.asdict(answer)
        del end["token_ids"]
        end["calls"] = protocol_calls(answer.calls)
        events.append(
            {
                "is": "end",
                "id": identity,
                **end,
            }
        )
    return events


def describe(error: FinetuneError) -> dict[str, str]:
    return {
        "what": error.what,
        "where": error.where,
        "fix": error.fix,
    }


def main() -> int:
    """Load the model, then answer until the input ends."""
    die_with_launcher(LaunchWorld(0, 0, 1, 1, launched=True))
    # Ctrl-C reaches every process of the terminal; the server ends us
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not get between our lines
    lines = sys.stdin.buffer
    settings = json.loads(lines.readline())
    assert settings.pop("do") == "load"
    try:
        from finetune.inference.generation import load_for_generation

        generator = load_for_generation(**settings, limit_template=True)
    except FinetuneError as error:
        out.write(json.dumps({"is": "failed", "error": describe(error)}).encode() + b"\n")
        out.flush()
        return int(error.exit_code)
    if generator.model.device.type == "cpu" and hasattr(os, "nice"):
        os.nice(CPU_NICENESS)
    worker = Worker(generator, out)
    about = {"name": generator.name, "context_tokens": generator.context_tokens}
    worker.send(
        {
            "is": "ready",
            **about,
            "sampling": dataclasses.asdict(generator.default_sampling),
        }
    )
    threading.Thread(
        target=_send_heartbeats,
        args=(worker,),
        name="check",
        daemon=True,
    ).start()
    for line in lines:
        worker.handle(json.loads(line))
    os._exit(0)  # no one reads any more: do not wait for threads and devices


def _send_heartbeats(worker: Worker) -> None:
    """Send heartbeats; exit if the engine has failed for good, so that a restart begins with a
    clean device.
    """
    while worker.generator.engine.alive:
        worker.send({"is": "alive"})
        time.sleep(CHECK_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
