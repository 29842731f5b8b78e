"""Many answers at once with transformers' `generate`: a batch is filled, answered to its end, then
the next one.

For models whose layers are not all attention, and for devices where continuous batching has not
been tried. Requests wait for the batch before theirs. The key-value cache of a single answer is
kept for a prompt that continues it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from finetune.inference.choose_tokens import adjust_each
from finetune.inference.decoding import BatchDecoding
from finetune.inference.engine import Job, Limits

CLOSING = "the model is being closed"


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
            except Exception as error:  # whatever the model raised, these requests must end
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
        """Return the cache of the answer before, cut to what this prompt begins with, or None if
        nothing is shared.
        """
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
        sequences = [
            job.sequence(answer) for job, answer in zip(self._batch, self.answers, strict=True)
        ]
        scores, failed = adjust_each(scores, sequences)
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
