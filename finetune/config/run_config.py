"""Every setting of a run: its name, default, unit and rule.

Pure: reads no file and no environment variable, imports no torch. Where the values come from (files, flags, DeepSpeed
keys) and which source wins is the business of `resolution`; what a value may be is decided here and nowhere else.

Words: a sample is one conversation, a global batch is the samples of one optimizer step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from finetune.config.fields import (
    CurriculumConfig,
    Names,
    Paths,
    Positive,
    Reporters,
    Strict,
    Text,
    Warmup,
    rule_broken,
    setting,
)
from finetune.config.precedence import Rule
from finetune.config.rules import RULES_FOR_FINE_TUNING, batch_problem
from finetune.config.schedules import SCHEDULES, described
from finetune.runtime.language import _


class BaseConfig(Strict):
    """The settings that fine-tuning and pretraining share.

    A subclass adds its own, names the command in its help, and lists the rules for settings that depend on one another.
    """

    command: ClassVar[str] = ""
    rules: ClassVar[tuple[Rule, ...]] = ()
    # Settings that follow from the number of processes: resolved for this machine, never written to run.yaml.
    machine_fields: ClassVar[frozenset[str]] = frozenset()
    # Other spelling -> field, for flags and files.
    aliases: ClassVar[Mapping[str, str]] = {}

    output_dir: Text = setting(
        group="model and data", unit="folder", description="Folder that receives everything the run writes."
    )
    warmup_steps: Warmup = setting(
        0.03, group="optimizer", unit="steps", description="Linear warm-up; below 1 it is a fraction of the steps."
    )
    weight_decay: float = setting(0.0, ge=0, group="optimizer", description="Decoupled weight decay of AdamW.")
    max_grad_norm: float = setting(
        1.0, ge=0, group="optimizer", description="Gradients are clipped to this norm; 0 turns clipping off."
    )
    adam_beta1: float = setting(0.9, ge=0, lt=1, group="optimizer", description="AdamW's decay of the first moment.")
    adam_beta2: float = setting(0.999, ge=0, lt=1, group="optimizer", description="AdamW's decay of the second moment.")
    adam_epsilon: float = setting(1e-8, gt=0, group="optimizer", description="AdamW's term against division by zero.")
    lr_scheduler: Literal[tuple(SCHEDULES)] = setting(
        "cosine", group="optimizer", description=f"Learning rate after the warm-up. {described(SCHEDULES)}."
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = setting(
        "auto", group="device", description="Number format of the forward pass; auto takes the device's best."
    )
    device_type: Literal["auto", "npu", "cuda", "mps", "cpu"] = setting(
        "auto", group="device", description="Device; auto takes the first there is of npu, cuda, mps, cpu."
    )
    gradient_checkpointing: bool | None = setting(
        None,
        group="device",
        shown_default="on where there is an accelerator",
        description="Recompute activations in the backward pass instead of keeping them.",
    )
    timeout_seconds: int = setting(
        1800, ge=1, group="device", unit="seconds", description="Longest wait for another process before giving up."
    )
    deepspeed: dict[str, Any] | None = setting(
        None,
        group="device",
        description="DeepSpeed's own keys; where one of its numbers is also ours it says auto, and ours counts.",
    )
    seed: int = setting(
        42, ge=0, lt=2**32, group="batch and length", description="Seed of everything but the curriculum."
    )
    save_steps: int = setting(
        100,
        ge=0,
        group="saving and resuming",
        unit="steps",
        description="Steps between checkpoints; 0: only the last step.",
    )
    save_total_limit: int = setting(
        2, ge=2, group="saving and resuming", unit="checkpoints", description="Newest checkpoints to keep, at least 2."
    )
    resume: Text = setting(
        "auto",
        group="saving and resuming",
        unit="auto|never|FOLDER",
        description="auto continues the run in output_dir, never starts anew, FOLDER continues that checkpoint.",
    )
    allow_data_change: bool = setting(
        False, group="saving and resuming", description="Resume even if the data, schedule or tokenizer changed."
    )
    eval_steps: int = setting(
        0,
        ge=0,
        group="evaluation and logging",
        unit="steps",
        description="Steps between evaluations; 0 evaluates before the first and after the last step only.",
    )
    logging_steps: int = setting(
        1, ge=1, group="evaluation and logging", unit="steps", description="Steps between lines of the training log."
    )
    report_to: Reporters = setting(
        "auto",
        min_length=1,
        group="evaluation and logging",
        description="Trackers beside the run's own log; auto takes TensorBoard where it is installed.",
    )
    log_samples: bool = setting(
        False, group="evaluation and logging", description="Write the record ids of every step to samples.jsonl."
    )
    dataloader_num_workers: int = setting(
        0, ge=0, group="data preparation", unit="processes", description="Processes that prepare microbatches ahead."
    )
    preprocessing_num_workers: Positive | None = setting(
        None,
        group="data preparation",
        unit="processes",
        shown_default="by the number of cores",
        description="Processes that tokenize before the run.",
    )
    cache_dir: Text | None = setting(
        None,
        group="data preparation",
        unit="folder",
        shown_default="~/.cache/finetune/samples",
        description="Folder for tokenized data.",
    )

    @property
    def base_model(self) -> str | None:
        """Folder or hub name of the model whose weights the run starts from; None where it makes its own."""
        return None

    @property
    def trains_all_weights(self) -> bool:
        """Whether every weight is trained, so that each has gradients and moments and is in every checkpoint."""
        return True

    @property
    def tokens_per_step(self) -> int:
        """Most tokens of an optimizer step, over all devices."""
        raise AttributeError(f"{type(self).__name__} does not say how many tokens a step has")

    def describe_batch(self, world_size: int) -> tuple[str, dict[str, int]]:
        """How a global batch comes out on so many processes: in words, and the numbers behind them."""
        raise AttributeError(f"{type(self).__name__} does not describe its batch")

    @model_validator(mode="after")
    def _agree(self) -> BaseConfig:
        problems = self.problems()
        if problems:
            raise rule_broken(problems)
        return self

    def problems(self) -> list[tuple[str, str]]:
        """Settings that contradict one another, as `(what, fix)`; needs no file, device or number of processes."""
        if self.report_to != "auto" and "none" in self.report_to and len(self.report_to) > 1:
            return [(f"report_to is {', '.join(self.report_to)}", "give none alone, or leave it out")]
        return []


class RunConfig(BaseConfig):
    """The settings of a fine-tuning run (`python -m finetune.sft`)."""

    command: ClassVar[str] = "python -m finetune.sft"
    rules: ClassVar[tuple[Rule, ...]] = RULES_FOR_FINE_TUNING
    machine_fields: ClassVar[frozenset[str]] = frozenset({"gradient_accumulation_steps"})

    model: Text = setting(
        group="model and data", unit="FOLDER|NAME", description="Folder of the base model, or its name on the hub."
    )
    data: Paths = setting(
        group="model and data",
        unit="file...",
        min_length=1,
        description="Training files: alpaca, sharegpt or messages, JSON or JSONL.",
    )
    valid_data: Paths = setting(
        (), group="model and data", unit="file...", description="Validation files, in the same formats."
    )
    template: Text | None = setting(
        None,
        group="model and data",
        unit="NAME|FILE",
        shown_default="the tokenizer's own",
        description="Chat template: a known name or a file.",
    )
    trust_remote_code: bool = setting(
        False, group="model and data", description="Run Python code that comes with the model."
    )
    micro_batch_size: int = setting(
        1, ge=1, group="batch and length", unit="samples", description="Samples that one device holds at a time."
    )
    gradient_accumulation_steps: Positive | None = setting(
        None,
        group="batch and length",
        unit="micro-batches",
        shown_default="derived",
        description="Micro-batches per device and step; derived from the global batch unless given.",
    )
    global_batch_size: int = setting(
        32, ge=1, group="batch and length", unit="samples", description="Samples per optimizer step over all devices."
    )
    cutoff_len: int = setting(
        2048, ge=2, group="batch and length", unit="tokens", description="Longest sample; longer ones are trimmed."
    )
    max_steps: Positive | None = setting(
        None, group="batch and length", unit="steps", description="Optimizer steps; wins over num_epochs."
    )
    num_epochs: float = setting(
        3.0, gt=0, group="batch and length", unit="passes", description="Passes over the data, unless max_steps is set."
    )
    packing: bool = setting(
        True,
        group="batch and length",
        description="Pack several samples into a microbatch; the training stays the same.",
    )
    finetuning: Literal["lora", "full"] = setting(
        "lora", group="adapter", description="Train a LoRA adapter, or all parameters."
    )
    lora_r: int = setting(16, ge=1, group="adapter", description="Rank of the LoRA matrices.")
    lora_alpha: int = setting(
        default_factory=lambda values: 2 * values.get("lora_r", 16),
        ge=1,
        group="adapter",
        depends_on="lora_r",
        shown_default="2 x lora_r",
        description="LoRA scale; the update is multiplied by alpha / r.",
    )
    lora_dropout: float = setting(
        0.0, ge=0, lt=1, group="adapter", description="Dropout in front of the LoRA matrices, as a probability."
    )
    lora_target_modules: Names = setting(
        "all-linear", min_length=1, group="adapter", description="Modules that get an adapter, by their names."
    )
    learning_rate: float = setting(
        default_factory=lambda values: 2e-5 if values.get("finetuning") == "full" else 2e-4,
        gt=0,
        group="optimizer",
        depends_on="finetuning",
        shown_default="2e-4 for lora, 2e-5 for full",
        description="Highest learning rate, reached after the warm-up.",
    )
    use_curriculum: bool = setting(
        True, group="curriculum", description="Mix the difficulties by stages, where the data has a difficulty field."
    )
    curriculum_seed: int = setting(
        42, ge=0, lt=2**32, group="curriculum", description="Seed of the order of the samples within each difficulty."
    )
    difficulty_field: Text = setting(
        "difficulty", group="curriculum", description="Field that holds a record's difficulty."
    )
    curriculum: CurriculumConfig = setting(
        default_factory=CurriculumConfig, group="curriculum", description="Difficulties and stages; set it in a file."
    )
    on_bad_row: Literal["refuse", "drop"] = setting(
        "refuse", group="data preparation", description="What to do about a record that cannot be used."
    )

    @property
    def base_model(self) -> str | None:
        """See `BaseConfig.base_model`."""
        return self.model

    @property
    def trains_all_weights(self) -> bool:
        """See `BaseConfig.trains_all_weights`."""
        return self.finetuning == "full"

    @property
    def tokens_per_step(self) -> int:
        """See `BaseConfig.tokens_per_step`."""
        return self.global_batch_size * self.cutoff_len

    def describe_batch(self, world_size: int) -> tuple[str, dict[str, int]]:
        """See `BaseConfig.describe_batch`."""
        accumulation = self.gradient_accumulation_steps or 1
        whole = self.micro_batch_size * world_size * accumulation
        text = _("{samples} samples a step {relation} {micro} x {processes} processes x {accumulation}").format(
            samples=self.global_batch_size,
            relation="=" if whole == self.global_batch_size else "<=",
            micro=self.micro_batch_size,
            processes=world_size,
            accumulation=accumulation,
        )
        return text, {"samples": self.global_batch_size, "accumulation": accumulation, "world_size": world_size}

    def problems(self) -> list[tuple[str, str]]:
        """See `BaseConfig.problems`; adds the batch sizes."""
        found = super().problems()
        # With accumulation given and the global batch left to its default, the global batch is still to be derived.
        complete = self.gradient_accumulation_steps is None or "global_batch_size" in self.model_fields_set
        if complete and self.global_batch_size % self.micro_batch_size:
            found.append(batch_problem(self.global_batch_size, self.micro_batch_size))
        return found
