"""Options of transformers' TrainingArguments (4.57 to 5.23), which LLaMA-Factory, TRL and ms-swift
all have.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from finetune.commands.convert.draft import Draft, Option, lost, read
from finetune.config.paths import is_hub_id, split_revision

_KEPT = "checkpoints here are always whole, verified and resumable"
_LOG = "the log of a run here has one form (docs/run_folder.md)"
_OWN = "finetune decides it by itself"

# Which Axolotl too has taken over.
BASIC: dict[str, Option] = {
    "output_dir": "output_dir",
    "learning_rate": "learning_rate",
    "weight_decay": "weight_decay",
    "adam_beta1": "adam_beta1",
    "adam_beta2": "adam_beta2",
    "adam_epsilon": "adam_epsilon",
    "max_grad_norm": "max_grad_norm",
    "seed": "seed",
    "dataloader_num_workers": "dataloader_num_workers",
    "ddp_timeout": "timeout_seconds",
}

OPTIONS: dict[str, Option] = {
    **BASIC,
    "gradient_checkpointing": "gradient_checkpointing",
    **read(
        "per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps"
        " lr_scheduler_type warmup_steps warmup_ratio optim bf16 fp16 logging_strategy"
        " logging_steps eval_strategy eval_steps save_strategy save_steps save_total_limit"
        " load_best_model_at_end metric_for_best_model data_seed use_cpu report_to deepspeed fsdp"
    ),
    **lost("the schedules here have no further arguments", "lr_scheduler_kwargs", trains=True),
    **lost("AdamW has no further arguments here", "optim_args optim_target_modules", trains=True),
    **lost("there is no label smoothing here", "label_smoothing_factor", trains=True),
    **lost("there is no noise on embeddings here", "neftune_noise_alpha", trains=True),
    **lost(
        "the order is a shuffle here",
        "train_sampling_strategy group_by_length",
        trains=True,
        off=("random",),
    ),
    **lost("length is no order here", "length_column_name"),
    **lost(
        "losses are averaged over the global batch here",
        "average_tokens_across_devices",
        trains=True,
        off=(True,),
    ),
    **lost("every global batch is full here, whatever the devices", "dataloader_drop_last"),
    **lost("evaluation has the number format of training here", "bf16_full_eval fp16_full_eval"),
    **lost("float32 products are in TF32 where the device has it", "tf32", off=(True,)),
    **lost(
        "recomputing has no further settings here",
        "gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs",
    ),
    **lost(
        "fused layers are chosen by --fused-layers auto", "use_liger_kernel liger_kernel_config"
    ),
    **lost(
        "fine-tuning compiles single layers (--fused-layers compile)",
        "torch_compile torch_compile_backend torch_compile_mode",
    ),
    **lost(
        "memory is planned here, and a step that runs out of it takes smaller microbatches",
        "auto_find_batch_size",
    ),
    **lost(
        _OWN,
        "use_cache torch_empty_cache_steps accelerator_config parallelism_config"
        " dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor"
        " dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names"
        " ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph"
        " ddp_backend full_determinism local_rank do_train do_eval do_predict"
        " per_device_eval_batch_size eval_accumulation_steps prediction_loss_only"
        " eval_do_concat_batches eval_use_gather_object include_for_metrics batch_eval_metrics"
        " fsdp_config debug skip_memory_metrics sortish_sampler",
        off=(True, 8, 1, -1),
    ),
    **lost("a run here is evaluated before its first step in any case", "eval_on_start"),
    **lost("evaluation begins with the run here", "eval_delay"),
    **lost(
        "evaluation is the loss; python -m finetune eval answers prompts",
        "predict_with_generate generation_max_length generation_num_beams generation_config",
    ),
    **lost(
        _LOG,
        "logging_first_step log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen"
        " log_level log_level_replica disable_tqdm logging_dir",
        off=(True, "passive", "warning"),
    ),
    **lost(
        "trackers read names from the environment",
        "run_name project trackio_space_id trackio_bucket_id",
    ),
    **lost("trackers read names from the environment", "trackio_static_space_id"),
    **lost(
        _KEPT,
        "save_only_model save_on_each_node enable_jit_checkpoint save_safetensors save_first_step",
    ),
    **lost(
        "nothing is uploaded here",
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push"
        " hub_revision",
    ),
    **lost("the best evaluation is the one of the lowest loss", "greater_is_better"),
    **lost(
        "checkpoints of other tools cannot be resumed; a run here resumes by itself",
        "resume_from_checkpoint ignore_data_skip restore_callback_states_from_checkpoint",
    ),
}
# Where theirs differ from ours, or decide what is trained.
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "seed": 42,
    "save_steps": 500,
    "logging_steps": 500,
}
# What null says, where it is not the default.
NULLS: dict[str, Any] = {"max_grad_norm": 0}
_ADAMW = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_hf",
    "adamw",
    "adamw_apex_fused",
    "adamw_torch_xla",
)
_SMALL_OPTIMIZERS = {
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), "adamw-8bit"),
    "adafactor": "adafactor",
}
_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
_TRACKERS = ("none", "tensorboard", "wandb", "swanlab", "trackio")


def finish(values: dict[str, Any], given: set[str], draft: Draft, devices: int) -> None:
    """Batch, length, schedule, dtype, logging, saving and evaluation, which several options say
    together.
    """
    batch(
        values["per_device_train_batch_size"], values["gradient_accumulation_steps"], draft, devices
    )
    _length(values, draft)
    _schedule(values, draft)
    _dtype(values, draft)
    _intervals(values, given, draft)
    _best(values, draft)
    _trackers(values.get("report_to"), draft)
    deepspeed(values.get("deepspeed"), draft)
    if values.get("fsdp"):
        draft.lose("fsdp", values["fsdp"], "write deepspeed with ZeRO-3 instead", trains=False)
    optimizer(values.get("optim"), draft)
    if values.get("use_cpu"):
        draft.values["device_type"] = "cpu"
    order(values.get("data_seed") if values.get("data_seed") is not None else values["seed"], draft)


def revision(given: Any, draft: Draft) -> None:
    """`model_revision` as a part of the model's name."""
    name = f"{draft.values.get('model')}@{given}"
    if given in (None, "", "main", "master"):  # the hubs' own
        return
    if is_hub_id(str(draft.values.get("model"))) and split_revision(name)[1] is not None:
        draft.values["model"] = name
    else:
        draft.lose(
            "model_revision",
            given,
            "the model is a folder, whose files are taken as they are",
            trains=True,
        )


