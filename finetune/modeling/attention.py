"""Attention within documents, per device: no token attends to another document.

A packed sequence holds several documents one after another, `(1, T)`. A padded microbatch has one
document per row, `(samples, longest)`, padded on the right. In both, a token attends only to
earlier tokens in the same document.

| device            | packed sequences                        | padded microbatches           |
|-------------------|-----------------------------------------|-------------------------------|
| CUDA sm80, 16-bit | torch's flash kernels (1)               | SDPA, causal                  |
| CUDA sm90, 16-bit | the same, or FlashAttention 3 (2)       | SDPA, causal                  |
| NPU, 16-bit       | npu_fusion_attention (3)                | the same, one document a row  |
| CPU               | SDPA per document, in float32 (4)       | the same, causal              |
| all others        | SDPA per document (5)                   | SDPA, causal                  |
| softcap, sinks    | scores of a document, masked            | the same                      |
| other model types | never packed                            | what transformers chooses     |

(1) over document bounds; (2) if it is installed, see attention_check; (3) over document ends, see
npu_attention; (4) see `_causal`; (5) O(sum of squares), no mask is built.

Right padding needs no mask under causal attention: a real token never attends to the padding after
it.

Shapes below: H query heads, K key-value heads, T tokens of a microbatch, D head dimension. Comments
about other packages are about transformers 5.23 and torch 2.13.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig

from finetune.modeling.npu_attention import npu_attention, npu_takes
from finetune.modeling.recurrent_layers import RECURRENT_TYPES, keep_states_apart
from finetune.modeling.short_convolution import keep_documents_apart
from finetune.runtime.device import capabilities

ISOLATED = "finetune_isolated"
BY_DOCUMENT = "finetune_by_document"  # the same without the device's kernels
# Model types whose packed documents stay apart and whose logits here equal transformers' own: each
# is tested (tests/modeling/test_attention.py). Others are trained padded, with transformers'
# attention. They may build ALiBi or a window into a mask that is not visible here (Bloom, Llama 4,
# Phi-3.5-MoE) or call attention themselves (Nemotron, StableLM). Others carry a state along the
# sequence in a way that recurrent_layers does not have (Mamba, Jamba, Kimi Linear).
_TESTED = """
    afmoe apertus arcee bitnet cohere cohere2 cwm deepseek_v2 deepseek_v3 diffllama ernie4_5
    ernie4_5_moe exaone4 exaone_moe flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe
    glm4_moe_lite gpt2 gpt_bigcode gpt_neox gpt_oss granite granitemoe granitemoeshared helium
    hunyuan_v1_dense hunyuan_v1_moe internlm3 jetmoe lfm2 lfm2_value llama longcat_flash minicpm3
    minimax_m2 ministral ministral3 mistral mixtral nanochat olmo olmo2 olmo3 olmoe opt persimmon
    phi phi3 qwen2 qwen3 qwen3_moe seed_oss smollm3 starcoder2
