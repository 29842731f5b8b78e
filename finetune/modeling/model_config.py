"""A model before its weights are read: its configuration, which model it is, and what can be
refused by them alone.

What the comments say of others is of transformers 5.23 and peft 0.21.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import warnings
from collections.abc import Sequence
from functools import cache
from inspect import getsource, isfunction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from finetune.config.adapter_config import AdapterSettings
from finetune.config.paths import near_folder, split_revision
from finetune.errors import ConfigError, DataError
from finetune.modeling import lfm2_value
from finetune.modeling.adapter_names import check_named, check_patterns, check_saved_of_quantised
from finetune.runtime.launch_environment import import_bitsandbytes

if TYPE_CHECKING:
    from peft import LoraConfig

    from finetune.config.pretrain_config import PretrainConfig
    from finetune.config.run_config import RunConfig
    from finetune.data.samples import Samples

logger = logging.getLogger("finetune")

# Of each file of weights so many blocks are looked at to tell models apart.
BLOCKS_PER_SHARD = 64
BLOCK_BYTES = 64 << 10


def load_model_config(name: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The model's config.json, without its weights.

    Raises:
        ConfigError: not a model folder or hub id, or an architecture that transformers does not
            know.
    """
    repository, revision = split_revision(name)
    near = near_folder(repository)
    lfm2_value.register()
    try:
        return AutoConfig.from_pretrained(
            repository, revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"the model's configuration cannot be read: {str(error).splitlines()[0]}",
            where=name if Path(repository).exists() else f"{name}, which is no folder here{near}",
            fix=(
                "give --model a folder with config.json and safetensors, or a hub id that this"
                " machine can reach (HF_ENDPOINT names a mirror); a model with its own code needs"
                " --trust-remote-code"
            ),
        ) from error


