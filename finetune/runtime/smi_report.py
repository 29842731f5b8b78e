"""What a device driver tells of its devices: the types that the readers (`smi_npu`, `smi_nvml`)
fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

MIB = 1 << 20
TIMEOUT_SECONDS = 15.0


@dataclass(frozen=True)
class SmiProcess:
    """A process on a device. `memory_bytes` is None where the driver does not tell (no permission,
    not supported).
    """

    pid: int
    name: str
    memory_bytes: int | None


@dataclass(frozen=True)
class SmiDevice:
    """One device that a program can use: a chip of an NPU card, a GPU, or a MIG slice of one.

    Attributes:
        index: its number in the order that visible-device variables count by.
        label: what the vendor's tool calls it, e.g. "NPU 2 chip 1" or "GPU 0".
        health: the driver's own word ("OK", "Warning", "Alarm", "Critical", "ECC errors: 3"); empty
        where unknown. total_bytes, used_bytes: device memory; None where the driver does not tell.
        processes: who is on it; None where the driver does not tell.
    """

    index: int
    name: str
    label: str
    health: str = ""
    total_bytes: int | None = None
    used_bytes: int | None = None
    utilization_percent: float | None = None
    temperature_celsius: float | None = None
    processes: tuple[SmiProcess, ...] | None = None

    @property
    def free_bytes(self) -> int | None:
        if self.total_bytes is None or self.used_bytes is None:
            return None
        return max(0, self.total_bytes - self.used_bytes)


@dataclass(frozen=True)
class SmiReport:
    """What one driver tells."""

    device_type: str  # "npu" or "cuda"
    driver_version: str = ""  # empty where unknown
    # newest CUDA that the driver can run; empty for npu, and where unknown
    runtime_version: str = ""
    devices: tuple[SmiDevice, ...] = ()
    # why there are no devices, in the driver's own words; empty where all is well
    problem: str = ""


def visible(devices: Sequence[SmiDevice], variable: str | None) -> list[SmiDevice]:
    """The devices that a visible-device variable leaves, renumbered as a program would see them.

    Ids from the first that does not exist on are dropped, as the runtimes do. Entries that are no
    numbers (GPU-... and MIG-... names) cannot be told from here: then all devices are returned.
    """
    if variable is None:
        return list(devices)
    ids = [word.strip() for word in variable.split(",") if word.strip()]
    if any(not word.lstrip("-").isdigit() for word in ids):
        return list(devices)
    by_index = {device.index: device for device in devices}
    chosen: list[SmiDevice] = []
    for word in ids:
        if int(word) not in by_index:
            break
        chosen.append(replace(by_index[int(word)], index=len(chosen)))
    return chosen
