"""Many answers at once with transformers' `generate`: a batch is filled, answered to its end, then
the next one.

For models whose layers are not all attention, and for devices where continuous batching has not
been tried. Requests wait for the batch before theirs; the key-value cache of a single answer is
kept for a prompt that continues it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from finetune.inference.choose_tokens import adjust_each
from finetune.inference.engine import Job, Limits


class StaticEngine:
    """Batches through `generate`, left-padded."""

    def __init__(
        self, model: PreTrainedModel, stop_ids: Sequence[int], pad_id: int, limits: Limits
    ) -> None:
        self._model = model
        self._stop_ids = set(stop_ids)
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
                job.listener((), True, "the model is being closed")
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

    def is_cancelled(self, identity: str) -> bool:
        return self._closed or identity in self._cancelled

    def _run(self) -> None:
        while True:
            with self._change:
                self._cancelled.clear()
                while not self._waiting and not self._closed:
                    self._change.wait()
                if self._closed:
                    break
                batch = [
                    self._waiting.popleft()
                    for _ in range(min(len(self._waiting), self._limits.max_batch))
                ]
            answers = _Answers(self, batch, self._stop_ids)
            try:
                self._answer(batch, answers)
            except Exception as error:  # whatever the model raised, these requests must end
                self._kept = None
                answers.fail(f"{type(error).__name__}: {error}")
            else:
                answers.fail("the model is being closed")  # those that are not finished
        for job in self._waiting:
            job.listener((), True, "the model is being closed")

    def _answer(self, batch: Sequence[Job], answers: _Answers) -> None:
        longest = max(len(job.prompt_ids) for job in batch)
        ids = torch.full((len(batch), longest), self._pad_id)
        mask = torch.zeros_like(ids)
        for number, job in enumerate(batch):
            ids[number, longest - len(job.prompt_ids) :] = torch.tensor(list(job.prompt_ids))
            mask[number, longest - len(job.prompt_ids) :] = 1
        cache = self._cache_for(batch[0].prompt_ids) if len(batch) == 1 else None
        device = self._model.device
        settings = GenerationConfig(
            do_sample=False,
            eos_token_id=sorted(self._stop_ids),
            pad_token_id=self._pad_id,
            # ours is applied by `adjust`; unset, the model's own would be applied too
            repetition_penalty=1.0,
            max_new_tokens=max(job.sampling.max_new_tokens or 1 for job in batch),
            return_dict_in_generate=True,
        )
        with torch.inference_mode():
            result = self._model.generate(
                ids.to(device),
                attention_mask=mask.to(device),
                generation_config=settings,
                logits_processor=LogitsProcessorList([_Settings(answers, longest)]),
                stopping_criteria=StoppingCriteriaList([_Finished(self, answers, longest)]),
                streamer=answers,
                **({"past_key_values": cache} if cache is not None else {}),
            )
        made = getattr(result, "past_key_values", None)
        if len(batch) == 1 and isinstance(made, DynamicCache) and _can_crop(made):
            # The last token has been chosen and not been read, so it has no keys yet.
            self._kept = (result.sequences[0, : made.get_seq_length()].tolist(), made)

    def _cache_for(self, prompt_ids: Sequence[int]) -> DynamicCache | None:
        """The cache of the answer before, cut to what this prompt begins with; None where nothing
        is shared.
        """
        if self._kept is None:
            return None
        (ids, cache), self._kept = self._kept, None
        shared = 0
        # one token at least must be read anew
        for ours, theirs in zip(prompt_ids[:-1], ids, strict=False):
            if ours != theirs:
                break
            shared += 1
        if shared == 0:
            return None
        if shared < cache.get_seq_length():
            cache.crop(shared - cache.get_seq_length())
        return cache


def _can_crop(cache: DynamicCache) -> bool:
    return all(type(layer).__name__ == "DynamicLayer" for layer in cache.layers)


class _Answers(BaseStreamer):
    """The answers of one batch: the tokens of each, and whether it is over."""

    def __init__(self, engine: StaticEngine, batch: Sequence[Job], stop_ids: set[int]) -> None:
        self.engine = engine
        self.batch = batch
        self.stop_ids = stop_ids
        self.ids: list[list[int]] = [[] for _ in batch]
        self.over = [False] * len(batch)
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:  # generate hands out the prompt first
            self._prompt_seen = True
            return
        for number, token in enumerate(value.reshape(-1).tolist()):
            job = self.batch[number]
            if self.over[number]:
                continue
            if self.engine.is_cancelled(job.identity):
                self.over[number] = True
                continue
            self.ids[number].append(token)
            self.over[number] = token in self.stop_ids or len(self.ids[number]) >= (
                job.sampling.max_new_tokens or 1
            )
            job.listener((token,), self.over[number], None)

    def end(self) -> None: ...

    def fail(self, reason: str) -> None:
        """Tell those whose answer is not over."""
        for number in range(len(self.batch)):
            self.fail_one(number, reason)

    def fail_one(self, number: int, reason: str) -> None:
        if not self.over[number]:
            self.over[number] = True
            self.batch[number].listener((), True, reason)


class _Settings(LogitsProcessor):
    """The settings of each sequence. Reads the answer from `input_ids`: a streamer may be a step
    behind.
    """

    def __init__(self, answers: _Answers, padded_prompt_tokens: int) -> None:
        self.answers = answers
        self.start = padded_prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        texts = input_ids[:, self.start :].tolist()
        sequences = [job.sequence(ids) for job, ids in zip(self.answers.batch, texts, strict=True)]
        scores, failed = adjust_each(scores, sequences)
        for number, error in failed.items():
            self.answers.fail_one(number, f"{type(error).__name__}: {error}")
        return scores


class _Finished(StoppingCriteria):
    """Sequences that are over for a reason of their own: their length, or nobody waits for them any
    more.
    """

    def __init__(self, engine: StaticEngine, answers: _Answers, padded_prompt_tokens: int) -> None:
        self.engine = engine
        self.answers = answers
        self.start = padded_prompt_tokens

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object
    ) -> torch.Tensor:
        length = input_ids.shape[1] - self.start
        over = [
            failed
            or length >= (job.sampling.max_new_tokens or 1)
            or self.engine.is_cancelled(job.identity)
            for job, failed in zip(self.answers.batch, self.answers.over, strict=True)
        ]
        return torch.tensor(over, dtype=torch.bool, device=input_ids.device)
