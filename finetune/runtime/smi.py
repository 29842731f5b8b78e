"""Devices as the driver's own tool sees them: `npu-smi` and `nvidia-smi`, run and read. No torch, no driver library.

The tools answer where torch cannot be imported, and they know who holds a device's memory. `read_devices()` asks
whichever is installed; `smi_npu` and `smi_nvidia` read their texts.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

MIB = 1 << 20
TOOL_TIMEOUT_SECONDS = 15.0


@dataclass(frozen=True)
class SmiProcess:
    """A process on a device. `memory_bytes` is None where the tool does not say (no permission, or not supported)."""

    pid: int
    name: str
    memory_bytes: int | None


@dataclass(frozen=True)
class SmiDevice:
    """One device that a program can use: a chip of an NPU card, a GPU, or a MIG slice of one.

    Attributes:
        index: its number in the order that visible-device variables count by.
        label: what the tool calls it, e.g. "NPU 2 chip 1" or "GPU 0".
        health: the tool's own word ("OK", "Warning", "Alarm", "Critical", "ECC errors: 3"); empty where unknown.
        total_bytes, used_bytes: device memory; None where the tool does not say.
        processes: who is on it; None where the tool does not say.
        bus_id: PCI address, empty where unknown.
    """

    index: int
    name: str
    label: str
    health: str = ""
    total_bytes: int | None = None
    used_bytes: int | None = None
    utilization_percent: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    processes: tuple[SmiProcess, ...] | None = None
    bus_id: str = ""

    @property
    def free_bytes(self) -> int | None:
        if self.total_bytes is None or self.used_bytes is None:
            return None
        return max(0, self.total_bytes - self.used_bytes)


@dataclass(frozen=True)
class SmiReport:
    """What one tool said.

    Attributes:
        device_type: "npu" or "cuda".
        driver_version: empty where the tool does not say.
        runtime_version: newest CUDA that the driver can run; empty for npu, and where unknown.
        problem: why there are no devices, in the tool's own words; empty where all is well.
    """

    device_type: str
    driver_version: str = ""
    runtime_version: str = ""
    devices: tuple[SmiDevice, ...] = field(default=())
    problem: str = ""


@dataclass(frozen=True)
class Output:
    """What a tool printed: exit code, and both streams."""

    code: int
    text: str
    errors: str = ""

    @property
    def all(self) -> str:
        return f"{self.text}\n{self.errors}"


# (words of a command) -> its output, or None where the program is not installed.
Runner = Callable[[Sequence[str]], Output | None]


def run_tool(words: Sequence[str], timeout_seconds: float = TOOL_TIMEOUT_SECONDS) -> Output | None:
    """Run a tool; None where it is not installed. One that hangs (a lost device) is ended, and that is said."""
    program = shutil.which(words[0])
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *words[1:]],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_seconds,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Output(124, "", f"{words[0]} did not answer in {timeout_seconds:g} s")
    except OSError as error:
        return Output(126, "", f"{words[0]} cannot be run: {error.strerror or error}")
    return Output(done.returncode, done.stdout, done.stderr)


def read_devices(run: Runner = run_tool) -> list[SmiReport]:
    """A report for each tool that is installed here, NPU first; empty on a machine without accelerators."""
    from finetune.runtime.smi_npu import read_npus
    from finetune.runtime.smi_nvidia import read_gpus

    return [report for report in (read_npus(run), read_gpus(run)) if report is not None]


def visible(devices: Sequence[SmiDevice], variable: str | None) -> list[SmiDevice]:
    """The devices that a visible-device variable leaves, renumbered as a program would see them.

    Ids from the first that does not exist on are dropped, as the runtimes do. Entries that are no numbers (GPU-... and
    MIG-... names) cannot be told from here: then all devices are returned.
    """
    if variable is None:
        return list(devices)
    words = [word.strip() for word in variable.split(",") if word.strip()]
    if any(not word.lstrip("-").isdigit() for word in words):
        return list(devices)
    by_index = {device.index: device for device in devices}
    chosen: list[SmiDevice] = []
    for word in words:
        if int(word) not in by_index:
            break
        chosen.append(replace(by_index[int(word)], index=len(chosen)))
    return chosen


def number(text: str) -> float | None:
    """The number a cell begins with, e.g. 71.5 of "71.5 W"; None for "-", "N/A", "NA", "[Not Supported]"."""
    word = text.strip().split(" ")[0].rstrip("%WC")
    try:
        value = float(word)
    except ValueError:
        return None
    return value if value == value and abs(value) != float("inf") else None


def mebibytes(text: str) -> int | None:
    """Bytes of a cell that counts MiB ("1024", "1024MiB", "1024 MiB"); None where it is no number."""
    value = number(text.strip().removesuffix("MiB").removesuffix("MB").strip())
    return None if value is None else int(value * MIB)


def key_values(text: str) -> list[Mapping[str, str]]:
    """`Name : value` lines (npu-smi info -t ...), a mapping for each chip: a key that comes again begins the next."""
    blocks: list[dict[str, str]] = []
    for line in text.splitlines():
        name, colon, value = line.partition(" :")
        if not colon or not name.strip():
            continue
        if not blocks or name.strip() in blocks[-1]:
            blocks.append({})
        blocks[-1][name.strip()] = value.strip()
    return blocks