"""
ISOLATED_MODEL_TYPES = frozenset(_TESTED.split()) | RECURRENT_TYPES.keys()
# Model types with images, of which transformers' AutoModelForCausalLM loads the text part.
TEXT_LOADED = frozenset({"qwen3_5", "qwen3_5_moe"})
SHORT_CONVOLUTION_TYPES = frozenset({"lfm2", "lfm2_value"})
FLASH_WIDEST_HEAD = 256  # of torch's kernels
HALF = (torch.float16, torch.bfloat16)
ATTENTION_LAYER_TYPES = {"full_attention", "sliding_attention"}


def choose_attention(config: PretrainedConfig) -> str | None:
    """Return the attention for `from_pretrained(attn_implementation=...)`, and register it.

    Returns:
        None leaves the choice to transformers: the model type was not tested with ours.
    """
    if not can_pack(config):
        softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
        return "eager" if softcap else None  # SDPA has no softcap
    # In AttentionInterface and not in AttentionMaskInterface: for a name that is unknown there,
    # transformers assumes that no mask is needed, and builds none
    # (masking_utils._preprocess_mask_arguments). This attention exists to avoid a mask of T x T
    # elements for a packed sequence. Registering twice is harmless.
    AttentionInterface.register(ISOLATED, isolated_attention)
    AttentionInterface.register(BY_DOCUMENT, partial(isolated_attention, kernels=False))
    if config.model_type in SHORT_CONVOLUTION_TYPES:
        keep_documents_apart()
    if _trained_type(config) in RECURRENT_TYPES:
        keep_states_apart(_trained_type(config))
    return ISOLATED


def can_pack(config: PretrainedConfig) -> bool:
    """Return whether documents are known to stay apart when packed: a tested model type with known
    layers.
    """
    kind = _trained_type(config)
    others = SHORT_CONVOLUTION_TYPES | RECURRENT_TYPES.keys()
    return kind in ISOLATED_MODEL_TYPES and (only_attends(config) or kind in others)


def only_attends(config: PretrainedConfig) -> bool:
    """Return whether every layer is attention, so that a token passes only its keys and values to
    later tokens.
    """
    if _trained_type(config) in RECURRENT_TYPES:
        return False
    return set(getattr(config, "layer_types", None) or ()) <= ATTENTION_LAYER_TYPES


def _trained_type(config: PretrainedConfig) -> str:
    text = config.get_text_config() if config.model_type in TEXT_LOADED else config
    return str(text.model_type)


def shortest_window(config: PretrainedConfig) -> int | None:
    """Return the window of the layers with a sliding window, in tokens; None if there are none."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if not window or not getattr(text, "use_sliding_window", True):
        return None
    return int(window) if kinds is None or "sliding_attention" in kinds else None


def head_sizes(text: PretrainedConfig) -> tuple[int, int, int, int]:
    """Return the number of query heads, the number of key heads, the width of both, and the width
    of values.
    """
    heads = text.num_attention_heads
    keys = getattr(text, "num_key_value_heads", None) or heads
    if getattr(text, "qk_nope_head_dim", None):  # multi-head latent attention
        return heads, keys, text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return heads, keys, width, width


def isolated_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    document_lengths: tuple[int, ...] | None = None,
    cu_seq_lens_q: Any = None,
    max_length_q: Any = None,
    kernels: bool = True,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within documents, with the signature of a transformers attention function.

    Args:
        query: `(samples, H, T, D)`; key, value: `(samples, K, T, D)`.
        softcap: scores are `softcap * tanh(score / softcap)`. No kernel behind SDPA or flash
            attention has it.
        s_aux: `(H,)`, sinks: the score of one more key, whose value is zero (gpt-oss).
        document_lengths: tokens of each document of a packed sequence, in order; None: every row is
            one document. It and the next two come from `Microbatch.model_inputs`: models pass on
            keyword arguments that they do not know.
        cu_seq_lens_q: `(documents + 1,)` int32, running sum of the lengths, on the device of
            `query`.
        max_length_q: of the longest document.
        kernels: whether the device's own may be used; without them SDPA computes document by
            document.

    Returns:
        `(samples, T, H, D)` and None (no attention weights).
    """
    plain = softcap is None and s_aux is None
    if plain and (has_flash(query.device) or query.device.type == "npu"):
        # Under autocast with float32 weights, norm and rotation leave query and key in float32:
        # cast as SDPA would be.
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = (states.to(dtype) for states in (query, key, value))
        if kernels and query.device.type == "npu" and npu_takes(query, key):
            output = npu_attention(
                query, key, value, dropout, scaling, sliding_window, document_lengths
            )
            return output, None
        if (
            kernels
            and document_lengths is not None
            and dropout == 0.0
            and query.dtype in HALF
            and query.shape[-1] <= FLASH_WIDEST_HEAD
            and has_flash(query.device)
        ):
            output = _varlen(
                query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window
            )
            return output, None
    if plain:
        attend = partial(_causal, dropout, scaling, sliding_window)
    else:
        attend = partial(_scored_attention, dropout, scaling, sliding_window, softcap, s_aux)
    # Lengths as Python integers in addition to cu_seq_lens: to split by a tensor's values, the host
    # would have to wait for the device in every layer.
    bounds = document_lengths if document_lengths is not None else (query.shape[2],)
    documents = zip(
        query.split(bounds, 2), key.split(bounds, 2), value.split(bounds, 2), strict=True
    )
    pieces = [attend(q, k, v) for q, k, v in documents]
    output = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)
    return output.transpose(1, 2).contiguous(), None


# else the compiler traces the call, and warns about the cache
@torch.compiler.assume_constant_result
def has_flash(device: torch.device) -> bool:
    """Return whether torch's flash kernels run on a device: a CUDA device from Ampere on."""
    return device.type == "cuda" and _cuda_has_flash()


