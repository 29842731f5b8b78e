"""DeepSpeed keys that are settings of ours too, and who owns them. Never imports deepspeed.

Given on one side only, they become ours; `"auto"` on DeepSpeed's side means ours; given on both
sides of one file and different, they are refused even where a flag overrides them. What is handed
on to DeepSpeed says `"auto"` at each of them, and has no `optimizer` and `scheduler` block:
finetune makes both itself. Values of other keys are left to DeepSpeed but for the few that
contradict how finetune trains, or that it would refuse late.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from finetune.config.deepspeed_keys import KNOWN, lookup, unknown_keys
from finetune.errors import ConfigError


@dataclass(frozen=True)
class Shared:
    """A number of DeepSpeed's that is also ours: `path` there, `field` here, `index` into a list
    there.
    """

    path: str
    field: str
    index: int | None = None


SHARED = (
    Shared("train_micro_batch_size_per_gpu", "micro_batch_size"),
    Shared("gradient_accumulation_steps", "gradient_accumulation_steps"),
    Shared("train_batch_size", "global_batch_size"),
    Shared("gradient_clipping", "max_grad_norm"),
    Shared("optimizer.params.lr", "learning_rate"),
    Shared("optimizer.params.betas", "adam_beta1", 0),
    Shared("optimizer.params.betas", "adam_beta2", 1),
    Shared("optimizer.params.eps", "adam_epsilon"),
    Shared("optimizer.params.weight_decay", "weight_decay"),
    Shared("scheduler.params.warmup_max_lr", "learning_rate"),
    Shared("scheduler.params.warmup_num_steps", "warmup_steps"),
    Shared("scheduler.params.total_num_steps", "max_steps"),
)
PRECISIONS = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16"}
# Top-level keys and blocks that finetune fills in.
OURS = frozenset({shared.path.partition(".")[0] for shared in SHARED} | set(PRECISIONS))

# The only values of keys with which DeepSpeed would train otherwise than finetune says, while
# losses look right: in the optimizer and scheduler blocks what finetune does anyway, elsewhere what
# leaves the gradient that of the global batch and its float32 sum, and a step with NaN in it one
# that is skipped.
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
    # in 16 bits the sum depends on how many microbatches there are
    "data_types.grad_accum_dtype": ("fp32",),
    "fp16.fp16_master_weights_and_grads": (False,),
    "bf16.bf16_master_weights_and_grads": (False,),
    "bf16.bf16_optimizer_states": (False,),
    "bf16.check_grad_overflow": (True,),
    "bfloat16.bf16_master_weights_and_grads": (False,),
    "bfloat16.bf16_optimizer_states": (False,),
    "bfloat16.check_grad_overflow": (True,),
    "torch_autocast.enabled": (False,),  # the run's dtype says what is computed in
    "hybrid_engine.enabled": (False,),
    "zero_optimization.zero_quantized_gradients": (False,),
    "zero_optimization.offload_optimizer.super_offload": (False,),
    "zero_optimization.stage": (1, 2, 3),
    "zero_optimization.offload_param.device": ("cpu", "nvme", "none"),
    "zero_optimization.offload_optimizer.device": ("cpu", "nvme", "none"),
}

# Blocks by which several processes share one sample, or DeepSpeed chooses the samples: here every
# process has its own microbatches, and which samples a step has is decided by the run alone.
UNSUPPORTED = (
    "sequence_parallel_size",
    "tensor_parallel",
    "expert_parallel",
    "pipeline",
    "data_efficiency",
)
# Blocks with which the optimizer's step is late or in part, or the weights are not those that were
# loaded.
OTHER_TRAINING = ("zero_optimization.zenflow", "weight_quantization")

# DeepSpeed's schedules, and ours of the same curve.
SCHEDULERS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def decides(value: Any) -> bool:
    """Whether a value of ours decides anything: neither null nor `auto`."""
    return value is not None and value != "auto"


@dataclass
class Split:
    """A DeepSpeed configuration, split into what is ours and what is handed on.

    Args:
        numbers: our name -> (value, location) for every shared number that DeepSpeed's side gives.
        deepspeed: what DeepSpeed gets, shared numbers as `"auto"`.
    """

    numbers: dict[str, tuple[Any, str]] = field(default_factory=dict)
    deepspeed: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[ConfigError] = field(default_factory=list)


def split(config: Mapping[str, Any], where: str, ours: Mapping[str, tuple[Any, str]]) -> Split:
    """Take the shared numbers out of a DeepSpeed configuration.

    Args:
        config: the DeepSpeed keys, without a `finetune` block.
        where: their file, for messages.
        ours: our name -> (value, location) of what the same file says on our side.
    """
    result = Split(problems=list(unknown_keys(config, where)))
    theirs: dict[str, list[tuple[Any, str]]] = {}
    for name, value, location in _shared_values(config, where, result.problems):
        theirs.setdefault(name, []).append((value, location))
    for name, values in theirs.items():
        given = ([ours[name]] if name in ours and decides(ours[name][0]) else []) + values
        if any(value != given[0][0] for value, _ in given):
            result.problems.append(_contradiction(name, given))
        result.numbers[name] = values[0]
    result.problems += refused_values(config, where)
    result.problems += _undecided_precision(
        config, where, theirs.get("dtype"), ours.get("dtype", (None, ""))[0]
    )
    result.deepspeed = _handed_on(config)
    blocks = [name for name in ("optimizer", "scheduler") if name in config]
    if blocks:
        read = (
            f"the {' and '.join(blocks)} of DeepSpeed {'is' if len(blocks) == 1 else 'are'} read"
            " into our settings"
        )
        result.notes.append(f"{where}: {read}; finetune makes AdamW and the schedule itself")
    return result


def _contradiction(name: str, given: list[tuple[Any, str]]) -> ConfigError:
    values = " and ".join(f"{value!r} ({location})" for value, location in given)
    where = ", ".join(location for _, location in given)
    fix = 'keep one of them, or write "auto" on DeepSpeed\'s side'
    return ConfigError(f"{name} is given twice and differently: {values}", where, fix)


def _shared_values(
    config: Mapping[str, Any], where: str, problems: list[ConfigError]
) -> Iterator[tuple[str, Any, str]]:
    """(our name, value, location) of every shared number that is not left to us."""
    for shared in SHARED:
        value, location = lookup(config, shared.path), f"{where}: {shared.path}"
        if not decides(value):
            continue
        if shared.index is None:
            yield shared.field, value, location
        elif isinstance(value, list | tuple) and len(value) == 2:
            if value[shared.index] != "auto":
                yield shared.field, value[shared.index], f"{location}[{shared.index}]"
        elif shared.index == 0:
            problems.append(
                ConfigError(
                    f"{shared.path} is {value!r}", where, "give two numbers, [beta1, beta2]"
                )
            )
    kind = lookup(config, "scheduler.type")
    if isinstance(kind, str) and kind in SCHEDULERS:
        yield "lr_scheduler", SCHEDULERS[kind], f"{where}: scheduler.type {kind}"
    enabled = {block: lookup(config, f"{block}.enabled") for block in PRECISIONS}
    for block, value in enabled.items():
        if value is True:
            yield "dtype", PRECISIONS[block], f"{where}: {block}.enabled"
    switches = {block: value for block, value in enabled.items() if value is not None}
    if switches and not any(switches.values()):
        yield "dtype", "float32", f"{where}: {next(iter(switches))}.enabled false"


def _undecided_precision(
    config: Mapping[str, Any], where: str, given: list[tuple[Any, str]] | None, dtype: Any
) -> Iterator[ConfigError]:
    """A switch that is none; or one precision switched off, where dtype does not say which other it
    is.
    """
    for block, name in PRECISIONS.items():
        value = lookup(config, f"{block}.enabled")
        if decides(value) and not isinstance(value, bool):
            yield ConfigError(f"{block}.enabled is {value!r}", where, 'write true, false or "auto"')
        elif value is False and not given and dtype in (None, "auto", name):
            what = f"{block} is switched off, but dtype is {dtype or 'auto'}, which may take it"
            fix = (
                'write "auto" there, or set dtype to float32 or'
                f" {'float16' if name == 'bfloat16' else 'bfloat16'}"
            )
            yield ConfigError(what, f"{where}: {block}.enabled", fix)


def _handed_on(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with `"auto"` at every shared number, and without what finetune makes
    itself.
    """
    handed = deepcopy(dict(config))
    for block in ("optimizer", "scheduler"):
        handed.pop(block, None)
    for shared in SHARED:
        if shared.path in handed:
            handed[shared.path] = "auto"
    if "bfloat16" in handed and "bf16" not in handed:  # the old name, which not every reader knows
        handed["bf16"] = handed.pop("bfloat16")
    for block in PRECISIONS:
        if isinstance(handed.get(block), dict) and "enabled" in handed[block]:
            handed[block]["enabled"] = "auto"
    return handed


