"""Reference versions of fused operators, by their documented contracts (torch_npu 2.13.0, _op_plugin_docs.py).

What the contract does not allow is refused, as the kernel would; where the documents of CANN and MindSpore differ, by
the narrower one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

ALL_TOKENS = 2147483647
TOP_LEFT, DOWN_RIGHT = 2, 3  # sparse_mode: where the diagonal of a causal mask begins
COMPRESSED_MASK = (2048, 2048)  # the mask that goes with these modes, whatever the lengths
MOST_DOCUMENTS, MOST_TOKENS, MOST_HEADS = 2048, 512 * 1024, 256
HEAD_MULTIPLE, WIDEST_HEAD = 16, 512


def npu_fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = ALL_TOKENS,
    next_tockens: int = ALL_TOKENS,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: tuple[int, ...] | None = None,
    actual_seq_kvlen: tuple[int, ...] | None = None,
    sparse_mode: int = 0,
    **others: Any,
) -> tuple[torch.Tensor]:
    """Attention in two layouts; the first element of the tuple is the output, in the layout of the query.

    BSND: `(samples, T, heads, D)`. TND: `(tokens, heads, D)`, documents one after another, whose ends are the running
    sums in `actual_seq_qlen` and `actual_seq_kvlen`; no token sees another document. Without `atten_mask` attention is
    full, whatever `sparse_mode` says.
    """
    refused = [name for name, given in {"pse": pse, "padding_mask": padding_mask, "prefix": prefix}.items() if given]
    assert not refused and not others, f"not simulated: {refused or others}"
    assert keep_prob == 1.0, "dropout is not simulated"
    assert (pre_tockens, next_tockens) == (ALL_TOKENS, ALL_TOKENS), "bands are not simulated"
    _check_operands(query, key, value, atten_mask, scale)
    if input_layout == "BSND":
        assert head_num == query.shape[2]
        output = _attention(*(states.transpose(1, 2) for states in (query, key, value)), atten_mask, sparse_mode, scale)
        return (output.transpose(1, 2),)
    assert input_layout == "TND" and head_num == query.shape[1], f"layout {input_layout} is not simulated"
    query_lengths, key_lengths = _lengths(actual_seq_qlen, query), _lengths(actual_seq_kvlen, key)
    pieces = [
        _attention(*(states.transpose(0, 1)[None] for states in piece), atten_mask, sparse_mode, scale)
        for piece in zip(query.split(query_lengths), key.split(key_lengths), value.split(key_lengths), strict=True)
    ]
    return (torch.cat([piece[0].transpose(0, 1) for piece in pieces]),)


def _check_operands(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, atten_mask: torch.Tensor | None, scale: float
) -> None:
    assert query.dtype == key.dtype == value.dtype and query.dtype in (torch.float16, torch.bfloat16), query.dtype
    assert query.device.type == key.device.type == value.device.type == "npu"
    assert atten_mask is None or atten_mask.device.type == "npu"
    assert type(scale) is float, "a number of the host: reading it from the device would wait for it"
    width = query.shape[-1]
    assert width == key.shape[-1] == value.shape[-1], "one head size for all three"
    assert width % HEAD_MULTIPLE == 0 and width <= WIDEST_HEAD, f"head size {width}"
    heads, groups = query.shape[-2], key.shape[-2]
    assert heads <= MOST_HEADS and heads % groups == 0 and value.shape[-2] == groups, (heads, groups)


def _lengths(ends: tuple[int, ...] | None, states: torch.Tensor) -> list[int]:
    """Running sums of lengths -> lengths."""
    assert ends and all(type(end) is int for end in ends), "TND needs the ends of the documents, as plain numbers"
    lengths = [end - start for start, end in zip((0, *ends), ends, strict=False)]
    assert len(lengths) <= MOST_DOCUMENTS and max(lengths) <= MOST_TOKENS
    assert min(lengths) > 0 and ends[-1] == states.shape[0], f"{ends} do not divide {states.shape[0]} tokens"
    return lengths


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    atten_mask: torch.Tensor | None,
    sparse_mode: int,
    scale: float,
) -> torch.Tensor:
    """`(samples, heads, T, D)` each; fewer key-value heads than query heads are repeated."""
    mask = None
    if atten_mask is not None and sparse_mode in (TOP_LEFT, DOWN_RIGHT):
        assert tuple(atten_mask.shape) == COMPRESSED_MASK and atten_mask.dtype == torch.bool
        rows, columns = query.shape[2], key.shape[2]
        offset = columns - rows if sparse_mode == DOWN_RIGHT else 0
        mask = torch.ones(rows, columns, dtype=torch.bool).tril(offset).to(query.device)
    elif atten_mask is not None:
        mask = ~atten_mask.bool()
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)


def npu_rms_norm(states: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor]:
    return (rms_norm(states, gamma.shape, gamma, epsilon),)


def npu_swiglu(states: torch.Tensor, dim: int = -1) -> torch.Tensor:
    gate, up = states.chunk(2, dim)
    return silu(gate) * up


def npu_rotary_mul(
    states: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, rotary_mode: str = "half", rotate: Any = None
) -> torch.Tensor:
    assert rotary_mode == "half" and rotate is None
    first, second = states.chunk(2, -1)
    return states * cosine + torch.cat((-second, first), -1) * sine
