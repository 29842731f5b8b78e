"""LFM2's short convolution as shifts and products: what every device has, compilers fuse, and that
can keep documents apart.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch.nn.functional import pad

from finetune.errors import FinetuneError


def keep_documents_apart() -> None:
    """Let transformers' LFM2 call `convolve`, in this process.

    Its own function is the package causal-conv1d where that is installed and a grouped convolution
    elsewhere, which takes no document bounds. It gets the keyword arguments that a model was called
    with, so nothing else need change; transformers has no hook for it but its hub of kernels. May
    go when the function takes cu_seq_lens_q.
    """
    from transformers.models.lfm2 import modeling_lfm2

    if not hasattr(modeling_lfm2, "causal_conv1d_fn"):
        raise FinetuneError(
            "LFM2's convolution is another function in this transformers: packed documents"
            " would mix",
            f"transformers {transformers.__version__}",
            "install the version that constraints.txt names",
        )
    modeling_lfm2.causal_conv1d_fn = convolve


def convolve(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: None = None,
    *,
    cu_seq_lens_q: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """A causal convolution of each channel by itself, that begins anew with each document.

    Args:
        hidden_states: `(samples, channels, T)`.
        weight: `(channels, taps)`, the last for the token itself; bias: `(channels,)`.
        cu_seq_lens_q: `(documents + 1,)` where the documents of a packed sequence begin, and its
            end; None: every line is one document.
        activation: LFM2 has none.
        kwargs: what attention is told besides.

    Returns: `(samples, channels, T)` in the dtype of `hidden_states`; products are taken in that of
        `weight`.
    """
    assert activation is None, activation
    states = hidden_states.to(weight.dtype)
    tokens, taps = states.shape[-1], weight.shape[-1]
    mixed = states * weight[:, -1:]
    for back in range(1, min(taps, tokens)):
        earlier = pad(states, (back, -back))
        if cu_seq_lens_q is not None:
            # The first `back` places of each document have nobody so far behind them. Of a shorter
            # one they reach into the next, or past the end, and there too are no more than its
            # first places.
            first = cu_seq_lens_q[:-1, None] + torch.arange(back, device=states.device)
            earlier = earlier.index_fill(-1, first.flatten().clamp(max=tokens - 1).long(), 0)
        mixed = mixed + earlier * weight[:, -1 - back, None]
    if bias is not None:
        mixed = mixed + bias[:, None]
    return mixed.to(hidden_states.dtype)
