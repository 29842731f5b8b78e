"""Many answers at once: what every engine does, and the one on transformers' continuous batching.

A request joins the batch as soon as there is room and leaves it when its answer ends; prompts that
begin alike share their part of the cache, so the turns of a conversation are read once.
`static_engine` is for the models and devices where that does not work.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)

from finetune.errors import ConfigError
from finetune.inference.choose_tokens import RunningSequence, adjust_each
from finetune.inference.sampling import Draws, Sampling

# tokens of a page of the cache: what prompts that begin alike share is counted in whole pages
PAGE_TOKENS = 32
WAIT_SECONDS = 0.05
DEFAULT_CACHE_TOKENS_PER_ANSWER = 2048
MEMORY_SHARE = 0.5  # of the memory that is free after loading, at most, for keys and values
_UNKNOWN_CONTEXT_TOKENS = 4096
# (tokens since the last call, whether the answer is over, what went wrong)
Listener = Callable[[Sequence[int], bool, "str | None"], None]


@dataclass(frozen=True)
class Limits:
    """What an engine may take."""

    max_batch: int  # answers written at the same time
    context_tokens: int  # most tokens of one prompt with its answer
    cache_tokens: int  # tokens that the key-value cache holds, of all answers together


def find_limits(
    model: Any, device: torch.device, max_batch: int, context_tokens: int | None
) -> Limits:
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
    affordable = int(
        _free_bytes(device) * MEMORY_SHARE / _cache_bytes_per_token(config, model.dtype)
    )
    cache_tokens = min(wanted, affordable)
    if affordable < 64:
        raise ConfigError(
            "there is no memory left for the key-value cache",
            str(device),
            "use a smaller model, or a free device",
        )
    return Limits(max_batch, min(context, cache_tokens), cache_tokens)


def _cache_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values, once in the cache and once more when attention reads
    them.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    widths = 2 * head_dim
    # transformers keeps them unfolded, and their head_dim is another number
    if has_latent_cache(config):
        widths = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    copies = 1 + config.num_attention_heads / heads / config.num_hidden_layers
    return int(config.num_hidden_layers * heads * widths * dtype.itemsize * copies)


def has_latent_cache(config: Any) -> bool:
    """Whether keys and values are made of a latent (DeepSeek's MLA): each has a width of its
    own.
    """
    return getattr(config.get_text_config(), "kv_lora_rank", None) is not None


def _free_bytes(device: torch.device) -> int:
    if device.type in ("cpu", "mps"):
        import psutil

        return psutil.virtual_memory().available
    free, _ = torch.get_device_module(device).mem_get_info()
    return free


@dataclass
class Job:
    """One answer in an engine. `listener` is called in the engine's thread and must return at
    once.
    """

    identity: str
    prompt_ids: Sequence[int]
    sampling: Sampling  # its max_new_tokens is a number
    listener: Listener
    draws: Draws = field(init=False)

    def __post_init__(self) -> None:
        self.draws = Draws(self.sampling.seed)

    def sequence(self, answer_ids: Sequence[int]) -> RunningSequence:
        return RunningSequence(
            self.sampling, self.draws, [*self.prompt_ids, *answer_ids], len(self.prompt_ids)
        )


class Engine(Protocol):
    """Answers jobs in a thread of its own."""

    def submit(self, job: Job) -> None: ...

    def cancel(self, identity: str) -> None:
        """Stop a job; its listener may be called once more."""

    @property
    def alive(self) -> bool: ...

    def close(self) -> None: ...


class _JobSampler(ContinuousBatchingLogitsProcessor):
    """Settings per job inside transformers' batch: scores are adjusted so that its argmax takes our
    token.
    """

    supported_kwargs: dict[str, type] = {"job": Job}
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, on_failure: Callable[[Job, Exception], None]) -> None:
        self._on_failure = on_failure
        self._jobs: list[Job] = []
        self._sequences: list[RunningSequence] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list) -> torch.Tensor:
        self._jobs = []
        self._sequences = []
        for request in requests_with_new_token:
            state = request.state
            job: Job = state.logit_processor_kwargs["job"]
            # A request that had to give its cache away comes back with the answer so far in its
            # prompt.
            answer = [*state.initial_tokens[len(job.prompt_ids) :], *state.generated_tokens]
            self._jobs.append(job)
            self._sequences.append(job.sequence(answer))
        return torch.zeros(len(self._sequences), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        # What follows our jobs' sequences belongs to prompts that are still being read; nothing is
        # taken from it.
        count = len(self._sequences)
        adjusted, failed = adjust_each(scores[:count], self._sequences)
        for number, error in failed.items():
            self._on_failure(self._jobs[number], error)
        return adjusted if count == len(scores) else torch.cat([adjusted, scores[count:]])


class ContinuousEngine:
    """transformers' continuous batching with settings per job.

    Accelerator graphs and asynchronous steps are off: tokens are chosen by code that runs anew in
    every step.
    """

    def __init__(
        self, model: PreTrainedModel, stop_ids: Sequence[int], pad_id: int, limits: Limits
    ) -> None:
        # it would print ids of prompts
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        self._jobs: dict[str, tuple[Job, int]] = {}  # job, tokens that its listener has
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._stop_ids = list(stop_ids)
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(
                do_sample=False,
                eos_token_id=self._stop_ids,
                pad_token_id=pad_id,
                max_new_tokens=limits.context_tokens,
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_TOKENS,
                num_blocks=-(-limits.cache_tokens // PAGE_TOKENS),
                max_batch_tokens=max(limits.max_batch, min(512, limits.context_tokens)),
                max_requests_per_batch=limits.max_batch,
                max_blocks_per_request=0,
                use_cuda_graph=False,
                use_async_batching=False,
                # The attention was chosen at loading; a better one would be fetched from the hub.
                auto_switch_to_flash=False,
            ),
        )
        sampler = ContinuousBatchingLogitsProcessorList(
            LogitsProcessorList([_JobSampler(self._fail)])
        )
        sampler.tensors_required = 1
        self._manager.logit_processor = sampler
        self._manager.start()
        self._thread = threading.Thread(target=self._deliver, name="answers", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        healthy = self._manager.background_thread_status.fatal_error is None
        return healthy and self._manager.is_running() and not self._closed.is_set()

    def submit(self, job: Job) -> None:
        with self._lock:
            self._jobs[job.identity] = (job, 0)
        self._manager.add_request(
            list(job.prompt_ids),
            request_id=job.identity,
            max_new_tokens=job.sampling.max_new_tokens,
            streaming=True,
            eos_token_id=self._stop_ids,
            job=job,
        )
        if not self.alive:  # the thread may have ended in between, and nobody would answer
            self._fail_all()

    def cancel(self, identity: str) -> None:
        with self._lock:
            if self._jobs.pop(identity, None) is None:
                return
        self._manager.cancel_request(identity)

    def _fail(self, job: Job, error: Exception) -> None:
        self.cancel(job.identity)
        job.listener((), True, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """End the threads; answers that are not finished fail."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._manager.stop(block=True, timeout=30, hard_stop=True)
        self._thread.join(timeout=30)
        self._manager.destroy()

    def _deliver(self) -> None:
        while not self._closed.is_set():
            output = self._manager.get_result(timeout=WAIT_SECONDS)
            if output is None:
                if not self._manager.is_running():
                    break
                continue
            with self._lock:
                job, delivered = self._jobs.get(output.request_id, (None, 0))
                if job is None:  # cancelled
                    continue
                if output.is_finished():
                    del self._jobs[output.request_id]
                else:
                    self._jobs[output.request_id] = (job, len(output.generated_tokens))
            job.listener(output.generated_tokens[delivered:], output.is_finished(), output.error)
        self._fail_all()

    def _fail_all(self) -> None:
        fatal = self._manager.background_thread_status.fatal_error
        reason = (
            "the model is being closed" if fatal is None else f"{type(fatal).__name__}: {fatal}"
        )
        with self._lock:
            jobs, self._jobs = [job for job, _ in self._jobs.values()], {}
        for job in jobs:
            job.listener((), True, reason)
