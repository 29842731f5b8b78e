"""A disk that holds terabytes: files have their sizes and headers, their data is a hole, and what
is moved is counted.

The code that decides what is written, hashed and read is the package's own. Replaced are the calls
below it: a write or a read of many bytes moves the place in the file, a digest counts what it is
given, tensors that are loaded are meta tensors. Everything is counted for the rank, a thread
(tests/thread_ranks.py), or a thread that it has started.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors import safe_open

# Below this, bytes are real, and so is the beginning of a file: JSON, and the headers of tensors.
REAL_BYTES = 64 << 10


class CountingDisk:
    """Counts, by rank.

    Attributes:
        moved: bytes `written`, `hashed`, `read` and `loaded`, of these `again`: what the rank has
            read or loaded before and its node may hold in memory; files `loaded_files` (opened for
            their tensors), `syncs`; `main`: of the bytes, those that the thread moved that meets
            the other ranks.
    """

    def __init__(self) -> None:
        self.moved: dict[int, Counter[str]] = defaultdict(Counter)
        self._lock = threading.Lock()
        self._seen: set[tuple[Any, ...]] = set()

    def count(self, what: str, size: int = 1, *, is_bytes: bool = False) -> None:
        thread = threading.current_thread()
        with self._lock:
            counter = self.moved[rank_of(thread)]
            counter[what] += size
            if is_bytes and hasattr(thread, "meeting_rank"):
                counter["main"] += size

    def take(self) -> dict[int, Counter[str]]:
        """What was counted since the last time."""
        taken, self.moved = self.moved, defaultdict(Counter)
        return taken

    # ----------------------------------------------------------- in the place of `os` and `hashlib`

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Path, flags: int, *mode: int) -> int:
        self._seen.add((self.get_rank(), str(path)))
        return os.open(path, flags, *mode)

    def write(self, descriptor: int, data: memoryview) -> int:
        self.count("written", len(data), is_bytes=True)
        if len(data) < REAL_BYTES or os.lseek(descriptor, 0, os.SEEK_CUR) == 0:
            return os.write(descriptor, data)
        os.ftruncate(descriptor, os.lseek(descriptor, len(data), os.SEEK_CUR))
        return len(data)

    def read(self, descriptor: int, size: int) -> bytes | range:
        place, end = os.lseek(descriptor, 0, os.SEEK_CUR), os.fstat(descriptor).st_size
        if end < REAL_BYTES:
            data = os.read(descriptor, size)
            self.count("read", len(data), is_bytes=True)
            return data
        found = min(size, end - place)
        os.lseek(descriptor, found, os.SEEK_CUR)
        self.count("read", found, is_bytes=True)
        return range(found)  # as long as the bytes, which nobody looks at

    def fsync(self, descriptor: int) -> None:
        self.count("syncs")

    def sha256(self) -> _Digest:
        return _Digest(self)

    # ------------------------------------------------------------------ tensors

    def safe_open(self, path: Path, framework: str) -> _File:
        self.count("loaded_files")
        # Mapped, a file of more than this machine's memory is refused.
        return _File(str(path), safe_open(path, framework=framework, backend="pread"))

    def flat_of(self, part: _Part, shape: list[int], start: int, stop: int) -> torch.Tensor:
        """As state._flat_of, with whole lines of the first axis, which it reads."""
        line, rank = prod(shape[1:]), self.get_rank()
        size = 4 * line * (-(-stop // line) - start // line)
        self.count("loaded", size)
        here = (rank, part.path, part.name, start)
        if (rank, part.path) in self._seen or here in self._seen:
            self.count("again", size)
        self._seen.add(here)
        return torch.empty(stop - start)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Everything in this process that goes through durable_files and training/state.py."""
        files, tensors = "finetune.storage.durable_files", "finetune.training.state"
        plain_start = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            thread.works_for = rank_of(threading.current_thread())  # type: ignore[attr-defined]
            plain_start(thread)

        with contextlib.ExitStack() as stack:
            for target, new in (
                (f"{files}.os", self),
                (f"{files}.hashlib", self),
                (f"{files}.ThreadPoolExecutor", _Inline),
                (f"{files}.CHUNK_BYTES", 1 << 30),
                (f"{files}.SYNC_EVERY_BYTES", 16 << 30),
                (f"{tensors}.safe_open", self.safe_open),
                (f"{tensors}._flat_of", self.flat_of),
                (f"{tensors}.dist", self),
                ("threading.Thread.start", start),
            ):
                stack.enter_context(patch(target, new))
            yield

    def get_rank(self, group: object = None) -> int:
        """torch.distributed's."""
        return rank_of(threading.current_thread())


@dataclass(frozen=True)
class _Part:
    path: str
    name: str
    part: Any

    def get_shape(self) -> list[int]:
        return list(self.part.get_shape())


@dataclass(frozen=True)
class _File:
    path: str
    file: Any

    def get_slice(self, name: str) -> _Part:
        return _Part(self.path, name, self.file.get_slice(name))


class _Inline:
    """A pool of one thread, the caller's: handing over nothing would take most of the time."""

    def __init__(self, max_workers: int) -> None:
        pass

    def __enter__(self) -> _Inline:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, work: Any, items: Any) -> Iterator[Any]:
        return map(work, items)


class _Digest:
    """As good as a hash for files that differ in size only."""

    def __init__(self, disk: CountingDisk) -> None:
        self.disk, self.size_bytes = disk, 0

    def update(self, data: bytes | memoryview | range) -> None:
        self.disk.count("hashed", len(data), is_bytes=True)
        self.size_bytes += len(data)

    def hexdigest(self) -> str:
        return f"{self.size_bytes:064x}"


def rank_of(thread: threading.Thread) -> int:
    """The rank that a thread is, or works for; -1 for neither."""
    return int(getattr(thread, "meeting_rank", getattr(thread, "works_for", -1)))
