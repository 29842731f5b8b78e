"""NVIDIA devices from the driver's own library, where pynvml is installed: faster than starting nvidia-smi."""

from __future__ import annotations

from typing import Any

from finetune.runtime.smi import SmiDevice, SmiProcess, SmiReport
from finetune.runtime.smi_nvidia import health_of


def read_nvml() -> SmiReport | None:
    """What pynvml says; None where the driver's library cannot be used, and nvidia-smi may say why."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        devices = [_nvml_device(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    if not devices or any(device is None for device in devices):
        return None  # MIG, or a device that does not answer: the table tells more
    return SmiReport("cuda", driver, f"{cuda // 1000}.{cuda % 1000 // 10}", tuple(filter(None, devices)))


def _nvml_device(pynvml: Any, index: int) -> SmiDevice | None:
    """One GPU; None where MIG is on."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)

    def ask(question: str, *arguments: Any) -> Any:
        try:
            return getattr(pynvml, question)(handle, *arguments)
        except pynvml.NVMLError:  # not supported by this device, or no permission
            return None

    mig = ask("nvmlDeviceGetMigMode")
    if mig is not None and mig[0]:
        return None
    memory, running = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetComputeRunningProcesses")
    errors = ask("nvmlDeviceGetTotalEccErrors", pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    use, power = ask("nvmlDeviceGetUtilizationRates"), ask("nvmlDeviceGetPowerUsage")
    return SmiDevice(
        index=index,
        name=_text(ask("nvmlDeviceGetName") or ""),
        label=f"GPU {index}",
        health=health_of(errors),
        total_bytes=None if memory is None else memory.total,
        used_bytes=None if memory is None else memory.used,
        utilization_percent=None if use is None else float(use.gpu),
        temperature_celsius=ask("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),
        power_watts=None if power is None else power / 1000,
        processes=None
        if running is None
        else tuple(SmiProcess(one.pid, _name(one.pid), one.usedGpuMemory) for one in running),
    )


def _name(pid: int) -> str:
    """The name of a process; empty where it cannot be seen (another container's)."""
    import psutil

    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return ""


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
