"""Short causal convolutions as shifts and products: they work on every device, compilers fuse them,
and they can keep documents apart. LFM2 has them, and so have recurrent layers (recurrent_layers).
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad
from transformers.activations import ACT2FN

from finetune.errors import FinetuneError


def keep_documents_apart() -> None:
    """Let transformers' LFM2 call `convolve`, in this process.

    Its own function is that of the package causal-conv1d, if installed, or a grouped convolution,
    which takes no document bounds. It receives the keyword arguments of the model's call, so
    nothing else has to change. transformers has no hook for it except its hub of kernels. Remove
    this when the function takes cu_seq_lens_q.
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
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Convolve each channel causally, starting again with each document.

    Args:
        hidden_states: `(samples, channels, T)`.
        weight: `(channels, taps)`, the last for the token itself; bias: `(channels,)`.
        activation: transformers' name of a function that is applied to the result.
        cu_seq_lens_q: `(documents + 1,)`, the first positions of the documents of a packed
            sequence, and its end; None: every row is one document.
        kwargs: the other arguments of attention.

    Returns:
        `(samples, channels, T)` in the dtype of `hidden_states`; products have that of `weight`.
    """
    states = hidden_states.to(weight.dtype)
    tokens, taps = states.shape[-1], weight.shape[-1]
    mixed = states * weight[:, -1:]
    for back in range(1, min(taps, tokens)):
        earlier = pad(states, (back, -back))
        if cu_seq_lens_q is not None:
            # The first `back` positions of each document have no token that far back. If a document
            # is shorter, they extend into the next one, or past the end, and stay within its first
            # `back` positions.
            first = cu_seq_lens_q[:-1, None] + torch.arange(back, device=states.device)
            earlier = earlier.index_fill(-1, first.flatten().clamp(max=tokens - 1).long(), 0)
        mixed = mixed + earlier * weight[:, -1 - back, None]
    if bias is not None:
        mixed = mixed + bias[:, None]
    if activation is not None:
        mixed = ACT2FN[activation](mixed)
    return mixed.to(hidden_states.dtype)
