"""Attention that never looks across documents, per device.

A packed sequence holds several documents one after another, `(1, T)`; a padded microbatch one
document per line, `(samples, longest)`, padded on the right. In both, a token may see only earlier
tokens of its own document.

| device             | packed sequences                                         | padded
microbatches                |
|--------------------|----------------------------------------------------------|------------------------------------|
| CUDA sm80, 16-bit  | torch's flash kernels over document bounds               | SDPA, causal
|
| CUDA sm90, 16-bit  | the same, FlashAttention 3 if there (attention_check)    | SDPA, causal
|
| NPU, 16-bit        | npu_fusion_attention over document ends (npu_attention)  | the same, one
document a line      |
| CPU                | SDPA per document, in float32 (see `_causal`)            | the same, causal
|
| everything else    | SDPA per document: O(sum of squares), no mask is built   | SDPA, causal
|
| softcap            | scores of a document, squashed, masked, softmax          | the same
|
| other model types  | never packed                                             | transformers' own
choice           |

Right padding needs no mask under causal attention: a real token never sees the padding behind it.

Shapes below: H query heads, K key-value heads, T tokens of a microbatch, D head dimension. What the
comments say of others is of transformers 5.23 and torch 2.13.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig

from finetune.modeling.npu_attention import npu_attention, npu_takes
from finetune.modeling.short_convolution import keep_documents_apart
from finetune.runtime.device import capabilities

ISOLATED = "finetune_isolated"
BY_DOCUMENT = "finetune_by_document"  # the same without kernels of ours
# Model types whose packed documents stay apart and whose logits here equal transformers' own: each
# is tested (tests/modeling/test_attention.py). Others are trained padded, with transformers'
# attention: they may build ALiBi or a window into a mask that we do not see (Bloom, Llama 4,
# Phi-3.5-MoE), call attention by themselves (Nemotron, StableLM), not tell the mask about documents
# (gpt-oss), or carry a state along the sequence (Mamba).
_TESTED = """
    afmoe apertus arcee bitnet cohere cohere2 cwm deepseek_v2 deepseek_v3 diffllama ernie4_5
    ernie4_5_moe exaone4 exaone_moe flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe
    glm4_moe_lite gpt2 gpt_bigcode gpt_neox granite granitemoe granitemoeshared helium
    hunyuan_v1_dense hunyuan_v1_moe internlm3 jetmoe lfm2 lfm2_value llama longcat_flash minicpm3
    minimax_m2 ministral ministral3 mistral mixtral nanochat olmo olmo2 olmo3 olmoe opt persimmon
    phi phi3 qwen2 qwen3 qwen3_moe seed_oss smollm3 starcoder2
"""
ISOLATED_MODEL_TYPES = frozenset(_TESTED.split())
SHORT_CONVOLUTION_TYPES = frozenset({"lfm2", "lfm2_value"})
FLASH_WIDEST_HEAD = 256  # of torch's kernels
HALF = (torch.float16, torch.bfloat16)
ATTENTION_LAYER_TYPES = {"full_attention", "sliding_attention"}


def choose_attention(config: PretrainedConfig) -> str | None:
    """The attention for `from_pretrained(attn_implementation=...)`; registers ours when it is
    chosen.

    Returns:
        None leaves the choice to transformers: a model type that was not tested with ours.
    """
    if not can_pack(config):
        softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
        return "eager" if softcap else None  # SDPA has no softcap
    # In AttentionInterface and not in AttentionMaskInterface too: of a name that is unknown there,
    # transformers takes it that no mask is needed, and builds none
    # (masking_utils._preprocess_mask_arguments). A mask of T x T numbers for a packed sequence is
    # what ours exists to do without. Registering twice does no harm.
    AttentionInterface.register(ISOLATED, isolated_attention)
    AttentionInterface.register(BY_DOCUMENT, partial(isolated_attention, kernels=False))
    if config.model_type in SHORT_CONVOLUTION_TYPES:
        keep_documents_apart()
    return ISOLATED


def can_pack(config: PretrainedConfig) -> bool:
    """Whether documents are known to stay apart when packed: a tested model type, with layers that
    are known.
    """
    return config.model_type in ISOLATED_MODEL_TYPES and (
        only_attends(config) or config.model_type in SHORT_CONVOLUTION_TYPES
    )


def only_attends(config: PretrainedConfig) -> bool:
    """Whether every layer is attention, so that all that a token leaves to later ones are its keys
    and values.
    """
    return set(getattr(config, "layer_types", None) or ()) <= ATTENTION_LAYER_TYPES


def shortest_window(config: PretrainedConfig) -> int | None:
    """The window of the layers that look back only so far, in tokens; None where all look back to
    the beginning.
    """
    text = config.get_text_config()
    window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    if not window or not getattr(text, "use_sliding_window", True):
        return None
    return int(window) if kinds is None or "sliding_attention" in kinds else None


def isolated_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    document_lengths: tuple[int, ...] | None = None,
    cu_seq_lens_q: Any = None,
    max_length_q: Any = None,
    kernels: bool = True,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within documents, with the signature of a transformers attention function.

    Args:
        query: `(samples, H, T, D)`; key, value: `(samples, K, T, D)`.
        softcap: scores are `softcap * tanh(score / softcap)`. No kernel behind SDPA or flash
            attention has it.
        document_lengths: tokens of each document of a packed sequence, in order; None: every line
            is one document. It and the next two come from `Microbatch.model_inputs`: models pass on
            keyword arguments they do not know.
        cu_seq_lens_q: `(documents + 1,)` int32, running sum of the lengths, on the device of
            `query`.
        kernels: whether the device's own may be taken; without, SDPA computes document by document.

    Returns:
        `(samples, T, H, D)` and None (no attention weights).
    """
    if softcap is None and (has_flash(query.device) or query.device.type == "npu"):
        # Under autocast with float32 weights, norm and rotation leave query and key in float32:
        # cast as SDPA would be.
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = (states.to(dtype) for states in (query, key, value))
        if kernels and query.device.type == "npu" and npu_takes(query, key):
            return (
                npu_attention(
                    query,
                    key,
                    value,
                    dropout=dropout,
                    scaling=scaling,
                    sliding_window=sliding_window,
                    document_lengths=document_lengths,
                ),
                None,
            )
        packed = kernels and document_lengths is not None and dropout == 0.0
        if (
            packed
            and query.dtype in HALF
            and query.shape[-1] <= FLASH_WIDEST_HEAD
            and has_flash(query.device)
        ):
            return (
                _varlen(query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window),
                None,
            )
    # Lengths as numbers of Python beside cu_seq_lens: to cut by a tensor's values the host would
    # have to wait for the device in every layer.
    bounds = document_lengths if document_lengths is not None else (query.shape[2],)
    pieces = [
        (
            _causal(q, k, v, dropout, scaling, sliding_window)
            if softcap is None
            else _squashed(q, k, v, dropout, scaling, sliding_window, softcap)
        )
        for q, k, v in zip(
            query.split(bounds, 2), key.split(bounds, 2), value.split(bounds, 2), strict=True
        )
    ]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)).transpose(
        1, 2
    ).contiguous(), None


