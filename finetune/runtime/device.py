"""The device table and devices' capabilities: the only file that names torch.cuda, torch.npu or
torch.mps.

NPU comes before CUDA because `torch_npu`'s transfer module makes CUDA look available (accelerate
has the same order). torch is imported inside the functions: the table can be read without it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from finetune.errors import ConfigError
from finetune.runtime.host import MIB, peak_host_bytes
from finetune.runtime.launch_environment import LaunchWorld

if TYPE_CHECKING:
    import torch

DeviceType = Literal["auto", "npu", "cuda", "mps", "cpu"]


@dataclass(frozen=True)
class DeviceKind:
    """One entry of the device table."""

    backend: str  # the process group's
    visible_variable: str  # environment variable that selects devices; empty if there is none
    fused_adamw: bool  # whether torch.optim.AdamW(fused=True) is correct here
    # whether copies from page-locked host memory, and only those, overlap with computation
    pinned_copies: bool
    # What a process holds in addition to a model, for the plan. Measured on a CPU (455 MiB after
    # all imports, 20 to 120 more in training: benchmarks/plan_memory.py), otherwise assumed: a
    # context of driver and libraries of 1 GiB.
    host_bytes: int
    context_bytes: int  # of the device


# By torch's device type, in order of preference.
DEVICE_KINDS = {
    "npu": DeviceKind(
        "hccl",
        "ASCEND_RT_VISIBLE_DEVICES",
        False,
        True,
        host_bytes=3072 * MIB,
        context_bytes=1024 * MIB,
    ),
    "cuda": DeviceKind(
        "nccl", "CUDA_VISIBLE_DEVICES", True, True, host_bytes=3072 * MIB, context_bytes=1024 * MIB
    ),
    "mps": DeviceKind("gloo", "", False, False, host_bytes=1024 * MIB, context_bytes=0),
    "cpu": DeviceKind("gloo", "", True, False, host_bytes=550 * MIB, context_bytes=0),
}

LEAST_LOCKED_BYTES = 1 << 30  # a process must be allowed to page-lock this for pinned offload

# Messages of out-of-memory errors that are not torch.OutOfMemoryError on every device.
OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "NPU out of memory",
    "MPS backend out of memory",
    "DefaultCPUAllocator",
)


def available_device_types() -> list[str]:
    """Return the device types that work here, best first."""
    import torch

    candidates = ["cuda"]
    if importlib.util.find_spec("torch_npu") is not None:
        import torch_npu  # noqa: F401  (registers torch.npu)

        candidates = ["npu", "cuda"]
    found = [name for name in candidates if getattr(torch, name).is_available()]
    if torch.backends.mps.is_available():
        found.append("mps")
    return [*found, "cpu"]


def choose_device_type(requested: str) -> str:
    """Return the device type of this run. Raises ConfigError if the requested one is
    unavailable.
    """
    available = available_device_types()
    chosen = available[0] if requested == "auto" else requested
    if chosen not in available:
        raise ConfigError(
            f"device type {requested!r} is not available on this machine; available:"
            f" {', '.join(available)}",
            where="--device-type",
            fix=(
                "leave --device-type out to take the best one, or install the driver and package it"
                " needs"
            ),
        )
    # DeepSpeed detects the device on its own, and an importable torch_npu is enough for it.
    os.environ["DS_ACCELERATOR"] = chosen
    return chosen


def can_pin(device_type: str) -> bool:
    """Return whether copies between host and device profit from page-locked memory, and this
    process may lock enough.
    """
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_enough = limit == resource.RLIM_INFINITY or limit >= LEAST_LOCKED_BYTES
    return device_type in ("npu", "cuda") and is_enough


def check_local_ranks(device_type: str, world: LaunchWorld) -> None:
    """Raise ConfigError if more processes than devices were started on this machine."""
    count = device_count(device_type)
    if count is not None and world.local_world_size > count:
        variable = DEVICE_KINDS[device_type].visible_variable
        shown = f"{variable} is not set"
        if variable in os.environ:
            shown = f"{variable}={os.environ[variable]}"
        raise ConfigError(
            f"{world.local_world_size} processes were started here, on {count} {device_type}"
            " device(s)",
            where=shown,
            fix=(
                f"start at most {count} processes per machine (--nproc_per_node {count}), or make"
                " more devices visible"
            ),
        )


def device_count(device_type: str) -> int | None:
    """Return how many devices this process can use; None if processes can share one (CPU)."""
    import torch

    if device_type in ("npu", "cuda"):
        return int(getattr(torch, device_type).device_count())
    return 1 if device_type == "mps" else None


@dataclass(frozen=True)
class Capabilities:
    """What this process's device can do. Other code checks these fields instead of device types."""

    name: str
    bfloat16: bool  # arithmetic in hardware (on a CPU: supported, but only faster when compiled)
    fp8: bool = False  # matrix products of float8 values
    flash: bool = False  # fused attention without a matrix of scores
    hopper: bool = False  # the architecture of FlashAttention 3's kernels
    compile: bool = False  # whether torch.compile pays by default
    peak_flops: float | None = None  # dense 16-bit matrix operations per second; None if unknown


