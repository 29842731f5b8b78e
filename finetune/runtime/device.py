"""The device table and the launch environment: the only file that says torch.cuda, torch.npu or torch.mps.

NPU comes before CUDA because `torch_npu`'s transfer module makes CUDA look present (accelerate has the same order).

Everything above the line "torch from here on" runs before torch is imported: an installed but unloadable torch_npu
makes `import torch` itself die, so it is probed in a subprocess first.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from finetune.errors import ConfigError
from finetune.runtime.host import peak_host_bytes, usable_cores
from finetune.runtime.peak_flops import peak_flops
from finetune.runtime.ports import free_port
from finetune.runtime.smi_report import MIB

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("finetune")


DeviceType = Literal["auto", "npu", "cuda", "mps", "cpu"]


@dataclass(frozen=True)
class DeviceKind:
    """One entry of the device table."""

    backend: str  # the process group's
    visible_variable: str  # environment variable that selects devices; empty where there is none
    fused_adamw: bool  # whether torch.optim.AdamW(fused=True) is right here
    pinned_copies: bool  # whether copies from page-locked host memory, and only those, run beside the computation
    # What a process holds beside a model, for the plan. On a CPU measured (455 MiB after all imports, 20 to 120 more
    # in training: benchmarks/plan_memory.py), else assumed: a context of driver and libraries of 1 GiB.
    host_bytes: int
    context_bytes: int  # of the device


# By torch's device type, in order of preference.
DEVICE_KINDS = {
    "npu": DeviceKind(
        "hccl", "ASCEND_RT_VISIBLE_DEVICES", False, True, host_bytes=3072 * MIB, context_bytes=1024 * MIB
    ),
    "cuda": DeviceKind("nccl", "CUDA_VISIBLE_DEVICES", True, True, host_bytes=3072 * MIB, context_bytes=1024 * MIB),
    "mps": DeviceKind("gloo", "", False, False, host_bytes=1024 * MIB, context_bytes=0),
    "cpu": DeviceKind("gloo", "", True, False, host_bytes=550 * MIB, context_bytes=0),
}

LEAST_LOCKED_BYTES = 1 << 30  # what a process must be allowed to page-lock before offload is pinned

# Errors that a device raises when it runs out of memory but that are not torch.OutOfMemoryError everywhere.
OUT_OF_MEMORY_TEXTS = ("out of memory", "NPU out of memory", "MPS backend out of memory", "DefaultCPUAllocator")


@dataclass(frozen=True)
class LaunchWorld:
    """Who this process is, as its launcher said (environment), before any process group exists."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launched: bool  # a launcher started us; False for plain `python -m`

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def launch_world() -> LaunchWorld:
    """Who this process is. A WORLD_SIZE without RANK (an old script's) is ignored, with a warning."""
    environment = os.environ
    if "RANK" not in environment:
        if "WORLD_SIZE" in environment:
            logger.warning(
                "WORLD_SIZE=%s is set but RANK is not: ignored, this is a run of one process. "
                "Fix: unset WORLD_SIZE, and start several processes with torchrun or accelerate launch.",
                environment.pop("WORLD_SIZE"),
            )
        return LaunchWorld(0, 0, 1, 1, launched=False)
    world_size = int(environment.get("WORLD_SIZE", "1"))
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    return LaunchWorld(
        int(environment["RANK"]), local_rank, world_size, int(environment.get("LOCAL_WORLD_SIZE", world_size)), True
    )


def probe_torch_npu() -> None:
    """Raise ConfigError if torch_npu is installed but cannot be loaded: importing torch would die of it."""
    if importlib.util.find_spec("torch_npu") is None:
        return
    probe = subprocess.run(
        [sys.executable, "-c", "import torch, torch_npu"], capture_output=True, text=True, timeout=300, check=False
    )
    if probe.returncode == 0:
        return
    reason = (probe.stderr.strip().splitlines() or ["no message"])[-1]
    raise ConfigError(
        f"torch_npu is installed but cannot be loaded: {reason}",
        where="import torch_npu",
        fix="source CANN's set_env.sh in this shell (it sets ASCEND_HOME_PATH and the library path), install the "
        "torch_npu that matches this torch, or remove torch_npu where there is no NPU: pip uninstall torch_npu",
    )


