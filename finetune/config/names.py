"""Names that people type: the nearest known one for a slip, and what replaces the names that other
packages use.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from finetune.errors import ConfigError


def normal(name: str) -> str:
    """`--Learning-Rate`, `learning-rate` and `learning_rate` are one name."""
    return name.lstrip("-").replace("-", "_").lower()


def flag(name: str) -> str:
    """The flag of a field: `--learning-rate`."""
    return "--" + name.replace("_", "-")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` most probably is a slip of, None where there is none near.

    A name that begins or ends with what was typed (`zero` for `zero_optimization`) counts as near.
    """
    by_normal = {normal(candidate): candidate for candidate in known}
    typed = normal(name)
    close = get_close_matches(typed, by_normal, n=1, cutoff=0.6)
    if not close and len(typed) >= 3:
        close = [
            candidate
            for candidate in by_normal
            if candidate.startswith(typed) or candidate.endswith(typed)
        ][:1]
    return by_normal[close[0]] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` to end a message with, or nothing where no known name is near."""
    guess = nearest(name, known)
    return f"; did you mean {guess!r}?" if guess else ""


# Our name <- names of the same thing in transformers, LLaMA-Factory, nanochat and training scripts
# in use.
_SAME = {
    "model": (
        "model_name_or_path model_name model_path base_model pretrained_model_name_or_path model_id"
    ),
    "data": (
        "train_data train_data_path train_file train_files train_dataset training_data dataset"
        " dataset_path dataset_name data_path data_files"
    ),
    "valid_data": (
        "valid_data_path val_data val_data_path validation_data validation_file eval_data"
        " eval_dataset eval_file eval_data_path"
    ),
    "output_dir": "output output_path out_dir save_dir",
    "template": "chat_template",
    "cutoff_len": (
        "cutoff cutoff_length max_seq_length max_seq_len max_length seq_length seq_len"
        " model_max_length sequence_len"
    ),
    "micro_batch_size": (
        "per_device_train_batch_size per_device_batch_size per_gpu_train_batch_size batch_size "
        "device_batch_size train_micro_batch_size_per_gpu"
    ),
    "gradient_accumulation_steps": (
        "gradient_accumulation accumulation_steps grad_accum grad_accum_steps"
    ),
    "global_batch_size": "train_batch_size effective_batch_size",
    "num_epochs": "num_train_epochs epochs epoch n_epochs",
    "max_steps": "total_steps num_steps num_iterations max_train_steps train_steps",
    "learning_rate": "lr",
    "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type scheduler scheduler_type",
    "weight_decay": "wd",
    "max_grad_norm": "gradient_clipping grad_clip clip_grad clip_grad_norm",
    "adam_epsilon": "adam_eps",
    "finetuning": "finetuning_type finetune_type finetuning_method tuning_type",
    "lora_r": "lora_rank rank",
    "lora_target_modules": "lora_target target_modules lora_targets",
    "lora_plus_ratio": "loraplus_lr_ratio lorap_lr_ratio loraplus_ratio",
    "modules_to_save": "additional_target lora_modules_to_save",
    "use_dora": "dora",
    "use_rslora": "rslora",
    "device_type": "device",
    "gradient_checkpointing": "use_gradient_checkpointing activation_checkpointing",
    "timeout_seconds": "ddp_timeout timeout",
    "seed": "random_seed",
    "save_steps": "save_interval save_every",
    "eval_steps": "eval_interval eval_every",
    "logging_steps": "log_interval logging_interval log_every",
    "resume": "resume_from resume_from_checkpoint",
    "packing": "neat_packing sample_packing",
    "dataloader_num_workers": "num_workers",
    "preprocessing_num_workers": "num_proc dataset_num_proc",
    "deepspeed": "deepspeed_config deepspeed_config_file ds_config",
    "use_curriculum": "curriculum_learning",
    "keep_best": "load_best_model_at_end",
    "early_stopping": "early_stopping_patience early_stopping_steps early_stop_interval",
    "best_metric": "metric_for_best_model",
}


def _each(names: str, why_and_fix: tuple[str, str]) -> dict[str, tuple[str, str]]:
    return dict.fromkeys(names.split(), why_and_fix)


_IN_4_BITS = (
    "load_in_4bit quantization_bit quantization_method qlora use_qlora bnb_4bit_quant_type"
    " bnb_4bit_compute_dtype bnb_4bit_use_double_quant double_quantization"
)
_IN_FEW_BITS = frozenset(f"{_IN_4_BITS} load_in_8bit quantization".split())
# name -> (why it is not a setting here, what to do instead)
OTHERWISE: dict[str, tuple[str, str]] = {
    **_each(
        _IN_4_BITS,
        (
            "an adapter on a base in few bits is --quantization nf4 or int8",
            (
                "use --quantization nf4 (double quantisation, computed in --dtype) or"
                " --quantization int8"
            ),
        ),
    ),
    "load_in_8bit": (
        "quantization says in which form the base weights are held",
        "use --quantization int8",
    ),
    **_each(
        "distributed world_size nproc_per_node num_processes num_gpus nnodes node_rank master_addr "
        "master_port backend ddp_backend",
        (
            "the launcher decides how many processes there are and where",
            "start with accelerate launch or torchrun --nproc_per_node N -m finetune.sft",
        ),
    ),
    "total_batch_size": (
        "a batch is counted in samples here, not in tokens",
        "use --global-batch-size",
    ),
    "use_lora": ("finetuning says lora or full", "use --finetuning lora"),
    "full_finetune": ("finetuning says lora or full", "use --finetuning full"),
    "warmup_ratio": (
        "warmup_steps below 1 is a fraction of the steps",
        "use --warmup-steps, e.g. 0.03",
    ),
    "bf16": ("dtype names the number format", "use --dtype bfloat16"),
    "fp16": ("dtype names the number format", "use --dtype float16"),
    "fp32": ("dtype names the number format", "use --dtype float32"),
    **_each(
        "precision mixed_precision torch_dtype",
        ("dtype names the number format", "use --dtype auto, float32, float16 or bfloat16"),
    ),
    "fp8": ("fine-tuning has no fp8", "use --dtype auto"),
    **_each("no_cuda use_cpu", ("device_type names the device", "use --device-type cpu")),
    "use_wandb": ("report_to names the trackers", "use --report-to wandb"),
    "wandb_project": (
        "wandb reads it from the environment",
        "set WANDB_PROJECT, and use --report-to wandb",
    ),
    **_each(
        "wandb_run_name run_name",
        ("wandb reads it from the environment", "set WANDB_NAME, and use --report-to wandb"),
    ),
    **_each(
        "window_pattern aspect_ratio head_dim fp8_recipe",
        (
            (
                "sliding windows, other shapes and fp8 recipes of nanochat are not in transformers'"
                " models"
            ),
            "remove it",
        ),
    ),
    "model_tag": ("a run is named by its folder", "use --output-dir"),
    **_each(
        "core_metric_every core_metric_max_per_task",
        ("CORE is not evaluated here, bits per byte on validation data are", "use --eval-steps"),
    ),
    "stage": ("fine-tuning on instructions is the only stage here", "remove it"),
    "do_train": ("python -m finetune.sft always trains", "remove it"),
    "do_eval": ("data in --valid-data is always evaluated", "remove it, or see --eval-steps"),
    "overwrite_output_dir": (
        "a run is never overwritten",
        (
            "name another --output-dir, or delete the folder yourself; --resume auto continues the"
            " run in it"
        ),
    ),
}
FOREIGN = {name: ours for ours, names in _SAME.items() for name in names.split()}


class UnknownName(ConfigError):
    """A name that is not a setting; `guess` is the setting that was probably meant, None where
    nobody can tell.
    """

    def __init__(self, what: str, where: str, fix: str, guess: str | None = None) -> None:
        super().__init__(what, where, fix)
        self.guess = guess


def unknown_name(name: str, where: str, known: Iterable[str], *, flags: bool) -> UnknownName:
    """The error for a name that is not a setting: what replaces it, or the nearest that is one.

    Args:
        known: names of the settings that exist there.
        flags: whether to write names as flags in the remedy.
    """
    known, typed = list(known), normal(name)
    kind, shown = ("flag", flag) if flags else ("setting", str)
    if FOREIGN.get(typed) in known:
        ours = FOREIGN[typed]
        return UnknownName(
            f"{name} is called {shown(ours)} here", where, f"write {shown(ours)}", ours
        )
    if typed in _IN_FEW_BITS and "quantization" not in known:
        what = (
            f"{name} is not a {kind} here: only fine-tuning trains an adapter on a base in few bits"
        )
        return UnknownName(what, where, "remove it; finetune.sft has --quantization nf4 and int8")
    if typed in OTHERWISE:
        why, fix = OTHERWISE[typed]
        return UnknownName(f"{name} is not a {kind} here: {why}", where, fix)
    if typed.startswith("no_") and typed[3:] in known:
        return UnknownName(
            f"unknown {kind} {name}", where, f"write {shown(typed[3:])} false", typed[3:]
        )
    guess = nearest(name, known)
    fix = f"did you mean {shown(guess)}?" if guess else "see --help for the names"
    return UnknownName(f"unknown {kind} {name}", where, fix, guess)
