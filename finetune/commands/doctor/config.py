"""The configuration of a run, as far as it can be judged without torch: values, batch arithmetic, paths, output folder.

Also what a configuration asks of the machine: DeepSpeed, its CPU Adam, pinned memory, host memory, disk.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.commands.doctor.check import Check, fail, failed, ok, problems_of, warn
from finetune.config.kinds import RunKind, kind_of_config
from finetune.config.paths import is_hub_id
from finetune.config.resolution import resolve
from finetune.config.run_config import BaseConfig
from finetune.errors import FinetuneError
from finetune.storage.run_folder import describe_folder
from finetune.storage.run_lock import LOCK_NAME


def check_config(words: Sequence[str], kind: RunKind, world_size: int) -> tuple[BaseConfig | None, list[Check]]:
    """Resolve a configuration: (what it is, or None), and the checks of its values and batch."""
    try:
        resolved = resolve(words, world_size=world_size, model_class=kind.config_class)
    except FinetuneError as error:
        return None, [failed("config", problem) for problem in problems_of(error)]
    config = resolved.config
    doubts = [note.removeprefix("warning: ") for note in resolved.notes if note.startswith("warning: ")]
    what = f"{kind.name}: the configuration is valid"
    checks = [ok("config", what, f"{kind.name}：配置有效")]
    checks += [warn("config", (doubt, doubt), (doubt, doubt)) for doubt in doubts]
    return config, [*checks, check_batch(config, world_size)]


def check_batch(config: BaseConfig, world_size: int) -> Check:
    """The batch as it comes out: whole numbers, which resolving has made sure of."""
    said, values = config.describe_batch(world_size)
    return ok("batch", said, said, **values)


def check_places(config: BaseConfig, *, waits: bool = False) -> list[Check]:
    """Files and folders that the configuration names, and what the output folder holds.

    Args:
        waits: the run will be started, and waits a while for another one to leave the output folder.
    """
    problems = kind_of_config(config).check(config)
    checks = [failed("paths", problem) for problem in problems]
    if not checks:
        checks = [ok("paths", "files and folders of the configuration are there", "配置中的文件与目录均存在")]
    return [*checks, check_output(config, waits=waits)]


def check_output(config: BaseConfig, *, waits: bool = False) -> Check:
    """Whether the output folder is free, a run to go on with, taken, or somebody else's."""
    name, folder = "output_folder", Path(config.output_dir)
    other = ("choose an empty or new --output-dir", "请选择空的或新的 --output-dir")
    try:
        found = describe_folder(folder)
    except FinetuneError as problem:
        return failed(name, problem)
    if found.kind == "empty":
        return ok(name, f"{folder} is free", f"{folder} 可用")
    if found.kind == "other":
        return fail(
            name,
            (f"{folder} is not empty and holds no run", f"{folder} 非空，且不是本软件的训练目录"),
            other,
        )
    holder = lock_holder(folder / LOCK_NAME)
    if holder is not None:
        verdict = warn if waits else fail
        return verdict(
            name,
            (f"{folder} is in use by another run ({holder})", f"{folder} 正被另一个训练使用（{holder}）"),
            ("wait for it, or choose another --output-dir", "请等待其结束，或选择其他 --output-dir"),
        )
    state = (found.status or {}).get("state", "unknown")
    step = (found.status or {}).get("step")
    at = "" if step is None else f" at step {step}"
    at_zh = "" if step is None else f"，第 {step} 步"
    return ok(
        name,
        f"{folder} holds a run ({state}{at}): the same run goes on there, another is refused",
        f"{folder} 中有一个训练（{state}{at_zh}）：同一训练会继续，不同的训练会被拒绝",
        state=state,
    )


def lock_holder(path: Path) -> str | None:
    """Who holds a run folder's lock, as signed there; None where nobody does. Changes nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        try:
            signed = json.loads(os.pread(descriptor, 4096, 0))
            return f"pid {signed['pid']} on {signed['host']}"
        except (ValueError, KeyError, TypeError):
            return "unknown process"
    except OSError:
        return None  # a file system without locks
    finally:
        os.close(descriptor)
    return None


# ---------------------------------------------------------------- what the run asks of the machine


@dataclass(frozen=True)
class Demands:
    """What a configuration asks of the machine; lower bounds, 0 where nothing is known.

    Attributes:
        deepspeed: the run is under DeepSpeed.
        cpu_adam: the optimizer is DeepSpeed's CPU Adam, which has to be built.
        pinned: host memory is pinned for offload.
        loader_workers: loader processes of each process.
        host_bytes: host memory of this machine, and what for, in English and Chinese.
        disk_bytes: space in the output folder.
    """

    deepspeed: bool = False
    cpu_adam: bool = False
    pinned: bool = False
    loader_workers: int = 0
    host_bytes: int = 0
    host_for: tuple[str, str] = ("", "")
    disk_bytes: int = 0


def demands_of(config: BaseConfig | None, device_type: str, processes: int, nodes: int) -> Demands:
    """What a configuration asks of one of its machines."""
    if config is None:
        return Demands()
    keys: dict[str, Any] = config.deepspeed or {}
    zero = keys.get("zero_optimization", {})
    optimizer, parameters = (zero.get(name) or {} for name in ("offload_optimizer", "offload_param"))
    weights = weight_bytes(config.base_model) if config.base_model is not None else 0
    full = config.trains_all_weights
    host_bytes, host_for = 0, ("", "")
    if device_type == "cpu" and weights:
        host_bytes = weights // nodes if zero.get("stage") == 3 else weights * processes
        host_for = ("the model's weights", "模型权重")
    if parameters.get("device") == "cpu":
        host_bytes, host_for = weights // nodes, ("offloaded weights", "卸载到主机的权重")
    if full and optimizer.get("device") == "cpu":
        # float32 weights, gradients and two moments: 16 bytes for each parameter of 2 bytes on disk.
        host_bytes += 8 * weights // nodes
        host_for = ("offloaded weights and optimizer", "卸载到主机的权重与优化器")
    # Float32 weights and two moments in each checkpoint, of which there is one too many while the next is written.
    disk_bytes = (6 * weights * (config.save_total_limit + 1) + weights) if full else 0
    return Demands(
        deepspeed=bool(keys),
        cpu_adam=optimizer.get("device") == "cpu" and keys.get("zero_force_ds_cpu_optimizer") is True,
        pinned=any(block.get("pin_memory") is True for block in (optimizer, parameters)),
        loader_workers=config.dataloader_num_workers,
        host_bytes=host_bytes,
        host_for=host_for,
        disk_bytes=disk_bytes,
    )


def weight_bytes(model: str) -> int:
    """Bytes of a local model's safetensors; 0 for a model on the hub."""
    if is_hub_id(model) or not Path(model).is_dir():
        return 0
    return sum(path.stat().st_size for path in Path(model).glob("*.safetensors"))
