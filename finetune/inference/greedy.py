"""Greedy answers of a model while it is trained: in the caller's thread, through the model as
training calls it.

The engines take a model that is there to answer; this one is wrapped (DDP, DeepSpeed), under
autocast, maybe in pieces on several ranks, and goes on training afterwards. So nothing of it is
changed that is not put back, and every forward goes through the wrapper. What the comments say of
others is of transformers 5.23 and torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from finetune.modeling.attention import BY_DOCUMENT, ISOLATED
from finetune.runtime.parent_watchdog import progress


@contextmanager
def answering(wrapped: torch.nn.Module, model: PreTrainedModel) -> Iterator[None]:
    """The model in eval mode, with an attention that reads a cache; afterwards all is as it was."""
    was_training, before = wrapped.training, model.config._attn_implementation
    own = before in (ISOLATED, BY_DOCUMENT)
    if own:
        softcapped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
        model.set_attn_implementation("eager" if softcapped else "sdpa")
    wrapped.eval()
    try:
        # Compiled layers would be compiled again for each form of batch, of which torch allows a
        # few: beyond them training would go on with another kernel.
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        wrapped.train(was_training)
        if own:
            model.set_attn_implementation(before)


def greedy_tokens(
    wrapped: Callable[..., Any],
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    most_tokens: Sequence[int],
    *,
    stop_ids: Sequence[int],
    pad_id: int,
    going: Callable[[bool], bool] = bool,
) -> list[list[int]]:
    """The answers to some prompts, written together: those of `model.generate(do_sample=False)`.

    Args:
        wrapped: `model` as training calls it; to be called inside `answering`.
        prompts: token ids, one at least each.
        most_tokens: of each answer, its end included; 0 where none is wanted.
        going: whether any rank goes on, given whether this one does; it is asked before every
            forward but the first. Where weights are in pieces on all ranks (ZeRO-3), all must make
            as many forwards.

    Returns:
        Token ids of each answer, with the end token where there is one.
    """
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), pad_id)
    mask = torch.zeros_like(ids)
    for number, prompt in enumerate(prompts):
        ids[number, longest - len(prompt) :] = torch.tensor(list(prompt))
        mask[number, longest - len(prompt) :] = 1
    furthest = (
        max(len(prompt) + most for prompt, most in zip(prompts, most_tokens, strict=True)) - 1
    )
    decoding = _Decoding(wrapped, most_tokens, frozenset(stop_ids), furthest, going)
    settings = GenerationConfig(
        do_sample=False,
        eos_token_id=sorted(stop_ids),
        pad_token_id=pad_id,
        repetition_penalty=1.0,  # unset, the model's own would be applied
        max_new_tokens=max(1, *most_tokens),
        use_cache=True,
    )
    device = model.device
    with torch.no_grad():
        model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            generation_config=settings,
            custom_generate=decoding,
        )
    return decoding.answers


class _Decoding:
    """The loop of one batch, in the place of transformers' own, which would call the model below
    the wrapper.

    Args:
        furthest: the last position of any answer.
    """

    def __init__(
        self,
        wrapped: Callable[..., Any],
        most_tokens: Sequence[int],
        stop_ids: frozenset[int],
        furthest: int,
        going: Callable[[bool], bool],
    ) -> None:
        self.wrapped = wrapped
        self.most_tokens = most_tokens
        self.stop_ids = stop_ids
        self.furthest = furthest
        self.going = going
        self.answers: list[list[int]] = [[] for _ in most_tokens]
        self.over = [most == 0 for most in most_tokens]

    def __call__(
        self,
        model: PreTrainedModel,
        ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **inputs: Any,
    ) -> torch.Tensor:
        first, last = True, torch.tensor([-1], device=ids.device)
        while first or self.going(not all(self.over)):
            progress.mark()
            length = None if first else 1
            prepared = model.prepare_inputs_for_generation(
                ids, next_sequence_length=length, is_first_iteration=first, **inputs
            )
            if "logits_to_keep" in prepared:  # a number; `let_choose_logits` knows positions
                prepared["logits_to_keep"] = last
            outputs = self.wrapped(**prepared, return_dict=True)
            inputs = model._update_model_kwargs_for_generation(outputs, inputs)
            # of answers that are over, but still go along
            if inputs.get("position_ids") is not None:
                inputs["position_ids"] = inputs["position_ids"].clamp(max=self.furthest)
            tokens = logits_processor(ids, outputs.logits[:, -1].float()).argmax(dim=-1)
            self._take(tokens.tolist())
            ids, first = torch.cat([ids, tokens[:, None]], dim=1), False
        return ids

    def _take(self, tokens: Sequence[int]) -> None:
        for number, token in enumerate(tokens):
            if not self.over[number]:
                self.answers[number].append(token)
                self.over[number] = (
                    token in self.stop_ids or len(self.answers[number]) >= self.most_tokens[number]
                )
