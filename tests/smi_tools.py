"""Stand-ins for drivers: an npu-smi that prints a text of `smi_outputs/`, and NVML's library."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

OUTPUTS = Path(__file__).resolve().parent / "smi_outputs"
MIB = 1 << 20


def make_tools(folder: Path, tools: dict[str, str]) -> None:
    """Write an executable for each tool name, which prints a text."""
    folder.mkdir(exist_ok=True)
    for name, file in tools.items():
        tool = folder / name
        tool.write_text(f'#!/bin/sh\ncat "{OUTPUTS / file}"\n')
        tool.chmod(0o755)


@dataclass
class FakeGpu:
    """A GPU or a MIG slice. A number that is None is one that the device does not support; sizes in
    MiB.

    Attributes: computing, drawing: (process id, MiB or None) of processes; None where there is no
        permission.
        slices: MIG slices by number, None where MIG is not supported.
        fails: question -> code of the error that it raises.
    """

    name: str = "NVIDIA L4"
    total: int | None = 100
    used: int | None = 40
    use: int | None = 7
    celsius: int | None = 50
    ecc: int | None = 0
    computing: list[tuple[int, int | None]] | None = field(default_factory=list)
    drawing: list[tuple[int, int | None]] = field(default_factory=list)
    slices: dict[int, FakeGpu] | None = None
    fails: dict[str, int] = field(default_factory=dict)


class FakeNvml:
    """What `finetune.runtime.smi` asks of pynvml, with the real errors."""

    def __init__(
        self, *gpus: FakeGpu, init_error: int = 0, driver: str = "580.65.06", cuda: int = 13000
    ) -> None:
        self.gpus, self.init_error, self.driver, self.cuda = gpus, init_error, driver, cuda
        self.users = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the place of the library."""
        for name in (name for name in dir(type(self)) if name.startswith("nvml")):
            monkeypatch.setattr(pynvml, name, getattr(self, name))

    def nvmlInit(self) -> None:
        if self.init_error:
            raise pynvml.NVMLError(self.init_error)
        self.users += 1

    def nvmlShutdown(self) -> None:
        self._need_init()
        self.users -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        self._need_init()
        return self.driver

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        self._need_init()
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        self._need_init()
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        self._need_init()
        if not 0 <= index < len(self.gpus):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._asked(self.gpus[index], "handle", self.gpus[index])

    def nvmlDeviceGetName(self, handle: FakeGpu) -> str:
        return self._asked(handle, "name", handle.name)

    def nvmlDeviceGetMigMode(self, handle: FakeGpu) -> list[int]:
        self._asked(handle, "mig", handle.slices)
        return [1, 1] if handle.slices else [0, 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: FakeGpu) -> int:
        self._asked(handle, "mig", handle.slices)
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: FakeGpu, index: int) -> FakeGpu:
        if index not in self._asked(handle, "mig", handle.slices):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return handle.slices[index]

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu) -> SimpleNamespace:
        total = self._asked(handle, "memory", handle.total)
        used = handle.used
        return SimpleNamespace(total=total * MIB, used=used * MIB, free=(total - used) * MIB)

    def nvmlDeviceGetUtilizationRates(self, handle: FakeGpu) -> SimpleNamespace:
        return SimpleNamespace(gpu=self._asked(handle, "use", handle.use), memory=0)

    def nvmlDeviceGetTemperature(self, handle: FakeGpu, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._asked(handle, "temperature", handle.celsius)

    def nvmlDeviceGetTotalEccErrors(self, handle: FakeGpu, kind: int, counter: int) -> int:
        assert kind == pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        assert counter == pynvml.NVML_VOLATILE_ECC
        return self._asked(handle, "ecc", handle.ecc)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: FakeGpu) -> list[SimpleNamespace]:
        refusal = pynvml.NVML_ERROR_NO_PERMISSION
        return _running(self._asked(handle, "processes", handle.computing, refusal))

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: FakeGpu) -> list[SimpleNamespace]:
        return _running(self._asked(handle, "drawing", handle.drawing))

    def _need_init(self) -> None:
        if not self.users:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    def _asked(self, gpu: FakeGpu, question: str, answer: Any, refusal: int | None = None) -> Any:
        self._need_init()
        if question in gpu.fails:
            raise pynvml.NVMLError(gpu.fails[question])
        if answer is None:
            raise pynvml.NVMLError(refusal or pynvml.NVML_ERROR_NOT_SUPPORTED)
        return answer


def _running(processes: list[tuple[int, int | None]]) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(pid=pid, usedGpuMemory=None if used is None else used * MIB)
        for pid, used in processes
    ]
