"""A file that a run appends to for weeks: whole pieces only, whatever happens to the disk and to
the file's name.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Self

# How often the name is looked at: what is written meanwhile stands in the file that was moved away.
LOOK_SECONDS = 1.0
_BLOCK_BYTES = 1 << 16


class AppendFile:
    """Appends pieces to a file, each with a single unbuffered write: a crash tears at most the
    last.

    Where the disk is full, what a piece had taken of it is given back, so that the next one, once
    there is room again, does not follow half of it. Where another file, or none, has the name
    (logrotate has renamed it, somebody has removed it), a new one is begun within `LOOK_SECONDS`;
    one that is copied and cut is simply written on.

    Raises:
        OSError: the file cannot be opened; it is a link.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._descriptor = self._open()
        self._look_at = time.monotonic() + LOOK_SECONDS

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(self.path, flags, 0o666)

    def append_bytes(self, piece: bytes) -> None:
        """Write all of it, or nothing. Raises OSError where the system does not take it."""
        if time.monotonic() >= self._look_at:
            self._follow_name()
        written = 0
        try:
            # The system takes less than all only when the disk is full, and then says so on the
            # second write.
            while written < len(piece):
                written += os.write(self._descriptor, memoryview(piece)[written:])
        except OSError:
            if written:
                with contextlib.suppress(OSError):
                    os.ftruncate(
                        self._descriptor, max(0, os.fstat(self._descriptor).st_size - written)
                    )
            raise

    def _follow_name(self) -> None:
        self._look_at = time.monotonic() + LOOK_SECONDS
        try:
            moved = not os.path.samestat(os.lstat(self.path), os.fstat(self._descriptor))
        except OSError as error:
            # anything else: what is open can still be written
            moved = isinstance(error, FileNotFoundError)
        if not moved:
            return
        try:
            opened = self._open()
        except OSError:  # the folder has gone, or the name is a link now
            return
        before, self._descriptor = self._descriptor, opened
        with contextlib.suppress(OSError):
            os.fsync(before)
        os.close(before)

    def cut_torn_line(self) -> None:
        """Cut what stands after the last newline: a writer was killed, and the next line would
        follow half a line.
        """
        end = os.fstat(self._descriptor).st_size
        while end > 0:
            begin = max(0, end - _BLOCK_BYTES)
            newline = os.pread(self._descriptor, end - begin, begin).rfind(b"\n")
            if newline >= 0:
                end = begin + newline + 1
                break
            end = begin
        if end < os.fstat(self._descriptor).st_size:
            os.ftruncate(self._descriptor, end)

    def sync(self) -> None:
        """Have the device hold all of it."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; twice does no harm."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