@cache
def _cuda_has_flash() -> bool:
    return capabilities("cuda").flash


def computes_on_cpu(device: torch.device) -> bool:
    """Return whether `_causal` computes as on a CPU; a separate function so that traces, whose
    device is not real, can replace it.
    """
    return device.type == "cpu"


def _causal(
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    # is_causal lets SDPA use its kernels without a mask; only a window that is shorter than the
    # document needs one.
    mask = None
    if sliding_window is not None and query.shape[2] > sliding_window:
        mask = _causal_mask(query, sliding_window)
    dtype = query.dtype
    on_cpu = computes_on_cpu(query.device)
    if on_cpu and torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    if on_cpu and dtype in HALF:
        # float32 is faster here, casts included. CPU time of bfloat16 divided by CPU time of
        # float32: 3.3 for documents of 64 tokens (16 heads of 64), 1.4 for 256, 1.0 for 512 (8
        # heads of 128), 0.85 for 1,024. Measured forward and backward, on one thread of an EPYC
        # with avx512_bf16, as the minimum of nine. The choice is fixed and not measured at the
        # start: a resumed run keeps its values.
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


def _scored_attention(
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    copies = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(copies, dim=1)
    value = value.repeat_interleave(copies, dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~_causal_mask(query, sliding_window), float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None, None]
        scores = torch.cat([scores, column.expand(*scores.shape[:-1], 1)], dim=-1)
    precise = torch.promote_types(query.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=precise).to(query.dtype)
    weights = weights[..., : key.shape[2]]
    return nn.functional.dropout(weights, dropout) @ value


def _causal_mask(query: Tensor, sliding_window: int | None) -> Tensor:
    """Return bool `(T, T)`: whether a token of a document attends to another, which is itself or an
    earlier one within the window.
    """
    position = torch.arange(query.shape[2], device=query.device)
    distance = position[:, None] - position[None, :]
    mask = distance >= 0
    return mask if sliding_window is None else mask & (distance < sliding_window)


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    max_length: int,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    # One width for all three, a multiple of 8: MLA's values are narrower than its queries and keys.
    # Appended zeros change neither scores nor values; the scale is that of the width without them.
    width = -(-max(query.shape[-1], value.shape[-1]) // 8) * 8
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling

    def flat(states: Tensor) -> Tensor:  # (1, heads, T, D) -> (T, heads, width)
        states = nn.functional.pad(states, (0, width - states.shape[-1]))
        return states.squeeze(0).transpose(0, 1).contiguous()

    # The operator behind torch.nn.attention.varlen.varlen_attn, called as that function calls it.
    # The function has neither scale nor windows in torch 2.10, and requires as many key heads as
    # query heads before 2.12. The operator supports all of these in each version
    # (tests/training/test_trainer_hooks.py). Replace it when 2.12 is the oldest supported version.
    output: Tensor = torch.ops.aten._flash_attention_forward(
        flat(query),
        flat(key),
        flat(value),
        cu_seq_lens,
        cu_seq_lens,
        max_length,
        max_length,
        0.0,  # dropout
        sliding_window is None,  # causal; with a window the window itself ends at the token
        False,
        scale=scaling,
        # in addition to the token itself
        window_size_left=-1 if sliding_window is None else sliding_window - 1,
        window_size_right=0,
    )[0]
    return output.unsqueeze(0)[..., : value.shape[-1]]  # (1, T, H, D)
