"""Two engines that answer many prompts at the same time, each in its own thread.

`ContinuousEngine`, on transformers' continuous batching: a request joins the batch as soon as there
is room and leaves it when its answer ends. Prompts with a common beginning share its part of the
cache, so the turns of a conversation are read once.

`StaticEngine`, on transformers' `generate`: a batch is filled and answered to its end, then the
next one. It is for models whose layers are not all attention, and for devices where continuous
batching has not been tried. The cache of a single answer is kept for a prompt that continues it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)

from finetune.errors import ConfigError
from finetune.inference.choose_tokens import RunningSequence, adjust_each
from finetune.inference.decoding import BatchDecoding
from finetune.inference.sampling import Draws, Sampling

# Tokens of a page of the cache. Prompts share whole pages of their common beginning.
PAGE_TOKENS = 32
WAIT_SECONDS = 0.05
DEFAULT_CACHE_TOKENS_PER_ANSWER = 2048
MEMORY_SHARE = 0.5  # maximum share of the memory free after loading, for keys and values
_UNKNOWN_CONTEXT_TOKENS = 4096
CLOSING = "the model is being closed"
# (tokens since the last call, whether the answer is over, what went wrong)
Listener = Callable[[Sequence[int], bool, "str | None"], None]


@dataclass(frozen=True)
class Limits:
    """What an engine may use."""

    max_batch: int  # answers generated at the same time
    context_tokens: int  # maximum tokens of one prompt with its answer
    cache_tokens: int  # tokens in the key-value cache, of all answers together


def find_limits(
    model: Any, device: torch.device, max_batch: int, context_tokens: int | None
) -> Limits:
    """Return the limits for a loaded model. The cache takes at most MEMORY_SHARE of free memory.

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
    bytes_per_token = _cache_bytes_per_token(config, model.dtype)
    affordable = int(_free_bytes(device) * MEMORY_SHARE / bytes_per_token)
    cache_tokens = min(wanted, affordable)
    if affordable < 64:
        raise ConfigError(
            "there is no memory left for the key-value cache",
            str(device),
            "use a smaller model, or a free device",
        )
    return Limits(max_batch, min(context, cache_tokens), cache_tokens)


def _cache_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values, in the cache and, for one layer at a time,
    in the copy that attention reads.
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
    """Return whether keys and values come from a latent (DeepSeek's MLA), with different sizes."""
    return getattr(config.get_text_config(), "kv_lora_rank", None) is not None


def _free_bytes(device: torch.device) -> int:
    if device.type in ("cpu", "mps"):
        import psutil

        return psutil.virtual_memory().available
    free, _ = torch.get_device_module(device).mem_get_info()
    return free


@dataclass
class Job:
    """One answer in an engine. The listener is called in the engine's thread and must not block."""

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


