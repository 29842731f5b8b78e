"""The attention kernel of this device compared with plain attention, before a run takes it.

| device                                   | compared                                      | where
it differs        |
|------------------------------------------|-----------------------------------------------|-------------------------|
| CUDA sm90 with flash_attn_interface      | FlashAttention 3 behind torch's own operators | torch's
FlashAttention 2|
| NPU                                      | npu_fusion_attention over document ends       | SDPA
per document       |
| others                                   | nothing: torch's own kernels are taken        |
|

Documents packed one after another and one document a line, without and with the model's kind of
window, with its heads, in the run's dtype; forward and backward, by the bounds of layer_check.py.
The plain operation is SDPA per document by matrix products: with FlashAttention 3 switched on,
SDPA's fused kernels are that, too.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import attention as torch_attention
from transformers import PretrainedConfig

from finetune.modeling.attention import (
    BY_DOCUMENT,
    FLASH_WIDEST_HEAD,
    HALF,
    ISOLATED,
    isolated_attention,
    shortest_window,
)
from finetune.modeling.layer_check import Comparison, Function, Input, first_line, problem_of
from finetune.modeling.npu_attention import npu_takes
from finetune.runtime.device import capabilities, empty_cache

logger = logging.getLogger("finetune")

FA3 = "FA3"  # torch's name for it, and what torch has to switch it on and off
HOOK = (
    "list_flash_attention_impls",
    "current_flash_attention_impl",
    "activate_flash_attention_impl",
    "restore_flash_attention_impl",
)
# Tokens of documents, over and over: a document of one token, fewer and more than a kernel's tile,
# several tiles.
LENGTHS = (1, 7, 130, 33, 341)
MOST_TOKENS = 8 * sum(LENGTHS)
WIDEST_WINDOW = 100  # shorter than documents here, so that it hides something
# of the numbers of query and key, which the scale takes back: one that is forgotten shows
SIZE = 4.0


def check_attention(
    model: nn.Module, setting: str, *, device_type: str, dtype: torch.dtype, tokens: int
) -> str:
    """Switch on the attention kernel of this device where it agrees with plain attention, and off
    where it does not.

    Args:
        model: transformers' or peft's, before it is wrapped.
        setting: of --fused-layers; off compares nothing and leaves FlashAttention 3 alone.
        dtype: of the computation.
        tokens: most tokens of a microbatch.

    Returns:
        The attention that is used, for the table of the start.
    """
    hook = _fa3_hook()
    if hook is not None and hook.current_flash_attention_impl() == FA3:
        hook.restore_flash_attention_impl()  # an earlier run of this process had it
    kernel = _kernel(model, device_type, dtype) if setting != "off" else None
    if kernel is None:
        return "torch's"
    device = torch.device(device_type)
    problem = _activation_problem(hook) if kernel == "FlashAttention 3" else None
    for comparison, most in _comparisons(model):
        problem = problem or problem_of(comparison, device, dtype, min(tokens, most))
    empty_cache(device)  # what the comparisons took
    if problem is None:
        return kernel
    logger.warning(
        "%s is not used: %s. torch's own attention is. Fix: another version of its package, or"
        " --fused-layers off to leave out this comparison",
        kernel,
        problem,
    )
    if device_type == "npu":
        model_here: Any = model
        model_here.set_attn_implementation(BY_DOCUMENT)
    elif hook is not None and hook.current_flash_attention_impl() is not None:
        hook.restore_flash_attention_impl()
    return "torch's"


def _kernel(model: Any, device_type: str, dtype: torch.dtype) -> str | None:
    """What there is to be compared on this device for a model; None where torch's own attention is
    taken anyway.
    """
    text = model.config.get_text_config()
    isolated = (
        text._attn_implementation == ISOLATED
        and getattr(text, "attn_logit_softcapping", None) is None
    )
    if not isolated or dtype not in HALF:
        return None
    heads, keys, width, _ = _heads(text)
    if device_type == "npu":
        query, key = (
            torch.empty(1, count, 1, width, dtype=dtype, device="meta") for count in (heads, keys)
        )
        return "npu_fusion_attention" if npu_takes(query, key) else None
    # The switch changes SDPA's kernels, too, and those of FlashAttention 3 refuse dropout.
    takes = width <= FLASH_WIDEST_HEAD and not _drops_attention(text)
    return "FlashAttention 3" if takes and device_type == "cuda" and _has_fa3() else None


def _fa3_hook() -> Any | None:
    """torch's switch between flash kernels, where it knows FlashAttention 3; torch 2.10 has
    none.
    """
    if not all(hasattr(torch_attention, name) for name in HOOK):
        return None
    return torch_attention if FA3 in torch_attention.list_flash_attention_impls() else None


def _has_fa3() -> bool:
    installed = importlib.util.find_spec("flash_attn_interface") is not None
    return installed and _fa3_hook() is not None and capabilities("cuda").hopper


def _activation_problem(hook: Any) -> str | None:
    try:
        hook.activate_flash_attention_impl(FA3)
    # its package is built for one torch and one CUDA: whatever loading raises is told
    except Exception as error:
        return first_line(error)
    return None


def _drops_attention(text: PretrainedConfig) -> bool:
    return any(value for name, value in text.to_dict().items() if "att" in name and "drop" in name)


def _heads(text: PretrainedConfig) -> tuple[int, int, int, int]:
    """Heads of queries and of keys, the width of both, and that of values."""
    heads = text.num_attention_heads
    keys = getattr(text, "num_key_value_heads", None) or heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    if getattr(text, "qk_nope_head_dim", None):  # multi-head latent attention
        return heads, keys, text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim
    return heads, keys, width, width


def _comparisons(model: Any) -> Iterator[tuple[Comparison, int]]:
    """What to compare for a model, and of how many tokens at most."""
    heads, keys, width, values = _heads(model.config.get_text_config())
    window = shortest_window(model.config)
    for sliding_window in (None,) if window is None else (None, min(window, WIDEST_WINDOW)):
        for packed in (True, False):
            yield (
                Comparison(
                    "attention",
                    "",
                    _attention(width, values, sliding_window, packed, kernels=True),
                    _attention(width, values, sliding_window, packed, kernels=False),
                    (Input((heads, width)), Input((keys, width)), Input((keys, width))),
                    smallest=SIZE,
                    by_largest=True,
                    chosen=_first_documents,
                ),
                MOST_TOKENS if packed else sum(LENGTHS),
            )


def _attention(
    width: int, values: int, sliding_window: int | None, packed: bool, *, kernels: bool
) -> Function:
    """Attention as a model calls it, of query `(1, T, H, width)`, key and value `(1, T, K,
    width)`.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        lengths = document_lengths(query.shape[1])
        bounds = torch.tensor((0, *lengths), device=query.device).cumsum(0, dtype=torch.int32)
        output, _ = isolated_attention(
            nn.Module(),
            query.transpose(1, 2),
            key.transpose(1, 2),
            value[..., :values].transpose(1, 2),
            None,
            scaling=width**-0.5 / SIZE**2,
            sliding_window=sliding_window,
            document_lengths=lengths if packed else None,
            cu_seq_lens_q=bounds,
            max_length_q=max(lengths),
            kernels=kernels,
        )
        # results are compared in the queries' shape
        return nn.functional.pad(output, (0, width - values))

    def by_products(*inputs: Tensor) -> Tensor:
        with torch_attention.sdpa_kernel(torch_attention.SDPBackend.MATH):
            return attend(*inputs)

    return attend if kernels else by_products


def document_lengths(tokens: int) -> tuple[int, ...]:
    """Documents that fill so many tokens: `LENGTHS` over and over, the last one cut."""
    ends = [min(end, tokens) for end in accumulate(LENGTHS * (tokens // sum(LENGTHS) + 1))]
    return tuple(end - begin for begin, end in pairwise((0, *ends)) if end > begin)


def _first_documents(tokens: int) -> Tensor:
    """The tokens of whole documents: float64 computes those by themselves."""
    return torch.arange(min(tokens, sum(LENGTHS)))
