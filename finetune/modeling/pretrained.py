"""Models: loaded with the checks that save a run, and with a LoRA adapter on top where asked."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from finetune.errors import ConfigError, DataError, FinetuneError
from finetune.modeling.attention import choose_attention

if TYPE_CHECKING:
    from finetune.config.run_config import RunConfig

logger = logging.getLogger("finetune")

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_model_config(name: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The model's config.json, without its weights.

    Raises:
        ConfigError: not a model folder or hub id, or an architecture that transformers does not know.
    """
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"the model's configuration cannot be read: {str(error).splitlines()[0]}",
            where=name,
            fix="give --model a folder with config.json and safetensors, or a hub id that this machine can reach "
            "(HF_ENDPOINT names a mirror); a model with its own code needs --trust-remote-code",
        ) from error


def check_embeddings(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raise DataError if the tokenizer has ids that the model has no embedding for."""
    embeddings = config.get_text_config().vocab_size
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest >= embeddings:
        raise DataError(
            f"the tokenizer has ids up to {highest}, but the model has only {embeddings} embeddings",
            where=name,
            fix="use the tokenizer that belongs to this model; tokens that were added must be trained into a model "
            "with resized embeddings first",
        )


def check_weights(name: str) -> None:
    """Raise ConfigError if a model folder has not all of its safetensors weights (a hub id shows it when it is loaded).

    A .bin file is a pickle, and pickles are never read.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir() or (folder / "model.safetensors").exists():
        return
    index = folder / "model.safetensors.index.json"
    missing = "model.safetensors"
    if index.exists():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError("the index of the model's weights is broken", str(index), "copy it again") from error
        absent = sorted(shard for shard in shards if not (folder / shard).exists())
        if not absent:
            return
        missing = f"{len(absent)} of {len(shards)} shards, first {absent[0]}"
    raise ConfigError(
        f"the model's weights are not there: {missing}",
        where=name,
        fix="the folder needs model.safetensors, or its shards with model.safetensors.index.json; convert .bin weights "
        "with save_pretrained on a machine you trust them on",
    )


def check_lora_targets(config: PretrainedConfig, wanted: str | tuple[str, ...], *, trust_remote_code: bool) -> None:
    """Raise ConfigError if LoRA is to adapt a module that the model does not have. Makes the model without memory."""
    if wanted != "all-linear":
        with torch.device("meta"):
            target_modules(AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code), wanted)


def load_model(
    config: RunConfig, *, device_type: str, dtype: str, model_dtype: torch.dtype, zero3: bool
) -> PreTrainedModel:
    """The base model, with the attention of this device.

    Args:
        dtype: the compute dtype's name; decides the attention path.
        model_dtype: dtype that the weights are held in.
        zero3: parameters must come out partitioned (the DeepSpeed config is registered already).

    Raises:
        ConfigError: no safetensors weights, or they do not fit the configuration.
        FinetuneError: ZeRO-3 was asked for but the parameters are whole.
    """
    model_config = load_model_config(config.model, trust_remote_code=config.trust_remote_code)
    attention = choose_attention(model_config, device_type, DTYPES[dtype], config.cutoff_len)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            config.model,
            dtype=model_dtype,
            attn_implementation=attention,
            # A .bin file is a pickle; pickles are never read.
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the model's weights cannot be read: {str(error).splitlines()[0]}",
            where=config.model,
            fix="the folder needs model.safetensors (or its shards with an index); convert .bin weights with "
            "save_pretrained on a machine you trust them on",
        ) from error
    if zero3:
        check_partitioned(model)
    return model


def check_partitioned(model: torch.nn.Module) -> None:
    """Raise FinetuneError unless every parameter is partitioned: else each rank holds the whole model in memory."""
    whole = [name for name, parameter in model.named_parameters() if not hasattr(parameter, "ds_id")]
    if whole:
        raise FinetuneError(
            f"ZeRO-3 is on but {len(whole)} parameters are not partitioned, first {whole[0]}",
            where="model loading",
            fix="the DeepSpeed configuration must be registered before the model; report this with your versions",
        )


def target_modules(model: PreTrainedModel, wanted: str | tuple[str, ...]) -> str | list[str]:
    """LoRA's targets, checked by name against the model (peft ignores a name that matches nothing if others match).

    Raises:
        ConfigError: a name that no linear module ends with; names the linear modules there are.
    """
    if wanted == "all-linear":
        return "all-linear"
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    linear = {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    missing = [name for name in names if name.rpartition(".")[2] not in linear]
    if missing:
        raise ConfigError(
            f"LoRA target {', '.join(missing)} matches no linear module of {type(model).__name__}",
            where="--lora-target-modules",
            fix=f"choose from {', '.join(sorted(linear - {'lm_head'}))}, or use all-linear",
        )
    return names


def add_adapter(model: PreTrainedModel, config: RunConfig, *, one_dtype: bool) -> torch.nn.Module:
    """A LoRA adapter on the model, its start a pure function of (seed, parameter name): the same on every machine.

    Args:
        one_dtype: keep the adapter in the model's dtype (DeepSpeed wants one dtype among trainable parameters and
            keeps float32 masters itself); else peft holds a 16-bit model's adapter in float32.
    """
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=target_modules(model, config.lora_target_modules),
        task_type="CAUSAL_LM",
        bias="none",
    )
    adapted = get_peft_model(model, lora, autocast_adapter_dtype=not one_dtype)
    for name, parameter in adapted.named_parameters():
        if "lora_A" in name:
            _initialise(parameter, config.seed, name)
    return adapted


def _initialise(parameter: torch.nn.Parameter, seed: int, name: str) -> None:
    # The distribution is peft's (kaiming_uniform with a=sqrt(5), Linear's default); only the generator is ours, because
    # a device's own generator gives other numbers on other devices and the run would start elsewhere.
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

    ZeRO-3 has saved adapters of `torch.Size([0])` in more than one package: a run of days, and nothing in the file.

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
        raise FinetuneError(f"the saved adapter cannot be read: {error}", str(folder), _DO_NOT_USE) from error
    empty = [name for name, shape in shapes.items() if math.prod(shape) == 0] or (
        [] if shapes else ["no tensor at all"]
    )
    wrong = [(name, shape) for name, shape in (expected or {}).items() if shapes.get(name) != shape]
    if empty:
        raise FinetuneError(f"the saved adapter has an empty tensor: {empty[0]}", str(path), _DO_NOT_USE)
    for name, shape in wrong:
        raise FinetuneError(f"the saved adapter has {name} as {shapes.get(name)}, not {shape}", str(path), _DO_NOT_USE)
    if trained and not learned:
        raise FinetuneError("every lora_B of the saved adapter is zero: nothing was trained", str(path), _DO_NOT_USE)


def count_parameters(model: torch.nn.Module) -> dict[str, Any]:
    """Numbers of trainable and of all parameters, partitioned ones counted whole."""
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in model.parameters()]
    return {"trainable": sum(n for n, grad in sizes if grad), "total": sum(n for n, _ in sizes)}
