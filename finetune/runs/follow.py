"""A run's events as a stream, for other programs: `finetune.follow(RUN)`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.runs.line_follower import LineFollower
from finetune.runs.reader import json_object, open_run
from finetune.runs.view import ENDED


def follow(
    run: Path | str, *, steps: bool = False, poll_seconds: float = 1.0, resume_seconds: float = 0.0
) -> Iterator[dict[str, Any]]:
    """Yield the events of a run from the first on, each once, as they are written.

    The stream ends when the run has ended. An event is a line of `events.jsonl`
    (docs/reference/run_folder.md): its name is `event`, its time in seconds since 1970 is `time`. A
    run that is stopped and started again continues in the same stream, with `resume` and `start`.

    Args:
        run: a run folder, existing or about to be created; nothing is written into it.
        steps: also yield the lines of `trainer_log.jsonl`, as events named `step`. Steps that a
            resumed run trains again are yielded again.
        poll_seconds: time between two checks of the folder.
        resume_seconds: after a stop or a failure, wait this long for the run to be started again.

    Raises:
        StateError: there is no such run, and its folder cannot be created later.

    >>> import finetune
    >>> for event in finetune.follow("runs/example", steps=True):
    ...     if event["event"] in ("start", "step", "end"):
    ...         print(event["event"], event["step"])
    start 0
    step 1
    step 2
    end 2
    """
    reader = open_run(run, may_come=True)
    folder = reader.view.source
    events, lines = _FreshLines(folder / "events.jsonl"), _FreshLines(folder / "trainer_log.jsonl")
    ended_at: float | None = None
    while True:
        state = reader.poll().state
        fresh = events.poll()
        if steps:
            fresh = _merged([{"event": "step"} | line for line in lines.poll()], fresh)
        yield from fresh
        if fresh or state not in ENDED:
            ended_at = None
        elif ended_at is None:
            ended_at = time.monotonic()  # the last event is written after the state: one more look
        elif state == "done" or time.monotonic() - ended_at >= resume_seconds:
            return
        time.sleep(poll_seconds)


def _merged(steps: list[dict[str, Any]], events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge steps into events; an event about a step comes after the step."""
    merged, waiting = [], deque(steps)
    for event in events:
        step = event.get("step")
        if type(step) is int:
            while waiting and waiting[0].get("step", 0) <= step:
                merged.append(waiting.popleft())
        merged.append(event)
    return [*merged, *waiting]


class _FreshLines:
    """Returns new objects of a JSONL file, also after it was truncated and continued."""

    def __init__(self, path: Path) -> None:
        self._follower = LineFollower(path)
        self._given: list[int] = []  # hashes of the lines that are in the file

    def poll(self) -> list[dict[str, Any]]:
        fresh, place = [], len(self._given)
        for new in self._follower.pieces():
            place = 0 if new.restarted else place
            for line in new.lines:
                mark = hash(line)
                if self._given[place : place + 1] != [mark]:
                    self._given[place:] = [mark]
                    fresh.append(line)
                place += 1
        del self._given[place:]
        # After a crash a torn line that was written on holds no object.
        return [record for line in fresh if (record := json_object(line))]
