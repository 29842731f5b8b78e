"""Every setting of a fine-tuning run: its name, default, unit and rule.

Pure: reads no file and no environment variable, imports no torch. Where the values come from
(files, flags, DeepSpeed keys) and which source wins is the business of `resolution`; what a value
may be is decided here and nowhere else.

Words: a sample is one conversation, a global batch is the samples of one optimizer step.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from finetune.config.adapter_config import AdapterSettings, adapter_problems, quantization_problems
from finetune.config.base_config import BaseConfig
from finetune.config.fields import (
    Columns,
    CurriculumConfig,
    Names,
    Positive,
    Rate,
    Share,
    Text,
    adapter_setting,
    batch_setting,
    curriculum_setting,
    data_setting,
    logging_setting,
    optimizer_setting,
    preparation_setting,
    redefined,
)
from finetune.config.precedence import Rule
from finetune.config.rules import (
    RULES_FOR_FINE_TUNING,
    batch_problems,
    metric_problems,
    optimizer_problems,
    split_problems,
)
from finetune.config.schedules import ScheduleName, described
from finetune.config.sources import (
    DataEntries,
    DataSource,
    Weights,
    as_sources,
    source_problems,
    weighted,
    with_columns,
)
from finetune.runtime.language import _

# Samples per optimizer step that a global batch of auto may become (planning/learning_defaults.py).
AUTO_BATCHES = (8, 16, 32)


class RunConfig(AdapterSettings, BaseConfig):
    """The settings of a fine-tuning run (`python -m finetune.sft`)."""

    command: ClassVar[str] = "python -m finetune.sft"
    rules: ClassVar[tuple[Rule, ...]] = RULES_FOR_FINE_TUNING
    machine_fields: ClassVar[frozenset[str]] = frozenset({"gradient_accumulation_steps"})

    model: Text = data_setting(
        ..., "Folder of the base model, or its name on the hub.", unit="FOLDER|NAME[@REVISION]"
    )
    data: DataEntries = data_setting(
        ...,
        "Training files, folders and globs, in any of the formats of docs/data.md.",
        unit="file...",
        min_length=1,
    )
    columns: Columns | None = data_setting(
        None,
        "What the data calls the keys of our formats.",
        unit="prompt=question,response=answer",
        shown_default="the same",
    )
    data_weights: Weights = data_setting(
        (),
        "Mix the entries of data by these weights, one for each; natural is its number of samples.",
        unit="weight...",
    )
    valid_data: DataEntries = data_setting(
        (), "Validation files, in the same formats.", unit="file..."
    )
    valid_split: Share | None = data_setting(
        None,
        "Validate on a part of data instead: below 1 a share of the records, else a number; by"
        " hash.",
        unit="0.02|500",
        shown_default="none",
    )
    split_by: Text | None = data_setting(
        None,
        "Field whose equal values stay on one side of valid_split.",
        unit="NAME",
        shown_default="the whole record",
    )
    drop_duplicates: bool = data_setting(
        False, "Leave out records of data that say the same as an earlier one."
    )
    hub: Literal["auto", "huggingface", "modelscope"] = data_setting(
        "auto",
        "Where a model comes from by its name; auto is ModelScope where USE_MODELSCOPE_HUB is 1.",
    )
    template: Text | None = data_setting(
        None,
        "Chat template: a known name or a file.",
        unit="NAME|FILE",
        shown_default="the tokenizer's own",
    )
    trust_remote_code: bool = data_setting(False, "Run Python code that comes with the model.")
    micro_batch_size: Positive | Literal["auto"] = batch_setting(
        "auto",
        "Samples that one device holds at a time; auto by the memory there is.",
        unit="samples",
        shown_default="auto; 1 where gradient_accumulation_steps is given",
    )
    gradient_accumulation_steps: Positive | None = batch_setting(
        None,
        "Micro-batches per device and step; derived from the global batch unless given.",
        unit="micro-batches",
        shown_default="derived",
    )
    global_batch_size: Positive | Literal["auto"] = batch_setting(
        "auto",
        "Samples per optimizer step over all devices; auto by how many samples the run sees.",
        unit="samples",
    )
    cutoff_len: int = batch_setting(
        2048, "Longest sample; longer ones are trimmed.", ge=2, unit="tokens"
    )
    max_steps: Positive | None = batch_setting(
        None, "Optimizer steps; wins over num_epochs.", unit="steps"
    )
    num_epochs: float = batch_setting(
        3.0, "Passes over the data, unless max_steps is set.", gt=0, unit="passes"
    )
    packing: bool = batch_setting(
        True, "Pack several samples into a microbatch; the training stays the same."
    )
    finetuning: Literal["lora", "full"] = adapter_setting(
        "lora", "Train a LoRA adapter, or all parameters."
    )
    lora_r: int = adapter_setting(16, "Rank of the LoRA matrices.", ge=1)
    lora_alpha: int = adapter_setting(
        default_factory=lambda values: 2 * values.get("lora_r", 16),
        description="LoRA scale; the update is multiplied by alpha / r.",
        ge=1,
        depends_on="lora_r",
        shown_default="2 x lora_r",
    )
    lora_dropout: float = adapter_setting(
        0.0, "Dropout in front of the LoRA matrices, as a probability.", ge=0, lt=1
    )
    lora_target_modules: Names = adapter_setting(
        "all-linear", "Modules that get an adapter, by their names.", min_length=1
    )
    fused_lora: bool = adapter_setting(
        True,
        "Compute each linear layer and its adapter as one function; off takes peft's own, slower"
        " one.",
    )
    learning_rate: Rate | Literal["auto"] = optimizer_setting(
        "auto",
        "Highest learning rate, reached after the warm-up; auto by finetuning, the model's width,"
        " and the batch.",
        shown_default="auto: 4e-4 for lora, 4e-5 for full at width 4096 and a batch of 32",
    )
    optimizer: Literal["adamw", "adamw-8bit", "adafactor", "muon"] = optimizer_setting(
        "adamw",
        "For finetuning full: with less state, AdamW in 8 bits, Adafactor, or Muon for the blocks'"
        " matrices.",
    )
    lr_scheduler: ScheduleName = redefined(
        BaseConfig,
        "lr_scheduler",
        description=f"Learning rate after the warm-up. {described(pretraining=False)}.",
    )
    use_curriculum: bool = curriculum_setting(
        True, "Mix the difficulties by stages, where the data has a difficulty field."
    )
    curriculum_seed: int = curriculum_setting(
        42, "Seed of the order of the samples within each difficulty.", ge=0, lt=2**32
    )
    difficulty_field: Text = curriculum_setting(
        "difficulty", "Field that holds a record's difficulty."
    )
    curriculum: CurriculumConfig = curriculum_setting(
        default_factory=CurriculumConfig, description="Difficulties and stages; set it in a file."
    )
    train_thinking: bool = data_setting(
        True, "Train the think blocks of answers; false leaves them as context."
    )
    on_media: Literal["refuse", "drop-row", "drop-media"] = preparation_setting(
        "refuse",
        "What to do about a record with images, video or sound; drop-media trains its text.",
    )
    eval_generate: Positive | None = logging_setting(
        None,
        "Answer so many validation records at each evaluation, for exact_match.",
        unit="N",
        shown_default="none",
    )
    answer_field: Text = logging_setting(
        "answer", "With eval_generate: field with the answer of a validation record.", unit="NAME"
    )
    max_new_tokens: Positive = logging_setting(
        512, "With eval_generate: most tokens of an answer.", unit="tokens"
    )
    best_metric: Text = logging_setting(
        "loss",
        "What the best evaluation is the best of, for keep_best and early_stopping.",
        unit="loss|exact_match[/DIFFICULTY]",
    )
    on_bad_row: Literal["refuse", "drop"] = preparation_setting(
        "refuse", "What to do about a record that cannot be used."
    )

    @property
    def sources(self) -> tuple[DataSource, ...]:
        """The entries of `data`; each has a weight where they are mixed, and none has where they
        are not.
        """
        return with_columns(weighted(self.data, self.data_weights), self.columns)

    @property
    def valid_sources(self) -> tuple[DataSource, ...]:
        return with_columns(as_sources(self.valid_data), self.columns)

    @property
    def held_out(self) -> tuple[DataSource, ...]:
        """The entries that validation data is from: of `valid_data`, or those that are split."""
        return self.valid_sources if self.valid_split is None else self.sources

    @property
    def validates(self) -> bool:
        """Whether there is data to evaluate on."""
        return bool(self.valid_data) or self.valid_split is not None

    @property
    def preference_form(self) -> Literal["pairs", "labels"] | None:
        """What a record has besides one answer: a second one, or a label; None for neither."""
        return None

    @property
    def samples_per_microbatch(self) -> int:
        """`micro_batch_size` as a number; the smallest while it is auto."""
        return (
            1
            if self.micro_batch_size == "auto"
            else min(self.micro_batch_size, self.samples_per_step)
        )

    @property
    def samples_per_step(self) -> int:
        """`global_batch_size` as a number; while it is auto, the largest that it becomes."""
        return AUTO_BATCHES[-1] if self.global_batch_size == "auto" else self.global_batch_size

    @property
    def base_model(self) -> str | None:
        return self.model

    @property
    def trains_all_weights(self) -> bool:
        return self.finetuning == "full"

    @property
    def followed_metric(self) -> str:
        return f"eval_{self.best_metric}"

    @property
    def metrics(self) -> dict[str, bool]:
        return {"loss": False, "exact_match": True}

    @property
    def tokens_per_step(self) -> int:
        return self.samples_per_step * self.cutoff_len

    @property
    def tokens_per_microbatch(self) -> int:
        return self.samples_per_microbatch * self.cutoff_len

    def describe_batch(self, world_size: int) -> tuple[str, dict[str, Any]]:
        accumulation, size = self.gradient_accumulation_steps or 1, self.global_batch_size
        if size == "auto":
            text = _("the number of samples says how many a step has: {smallest} to {largest}")
            return text.format(smallest=AUTO_BATCHES[0], largest=AUTO_BATCHES[-1]), {
                "world_size": world_size
            }
        if self.micro_batch_size == "auto":
            text = _(
                "{samples} samples a step on {processes} processes, in microbatches that the start"
                " chooses"
            )
            return text.format(samples=size, processes=world_size), {
                "samples": size,
                "world_size": world_size,
            }
        whole = self.micro_batch_size * world_size * accumulation
        text = _(
            "{samples} samples a step {relation} {micro} x {processes} processes x {accumulation}"
        ).format(
            samples=size,
            relation="=" if whole == size else "<=",
            micro=self.micro_batch_size,
            processes=world_size,
            accumulation=accumulation,
        )
        return text, {"samples": size, "accumulation": accumulation, "world_size": world_size}

    def problems(self) -> list[tuple[str, str]]:
        found = super().problems() + metric_problems(self)
        levels = self.curriculum.levels if self.use_curriculum else None
        found += source_problems(self.data, self.data_weights, self.valid_data, levels)
        if self.valid_split is not None and self.valid_data:
            found.append(
                (
                    "valid_split and valid_data are both given",
                    "keep one: a part of data, or files of its own",
                )
            )
        found += (
            split_problems(self)
            + quantization_problems(self, self.device_type)
            + adapter_problems(self)
        )
        return found + optimizer_problems(self, self.device_type) + batch_problems(self)
