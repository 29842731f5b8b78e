"""The short convolution against torch's, on each document alone."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import conv1d

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
