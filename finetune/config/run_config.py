"""The settings of fine-tuning, and the rules between them.

A sample is one conversation; a global batch is the samples of one optimizer step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from math import ceil
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator

from finetune.config.base_config import BaseConfig
from finetune.config.fields import (
    ACCUMULATION,
    NATURAL,
    Columns,
    CurriculumConfig,
    DataEntries,
    DataSource,
    Names,
    Paths,
    Positive,
    Precedence,
    Problem,
    Rate,
    Resolution,
    Rule,
    Share,
    Strict,
    Text,
    Weights,
    adapter_setting,
    as_sources,
    batch_setting,
    curriculum_setting,
    data_setting,
    divisors_around,
    flag,
    is_count,
    logging_setting,
    multiples_around,
    note_unused,
    optimizer_setting,
    preparation_setting,
    processes,
    redefined,
    refuse_product,
    resolve_data_weights,
    rule_broken,
    warn_of_long_warmup,
    with_common,
)
from finetune.config.schedules import ScheduleName, described
from finetune.errors import ConfigError
from finetune.runtime.language import _

QUANTIZED_ON = ("cpu", "cuda")
MAX_LAYERS = 10_000
# What models call their embedding and their output head.
EMBEDDINGS = frozenset({"embed_tokens", "wte", "embed_in"})
HEADS = frozenset({"lm_head", "embed_out"})


def _layers(value: Any) -> Any:
    """Return the layers that `0 1 24-31` names."""
    if value is None:
        return None
    parts = value if isinstance(value, list | tuple) else [value]
    found: set[int] = set()
    for word in ",".join(map(str, parts)).split(",") if parts else ():
        first, dash, last = word.strip().partition("-")
        if not (first.isdecimal() and (last if dash else first).isdecimal()):
            fix = "give whole numbers from 0 and ranges of them, e.g. 0 1 24-31"
            raise rule_broken((f"{word!r} is no layer", fix))
        start, stop = int(first), int(last or first)
        if start > stop:
            raise rule_broken((f"{word.strip()} goes backwards", f"write {last}-{first}"))
        # A range that no model has is refused by its first numbers.
        found.update(range(start, min(stop, start + MAX_LAYERS) + 1))
    if not found:
        fix = "name layers, e.g. 0 1 24-31, or leave it out: then all have one"
        raise rule_broken(("no layer is named", fix))
    return tuple(sorted(found))


def _pattern(value: Any) -> Any:
    """Return `q_proj=32,down_proj=8` as a mapping to numbers; check it, or such a mapping."""
    if isinstance(value, str):
        numbers: dict[str, Any] = {}
        for pair in value.split(","):
            name, _, number = pair.partition("=")
            if name.strip() in numbers:
                raise rule_broken((f"{name.strip()} is named twice", "give each name one number"))
            numbers[name.strip()] = int(number) if number.isdecimal() else number
        value = numbers
    if isinstance(value, dict):
        for name, number in value.items():
            if not name or type(number) is not int or number < 1:
                what = f"{name}={number} is no name with a whole number above 0"
                raise rule_broken((what, "write NAME=NUMBER, e.g. q_proj=32,down_proj=8"))
            try:
                re.compile(name)
            except re.error as error:
                what = f"{name!r} is no regular expression: {error}"
                raise rule_broken((what, "write names of modules")) from error
    return value


LayerNumbers = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...],
    BeforeValidator(_layers, json_schema_input_type=str | list[int | str]),
]
Pattern = Annotated[
    dict[Text, Annotated[int, Field(ge=1)]],
    BeforeValidator(_pattern, json_schema_input_type=str | dict[str, int]),
]


class AdapterSettings(Strict):
    """The settings of `RunConfig` about adapters, except `finetuning` and `lora_r`."""

    quantization: Literal["none", "nf4", "int8"] = adapter_setting(
        "none",
        "Hold the frozen base weights in 4 or 8 bits (QLoRA), with bitsandbytes; on CUDA or a CPU.",
    )
    use_rslora: bool = adapter_setting(
        False, "Scale the update by alpha / sqrt(r) in place of alpha / r (rsLoRA)."
    )
    use_dora: bool = adapter_setting(
        False, "Train the length of each column of the weights apart (DoRA)."
    )
    lora_plus_ratio: float | None = adapter_setting(
        None,
        "Learning rate of the B matrices as a multiple of the rate (LoRA+).",
        gt=0,
        shown_default="1, plain LoRA",
    )
    rank_pattern: Pattern | None = adapter_setting(
        None,
        "Ranks of modules that have another than lora_r, by their names.",
        unit="q_proj=32,down_proj=8",
    )
    alpha_pattern: Pattern | None = adapter_setting(
        None,
        "Their scales, where they have another than lora_alpha.",
        unit="q_proj=64,down_proj=16",
    )
    layers_to_transform: LayerNumbers | None = adapter_setting(
        None, "Layers that get an adapter, counted from 0.", unit="0 1 24-31", shown_default="all"
    )
    modules_to_save: Paths = adapter_setting(
        (),
        "Modules that are trained whole beside the adapter and saved with it, by their names.",
        unit="NAME...",
    )
    train_tokens: Paths = adapter_setting(
        (),
        "Train the embedding and head rows of these tokens too; auto: those that end answers and"
        " that the base never trained.",
        unit="auto|TOKEN...",
    )

    @field_validator("lora_plus_ratio")
    @classmethod
    def _one_is_plain(cls, ratio: float | None) -> float | None:
        return None if ratio == 1 else ratio


# In the run's identity unless they are at their defaults.
IDENTITY = tuple(AdapterSettings.model_fields)
BEYOND_PLAIN_LORA = tuple(name for name in IDENTITY if name != "quantization")


def adapter_identity(config: AdapterSettings) -> dict[str, Any]:
    """Return the settings that make this another run than one with plain LoRA, as plain JSON."""
    fields = AdapterSettings.model_fields
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name in IDENTITY
        if (value := getattr(config, name)) != fields[name].default
    }


def quantization_problems(config: Any, device_type: str) -> Iterator[Problem]:
    """Yield why the run cannot have a quantized base.

    Args:
        device_type: auto if it is not known yet.
    """
    kind = config.quantization
    if kind == "none":
        return
    if config.trains_all_weights:
        yield (
            f"quantization is {kind} and finetuning is full: weights in few bits cannot take small"
            " updates",
            "train an adapter (--finetuning lora), or leave --quantization out",
        )
    if device_type not in (*QUANTIZED_ON, "auto"):
        yield (
            f"quantization is {kind}, and bitsandbytes trains on CUDA and CPUs, not on"
            f" {device_type}",
            "leave it out; where memory is short, ds_configs/zero3.json keeps the base on the host",
        )


def adapter_problems(config: Any) -> Iterator[Problem]:
    """Yield adapters that peft cannot make, or whose base weights are sharded away when peft reads
    them.
    """
    if config.trains_all_weights:
        return
    if config.train_tokens:
        targets = config.lora_target_modules
        targets = [targets] if isinstance(targets, str) else targets
        asked = {
            "lora_target_modules": last_parts(targets) & HEADS,
            "modules_to_save": last_parts(config.modules_to_save) & (EMBEDDINGS | HEADS),
        }
        for name, both in asked.items():
            if both:
                yield (
                    f"train_tokens is set, and {name} names {', '.join(sorted(both))}: a module is"
                    " trained in one way",
                    "leave one of the two out: rows of the embedding and of the head are trained by"
                    " train_tokens",
                )
    zero = (config.deepspeed or {}).get("zero_optimization")
    if isinstance(zero, dict) and zero.get("stage") == 3:
        for name, what in (("use_dora", "DoRA"), ("train_tokens", "peft's trainable tokens")):
            if getattr(config, name):
                yield (
                    f"{name} is set: {what} reads base weights past the module that owns them,"
                    " where ZeRO-3 has gathered none",
                    "train without DeepSpeed (--deepspeed none), or with ZeRO-2",
                )


def last_parts(names: Iterable[str]) -> frozenset[str]:
    """Return the last parts of dotted names."""
    return frozenset(name.rpartition(".")[2] for name in names)


# Samples per optimizer step that a global batch of auto may become (planning/learning_defaults.py).
AUTO_BATCHES = (8, 16, 32)
MICRO, GLOBAL = "micro_batch_size", "global_batch_size"


def _batch_problem(size: int, micro: int) -> Problem:
    """Return the problem of a global batch that the micro-batch does not divide."""
    return (
        f"{GLOBAL} {size} is not a multiple of {MICRO} {micro}",
        f"nearest that agree: {GLOBAL} {multiples_around(size, micro)},"
        f" or {MICRO} {divisors_around(size, micro)}",
    )


def resolve_batch(resolution: Resolution) -> None:
    """Let two of micro-batch, accumulation and global batch win by precedence; derive the third.

    At equal precedence the micro-batch is kept before the global batch and that before
    accumulation: the micro-batch is what fits into memory, the global batch is the training itself,
    accumulation is only how the one makes the other.
    """
    if resolution.is_given(ACCUMULATION) and not resolution.is_given(MICRO):
        # auto is for a number of microbatches that follows from their size.
        resolution.derive(MICRO, 1, f"1 with {ACCUMULATION}")
    names = (MICRO, GLOBAL, ACCUMULATION)
    micro, size, accumulation = map(resolution.value, names)
    world_size, count = resolution.world_size, processes(resolution.world_size)
    if size == "auto" and is_count(micro) and is_count(accumulation):
        third = GLOBAL
    elif is_count(micro) and is_count(size) and (accumulation is None or is_count(accumulation)):
        precedence = {name: resolution.precedence(name) for name in names}
        if accumulation is not None and len(set(precedence.values())) == 1:
            product = micro * accumulation * world_size
            if product != size:
                refuse_product(resolution, GLOBAL, (MICRO, ACCUMULATION), product)
            return
        third = min(
            names, key=lambda name: (precedence[name], name != ACCUMULATION, name != GLOBAL)
        )
    else:
        return
    if third == ACCUMULATION:
        if size % micro:
            what, fix = _batch_problem(size, micro)
            resolution.refuse(what, (GLOBAL, MICRO), fix)
            return
        at_once = micro * world_size
        value = ceil(size / at_once)
        how = f"{GLOBAL} {size} / ({MICRO} {micro} x {count})"
        if size % at_once:
            how += ", uneven: some devices have less to do in the last of them"
    elif third == GLOBAL:
        value = micro * accumulation * world_size
        how = f"{MICRO} {micro} x {ACCUMULATION} {accumulation} x {count}"
    else:
        share = accumulation * world_size
        if size % share:
            resolution.refuse(
                f"{GLOBAL} {size} is not a whole micro-batch x {ACCUMULATION} {accumulation} x"
                f" {count}",
                (GLOBAL, ACCUMULATION),
                f"nearest that agree: {GLOBAL} {multiples_around(size, share)}; or give {MICRO}"
                f" instead of {ACCUMULATION}, which need not divide by the processes",
            )
            return
        value = size // share
        how = f"{GLOBAL} {size} / ({ACCUMULATION} {accumulation} x {count})"
    resolution.notes.append(f"{third} {value}{resolution.instead_of(third, value)}: {how}")
    first, second = (name for name in (GLOBAL, MICRO, ACCUMULATION) if name != third)
    resolution.derive(third, value, f"derived from {first}, {second} and {count}")


def resolve_length(resolution: Resolution) -> None:
    """Let the one of max_steps and num_epochs win that has the higher precedence; at equal
    precedence max_steps.
    """
    steps, epochs = resolution.values["max_steps"], resolution.values["num_epochs"]
    if steps.value is None:
        return
    if resolution.precedence("num_epochs") > steps.precedence:
        resolution.derive("max_steps", None, f"derived: num_epochs ({epochs.origin}) wins")
        resolution.notes.append(
            f"max_steps {steps.value} ({steps.where}) is not used: num_epochs {epochs.value} wins"
        )
    elif epochs.precedence > Precedence.DEFAULT and epochs.value != resolution.default(
        "num_epochs"
    ):
        resolution.notes.append(
            f"num_epochs {epochs.value} ({epochs.where}) is not used: max_steps {steps.value} wins"
        )


def resolve_validation_data(resolution: Resolution) -> None:
    """Drop the validation data of the files if `--data` is a flag: it belongs to the data that was
    replaced.
    """
    data, valid = resolution.values.get("data"), resolution.values["valid_data"]
    if data and valid.value and data.precedence >= Precedence.FLAG > valid.precedence:
        resolution.derive("valid_data", [], f"dropped: data is from {data.origin}")
        resolution.notes.append(
            f"valid_data ({valid.where}) is dropped, because data is from {data.origin}; "
            f"give {flag('valid_data')} to validate"
        )
        return
    for path in sorted(_listed(resolution.value("data")) & _listed(valid.value)):
        resolution.notes.append(
            f"warning: {path} is in data and in valid_data: the validation loss will look too good"
        )


def _listed(value: Any) -> set[str]:
    """Return the paths of `data` or `valid_data`, as far as they are well-formed."""
    entries = value if isinstance(value, list | tuple) else [value]
    paths = (entry.get("path") if isinstance(entry, dict) else entry for entry in entries)
    return {path for path in paths if isinstance(path, str)}


def _note_unused(resolution: Resolution) -> None:
    value = resolution.value
    lora = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "fused_lora")
    adam = ("adam_beta1", "adam_beta2", "adam_epsilon")
    curriculum = ("curriculum", "curriculum_seed")
    answers = ("answer_field", "max_new_tokens")
    follows = bool(value("keep_best") or value("early_stopping"))
    note_unused(
        resolution,
        (
            ((*lora, *BEYOND_PLAIN_LORA), value("finetuning") == "full", "finetuning is full"),
            (adam, value("optimizer") == "adafactor", "optimizer is adafactor"),
            (curriculum, value("use_curriculum") is False, "use_curriculum is false"),
            (answers, value("eval_generate") is None, "eval_generate is not set"),
            (("best_metric",), not follows, "neither keep_best nor early_stopping is set"),
        ),
    )


class RunConfig(AdapterSettings, BaseConfig):
    """The settings of a fine-tuning run (`python -m finetune.sft`)."""

    command: ClassVar[str] = "python -m finetune.sft"
    rules: ClassVar[tuple[Rule, ...]] = (
        resolve_batch,
        resolve_length,
        partial(warn_of_long_warmup, total="max_steps", share="0.03 for 3%"),
        resolve_validation_data,
        resolve_data_weights,
        _note_unused,
    )
    machine_fields: ClassVar[frozenset[str]] = frozenset({ACCUMULATION})

    model: Text = data_setting(
        ..., "Folder of the base model, or its name on the hub.", unit="FOLDER|NAME[@REVISION]"
    )
    data: DataEntries = data_setting(
        ...,
        "Training files, folders and globs, in any of the formats of docs/reference/data.md.",
        unit="file...",
        min_length=1,
    )
    columns: Columns | None = data_setting(
        None,
        "What the data calls the keys of our formats.",
        unit="prompt=question,response=answer",
        shown_default="the same",
    )
    max_samples: int | None = data_setting(
        None,
        "Use only this many records of each entry of data and of valid_data, the first ones.",
        unit="records",
        shown_default="all",
        ge=1,
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
        """The entries of `data`; either all have a weight, and are mixed, or none has."""
        sources = as_sources(self.data)
        if self.data_weights:
            sources = tuple(
                source.model_copy(update={"weight": weight})
                for source, weight in zip(sources, self.data_weights, strict=True)
            )
        return with_common(sources, self.columns, self.max_samples)

    @property
    def valid_sources(self) -> tuple[DataSource, ...]:
        return with_common(as_sources(self.valid_data), self.columns, self.max_samples)

    @property
    def held_out(self) -> tuple[DataSource, ...]:
        """The entries that validation data comes from: `valid_data`, or `data` that is split."""
        return self.valid_sources if self.valid_split is None else self.sources

    @property
    def validates(self) -> bool:
        return bool(self.valid_data) or self.valid_split is not None

    @property
    def preference_form(self) -> Literal["pairs", "labels"] | None:
        """What a record has besides one answer: a second answer, or a label; None for neither."""
        return None

    @property
    def samples_per_microbatch(self) -> int:
        """`micro_batch_size` as a number; the smallest while it is auto."""
        if self.micro_batch_size == "auto":
            return 1
        return min(self.micro_batch_size, self.samples_per_step)

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
        size, micro = self.global_batch_size, self.micro_batch_size
        accumulation = self.gradient_accumulation_steps or 1
        numbers: dict[str, Any] = {"world_size": world_size}
        if size == "auto":
            text = _("the number of samples says how many a step has: {smallest} to {largest}")
            return text.format(smallest=AUTO_BATCHES[0], largest=AUTO_BATCHES[-1]), numbers
        numbers = {"samples": size} | numbers
        if micro == "auto":
            text = _(
                "{samples} samples a step on {processes} processes, in microbatches that the start"
                " chooses"
            )
            return text.format(samples=size, processes=world_size), numbers
        text = _(
            "{samples} samples a step {relation} {micro} x {processes} processes x {accumulation}"
        ).format(
            samples=size,
            relation="=" if micro * world_size * accumulation == size else "<=",
            micro=micro,
            processes=world_size,
            accumulation=accumulation,
        )
        return text, {
            "samples": size,
            "accumulation": accumulation,
            "world_size": world_size,
        }

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        yield from self._metric_problems()
        yield from self._source_problems()
        if self.valid_split is not None and self.valid_data:
            what = "valid_split and valid_data are both given"
            yield what, "keep one: a part of data, or files of its own"
        yield from self._split_problems()
        yield from quantization_problems(self, self.device_type)
        yield from adapter_problems(self)
        yield from optimizer_problems(self, self.device_type)
        yield from self._batch_problems()

    def _metric_problems(self) -> Iterator[Problem]:
        """Yield a metric that evaluations do not have, and answers without a prompt to answer."""
        metric, levels = self.best_metric, self.curriculum.levels if self.use_curriculum else ()
        known = [
            name
            for kind in self.metrics
            for name in (kind, *(f"{kind}/{level}" for level in levels))
        ]
        if metric not in known:
            what = f"best_metric is {metric}, which no evaluation has"
            yield what, f"take one of {', '.join(known)}"
        elif metric.startswith("exact_match") and self.eval_generate is None:
            what = f"best_metric is {metric}, and evaluations answer nothing"
            yield what, "set --eval-generate, e.g. to 50"
        if self.eval_generate is not None and not self.validates:
            what = f"eval_generate is {self.eval_generate}, and there is no validation data"
            yield what, f"give validation data, or leave {flag('eval_generate')} out"

    def _source_problems(self) -> Iterator[Problem]:
        data, valid_data = as_sources(self.data), as_sources(self.valid_data)
        weights, weighted = self.data_weights, any(source.weight is not None for source in data)
        if weights and len(weights) != len(data):
            what = f"data_weights has {len(weights)} weights for {len(data)} entries of data"
            yield what, "give one weight for each, in the same order"
        if weights and weighted:
            yield "data_weights is given, and an entry of data has a weight", "keep one of the two"
        unweighted = [source.path for source in data if source.weight is None]
        if unweighted and weighted:
            have = "have" if len(unweighted) > 1 else "has"
            what = f"{', '.join(unweighted)} in data {have} no weight, and others have"
            yield what, f"give each a number above 0, or {NATURAL} for its size"
        if any(source.weight is not None for source in valid_data):
            what = "an entry of valid_data has a weight"
            yield what, "remove it: each validation sample is evaluated once"
        levels = self.curriculum.levels
        for source in (*data, *valid_data):
            if self.use_curriculum and source.difficulty not in (None, *levels):
                yield (
                    f"{source.path} has the difficulty {source.difficulty!r}, which the curriculum"
                    " does not have",
                    f"give one of {', '.join(levels)}",
                )

    def _split_problems(self) -> Iterator[Problem]:
        """Yield a split that has nothing to split, or by a field whose name `columns` gives to
        another.
        """
        field = self.split_by
        if field is None:
            return
        if self.valid_split is None:
            what = "split_by is given, and nothing is split"
            yield what, "give valid_split as well, or leave it out"
            return
        for source in with_common(as_sources(self.data), self.columns):
            columns = source.columns or {}
            if field in columns and field not in columns.values():
                what = f"split_by is {field}, a name that columns gives to '{columns[field]}'"
                yield what, f"split by {columns[field]}, or by another field"
                return

    def _batch_problems(self) -> Iterator[Problem]:
        """Yield a micro-batch that does not go with accumulation or the global batch."""
        micro, size = self.micro_batch_size, self.global_batch_size
        accumulation, given = self.gradient_accumulation_steps, self.model_fields_set
        if micro == "auto":
            # If accumulation is given and this is left out, it is 1: resolve_batch.
            if accumulation is not None and MICRO in given:
                what = f"{ACCUMULATION} is {accumulation}, and {MICRO} is auto"
                fix = "the number of microbatches follows from their size"
                yield what, f"leave one of them out: {fix}"
        # With accumulation given and the global batch left to its default, the global batch is
        # still to be derived; one of auto becomes a multiple.
        elif size != "auto" and size % micro and (accumulation is None or GLOBAL in given):
            yield _batch_problem(size, micro)


def optimizer_problems(config: RunConfig, device_type: str) -> Iterator[Problem]:
    """Yield why an optimizer does not go with the rest of the run."""
    name = config.optimizer
    if name == "adamw":
        return
    if not config.trains_all_weights:
        what = f"optimizer is {name}, and finetuning is lora: the state of an adapter is small"
        yield what, "leave --optimizer out, or train all parameters (--finetuning full)"
    if config.deepspeed:
        what = f"optimizer is {name}, and DeepSpeed shards AdamW's two flat moments"
        yield what, "train without DeepSpeed (--deepspeed none), or leave --optimizer out"
    if name == "adamw-8bit" and device_type not in (*QUANTIZED_ON, "auto"):
        what = (
            f"optimizer is {name}, and bitsandbytes has it on CUDA and CPUs, not on {device_type}"
        )
        yield what, "take adafactor, or leave --optimizer out"


def check_device(config: Any, device_type: str) -> None:
    """Check that this type of device has what the run asks for.

    Raises:
        ConfigError: it has not.
    """
    for setting, problems in (
        ("quantization", quantization_problems),
        ("optimizer", optimizer_problems),
    ):
        for what, fix in problems(config, device_type):
            raise ConfigError(what, where=flag(setting), fix=fix)
