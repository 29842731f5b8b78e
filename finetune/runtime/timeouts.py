"""Calls into libraries that may never return: a lost device, a pulled cable."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


def call_with_timeout(call: Callable[[], _T], seconds: float) -> _T:
    """The result of a call; signals are handled meanwhile.

    Raises:
        TimeoutError: it took longer. The call stays in its thread and is forgotten.
    """
    answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((True, call()))
        except Exception as error:
            answers.put((False, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        succeeded, result = answers.get(timeout=max(0.0, seconds))
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None
    if not succeeded:
        raise result
    return result
