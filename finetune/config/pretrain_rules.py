"""Settings of a pretraining run that depend on one another. See `precedence.Rule`."""

from __future__ import annotations

from functools import partial

from finetune.config.names import flag
from finetune.config.precedence import Precedence, Resolution, Rule
from finetune.config.rules import (
    ACCUMULATION,
    divisors_around,
    is_count,
    multiples_around,
    note_unused,
    processes,
    refuse_product,
    resolve_data_weights,
    warn_of_long_warmup,
)

# What is the model's own when one is continued.
OF_THE_MODEL = ("arch", "depth", "vocab_size", "tokenizer", "optimizer", "lr_scaling")
# Warmed up again and down again, as Ibrahim et al. 2024 do (arXiv 2403.08763). The heights are
# ours, to begin a search with: for all weights about where the pretraining of a large model ends
# (Parmar et al. 2024 go on from one of 15B with a schedule between height and steepness, arXiv
# 2407.07263); for LoRA that of fine-tuning, within the 1e-5 to 5e-4 that Biderman et al. 2024 tell
# to search (arXiv 2405.09673).
CONTINUED_RATES = {"full": 4.5e-5, "lora": 2e-4}
CONTINUED = {
    "optimizer": "adamw",
    "lr_scaling": False,
    "lr_scheduler": "cosine",
    "warmup_steps": 0.01,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
}
DEVICE, TOTAL, LENGTH = "device_batch_size", "total_batch_size", "max_seq_len"


def resolve_tokens(resolution: Resolution) -> None:
    """Total batch in tokens = device batch x sequence x processes x accumulation; what is open is
    derived.

    The total batch is the training itself and accumulation only how it is made; so accumulation is
    derived, unless it was given by a source that comes before the total's (an old script with
    --batch_size and --gradient_accumulation_steps and no total).
    """
    device, total, length = (resolution.value(name) for name in (DEVICE, TOTAL, LENGTH))
    accumulation = resolution.value(ACCUMULATION)
    if not all(map(is_count, (device, total, length))) or not (
        accumulation is None or is_count(accumulation)
    ):
        return
    at_once = device * length * resolution.world_size
    if accumulation is not None and accumulation * at_once != total:
        if resolution.precedence(ACCUMULATION) > resolution.precedence(TOTAL):
            _derive_total(resolution, accumulation * at_once)
            return
        if resolution.precedence(ACCUMULATION) == resolution.precedence(TOTAL):
            refuse_product(
                resolution, TOTAL, (DEVICE, LENGTH, ACCUMULATION), accumulation * at_once
            )
            return
    if total % at_once:
        _refuse_indivisible(resolution, at_once)
        return
    derived = total // at_once
    resolution.notes.append(
        f"total batch size {total:,} => gradient accumulation steps: {derived}"
        f"{resolution.instead_of(ACCUMULATION, derived)} "
        f"({device} windows x {length:,} tokens x {processes(resolution.world_size)} at a time)"
    )
    resolution.derive(
        ACCUMULATION, derived, f"derived from {TOTAL}, {DEVICE}, {LENGTH} and processes"
    )


def _derive_total(resolution: Resolution, total: int) -> None:
    before = resolution.values[TOTAL]
    resolution.notes.append(
        f"{TOTAL} {total:,} instead of {before.value:,} ({before.where}): {DEVICE}"
        f" {resolution.value(DEVICE)} x {LENGTH} {resolution.value(LENGTH)} x"
        f" {processes(resolution.world_size)} x {ACCUMULATION} {resolution.value(ACCUMULATION)};"
        f" give {flag(TOTAL)} for the same training on any number of processes"
    )
    resolution.derive(
        TOTAL, total, f"derived from {DEVICE}, {ACCUMULATION}, {LENGTH} and processes"
    )


def _refuse_indivisible(resolution: Resolution, at_once: int) -> None:
    device, total, length = (resolution.value(name) for name in (DEVICE, TOTAL, LENGTH))
    fix = f"nearest that agree: {TOTAL} {multiples_around(total, at_once)}"
    windows, rest = divmod(total, length * resolution.world_size)
    if not rest:
        fix += f", or {DEVICE} {divisors_around(windows, device)}"
    resolution.refuse(
        f"{TOTAL} {total} is not a multiple of {DEVICE} {device} x {LENGTH} {length} x "
        f"{processes(resolution.world_size)} = {at_once}",
        (TOTAL, DEVICE, LENGTH),
        fix,
    )