def prepare_environment(
    world: LaunchWorld,
    *,
    use_deepspeed: bool,
    timeout_seconds: int,
    npu_variables: Mapping[str, tuple[str, str]] | None = None,
) -> list[str]:
    """Set what the user did not, before torch is imported. Returns a line per variable: what was set and why.

    A variable that the user set is never changed, with three exceptions that would silently train something else:
    ACCELERATE_USE_CPU, ACCELERATE_USE_DEEPSPEED and ACCELERATE_MIXED_PRECISION are taken out, because our own
    configuration decides them (with ACCELERATE_USE_CPU=true, accelerate drops a DeepSpeed plugin without a word).

    Raises:
        ConfigError: the launcher asked for DeepSpeed but the configuration has no DeepSpeed keys.
    """
    added: list[str] = []
    fragmentation = "less fragmentation with microbatches of many lengths"

    def default(name: str, value: str, why: str) -> None:
        if name not in os.environ:
            os.environ[name] = value
            added.append(f"{name}={value}: {why}")

    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true" and not use_deepspeed:
        raise ConfigError(
            "the launcher asked for DeepSpeed, but the configuration has no DeepSpeed keys",
            where="ACCELERATE_USE_DEEPSPEED (accelerate launch --use_deepspeed, or its config file)",
            fix="add --config ds_configs/zero3.json (or --deepspeed FILE), or launch without --use_deepspeed",
        )
    for name in ("ACCELERATE_USE_CPU", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_MIXED_PRECISION"):
        os.environ.pop(name, None)
    if world.world_size > 1:
        default("OMP_NUM_THREADS", str(max(1, usable_cores() // world.local_world_size)), "cores per process")
    if use_deepspeed and sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):
        # torch's default folder is one for all environments, and each builds anew what another has built.
        default("TORCH_EXTENSIONS_DIR", os.path.join(sys.prefix, "torch_extensions"), "built once per environment")
    if use_deepspeed and not world.launched:
        # Without these DeepSpeed looks for mpi4py and dies.
        default("RANK", "0", "DeepSpeed needs a rank in a run of one process")
        default("LOCAL_RANK", "0", "DeepSpeed needs a local rank")
        default("WORLD_SIZE", "1", "one process")
        default("MASTER_ADDR", "127.0.0.1", "one machine")
        default("MASTER_PORT", str(free_port()), "a free port")
    if importlib.util.find_spec("torch_npu") is not None:
        for name in ("HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT"):
            default(name, str(timeout_seconds), "the same limit as the process group's")
        default("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True", fragmentation)
        for name, (value, why) in (npu_variables or {}).items():
            default(name, value, why)
    if shutil.which("nvidia-smi"):
        default("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", fragmentation)
    default("TOKENIZERS_PARALLELISM", "false", "tokenising is parallel by processes")
    return added


# ---------------------------------------------------------------- torch from here on


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
            f"device type {requested!r} is not available on this machine; available: {', '.join(available)}",
            where="--device-type",
            fix="leave --device-type out to take the best one, or install the driver and package it needs",
        )
    # DeepSpeed detects on its own (an importable torch_npu is enough for it); tell it.
    os.environ["DS_ACCELERATOR"] = chosen
    return chosen


def can_pin(device_type: str, limit: int | None = None) -> bool:
    """Whether copies between host and device profit from page-locked memory, and this process may lock enough.

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
        shown = f"{variable}={os.environ[variable]}" if variable in os.environ else f"{variable} is not set"
        raise ConfigError(
            f"{world.local_world_size} processes were started here, on {count} {device_type} device(s)",
            where=shown,
            fix=f"start at most {count} processes per machine (--nproc_per_node {count}), or make more devices visible",
        )


def device_count(device_type: str) -> int | None:
    """How many devices this process can see; None where processes may share (CPU)."""
    import torch

    if device_type in ("npu", "cuda"):
        return int(getattr(torch, device_type).device_count())
    return 1 if device_type == "mps" else None


@dataclass(frozen=True)
class Capabilities:
    """What the device of this process can do; the one table that is asked instead of device types."""

    name: str
    bfloat16: bool  # arithmetic in hardware (on a CPU: supported, though it pays only compiled)
    fp8: bool  # matrix products of float8 numbers
    flash: bool  # fused attention without a matrix of scores
    hopper: bool  # what FlashAttention 3's kernels are written for
    compile: bool  # whether torch.compile pays without being asked for
    peak_flops: float | None  # dense 16-bit matrix operations per second; None where it is unknown


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
        # Dynamo has backends there, but they are young: asked for by name only.
        bfloat16 = npu.is_bf16_supported()
        return Capabilities(
            name, bfloat16, fp8=False, flash=True, hopper=False, compile=False, peak_flops=peak_flops(name)
        )
    return Capabilities(
        device_type, device_type == "cpu", fp8=False, flash=False, hopper=False, compile=False, peak_flops=None
    )


def choose_backend(requested: str, device_type: str) -> str:
    """The process group's backend. Raises ConfigError for one that does not work with this device."""
    own = DEVICE_KINDS[device_type].backend
    chosen = own if requested == "auto" else requested
    # gloo moves CUDA tensors through the host: slow, but it works where NCCL does not. accelerate forces hccl on NPU.
    usable = [own, "gloo"] if device_type == "cuda" else [own]
    if chosen not in usable:
        raise ConfigError(
            f"backend {chosen} does not work with {device_type}",
            where="--backend",
            fix=f"leave it out, or use {' or '.join(usable)}",
        )
    return chosen


def choose_dtype(requested: str, device_type: str) -> str:
    """The compute dtype: bfloat16 where the device has it in hardware, float32 elsewhere, unless asked.

    On a CPU bfloat16 pays only when compiled, so `auto` means float32 there.

    Raises:
        ConfigError: bfloat16 or float16 asked for where the device does not have it.
    """
    has_bfloat16 = capabilities(device_type).bfloat16
    if requested == "auto":
        return "bfloat16" if device_type in ("cuda", "npu") and has_bfloat16 else "float32"
    if requested == "bfloat16" and not has_bfloat16:
        raise ConfigError(
            f"this {device_type} device has no bfloat16", where="--dtype", fix="use --dtype float16 or --dtype float32"
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
    """Highest memory allocated on the device so far; on a CPU the process's own high-water mark; None if unknown."""
    import torch

    if device.type in ("cuda", "npu"):
        return int(getattr(torch, device.type).max_memory_allocated())
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    return peak_host_bytes()


def host_buffer(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Float32 host memory for copies of a device's tensors: pinned for CUDA, whose copies then need not be waited for
    one by one.
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
        number: of one element; what is given to the device after this call does not delay the answer.
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
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY_TEXTS)


def use_fast_matmul(device_type: str) -> None:
    """TF32 for float32 matrix products where there are tensor cores; nothing elsewhere."""
    import torch

    if device_type == "cuda":
        torch.set_float32_matmul_precision("high")
