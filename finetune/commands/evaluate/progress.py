"""How far a part of an evaluation is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from finetune.runtime.terminal import console as terminal_console

Progress = Callable[[int], None]


@contextmanager
def progress(title: str, total: int) -> Iterator[Progress]:
    """A bar on a terminal's standard error; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.progress import Progress as Bars

    with Bars(console=terminal_console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=total)
        yield lambda count: bars.advance(task, count)
