"""Real failures for the tests of diagnose: each function breaks a process of its own in one way.

They run in forked processes that have torch imported (see run_helpers), with their output in a log.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT = timedelta(seconds=4)
# Cause -> code that fails of it. HF_HUB_OFFLINE is set for all tests.
CODE = {
    "dtype_mismatch": "import torch; torch.nn.Linear(4, 4, dtype=torch.bfloat16)(torch.ones(2, 4))",
    "missing_package": "import a_package_that_nobody_has",
    "zero3_empty_or_size_mismatch": (
        "import torch; torch.nn.Linear(4, 4).load_state_dict({'weight': torch.empty(0), 'bias':"
        " torch.empty(0)})"
    ),
    "native_crash": "import ctypes, faulthandler; faulthandler.enable(); ctypes.string_at(0)",
    "unknown": "{'loss': 1.0}['accuracy']",
}


def run_code(rank: int, code: str) -> None:
    exec(code, {})


def _join(rank: int, port: int, world_size: int = 2, timeout: timedelta = TIMEOUT) -> Any:
    import torch.distributed as dist

    ranks = {"rank": rank, "world_size": world_size, "timeout": timeout}
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", **ranks)
    return dist


# ---------------------------------------------------------------- rendezvous and collectives


def master_is_dead(rank: int, port: int) -> None:
    """Rank 1 of two; nobody listens at the port."""
    _join(1, port, timeout=timedelta(seconds=1))


def peer_sleeps(rank: int, port: int) -> None:
    import torch

    dist = _join(rank, port)
    if rank == 1:
        time.sleep(TIMEOUT.total_seconds() + 4)
        os._exit(0)
    dist.all_reduce(torch.ones(4))


def peer_is_killed(rank: int, port: int) -> None:
    import torch

    dist = _join(rank, port)
    dist.all_reduce(torch.ones(4))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4))


def peer_fails_first(rank: int, port: int) -> None:
    """Rank 1 has no memory; rank 0 only sees it go."""
    import torch

    dist = _join(rank, port)
    if rank == 1:
        host_memory(rank, "")
    dist.all_reduce(torch.ones(4))


def interface_is_not_there(rank: int, port: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "no-such-interface"
    _join(0, port, world_size=1)


def parameters_unused(rank: int, port: int) -> None:
    import torch

    _join(rank, port)

    class Half(torch.nn.Bilinear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight[0]

    model = torch.nn.parallel.DistributedDataParallel(Half(4, 4, 4))
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()


# ---------------------------------------------------------------- limits of the system


def _limit(name: int, amount: int) -> None:
    resource.setrlimit(name, (amount, resource.getrlimit(name)[1]))


def host_memory(rank: int, folder: str) -> None:
    """Ask torch for more than the process may have."""
    import torch

    _limit(resource.RLIMIT_AS, 16 << 30)
    torch.ones(8 << 30, dtype=torch.float64)


def disk(rank: int, folder: str) -> None:
    """Fill a small file system with what torch saves."""
    import torch

    torch.save({"weight": torch.ones(4 << 20)}, Path(folder) / "weights.pt")


def open_files(rank: int, folder: str) -> None:
    _limit(resource.RLIMIT_NOFILE, 64)
    for number in range(100):
        os.open(f"{folder}/shard-{number}", os.O_CREAT)


CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 1 << 18


def shared_memory(rank: int, folder: str) -> None:
    """A /dev/shm of 64 KiB, as small containers have, seen by this process only."""
    import torch
    from torch.utils.data import DataLoader

    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.unshare(CLONE_NEWNS)
    failed = failed or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    if failed or libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64k"):
        print("NO MOUNT", os.strerror(ctypes.get_errno()))
        return
    list(DataLoader([torch.ones(1 << 20)] * 4, batch_size=1, num_workers=1))


def recomputation(rank: int, folder: str) -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    calls = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return (x[:1] if len(calls) > 1 else x).sin().cos()

    x = torch.ones(4, 4, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()


def flash_attention(rank: int, model: str) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(model, attn_implementation="flash_attention_2")


def bfloat16(rank: int, folder: str) -> None:
    from transformers import TrainingArguments

    TrainingArguments(folder, bf16=True)


def batch_sizes(rank: int, folder: str) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8}
    DeepSpeedConfig({"train_batch_size": 128, **sizes})


def no_compiler(rank: int, folder: str) -> None:
    os.environ.update(CXX="false", TORCH_EXTENSIONS_DIR=folder)
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load(verbose=False)


def wandb(rank: int, folder: str) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        os.environ.pop(name, None)
    os.environ.update(HOME=folder, NETRC=f"{folder}/netrc", WANDB_DIR=folder)
    import wandb

    wandb.init(project="diagnose")


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def drop_capabilities() -> None:
    """From here on permissions hold for root too (capset(2), version 3 of its structures, nothing
    effective).
    """
    header = _CapabilityHeader(0x20080522, 0)
    if ctypes.CDLL(None, use_errno=True).capset(ctypes.byref(header), (ctypes.c_uint32 * 6)()) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def sft_without_rights(rank: int, config: str) -> None:
    from finetune import sft

    drop_capabilities()
    raise SystemExit(sft.main(["--config", config]))
