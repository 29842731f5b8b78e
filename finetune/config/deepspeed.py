"""DeepSpeed's configuration: the names that it may have, the numbers in it that are settings of
ours too, and the dictionary that DeepSpeed is given. Never imports deepspeed.

DeepSpeed silently accepts a misspelt top-level key and trains with its default instead, and rejects
one inside `zero_optimization` only after the model was loaded. So names are checked first, with
those of deepspeed 0.19.8 in `deepspeed_names.json`; a test compares it with the installed
deepspeed.

A number that DeepSpeed and finetune share becomes ours if only DeepSpeed's side gives it; `"auto"`
on DeepSpeed's side means ours. Given on both sides of one file and different, it is refused even if
a flag overrides it. DeepSpeed gets `"auto"` for each of them, and no `optimizer` and `scheduler`
block: finetune makes both itself. Values of other keys are left to DeepSpeed, except for the few
that contradict how finetune trains or that DeepSpeed would reject late.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from finetune.config.base_config import BaseConfig
from finetune.config.fields import Resolution, SourcedValue, nearest
from finetune.errors import ConfigError

Names = dict[str, Any]
ANY: Names = {"*": None}
_NAMES = json.loads(Path(__file__).with_name("deepspeed_names.json").read_text("utf-8"))
# Name -> None for a value, a dict of names for a block, ANY for a block whose names are not
# checked.
KNOWN: Names = _NAMES["known"]
# Names that were removed from DeepSpeed before this version, by the path of their block.
REMOVED = {path: frozenset(names) for path, names in _NAMES["removed"].items()}


def unknown_keys(
    config: Mapping[str, Any], where: str, known: Names = KNOWN, path: str = ""
) -> Iterator[ConfigError]:
    """Yield a problem for each key that deepspeed 0.19.8 does not have, and for each value where
    it expects a block.

    Args:
        config: a DeepSpeed configuration, or the block at `path`.
        where: the file, for the message.
        known: the names that may be in this block.
    """
    for key, value in config.items():
        name = f"{path}.{key}" if path else str(key)
        if key in REMOVED.get(path, ()):
            yield ConfigError(
                f"DeepSpeed key {name} was removed from DeepSpeed", where, "remove it"
            )
        elif key not in known:
            guess = nearest(str(key), known)
            block = f"in {path}" if path else "at the top level"
            fix = (
                f"did you mean {guess!r}?"
                if guess
                else f"known names here: {', '.join(sorted(known))}"
            )
            yield ConfigError(
                f"unknown DeepSpeed key {name!r}: deepspeed has no such name {block}", where, fix
            )
        elif known[key] is not None and value is not None and known[key] != ANY:
            if isinstance(value, Mapping):
                yield from unknown_keys(value, where, known[key], name)
            else:
                what = f"DeepSpeed key {name} is {value!r}, and must be a block"
                yield ConfigError(what, where, f'write "{key}": {{...}}')


# Dotted path of a number in DeepSpeed's configuration -> our name for it; betas is a list of two.
SHARED: dict[str, str | tuple[str, str]] = {
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "train_batch_size": "global_batch_size",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": ("adam_beta1", "adam_beta2"),
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "max_steps",
}
PRECISIONS = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
}
# Top-level keys and blocks that finetune fills in.
OURS = frozenset({path.partition(".")[0] for path in SHARED} | set(PRECISIONS))

# The only accepted values of keys that could silently change the training while losses look right.
# In the optimizer and scheduler blocks: what finetune does anyway. Elsewhere: what keeps the
# gradient that of the global batch, its sum in float32, and a step with NaN skipped.
ALLOWED: dict[str, tuple[Any, ...]] = {
    "optimizer.params.bias_correction": (True,),
    "optimizer.params.adam_w_mode": (True,),
    "optimizer.params.adamw_mode": (True,),
    "optimizer.params.amsgrad": (False,),
    "optimizer.params.fp32_optimizer_states": (True,),
    "scheduler.params.warmup_min_lr": (0,),
    "scheduler.params.warmup_min_ratio": (0,),
    "scheduler.params.cos_min_ratio": (0,),
    "scheduler.params.warmup_type": ("linear",),
    "scheduler.params.last_batch_iteration": (-1,),
    "gradient_allreduce_op": ("mean",),  # the loss is scaled for a mean over ranks
    "gradient_predivide_factor": (1,),  # ZeRO-3 multiplies by it into a copy that it drops
    # the same mean; and with reduce_scatter an assertion, when all is loaded
    "prescale_gradients": (False,),
    "managed_gradient_accumulation": (True,),  # false has every microbatch end the step
    "disable_allgather": (False,),
    # in 16 bits the sum depends on the number of microbatches
    "data_types.grad_accum_dtype": ("fp32",),
    "fp16.fp16_master_weights_and_grads": (False,),
    "bf16.bf16_master_weights_and_grads": (False,),
    "bf16.bf16_optimizer_states": (False,),
    "bf16.check_grad_overflow": (True,),
    "bfloat16.bf16_master_weights_and_grads": (False,),
    "bfloat16.bf16_optimizer_states": (False,),
    "bfloat16.check_grad_overflow": (True,),
    "torch_autocast.enabled": (False,),  # the run's dtype decides the compute dtype
    "hybrid_engine.enabled": (False,),
    "zero_optimization.zero_quantized_gradients": (False,),
    "zero_optimization.offload_optimizer.super_offload": (False,),
    "zero_optimization.stage": (1, 2, 3),
    "zero_optimization.offload_param.device": ("cpu", "nvme", "none"),
    "zero_optimization.offload_optimizer.device": ("cpu", "nvme", "none"),
}

# Blocks that split one sample over several processes, or let DeepSpeed choose the samples. Here
# every process has its own microbatches, and the run alone decides which samples a step has.
UNSUPPORTED = (
    "sequence_parallel_size",
    "tensor_parallel",
    "expert_parallel",
    "pipeline",
    "data_efficiency",
)
# Blocks that delay the optimizer's step or make it partial, or change the weights that were loaded.
OTHER_TRAINING = ("zero_optimization.zenflow", "weight_quantization")

# DeepSpeed's schedule -> ours with the same curve.
SCHEDULERS = {
    "WarmupLR": "constant",
    "WarmupDecayLR": "linear",
    "WarmupCosineLR": "cosine",
}


def lookup(config: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, None if there is none."""
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def decides(value: Any) -> bool:
    """Return whether a value decides anything: it is neither null nor `auto`."""
    return value is not None and value != "auto"


