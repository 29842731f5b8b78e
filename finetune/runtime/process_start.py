"""What tells a process from any other that has or had its id: the boot it began in, and the
kernel's tick at its start.

Not the wall time of its start, which is computed from the time of the boot: every step of the clock
moves it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ProcessStart:
    """Both None where the system does not say (outside Linux), or the process is gone."""

    boot_id: str | None = None
    start_ticks: int | None = None


@functools.cache
def boot_id() -> str | None:
    """A name that this boot of the kernel has alone."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def process_start(pid: int) -> ProcessStart:
    """Of a process that is there, zombies included."""
    try:
        content = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ProcessStart()
    # The name is in parentheses, and may hold some; after it comes the third field, and the ticks
    # are the 22nd.
    return ProcessStart(boot_id(), int(content.rpartition(b")")[2].split()[19]))


def recorded_start(record: dict[str, Any]) -> ProcessStart:
    """What a record in JSON says; nothing where it is older than these fields, or not of their
    form.
    """
    boot, ticks = record.get("boot_id"), record.get("start_ticks")
    return (
        ProcessStart(boot, ticks)
        if isinstance(boot, str) and type(ticks) is int
        else ProcessStart()
    )


def is_same_start(pid: int, recorded: ProcessStart) -> bool | None:
    """Whether the process of that id is the recorded one; None where record or system do not
    say.
    """
    if None in (recorded.boot_id, recorded.start_ticks, boot_id()):
        return None
    return process_start(pid) == recorded
