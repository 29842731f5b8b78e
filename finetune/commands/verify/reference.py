"""The trained model: how it renders, what it answers, and how likely it finds other answers.

It is loaded once. Its own answers are computed in `--dtype`; then its weights are held in float32,
and all answers are scored by the same arithmetic on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper

from finetune.commands.verify.evidence import Ids, ScoredAnswer
from finetune.data.encoding.spans import ChatTemplate
from finetune.inference.decoding import BatchDecoding
from finetune.inference.loading import Source, check_fit, end_ids, load_weights
from finetune.modeling.model_config import load_model_config, padding_id
from finetune.modeling.pretrained import DTYPES


@dataclass
class Reference:
    """The model that was trained, with the tokenizer and template it was trained with."""

    source: Source
    tokenizer: Any
    device: torch.device
    dtype: str  # that its own answers are computed in
    trust_remote_code: bool

    def __post_init__(self) -> None:
        self.template = ChatTemplate(self.tokenizer)
        self.config = load_model_config(self.source.base, trust_remote_code=self.trust_remote_code)

    @property
    def base_dtype(self) -> str:
        """The dtype of the base's weights."""
        named = str(self.config.dtype or self.config.get_text_config().dtype).removeprefix("torch.")
        return named if named in DTYPES else "float32"

    @cached_property
    def model(self) -> Any:
        model = load_weights(
            self.source, self.device, self.dtype, trust_remote_code=self.trust_remote_code
        )
        check_fit(model, self.tokenizer, self.source)
        return model

    @cached_property
    def stop_ids(self) -> Ids:
        """Every token that ends an answer."""
        eos = self.model.config.get_text_config().eos_token_id
        return end_ids(self.tokenizer, self.model.generation_config, eos)

    def answer(self, prompt: Ids, max_new_tokens: int) -> Ids:
        """Return the greedy answer, with the end token if it ends."""
        decoding = BatchDecoding(self.model, [prompt], [max_new_tokens], self.stop_ids)
        (answer,) = decoding.run(self.model, padding_id(self.model.config, self.tokenizer))
        return tuple(answer)

    def scores(
        self, answered: Iterable[tuple[Ids, Ids]], *, base: bool = False
    ) -> list[ScoredAnswer]:
        """Score each answer to a prompt, both as ids, in float32.

        Args:
            base: score without the adapter.
        """
        model = self.model.float()
        _enable_adapters(model, not base)
        scored = [_score(model, *pair, self.stop_ids) for pair in answered]
        _enable_adapters(model, True)
        return scored

    def rounded_scores(self, answered: Iterable[tuple[Ids, Ids]], dtype: str) -> list[ScoredAnswer]:
        """Return the scores of an engine that rounds every intermediate result to this dtype.

        The merged weights are rounded to it and to the base's dtype, in which `merge` adds the
        adapter. Afterwards the weights stay rounded.

        Engines sum in float32 and round a layer's output, so this is the error that the dtype
        itself makes. It is simulated in float32. If the model were cast to the dtype, the error
        would depend on the kernels of the machine.
        """
        model = self.model.float()
        for module in model.modules():
            if isinstance(module, BaseTunerLayer):
                module.merge()
        for parameter in model.parameters():
            merged = _rounded(parameter.data, DTYPES[self.base_dtype])
            parameter.data = _rounded(merged, DTYPES[dtype])
        hooks = [
            module.register_forward_hook(lambda *call: _rounded(call[-1], DTYPES[dtype]))
            for module in model.modules()
        ]
        try:
            return self.scores(answered)
        finally:
            for hook in hooks:
                hook.remove()


def _enable_adapters(model: Any, enabled: bool) -> None:
    for module in model.modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            module.enable_adapters(enabled)


def _rounded(output: Any, dtype: torch.dtype) -> Any:
    """Round the floating-point tensors of a module's output to a dtype, and keep their dtype."""
    if isinstance(output, torch.Tensor) and output.is_floating_point():
        return output.to(dtype).to(output.dtype)
    if type(output) is tuple:  # cosines and sines of the positions
        return tuple(_rounded(part, dtype) for part in output)
    return output


@torch.no_grad()
def _score(model: Any, prompt: Ids, answer: Ids, stop_ids: Ids) -> ScoredAnswer:
    ids = torch.tensor([prompt + answer], device=model.device)
    # Logits for each answer token and for the token after it, even if the model returns all logits.
    logits = model(ids, logits_to_keep=len(answer) + 1, use_cache=False).logits[0]
    logits = logits[-len(answer) - 1 :].float()
    best, total = logits.max(-1).values, logits.logsumexp(-1)
    tokens = torch.tensor(answer, dtype=torch.long, device=logits.device)
    chosen = logits[:-1].gather(1, tokens[:, None])[:, 0]
    return ScoredAnswer(
        tuple((chosen - total[:-1]).tolist()),
        tuple((best[:-1] - chosen).tolist()),
        float(best[-1] - logits[-1, list(stop_ids)].max()),
    )
