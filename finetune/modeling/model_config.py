"""A model before its weights are read: its configuration, its identity, and what can be refused
without weights.

Comments about other packages are about transformers 5.23.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from finetune.config.paths import near_folder, split_revision
from finetune.errors import ConfigError, DataError
from finetune.modeling import lfm2_value

if TYPE_CHECKING:
    from finetune.data.samples import Samples

logger = logging.getLogger("finetune")

# Of each file of weights, this many blocks are read to distinguish models.
BLOCKS_PER_SHARD = 64
BLOCK_BYTES = 64 << 10


def load_model_config(name: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Return the model's config.json.

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
    """Warn if the tokenizer has ids that the model has no embedding for: Gemma 3's text models lack
    the embedding of images.

    Such ids are harmless if no sample has them (see `check_ids`).
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
    """Return the hidden size, or None if the configuration does not have it."""
    return getattr(config.get_text_config(), "hidden_size", None)


def padding_id(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return a token to pad with: any that has an embedding, because it is always masked. An added
    token may have none.
    """
    own = tokenizer.pad_token_id
    return own if own is not None and own < config.get_text_config().vocab_size else 0


def weight_format(config: PretrainedConfig) -> str | None:
    """Return how the model's weights are quantized on disk; None: not at all."""
    method = getattr(config, "quantization_config", None)
    if method is None:
        return None
    if isinstance(method, dict):
        return str(method.get("quant_method"))
    kind = getattr(method, "quant_method", None)
    return str(getattr(kind, "value", kind))


def check_unquantized(config: PretrainedConfig, quantization: str) -> None:
    """Raise ConfigError if the model's weights are quantized: whether they can be trained depends
    on kernels and devices. MXFP4 (gpt-oss) is converted to 16 bits while it is loaded.

    Args:
        quantization: of the base model while it is trained.
    """
    kind = weight_format(config)
    if kind is None or (kind == "mxfp4" and quantization == "none"):
        return
    if kind == "mxfp4":
        raise ConfigError(
            f"the model's weights are MXFP4, and are not quantised again as {quantization}",
            where=str(config.name_or_path),
            fix="--quantization none: they are converted to 16 bits while they are loaded",
        )
    raise ConfigError(
        f"the model's weights are quantised ({kind}), and are not trained",
        where=str(config.name_or_path),
        fix=(
            "take its release in 16 bits (--quantization nf4 or int8 rounds it here), or write one:"
            " load it with transformers' quantization config that has dequantize=True"
            " (FineGrainedFP8Config), and save_pretrained into a folder"
        ),
    )


def check_weights(name: str) -> None:
    """Raise ConfigError if safetensors weights are missing in a model folder (for a hub id loading
    reports it).

    A .bin file is a pickle, and pickles are never read.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return
    shards = _shards(folder)
    absent = sorted(shard for shard in shards if not (folder / shard).exists())
    if not absent:
        return
    missing = shards[0]
    if len(shards) > 1:
        missing = f"{len(absent)} of {len(shards)} shards, first {absent[0]}"
    raise ConfigError(
        f"the model's weights are not there: {missing}",
        where=name,
        fix=(
            "the folder needs model.safetensors, or its shards with model.safetensors.index.json;"
            " convert .bin weights with save_pretrained on a machine you trust them on"
        ),
    )


def _shards(folder: Path) -> list[str]:
    """Return the names of the files that hold a folder's weights, even if they are missing."""
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
    """Return what identifies a model's weights, independent of their location: a hash of the files'
    sizes, headers and blocks throughout.

    For a model on the hub it is the commit in its name (hub.py). Two models of one shape with
    different weights have different identities, unless few weights differ: reading all of them
    would take minutes at every start.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        repository, commit = split_revision(name)
        return f"{repository}@{commit}"
    # As it is in the file, without the defaults of this release of transformers.
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


def warn_of_text_alone(model: PreTrainedModel, config: PretrainedConfig) -> None:
    """Warn if only the text model of a model with images was loaded, as transformers does for
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
    """Return the names of the modules that text never passes: towers for images and sound, and what
    joins them to the text model.

    Empty for a text model.

    Raises:
        ConfigError: the configuration has such parts and does not identify the text model.
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
    text: set[torch.nn.Module] = set()
    for end in (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()):
        if end is not None:
            text.update(end.modules())

    def outside(name: str, module: torch.nn.Module) -> list[str]:
        if module in text:
            return []
        if text.isdisjoint(module.modules()):
            return [name]
        found = []
        for child, inner in module.named_children():
            found += outside(f"{name}.{child}".removeprefix("."), inner)
        return found

    return outside("", model)
