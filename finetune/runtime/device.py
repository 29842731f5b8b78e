"""The device table, and what a device can do: the only file that says torch.cuda, torch.npu or
torch.mps.

NPU comes before CUDA because `torch_npu`'s transfer module makes CUDA look present (accelerate has
the same order). torch is imported inside the functions: the table is read without it.
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
    visible_variable: str  # environment variable that selects devices; empty where there is none
    fused_adamw: bool  # whether torch.optim.AdamW(fused=True) is right here
    # whether copies from page-locked host memory, and only those, run beside the computation
    pinned_copies: bool
    # What a process holds beside a model, for the plan. On a CPU measured (455 MiB after all
    # imports, 20 to 120 more in training: benchmarks/plan_memory.py), else assumed: a context of
    # driver and libraries of 1 GiB.
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

LEAST_LOCKED_BYTES = 1 << 30  # what a process must be allowed to page-lock before offload is pinned

# Errors that a device raises when it runs out of memory but that are not torch.OutOfMemoryError
# everywhere.
OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "NPU out of memory",
    "MPS backend out of memory",
    "DefaultCPUAllocator",
)


def available_device_types() -> list[str]:
    """Device types that work here, best first."""
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
    """The device type of this run. Raises ConfigError where the requested type is not available."""
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
    # DeepSpeed detects on its own (an importable torch_npu is enough for it); tell it.
    os.environ["DS_ACCELERATOR"] = chosen
    return chosen


def can_pin(device_type: str, limit: int | None = None) -> bool:
    """Whether copies between host and device profit from page-locked memory, and this process may
    lock enough.

    Args:
        limit: of locked memory, bytes; None reads this process's, and -1 means no limit.
    """
    import resource

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    enough = limit == resource.RLIM_INFINITY or limit >= LEAST_LOCKED_BYTES
    return device_type in ("npu", "cuda") and enough


def check_local_ranks(device_type: str, world: LaunchWorld) -> None:
    """Raise ConfigError if more processes than devices were started on this machine."""
    count = device_count(device_type)
    if count is not None and world.local_world_size > count:
        variable = DEVICE_KINDS[device_type].visible_variable
        shown = (
            f"{variable}={os.environ[variable]}"
            if variable in os.environ
            else f"{variable} is not set"
        )
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
    """How many devices this process can see; None where processes may share (CPU)."""
    import torch

    if device_type in ("npu", "cuda"):
        return int(getattr(torch, device_type).device_count())
    return 1 if device_type == "mps" else None


@dataclass(frozen=True)
class Capabilities:
    """What the device of this process can do; the one table that is asked instead of device
    types.
    """

    name: str
    bfloat16: bool  # arithmetic in hardware (on a CPU: supported, though it pays only compiled)
    fp8: bool = False  # matrix products of float8 numbers
    flash: bool = False  # fused attention without a matrix of scores
    hopper: bool = False  # what FlashAttention 3's kernels are written for
    compile: bool = False  # whether torch.compile pays without being asked for
    peak_flops: float | None = None  # dense 16-bit matrix operations per second; None if unknown


def capabilities(device_type: str) -> Capabilities:
    """What this process's device can do."""
    import torch

    if device_type == "cuda":
        generation, name = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
        return Capabilities(
            name,
            bfloat16=torch.cuda.is_bf16_supported(including_emulation=False),
            fp8=generation >= (8, 9),  # Ada and Hopper on
            flash=generation >= (8, 0),
            hopper=generation == (9, 0),
            compile=generation >= (7, 0),  # Triton's least
            peak_flops=peak_flops(name),
        )
    if device_type == "npu":
        npu = getattr(torch, device_type)
        name = str(getattr(npu, "get_device_name", lambda: "npu")())
        # Dynamo has backends there, but they are young: compile only if asked by name.
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
    """Peak of a device by its name; None for one that is not in the table."""
    padded = f" {name} ".replace("-", " ").lower()
    return next((flops for known, flops in PEAK_FLOPS if f"{known.lower()} " in padded), None)


def choose_backend(requested: str, device_type: str) -> str:
    """The process group's backend. Raises ConfigError for one that does not work with this
    device.
    """
    own = DEVICE_KINDS[device_type].backend
    chosen = own if requested == "auto" else requested
    # gloo moves CUDA tensors through the host: slow, but it works where NCCL does not. accelerate
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
    """The compute dtype: bfloat16 where the device has it in hardware, float32 elsewhere, unless
    asked.

    On a CPU bfloat16 pays only when compiled, so `auto` means float32 there.

    Raises:
        ConfigError: bfloat16 or float16 asked for where the device does not have it.
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
    """Memory of a device that no process holds; None where the device does not say."""
    import torch

    if device_type in ("cuda", "npu"):
        return int(getattr(torch, device_type).mem_get_info(index)[0])
    return None


def peak_memory_bytes(device: torch.device) -> int | None:
    """Highest memory allocated on the device so far; on a CPU the process's own high-water mark;
    None if unknown.
    """
    import torch

    if device.type in ("cuda", "npu"):
        return int(getattr(torch, device.type).max_memory_allocated())
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    return peak_host_bytes()


def host_buffer(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Float32 host memory for copies of a device's tensors: pinned for CUDA, whose copies then need
    not be waited for one by one.
    """
    import torch

    # torch rounds pinned memory up to powers of two, and keeps what is freed for later buffers.
    return torch.empty(tuple(shape), dtype=torch.float32, pin_memory=device.type == "cuda")


def wait_for_copies(device: torch.device) -> None:
    """Wait for the copies into pinned memory that this thread has asked for."""
    import torch

    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def empty_cache(device: torch.device) -> None:
    """Give cached device memory back, so that a smaller attempt can use it."""
    import torch

    if device.type in ("cuda", "npu", "mps"):
        getattr(torch, device.type).empty_cache()


def read_later(number: torch.Tensor) -> Callable[[], float]:
    """A number that the device will have computed, for a host that goes on meanwhile.

    Args:
        number: of one element; what is given to the device after this call does not delay the
            answer.
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
    """Whether an exception means that a device (or the host allocator) ran out of memory."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        text in str(error) for text in OUT_OF_MEMORY_TEXTS
    )


def use_fast_matmul(device_type: str) -> None:
    """TF32 for float32 matrix products where there are tensor cores; nothing elsewhere."""
    import torch

    if device_type == "cuda":
        torch.set_float32_matmul_precision("high")