def split(
    config: Mapping[str, Any], where: str, ours: Mapping[str, SourcedValue], resolution: Resolution
) -> tuple[dict[str, tuple[Any, str]], dict[str, Any]]:
    """Take the shared numbers out of a DeepSpeed configuration.

    Args:
        config: DeepSpeed's keys, without a `finetune` block.
        where: their file, for messages.
        ours: what the same file sets on our side.
        resolution: receives the notes and problems.

    Returns:
        our name -> (value, location) of each shared number that DeepSpeed's side gives, and what
        DeepSpeed gets, with `"auto"` for these.
    """
    problems = resolution.problems
    problems += unknown_keys(config, where)
    theirs: dict[str, list[tuple[Any, str]]] = {}
    for name, value, location in _shared_values(config, where, problems):
        theirs.setdefault(name, []).append((value, location))
    for name, given in theirs.items():
        if name in ours and decides(ours[name].value):
            given = [(ours[name].value, ours[name].where), *given]
        if any(value != given[0][0] for value, _ in given):
            values = " and ".join(f"{value!r} ({location})" for value, location in given)
            places = ", ".join(location for _, location in given)
            what = f"{name} is given twice and differently: {values}"
            fix = 'keep one of them, or write "auto" on DeepSpeed\'s side'
            problems.append(ConfigError(what, places, fix))
    problems += [ConfigError(what, where, fix) for what, fix in refused_values(config)]
    dtype = ours["dtype"].value if "dtype" in ours else None
    problems += _precision_problems(config, where, decided="dtype" in theirs, dtype=dtype)
    blocks = [name for name in ("optimizer", "scheduler") if name in config]
    if blocks:
        read = f"{' and '.join(blocks)} of DeepSpeed {'is' if len(blocks) == 1 else 'are'} read"
        resolution.notes.append(
            f"{where}: the {read} into our settings; finetune makes AdamW and the schedule itself"
        )
    return {name: given[0] for name, given in theirs.items()}, _handed_on(config)