def order(seed: int, draft: Draft) -> None:
    draft.values |= {"curriculum_seed": seed, "use_curriculum": False}
    draft.note("seed", seed, "the order of the samples is another than that of the same seed there")


def batch(per_device: int, accumulation: int, draft: Draft, devices: int) -> None:
    size = per_device * accumulation * (devices // draft.sharing)
    shared = f" / {draft.sharing} that share every sample there" * (draft.sharing > 1)
    draft.values |= {"micro_batch_size": per_device, "global_batch_size": size}
    draft.note(
        "global_batch_size",
        size,
        f"{per_device} a device x {accumulation} accumulated x {devices}"
        f" device{'s' * (devices > 1)} (--devices){shared}: here it is part of the run, and the"
        " same on any number of devices",
    )


def packed(name: str, draft: Draft) -> None:
    """`name` says that an item of a batch is a row of several samples."""
    why = (
        "there a batch counts packed rows, here samples: multiply global_batch_size by the samples"
        " of a row"
    )
    draft.lose(name, True, why, trains=True)


def _length(values: dict[str, Any], draft: Draft) -> None:
    steps = values.get("max_steps")
    if isinstance(steps, int) and steps > 0:
        draft.values["max_steps"] = steps
    else:
        draft.values["num_epochs"] = float(values["num_train_epochs"])


def _schedule(values: dict[str, Any], draft: Draft) -> None:
    name = str(values["lr_scheduler_type"])
    ours = _SCHEDULES.get(name, "cosine")
    if name not in _SCHEDULES:
        draft.lose("lr_scheduler_type", name, "cosine is written in its place", trains=True)
    warmup = values.get("warmup_steps") or values.get("warmup_ratio") or 0
    draft.values["lr_scheduler"] = ours
    # transformers' schedule of that name has no warm-up, whatever the other options say.
    draft.values["warmup_steps"] = (
        0 if name == "constant" else warmup if 0 < warmup < 1 else int(warmup)
    )


def _dtype(values: dict[str, Any], draft: Draft) -> None:
    name = "bfloat16" if values.get("bf16") else "float16" if values.get("fp16") else "float32"
    draft.values.setdefault("dtype", name)


def _intervals(values: dict[str, Any], given: set[str], draft: Draft) -> None:
    """What happens every so many steps."""
    for name, fallback in (("logging_steps", 10), ("save_steps", 500)):
        steps, strategy = values[name], values.get(name.replace("steps", "strategy"), "steps")
        if strategy == "steps" and steps >= 1:
            draft.values[name] = int(steps)
        elif name == "save_steps" and strategy == "no":
            draft.values[name] = 0
        else:
            draft.values[name] = fallback
            shown = steps if strategy == "steps" else strategy
            draft.lose(name, shown, f"steps are counted here: {fallback} is written", trains=False)
    limit = values.get("save_total_limit")
    if limit is not None and limit > 0:
        draft.values["save_total_limit"] = max(2, limit)
    else:
        draft.note(
            "save_total_limit",
            "not set" if limit is None else limit,
            "there every checkpoint is kept, here the newest 2",
        )
    strategy, steps = values.get("eval_strategy", "no"), values.get("eval_steps")
    if "val_size" in given and "eval_strategy" not in given and steps:
        strategy = "steps"
    if strategy == "steps" and (steps is None or steps >= 1):
        draft.values["eval_steps"] = int(steps or values["logging_steps"])
    elif strategy != "no":
        draft.lose(
            "eval_strategy",
            strategy if steps is None else steps,
            "set eval_steps to steps",
            trains=False,
        )


def _best(values: dict[str, Any], draft: Draft) -> None:
    if not values.get("load_best_model_at_end"):
        return
    metric = values.get("metric_for_best_model") or "loss"
    if metric not in ("loss", "eval_loss"):
        draft.lose("metric_for_best_model", metric, "the loss is followed", trains=True)
    keep_best(draft, "load_best_model_at_end", True, {"keep_best": True})


def keep_best(draft: Draft, name: str, value: Any, settings: dict[str, Any]) -> None:
    """Follow the best evaluation, where there is validation data and a number of steps between
    evaluations.
    """
    if draft.values.get("eval_steps") and (
        draft.values.get("valid_data") or draft.values.get("valid_split")
    ):
        draft.values |= settings
    else:
        draft.lose(name, value, "set it when valid_data and eval_steps are set", trains=True)


def _trackers(given: Any, draft: Draft) -> None:
    names = [
        str(name) for name in (given if isinstance(given, list) else [given]) if name is not None
    ]
    if not names or names == ["all"]:
        draft.values["report_to"] = "auto" if names else "none"
        return
    for name in [name for name in names if name not in _TRACKERS]:
        draft.lose("report_to", name, f"trackers here are {', '.join(_TRACKERS[1:])}", trains=False)
    draft.values["report_to"] = [name for name in names if name in _TRACKERS] or "none"


def optimizer(name: Any, draft: Draft) -> None:
    if name is None or str(name) in _ADAMW:
        return
    ours = _SMALL_OPTIMIZERS.get(str(name))
    if ours is None:
        draft.lose("optim", name, "AdamW with float32 moments is what trains here", trains=True)
    elif draft.values.get("finetuning") != "full":
        draft.lose(
            "optim", name, "an adapter is trained by AdamW with float32 moments", trains=True
        )
    else:
        draft.values["optimizer"] = ours


def deepspeed(given: Any, draft: Draft) -> None:
    """A DeepSpeed configuration: keys, JSON text, a file, or the name of one that other tools
    bring.
    """
    if given in (None, "", False, "none"):
        return
    text = str(given).strip()
    if isinstance(given, dict):
        draft.values["deepspeed"] = given
    elif text.startswith("{"):
        draft.values["deepspeed"] = json.loads(text)
    elif os.path.isfile(text):
        draft.values["deepspeed"] = text
    else:
        name = Path(text).stem.lower()
        stage = next(
            (stage for stage in (3, 2, 1) if f"zero{stage}" in name or f"z{stage}" in name), None
        )
        if stage is None:
            draft.lose(
                "deepspeed", given, "the file is not here: give yours as --deepspeed", trains=False
            )
            return
        zero: dict[str, Any] = {"stage": stage}
        if "offload" in name:
            kinds = ("offload_optimizer", "offload_param") if stage == 3 else ("offload_optimizer",)
            zero |= {kind: {"device": "cpu"} for kind in kinds}
        draft.values["deepspeed"] = {"zero_optimization": zero}
        draft.note(
            "deepspeed", given, f"the file is not here: ZeRO-{stage} is written, after its name"
        )
