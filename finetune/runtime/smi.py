"""Devices as their drivers see them, without torch: they answer where torch cannot be imported, and
know who holds memory. NPUs by their tool `npu-smi`, NVIDIA GPUs by the driver's library (NVML).
"""

from __future__ import annotations

import shutil

from finetune.runtime.smi_npu import read_npus
from finetune.runtime.smi_report import SmiDevice, SmiProcess, SmiReport, visible

__all__ = ["SmiDevice", "SmiProcess", "SmiReport", "read_devices", "visible"]


def read_devices() -> list[SmiReport]:
    """A report for each driver that is installed here, NPU first; empty on a machine without
    accelerators.
    """
    return [report for report in (read_npus(), _read_gpus()) if report is not None]


def _read_gpus() -> SmiReport | None:
    try:
        from finetune.runtime.smi_nvml import read_gpus
    # an environment from before it was required: doctor says so, and must be able to
    except ImportError:
        problem = "nvidia-ml-py is not installed: pip install nvidia-ml-py"
        return SmiReport("cuda", problem=problem) if shutil.which("nvidia-smi") else None
    return read_gpus()