class _JobSampler(ContinuousBatchingLogitsProcessor):
    """Applies each job's settings inside transformers' batch: its argmax takes our token."""

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
            # A request that was evicted from the cache comes back with the answer so far in its
            # prompt.
            answer = [*state.initial_tokens[len(job.prompt_ids) :], *state.generated_tokens]
            self._jobs.append(job)
            self._sequences.append(job.sequence(answer))
        return torch.zeros(len(self._sequences), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        # Scores after our jobs' sequences belong to prompts that are still being read. They are
        # not used.
        count = len(self._sequences)
        adjusted, failed = adjust_each(scores[:count], self._sequences)
        for number, error in failed.items():
            self._on_failure(self._jobs[number], error)
        return adjusted if count == len(scores) else torch.cat([adjusted, scores[count:]])


class ContinuousEngine:
    """transformers' continuous batching with settings per job.

    Accelerator graphs and asynchronous steps are off, because our Python code chooses the tokens of
    every step.
    """

    def __init__(
        self, model: PreTrainedModel, stop_ids: Sequence[int], pad_id: int, limits: Limits
    ) -> None:
        # it would log token ids of prompts
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        self._jobs: dict[str, tuple[Job, int]] = {}  # job, tokens delivered to its listener
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
        if not self.alive:  # the thread may have ended in between
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
        reason = CLOSING if fatal is None else f"{type(fatal).__name__}: {fatal}"
        with self._lock:
            jobs, self._jobs = [job for job, _ in self._jobs.values()], {}
        for job in jobs:
            job.listener((), True, reason)


class StaticEngine:
    """Batches of jobs, each decoded to its end in a thread."""

    def __init__(
        self, model: PreTrainedModel, stop_ids: Sequence[int], pad_id: int, limits: Limits
    ) -> None:
        self._model = model
        self._stop_ids = frozenset(stop_ids)
        self._pad_id = pad_id
        self._limits = limits
        self._waiting: deque[Job] = deque()
        self._cancelled: set[str] = set()
        self._change = threading.Condition()
        self._closed = False
        # tokens, and their keys and values
        self._kept: tuple[list[int], DynamicCache] | None = None
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closed

    def submit(self, job: Job) -> None:
        with self._change:
            if not self.alive:
                job.listener((), True, CLOSING)
                return
            self._waiting.append(job)
            self._change.notify()

    def cancel(self, identity: str) -> None:
        with self._change:
            before = len(self._waiting)
            self._waiting = deque(job for job in self._waiting if job.identity != identity)
            if len(self._waiting) == before:
                self._cancelled.add(identity)

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify()
        self._thread.join(timeout=30)

    def _is_cancelled(self, identity: str) -> bool:
        return self._closed or identity in self._cancelled

    def _run(self) -> None:
        while True:
            with self._change:
                self._cancelled.clear()
                while not self._waiting and not self._closed:
                    self._change.wait()
                if self._closed:
                    break
                count = min(len(self._waiting), self._limits.max_batch)
                batch = [self._waiting.popleft() for _ in range(count)]
            decoding = _JobDecoding(self._model, batch, self._stop_ids, self._is_cancelled)
            try:
                cache = self._cache_for(batch[0].prompt_ids) if len(batch) == 1 else None
                decoding.run(self._model, self._pad_id, cache)
            except Exception as error:  # these requests must end
                self._kept = None
                decoding.fail_rest(f"{type(error).__name__}: {error}")
            else:
                made = decoding.cache
                if len(batch) == 1 and isinstance(made, DynamicCache) and _can_crop(made):
                    self._kept = (decoding.ids[0, : made.get_seq_length()].tolist(), made)
                decoding.fail_rest(CLOSING)
        for job in self._waiting:
            job.listener((), True, CLOSING)

    def _cache_for(self, prompt_ids: Sequence[int]) -> DynamicCache | None:
        """Return the cache of the previous answer, cropped to the common beginning, or None."""
        if self._kept is None:
            return None
        (ids, cache), self._kept = self._kept, None
        shared = 0
        # at least one token must be read again
        for token, kept_token in zip(prompt_ids[:-1], ids, strict=False):
            if token != kept_token:
                break
            shared += 1
        if shared == 0:
            return None
        if shared < cache.get_seq_length():
            cache.crop(shared - cache.get_seq_length())
        return cache


def _can_crop(cache: DynamicCache) -> bool:
    return all(type(layer).__name__ == "DynamicLayer" for layer in cache.layers)


class _JobDecoding(BatchDecoding):
    """Decodes with the settings of each job, and reports every token to its listener."""

    def __init__(
        self,
        model: PreTrainedModel,
        batch: Sequence[Job],
        stop_ids: frozenset[int],
        is_cancelled: Callable[[str], bool],
    ) -> None:
        super().__init__(
            model,
            [job.prompt_ids for job in batch],
            [job.sampling.max_new_tokens or 1 for job in batch],
            stop_ids,
        )
        self._batch = batch
        self._is_cancelled = is_cancelled

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        pairs = zip(self._batch, self.answers, strict=True)
        scores, failed = adjust_each(scores, [job.sequence(answer) for job, answer in pairs])
        for number, error in failed.items():
            self._fail(number, f"{type(error).__name__}: {error}")
        return super().choose(scores)

    def take(self, number: int, token: int) -> None:
        job = self._batch[number]
        if self._is_cancelled(job.identity):
            self.over[number] = True
            return
        super().take(number, token)
        job.listener((token,), self.over[number], None)

    def fail_rest(self, reason: str) -> None:
        """Report a failure to the listeners of answers that are not over."""
        for number in range(len(self._batch)):
            self._fail(number, reason)

    def _fail(self, number: int, reason: str) -> None:
        if not self.over[number]:
            self.over[number] = True
            self._batch[number].listener((), True, reason)


Engine = ContinuousEngine | StaticEngine
