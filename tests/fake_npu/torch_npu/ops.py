"""Reference versions of fused operators, by their documented contracts (torch_npu 2.13.0,
_op_plugin_docs.py, and op-plugin's docs/zh/custom_APIs/torch_npu).

What the contract does not allow is refused, as the kernel would; where the documents of torch_npu,
CANN and MindSpore differ, by the narrower one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

ALL_TOKENS = 2147483647
DEFAULT, ALL_GIVEN, TOP_LEFT, DOWN_RIGHT, BAND = range(5)  # sparse_mode: what atten_mask stands for
COMPRESSED_MASK = (2048, 2048)  # the mask that goes with the last three, whatever the lengths
MOST_DOCUMENTS, MOST_TOKENS, MOST_HEADS = 1024, 512 * 1024, 256
HEAD_MULTIPLE, WIDEST_HEAD = 16, 512
WIDEST_ROTATION, MOST_ROTATED = 896, 1000
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


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
) -> tuple[Any, ...]:
    """Attention in two layouts; the first of seven values is the output, in the layout of the
    query.

    BSND: `(samples, T, heads, D)`. TND: `(tokens, heads, D)`, documents one after another, whose
    ends are the running sums in `actual_seq_qlen` and `actual_seq_kvlen`; no token sees another
    document. Without `atten_mask` attention is full, whatever `sparse_mode` says.
    """
    refused = [given for given in (pse, padding_mask, prefix, others) if given]
    assert not refused, f"not simulated: {refused}"
    assert 0 < keep_prob <= 1, f"keep_prob {keep_prob}"
    _check_operands(query, key, value, scale)
    band = _check_mask(atten_mask, sparse_mode, pre_tockens, next_tockens)
    rest = (atten_mask, sparse_mode, band, scale, 1 - keep_prob)
    statistics = (torch.empty(0), torch.empty(0), torch.empty(0), 0, 0, 0)
    if input_layout == "BSND":
        assert head_num == query.shape[2]
        output = _attention(*(states.transpose(1, 2) for states in (query, key, value)), *rest)
        return (output.transpose(1, 2), *statistics)
    assert input_layout == "TND" and head_num == query.shape[1], input_layout
    query_lengths, key_lengths = _lengths(actual_seq_qlen, query), _lengths(actual_seq_kvlen, key)
    assert len(query_lengths) == len(key_lengths)
    documents = (query.split(query_lengths), key.split(key_lengths), value.split(key_lengths))
    pieces = [
        _attention(*(states.transpose(0, 1)[None] for states in piece), *rest)
        for piece in zip(*documents, strict=True)
    ]
    return (torch.cat([piece[0].transpose(0, 1) for piece in pieces]), *statistics)


def _check_operands(query, key, value, scale):
    assert query.dtype == key.dtype == value.dtype and query.dtype in FLOATS[:2], query.dtype
    assert query.device.type == key.device.type == value.device.type == "npu"
    assert type(scale) is float, "of the host: reading the device would wait for it"
    assert query.dim() in (3, 4) and query.numel() > 0
    width = query.shape[-1]
    assert width == key.shape[-1] and key.shape == value.shape, "one head size for all three"
    assert width % HEAD_MULTIPLE == 0 and width <= WIDEST_HEAD, f"head size {width}"
    heads, groups = query.shape[-2], key.shape[-2]
    assert heads <= MOST_HEADS and heads % groups == 0, (heads, groups)


def _check_mask(atten_mask, sparse_mode, before, behind):
    """The band of sparse mode 4: tokens seen before and behind the own."""
    if atten_mask is None:
        return None
    assert atten_mask.device.type == "npu" and atten_mask.dtype in (torch.bool, torch.uint8)
    assert sparse_mode in range(5), f"sparse mode {sparse_mode} is not simulated"
    if sparse_mode in (TOP_LEFT, DOWN_RIGHT, BAND):
        assert tuple(atten_mask.shape) == COMPRESSED_MASK
        hidden = torch.ones(COMPRESSED_MASK, dtype=torch.bool).triu(1)
        assert torch.equal(atten_mask.cpu().bool(), hidden), "the lower triangle is seen"
    if sparse_mode != BAND:
        assert (before, behind) == (ALL_TOKENS, ALL_TOKENS), "ignored in this mode"
        return None
    assert type(before) is type(behind) is int and min(before, behind) >= 0, "around the own token"
    return before, behind


def _lengths(ends: tuple[int, ...] | None, states: torch.Tensor) -> list[int]:
    """Running sums of lengths -> lengths."""
    assert ends and all(type(end) is int for end in ends), "the ends of documents, plain numbers"
    lengths = [end - start for start, end in zip((0, *ends), ends, strict=False)]
    assert len(lengths) <= MOST_DOCUMENTS and max(lengths) <= MOST_TOKENS
    assert min(lengths) > 0 and ends[-1] == states.shape[0], (ends, states.shape)
    return lengths


def _attention(query, key, value, atten_mask, sparse_mode, band, scale, dropout):
    """`(samples, heads, T, D)` each; fewer key-value heads than query heads are repeated."""
    mask = None
    rows, columns = query.shape[2], key.shape[2]
    everything = torch.ones(rows, columns, dtype=torch.bool)
    if atten_mask is not None and sparse_mode in (TOP_LEFT, DOWN_RIGHT):
        mask = everything.tril(columns - rows if sparse_mode == DOWN_RIGHT else 0).to(query.device)
    elif band is not None:  # around the diagonal that ends at the last token of both
        before, behind = band
        mask = everything.tril(columns - rows + behind).triu(columns - rows - before)
        mask = mask.to(query.device)
    elif atten_mask is not None:
        mask = ~atten_mask.bool()
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, dropout_p=dropout, enable_gqa=grouped
    )


def npu_rms_norm(states, gamma, epsilon=1e-6):
    """The output, and the reciprocal of the roots (float32), for the backward pass."""
    assert states.device.type == gamma.device.type == "npu" and type(epsilon) is float
    assert states.dtype in FLOATS and gamma.dtype in (states.dtype, torch.float32), gamma.dtype
    assert 2 <= states.dim() <= 8 and gamma.shape == states.shape[-gamma.dim() :]
    reciprocal = torch.rsqrt(states.detach().float().pow(2).mean(-1, keepdim=True) + epsilon)
    normed = rms_norm(states.float(), gamma.shape, gamma.float(), epsilon)
    return normed.to(states.dtype), reciprocal


def npu_swiglu(states: torch.Tensor, dim: int = -1) -> torch.Tensor:
    assert states.device.type == "npu" and states.dtype in FLOATS
    assert 1 <= states.dim() <= 8 and states.numel() > 0 and states.shape[dim] % 2 == 0
    assert states.is_contiguous()
    gate, up = states.chunk(2, dim)
    return silu(gate) * up


def npu_rotary_mul(states, cosine, sine, rotary_mode="half", rotate=None):
    """Four axes, of which the angles may have 1 where the heads are, and where the samples are."""
    assert rotary_mode == "half" and rotate is None
    assert states.device.type == cosine.device.type == sine.device.type == "npu"
    assert all(each.dtype in FLOATS and each.dim() == 4 for each in (states, cosine, sine))
    assert cosine.shape == sine.shape and cosine.shape[-1] == states.shape[-1]
    width = states.shape[-1]
    assert width < WIDEST_ROTATION and width % 2 == 0, f"head size {width}"
    samples, second, third, _ = states.shape
    # BNSD with 11SD or B1SD, or BSND with 1S1D or BS1D: heads are the axis that the angles do not
    # have.
    assert cosine.shape[0] in (1, samples)
    heads = {(1, third): second, (second, 1): third}.get(tuple(cosine.shape[1:3]))
    assert heads is not None and samples < MOST_ROTATED and heads < MOST_ROTATED, states.shape
    cosine, sine = cosine.to(states.dtype), sine.to(states.dtype)
    first, second_half = states.chunk(2, -1)
    return states * cosine + torch.cat((-second_half, first), -1) * sine
