"""The lines of a file that another process writes, as they come: through appends, cuts and
rotation.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

_TAIL_BYTES = 512
_PIECE_BYTES = 4 << 20


class NewLines(NamedTuple):
    """Lines since the last call. `restarted`: earlier lines are no longer, or not all, in the
    file.
    """

    restarted: bool
    lines: list[bytes]


class LineFollower:
    """Returns each whole line of a file once.

    A last line without newline waits until it has one. The file is read again from its beginning if
    it was truncated or if another file took its name (rotation). A truncated file may have grown
    past the old position since: a resumed run truncates its log and continues it.

    Args:
        path: the file, which need not exist yet. Links are followed; anything but a regular file
            counts as missing.
        last_bytes: limit for the first read, and for a file that is read again: return only the
            lines in its last bytes; None for all of it.
    """

    def __init__(self, path: Path | str, last_bytes: int | None = None) -> None:
        self.path = Path(path)
        self.last_bytes = last_bytes
        self._identity: tuple[int, int] | None = None
        self._offset_bytes = 0
        self._tail = b""  # the bytes before the offset: they distinguish an append from a rewrite

    def poll(self, most_bytes: int = -1) -> NewLines:
        """Return the lines written since the last call; nothing if the file cannot be read.

        Args:
            most_bytes: read about this many bytes, and the rest with the next call; all by default.
        """
        try:
            return self._poll(most_bytes)
        # over a network also while it is read: another file has taken its name (ESTALE)
        except OSError:
            return NewLines(False, [])

    def _poll(self, most_bytes: int) -> NewLines:
        # O_NONBLOCK: opening a pipe must not wait for its writer.
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            state = os.fstat(descriptor)
            if not stat.S_ISREG(state.st_mode):
                return NewLines(False, [])
            identity = (state.st_dev, state.st_ino)
            restarted, offset_bytes, tail = False, self._offset_bytes, self._tail
            if self._identity is not None:
                file.seek(offset_bytes - len(tail))
                restarted = identity != self._identity or file.read(len(tail)) != tail
            if self._identity is None or restarted:
                offset_bytes = self._begin(file, state.st_size)
                file.seek(max(0, offset_bytes - _TAIL_BYTES))
                tail = file.read(min(offset_bytes, _TAIL_BYTES))
            file.seek(offset_bytes)
            content = file.read(most_bytes)
            if len(content) == most_bytes:
                content += file.readline()
        whole = content[: content.rfind(b"\n") + 1]
        self._identity = identity
        self._offset_bytes = offset_bytes + len(whole)
        self._tail = (tail + whole[-_TAIL_BYTES:])[-_TAIL_BYTES:]
        return NewLines(restarted, whole.splitlines())

    def pieces(self) -> Iterator[NewLines]:
        """Yield the lines written since the last call, piece by piece: the first read of a long
        file returns all of it.
        """
        while (new := self.poll(_PIECE_BYTES)).lines or new.restarted:
            yield new

    def _begin(self, file: BinaryIO, size_bytes: int) -> int:
        """Return where the lines to return begin."""
        if self.last_bytes is None or size_bytes <= self.last_bytes:
            return 0
        file.seek(size_bytes - self.last_bytes - 1)
        file.readline()  # the end of a line
        return file.tell()

    @property
    def written_at(self) -> float | None:
        """When the file was last written, in seconds since 1970; None if it does not exist."""
        try:
            return os.stat(self.path).st_mtime
        except OSError:
            return None