def refused_values(config: Mapping[str, Any], where: str) -> Iterator[ConfigError]:
    """Values that DeepSpeed would refuse after the model was loaded, or that contradict how
    finetune trains.
    """
    for path, allowed in ALLOWED.items():
        value = lookup(config, path)
        # 1 and True are equal, and not the same to DeepSpeed.
        fits = any(
            value == choice and isinstance(value, bool) == isinstance(choice, bool)
            for choice in allowed
        )
        if decides(value) and not fits:
            choices = " or ".join(repr(choice) for choice in allowed)
            yield ConfigError(
                f"DeepSpeed key {path} is {value!r}", where, f"it may be {choices}; or leave it out"
            )
    kind = lookup(config, "optimizer.type")
    if kind is not None and str(kind).lower() not in ("adam", "adamw"):
        fix = "finetune trains with AdamW; write AdamW or leave it out"
        yield ConfigError(f"optimizer.type is {kind!r}", where, fix)
    kind = lookup(config, "scheduler.type")
    if kind is not None and str(kind) not in SCHEDULERS:
        choices = ", ".join(f"{theirs} ({ours})" for theirs, ours in SCHEDULERS.items())
        fix = f"one of {choices}; or leave it out and use lr_scheduler"
        yield ConfigError(f"scheduler.type is {kind!r}", where, fix)
    yield from _refused_combinations(config, where)


