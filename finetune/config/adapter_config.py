"""Settings of fine-tuning alone: what stands under an adapter, and adapters beyond plain LoRA, by
peft's names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from finetune.config.fields import Paths, Strict, Text, adapter_setting, rule_broken

QUANTIZED_ON = ("cpu", "cuda")
MOST_LAYERS = 10_000
# What models call their embedding and their output head.
EMBEDDINGS = frozenset({"embed_tokens", "wte", "embed_in"})
HEADS = frozenset({"lm_head", "embed_out"})


def _layers(value: Any) -> Any:
    """`0 1 24-31` as numbers."""
    if value is None:
        return None
    words = [
        word
        for part in (value if isinstance(value, list | tuple) else [value])
        for word in str(part).split(",")
    ]
    found: list[int] = []
    for word in words:
        first, dash, last = word.strip().partition("-")
        if not (first.isdecimal() and (last if dash else first).isdecimal()):
            raise rule_broken(
                [
                    (
                        f"{word!r} is no layer",
                        "give whole numbers from 0 and ranges of them, e.g. 0 1 24-31",
                    )
                ]
            )
        if dash and int(first) > int(last):
            raise rule_broken([(f"{word.strip()} goes backwards", f"write {last}-{first}")])
        # A range that no model has is refused by its first numbers.
        found += (
            range(int(first), min(int(last), int(first) + MOST_LAYERS) + 1)
            if dash
            else [int(first)]
        )
    if not found:
        raise rule_broken(
            [
                (
                    "no layer is named",
                    "name layers, e.g. 0 1 24-31, or leave it out: then all have one",
                )
            ]
        )
    return tuple(sorted(set(found)))


def _pattern(value: Any) -> Any:
    """`q_proj=32,down_proj=8` as a mapping to numbers; or such a mapping, looked at."""
    if isinstance(value, str):
        halves = [pair.partition("=") for pair in value.split(",")]
        names = [name.strip() for name, _sign, _number in halves]
        if twice := [name for place, name in enumerate(names) if name in names[:place]]:
            raise rule_broken([(f"{twice[0]} is named twice", "give each name one number")])
        value = {
            name.strip(): int(number) if number.isdecimal() else number
            for name, _sign, number in halves
        }
    if isinstance(value, dict):
        for name, number in value.items():
            if not name or type(number) is not int or number < 1:
                what = f"{name}={number} is no name with a whole number above 0"
                raise rule_broken([(what, "write NAME=NUMBER, e.g. q_proj=32,down_proj=8")])
            try:
                re.compile(name)
            except re.error as error:
                raise rule_broken(
                    [(f"{name!r} is no regular expression: {error}", "write names of modules")]
                ) from error
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


def quantization_problems(config: Any, device_type: str) -> list[tuple[str, str]]:
    """What of a run does not go with a quantised base, as `(what, fix)`.

    Args:
        device_type: auto where it is not known yet.
    """
    kind = config.quantization
    if kind == "none":
        return []
    found = []
    if config.trains_all_weights:
        what = (
            f"quantization is {kind} and finetuning is full: weights in few bits cannot take small"
            " updates"
        )
        found.append((what, "train an adapter (--finetuning lora), or leave --quantization out"))
    if device_type not in (*QUANTIZED_ON, "auto"):
        what = (
            f"quantization is {kind}, and bitsandbytes trains on CUDA and CPUs, not on"
            f" {device_type}"
        )
        found.append(
            (
                what,
                (
                    "leave it out; where memory is short, ds_configs/zero3.json keeps the base on"
                    " the host"
                ),
            )
        )
    return found


# Part of the run's identity where they are not at their defaults.
IDENTITY = tuple(AdapterSettings.model_fields)
BEYOND_PLAIN_LORA = tuple(name for name in IDENTITY if name != "quantization")


def adapter_identity(config: AdapterSettings) -> dict[str, Any]:
    """What of these settings makes a run another than one without them, as plain JSON."""
    fields = AdapterSettings.model_fields
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name in IDENTITY
        if (value := getattr(config, name)) != fields[name].default
    }


def adapter_problems(config: Any) -> list[tuple[str, str]]:
    """Adapters that peft cannot make, or that sharding leaves without the weights that they read:
    `(what, fix)`.
    """
    if config.trains_all_weights:
        return []
    zero = (config.deepspeed or {}).get("zero_optimization")
    found = _twice_trained(config) if config.train_tokens else []
    if not isinstance(zero, dict) or zero.get("stage") != 3:
        return found
    reads = "reads base weights past the module that owns them, where ZeRO-3 has gathered none"
    fix = "train without DeepSpeed (--deepspeed none), or with ZeRO-2"
    given = (
        ("use_dora", config.use_dora, "DoRA"),
        ("train_tokens", config.train_tokens, "peft's trainable tokens"),
    )
    return found + [(f"{name} is set: {what} {reads}", fix) for name, value, what in given if value]


def _twice_trained(config: Any) -> list[tuple[str, str]]:
    """Embedding or head asked for beside single rows of them."""
    targets = config.lora_target_modules
    asked = (
        (
            "lora_target_modules",
            last_parts([targets] if isinstance(targets, str) else targets) & HEADS,
        ),
        ("modules_to_save", last_parts(config.modules_to_save) & (EMBEDDINGS | HEADS)),
    )
    fix = (
        "leave one of the two out: rows of the embedding and of the head are trained by"
        " train_tokens"
    )
    return [
        (
            (
                f"train_tokens is set, and {name} names {', '.join(sorted(both))}: a module is"
                " trained in one way"
            ),
            fix,
        )
        for name, both in asked
        if both
    ]


def last_parts(names: Iterable[str]) -> frozenset[str]:
    """The last parts of dotted names."""
    return frozenset(name.rpartition(".")[2] for name in names)