# else the compiler traces the question, and warns of the cache
@torch.compiler.assume_constant_result
def has_flash(device: torch.device) -> bool:
    """Whether torch's flash kernels run on a device: a CUDA device from Ampere on."""
    return device.type == "cuda" and _cuda_has_flash()


@cache
def _cuda_has_flash() -> bool:
    return capabilities("cuda").flash


def computes_on_cpu(device: torch.device) -> bool:
    """Whether a CPU's way is taken, see `_causal`; a function of its own for traces, whose device
    is none.
    """
    return device.type == "cpu"


def _causal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    # is_causal lets SDPA take its kernels without a mask; only a window that is shorter than the
    # document needs one.
    mask = None
    if sliding_window is not None and query.shape[2] > sliding_window:
        mask = _seen(query, sliding_window)
    dtype, on_cpu = query.dtype, computes_on_cpu(query.device)
    if on_cpu and torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    if on_cpu and dtype in HALF:
        # float32 is faster here, casts included: processor time of bfloat16 over float32's, forward
        # and backward, one thread of an EPYC with avx512_bf16, least of nine: 3.3 for documents of
        # 64 tokens (16 heads of 64), 1.4 for 256, 1.0 for 512 (8 heads of 128), 0.85 for 1,024.
        # Always, and not where a measurement at the start says so: a run that is resumed keeps its
        # numbers.
        query, key, value = query.float(), key.float(), value.float()
    with torch.autocast("cpu", enabled=False) if on_cpu else nullcontext():
        output = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            scale=scaling,
            is_causal=mask is None,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return output.to(dtype) if on_cpu else output


def _squashed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float,
) -> torch.Tensor:
    key, value = (
        states.repeat_interleave(query.shape[1] // states.shape[1], dim=1)
        for states in (key, value)
    )
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~_seen(query, sliding_window), float("-inf"))
    precise = torch.promote_types(query.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=precise).to(query.dtype)
    return torch.nn.functional.dropout(weights, dropout) @ value


def _seen(query: torch.Tensor, sliding_window: int | None) -> torch.Tensor:
    """Which tokens of a document see which, bool `(T, T)`: earlier ones and itself, within the
    window.
    """
    position = torch.arange(query.shape[2], device=query.device)
    distance = position[:, None] - position[None, :]
    seen = distance >= 0
    return seen if sliding_window is None else seen & (distance < sliding_window)


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    max_length: int,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    # One width for all three, a multiple of 8: MLA's values are narrower than its queries and keys.
    # Zeros behind add nothing to scores or values; the scale is that of the width without them.
    width = -(-max(query.shape[-1], value.shape[-1]) // 8) * 8
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling

    def flat(states: torch.Tensor) -> torch.Tensor:  # (1, heads, T, D) -> (T, heads, width)
        states = torch.nn.functional.pad(states, (0, width - states.shape[-1]))
        return states.squeeze(0).transpose(0, 1).contiguous()

    # The operator behind torch.nn.attention.varlen.varlen_attn, called as that calls it. The
    # function has neither scale nor windows in torch 2.10, and takes no fewer heads of keys than of
    # queries before 2.12; the operator has all of them in each
    # (tests/training/test_trainer_hooks.py). To be replaced when 2.12 is the oldest supported.
    output: torch.Tensor = torch.ops.aten._flash_attention_forward(
        flat(query),
        flat(key),
        flat(value),
        cu_seq_lens,
        cu_seq_lens,
        max_length,
        max_length,
        0.0,  # dropout
        sliding_window is None,  # causal by itself; else the window is, which sees nothing behind
        False,
        scale=scaling,
        # beside the own token
        window_size_left=-1 if sliding_window is None else sliding_window - 1,
        window_size_right=0,
    )[0]
    return output.unsqueeze(0)[..., : value.shape[-1]]  # (1, T, H, D)