def resolve_continued(resolution: Resolution) -> None:
    """With a model: what is its own is refused, and rates and optimizer are those of training that
    goes on.
    """
    model, how = resolution.value("model"), resolution.value("finetuning")
    if not isinstance(model, str):
        return
    for name in OF_THE_MODEL:
        value, own = resolution.value(name), CONTINUED.get(name, resolution.defaults.get(name))
        if resolution.precedence(name) > Precedence.DEFAULT and value != own:
            what = f"{name} is {value}, and model is {model}: a model that is continued has its own"
            if name in CONTINUED:
                what = f"{name} is {value}, and a model is continued with {own}"
            resolution.refuse(what, (name, "model"), f"leave {flag(name)} out, or {flag('model')}")
    lengths = ("num_iterations", "target_param_data_ratio")
    if all(resolution.precedence(name) == Precedence.DEFAULT for name in lengths):
        what = "how long to continue is not said: tokens per parameter are for a model from scratch"
        resolution.refuse(what, ("model",), f"give {flag('num_iterations')} N, the optimizer steps")
    rate = CONTINUED_RATES.get(str(how), CONTINUED_RATES["full"])
    chosen = CONTINUED | {"learning_rate": rate, "weight_decay": 0.0 if how == "lora" else 0.1}
    for name, value in chosen.items():
        if resolution.precedence(name) == Precedence.DEFAULT:
            resolution.derive(name, value, "default with model")
    if resolution.value("learning_rate") == rate:
        why = (
            "as in fine-tuning"
            if how == "lora"
            else "where a large model's pretraining ends; smaller ones take more"
        )
        resolution.notes.append(f"learning_rate {rate:g} for continuing {model} ({how}): {why}")


def resolve_reporting(resolution: Resolution) -> None:
    """--use_wandb is --report-to wandb; a run named dummy is nanochat's word for no wandb."""
    if resolution.value("wandb_run_name") == "dummy":
        resolution.derive("use_wandb", False, "derived: the run is named dummy")
    if resolution.value("use_wandb") is not True:
        return
    trackers = resolution.value("report_to")
    if resolution.precedence("use_wandb") > resolution.precedence("report_to"):
        resolution.derive("report_to", ["wandb"], "derived from use_wandb")
    elif "wandb" not in ([trackers] if isinstance(trackers, str) else trackers or ()):
        what = f"use_wandb is true, and report_to is {trackers}"
        resolution.refuse(what, ("use_wandb", "report_to"), "leave one of the two out")


def resolve_windows(resolution: Resolution) -> None:
    """--document-aligned is the older word for --windows document."""
    old, windows = "document_aligned", resolution.value("windows")
    if resolution.value(old) is not True or windows == "document":
        return
    if resolution.precedence(old) > resolution.precedence("windows"):
        resolution.derive("windows", "document", f"derived from {old}")
    elif resolution.precedence(old) < resolution.precedence("windows"):
        resolution.derive(old, False, "derived from windows")
    else:
        what = f"{old} is true, and windows is {windows}"
        resolution.refuse(what, (old, "windows"), f"leave {flag(old)} out")


def _note_unused(resolution: Resolution) -> None:
    def given(name: str) -> bool:
        return resolution.value(name) is not None

    rates = ("matrix_lr", "embedding_lr", "unembedding_lr")
    adapter = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "fused_lora")
    prepared = ("cache_dir", "preprocessing_num_workers")
    note_unused(
        resolution,
        (
            (adapter, resolution.value("finetuning") != "lora", "finetuning is full"),
            (rates, given("learning_rate"), "learning_rate is the rate of everything"),
            (
                ("lr_batch_exponent",),
                resolution.value("lr_scaling") is False,
                "lr_scaling is false",
            ),
            (("world_size",), resolution.value("distributed") is False, "distributed is false"),
            (("target_param_data_ratio",), given("num_iterations"), "num_iterations is set"),
            (prepared, True, "token files need no preparation; see finetune prepare"),
        ),
    )


RULES_FOR_PRETRAINING: tuple[Rule, ...] = (
    resolve_tokens,
    resolve_reporting,
    resolve_windows,
    resolve_continued,
    partial(resolve_data_weights, data="train_data_path"),
    partial(warn_of_long_warmup, total="num_iterations", share="0.1 for a tenth"),
    _note_unused,
)
