"""Every setting of a pretraining run: its name, default, unit and rule. See `run_config` for what is shared.

A batch is counted in tokens here: `total_batch_size / max_seq_len` windows are the samples of one optimizer step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from finetune.config.fields import Paths, Positive, Text, Warmup, redefined, setting
from finetune.config.precedence import Rule
from finetune.config.pretrain_rules import RULES_FOR_PRETRAINING
from finetune.config.run_config import BaseConfig
from finetune.config.schedules import PRETRAINING_SCHEDULES, described
from finetune.runtime.language import _

Rate = Annotated[float, Field(gt=0)]


class PretrainConfig(BaseConfig):
    """The settings of a pretraining run (`python -m finetune.pretrain`)."""

    command: ClassVar[str] = "python -m finetune.pretrain"
    rules: ClassVar[tuple[Rule, ...]] = RULES_FOR_PRETRAINING
    machine_fields: ClassVar[frozenset[str]] = frozenset({"gradient_accumulation_steps", "distributed", "world_size"})
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

    train_data_path: Paths = setting(
        group="model and data", unit="file...", min_length=1, description="Token files (.bin), folders, globs."
    )
    valid_data_path: Paths = setting(
        (), group="model and data", unit="file...", description="Token files to validate on."
    )
    arch: Literal["nanochat", "qwen3", "llama"] = setting(
        "nanochat", group="model and data", description="Architecture, as transformers has it."
    )
    depth: Positive = setting(
        12, group="model and data", unit="layers", description="Layers; width (64 x depth) and heads follow from it."
    )
    vocab_size: Positive | None = setting(
        None,
        group="model and data",
        unit="tokens",
        shown_default="from the token files' header",
        description="Vocabulary; needed for token files without a header.",
    )
    tokenizer: Text | None = setting(
        None,
        group="model and data",
        unit="FOLDER|NAME",
        shown_default="the one beside the token files",
        description="Tokenizer of the token files; goes into the result.",
    )
    max_seq_len: Annotated[int, Field(ge=2)] = setting(
        2048, group="batch and length", unit="tokens", description="Targets of a window."
    )
    device_batch_size: Positive = setting(
        32, group="batch and length", unit="windows", description="Windows that one device holds at a time."
    )
    total_batch_size: Positive = setting(
        524288, group="batch and length", unit="tokens", description="Tokens per optimizer step over all devices."
    )
    gradient_accumulation_steps: Positive | None = setting(
        None,
        group="batch and length",
        unit="micro-batches",
        shown_default="derived",
        description="Micro-batches per device and step; given without total_batch_size, it decides that.",
    )
    num_iterations: Positive | None = setting(
        None,
        group="batch and length",
        unit="steps",
        shown_default="by target_param_data_ratio",
        description="Optimizer steps.",
    )
    target_param_data_ratio: float = setting(
        12.0,
        gt=0,
        group="batch and length",
        unit="tokens/parameter",
        description="Tokens of the run per parameter of blocks and head, unless num_iterations is set.",
    )
    document_aligned: bool = setting(
        False,
        group="batch and length",
        description="Begin every window where a document begins; what is cut is reported.",
    )
    optimizer: Literal["muon", "adamw"] = setting(
        "muon", group="optimizer", description="For the matrices of the blocks; everything else has AdamW."
    )
    matrix_lr: Rate = setting(
        default_factory=lambda values: 3e-3 if values.get("optimizer") == "adamw" else 0.02,
        group="optimizer",
        depends_on="optimizer",
        shown_default="0.02 for muon, 0.003 for adamw",
        description="Learning rate of the blocks' matrices.",
    )
    embedding_lr: Rate = setting(0.3, group="optimizer", description="Learning rate of the embedding.")
    unembedding_lr: Rate = setting(
        0.008, group="optimizer", description="Learning rate of the output head and of vectors."
    )
    learning_rate: Rate | None = setting(
        None, group="optimizer", description="One learning rate for everything, instead of the three above."
    )
    lr_scale: float = setting(1.0, gt=0, group="optimizer", description="Factor on all learning rates.")
    lr_scaling: bool = setting(
        True,
        group="optimizer",
        description="Scale rates by the square root of the batch over 524,288 tokens and by the run's length, those of "
        "AdamW also by width, and the weight decay by batch and length; false takes all as written.",
    )
    warmup_steps: Warmup = redefined(BaseConfig, "warmup_steps", default=40)
    lr_scheduler: Literal[tuple(PRETRAINING_SCHEDULES)] = redefined(
        BaseConfig,
        "lr_scheduler",
        default="warmdown",
        description=f"Learning rate after the warm-up. {described(PRETRAINING_SCHEDULES)}.",
    )
    warmdown_ratio: float = setting(
        0.65, ge=0, le=1, group="optimizer", description="Share of the steps in which the learning rate goes down."
    )
    final_lr_fraction: float = setting(
        0.05, ge=0, le=1, group="optimizer", description="Where the warm-down ends, as a fraction of the rate."
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
    backend: Literal["auto", "hccl", "nccl", "gloo"] = setting(
        "auto", group="device", description="Backend of the process group; auto takes the device's own."
    )
    compile: bool | None = setting(
        None,
        group="device",
        shown_default="on for cuda, off elsewhere",
        description="Compile the model with torch.compile.",
    )
    fp8: bool = setting(
        False,
        group="device",
        description="Matrix products in float8 where the device has it; else ignored, with a warning.",
    )
    distributed: bool = setting(
        False, group="device", description="Start the processes of world_size here; no effect under a launcher."
    )
    world_size: Positive | None = setting(
        None,
        group="device",
        unit="processes",
        shown_default="all devices here",
        description="Processes that --distributed starts.",
    )
    gradient_checkpointing: bool | None = setting(
        None,
        group="device",
        shown_default="off",
        description="Recompute activations in the backward pass instead of keeping them.",
    )
    save_steps: int = redefined(BaseConfig, "save_steps", default=250)
    eval_steps: int = redefined(BaseConfig, "eval_steps", default=250)
    eval_tokens: Positive = setting(
        10 * 2**20,
        group="evaluation and logging",
        unit="tokens",
        description="Most validation tokens to evaluate on, from their beginning.",
    )
    sample_every: int = setting(
        1000, ge=0, group="evaluation and logging", unit="steps", description="Steps between printed samples; 0: none."
    )
    sample_temperature: float = setting(
        0.0, ge=0, group="evaluation and logging", description="Temperature of samples; 0 takes the likeliest token."
    )
    use_wandb: bool = setting(
        False, group="evaluation and logging", description="Report to Weights & Biases (the same as --report-to wandb)."
    )
    wandb_project: Text | None = setting(
        None, group="evaluation and logging", unit="NAME", description="Project there; sets WANDB_PROJECT."
    )
    wandb_run_name: Text | None = setting(
        None,
        group="evaluation and logging",
        unit="NAME",
        shown_default="the name of output_dir",
        description="Name of the run in trackers.",
    )

    @property
    def global_batch_size(self) -> int:
        """Windows per optimizer step."""
        return self.total_batch_size // self.max_seq_len

    @property
    def tokens_per_step(self) -> int:
        """See `BaseConfig.tokens_per_step`."""
        return self.total_batch_size

    def describe_batch(self, world_size: int) -> tuple[str, dict[str, int]]:
        """See `BaseConfig.describe_batch`."""
        accumulation = self.gradient_accumulation_steps or 1
        text = _("{tokens:,} tokens a step = {windows} x {length} x {processes} processes x {accumulation}").format(
            tokens=self.total_batch_size,
            windows=self.device_batch_size,
            length=self.max_seq_len,
            processes=world_size,
            accumulation=accumulation,
        )
        return text, {"windows": self.global_batch_size, "tokens": self.total_batch_size, "accumulation": accumulation}

    def problems(self) -> list[tuple[str, str]]:
        """See `BaseConfig.problems`."""
        found = super().problems()
        if self.deepspeed:
            found.append(
                (
                    "pretraining does not run under DeepSpeed: Muon needs whole matrices",
                    "remove the DeepSpeed keys; torchrun or --distributed use several devices",
                )
            )
        if self.resume.endswith((".pt", ".pth", ".bin", ".ckpt")):
            found.append(
                (
                    f"resume is {self.resume}: a pickle of another program, which is never read",
                    "name a checkpoint-<step> folder of a run of finetune.pretrain; to continue from foreign weights, "
                    "convert them to a transformers folder and fine-tune that (python -m finetune.sft --model)",
                )
            )
        return found
