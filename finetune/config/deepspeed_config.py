"""The user's DeepSpeed keys -> the dictionary that DeepSpeed is given.

The batch numbers, optimizer, scheduler, clipping and dtype are this package's
(`deepspeed_settings`); DeepSpeed sees microbatches: micro-batch 1, accumulation 1. What is set here
and not by the user has its reason beside it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from finetune.config.deepspeed_settings import OURS
from finetune.config.run_config import RunConfig


def zero_stage(config: RunConfig) -> int:
    """The ZeRO stage; 0 without DeepSpeed."""
    return int((config.deepspeed or {}).get("zero_optimization", {}).get("stage", 0))


def offloads(deepspeed: Mapping[str, Any] | None, what: str) -> bool:
    """Whether DeepSpeed's keys put `what`, param or optimizer, into the host's memory or on its
    disks.
    """
    block = (deepspeed or {}).get("zero_optimization", {}).get(f"offload_{what}") or {}
    return block.get("device", "none") != "none"


def deepspeed_dict(
    config: RunConfig, *, world_size: int, dtype: str, largest_adapter_tensor: int, pin: bool
) -> dict[str, Any]:
    """The dictionary for TrainingArguments(deepspeed=...).

    Args:
        dtype: resolved compute dtype.
        largest_adapter_tensor: numbers in the largest LoRA tensor; 0 for full-parameter training.
        pin: page-lock what is offloaded, where the keys do not say.
    """
    given = copy.deepcopy(config.deepspeed or {})
    made = {key: value for key, value in given.items() if key not in OURS}
    fp16 = {key: value for key, value in given.get("fp16", {}).items() if value != "auto"}
    made |= {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": world_size,
        "gradient_clipping": config.max_grad_norm,
        "bf16": {**given.get("bf16", {}), "enabled": dtype == "bfloat16"},
        "fp16": fp16 | {"enabled": dtype == "float16"},
        "zero_allow_untested_optimizer": True,
    }
    # torch's AdamW, not DeepSpeedCPUAdam: the latter multiplies beta^t step by step but takes a
    # power after a restart, so a resumed run would differ. The user may ask for it (large
    # full-parameter runs are faster with it).
    made.setdefault("zero_force_ds_cpu_optimizer", False)
    # bf16 gradients of many microbatches would be added up in bf16 otherwise.
    made.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
    made.setdefault("steps_per_print", 2**31)
    zero = made.setdefault("zero_optimization", {})
    for what in ("param", "optimizer"):
        # Chosen before a run starts (planning/auto.py); what only looks at the configuration takes
        # the sparing way.
        if (zero.get(f"offload_{what}") or {}).get("device") == "auto":
            zero[f"offload_{what}"]["device"] = "cpu"
        # DeepSpeed's own default is true: copies of other memory hold up the device, and Ascend's
        # wait for its end. On a CPU there is nothing to copy to, and where little may be locked
        # pinning fails in the middle of the start.
        if offloads(made, what):
            zero[f"offload_{what}"].setdefault("pin_memory", pin)
    if zero.get("stage") == 3:
        _keep_adapters_resident(zero, largest_adapter_tensor)
    return made


def _keep_adapters_resident(zero: dict[str, Any], largest_adapter_tensor: int) -> None:
    """Raise the persistence threshold above the largest adapter tensor, unless the user gave a
    number.

    DeepSpeed's "auto" is 10 x hidden size, which most LoRA tensors exceed: they would be sharded
    and gathered one by one, hundreds of tiny collectives per pass, for tensors of a few hundred MB
    in all.
    """
    key = "stage3_param_persistence_threshold"
    if zero.get(key, "auto") == "auto":
        zero[key] = max(100_000, largest_adapter_tensor)  # DeepSpeed's own default is 1e5