def _refused_combinations(config: Mapping[str, Any], where: str) -> Iterator[ConfigError]:
    for key, value in config.items():
        if value == "auto" and key in KNOWN and KNOWN[key] is None and key not in OURS:
            fix = "nothing fills it in; give a value or leave it out"
            yield ConfigError(f'DeepSpeed key {key} is "auto"', where, fix)
    for key in UNSUPPORTED:
        if config.get(key) not in (None, {}, 1):
            what = f"DeepSpeed key {key} is set, and finetune gives every process its own samples"
            yield ConfigError(
                what,
                where,
                "remove it; ZeRO stages are the way to share the memory of several devices",
            )
    for path in OTHER_TRAINING:
        if lookup(config, path) not in (None, {}):
            yield ConfigError(f"DeepSpeed key {path} changes what is trained", where, "remove it")
    if lookup(config, "comet.api_key") is not None:
        yield ConfigError(
            "comet.api_key is a secret in a file",
            where,
            "set COMET_API_KEY in the environment instead",
        )
    stage = lookup(config, "zero_optimization.stage") or 0
    if lookup(config, "zero_optimization.offload_param.device") in ("cpu", "nvme") and stage != 3:
        what = f"offload_param needs ZeRO stage 3, and stage is {stage}"
        yield ConfigError(what, where, "set stage to 3 or remove it")
    for block in ("offload_param", "offload_optimizer"):
        offload = f"zero_optimization.{block}"
        if lookup(config, f"{offload}.device") == "nvme" and not lookup(
            config, f"{offload}.nvme_path"
        ):
            what = f"{offload}.device is nvme without nvme_path"
            yield ConfigError(what, where, "name a folder on a fast local disk")
