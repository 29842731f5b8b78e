"""One function over many items in several processes: results in order, bounded memory, no process
left behind.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from finetune.errors import FinetuneError
from finetune.runtime.host import usable_cores

# Items in flight per process: enough that none waits, few enough that results do not pile up.
_AHEAD = 3

Apply = Callable[[Iterable[Any]], Iterator[tuple[Any, Any]]]
_job: Callable[[Any], Any] | None = None


def worker_count(requested: int | None, input_bytes: int, bytes_per_worker: int) -> int:
    """Return the number of processes that is requested or, if None is, that pays.

    Args:
        bytes_per_worker: below this, starting another process costs more than it saves.
    """
    return requested or max(1, min(usable_cores(), input_bytes // bytes_per_worker))


@contextmanager
def ordered_map(
    job: Callable[[Any], Any],
    num_workers: int,
    *,
    start: str = "spawn",
    option: str = "--num-workers",
) -> Iterator[Apply]:
    """`with ordered_map(job, n) as apply: for item, result in apply(items)`: `job(item)` of each
    item, in order.

    Args:
        job: called in every process; sent there once, so it may be large. With one worker it is
            called here.
        num_workers: processes.
        start: how they begin; "fork" if the caller's main module may be a script that must not run
            again.
        option: what sets the number of processes, for the message.

    Raises:
        FinetuneError: a process was killed; and what `job` raises.
    """
    if num_workers == 1:
        yield lambda items: ((item, job(item)) for item in items)
        return
    pool = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context(start),
        initializer=_start,
        initargs=(job,),
    )
    try:
        yield lambda items: _in_order(pool, items, num_workers * _AHEAD)
    except BrokenProcessPool as error:
        raise FinetuneError(
            "a worker process ended by itself; most often the system killed it because memory"
            " ran out",
            "the worker processes",
            f"run the same command again with a smaller {option}: it resumes with the unfinished"
            " shard",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, items: Iterable[Any], max_ahead: int
) -> Iterator[tuple[Any, Any]]:
    """Yield each item with its result, in order, with at most `max_ahead` items in flight."""
    waiting: deque[Any] = deque()
    for item in items:
        waiting.append((item, pool.submit(_run, item)))
        if len(waiting) >= max_ahead:
            first, future = waiting.popleft()
            yield first, future.result()
    for item, future in waiting:
        yield item, future.result()


def _start(job: Callable[[Any], Any]) -> None:
    """Set up a worker process."""
    global _job
    _job = job
    # Ctrl-C reaches the whole group; the parent ends us
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent ends, even if that is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(item: Any) -> Any:
    assert _job is not None
    return _job(item)
