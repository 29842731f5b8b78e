"""Calls into libraries that may never return: a lost device, a pulled cable."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

_T = TypeVar("_T")


def in_thread(call: Callable[[], _T], name: str | None = None) -> Future[_T]:
    """Begin a call in a thread; the result or error is the future's. The process may end before it
    returns.
    """
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def call_with_timeout(call: Callable[[], _T], seconds: float) -> _T:
    """The result of a call; signals are handled meanwhile.

    Raises:
        TimeoutError: it took longer. The call stays in its thread and is forgotten.
    """
    future = in_thread(call)
    if not wait([future], timeout=max(0.0, seconds)).done:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return future.result()
