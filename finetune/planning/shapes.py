"""A model's config.json -> its parameters by kind, without torch, transformers or weights.

Dense decoders whose blocks are attention and an MLP are known by name (`FAMILIES`); every family's count is compared
with transformers' own model in tests/planning/test_memory.py. What is not known is refused: a wrong count would be a
wrong plan.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from finetune.errors import ConfigError


@dataclass(frozen=True)
class Family:
    """How the blocks of a model type are made.

    Attributes:
        gated: the MLP has gate, up and down; else one matrix in and one out.
        fused: q, k, v are one matrix, gate and up are one matrix.
        norms: norms of a block that are as wide as the model.
        norm_vectors: numbers of a norm per width: 1 for a scale, 2 with a shift, 0 without parameters.
        head_norms: "head" for norms of q and k as wide as a head, "width" as wide as all heads, "" for none.
        attention_bias: which of "qkv", "o" have a bias; "config" follows `attention_bias`.
        mlp_bias: "config" follows `mlp_bias` (or `use_bias`), "" for none.
        tied: default of `tie_word_embeddings`.
    """

    gated: bool = True
    fused: bool = False
    norms: int = 2
    norm_vectors: int = 1
    head_norms: str = ""
    attention_bias: str = ""
    mlp_bias: str = ""
    tied: bool = False


FAMILIES = {
    "llama": Family(attention_bias="config", mlp_bias="config"),
    "mistral": Family(),
    "ministral": Family(),
    "qwen2": Family(attention_bias="qkv"),
    "qwen3": Family(head_norms="head", attention_bias="config"),
    "seed_oss": Family(attention_bias="config", mlp_bias="config"),
    "smollm3": Family(attention_bias="config", mlp_bias="config", tied=True),
    "granite": Family(attention_bias="config", mlp_bias="config"),
    "gemma": Family(attention_bias="config", tied=True),
    "gemma2": Family(norms=4, attention_bias="config", tied=True),
    "gemma3_text": Family(norms=4, head_norms="head", attention_bias="config", tied=True),
    "phi3": Family(fused=True),
    "olmo2": Family(head_norms="width", attention_bias="config"),
    "starcoder2": Family(gated=False, norm_vectors=2, attention_bias="config", mlp_bias="config", tied=True),
    "nanochat": Family(gated=False, norm_vectors=0, attention_bias="config"),
}
# Head width where the file has none: fixed in these families' configuration classes.
_HEAD_DIM = {"qwen3": 128, "gemma": 256, "gemma2": 256, "gemma3_text": 256, "seed_oss": 128}


@dataclass(frozen=True)
class Matrix:
    """A linear layer of a block: its module's name, numbers in and out, and of its bias."""

    name: str
    inputs: int
    outputs: int
    bias: int = 0

    @property
    def numbers(self) -> int:
        """Numbers of the matrix without its bias."""
        return self.inputs * self.outputs


@dataclass(frozen=True)
class ModelShape:
    """What counts about a decoder: sizes in numbers, parameters by kind.

    Attributes:
        matrices: linear layers of one block.
        block_vectors: numbers of a block's norms (biases are with their matrices).
        final_vectors: numbers of the norms outside the blocks.
        tied: the output head is the embedding.
        gated, norms: see `Family`.
        head_norms: q and k are normalised (with or without parameters).
        softcapped: attention scores are squashed, so that they are made whole.
    """

    model_type: str
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    matrices: tuple[Matrix, ...]
    block_vectors: int
    final_vectors: int
    gated: bool
    norms: int
    head_norms: bool
    softcapped: bool = False

    @property
    def query_width(self) -> int:
        """Numbers of a token's queries."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Numbers of a token's keys (and values)."""
        return self.key_value_heads * self.head_dim

    @cached_property
    def block_matrices(self) -> int:
        """Numbers in the matrices of one block."""
        return sum(matrix.numbers for matrix in self.matrices)

    @cached_property
    def block(self) -> int:
        """Parameters of one block."""
        return self.block_matrices + self.block_vectors + sum(matrix.bias for matrix in self.matrices)

    @property
    def embedding(self) -> int:
        """Parameters of the embedding."""
        return self.vocabulary * self.hidden

    @property
    def head(self) -> int:
        """Parameters of the output head that are not the embedding's."""
        return 0 if self.tied else self.embedding

    @cached_property
    def total(self) -> int:
        """All parameters."""
        return self.layers * self.block + self.embedding + self.head + self.final_vectors

    @cached_property
    def passed(self) -> int:
        """Numbers in matrices that a token passes: blocks and head; the embedding is only looked up."""
        return self.layers * self.block_matrices + self.embedding

    @cached_property
    def small(self) -> int:
        """Parameters in norms and biases, which ZeRO-3 keeps whole on every device."""
        return self.total - self.layers * self.block_matrices - self.embedding - self.head

    @cached_property
    def largest_module(self) -> int:
        """Parameters of the largest module that is gathered at once: embedding, head, or a matrix of a block."""
        return max(self.embedding, max(matrix.numbers for matrix in self.matrices))

    def adapted(self, targets: str | Sequence[str]) -> tuple[Matrix, ...]:
        """The linear layers of a block that get an adapter.

        Args:
            targets: "all-linear", or names as of `--lora-target-modules`; a dotted name counts by its last part.

        Raises:
            ConfigError: a name that no linear layer of a block has.
        """
        if targets == "all-linear":
            return self.matrices
        names = [targets] if isinstance(targets, str) else list(targets)
        wanted = {name.rpartition(".")[2] for name in names}
        known = {matrix.name for matrix in self.matrices}
        if unknown := sorted(wanted - known - {"lm_head"}):
            raise ConfigError(
                f"LoRA target {', '.join(unknown)} is no linear layer of a {self.model_type} model",
                where="--lora-target-modules",
                fix=f"choose from {', '.join(sorted(known))}, or use all-linear",
            )
        return tuple(matrix for matrix in self.matrices if matrix.name in wanted)

    def lora(self, rank: int, targets: str | Sequence[str]) -> int:
        """Parameters of a LoRA adapter (Hu et al. 2021, section 4.1: rank x (inputs + outputs) per matrix)."""
        blocks = self.layers * sum(rank * (m.inputs + m.outputs) for m in self.adapted(targets))
        names = [targets] if isinstance(targets, str) else targets
        head = rank * (self.hidden + self.vocabulary) if any(n.endswith("lm_head") for n in names) else 0
        return blocks + head


