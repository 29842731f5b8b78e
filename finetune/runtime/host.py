"""CPU and memory of this machine, within the limits of the container (cgroup v2 and v1)."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

MIB = 1 << 20
_CGROUP = Path("/sys/fs/cgroup")
# Far more than a process here needs, and few enough for a program that closes all possible files.
MAX_OPEN_FILES = 1 << 16
# cgroup v1 reports "no limit" as a number near 2^63.
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True)
class HostUse:
    """A machine, or the part of it that this container may use."""

    # of the cores' time since the last measurement, 0 to 1; None at the first one
    cpu_share: float | None
    cores: float  # that may be used; a quota can make it a fraction
    memory_used_bytes: int  # without what the kernel can drop immediately
    memory_total_bytes: int


def usable_cores() -> int:
    """Return the number of cores that this process may use, quotas aside."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def allow_open_files() -> None:
    """Raise the limit of open files and connections, for this process and those that it starts, as
    far as allowed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


class HostMeter:
    """Measures this machine; CPU use is that since the last `look`.

    Args:
        cgroup: mount point of cgroups.
        membership: the file with this process's cgroups.
    """

    def __init__(
        self, cgroup: Path = _CGROUP, membership: Path = Path("/proc/self/cgroup")
    ) -> None:
        self._folders = _own_folders(cgroup, membership)
        self._first = True

    def look(self) -> HostUse:
        cores = float(usable_cores())
        cpu_share = psutil.cpu_percent() / 100
        is_first = self._first
        self._first = False
        memory = psutil.virtual_memory()
        used, total = memory.total - memory.available, memory.total
        for folder in self._folders:
            quota = _cpu_quota(folder)
            cores = min(cores, quota) if quota else cores
            limit, inside = _memory(folder)
            if limit is not None and limit < total:
                used, total = inside, limit
        return HostUse(None if is_first else cpu_share, cores, used, total)


def _own_folders(cgroup: Path, membership: Path) -> list[Path]:
    """Return the folders of this process's cgroups and of their parents: each may have a limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    folders: dict[Path, None] = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        names = [controllers, *controllers.split(",")] if controllers else [""]
        for name in names:
            top = cgroup / name
            inner = top / path.lstrip("/")
            for folder in (inner, *inner.parents):
                if folder.is_relative_to(top) and folder.is_dir():
                    folders[folder] = None
    return list(folders)


def _number(path: Path, word: int = 0) -> int | None:
    """Return a number from a file of the kernel; None if it is missing, "max" or "no limit"."""
    try:
        value = int(path.read_text().split()[word])
    except (OSError, ValueError, IndexError):
        return None
    return value if 0 <= value < _UNLIMITED_BYTES else None


def _cpu_quota(folder: Path) -> float | None:
    quota, period = _number(folder / "cpu.max"), _number(folder / "cpu.max", 1)
    if quota is None:
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def _memory(folder: Path) -> tuple[int | None, int]:
    """Return (limit, used) in bytes; limit None for none. Unused cached file pages do not count as
    used.
    """
    for limit_name, used_name, cached_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None:
            return limit, max(0, used - _statistic(folder / "memory.stat", cached_name))
    return None, 0


def _statistic(path: Path, name: str) -> int:
    try:
        words: Any = (line.split() for line in path.read_text().splitlines())
        return next((int(value) for key, value in words if key == name), 0)
    except (OSError, ValueError):
        return 0


def peak_host_bytes() -> int:
    """Return the peak of this process's resident memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# Parameters of glibc's mallopt (malloc.h): how many blocks may be separate mappings; how much free
# memory at the end of the heap is returned to the system.
_M_MMAP_MAX, _M_TRIM_THRESHOLD = -4, -1


def keep_freed_memory(device_type: str) -> None:
    """On a CPU, let the C library keep freed memory for the next step. For runs whose microbatches
    all have the same shape.

    glibc returns blocks of 32 MiB and more (logits) to the system immediately. The system clears
    each page of the next block at its first use, which takes a tenth of a step's time. If all steps
    have the same sizes, kept memory is reused. This does nothing on other devices and C libraries.

    Fine-tuning does not use this: its packed sequences of many lengths fragment kept memory. CPU
    time and peak were measured for LoRA on 4 layers of hidden size 384, with packed rows of 100 to
    2,700 tokens:

    - vocabulary 16k: 19.9 s and 1.14 GiB; with kept memory 18.6 s and 1.22 GiB
    - vocabulary 64k: 46.5 s and 1.55 GiB; with kept memory 39.5 s and 2.18 GiB
    """
    if device_type == "cpu" and platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, -1)
