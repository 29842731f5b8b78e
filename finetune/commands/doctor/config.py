"""The configuration of a run, as far as it can be judged without torch: values, batch arithmetic,
paths, output folder.

Also what a configuration asks of the machine: DeepSpeed, its CPU Adam, pinned memory, host memory,
disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.commands.doctor.check import Check, failed
from finetune.config.base_config import BaseConfig
from finetune.config.kinds import RunKind, run_kind
from finetune.config.paths import is_hub_id
from finetune.config.resolution import resolve
from finetune.errors import FinetuneError
from finetune.runtime.language import _
from finetune.storage.run_folder import describe_folder
from finetune.storage.run_lock import holder, is_held


def check_config(
    arguments: Sequence[str], kind: RunKind, world_size: int
) -> tuple[BaseConfig | None, list[Check]]:
    """Resolve a configuration: return it, or None, and the checks of its values and batch."""
    try:
        resolved = resolve(arguments, world_size=world_size, model_class=kind.config_class)
    except FinetuneError as error:
        return None, failed("config", error)
    checks = [Check("config").ok(_("{kind}: the configuration is valid"), kind=kind.name)]
    for note in resolved.notes:
        if note.startswith("warning: "):
            doubt = note.removeprefix("warning: ")
            checks.append(Check("config", "warn", doubt, doubt))
    batch, values = resolved.config.describe_batch(world_size)
    return resolved.config, [*checks, Check("batch", "ok", batch, values=values)]


def check_locations(config: BaseConfig, *, waits: bool = False) -> list[Check]:
    """Check the files and folders that the configuration names, and what the output folder holds.

    Args:
        waits: the run will be started, and waits a while for another one to leave the output
            folder.
    """
    checks = [check for error in run_kind(config).check(config) for check in failed("paths", error)]
    if not checks:
        checks = [Check("paths").ok(_("files and folders of the configuration are there"))]
    return [*checks, *check_output(config, waits=waits)]


def check_output(config: BaseConfig, *, waits: bool = False) -> list[Check]:
    """Check whether the output folder is free, a run to resume, in use, or not from a run."""
    check, folder = Check("output_folder"), Path(config.output_dir)
    try:
        found = describe_folder(folder)
    except FinetuneError as problem:
        return failed(check.name, problem)
    if found.kind == "empty":
        return [check.ok(_("{folder} is free"), folder=folder)]
    if found.kind == "other":
        what = _("{folder} is not empty and holds no run")
        return [check.fail(what, _("choose an empty or new --output-dir"), folder=folder)]
    if is_held(folder):
        signed = holder(folder)
        other = _("unknown process")
        if {"pid", "host"} <= signed.keys():
            other = _("pid {pid} on {host}").format(pid=signed["pid"], host=signed["host"])
        what = _("{folder} is in use by another run ({holder})")
        fix = _("wait for it, or choose another --output-dir")
        return [(check.warn if waits else check.fail)(what, fix, folder=folder, holder=other)]
    status = found.status or {}
    state, step = status.get("state", "unknown"), status.get("step")
    shown = state if step is None else _("{state} at step {step}").format(state=state, step=step)
    what = _("{folder} holds a run ({state}): the same run is resumed there, another is refused")
    return [Check(check.name, values={"state": state}).ok(what, folder=folder, state=shown)]


# ---------------------------------------------------------------- what the run asks of the machine


@dataclass(frozen=True)
class Demands:
    """What a configuration requires of one of its machines; lower bounds, 0 if nothing is known.

    Attributes:
        deepspeed: the run is under DeepSpeed.
        cpu_adam: the optimizer is DeepSpeed's CPU Adam, which has to be built.
        pinned: host memory is pinned for offload.
        loader_workers: loader processes of each process.
        host_bytes: host memory of this machine; `host_for` is what for, in the spoken language.
        disk_bytes: space in the output folder.
    """

    deepspeed: bool = False
    cpu_adam: bool = False
    pinned: bool = False
    loader_workers: int = 0
    host_bytes: int = 0
    host_for: str = ""
    disk_bytes: int = 0


def demands_of(config: BaseConfig | None, device_type: str, processes: int, nodes: int) -> Demands:
    """Return what a configuration asks of one of its machines."""
    if config is None:
        return Demands()
    keys: dict[str, Any] = config.deepspeed or {}
    zero = keys.get("zero_optimization", {})
    optimizer, parameters = zero.get("offload_optimizer") or {}, zero.get("offload_param") or {}
    has_optimizer_offload = optimizer.get("device") == "cpu"
    weights = weight_bytes(config.base_model) if config.base_model is not None else 0
    host_bytes, host_for, disk_bytes = 0, "", 0
    if device_type == "cpu" and weights:
        host_bytes = weights // nodes if zero.get("stage") == 3 else weights * processes
        host_for = _("the model's weights")
    if parameters.get("device") == "cpu":
        host_bytes, host_for = weights // nodes, _("offloaded weights")
    if config.trains_all_weights:
        if has_optimizer_offload:
            # float32 weights, gradients and two moments: 16 bytes for each parameter of 2 bytes
            # on disk
            host_bytes += 8 * weights // nodes
            host_for = _("offloaded weights and optimizer")
        # Float32 weights and two moments in each checkpoint, of which there is one too many while
        # the next is written.
        disk_bytes = 6 * weights * (config.save_total_limit + 1) + weights
    return Demands(
        deepspeed=bool(keys),
        cpu_adam=has_optimizer_offload and keys.get("zero_force_ds_cpu_optimizer") is True,
        pinned=any(_pins(block, device_type) for block in (optimizer, parameters)),
        loader_workers=config.dataloader_num_workers,
        host_bytes=host_bytes,
        host_for=host_for,
        disk_bytes=disk_bytes,
    )


def _pins(block: dict[str, Any], device_type: str) -> bool:
    """Return whether offload is pinned, or would be if as much memory as that may be locked
    (`deepspeed_dict`).
    """
    by_default = device_type in ("npu", "cuda") and block.get("device", "none") != "none"
    return bool(block.get("pin_memory", by_default))


def weight_bytes(model: str) -> int:
    """Return the bytes of a local model's safetensors; 0 for a model on the hub."""
    if is_hub_id(model):
        return 0
    return sum(path.stat().st_size for path in Path(model).glob("*.safetensors"))