def _shared_values(
    config: Mapping[str, Any], where: str, problems: list[ConfigError]
) -> Iterator[tuple[str, Any, str]]:
    """Yield (our name, value, location) of every shared number that is not left to us."""
    for path, names in SHARED.items():
        value, location = lookup(config, path), f"{where}: {path}"
        if not decides(value):
            continue
        if isinstance(names, str):
            yield names, value, location
        elif isinstance(value, list | tuple) and len(value) == 2:
            for index, name in enumerate(names):
                if value[index] != "auto":
                    yield name, value[index], f"{location}[{index}]"
        else:
            fix = "give two numbers, [beta1, beta2]"
            problems.append(ConfigError(f"{path} is {value!r}", where, fix))
    kind = lookup(config, "scheduler.type")
    if isinstance(kind, str) and kind in SCHEDULERS:
        yield "lr_scheduler", SCHEDULERS[kind], f"{where}: scheduler.type {kind}"
    switches = {}
    for block, dtype in PRECISIONS.items():
        switches[block] = lookup(config, f"{block}.enabled")
        if switches[block] is True:
            yield "dtype", dtype, f"{where}: {block}.enabled"
    given = [block for block, value in switches.items() if value is not None]
    if given and not any(switches.values()):
        yield "dtype", "float32", f"{where}: {given[0]}.enabled false"


def _precision_problems(
    config: Mapping[str, Any], where: str, *, decided: bool, dtype: Any
) -> Iterator[ConfigError]:
    """Yield a problem for a switch that is not a boolean, and for a precision that is switched off
    while dtype may still choose it.

    Args:
        decided: whether DeepSpeed's configuration determines the dtype.
        dtype: our setting, as given.
    """
    for block, name in PRECISIONS.items():
        value = lookup(config, f"{block}.enabled")
        if decides(value) and not isinstance(value, bool):
            yield ConfigError(f"{block}.enabled is {value!r}", where, 'write true, false or "auto"')
        elif value is False and not decided and dtype in (None, "auto", name):
            what = f"{block} is switched off, but dtype is {dtype or 'auto'}, which may take it"
            other = "float16" if name == "bfloat16" else "bfloat16"
            fix = f'write "auto" there, or set dtype to float32 or {other}'
            yield ConfigError(what, f"{where}: {block}.enabled", fix)


