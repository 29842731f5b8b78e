"""Devices as their drivers see them, without torch: NPUs by `npu-smi info`, NVIDIA GPUs by NVML.

Drivers answer even where torch cannot be imported, and they know which processes hold memory.

The table of `npu-smi info` (drivers 22 to 26; 910A, 910B, 910_93, 950, 310P) has two lines for a
chip. The second line ends with the memory that a program gets: HBM if it has a column, else DDR.
On cards with two chips, programs count devices by chip ("Phy-ID"). A container may see only some
chips and counts those from 0, so a device's index is its position in the list.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, TypeVar

import psutil

from finetune.runtime.host import MIB
from finetune.runtime.parent_watchdog import call_with_timeout

try:
    import pynvml
except ImportError:  # an environment from before it was required: doctor must be able to report it
    pynvml = None

_T = TypeVar("_T")

TIMEOUT_SECONDS = 15.0


@dataclass(frozen=True)
class SmiProcess:
    """A process on a device.

    Attributes:
        memory_bytes: None if the driver does not report it (no permission, not supported).
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
            if unknown.
        total_bytes, used_bytes: device memory; None if the driver does not report it.
        processes: the processes on it; None if the driver does not report them.
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
    """What one driver reports."""

    device_type: str  # "npu" or "cuda"
    driver_version: str = ""  # empty if unknown
    # newest CUDA that the driver can run; empty for npu, and if unknown
    runtime_version: str = ""
    devices: tuple[SmiDevice, ...] = ()
    # why there are no devices, in the driver's own words; empty if there are some
    problem: str = ""


def read_devices() -> list[SmiReport]:
    """Return a report for each driver that is installed here, NPU first; empty on a machine without
    accelerators.
    """
    return [report for report in (read_npus(), read_gpus()) if report is not None]


def visible(devices: Sequence[SmiDevice], variable: str | None) -> list[SmiDevice]:
    """Return the devices that a visible-device variable leaves, renumbered as a program sees them.

    Ids from the first that does not exist on are dropped, as the runtimes do. If an entry is not a
    number (GPU-... and MIG-... names), all devices are returned: only the runtime can resolve it.
    """
    if variable is None:
        return list(devices)
    ids = [word.strip() for word in variable.split(",") if word.strip()]
    if any(not word.lstrip("-").isdigit() for word in ids):
        return list(devices)
    by_index = {device.index: device for device in devices}
    existing = takewhile(by_index.__contains__, map(int, ids))
    return [replace(by_index[index], index=place) for place, index in enumerate(existing)]


# ---------------------------------------------------------------- NPUs

_VERSION = re.compile(r"npu-smi\s+(\S+)\s+Version:\s*(\S+)")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_PAIR = re.compile(r"(\d+)\s*/\s*(\d+)")
_FIRST = re.compile(r"(\d+)\s+((?!Name)\S.*)")  # "0     910B3", "2     Ascend910"; no heading
# What npu-smi prints instead of a table, in lower case.
_FAILURES = ("dcmi", "drvmnggetconsoleloglevel", "failed", "error", "permission")


@dataclass
class _Chip:
    """A chip of the table. Its label and the list of processes are not in `device` yet."""

    npu: int
    chip: int
    device: SmiDevice
    processes: list[SmiProcess] = field(default_factory=list)


