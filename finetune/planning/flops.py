"""How much arithmetic a token costs, and what share of a device's peak that is (MFU).

Counted as in the PaLM paper (Chowdhery et al. 2022, appendix B) and nanochat: 6 floating-point
operations per number of every matrix that a token passes (2 forward, 4 backward), and 12 x layers
that attend x width x sequence for attention, causality not deducted. Recomputed activations are not
counted: they are not progress.
"""

from __future__ import annotations

import torch
from transformers import PretrainedConfig, PreTrainedModel

from finetune.modeling.attention import ATTENTION_LAYER_TYPES


def matrix_parameters(model: PreTrainedModel) -> int:
    """Numbers in the matrices that a token passes: blocks and output head. Embeddings are only
    looked up.
    """
    head = model.get_output_embeddings().weight
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)} - {
        id(head)
    }
    return sum(p.numel() for p in model.parameters() if p.ndim >= 2 and id(p) not in tables)


def flops_per_token(model: PreTrainedModel, sequence_tokens: int) -> int:
    """Training operations per token in sequences of this length."""
    config: PretrainedConfig = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", None)
    attending = (
        sum(kind in ATTENTION_LAYER_TYPES for kind in kinds) if kinds else config.num_hidden_layers
    )
    attention = 12 * attending * config.num_attention_heads * head_dim * sequence_tokens
    return 6 * matrix_parameters(model) + attention


def flops_utilisation(
    tokens_per_second: float, flops_of_a_token: int, peak_flops: float | None, devices: int
) -> float | None:
    """MFU as a fraction of the peak of all devices; None where the peak is unknown."""
    return (
        None
        if peak_flops is None
        else tokens_per_second * flops_of_a_token / (peak_flops * devices)
    )
