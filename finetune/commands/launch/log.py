"""The log of a launch: a file that its processes write into, and a console that follows the file.

The processes write into the file themselves, so neither a killed supervisor nor a stuck or closed
terminal can stop them or make them fail.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from finetune.runs.line_follower import LineFollower

FOLLOW_SECONDS = 0.2

_RANK = re.compile(rb"^\[(?:rank|default)\d+\]: ?")
_TRACEBACK = re.compile(
    rb"^Traceback \(most recent call last\):|^Exception raised from |^frame #\d+: "
)
# Inside a traceback: indented code, what links two of them, C++ frames, blank lines.
_INSIDE = re.compile(
    rb"^\s|^$|^(?:During handling of the above exception|The above exception was the direct"
    rb" cause)|^frame #\d+: "
)
# What torch elastic and C++ print about their own work: useful in the file, not on the console.
_TORCH_OUTPUT = re.compile(
    rb"^[IWE]\d{4} \d\d:\d\d:\d\d\S* \d+ \S*torch/|^\[[IWE]\d{3,4} [\d:]+\S*"
    rb" \S+\.(?:cpp|hpp|h):\d+\]|^<omitting python frames>$"
)


class TracebackFold:
    """Leaves out tracebacks except for the line that names the error, rank by rank.

    Attributes:
        folded: lines left out.
    """

    def __init__(self) -> None:
        self.folded = 0
        self._inside: set[bytes] = set()

    def shows(self, line: bytes) -> bool:
        """Return whether this line, the next of the log, is for the console."""
        found = _RANK.match(line)
        rank = found[0] if found else b""
        text = line[len(rank) :]
        if _TRACEBACK.match(text):
            self._inside.add(rank)
        elif rank in self._inside and not _INSIDE.match(text):
            self._inside.remove(rank)
            return True
        hidden = rank in self._inside or bool(_TORCH_OUTPUT.match(text))
        self.folded += hidden
        return not hidden


class LaunchLog:
    """The log file, made new.

    A context manager: while it is entered, the console shows what is written. If the console is
    standard output, the output of this process and of those that it starts goes into the file.

    Args:
        path: the file; its folder is made if it is missing.
        console: where to copy it; standard output by default.
    """

    def __init__(self, path: Path, console: BinaryIO | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self.descriptor = os.open(path, flags, 0o666)
        self._outputs = [os.dup(1), os.dup(2)] if console is None else []
        self._console = os.fdopen(os.dup(1), "wb") if console is None else console
        self._follower = LineFollower(path)
        self._fold = TracebackFold()
        self._turn = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="console", daemon=True)

    def __enter__(self) -> LaunchLog:
        self._redirect([self.descriptor] * len(self._outputs))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._redirect(self._outputs)
        self._show()
        os.close(self.descriptor)

    def _redirect(self, targets: Sequence[int]) -> None:
        """Let standard output and error, if there are targets, write to these descriptors."""
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, target in zip((1, 2), targets, strict=False):
            os.dup2(target, descriptor)

    def write(self, tag: str, text: str) -> None:
        """Write `[TAG] text`; further lines of the text are indented."""
        lines = f"[{tag}] " + text.replace("\n", "\n  ") + "\n"
        os.write(self.descriptor, lines.encode("utf-8", "replace"))

    info = functools.partialmethod(write, "INFO")
    warning = functools.partialmethod(write, "WARNING")
    error = functools.partialmethod(write, "ERROR")

    @property
    def size_bytes(self) -> int:
        return os.fstat(self.descriptor).st_size

    def folded(self) -> int:
        """Return how many lines the console left out since the last call."""
        self._show()
        count, self._fold.folded = self._fold.folded, 0
        return count

    @contextlib.contextmanager
    def since(self, offset_bytes: int) -> Iterator[Path]:
        """Give a file of what was written after an offset, with the log's line numbers."""
        with self.path.open("rb") as log, tempfile.NamedTemporaryFile(suffix=".log") as copy:
            copy.write(b"\n" * log.read(offset_bytes).count(b"\n"))
            shutil.copyfileobj(log, copy)
            copy.flush()
            yield Path(copy.name)

    def _follow(self) -> None:
        while not self._end.wait(FOLLOW_SECONDS):
            self._show()

    def _show(self) -> None:
        with self._turn:
            shown = [line for line in self._follower.poll().lines if self._fold.shows(line)]
            if not shown:
                return
            try:
                self._console.write(b"\n".join(shown) + b"\n")
                self._console.flush()
            except (OSError, ValueError):  # the terminal is gone; the run and its log are not
                self._console = open(os.devnull, "wb")  # noqa: SIM115
