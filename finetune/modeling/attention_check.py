"""The attention kernel of this device compared with plain attention, before a run uses it.

| device                              | compared                             | otherwise used     |
|-------------------------------------|--------------------------------------|--------------------|
| CUDA sm90 with flash_attn_interface | FlashAttention 3 (torch's operators) | FlashAttention 2   |
| NPU                                 | npu_fusion_attention                 | SDPA per document  |
| others                              | nothing                              | torch's kernels    |

The check covers documents packed one after another and one document a row, without and with the
model's window. It uses the model's heads and the run's dtype, runs forward and backward, and
applies the bounds of kernel_check.py. The plain operation is SDPA per document by matrix products:
while FlashAttention 3 is on, SDPA's fused kernels use it too.
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
    head_sizes,
    isolated_attention,
    shortest_window,
)
from finetune.modeling.kernel_check import Comparison, Input, Operation, first_line, problem_of
from finetune.modeling.npu_attention import npu_takes
from finetune.runtime.device import capabilities, empty_cache

logger = logging.getLogger("finetune")

FA3 = "FA3"  # torch's name for it
# What torch has to switch it on and off; torch 2.10 has none of them.
HOOK = (
    "list_flash_attention_impls",
    "current_flash_attention_impl",
    "activate_flash_attention_impl",
    "restore_flash_attention_impl",
)
# Tokens of documents, repeated: a document of one token, fewer and more than a kernel's tile,
# several tiles.
LENGTHS = (1, 7, 130, 33, 341)
MAX_TOKENS = 8 * sum(LENGTHS)
WIDEST_WINDOW = 100  # shorter than documents here, so that it hides something
# Size of queries and keys, which the scale divides out: a kernel that ignores the scale is found.
SIZE = 4.0


def check_attention(
    model: Any, setting: str, *, device_type: str, dtype: torch.dtype, tokens: int
) -> str:
    """Switch on the attention kernel of this device if it agrees with plain attention, else off.

    Args:
        model: transformers' or peft's, before it is wrapped.
        setting: of --fused-layers; off compares nothing and leaves FlashAttention 3 alone.
        device_type: of the run.
        dtype: of the computation.
        tokens: maximum tokens of a microbatch.

    Returns:
        The attention that is used, for the start-up table.
    """
    has_switch = all(hasattr(torch_attention, name) for name in HOOK)
    if has_switch and torch_attention.current_flash_attention_impl() == FA3:
        torch_attention.restore_flash_attention_impl()  # an earlier run of this process had it
    if setting == "off":
        return "torch's"
    kernel = _kernel(model, device_type, dtype, has_switch)
    if kernel is None:
        return "torch's"
    device = torch.device(device_type)
    problem = None
    if device_type == "cuda":
        try:
            torch_attention.activate_flash_attention_impl(FA3)
        # its package is built for one torch and one CUDA: any error of loading it is reported
        except Exception as error:
            problem = first_line(error)
    for comparison, most in _comparisons(model):
        problem = problem or problem_of(comparison, device, dtype, min(tokens, most))
    empty_cache(device)  # the memory that the comparisons took
    if problem is None:
        return kernel
    logger.warning(
        "%s is not used: %s. torch's own attention is. Fix: another version of its package, or"
        " --fused-layers off to leave out this comparison",
        kernel,
        problem,
    )
    if device_type == "npu":
        model.set_attn_implementation(BY_DOCUMENT)
    elif torch_attention.current_flash_attention_impl() is not None:
        torch_attention.restore_flash_attention_impl()
    return "torch's"


def _kernel(model: Any, device_type: str, dtype: torch.dtype, has_switch: bool) -> str | None:
    """Return the kernel to compare on this device for a model; None if torch's own attention is
    used anyway.
    """
    text = model.config.get_text_config()
    has_softcap = getattr(text, "attn_logit_softcapping", None) is not None
    if text._attn_implementation != ISOLATED or has_softcap or dtype not in HALF:
        return None
    heads, keys, width, _ = head_sizes(text)
    if device_type == "npu":
        query = torch.empty(1, heads, 1, width, dtype=dtype, device="meta")
        key = torch.empty(1, keys, 1, width, dtype=dtype, device="meta")
        return "npu_fusion_attention" if npu_takes(query, key) else None
    has_fa3 = (
        device_type == "cuda"
        and importlib.util.find_spec("flash_attn_interface") is not None
        and has_switch
        and FA3 in torch_attention.list_flash_attention_impls()
        and capabilities("cuda").hopper
    )
    # The switch changes SDPA's kernels too, and those of FlashAttention 3 do not support dropout.
    takes = width <= FLASH_WIDEST_HEAD and not _drops_attention(text)
    return "FlashAttention 3" if has_fa3 and takes else None


def _drops_attention(text: PretrainedConfig) -> bool:
    return any(value for name, value in text.to_dict().items() if "att" in name and "drop" in name)


def _comparisons(model: Any) -> Iterator[tuple[Comparison, int]]:
    """Yield what to compare for a model, and with how many tokens at most."""
    heads, keys, width, value_width = head_sizes(model.config.get_text_config())
    window = shortest_window(model.config)
    windows = [None] if window is None else [None, min(window, WIDEST_WINDOW)]
    for sliding_window in windows:
        for packed in (True, False):
            comparison = Comparison(
                _attention(width, value_width, sliding_window, packed, kernels=True),
                _attention(width, value_width, sliding_window, packed, kernels=False),
                (Input((heads, width)), Input((keys, width)), Input((keys, width))),
                smallest=SIZE,
                by_largest=True,
                chosen=_first_documents,
            )
            yield comparison, MAX_TOKENS if packed else sum(LENGTHS)


def _attention(
    width: int, value_width: int, sliding_window: int | None, packed: bool, *, kernels: bool
) -> Operation:
    """Return attention as a model calls it, of query `(1, T, H, width)` and of key and value
    `(1, T, K, width)`.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        lengths = document_lengths(query.shape[1])
        bounds = torch.tensor((0, *lengths), device=query.device).cumsum(0, dtype=torch.int32)
        output, _ = isolated_attention(
            nn.Module(),
            query.transpose(1, 2),
            key.transpose(1, 2),
            value[..., :value_width].transpose(1, 2),
            None,
            scaling=width**-0.5 / SIZE**2,
            sliding_window=sliding_window,
            document_lengths=lengths if packed else None,
            cu_seq_lens_q=bounds,
            max_length_q=max(lengths),
            kernels=kernels,
        )
        # results are compared in the queries' shape
        return nn.functional.pad(output, (0, width - value_width))

    def by_products(*inputs: Tensor) -> Tensor:
        with torch_attention.sdpa_kernel(torch_attention.SDPBackend.MATH):
            return attend(*inputs)

    return attend if kernels else by_products


def document_lengths(tokens: int) -> tuple[int, ...]:
    """Return the lengths of documents that fill this many tokens: `LENGTHS`, repeated and cut."""
    ends = [min(end, tokens) for end in accumulate(LENGTHS * (tokens // sum(LENGTHS) + 1))]
    return tuple(end - begin for begin, end in pairwise((0, *ends)) if end > begin)


def _first_documents(tokens: int) -> Tensor:
    """Return the tokens of whole documents, which float64 can compute on their own."""
    return torch.arange(min(tokens, sum(LENGTHS)))