def read_npus() -> SmiReport | None:
    """Run `npu-smi info`; None if it is not installed. It is killed if it hangs (a lost device)."""
    program = shutil.which("npu-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "info"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return SmiReport("npu", problem=f"npu-smi did not answer in {TIMEOUT_SECONDS:g} s")
    except OSError as error:
        return SmiReport("npu", problem=f"npu-smi cannot be run: {error.strerror or error}")
    return parse_info(done.stdout, done.stderr, done.returncode)


def parse_info(text: str, errors: str = "", exit_code: int = 0) -> SmiReport:
    """Make a report from what `npu-smi info` printed to stdout and stderr."""
    chips: list[_Chip] = []
    first_line: list[str] = []  # cells of a chip's first line
    has_process_table = False
    for line in text.splitlines():
        cells = _cells(line)
        if not cells:
            continue
        if "Process id" in line:
            has_process_table = True
        elif has_process_table:
            _add_process(cells, chips)
        else:
            if len(cells) == 4:  # on 950, and with a Phy-ID: one more cell
                cells = [f"{cells[0]} {cells[1]}", *cells[2:]]
            if first_line and len(cells) >= 3:
                chips.append(_chip(first_line, cells))
                first_line = []
            else:
                first_line = cells if len(cells) == 3 and _FIRST.fullmatch(cells[0]) else []
    devices = []
    for index, chip in enumerate(chips):
        label = f"NPU {chip.npu}"
        if [other.npu for other in chips].count(chip.npu) > 1:
            label += f" chip {chip.chip}"
        processes = tuple(chip.processes) if has_process_table else None
        devices.append(
            replace(
                chip.device,
                index=index,
                label=label,
                processes=processes,
            )
        )
    version = _VERSION.search(text)
    return SmiReport(
        "npu",
        version[2] if version else "",
        devices=tuple(devices),
        problem="" if devices else _no_npus(text, errors, exit_code),
    )


def _cells(line: str) -> list[str]:
    """Return the cells of a whole table line; none for rules, other lines and a line cut off."""
    line = line.strip()
    if len(line) < 2 or not (line.startswith("|") and line.endswith("|")):
        return []
    return [cell.strip() for cell in line[1:-1].split("|")]


def _chip(first_line: Sequence[str], second_line: Sequence[str]) -> _Chip:
    """Read the cells of a chip's two lines: NPU (on 950 alone) and name, health, power, temperature
    and huge pages; then chip (and Phy-ID), bus, use and memory.

        | 0     910B3  | OK           | 93.6  40  0 / 0          |
        | 0     4      | 0000:C1:00.0 | 12   0 / 0  3161 / 65536 |
    """
    npu, name = _FIRST.fullmatch(first_line[0]).groups()  # type: ignore[union-attr]  # matched before
    _power, temperature, *_rest = [*first_line[2].split(), "-", "-"]
    ids = re.findall(r"\d+", second_line[0])
    used_bytes = total_bytes = None
    pairs = _PAIR.findall(second_line[-1])
    if pairs and int(pairs[-1][1]) > 0:
        used_bytes, total_bytes = (int(value) * MIB for value in pairs[-1])
    device = SmiDevice(
        index=0,
        name=name.strip(),
        label="",
        health=first_line[1],
        total_bytes=total_bytes,
        used_bytes=used_bytes,
        utilization_percent=_number(second_line[-1]),
        temperature_celsius=_number(temperature),
    )
    return _Chip(int(npu), int(ids[0]) if ids else 0, device)


def _add_process(cells: Sequence[str], chips: Sequence[_Chip]) -> None:
    """Read `| 0   0 | 4242 | python | 30784 |` and, on newer drivers, the id in the container.

    Other lines have no process. On 950 the first cell is the NPU alone. In a container the tool may
    show the host's process id in the second column.
    """
    if len(cells) < 4 or not cells[1].isdigit():
        return
    ids = [int(word) for word in cells[0].split() if word.isdigit()]
    inside = cells[4] if len(cells) > 4 else ""
    size = _number(cells[3])
    process = SmiProcess(
        pid=int(inside if inside.isdigit() else cells[1]),
        name=cells[2],
        memory_bytes=None if size is None else int(size * MIB),
    )
    for chip in chips:
        if ids and chip.npu == ids[0] and (len(ids) < 2 or chip.chip == ids[1]):
            chip.processes.append(process)
            return


def _no_npus(text: str, errors: str, exit_code: int) -> str:
    """Return why there is no device, in the tool's words."""
    lines = [line.strip() for line in f"{text}\n{errors}".splitlines() if line.strip()]
    for word in _FAILURES:
        for line in lines:
            if word in line.lower():
                return line
    if exit_code == 0:
        return "npu-smi lists no device"
    return lines[-1] if lines else f"npu-smi ended with {exit_code}"


def _number(cell: str) -> float | None:
    """Return the number that a cell begins with, e.g. 12 of "12   0 / 0"; None for "-" and "NA"."""
    found = _NUMBER.match(cell)
    return None if found is None else float(found[0])


# ---------------------------------------------------------------- NVIDIA GPUs


def read_gpus() -> SmiReport | None:
    """Query the NVIDIA driver; None if it is not installed. A call on a lost device may never
    return.
    """
    if pynvml is None:
        problem = "nvidia-ml-py is not installed: pip install nvidia-ml-py"
        return SmiReport("cuda", problem=problem) if shutil.which("nvidia-smi") else None
    try:
        return call_with_timeout(_read_gpus, TIMEOUT_SECONDS)
    except TimeoutError:
        return SmiReport(
            "cuda", problem=f"the NVIDIA driver did not answer in {TIMEOUT_SECONDS:g} s"
        )


def _read_gpus() -> SmiReport | None:
    driver = cuda = ""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        no_driver = error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
        return None if no_driver else SmiReport("cuda", problem=_reason(error))
    try:
        driver = _query_or_none(pynvml.nvmlSystemGetDriverVersion) or ""
        version = _query_or_none(pynvml.nvmlSystemGetCudaDriverVersion_v2)
        cuda = "" if version is None else f"{version // 1000}.{version % 1000 // 10}"
        devices = _gpus()
    except pynvml.NVMLError as error:
        return SmiReport("cuda", driver, cuda, problem=_reason(error))
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return SmiReport(
        "cuda", driver, cuda, devices, problem="" if devices else "No devices were found"
    )


def _reason(error: pynvml.NVMLError) -> str:
    problems = {  # if the library's message does not help the user
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
        pynvml.NVML_ERROR_NO_PERMISSION: "no permission to ask the NVIDIA driver",
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
            "Driver/library version mismatch: the driver was changed under the loaded kernel module"
        ),
    }
    return f"NVML: {problems.get(error.value, error)}"


