"""Files of a shard: written piece by piece, hashed meanwhile, and whole under their names or not
there.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from finetune.storage.durable_files import hash_file, move, sync_file, sync_folder

_BUFFER_BYTES = 4 << 20
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


class ShardFile:
    """A file of bare numbers under a temporary name; what a killed writer left there is
    overwritten.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size_bytes = 0
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._descriptor: int | None = os.open(self._temporary, _FLAGS, 0o666)
        self._digest = hashlib.sha256()
        self._buffer = bytearray()

    def write(self, numbers: np.ndarray) -> None:
        """Append an array as it is in memory."""
        self._buffer += numbers.tobytes()
        if len(self._buffer) >= _BUFFER_BYTES:
            self._flush()

    def finish(self) -> str:
        """Have the device hold the content; return its SHA-256."""
        self._flush()
        self.close()
        sync_file(self._temporary)
        return self._digest.hexdigest()

    def publish(self) -> None:
        """Give the finished file its name, durably."""
        move(self._temporary, self.path)
        sync_folder(self.path.parent)

    def close(self) -> None:
        """Let go of the file, finished or not."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _flush(self) -> None:
        assert self._descriptor is not None
        view = memoryview(bytes(self._buffer))
        self._digest.update(view)
        self.size_bytes += len(view)
        while view:
            view = view[os.write(self._descriptor, view) :]
        self._buffer.clear()


def damage(files: Mapping[Path, tuple[int, str]]) -> str | None:
    """Return what is wrong with the files of a finished shard; None if nothing is.

    Args:
        files: size in bytes and SHA-256 of each, as its header has them.
    """
    for path, (size_bytes, digest) in files.items():
        if not path.is_file():
            return f"{path.name} is missing"
        found_bytes = path.stat().st_size
        if found_bytes != size_bytes:
            return f"{path.name} has {found_bytes} bytes instead of {size_bytes}"
        if hash_file(path) != digest:
            return f"{path.name} was changed: its SHA-256 is not the header's"
    return None
