"""LFM2 whose attention layers have value embeddings: a learned vector of each token is added to its
values.

As in nanochat (karpathy/nanochat, gpt.py; after Zhou et al. 2024, arXiv:2410.17897): values = W_v x
+ g(x) E[token], where a gate between 0 and 3 for each head reads the first elements of x. Attention
gets information about each token by a lookup instead of a product. Everything else is transformers'
LFM2.

This file imports only torch and transformers: `save_pretrained` puts a copy of it next to the
weights, so that transformers alone can load such a model with trust_remote_code=True. Without that
a process must call `register` first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.lfm2.configuration_lfm2 import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import (
    Lfm2Attention,
    Lfm2DecoderLayer,
    Lfm2ForCausalLM,
    Lfm2Model,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

GATE_INPUTS, GATE_RANGE = 12, 3.0


class Lfm2ValueConfig(Lfm2Config):
    """LFM2's configuration; the attention layers have value embeddings."""

    model_type = "lfm2_value"


class Lfm2ValueAttention(Lfm2Attention):
    """LFM2's attention; what differs is `values`."""

    def __init__(self, config: Lfm2ValueConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        heads = config.num_key_value_heads
        self.value_embedding = nn.Embedding(config.vocab_size, heads * self.head_dim)
        # Not a module, so that it gets no adapter: the adapter would be larger.
        self.value_gate = nn.Parameter(torch.zeros(heads, min(GATE_INPUTS, config.hidden_size)))

    def values(self, hidden_states: Tensor, token_ids: Tensor) -> Tensor:
        """Return the values of the key-value heads.

        Args:
            hidden_states: `(samples, T, hidden_size)`; token_ids: `(samples, T)`.

        Returns:
            `(samples, heads, T, head_dim)`.
        """
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        read = hidden_states[..., : self.value_gate.shape[1]]
        gate = GATE_RANGE * torch.sigmoid(nn.functional.linear(read, self.value_gate))
        own = self.value_embedding(token_ids).view(shape) * gate.unsqueeze(-1)
        return (self.v_proj(hidden_states).view(shape) + own).transpose(1, 2)

    def forward(  # type: ignore[override]  # tokens are needed, too
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        past_key_values: Any = None,
        *,
        token_ids: Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the same as Lfm2Attention in transformers 5.23."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_layernorm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        key = self.k_layernorm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        value = self.values(hidden_states, token_ids)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
        )
        return self.out_proj(output.reshape(*shape[:-2], -1).contiguous()), weights


class Lfm2ValueDecoderLayer(Lfm2DecoderLayer):
    """LFM2's layer; attention gets the tokens, a convolution does not."""

    def __init__(self, config: Lfm2ValueConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        if self.is_attention_layer:
            self.self_attn = Lfm2ValueAttention(config, layer_idx)

    def forward(  # type: ignore[override]  # all is given by name
        self, hidden_states: Tensor, *, token_ids: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        if self.is_attention_layer:
            kwargs["token_ids"] = token_ids
        layer: Tensor = super().forward(hidden_states, **kwargs)
        return layer


class Lfm2ValueModel(Lfm2Model):
    """LFM2 without its head; it needs token ids, because embeddings do not identify tokens."""

    config_class = Lfm2ValueConfig
    _no_split_modules = ["Lfm2ValueDecoderLayer"]

    def __init__(self, config: Lfm2ValueConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(
            Lfm2ValueDecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.post_init()

    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        """As Lfm2Model's.

        Raises:
            ValueError: there are no input_ids.
        """
        if input_ids is None:
            raise ValueError(
                "a model with value embeddings needs input_ids; inputs_embeds do not tell the"
                " tokens"
            )
        return super().forward(input_ids=input_ids, token_ids=input_ids, **kwargs)


class Lfm2ValueForCausalLM(Lfm2ForCausalLM):
    """LFM2 with value embeddings and its output head."""

    config_class = Lfm2ValueConfig
    _no_split_modules = ["Lfm2ValueDecoderLayer"]

    def __init__(self, config: Lfm2ValueConfig) -> None:
        super().__init__(config)
        self.model = Lfm2ValueModel(config)
        self.post_init()

    def resize_token_embeddings(self, *arguments: Any, **settings: Any) -> nn.Embedding:
        """Resize the value embeddings too; new tokens add nothing to the values until trained."""
        embedding = super().resize_token_embeddings(*arguments, **settings)
        for module in self.modules():
            if isinstance(module, Lfm2ValueAttention):
                module.value_embedding = _resized(module.value_embedding, embedding.num_embeddings)
        return embedding


def _resized(table: nn.Embedding, rows: int) -> nn.Embedding:
    weight = table.weight
    made = nn.Embedding(rows, table.embedding_dim, device=weight.device, dtype=weight.dtype)
    kept = min(rows, table.num_embeddings)
    with torch.no_grad():
        made.weight.zero_()
        made.weight[:kept] = weight[:kept]
    made.weight.requires_grad_(weight.requires_grad)
    return made


def register() -> None:
    """Register these models with transformers' Auto classes, in this process; they are saved with
    this file.
    """
    AutoConfig.register(Lfm2ValueConfig.model_type, Lfm2ValueConfig, exist_ok=True)
    AutoModelForCausalLM.register(Lfm2ValueConfig, Lfm2ValueForCausalLM, exist_ok=True)
    Lfm2ValueConfig.register_for_auto_class()
    Lfm2ValueForCausalLM.register_for_auto_class("AutoModelForCausalLM")
