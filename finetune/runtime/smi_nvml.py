"""NVIDIA GPUs and their MIG slices, as the driver's library tells them (NVML, by nvidia-ml-py)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import psutil
import pynvml

from finetune.runtime.smi_report import TIMEOUT_SECONDS, SmiDevice, SmiProcess, SmiReport
from finetune.runtime.timeouts import call_with_timeout

_T = TypeVar("_T")

# Where the library's own words leave open what to do.
_PROBLEMS = {
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
    pynvml.NVML_ERROR_NO_PERMISSION: "no permission to ask the NVIDIA driver",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "Driver/library version mismatch: the driver was changed under the loaded kernel module"
    ),
}
# The device does not answer any more: nothing else that it says is worth having.
_LOST = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)


def read_gpus(timeout_seconds: float = TIMEOUT_SECONDS) -> SmiReport | None:
    """What the NVIDIA driver tells; None where it is not installed. A call on a lost device may
    never return.
    """
    try:
        return call_with_timeout(_read, timeout_seconds)
    except TimeoutError:
        return SmiReport(
            "cuda", problem=f"the NVIDIA driver did not answer in {timeout_seconds:g} s"
        )


def _read() -> SmiReport | None:
    driver = cuda = ""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        no_driver = error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
        return None if no_driver else SmiReport("cuda", problem=_reason(error))
    try:
        driver = _if_told(pynvml.nvmlSystemGetDriverVersion) or ""
        version = _if_told(pynvml.nvmlSystemGetCudaDriverVersion_v2)
        cuda = "" if version is None else f"{version // 1000}.{version % 1000 // 10}"
        devices = _devices()
    except pynvml.NVMLError as error:
        return SmiReport("cuda", driver, cuda, problem=_reason(error))
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return SmiReport(
        "cuda", driver, cuda, devices, problem="" if devices else "No devices were found"
    )


def _reason(error: pynvml.NVMLError) -> str:
    return f"NVML: {_PROBLEMS.get(error.value, error)}"


def _if_told(question: Callable[..., _T], *arguments: Any) -> _T | None:
    """The answer; None where the device or driver does not support the question, or there is no
    permission.
    """
    try:
        return question(*arguments)
    except pynvml.NVMLLibraryMismatchError:  # a driver from before this function
        return None
    except pynvml.NVMLError as error:
        if error.value in _LOST:
            raise
        return None


def _devices() -> tuple[SmiDevice, ...]:
    """The GPUs; where some have MIG slices, the slices in place of all GPUs, as CUDA counts
    them.
    """
    handles = [
        pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
    ]
    slices = [
        (f"GPU {gpu} MIG {number}", f"{_name(handle)} MIG", slice_handle)
        for gpu, handle in enumerate(handles)
        for number, slice_handle in _slices(handle)
    ]
    gpus = [(f"GPU {index}", _name(handle), handle) for index, handle in enumerate(handles)]
    return tuple(_device(index, *found) for index, found in enumerate(slices or gpus))


def _name(handle: Any) -> str:
    return _if_told(pynvml.nvmlDeviceGetName, handle) or ""


def _slices(handle: Any) -> Iterator[tuple[int, Any]]:
    """(number, handle) of a GPU's MIG slices; numbers may have gaps."""
    mode = _if_told(pynvml.nvmlDeviceGetMigMode, handle)
    if not mode or not mode[0]:
        return
    for number in range(_if_told(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        if (
            found := _if_told(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
        ) is not None:
            yield number, found


def _device(index: int, label: str, name: str, handle: Any) -> SmiDevice:
    memory = _if_told(pynvml.nvmlDeviceGetMemoryInfo, handle)
    use = _if_told(pynvml.nvmlDeviceGetUtilizationRates, handle)
    uncorrected = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    errors = _if_told(pynvml.nvmlDeviceGetTotalEccErrors, handle, *uncorrected)
    return SmiDevice(
        index=index,
        name=name,
        label=label,
        health="" if errors is None else f"ECC errors: {errors}" if errors else "OK",
        total_bytes=None if memory is None else memory.total,
        used_bytes=None if memory is None else memory.used,
        utilization_percent=None if use is None else float(use.gpu),
        temperature_celsius=_if_told(
            pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU
        ),
        processes=_processes(handle),
    )


def _processes(handle: Any) -> tuple[SmiProcess, ...] | None:
    """Those that compute; what only draws holds little and is the desktop's."""
    computing = _if_told(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    if computing is None:
        return None
    return tuple(
        SmiProcess(one.pid, _process_name(one.pid), one.usedGpuMemory) for one in computing
    )


def _process_name(pid: int) -> str:
    """The name of a process; empty where it cannot be seen (another container's)."""
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return ""
