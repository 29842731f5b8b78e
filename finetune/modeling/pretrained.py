"""Models: loaded with the checks that save a run, and with a LoRA adapter on top where asked."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from finetune.config.paths import split_revision
from finetune.errors import ConfigError, FinetuneError
from finetune.modeling.attention import choose_attention
from finetune.modeling.loss import let_choose_logits
from finetune.modeling.model_config import (
    load_model_config,
    lora_config,
    outside_text,
    warn_of_text_alone,
)
from finetune.modeling.quantisation import compute_exactly, numbers_in, quantized_loading
from finetune.runtime.launch_environment import import_bitsandbytes

if TYPE_CHECKING:
    from finetune.config.pretrain_config import PretrainConfig
    from finetune.config.run_config import RunConfig

logger = logging.getLogger("finetune")

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_model(
    config: RunConfig | PretrainConfig,
    *,
    model_dtype: torch.dtype,
    zero3: bool,
    quantization: str = "none",
    device: torch.device | None = None,
) -> PreTrainedModel:
    """The base model, with the attention that keeps documents apart.

    Args:
        model_dtype: dtype that the weights are held in.
        zero3: parameters must come out partitioned (the DeepSpeed config is registered already).
        quantization: none, nf4 or int8. Weights in few bits are loaded on the `device`, and
            partitioned when DeepSpeed
            begins: ZeRO-3 loads no quantised model in parts.

    Raises:
        ConfigError: no safetensors weights, or they do not fit the configuration.
        FinetuneError: ZeRO-3 was asked for but the parameters are whole.
    """
    assert config.model is not None
    model_config = load_model_config(config.model, trust_remote_code=config.trust_remote_code)
    attention = choose_attention(model_config)
    repository, revision = split_revision(config.model)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            repository,
            revision=revision,
            dtype=model_dtype,
            attn_implementation=attention,
            # A .bin file is a pickle; pickles are never read.
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
            **(
                {}
                if quantization == "none"
                else quantized_loading(quantization, model_dtype, device, zero3=zero3)
            ),
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
    if quantization != "none":
        compute_exactly(model)
    elif zero3:
        check_partitioned(model)
        # Names and shapes of files are translated for the model when it is loaded, and back when it
        # is saved, by the conversions that were used; under ZeRO-3 transformers keeps all that it
        # knows, and would save under names that no other program reads
        # (_load_state_dict_into_zero3_model). May go when it filters them there too.
        conversions = getattr(model, "_weight_conversions", None) or []
        loaded: Any = model
        loaded._weight_conversions = [
            conversion for conversion in conversions if conversion.was_used()
        ]
    if outside := outside_text(model):
        # Nothing here feeds them: DDP would wait for their gradients, and weight decay would wear
        # them down.
        for name in outside:
            model.get_submodule(name).requires_grad_(False)
        logger.info("only the text model is trained: %s stay as they are", ", ".join(outside))
    return model


def check_partitioned(model: torch.nn.Module) -> None:
    """Raise FinetuneError unless every parameter is partitioned: else each rank holds the whole
    model in memory.
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


def add_adapter(
    model: PreTrainedModel,
    config: RunConfig | PretrainConfig,
    *,
    one_dtype: bool,
    token_ids: Sequence[int] = (),
) -> torch.nn.Module:
    """A LoRA adapter on the model, its start a pure function of (seed, parameter name): the same on
    every machine.

    Args:
        one_dtype: keep the adapter in the model's dtype (DeepSpeed wants one dtype among trainable
            parameters and keeps float32 masters itself); else what is trained of a 16-bit model is
            held in float32.
        token_ids: tokens whose embeddings are trained as well.
    """
    import_bitsandbytes()
    from peft import get_peft_model

    dtype = model.get_input_embeddings().weight.dtype
    with warnings.catch_warnings():
        # Of a tied model: it is meant that modules_to_save and tokens have what is tied to them
        # follow.
        warnings.filterwarnings("ignore", message=r"Model with `tie_word_embeddings=True`")
        adapted = get_peft_model(
            model, lora_config(model, config, token_ids), autocast_adapter_dtype=not one_dtype
        )
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad and not one_dtype:  # peft leaves modules_to_save in 16 bits
            parameter.data = parameter.data.float()
        if "lora_A" in name:
            _initialise(parameter, config.seed, name)
    copies = getattr(model.get_input_embeddings(), "modules_to_save", {})
    if "default" in copies and not one_dtype:
        # Autocast leaves an embedding's dtype as it is: held in float32, it would make the residual
        # stream so.
        copies["default"].register_forward_hook(lambda _module, _inputs, output: output.to(dtype))
    return adapted


def _initialise(parameter: torch.nn.Parameter, seed: int, name: str) -> None:
    # The distribution is peft's (kaiming_uniform with a=sqrt(5), Linear's default); only the
    # generator is ours, because a device's own generator gives other numbers on other devices and
    # the run would start elsewhere.
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    start = torch.empty(parameter.shape, dtype=torch.float32)
    torch.nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=generator)
    with torch.no_grad():
        parameter.copy_(start)


_DO_NOT_USE = "do not use this adapter; report it with your versions and DeepSpeed configuration"


def check_adapter_file(
    folder: Path, expected: dict[str, tuple[int, ...]] | None = None, *, trained: bool = True
) -> None:
    """Reopen a saved adapter and refuse one that is empty, incomplete or untrained.

    ZeRO-3 has saved adapters of `torch.Size([0])` in more than one package: a run of days, and
    nothing in the file.

    Args:
        folder: holds adapter_config.json and adapter_model.safetensors.
        expected: tensor names and shapes that must be there; None to check only what is there.
        trained: whether at least one lora_B must differ from its all-zero start.

    Raises:
        FinetuneError: names the first tensor that is wrong.
    """
    path = folder / "adapter_model.safetensors"
    try:
        json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no dict)
            learned = any(bool(file.get_tensor(name).any()) for name in shapes if "lora_B" in name)
    except (OSError, ValueError, SafetensorError) as error:
        raise FinetuneError(
            f"the saved adapter cannot be read: {error}", str(folder), _DO_NOT_USE
        ) from error
    empty = [name for name, shape in shapes.items() if math.prod(shape) == 0] or (
        [] if shapes else ["no tensor at all"]
    )
    wrong = [(name, shape) for name, shape in (expected or {}).items() if shapes.get(name) != shape]
    if empty:
        raise FinetuneError(
            f"the saved adapter has an empty tensor: {empty[0]}", str(path), _DO_NOT_USE
        )
    for name, shape in wrong:
        raise FinetuneError(
            f"the saved adapter has {name} as {shapes.get(name)}, not {shape}",
            str(path),
            _DO_NOT_USE,
        )
    if trained and not learned:
        raise FinetuneError(
            "every lora_B of the saved adapter is zero: nothing was trained", str(path), _DO_NOT_USE
        )


def count_parameters(model: torch.nn.Module) -> dict[str, Any]:
    """Numbers of trainable and of all parameters, partitioned ones counted whole."""
    sizes = [(numbers_in(p), p.requires_grad) for p in model.parameters()]
    return {"trainable": sum(n for n, grad in sizes if grad), "total": sum(n for n, _ in sizes)}
