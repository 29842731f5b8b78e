"""What CANN and torch_npu offer for speed by environment variables, as choices of a run.

All are off unless asked for: no training figure that supports them was seen, and none was measured
here. What they do is from the Ascend Extension for PyTorch's and HCCL's references of environment
variables.
"""

from __future__ import annotations

from collections.abc import Collection

# name -> (variable, value, what it does)
TUNINGS = {
    "core-binding": (
        "CPU_AFFINITY_CONF",
        "2",
        "threads that launch kernels keep to cores beside their NPU",
    ),
    "task-queue": (
        "TASK_QUEUE_ENABLE",
        "2",
        "work of launching kernels is split further; may need more memory",
    ),
}
HCCL_BUFFER_MB = 200  # HCCL's own
MB = 2**20


def npu_variables(
    tuning: Collection[str], hccl_buffer_mb: int | None
) -> dict[str, tuple[str, str]]:
    """Variables to set: name -> (value, why)."""
    found = {
        variable: (value, why) for name, (variable, value, why) in TUNINGS.items() if name in tuning
    }
    if hccl_buffer_mb is not None:
        found["HCCL_BUFFSIZE"] = (str(hccl_buffer_mb), "MB of each communicator's two buffers")
    return found


def hccl_buffer_bytes(hccl_buffer_mb: int | None, communicators: int) -> int:
    """Memory of a device that HCCL's buffers take: each communicator has one to send and one to
    receive.
    """
    return 2 * communicators * (hccl_buffer_mb or HCCL_BUFFER_MB) * MB
