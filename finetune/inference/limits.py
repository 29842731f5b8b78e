"""What a model may take on its device, and what its own settings ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from finetune.errors import ConfigError
from finetune.inference.sampling import Sampling

DEFAULT_CACHE_TOKENS_PER_ANSWER = 2048
MEMORY_SHARE = 0.5  # of the memory that is free after loading, at most, for keys and values
SMALL_MODEL_PARAMETERS = 20_000_000
_UNKNOWN_CONTEXT_TOKENS = 4096


@dataclass(frozen=True)
class Limits:
    """What an engine may take.

    Attributes:
        max_batch: answers written at the same time.
        context_tokens: most tokens of one prompt with its answer.
        cache_tokens: tokens that the key-value cache holds, of all answers together.
    """

    max_batch: int
    context_tokens: int
    cache_tokens: int


def find_limits(model: Any, device: torch.device, max_batch: int, context_tokens: int | None) -> Limits:
    """Limits for a loaded model. The cache takes at most MEMORY_SHARE of what is free.

    Raises:
        ConfigError: a context that the model was not made for, or no memory.
    """
    if max_batch < 1:
        raise ConfigError(f"max_batch is {max_batch}", "--max-batch", "use 1 or more")
    config = model.config.get_text_config()
    made_for = getattr(config, "max_position_embeddings", None) or _UNKNOWN_CONTEXT_TOKENS
    if context_tokens is not None and not 2 <= context_tokens <= made_for:
        raise ConfigError(
            f"the context is {context_tokens} tokens, but the model was made for {made_for}",
            "--context-tokens",
            f"use 2 to {made_for}, or leave it out",
        )
    context = context_tokens or made_for
    wanted = max(context, max_batch * min(context, DEFAULT_CACHE_TOKENS_PER_ANSWER))
    affordable = int(_free_bytes(device) * MEMORY_SHARE / _cache_bytes_per_token(config, model.dtype))
    cache_tokens = min(wanted, affordable)
    if cache_tokens < 64:
        raise ConfigError(
            "there is no memory left for the key-value cache", str(device), "use a smaller model, or a free device"
        )
    return Limits(max_batch, min(context, cache_tokens), cache_tokens)


def _cache_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values, once in the cache and once more when attention reads them."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    copies = 1 + config.num_attention_heads / heads / config.num_hidden_layers
    return int(2 * config.num_hidden_layers * heads * head_dim * dtype.itemsize * copies)


def _free_bytes(device: torch.device) -> int:
    if device.type in ("cpu", "mps"):
        import psutil

        return psutil.virtual_memory().available
    free, _ = torch.get_device_module(device).mem_get_info()
    return free


def default_sampling(settings: Any) -> Sampling:
    """What a model's generation_config.json asks for."""
    penalty = float(settings.repetition_penalty or 1)
    if not settings.do_sample:
        return Sampling(repetition_penalty=penalty)
    return Sampling(
        temperature=float(1 if settings.temperature is None else settings.temperature),
        top_p=float(settings.top_p or 1),
        top_k=int(50 if settings.top_k is None else settings.top_k),
        repetition_penalty=penalty,
    )


def set_threads(model: Any, cpu_threads: int | None) -> None:
    """One thread for a small model: its operations are shorter than waking another, and much shorter than waiting for
    one that the system has put aside."""
    if sum(parameter.numel() for parameter in model.parameters()) < SMALL_MODEL_PARAMETERS:
        cpu_threads = 1
    if cpu_threads is not None:
        torch.set_num_threads(cpu_threads)
