"""The settings of adapters beyond plain LoRA, by peft's names, and of quantized weights under
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from finetune.config.fields import Paths, Problem, Strict, Text, adapter_setting, rule_broken

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
    """A part of `run_config.RunConfig`, beside `finetuning` and `lora_r`."""

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


# Part of the run's identity unless they are at their defaults.
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
