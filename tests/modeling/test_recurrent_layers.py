"""The gated delta rule and Mamba-2 of packed documents, beside the definition token by token."""

from __future__ import annotations

import random

import pytest
import torch

from finetune.modeling import recurrent_layers
from finetune.modeling.recurrent_layers import gated_delta_rule, mamba2

BORDERS = (1, 2, 3, 5, 17, 63, 64, 65, 127, 130)  # around the ends of chunks
HEADS, KEYS, WIDTH = 4, 2, 8


def delta_by_token(query, key, value, log_decay, rate):
    """One document: S = exp(g) S, S += b k (v - S'k)', o = S'q."""
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    query = query * WIDTH**-0.5
    query, key = (x.repeat_interleave(HEADS // KEYS, dim=1) for x in (query, key))
    state, outputs = value.new_zeros(HEADS, WIDTH, WIDTH), []
    for q, k, v, g, b in zip(query, key, value, log_decay, rate, strict=True):
        state = state * g.exp()[:, None, None]
        correction = (v - torch.einsum("hde,hd->he", state, k)) * b[:, None]
        state = state + k[:, :, None] * correction[:, None]
        outputs.append(torch.einsum("hde,hd->he", state, q))
    return torch.stack(outputs)


def mamba_by_token(inputs, steps, decay, key, query):
    """One document: S = exp(a dt) S + dt B x', y = S'C."""
    key, query = (x.repeat_interleave(HEADS // KEYS, dim=1) for x in (key, query))
    state, outputs = inputs.new_zeros(HEADS, WIDTH, WIDTH), []
    for x, dt, b, c in zip(inputs, steps, key, query, strict=True):
        state = state * (decay * dt).exp()[:, None, None]
        state = state + b[:, :, None] * (dt[:, None] * x)[:, None]
        outputs.append(torch.einsum("hde,hd->he", state, c))
    return torch.stack(outputs)


def random_inputs(rule: str, tokens: int) -> list[torch.Tensor]:
    narrow = [torch.randn(tokens, KEYS, WIDTH, dtype=torch.float64) for _ in range(2)]
    wide = torch.randn(tokens, HEADS, WIDTH, dtype=torch.float64)
    rates = torch.rand(tokens, HEADS, dtype=torch.float64)
    if rule == "delta":
        made = [*narrow, wide, -torch.rand(tokens, HEADS, dtype=torch.float64), rates]
    else:
        made = [wide, rates, -torch.rand(HEADS, dtype=torch.float64), *narrow]
    return [tensor.requires_grad_() for tensor in made]


@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("rule", ["delta", "mamba2"])
def test_packed_documents_are_each_the_definition_alone(rule: str, count: int) -> None:
    """Outputs and gradients within 1e-9, with any borders."""
    torch.manual_seed(count)
    lengths = tuple(random.Random(count).choices(BORDERS, k=count))
    tensors = random_inputs(rule, sum(lengths))
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = (gated_delta_rule if rule == "delta" else mamba2)(*tensors, lengths, bounds)
    weights = torch.randn_like(packed)
    found = torch.autograd.grad((packed * weights).sum(), tensors)
    by_token = delta_by_token if rule == "delta" else mamba_by_token
    alone = []
    for first, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        alone.append(by_token(*(x[first:end] if len(x) > HEADS else x for x in tensors)))
    wanted = torch.autograd.grad((torch.cat(alone) * weights).sum(), tensors)
    torch.testing.assert_close(packed, torch.cat(alone), rtol=0, atol=1e-9)
    for got, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-9)


def test_other_functions_in_transformers_are_refused(monkeypatch) -> None:
    from transformers.models.bamba import modeling_bamba

    monkeypatch.delattr(modeling_bamba, "mamba2_chunk_scan")
    with pytest.raises(recurrent_layers.FinetuneError, match="packed documents would mix"):
        recurrent_layers.keep_states_apart("bamba")