def read_shape(path: Path) -> ModelShape:
    """The shape that a config.json (or the folder that holds one) describes.

    Raises:
        ConfigError: no such file, not JSON, or a model that is not a dense decoder known here.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ConfigError(
            f"the model's configuration cannot be read: {reason}",
            where=str(file),
            fix="give --model a folder with config.json, or --model-config FILE; weights are not needed",
        ) from error
    if not isinstance(content, dict):
        raise ConfigError("the model's configuration is not a JSON object", str(file), "copy the file again")
    return shape_of_config(content, str(file))


def shape_of_config(config: Mapping[str, Any], where: str = "config.json") -> ModelShape:
    """The shape of a config.json's content.

    Raises:
        ConfigError: see `read_shape`.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(
            f"model_type {kind!r} is not among the dense decoders whose parameters are counted here",
            where,
            f"known: {', '.join(sorted(FAMILIES))}; for another model of the same kind, give a config.json with the "
            "nearest of these names and its sizes",
        )
    family = FAMILIES[kind]
    hidden, layers, heads, vocabulary = (
        _size(config, name, where) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    )
    key_value_heads = _size(config, "num_key_value_heads", where, heads)
    head_dim = _size(config, "head_dim", where, _HEAD_DIM.get(kind, hidden // heads))
    intermediate = _size(config, "intermediate_size", where)
    queries, keys = heads * head_dim, key_value_heads * head_dim
    matrices = (
        *_attention(family, config, hidden, queries, keys),
        *_mlp(family, config, hidden, intermediate),
    )
    of_heads = {"head": 2 * head_dim, "width": queries + keys, "": 0}[family.head_norms]
    return ModelShape(
        model_type=str(kind),
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_value_heads=key_value_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocabulary=vocabulary,
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        matrices=matrices,
        block_vectors=family.norms * family.norm_vectors * hidden + of_heads,
        final_vectors=family.norm_vectors * hidden,
        gated=family.gated,
        norms=family.norms,
        head_norms=bool(family.head_norms) or kind == "nanochat",
        softcapped=bool(config.get("attn_logit_softcapping")),
    )


def scratch_shape(arch: str, depth: int, vocabulary: int) -> ModelShape:
    """The shape that pretraining makes of a depth: `modeling.scratch.scratch_config` without transformers."""
    width = 64 * depth
    heads, head_dim = (2, width // 2) if width <= 128 else (math.ceil(width / 128), 128)
    width = heads * head_dim
    config = {
        "model_type": arch,
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "vocab_size": math.ceil(vocabulary / 64) * 64,
        "intermediate_size": 4 * width if arch == "nanochat" else math.ceil(8 * width / 3 / 64) * 64,
        "tie_word_embeddings": False,
    }
    return shape_of_config(config, f"--arch {arch} --depth {depth}")


def _attention(family: Family, config: Mapping[str, Any], hidden: int, queries: int, keys: int) -> tuple[Matrix, ...]:
    biased = family.attention_bias
    if biased == "config":
        by_default = config.get("use_bias", config.get("model_type") in ("starcoder2", "seed_oss"))
        on = bool(config.get("attention_bias", by_default))
        # Seed-OSS has a switch of its own for the output.
        out = bool(config.get("attention_out_bias", on and config.get("model_type") != "seed_oss"))
    else:
        on, out = biased == "qkv", False
    if family.fused:
        return (Matrix("qkv_proj", hidden, queries + 2 * keys), Matrix("o_proj", queries, hidden))
    return (
        Matrix("q_proj", hidden, queries, queries * on),
        Matrix("k_proj", hidden, keys, keys * on),
        Matrix("v_proj", hidden, keys, keys * on),
        Matrix("o_proj", queries, hidden, hidden * out),
    )


def _mlp(family: Family, config: Mapping[str, Any], hidden: int, inner: int) -> tuple[Matrix, ...]:
    by_default = config.get("use_bias", config.get("model_type") == "starcoder2")
    on = family.mlp_bias == "config" and bool(config.get("mlp_bias", by_default))
    if family.fused:
        return (Matrix("gate_up_proj", hidden, 2 * inner), Matrix("down_proj", inner, hidden))
    if not family.gated:
        names = ("fc1", "fc2") if config.get("model_type") == "nanochat" else ("c_fc", "c_proj")
        return (Matrix(names[0], hidden, inner, inner * on), Matrix(names[1], inner, hidden, hidden * on))
    return (
        Matrix("gate_proj", hidden, inner, inner * on),
        Matrix("up_proj", hidden, inner, inner * on),
        Matrix("down_proj", inner, hidden, hidden * on),
    )


def _size(config: Mapping[str, Any], name: str, where: str, otherwise: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = otherwise
    if type(value) is not int or value < 1:
        raise ConfigError(
            f"{name} is {value!r}, and a whole number above 0 is needed", where, f"write the model's {name} into it"
        )
    return value
