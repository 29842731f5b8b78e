"""What distinguishes a process from any other with the same id: the boot that it started in, and
the kernel's tick at its start.

The wall time of its start is not used: it is computed from the boot time, so every adjustment of
the clock changes it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ProcessStart:
    """Both are None if the system does not report them (outside Linux), or the process is gone."""

    boot_id: str | None = None
    start_ticks: int | None = None


@functools.cache
def boot_id() -> str | None:
    """Return a name that is unique to this boot of the kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def process_start(pid: int) -> ProcessStart:
    """Return the start of an existing process, zombies included."""
    try:
        content = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ProcessStart()
    # The name is in parentheses, and may contain some; the third field follows, and the ticks are
    # the 22nd.
    return ProcessStart(boot_id(), int(content.rpartition(b")")[2].split()[19]))


def recorded_start(record: dict[str, Any]) -> ProcessStart:
    """Return the start in a JSON record; nothing if the record is older than these fields, or they
    are invalid.
    """
    boot = record.get("boot_id")
    ticks = record.get("start_ticks")
    if isinstance(boot, str) and type(ticks) is int:
        return ProcessStart(boot, ticks)
    return ProcessStart()


def is_same_start(pid: int, recorded: ProcessStart) -> bool | None:
    """Return whether the process with this id is the recorded one; None if that is unknown."""
    if None in (recorded.boot_id, recorded.start_ticks, boot_id()):
        return None
    return process_start(pid) == recorded
