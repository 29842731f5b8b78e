"""The decoding loop of one batch, for `StaticEngine`, answers during training and `verify`.

transformers' `generate` prepares the inputs and the cache. The loop is our own (`custom_generate`),
because a model in training has to be called through its wrapper (DDP, DeepSpeed). Also, the
requests of a batch have separate settings and listeners. The comments about other libraries
describe transformers 5.23 and torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel

from finetune.modeling.attention import BY_DOCUMENT, ISOLATED
from finetune.runtime.parent_watchdog import progress


class BatchDecoding:
    """Greedy decoding of one batch, left-padded. Subclasses choose tokens in another way.

    Args:
        call: the model as it is to be called: itself, or its wrapper in training.
        prompts: token ids, at least one each.
        max_new_tokens: maximum tokens of each answer, its end included; 0 for no answer.
        stop_ids: tokens that end an answer.
        going: whether any rank continues, given whether this one does. Called before every forward
            except the first. Where weights are partitioned over ranks (ZeRO-3), all ranks must make
            the same number of forwards.

    Attributes:
        answers: token ids of each answer, with the end token if there is one.
        over: whether each answer is complete.
        ids: `(sequences, tokens)`, prompts and answers.
        cache: keys and values of `ids`, without the last token: it was chosen, but not read yet.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        prompts: Sequence[Sequence[int]],
        max_new_tokens: Sequence[int],
        stop_ids: Collection[int],
        going: Callable[[bool], bool] = bool,
    ) -> None:
        self.call = call
        self.prompts = prompts
        self.max_new_tokens = max_new_tokens
        self.stop_ids = stop_ids
        self.going = going
        self.answers: list[list[int]] = [[] for _ in prompts]
        self.over = [maximum == 0 for maximum in max_new_tokens]
        self.ids = torch.empty(0)
        self.cache: Any = None

    @torch.no_grad()
    def run(
        self, model: PreTrainedModel, pad_id: int, cache: DynamicCache | None = None
    ) -> list[list[int]]:
        """Decode until all answers are over.

        Args:
            model: what `call` runs.
            cache: keys and values of the beginning of the only prompt.

        Returns:
            `answers`: the tokens of `model.generate(do_sample=False)`.
        """
        longest = max(map(len, self.prompts))
        ids = torch.full((len(self.prompts), longest), pad_id)
        mask = torch.zeros_like(ids)
        for number, prompt in enumerate(self.prompts):
            ids[number, longest - len(prompt) :] = torch.tensor(list(prompt))
            mask[number, longest - len(prompt) :] = 1
        settings = GenerationConfig(
            do_sample=False,
            eos_token_id=sorted(self.stop_ids),
            pad_token_id=pad_id,
            repetition_penalty=1.0,  # unset, the model's own would be applied
            max_new_tokens=max(1, *self.max_new_tokens),
            use_cache=True,
        )
        model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=settings,
            custom_generate=self._loop,
            **({} if cache is None else {"past_key_values": cache}),
        )
        return self.answers

    def _loop(
        self,
        model: PreTrainedModel,
        ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **inputs: Any,
    ) -> torch.Tensor:
        lengths = zip(self.prompts, self.max_new_tokens, strict=True)
        last_position = max(len(prompt) + maximum for prompt, maximum in lengths) - 1
        last_logits = torch.tensor([-1], device=ids.device)
        given = inputs.get("past_key_values")
        cached_tokens = 0 if given is None else given.get_seq_length()
        new_tokens = ids.shape[1] - cached_tokens if cached_tokens else None
        first = True
        while first or self.going(not all(self.over)):
            progress.mark()
            prepared = model.prepare_inputs_for_generation(
                ids, next_sequence_length=new_tokens, is_first_iteration=first, **inputs
            )
            if "logits_to_keep" in prepared:  # a number; `let_choose_logits` expects positions
                prepared["logits_to_keep"] = last_logits
            outputs = self.call(**prepared, return_dict=True)
            inputs = model._update_model_kwargs_for_generation(outputs, inputs)
            # answers that are over stay in the batch
            if inputs.get("position_ids") is not None:
                inputs["position_ids"] = inputs["position_ids"].clamp(max=last_position)
            tokens = self.choose(logits_processor(ids, outputs.logits[:, -1].float()))
            for number, token in enumerate(tokens.tolist()):
                if not self.over[number]:
                    self.take(number, token)
            ids = torch.cat([ids, tokens[:, None]], dim=1)
            first = False
            new_tokens = 1
        self.ids = ids
        self.cache = inputs.get("past_key_values")
        return ids

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the next token of each sequence, `(sequences,)`, from scores `(sequences,
        vocabulary)`.
        """
        return scores.argmax(dim=-1)

    def take(self, number: int, token: int) -> None:
        """Append a token to an answer that is not over."""
        answer = self.answers[number]
        answer.append(token)
        self.over[number] = token in self.stop_ids or len(answer) >= self.max_new_tokens[number]


@contextmanager
def answering(wrapped: torch.nn.Module, model: PreTrainedModel) -> Iterator[None]:
    """Put a model in training into eval mode, with an attention that reads a cache, and restore
    both afterwards. `BatchDecoding` with a wrapped model needs it.
    """
    was_training, before = wrapped.training, model.config._attn_implementation
    own = before in (ISOLATED, BY_DOCUMENT)
    if own:
        softcapped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
        model.set_attn_implementation("eager" if softcapped else "sdpa")
    wrapped.eval()
    try:
        # Compiled layers would be compiled again for each shape of a batch. torch limits how often;
        # beyond the limit, training would continue with another kernel.
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        wrapped.train(was_training)
        if own:
            model.set_attn_implementation(before)
