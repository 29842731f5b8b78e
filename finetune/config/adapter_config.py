"""Settings of fine-tuning alone that say what stands under an adapter."""

from __future__ import annotations

from typing import Any, Literal

from finetune.config.fields import Strict, adapter_setting
from finetune.errors import ConfigError

QUANTIZED_ON = ("cpu", "cuda")


class AdapterSettings(Strict):
    """A part of `run_config.RunConfig`, beside `finetuning` and `lora_r`."""

    quantization: Literal["none", "nf4", "int8"] = adapter_setting(
        "none", "Hold the frozen base weights in 4 or 8 bits (QLoRA), with bitsandbytes; on CUDA or a CPU."
    )


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
        what = f"quantization is {kind} and finetuning is full: weights in few bits cannot take small updates"
        found.append((what, "train an adapter (--finetuning lora), or leave --quantization out"))
    if device_type not in (*QUANTIZED_ON, "auto"):
        what = f"quantization is {kind}, and bitsandbytes trains on CUDA and CPUs, not on {device_type}"
        found.append((what, "leave it out; where memory is short, ds_configs/zero3.json keeps the base on the host"))
    return found


def check_quantization(config: Any, device_type: str) -> None:
    """Raise ConfigError where the run does not go with a quantised base."""
    for what, fix in quantization_problems(config, device_type):
        raise ConfigError(what, where="--quantization", fix=fix)