def _handed_on(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with `"auto"` at every shared number, and without what finetune
    makes itself.
    """
    handed = deepcopy(dict(config))
    for block in ("optimizer", "scheduler"):
        handed.pop(block, None)
    for path in SHARED:
        if path in handed:
            handed[path] = "auto"
    if "bfloat16" in handed and "bf16" not in handed:  # the old name, which not every reader knows
        handed["bf16"] = handed.pop("bfloat16")
    for block in PRECISIONS:
        if isinstance(handed.get(block), dict) and "enabled" in handed[block]:
            handed[block]["enabled"] = "auto"
    return handed


def refused_values(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield `(what, fix)` for each value that DeepSpeed would reject after the model was loaded, or
    that contradicts how finetune trains.
    """
    for path, allowed in ALLOWED.items():
        value = lookup(config, path)
        # 1 and True are equal, and not the same to DeepSpeed.
        fits = any(
            value == choice and isinstance(value, bool) == isinstance(choice, bool)
            for choice in allowed
        )
        if decides(value) and not fits:
            choices = " or ".join(map(repr, allowed))
            yield f"DeepSpeed key {path} is {value!r}", f"it may be {choices}; or leave it out"
    optimizer, scheduler = lookup(config, "optimizer.type"), lookup(config, "scheduler.type")
    if optimizer is not None and str(optimizer).lower() not in ("adam", "adamw"):
        yield (
            f"optimizer.type is {optimizer!r}",
            "finetune trains with AdamW; write AdamW or leave it out",
        )
    if scheduler is not None and str(scheduler) not in SCHEDULERS:
        choices = ", ".join(f"{theirs} ({ours})" for theirs, ours in SCHEDULERS.items())
        fix = f"one of {choices}; or leave it out and use lr_scheduler"
        yield f"scheduler.type is {scheduler!r}", fix
    for key, value in config.items():
        if value == "auto" and key in KNOWN and KNOWN[key] is None and key not in OURS:
            fix = "nothing fills it in; give a value or leave it out"
            yield f'DeepSpeed key {key} is "auto"', fix
    for key in UNSUPPORTED:
        if config.get(key) not in (None, {}, 1):
            yield (
                f"DeepSpeed key {key} is set, and finetune gives every process its own samples",
                "remove it; ZeRO stages are the way to share the memory of several devices",
            )
    for path in OTHER_TRAINING:
        if lookup(config, path) not in (None, {}):
            yield f"DeepSpeed key {path} changes what is trained", "remove it"
    if lookup(config, "comet.api_key") is not None:
        fix = "set COMET_API_KEY in the environment instead"
        yield "comet.api_key is a secret in a file", fix
    stage = lookup(config, "zero_optimization.stage") or 0
    if lookup(config, "zero_optimization.offload_param.device") in ("cpu", "nvme") and stage != 3:
        what = f"offload_param needs ZeRO stage 3, and stage is {stage}"
        yield what, "set stage to 3 or remove it"
    for block in ("zero_optimization.offload_param", "zero_optimization.offload_optimizer"):
        if lookup(config, f"{block}.device") == "nvme" and not lookup(config, f"{block}.nvme_path"):
            yield f"{block}.device is nvme without nvme_path", "name a folder on a fast local disk"


def zero_stage(config: BaseConfig) -> int:
    """Return the ZeRO stage; 0 without DeepSpeed."""
    return int((config.deepspeed or {}).get("zero_optimization", {}).get("stage", 0))


def offloads(deepspeed: Mapping[str, Any] | None, what: str) -> bool:
    """Return whether DeepSpeed's keys put `what`, param or optimizer, into host memory or on
    disk.
    """
    block = (deepspeed or {}).get("zero_optimization", {}).get(f"offload_{what}") or {}
    return block.get("device", "none") != "none"


def deepspeed_dict(
    config: BaseConfig, *, world_size: int, dtype: str, largest_adapter_tensor: int, pin: bool
) -> dict[str, Any]:
    """Return the dictionary for TrainingArguments(deepspeed=...).

    DeepSpeed sees microbatches: micro-batch 1, accumulation 1. Each value that is set here and not
    by the user has its reason next to it.

    Args:
        dtype: resolved compute dtype.
        largest_adapter_tensor: elements of the largest LoRA tensor; 0 for full-parameter training.
        pin: page-lock offloaded tensors if the keys do not say.
    """
    given = deepcopy(config.deepspeed or {})
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
        # planning/auto.py chooses before a run starts. Commands that only look at the configuration
        # assume the device that needs the least device memory.
        if (zero.get(f"offload_{what}") or {}).get("device") == "auto":
            zero[f"offload_{what}"]["device"] = "cpu"
        # DeepSpeed's own default is true: copies from pageable memory hold up the device, and
        # Ascend's wait for the copy's end. On a CPU there is nothing to copy to, and if little
        # memory may be locked, pinning fails in the middle of the start.
        if offloads(made, what):
            zero[f"offload_{what}"].setdefault("pin_memory", pin)
    # DeepSpeed's "auto" is 10 x hidden size, which most LoRA tensors exceed. They would be sharded
    # and gathered one by one: hundreds of tiny collectives per pass, for a few hundred MB in total.
    # DeepSpeed's own default is 1e5.
    threshold = "stage3_param_persistence_threshold"
    if zero.get("stage") == 3 and zero.get(threshold, "auto") == "auto":
        zero[threshold] = max(100_000, largest_adapter_tensor)
    return made
