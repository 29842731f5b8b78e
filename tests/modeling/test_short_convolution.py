"""The short convolution against torch's, on each document alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_model, tiny_config
from torch.nn.functional import conv1d

from finetune.modeling.attention import choose_attention
from finetune.modeling.short_convolution import convolve


def torchs(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    channels, taps = weight.shape
    made = conv1d(states, weight[:, None], bias, padding=taps - 1, groups=channels)
    return made[..., : states.shape[-1]]


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    taps=st.integers(1, 5),
    with_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_documents_are_as_alone_forward_and_backward(lengths, taps, with_bias, seed):
    torch.manual_seed(seed)
    states = torch.randn(1, 3, sum(lengths), dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, taps, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, dtype=torch.float64, requires_grad=True) if with_bias else None
    inputs = [states, weight, *([bias] if bias is not None else [])]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    ours = convolve(states, weight, bias, cu_seq_lens_q=bounds, max_length_q=7)
    wanted = torch.cat([torchs(part, weight, bias) for part in states.split(lengths, -1)], -1)
    torch.testing.assert_close(ours, wanted)
    upstream = torch.randn_like(wanted)
    gradients = [torch.autograd.grad(made, inputs, upstream) for made in (ours, wanted)]
    torch.testing.assert_close(*gradients)


def test_lines_without_bounds_are_one_document_each_and_products_have_the_weights_dtype():
    torch.manual_seed(0)
    states, weight = torch.randn(4, 3, 9), torch.randn(3, 4)
    torch.testing.assert_close(convolve(states, weight), torchs(states, weight, None))
    # as in transformers: 16-bit activations beside a weight in float32
    found = convolve(states.bfloat16(), weight)
    assert found.dtype == torch.bfloat16
    wanted = torchs(states.bfloat16().float(), weight, None).bfloat16()
    torch.testing.assert_close(found, wanted)


def test_transformers_calls_it_and_its_model_computes_the_same(monkeypatch: pytest.MonkeyPatch):
    """Logits as with transformers' own function; the last also from the cache of an answer."""
    from transformers.models.lfm2 import modeling_lfm2

    config = tiny_config("lfm2")
    choose_attention(config)
    model = make_model(config, "sdpa")
    ids = torch.randint(3, 64, (2, 11), generator=torch.Generator().manual_seed(0))
    ours = model(ids, use_cache=False).logits
    cache = model(ids[:, :10], use_cache=True).past_key_values
    step = model(ids[:, 10:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(step[:, 0], ours[:, 10], rtol=1e-4, atol=1e-5)
    assert modeling_lfm2.causal_conv1d_fn is convolve
    plain = lambda states, weight, bias=None, **_: torchs(states, weight, bias)  # noqa: E731
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", plain)
    torch.testing.assert_close(model(ids, use_cache=False).logits, ours)
