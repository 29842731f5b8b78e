"""Tiny models of every type that may be packed, and microbatches for them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from finetune.batching.collate import Microbatch, collate
from finetune.modeling import lfm2_value
from finetune.modeling.attention import SHORT_CONVOLUTION_TYPES, choose_attention

VOCABULARY = 64
CPU = torch.device("cpu")
# of the documents of a microbatch: longer and shorter than the window, and a single token
LENGTHS = (9, 1, 14, 5)

# Every size that a model family calls by one of these names; a family takes those that its
# configuration has.
_OF_SIZE = {
    64: "vocab_size max_position_embeddings n_positions",
    32: "hidden_size n_embd intermediate_size n_inner ffn_dim word_embed_proj_dim",
    16: "moe_intermediate_size shared_expert_intermediate_size",
    8: "head_dim kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim"
    " hidden_size_per_layer_input",
    4: "num_hidden_layers num_attention_heads n_head sliding_window num_experts num_local_experts"
    " n_routed_experts",
    2: "n_layer num_layers num_key_value_heads num_experts_per_tok eos_token_id",
    1: "bos_token_id n_group topk_group first_k_dense_replace moe_layer_start_index",
    0: "pad_token_id",
}
TINY: dict[str, Any] = {name: size for size, names in _OF_SIZE.items() for name in names.split()}
TINY |= {"initializer_range": 0.3, "block_auto_adjust_ff_dim": False}  # so that attention matters
# Layers with a state, and one of attention behind it; what their configurations call the sizes.
_DELTA = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA = {
    "num_hidden_layers": 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
}
RECURRENT: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"]},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 8,
    },
    **dict.fromkeys(("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), _DELTA),
}
# Multi-head latent attention has as many key heads as query heads.
LATENT = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3"}


def tiny_config(model_type: str, **changes: Any) -> PretrainedConfig:
    lfm2_value.register()
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    sizes = {name: value for name, value in TINY.items() if hasattr(default, name)}
    if model_type in LATENT:
        sizes |= {"num_key_value_heads": 4}
    if model_type in SHORT_CONVOLUTION_TYPES:
        sizes |= {"layer_types": ["conv", "full_attention"] * 2}
    sizes |= RECURRENT.get(model_type, {})
    return config_class(**{**sizes, **changes})


def make_model(config: PretrainedConfig, attention: str | None) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention)
    return model.eval().requires_grad_(False)


def as_trained(config: PretrainedConfig) -> torch.nn.Module:
    return make_model(config, choose_attention(config))


def documents(seed: int = 0) -> list[np.ndarray]:
    choose = np.random.default_rng(seed)
    return [choose.integers(3, VOCABULARY, length).astype(np.int32) for length in LENGTHS]


def make_microbatch(docs: list[np.ndarray], *, packing: bool, pad_token_id: int = 0) -> Microbatch:
    members = [(ids, np.arange(len(ids)) % 3 == 1, 0) for ids in docs]
    return collate(members, packing=packing, pad_token_id=pad_token_id)


def outputs(
    model: torch.nn.Module, docs: list[np.ndarray], *, packing: bool, pad_token_id: int = 0
) -> list:
    """Logits of every token, by document."""
    microbatch = make_microbatch(docs, packing=packing, pad_token_id=pad_token_id)
    logits = model(**{**microbatch.model_inputs(CPU), "logits_to_keep": 0}).logits
    if packing:
        return list(logits[0].split([len(ids) for ids in docs]))
    return [line[: len(ids)] for line, ids in zip(logits, docs, strict=True)]


def alone(model: torch.nn.Module, ids: np.ndarray) -> torch.Tensor:
    return model(input_ids=torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[0]


def attention_by_mask(query, key, value, bounds, left: int, scale: float) -> torch.Tensor:
    """What flash kernels compute of documents, `(tokens, heads, width)`, by one masked product."""
    place = torch.arange(len(query))
    distance = place[:, None] - place[None, :]
    document = torch.bucketize(place, bounds[1:], right=True)
    mask = (distance >= 0) & ((left < 0) | (distance <= left))
    mask &= document[:, None] == document
    states = (states.transpose(0, 1)[None].double() for states in (query, key, value))
    given = {"attn_mask": mask, "scale": scale, "enable_gqa": True}
    return scaled_dot_product_attention(*states, **given)[0].transpose(0, 1).to(query.dtype)


def other_tokens(ids: np.ndarray, positions: slice | int) -> np.ndarray:
    changed = ids.copy()
    changed[positions] = 3 + (changed[positions] - 3 + 17) % (VOCABULARY - 3)
    return changed