def warn_of_missing_embeddings(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Say once that the tokenizer has ids that the model has no embedding for: Gemma 3's text
    models lack the image's.

    They do no harm where no text has them (see `check_ids`).
    """
    embeddings = config.get_text_config().vocab_size
    above = sorted(
        (number, token) for token, number in tokenizer.get_vocab().items() if number >= embeddings
    )
    if above:
        logger.warning(
            "the model has %d embeddings and the tokenizer ids up to %d: %s (%d of them) cannot "
            "be used; a text that "
            "has one is refused (right for a model without its images; "
            "else use the model's own tokenizer)",
            embeddings, above[-1][0], above[0][1], len(above),
        )  # fmt: skip


def check_ids(
    config: PretrainedConfig, samples: Samples, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise DataError if a sample has a token that the model has no embedding for."""
    embeddings = config.get_text_config().vocab_size
    if samples.highest_id < embeddings:
        return
    found, where = samples.first_above(embeddings)
    raise DataError(
        f"the data has token ids up to {samples.highest_id}, but the model has only {embeddings}"
        f" embeddings; the first is {found} ({tokenizer.convert_ids_to_tokens(found)!r})",
        where=where,
        fix=(
            "use the tokenizer that belongs to this model; tokens that were added must be trained"
            " into a model with resized embeddings first"
        ),
    )


def width(config: PretrainedConfig) -> int | None:
    """Numbers of a token's hidden state, where the configuration says it."""
    return getattr(config.get_text_config(), "hidden_size", None)


def padding_id(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """A token to pad with: any that has an embedding, for no mask lets it be seen. An added one may
    have none.
    """
    own = tokenizer.pad_token_id
    return own if own is not None and own < config.get_text_config().vocab_size else 0


def check_unquantised(config: PretrainedConfig) -> None:
    """Raise ConfigError if the model's weights are quantised: what they can learn depends on
    kernels and devices.
    """
    method = getattr(config, "quantization_config", None)
    if method is None:
        return
    kind = (
        method.get("quant_method")
        if isinstance(method, dict)
        else getattr(method, "quant_method", None)
    )
    raise ConfigError(
        f"the model's weights are quantised ({kind}), and are not trained",
        where=str(config.name_or_path),
        fix=(
            "take its release in 16 bits (--quantization nf4 or int8 rounds it here), or write one:"
            " load it with transformers' quantization config that has dequantize=True (Mxfp4Config"
            " of gpt-oss, FineGrainedFP8Config), and save_pretrained into a folder"
        ),
    )


def check_weights(name: str) -> None:
    """Raise ConfigError if a model folder has not all of its safetensors weights (a hub id shows it
    when it is loaded).

    A .bin file is a pickle, and pickles are never read.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return
    shards = _shards(folder)
    absent = sorted(shard for shard in shards if not (folder / shard).exists())
    if not absent:
        return
    missing = (
        shards[0]
        if len(shards) == 1
        else f"{len(absent)} of {len(shards)} shards, first {absent[0]}"
    )
    raise ConfigError(
        f"the model's weights are not there: {missing}",
        where=name,
        fix=(
            "the folder needs model.safetensors, or its shards with model.safetensors.index.json;"
            " convert .bin weights with save_pretrained on a machine you trust them on"
        ),
    )


def _shards(folder: Path) -> list[str]:
    """Names of the files that hold a folder's weights, there or not."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists() or not index.exists():
        return ["model.safetensors"]
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            "the index of the model's weights is broken", str(index), "copy it again"
        ) from error


def weights_identity(name: str) -> str:
    """Which weights these are, wherever they lie: a hash of their sizes, their headers and blocks
    all over them.

    Of a hub's model it is the commit that its name was given (hub.py). Two models of one shape
    differ in it where their weights do, but for a change that touches few of the weights: reading
    all of them would take minutes at every start.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        repository, commit = split_revision(name)
        return f"{repository}@{commit}"
    # As it is written, not as this release of transformers completes it.
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for changing in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        settings.pop(changing, None)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for shard in _shards(folder):
        with (folder / shard).open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            digest.update(f"{shard} {size_bytes}".encode())
            header_bytes = min(8 + int.from_bytes(file.read(8), "little"), size_bytes)
            stride_bytes = max(BLOCK_BYTES, (size_bytes - header_bytes) // BLOCKS_PER_SHARD)
            file.seek(0)
            digest.update(file.read(header_bytes))
            for start in range(header_bytes, size_bytes, stride_bytes):
                file.seek(start)
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()[:32]


def target_names(wanted: str | tuple[str, ...]) -> str | list[str]:
    """As peft takes them: one name alone would be a regular expression to it."""
    return (
        wanted if wanted == "all-linear" else [wanted] if isinstance(wanted, str) else list(wanted)
    )


def linear_names(model: torch.nn.Module) -> set[str]:
    """The last parts of the names of its linear modules that an adapter can be on."""
    linear = {name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    return {name.rpartition(".")[2] for name in linear - set(passed_over(model))}


def passed_over(model: torch.nn.Module) -> list[str]:
    """Names of the linear modules that the model does not call, but reads the weights of: adapters
    there do nothing.

    State-space layers hand some to their kernels (out_proj of Mamba 2, dt_proj of Jamba), routers
    to a function. peft knows of some (it refuses them,
    tuners_utils._check_lora_target_modules_mamba), so it is read off the source.
    """
    found = []
    for name, module in model.named_modules():
        for child, inner in module.named_children():
            if isinstance(inner, torch.nn.Linear) and child in _weights_read(type(module)):  # type: ignore[arg-type]
                found.append(f"{name}.{child}".removeprefix("."))
    return found


@cache
def _weights_read(kind: type[torch.nn.Module]) -> frozenset[str]:
    """The children whose weight a module's own functions compute with; dtype, device and shape are
    only looked at.
    """
    if not kind.__module__.startswith("transformers.models."):
        return frozenset()
    source = "".join(getsource(member) for member in vars(kind).values() if isfunction(member))
    return frozenset(re.findall(r"self\.(\w+)\.weight\b(?!\.(?:dtype|device|shape|size))", source))


def check_targets(linear: set[str], wanted: str | list[str]) -> None:
    """Check LoRA's targets by name: peft ignores a name that matches nothing if others match.

    Raises:
        ConfigError: a name that is not in `linear` (see `linear_names`), which the message lists.
    """
    if wanted == "all-linear":
        return
    missing = [name for name in wanted if name.rpartition(".")[2] not in linear]
    if missing:
        raise ConfigError(
            f"LoRA target {', '.join(missing)} matches no linear module of the model",
            where="--lora-target-modules",
            fix=f"choose from {', '.join(sorted(linear - {'lm_head'}))}, or use all-linear",
        )


def check_adapter(model_config: PretrainedConfig, config: RunConfig | PretrainConfig) -> None:
    """Raise ConfigError if LoRA cannot be made as asked for; seen on the model without memory."""
    wanted = config.lora_target_modules
    named = named_modules_of(config)
    if wanted == "all-linear" and config.lora_dropout == 0 and not named:
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            model_config, trust_remote_code=config.trust_remote_code
        )
    # Experts are one parameter of three dimensions, and no linear modules: what of them can be
    # adapted is peft's to say. It takes seconds for a large model, and for one of plain layers
    # there is nothing to ask.
    linear = linear_names(model)
    check_named(model, named)
    if isinstance(config, AdapterSettings) and config.quantization != "none":
        check_saved_of_quantised(model, config.quantization, config.modules_to_save)
    patterns = {setting: keys for setting, keys in named.items() if setting.endswith("_pattern")}
    experts_among = any(parameter.dim() > 2 for parameter in model.parameters())
    if not experts_among:
        check_targets(linear, target_names(wanted))
        if not patterns:
            return
    import_bitsandbytes()
    from peft import get_peft_model

    try:
        lora = lora_config(model, config)
        with warnings.catch_warnings():
            # what it says of the adapter it says again when training makes it
            warnings.simplefilter("ignore")
            adapted: Any = get_peft_model(model, lora, low_cpu_mem_usage=True).base_model
    except ValueError as error:
        experts = "; adapters on a mixture's experts have no dropout" if config.lora_dropout else ""
        raise ConfigError(
            f"peft cannot make this adapter: {str(error).splitlines()[0]}{experts}",
            where="--lora-target-modules, --lora-dropout",
            fix=(
                "use --lora-dropout 0, or adapt attention alone: --lora-target-modules q_proj"
                " k_proj v_proj o_proj"
            ),
        ) from error
    if experts_among:  # names that stand for them are none of its target modules any more
        check_targets(linear, sorted(lora.target_modules or ()))
    check_patterns(adapted.targeted_module_names + adapted.targeted_parameter_names, patterns)


def named_modules_of(config: RunConfig | PretrainConfig) -> dict[str, tuple[str, ...]]:
    """Names that an adapter beyond plain LoRA asks for, by the setting; and layers, under
    theirs.
    """
    if not isinstance(config, AdapterSettings):
        return {}
    layers = config.layers_to_transform
    found = {
        "modules_to_save": config.modules_to_save,
        "rank_pattern": tuple(config.rank_pattern or ()),
        "alpha_pattern": tuple(config.alpha_pattern or ()),
        "layers_to_transform": () if layers is None else tuple(map(str, layers)),
    }
    return {setting: names for setting, names in found.items() if names}


def lora_config(
    model: PreTrainedModel, config: RunConfig | PretrainConfig, token_ids: Sequence[int] = ()
) -> LoraConfig:
    """peft's settings for this model.

    Args:
        token_ids: tokens whose embeddings are trained.
    """
    import_bitsandbytes()
    from peft import LoraConfig

    outside = [rf"{re.escape(name)}\..*" for name in outside_text(model)]
    # One pattern for all layers: peft writes it into adapter_config.json.
    outside += sorted({re.sub(r"\d+", r"\\d+", re.escape(name)) for name in passed_over(model)})
    told: dict[str, Any] = {"target_modules": target_names(config.lora_target_modules)}
    if isinstance(config, AdapterSettings):
        told |= _beyond_plain(
            model, config, token_ids, all_linear=config.lora_target_modules == "all-linear"
        )
    return LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        **told,
        exclude_modules="|".join(outside) or None,
        task_type="CAUSAL_LM",
        bias="none",
        revision=split_revision(config.model or "")[1],  # of the base, on the hub
    )


def _beyond_plain(
    model: PreTrainedModel, config: AdapterSettings, token_ids: Sequence[int], *, all_linear: bool
) -> dict[str, Any]:
    """What peft is told beside the settings of plain LoRA."""
    told: dict[str, Any] = {name: getattr(config, name) for name in ("use_rslora", "use_dora")}
    told |= {name: dict(getattr(config, name) or {}) for name in ("rank_pattern", "alpha_pattern")}
    ends = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    names = [
        name
        for name, module in model.named_modules()
        if any(module is end for end in ends.values())
    ]
    if config.layers_to_transform is not None:
        told["layers_to_transform"] = list(config.layers_to_transform)
        if all_linear:  # which peft does not take beside numbers of layers
            told["target_modules"] = sorted(
                linear_names(model) - {name.rpartition(".")[2] for name in names}
            )
    tied = ends["embedding"].weight is ends["head"].weight
    if config.modules_to_save:
        told["modules_to_save"] = list(config.modules_to_save)
        # One weight stays one: else embedding and head would be trained apart, and merged into a
        # model of another form.
        told["ensure_weight_tying"] = tied and any(
            name.endswith(wanted) for name in names for wanted in config.modules_to_save
        )
    if token_ids:  # of a tied head peft sees to it by itself
        told["trainable_token_indices"] = {
            name: list(token_ids) for name in (names[:1] if tied else names)
        }
    return told


def warn_of_text_alone(model: PreTrainedModel, config: PretrainedConfig) -> None:
    """Say it where of a model with images only the text model was loaded, as transformers does for
    Qwen3.5.
    """
    if model.config.model_type != config.model_type and config.get_text_config() is not config:
        logger.warning(
            "of this %s model only its text model (%s) is loaded: what is written is that, without"
            " the part for images",
            config.model_type,
            model.config.model_type,
        )


def outside_text(model: PreTrainedModel) -> list[str]:
    """Names of the modules that text never passes: towers of images and sound, and what joins them
    to the text model.

    Empty for a text model.

    Raises:
        ConfigError: the configuration has such parts and does not say which part is the text model.
    """
    config = model.config
    if config.get_text_config(decoder=True) is config:
        towers = [
            name
            for name in getattr(config, "sub_configs", {})
            if name.startswith(("vision", "audio"))
        ]
        if any(getattr(config, name, None) is not None for name in towers):
            raise ConfigError(
                f"the text part of a {config.model_type} model cannot be told from its"
                f" {' and '.join(towers)}",
                where=str(config.name_or_path),
                fix="train a text model; the parts that text never passes would have no gradient",
            )
        return []
    ends = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    text = {module for end in ends if end is not None for module in end.modules()}

    def outside(name: str, module: torch.nn.Module) -> list[str]:
        if module in text:
            return []
        if not any(inner in text for inner in module.modules()):
            return [name]
        return [
            found
            for child, inner in module.named_children()
            for found in outside(f"{name}.{child}", inner)
        ]

    return [found for child, module in model.named_children() for found in outside(child, module)]