def capabilities(device_type: str) -> Capabilities:
    """Return what this process's device can do."""
    import torch

    if device_type == "cuda":
        generation, name = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
        return Capabilities(
            name,
            bfloat16=torch.cuda.is_bf16_supported(including_emulation=False),
            fp8=generation >= (8, 9),  # Ada and Hopper on
            flash=generation >= (8, 0),
            hopper=generation == (9, 0),
            compile=generation >= (7, 0),  # Triton's minimum
            peak_flops=peak_flops(name),
        )
    if device_type == "npu":
        npu = getattr(torch, device_type)
        name = str(getattr(npu, "get_device_name", lambda: "npu")())
        # Dynamo has backends there, but they are young: compile only on request.
        return Capabilities(name, npu.is_bf16_supported(), flash=True, peak_flops=peak_flops(name))
    return Capabilities(device_type, device_type == "cpu")


# Dense bfloat16 (float16 on Ascend) operations per second, from the vendors' data sheets; more
# specific names first. 910B3 and 910B4 are an eighth of their servers' figures (Atlas 800T A2,
# Atlas 800I A2).
PEAK_FLOPS = (
    ("B200", 2.25e15),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("A40", 149.7e12),
    ("A10", 125e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
    ("910B3", 313e12),
    ("910B4", 280e12),
    ("910A", 256e12),
)


def peak_flops(name: str) -> float | None:
    """Return the peak of a device by its name; None if it is not in the table."""
    padded = f" {name} ".replace("-", " ").lower()
    return next((flops for known, flops in PEAK_FLOPS if f"{known.lower()} " in padded), None)


def choose_backend(requested: str, device_type: str) -> str:
    """Return the process group's backend. Raises ConfigError if it does not work with this
    device.
    """
    own = DEVICE_KINDS[device_type].backend
    chosen = own if requested == "auto" else requested
    # gloo moves CUDA tensors through the host: slow, but it works if NCCL does not. accelerate
    # forces hccl on NPU.
    usable = [own, "gloo"] if device_type == "cuda" else [own]
    if chosen not in usable:
        raise ConfigError(
            f"backend {chosen} does not work with {device_type}",
            where="--backend",
            fix=f"leave it out, or use {' or '.join(usable)}",
        )
    return chosen


def choose_dtype(requested: str, device_type: str) -> str:
    """Return the compute dtype. auto: bfloat16 if the device has it in hardware, else float32.

    On a CPU bfloat16 is only faster when compiled, so `auto` means float32 there.

    Raises:
        ConfigError: the device does not have the requested dtype.
    """
    has_bfloat16 = capabilities(device_type).bfloat16
    if requested == "auto":
        return "bfloat16" if device_type in ("cuda", "npu") and has_bfloat16 else "float32"
    if requested == "bfloat16" and not has_bfloat16:
        raise ConfigError(
            f"this {device_type} device has no bfloat16",
            where="--dtype",
            fix="use --dtype float16 or --dtype float32",
        )
    if requested == "float16" and device_type in ("cpu", "mps"):
        raise ConfigError(
            f"float16 training needs a gradient scaler, which {device_type} does not have here",
            where="--dtype",
            fix="use --dtype float32 or bfloat16",
        )
    return requested


def free_memory_bytes(device_type: str, index: int) -> int | None:
    """Return the memory of a device that no process holds; None if the device does not report
    it.
    """
    import torch

    if device_type in ("cuda", "npu"):
        return int(getattr(torch, device_type).mem_get_info(index)[0])
    return None


def peak_memory_bytes(device: torch.device) -> int | None:
    """Return the peak memory allocated on the device so far; on a CPU the process's own peak; None
    if unknown.
    """
    import torch

    if device.type in ("cuda", "npu"):
        return int(getattr(torch, device.type).max_memory_allocated())
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    return peak_host_bytes()


def host_buffer(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return float32 host memory for copies of a device's tensors: pinned for CUDA, so that the
    host need not wait for each copy.
    """
    import torch

    # torch rounds pinned memory up to powers of two, and keeps freed memory for later buffers.
    return torch.empty(tuple(shape), dtype=torch.float32, pin_memory=device.type == "cuda")


def wait_for_copies(device: torch.device) -> None:
    """Wait for this thread's copies into pinned memory."""
    import torch

    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def empty_cache(device: torch.device) -> None:
    """Free cached device memory, so that a smaller attempt can use it."""
    import torch

    if device.type in ("cuda", "npu", "mps"):
        getattr(torch, device.type).empty_cache()


def read_later(number: torch.Tensor) -> Callable[[], float]:
    """Return a function that reads a number which the device still computes, so that the host can
    continue meanwhile.

    Args:
        number: has one element; work queued on the device after this call does not delay reading.
    """
    import torch

    kind = number.device.type
    if kind not in DEVICE_KINDS or not DEVICE_KINDS[kind].pinned_copies:
        value = float(number)
        return lambda: value
    host = torch.empty(number.shape, dtype=number.dtype).pin_memory()
    host.copy_(number, non_blocking=True)
    copied = getattr(torch, kind).Event()
    copied.record()

    def read() -> float:
        copied.synchronize()
        return float(host)

    return read


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that a device (or the host allocator) is out of memory."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        text in str(error) for text in OUT_OF_MEMORY_TEXTS
    )


def use_fast_matmul(device_type: str) -> None:
    """Use TF32 for float32 matrix products on CUDA devices, which have tensor cores for it."""
    import torch

    if device_type == "cuda":
        torch.set_float32_matmul_precision("high")
