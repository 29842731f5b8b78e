"""The settings of pretraining, and the rules between them.

A batch is counted in tokens here: the samples of one optimizer step are
`total_batch_size / max_seq_len` windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from finetune.config.base_config import BaseConfig
from finetune.config.fields import (
    ACCUMULATION,
    Names,
    Paths,
    Positive,
    Problem,
    Rate,
    Resolution,
    Rule,
    Text,
    Warmup,
    Weights,
    batch_setting,
    data_setting,
    device_setting,
    divisors_around,
    flag,
    is_count,
    logging_setting,
    multiples_around,
    note_unused,
    optimizer_setting,
    processes,
    redefined,
    refuse_product,
    resolve_data_weights,
    warn_of_long_warmup,
)
from finetune.config.run_config import RunConfig
from finetune.config.schedules import PretrainingScheduleName
from finetune.runtime.language import _

# Settings that a continued model brings itself.
OF_THE_MODEL = ("arch", "depth", "vocab_size", "tokenizer", "optimizer", "lr_scaling")
# Warmed up again and down again, as Ibrahim et al. 2024 do (arXiv 2403.08763). The peak rates are
# our own choice, as a start for a search. For all weights the peak is about the rate at which the
# pretraining of a large model ends. (Parmar et al. 2024 continue a 15B model with a schedule
# between height and steepness, arXiv 2407.07263.) For LoRA it is the rate of fine-tuning, within
# the 1e-5 to 5e-4 that Biderman et al. 2024 recommend to search (arXiv 2405.09673).
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
    """Derive accumulation, or the total batch in tokens, which is device batch x sequence x
    processes x accumulation.

    The total batch is the training itself and accumulation only how it is made. So accumulation is
    derived, unless its source has a higher precedence than the total's (an old script with
    --batch_size and --gradient_accumulation_steps and no total).
    """
    device, total, length = map(resolution.value, (DEVICE, TOTAL, LENGTH))
    accumulation = resolution.value(ACCUMULATION)
    factors = (device, total, length, 1 if accumulation is None else accumulation)
    if not all(map(is_count, factors)):
        return
    world_size, count = resolution.world_size, processes(resolution.world_size)
    at_once = device * length * world_size
    if accumulation is not None and accumulation * at_once != total:
        product, before = accumulation * at_once, resolution.values[TOTAL]
        ahead = resolution.precedence(ACCUMULATION) - before.precedence
        if ahead > 0:
            resolution.notes.append(
                f"{TOTAL} {product:,} instead of {total:,} ({before.where}): {DEVICE} {device} x"
                f" {LENGTH} {length} x {count} x {ACCUMULATION} {accumulation};"
                f" give {flag(TOTAL)} for the same training on any number of processes"
            )
            origin = f"derived from {DEVICE}, {ACCUMULATION}, {LENGTH} and processes"
            resolution.derive(TOTAL, product, origin)
            return
        if ahead == 0:
            refuse_product(resolution, TOTAL, (DEVICE, LENGTH, ACCUMULATION), product)
            return
    if total % at_once:
        fix = f"nearest that agree: {TOTAL} {multiples_around(total, at_once)}"
        windows, rest = divmod(total, length * world_size)
        if not rest:
            fix += f", or {DEVICE} {divisors_around(windows, device)}"
        resolution.refuse(
            f"{TOTAL} {total} is not a multiple of {DEVICE} {device} x {LENGTH} {length} x {count}"
            f" = {at_once}",
            (TOTAL, DEVICE, LENGTH),
            fix,
        )
        return
    derived = total // at_once
    resolution.notes.append(
        f"total batch size {total:,} => gradient accumulation steps: {derived}"
        f"{resolution.instead_of(ACCUMULATION, derived)} "
        f"({device} windows x {length:,} tokens x {count} at a time)"
    )
    origin = f"derived from {TOTAL}, {DEVICE}, {LENGTH} and processes"
    resolution.derive(ACCUMULATION, derived, origin)


def resolve_continued(resolution: Resolution) -> None:
    """With a model: refuse settings that the model brings itself, and choose the optimizer and
    rates of continued training.
    """
    model, how = resolution.value("model"), resolution.value("finetuning")
    if not isinstance(model, str):
        return
    for name in OF_THE_MODEL:
        value, own = resolution.value(name), CONTINUED.get(name, resolution.default(name))
        if resolution.is_given(name) and value != own:
            what = f"{name} is {value}, and model is {model}: a model that is continued has its own"
            if name in CONTINUED:
                what = f"{name} is {value}, and a model is continued with {own}"
            resolution.refuse(what, (name, "model"), f"leave {flag(name)} out, or {flag('model')}")
    if not any(map(resolution.is_given, ("num_iterations", "target_param_data_ratio"))):
        what = "how long to continue is not said: tokens per parameter are for a model from scratch"
        resolution.refuse(what, ("model",), f"give {flag('num_iterations')} N, the optimizer steps")
    rate = CONTINUED_RATES.get(str(how), CONTINUED_RATES["full"])
    chosen = CONTINUED | {"learning_rate": rate, "weight_decay": 0.0 if how == "lora" else 0.1}
    for name, value in chosen.items():
        if not resolution.is_given(name):
            resolution.derive(name, value, "default with model")
    if resolution.value("learning_rate") == rate:
        why = "where a large model's pretraining ends; smaller ones take more"
        if how == "lora":
            why = "as in fine-tuning"
        resolution.notes.append(f"learning_rate {rate:g} for continuing {model} ({how}): {why}")


def resolve_reporting(resolution: Resolution) -> None:
    """Take --use_wandb for --report-to wandb, and a run named dummy for nanochat's way to turn
    wandb off.
    """
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
    """Take --document-aligned for the older spelling of --windows document."""
    old, windows = "document_aligned", resolution.value("windows")
    if resolution.value(old) is not True or windows == "document":
        return
    ahead = resolution.precedence(old) - resolution.precedence("windows")
    if ahead > 0:
        resolution.derive("windows", "document", f"derived from {old}")
    elif ahead < 0:
        resolution.derive(old, False, "derived from windows")
    else:
        what = f"{old} is true, and windows is {windows}"
        resolution.refuse(what, (old, "windows"), f"leave {flag(old)} out")


def _note_unused(resolution: Resolution) -> None:
    value = resolution.value
    one_rate, has_length = value("learning_rate") is not None, value("num_iterations") is not None
    adapter = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "fused_lora")
    rates = ("matrix_lr", "embedding_lr", "unembedding_lr")
    prepared = ("cache_dir", "preprocessing_num_workers")
    note_unused(
        resolution,
        (
            (adapter, value("finetuning") != "lora", "finetuning is full"),
            (rates, one_rate, "learning_rate is the rate of everything"),
            (("lr_batch_exponent",), value("lr_scaling") is False, "lr_scaling is false"),
            (("world_size",), value("distributed") is False, "distributed is false"),
            (("target_param_data_ratio",), has_length, "num_iterations is set"),
            (prepared, True, "token files need no preparation; see finetune prepare"),
        ),
    )


class PretrainConfig(BaseConfig):
    """The settings of a pretraining run (`python -m finetune.pretrain`)."""

    command: ClassVar[str] = "python -m finetune.pretrain"
    rules: ClassVar[tuple[Rule, ...]] = (
        resolve_tokens,
        resolve_reporting,
        resolve_windows,
        resolve_continued,
        partial(resolve_data_weights, data="train_data_path"),
        partial(warn_of_long_warmup, total="num_iterations", share="0.1 for a tenth"),
        _note_unused,
    )
    machine_fields: ClassVar[frozenset[str]] = frozenset(
        {ACCUMULATION, "distributed", "world_size"}
    )
    aliases: ClassVar[Mapping[str, str]] = {
        "train_data": "train_data_path",
        "data": "train_data_path",
        "valid_data": "valid_data_path",
        "val_data_path": "valid_data_path",
        "batch_size": "device_batch_size",
        "micro_batch_size": "device_batch_size",
        "total_steps": "num_iterations",
        "max_steps": "num_iterations",
        "sequence_len": "max_seq_len",
        "lr": "learning_rate",
        "grad_clip": "max_grad_norm",
        "eval_every": "eval_steps",
        "save_every": "save_steps",
        "resume_from": "resume",
        "device": "device_type",
        "run": "wandb_run_name",
    }

    train_data_path: Paths = data_setting(
        ..., "Token files (.bin), folders, globs.", unit="file...", min_length=1
    )
    data_weights: Weights = data_setting(
        (),
        "Mix the entries of train_data_path by these weights, one for each; natural is its number"
        " of windows.",
        unit="weight...",
    )
    valid_data_path: Paths = data_setting((), "Token files to validate on.", unit="file...")
    model: Text | None = data_setting(
        None,
        "Continue this model's pretraining, on token files of its own tokenizer.",
        unit="FOLDER|NAME[@REVISION]",
        shown_default="none: from scratch",
    )
    hub: Literal["auto", "huggingface", "modelscope"] = redefined(RunConfig, "hub")
    trust_remote_code: bool = redefined(RunConfig, "trust_remote_code")
    finetuning: Literal["lora", "full"] = redefined(
        RunConfig,
        "finetuning",
        default="full",
        description="With model: train a LoRA adapter, or all parameters.",
    )
    lora_r: int = redefined(RunConfig, "lora_r")
    lora_alpha: int = redefined(RunConfig, "lora_alpha")
    lora_dropout: float = redefined(RunConfig, "lora_dropout")
    lora_target_modules: Names = redefined(RunConfig, "lora_target_modules")
    fused_lora: bool = redefined(RunConfig, "fused_lora")
    arch: Literal["nanochat", "qwen3", "llama", "lfm2", "lfm2_value"] = data_setting(
        "nanochat", "Architecture, as transformers has it; lfm2_value is of this package."
    )
    depth: Positive = data_setting(
        12, "Layers; width (64 x depth) and heads follow from it.", unit="layers"
    )
    vocab_size: Positive | None = data_setting(
        None,
        "Vocabulary; needed for token files without a header.",
        unit="tokens",
        shown_default="from the token files' header",
    )
    tokenizer: Text | None = data_setting(
        None,
        "Tokenizer of the token files; goes into the result.",
        unit="FOLDER|NAME",
        shown_default="the one beside the token files",
    )
    max_seq_len: Annotated[int, Field(ge=2)] = batch_setting(
        2048, "Targets of a window.", unit="tokens"
    )
    device_batch_size: Positive = batch_setting(
        32, "Windows that one device holds at a time.", unit="windows"
    )
    total_batch_size: Positive = batch_setting(
        524288, "Tokens per optimizer step over all devices.", unit="tokens"
    )
    gradient_accumulation_steps: Positive | None = batch_setting(
        None,
        "Micro-batches per device and step; given without total_batch_size, it decides that.",
        unit="micro-batches",
        shown_default="derived",
    )
    num_iterations: Positive | None = batch_setting(
        None, "Optimizer steps.", unit="steps", shown_default="by target_param_data_ratio"
    )
    target_param_data_ratio: float = batch_setting(
        12.0,
        "Tokens of the run per parameter of blocks and head, unless num_iterations is set.",
        gt=0,
        unit="tokens/parameter",
    )
    windows: Literal["stream", "document", "best-fit"] = batch_setting(
        "stream",
        "stream: one after another without gap; document: each begins where a document begins;"
        " best-fit: each is filled with documents, the longest that fits first, and one is cut only"
        " where none fits.",
    )
    document_aligned: bool = batch_setting(False, "The same as --windows document.")
    optimizer: Literal["normuon", "muon", "adamw"] = optimizer_setting(
        "normuon", "For the matrices of the blocks; everything else has AdamW."
    )
    matrix_lr: Rate = optimizer_setting(
        default_factory=lambda values: 3e-3 if values.get("optimizer") == "adamw" else 0.02,
        description="Learning rate of the blocks' matrices.",
        depends_on="optimizer",
        shown_default="0.02, for adamw 0.003",
    )
    embedding_lr: Rate = optimizer_setting(0.3, "Learning rate of the embedding.")
    unembedding_lr: Rate = optimizer_setting(
        0.008, "Learning rate of the output head and of vectors."
    )
    learning_rate: Rate | None = optimizer_setting(
        None,
        "One learning rate for everything, instead of the three above.",
        shown_default="none; with model 4.5e-5 for full, 2e-4 for lora",
    )
    lr_scale: float = optimizer_setting(1.0, "Factor on all learning rates.", gt=0)
    lr_scaling: bool = optimizer_setting(
        True,
        "Scale rates by batch and the run's length, those of AdamW also by width, and the weight"
        " decay by batch and length; false takes all as written.",
    )
    lr_batch_exponent: float = optimizer_setting(
        0.25, "With lr_scaling, rates go as (batch / 524,288 tokens) to this power.", ge=0, le=1
    )
    warmup_steps: Warmup = redefined(BaseConfig, "warmup_steps", default=40)
    lr_scheduler: PretrainingScheduleName = redefined(
        BaseConfig, "lr_scheduler", default="warmdown"
    )
    warmdown_ratio: float = optimizer_setting(
        0.65, "Share of the steps in which the learning rate goes down.", ge=0, le=1
    )
    final_lr_fraction: float = optimizer_setting(
        0.05, "Where the warm-down ends, as a fraction of the rate.", ge=0, le=1
    )
    weight_decay: float = redefined(
        BaseConfig,
        "weight_decay",
        default=0.28,
        description="Decoupled weight decay of the blocks' matrices; falls to 0 over the run.",
    )
    max_grad_norm: float = redefined(BaseConfig, "max_grad_norm", default=0.0)
    adam_beta1: float = redefined(BaseConfig, "adam_beta1", default=0.8)
    adam_beta2: float = redefined(
        BaseConfig,
        "adam_beta2",
        default=0.96,
        description="AdamW's decay of the second moment; the embedding has 0.995.",
    )
    adam_epsilon: float = redefined(BaseConfig, "adam_epsilon", default=1e-10)
    backend: Literal["auto", "hccl", "nccl", "gloo"] = device_setting(
        "auto", "Backend of the process group; auto takes the device's own."
    )
    compile: bool | None = device_setting(
        None, "Compile the model with torch.compile.", shown_default="on for cuda, off elsewhere"
    )
    fp8: bool = device_setting(
        False, "Matrix products in float8 where the device has it; else ignored, with a warning."
    )
    distributed: bool = device_setting(
        False, "Start the processes of world_size here; no effect under a launcher."
    )
    world_size: Positive | None = device_setting(
        None,
        "Processes that --distributed starts.",
        unit="processes",
        shown_default="all devices here",
    )
    save_steps: int = redefined(BaseConfig, "save_steps", default=250)
    eval_steps: int = redefined(BaseConfig, "eval_steps", default=250)
    eval_tokens: Positive = logging_setting(
        10 * 2**20, "Most validation tokens to evaluate on, from their beginning.", unit="tokens"
    )
    sample_every: int = logging_setting(
        1000, "Steps between printed samples; 0: none.", ge=0, unit="steps"
    )
    sample_temperature: float = logging_setting(
        0.0, "Temperature of samples; 0 takes the likeliest token.", ge=0
    )
    use_wandb: bool = logging_setting(
        False, "Report to Weights & Biases (the same as --report-to wandb)."
    )
    wandb_project: Text | None = logging_setting(
        None, "Project there; sets WANDB_PROJECT.", unit="NAME"
    )
    wandb_run_name: Text | None = logging_setting(
        None, "Name of the run in trackers.", unit="NAME", shown_default="the name of output_dir"
    )

    @property
    def base_model(self) -> str | None:
        return self.model

    @property
    def trains_all_weights(self) -> bool:
        return self.finetuning == "full"

    @property
    def validates(self) -> bool:
        return bool(self.valid_data_path)

    @property
    def global_batch_size(self) -> int:
        """Windows per optimizer step."""
        return self.total_batch_size // self.max_seq_len

    @property
    def tokens_per_step(self) -> int:
        return self.total_batch_size

    @property
    def tokens_per_microbatch(self) -> int:
        return self.device_batch_size * self.max_seq_len

    def describe_batch(self, world_size: int) -> tuple[str, dict[str, int]]:
        accumulation = self.gradient_accumulation_steps or 1
        text = _(
            "{tokens:,} tokens a step = {windows} x {length} x {processes} processes x"
            " {accumulation}"
        ).format(
            tokens=self.total_batch_size,
            windows=self.device_batch_size,
            length=self.max_seq_len,
            processes=world_size,
            accumulation=accumulation,
        )
        return text, {
            "windows": self.global_batch_size,
            "tokens": self.total_batch_size,
            "accumulation": accumulation,
        }

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.deepspeed:
            yield (
                "pretraining does not run under DeepSpeed: Muon needs whole matrices",
                "remove the DeepSpeed keys; torchrun or --distributed use several devices",
            )
        weights, entries = len(self.data_weights), len(self.train_data_path)
        if weights and weights != entries:
            what = f"data_weights are {weights}, and train_data_path has {entries} entries"
            yield what, "give one weight for each entry"
        if self.finetuning == "lora" and self.model is None:
            what = "finetuning is lora, and there is no model"
            yield what, "give --model FOLDER, or leave finetuning out"
        if self.finetuning == "lora" and self.fp8:
            what = "fp8 is for training all weights, and finetuning is lora"
            yield what, "leave one of them out"
        if self.resume.endswith((".pt", ".pth", ".bin", ".ckpt")):
            yield (
                f"resume is {self.resume}: a pickle of another program, which is never read",
                "name a checkpoint-<step> folder of a run of finetune.pretrain; to continue from"
                " foreign weights, convert them to a transformers folder and fine-tune that (python"
                " -m finetune.sft --model)",
            )
