"""This process's ranks from its launcher, the environment set before torch is imported, and imports
that need care.

An installed but unloadable torch_npu makes `import torch` itself crash, so it is tried in a
subprocess first.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from finetune.errors import ConfigError
from finetune.runtime.host import MIB, usable_cores
from finetune.runtime.ports import free_port

logger = logging.getLogger("finetune")


@dataclass(frozen=True)
class LaunchWorld:
    """This process's ranks from the launcher's variables, before any process group exists."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launched: bool  # by a launcher; False for plain `python -m`

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def launch_world() -> LaunchWorld:
    """Return this process's ranks. A WORLD_SIZE without RANK (an old script's) is ignored, with a
    warning.
    """
    environment = os.environ
    if "RANK" not in environment:
        if "WORLD_SIZE" in environment:
            logger.warning(
                "WORLD_SIZE=%s is set but RANK is not: ignored, this is a run of one process. Fix:"
                " unset WORLD_SIZE, and start several processes with torchrun or accelerate"
                " launch.",
                environment.pop("WORLD_SIZE"),
            )
        return LaunchWorld(0, 0, 1, 1, launched=False)
    world_size = int(environment.get("WORLD_SIZE", "1"))
    return LaunchWorld(
        rank=int(environment["RANK"]),
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        world_size=world_size,
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", world_size)),
        launched=True,
    )


def probe_torch_npu() -> None:
    """Raise ConfigError if torch_npu is installed but cannot be loaded: importing torch would
    crash.
    """
    if importlib.util.find_spec("torch_npu") is None:
        return
    probe = subprocess.run(
        [sys.executable, "-c", "import torch, torch_npu"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if probe.returncode == 0:
        return
    reason = (probe.stderr.strip().splitlines() or ["no message"])[-1]
    raise ConfigError(
        f"torch_npu is installed but cannot be loaded: {reason}",
        where="import torch_npu",
        fix=(
            "source CANN's set_env.sh in this shell (it sets ASCEND_HOME_PATH and the library"
            " path), install the torch_npu that matches this torch, or remove torch_npu where there"
            " is no NPU: pip uninstall torch_npu"
        ),
    )


def prepare_environment(
    world: LaunchWorld,
    *,
    use_deepspeed: bool,
    timeout_seconds: int,
    npu_variables: Mapping[str, tuple[str, str]] | None = None,
) -> list[str]:
    """Set variables that the user did not, before torch is imported. Return a line for each: what
    was set and why.

    A variable that the user set is never changed, with three exceptions that would silently train
    something else. ACCELERATE_USE_CPU, ACCELERATE_USE_DEEPSPEED and ACCELERATE_MIXED_PRECISION are
    removed, because our own configuration decides them. For example, with ACCELERATE_USE_CPU=true
    accelerate silently drops a DeepSpeed plugin.

    Raises:
        ConfigError: the launcher requests DeepSpeed but the configuration has no DeepSpeed keys.
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
            where=(
                "ACCELERATE_USE_DEEPSPEED (accelerate launch --use_deepspeed, or its config file)"
            ),
            fix=(
                "add --config ds_configs/zero3.json (or --deepspeed FILE), or launch without"
                " --use_deepspeed"
            ),
        )
    for name in ("ACCELERATE_USE_CPU", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_MIXED_PRECISION"):
        os.environ.pop(name, None)
    if world.world_size > 1:
        default(
            "OMP_NUM_THREADS",
            str(max(1, usable_cores() // world.local_world_size)),
            "cores per process",
        )
    if use_deepspeed and sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):
        # All environments share torch's default folder, and each rebuilds what another has built.
        default(
            "TORCH_EXTENSIONS_DIR",
            os.path.join(sys.prefix, "torch_extensions"),
            "built once per environment",
        )
    if use_deepspeed and not world.launched:
        # Without these DeepSpeed looks for mpi4py and crashes.
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
    default("TOKENIZERS_PARALLELISM", "false", "tokenizing is parallel by processes")
    return added


def import_bitsandbytes() -> None:
    """Import bitsandbytes if it is installed, without a message and without a download.

    Call it before peft is imported, which imports bitsandbytes too.

    On some CPUs bitsandbytes lets the package `kernels` download a kernel for inference, and warns
    without it (0.50.2, backends/cpu/ops.py). Training computes quantized layers differently
    (modeling/quantization.py).
    """
    if "bitsandbytes" in sys.modules or importlib.util.find_spec("bitsandbytes") is None:
        return
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    loaded = sys.modules.get("kernels")
    sys.modules["kernels"] = None  # type: ignore[assignment]  # an import of it fails
    try:
        import bitsandbytes  # noqa: F401
    finally:
        del sys.modules["kernels"]
        if loaded is not None:
            sys.modules["kernels"] = loaded


# ---------------------------------------------------------------- tuning of NPUs

# Environment variables of CANN and torch_npu for speed. All are off unless requested: no published
# training figure supports them, and none was measured here. The descriptions are from the Ascend
# Extension for PyTorch's and HCCL's references of environment variables.
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


def npu_variables(
    tuning: Collection[str], hccl_buffer_mb: int | None
) -> dict[str, tuple[str, str]]:
    """Return the variables to set: name -> (value, why)."""
    found = {
        variable: (value, why) for name, (variable, value, why) in TUNINGS.items() if name in tuning
    }
    if hccl_buffer_mb is not None:
        found["HCCL_BUFFSIZE"] = (str(hccl_buffer_mb), "MB of each communicator's two buffers")
    return found


def hccl_buffer_bytes(hccl_buffer_mb: int | None, communicators: int) -> int:
    """Return the device memory of HCCL's buffers: each communicator has one to send and one to
    receive.
    """
    return 2 * communicators * (hccl_buffer_mb or HCCL_BUFFER_MB) * MIB
