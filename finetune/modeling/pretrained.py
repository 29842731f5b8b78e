"""Pretrained models: loaded with the checks that prevent a run from training the wrong thing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.quantization_config import Mxfp4Config

from finetune.config.paths import split_revision
from finetune.errors import ConfigError, FinetuneError
from finetune.modeling.adapter import check_adapter
from finetune.modeling.attention import choose_attention
from finetune.modeling.loss import let_choose_logits
from finetune.modeling.model_config import (
    check_unquantized,
    check_weights,
    load_model_config,
    outside_text,
    warn_of_text_alone,
    weight_format,
)
from finetune.modeling.quantization import compute_exactly, parameter_count, quantized_loading

if TYPE_CHECKING:
    from finetune.config.pretrain_config import PretrainConfig
    from finetune.config.run_config import RunConfig

logger = logging.getLogger("finetune")

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def check_model(config: RunConfig | PretrainConfig) -> PretrainedConfig:
    """Check a run's model and adapter without reading weights; return the model's configuration.

    Raises:
        ConfigError: the model cannot be read or trained, or the adapter cannot be made.
    """
    assert config.model is not None
    model_config = load_model_config(config.model, trust_remote_code=config.trust_remote_code)
    check_unquantized(model_config, getattr(config, "quantization", "none"))
    check_weights(config.model)
    if config.finetuning == "lora":
        check_adapter(model_config, config)
    return model_config


def load_model(
    config: RunConfig | PretrainConfig,
    *,
    model_dtype: torch.dtype,
    zero3: bool,
    quantization: str = "none",
    device: torch.device | None = None,
) -> PreTrainedModel:
    """Load the base model, with the attention that keeps documents apart.

    Args:
        model_dtype: dtype that the weights are held in.
        zero3: parameters must be partitioned (the DeepSpeed config is registered already).
        quantization: none, nf4 or int8. Quantized weights are loaded on the `device`, and DeepSpeed
            partitions them when it starts: ZeRO-3 cannot load a quantized model in parts.
        device: for quantized weights.

    Raises:
        ConfigError: there are no safetensors weights, or they do not fit the configuration.
        FinetuneError: ZeRO-3 was requested but the parameters are not partitioned.
    """
    assert config.model is not None
    model_config = load_model_config(config.model, trust_remote_code=config.trust_remote_code)
    repository, revision = split_revision(config.model)
    in_mxfp4 = weight_format(model_config) == "mxfp4"
    quantized = {}
    if quantization != "none":
        quantized = quantized_loading(quantization, model_dtype, device, zero3=zero3)
    elif in_mxfp4:
        quantized = {"quantization_config": Mxfp4Config(dequantize=True)}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            repository,
            revision=revision,
            dtype=model_dtype,
            attn_implementation=choose_attention(model_config),
            # A .bin file is a pickle; pickles are never read.
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
            **quantized,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the model's weights cannot be read: {str(error).splitlines()[0]}",
            where=config.model,
            fix=(
                "the folder needs model.safetensors (or its shards with an index); convert .bin"
                " weights with save_pretrained on a machine you trust them on"
            ),
        ) from error
    let_choose_logits(model)
    warn_of_text_alone(model, model_config)
    loaded: Any = model
    if in_mxfp4:
        # transformers 5.23 would save 16-bit weights under the names of the 4-bit blocks, which no
        # program reads (Mxfp4Dequantize.reverse_op). Remove this when it renames them.
        loaded._weight_conversions = []
    if quantization != "none":
        compute_exactly(model)
    elif zero3:
        check_partitioned(model)
        # transformers converts tensor names and shapes when it loads a model, and converts them
        # back by the conversions that it used when it saves. Under ZeRO-3 it keeps all conversions
        # that it knows, and would save under names that no other program reads
        # (_load_state_dict_into_zero3_model). Remove this when it filters them there too.
        conversions = getattr(model, "_weight_conversions", None) or []
        loaded._weight_conversions = [
            conversion for conversion in conversions if conversion.was_used()
        ]
    outside = outside_text(model)
    if outside:
        # They get no input: DDP would wait for their gradients, and weight decay would shrink them.
        for name in outside:
            model.get_submodule(name).requires_grad_(False)
        logger.info("only the text model is trained: %s stay as they are", ", ".join(outside))
    return model


def check_partitioned(model: nn.Module) -> None:
    """Raise FinetuneError unless every parameter is partitioned: otherwise each rank holds the
    whole model in memory.
    """
    whole = [
        name for name, parameter in model.named_parameters() if not hasattr(parameter, "ds_id")
    ]
    if whole:
        raise FinetuneError(
            f"ZeRO-3 is on but {len(whole)} parameters are not partitioned, first {whole[0]}",
            where="model loading",
            fix=(
                "the DeepSpeed configuration must be registered before the model; report this with"
                " your versions"
            ),
        )


def count_parameters(model: nn.Module) -> dict[str, int]:
    """Return the numbers of trainable parameters and of all, counting partitioned ones whole."""
    counts = {"trainable": 0, "total": 0}
    for parameter in model.parameters():
        count = parameter_count(parameter)
        counts["total"] += count
        if parameter.requires_grad:
            counts["trainable"] += count
    return counts
