"""Attention on Ascend: torch_npu.npu_fusion_attention over documents whose ends the host knows.

transformers' own path to the same kernel reads the ends back from the device, twice a layer and
pass (`cu_seqlens.cpu()` in integrations/npu_flash_attention.py, transformers 5.23). Each time the
host waits for all queued work. Here the ends are the Python integers that a microbatch carries, and
nothing waits.

The kernel's limits are documented for torch_npu 2.13 (op-plugin,
custom_APIs/torch_npu/npu_fusion_attention) and, in part narrower, for MindSpore's operator of the
same name; the narrower of both hold here.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

HEAD_MULTIPLE, WIDEST_HEAD, MAX_HEADS = 16, 512, 256
MAX_DOCUMENTS = 1024  # of a call in the TND layout
CAUSAL, BAND = 3, 4  # sparse_mode: the mask's diagonal ends at the last token of each document
_MASK_SIDE = 2048  # in these modes a mask of this size works for any number of tokens


def npu_takes(query: Tensor, key: Tensor) -> bool:
    """Return whether the kernel supports these heads; query `(S, H, T, D)`, key `(S, K, T, D)`."""
    heads, keys, width = query.shape[1], key.shape[1], query.shape[-1]
    fits = heads <= MAX_HEADS and heads % keys == 0 and width <= WIDEST_HEAD
    return fits and query.dtype in (torch.float16, torch.bfloat16)


def npu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    document_lengths: tuple[int, ...] | None,
) -> Tensor:
    """Causal attention within documents, without waiting for the device.

    Args:
        query: `(S, H, T, D)`; key, value: `(S, K, T, D)`, the values' D not above the keys'.
        document_lengths: of a packed sequence (S = 1); None: each of the S rows is one document.

    Returns:
        `(S, T, H, D of value)`.
    """
    samples, heads, tokens, width = query.shape
    lengths = document_lengths if document_lengths is not None else (tokens,) * samples
    # One width for all three: multi-head latent attention has narrower values. Appended zeros
    # change neither scores nor values; the scale is that of the width without them.
    scaling = width**-0.5 if scaling is None else float(scaling)
    wide = -(-max(width, value.shape[-1]) // HEAD_MULTIPLE) * HEAD_MULTIPLE

    def flat(states: Tensor) -> Tensor:  # (S, heads, T, D) -> (S * T, heads, wide)
        states = torch.nn.functional.pad(states, (0, wide - states.shape[-1]))
        return states.transpose(1, 2).reshape(samples * tokens, -1, wide)

    states = [flat(query), flat(key), flat(value)]
    outputs: list[Tensor] = []
    begin = 0
    for first in range(0, len(lengths), MAX_DOCUMENTS):
        some = lengths[first : first + MAX_DOCUMENTS]
        end = begin + sum(some)
        parts = [flattened[begin:end] for flattened in states]
        outputs.append(_call(parts, heads, some, dropout, scaling, sliding_window))
        begin = end
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.view(samples, tokens, heads, wide)[..., : value.shape[-1]]


def _call(
    states: list[Tensor],
    heads: int,
    lengths: tuple[int, ...],
    dropout: float,
    scaling: float,
    sliding_window: int | None,
) -> Tensor:
    import torch_npu

    ends = tuple(accumulate(lengths))
    mode: dict[str, int] = {"sparse_mode": CAUSAL}
    if sliding_window is not None and sliding_window < max(lengths):
        # A token attends to itself, `pre_tockens` before it and `next_tockens` after it.
        mode = {
            "pre_tockens": sliding_window - 1,
            "next_tockens": 0,
            "sparse_mode": BAND,
        }
    output: Tensor = torch_npu.npu_fusion_attention(
        *states,
        heads,
        "TND",
        atten_mask=_hidden(states[0].device),
        scale=scaling,
        keep_prob=1.0 - dropout,
        actual_seq_qlen=ends,
        actual_seq_kvlen=ends,
        **mode,
    )[0]
    return output


@cache
def _hidden(device: torch.device) -> Tensor:
    """Return bool `(2048, 2048)`: True where a token must not attend to another. Without a mask the
    kernel attends to all tokens.
    """
    return torch.ones(_MASK_SIDE, _MASK_SIDE, dtype=torch.bool).triu(1).to(device)