def _query_or_none(query: Callable[..., _T], *arguments: Any) -> _T | None:
    """Return the result of a query; None if the device or driver does not support it, or the user
    is not allowed to use it.

    Raises:
        NVMLError: the device is lost; its other results are useless.
    """
    try:
        return query(*arguments)
    except pynvml.NVMLLibraryMismatchError:  # a driver from before this function
        return None
    except pynvml.NVMLError as error:
        if error.value in (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED):
            raise
        return None


def _gpus() -> tuple[SmiDevice, ...]:
    """Return the GPUs; if any has MIG slices, only the slices, as CUDA counts them."""
    handles = [
        pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
    ]
    slices = [
        (f"GPU {gpu} MIG {number}", f"{_gpu_name(handle)} MIG", slice_handle)
        for gpu, handle in enumerate(handles)
        for number, slice_handle in _mig_slices(handle)
    ]
    gpus = [(f"GPU {index}", _gpu_name(handle), handle) for index, handle in enumerate(handles)]
    return tuple(_gpu_device(index, *found) for index, found in enumerate(slices or gpus))


def _gpu_name(handle: Any) -> str:
    return _query_or_none(pynvml.nvmlDeviceGetName, handle) or ""


def _mig_slices(handle: Any) -> Iterator[tuple[int, Any]]:
    """Yield (number, handle) of a GPU's MIG slices; numbers may have gaps."""
    mode = _query_or_none(pynvml.nvmlDeviceGetMigMode, handle)
    if not mode or not mode[0]:
        return
    for number in range(_query_or_none(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        found = _query_or_none(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
        if found is not None:
            yield number, found


def _gpu_device(index: int, label: str, name: str, handle: Any) -> SmiDevice:
    memory = _query_or_none(pynvml.nvmlDeviceGetMemoryInfo, handle)
    use = _query_or_none(pynvml.nvmlDeviceGetUtilizationRates, handle)
    uncorrected = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    errors = _query_or_none(pynvml.nvmlDeviceGetTotalEccErrors, handle, *uncorrected)
    health = ""
    if errors is not None:
        health = f"ECC errors: {errors}" if errors else "OK"
    return SmiDevice(
        index=index,
        name=name,
        label=label,
        health=health,
        total_bytes=None if memory is None else memory.total,
        used_bytes=None if memory is None else memory.used,
        utilization_percent=None if use is None else float(use.gpu),
        temperature_celsius=_query_or_none(
            pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU
        ),
        processes=_gpu_processes(handle),
    )


def _gpu_processes(handle: Any) -> tuple[SmiProcess, ...] | None:
    """Return the processes that compute; those that only draw hold little and are the desktop's."""
    computing = _query_or_none(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    if computing is None:
        return None
    return tuple(
        SmiProcess(one.pid, _process_name(one.pid), one.usedGpuMemory) for one in computing
    )


def _process_name(pid: int) -> str:
    """Return the name of a process; empty if it cannot be seen (another container's)."""
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return ""
