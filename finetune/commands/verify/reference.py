"""The trained model: how it renders, what it answers, and how likely it finds the answers of
others.

One model is in memory at a time. The others are what the trained one would be with a fault of its
weights: without adapter, with other positions, and computed in the dtype that it was rounded to, it
is the same model, switched; for other numbers it is loaded again. What a model has said of an
answer is kept.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from finetune.commands.verify.evidence import Prompt, Said
from finetune.data.encoding.spans import ChatTemplate
from finetune.inference.decoding import answering, greedy_tokens
from finetune.inference.loading import Source, check_fit, end_ids, load_weights, with_adapter
from finetune.modeling.model_config import load_model_config, padding_id
from finetune.modeling.pretrained import DTYPES
from finetune.runtime import device as devices

BLOCK = 32  # weights with one scale in llama.cpp's simplest formats
MOST_TOGETHER = 4096  # tokens of the prompts that are answered together, padding among them


@dataclass(frozen=True)
class Weights:
    """Which model: the trained one, or one with a fault.

    Attributes:
        adapter: whether the adapter is on.
        scale: of what the adapter adds, times its own.
        dtype: the weights, adapter merged in, rounded to it; None: as they are.
        compute: dtype of the arithmetic; None: the reference's, or a wider one that holds `dtype`.
        bits: so many for each weight of a layer, rounded in blocks; None: as they are.
        rope: other parameters of the positions; None: the model's own.
    """

    adapter: bool = True
    scale: float = 1.0
    dtype: str | None = None
    compute: str | None = None
    bits: int | None = None
    rope: tuple[tuple[str, Any], ...] | None = None

    @property
    def stored(self) -> Weights:
        """Those that must be loaded for these: the others are one switch away.

        Rounded weights are loaded in a dtype that holds them: to be cast from it to theirs and back
        loses nothing.
        """
        return Weights(
            dtype=self.dtype, compute=None if self.dtype else self.compute, bits=self.bits
        )


TRAINED = Weights()


@dataclass
class Reference:
    """The model that was trained, with the tokenizer and template it was trained with."""

    source: Source
    tokenizer: Any
    device: torch.device
    dtype: str  # of the arithmetic
    trust_remote_code: bool
    template: ChatTemplate = field(init=False)
    _loaded: tuple[Weights, Any] | None = field(default=None, init=False)
    _switched: Weights = field(default=TRAINED, init=False)  # what the loaded one is switched to
    _known: dict[tuple[Any, ...], Said] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.template = ChatTemplate(self.tokenizer)
        self.config = load_model_config(self.source.base, trust_remote_code=self.trust_remote_code)
        self._rope = copy.deepcopy(getattr(self.config.get_text_config(), "rope_parameters", None))

    @property
    def base_dtype(self) -> str:
        """The dtype of the base's weights."""
        named = str(self.config.dtype or self.config.get_text_config().dtype).removeprefix("torch.")
        return named if named in DTYPES else "float32"

    def ids(self, text: str) -> tuple[int, ...]:
        """Of a rendered text."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    # ------------------------------------------------------------ models

    def model(self, weights: Weights = TRAINED) -> Any:
        """The model with these weights; the one before it is dropped, or switched where no other
        numbers are needed.
        """
        if self._loaded is None or self._loaded[0] != weights.stored:
            self._loaded = None
            gc.collect()
            devices.empty_cache(self.device)
            self._loaded = (weights.stored, self._load(weights.stored))
            self._switched = weights.stored
        model, before = self._loaded[1], self._switched
        if (weights.adapter, weights.scale) != (before.adapter, before.scale):
            _switch_adapter(model, weights.adapter, weights.scale / before.scale)
        if weights.rope != before.rope:
            self._switch_positions(model, weights.rope)
        if weights.compute != before.compute:
            _cast(model, self._arithmetic(weights))
        self._switched = weights
        return model

    def _arithmetic(self, weights: Weights) -> str:
        """The dtype that is computed in: the one that is asked for, or the reference's, widened to
        hold the weights.
        """
        if weights.compute is not None or weights.dtype is None:
            return weights.compute or self.dtype
        return str(torch.promote_types(DTYPES[self.dtype], DTYPES[weights.dtype])).removeprefix(
            "torch."
        )

    def _load(self, weights: Weights) -> Any:
        merged = self.source.adapter is not None and (
            weights.dtype is not None or weights.bits is not None
        )
        model = load_weights(
            Source(self.source.base, None) if merged else self.source,
            self.device,
            # Merged weights are rounded once, after the sum.
            self._arithmetic(replace(weights, compute=None) if merged else weights),
            trust_remote_code=self.trust_remote_code,
        )
        check_fit(model, self.tokenizer, self.source)
        if merged:
            assert self.source.adapter is not None
            model = with_adapter(model, self.source.adapter).merge_and_unload()
        if weights.dtype is not None:
            _cast(model, weights.dtype)
        if weights.bits is not None:
            _round_in_blocks(model, weights.bits)
        _cast(model, self._arithmetic(weights))
        return model.eval().requires_grad_(False)

    def _switch_positions(self, model: Any, rope: tuple[tuple[str, Any], ...] | None) -> None:
        """Put the rotary embedding of these parameters in the place of the one that is there."""
        config = copy.deepcopy(model.config)
        config.get_text_config().rope_parameters = dict(rope) if rope else self._rope
        for module in model.modules():
            if isinstance(rotary := getattr(module, "rotary_emb", None), torch.nn.Module):
                module.rotary_emb = type(rotary)(config=config.get_text_config()).to(self.device)
        # DeepSeek's attention is scaled by it when it is made
        if "mscale_all_dim" in (self._rope or {}):
            with torch.device("meta"):
                made = type(model)(config)
            for name, module in made.named_modules():
                if isinstance(scaling := getattr(module, "scaling", None), float):
                    model.get_submodule(name).scaling = scaling

    # ------------------------------------------------------------ answers

    def answers(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[tuple[int, ...]]:
        """Greedy, with the end token where there is one."""
        model = self.model()
        padding = padding_id(model.config, self.tokenizer)
        found: dict[int, tuple[int, ...]] = {}
        for batch in _batches(prompts):
            ids, most = [prompts[number].ids for number in batch], [max_new_tokens] * len(batch)
            with answering(model, model):
                made = greedy_tokens(
                    model, model, ids, most, stop_ids=self.stop_ids, pad_id=padding
                )
            found |= dict(zip(batch, map(tuple, made), strict=True))
        return [found[number] for number in range(len(prompts))]

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Every token that ends an answer."""
        model = self.model()
        return end_ids(
            self.tokenizer, model.generation_config, model.config.get_text_config().eos_token_id
        )

    def said(
        self, weights: Weights, prompt: Sequence[int], answer: Sequence[int], penalty: float = 1.0
    ) -> Said:
        """What a model says of an answer to a prompt, both as ids.

        Args:
            penalty: repetition penalty of the greedy choice, as transformers applies it; 1 for
                none.
        """
        key = (weights, tuple(prompt), tuple(answer), penalty)
        if key not in self._known:
            model = self.model(weights)
            # Arithmetic in few bits depends on the order of its sums: it is done as an engine does
            # it.
            logits_of = _one_by_one if weights.compute not in (None, "float32") else _at_once
            logits = logits_of(model, list(prompt), list(answer)).float()
            self._known[key] = _said(
                logits, list(prompt), list(answer), penalty, list(self.stop_ids)
            )
        return self._known[key]


def _batches(prompts: Sequence[Prompt]) -> Iterator[list[int]]:
    """Numbers of prompts that are answered together, those of like length."""
    batch: list[int] = []
    for number in sorted(range(len(prompts)), key=lambda number: len(prompts[number].ids)):
        if batch and (len(batch) + 1) * len(prompts[number].ids) > MOST_TOGETHER:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


@torch.no_grad()
def _at_once(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Logits of each token of an answer and of what follows it, `(answer + 1, vocabulary)`."""
    ids = torch.tensor([prompt + answer], device=model.device)
    # of a model that keeps all
    return model(ids, logits_to_keep=len(answer) + 1).logits[0][-len(answer) - 1 :]


@torch.no_grad()
def _one_by_one(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """The same, with one forward pass for the prompt and one for each token, as answers are
    generated.

    At once where the model has no cache of this name, as Mamba.
    """
    rows, past = [], None
    for ids in (prompt, *([token] for token in answer)):
        out = model(
            torch.tensor([ids], device=model.device),
            past_key_values=past,
            use_cache=True,
            logits_to_keep=1,
        )
        past = getattr(out, "past_key_values", None)
        if past is None:
            return _at_once(model, prompt, answer)
        rows.append(out.logits[0, -1])
    return torch.stack(rows)


def _said(
    logits: torch.Tensor, prompt: list[int], answer: list[int], penalty: float, ends: list[int]
) -> Said:
    numbers = logits.log_softmax(-1)
    choices = _penalised(logits, prompt, answer, penalty)
    best = choices.max(-1).values
    places = torch.arange(len(answer), device=logits.device)
    tokens = torch.tensor(answer, dtype=torch.long, device=logits.device)
    gaps = best[:-1] - choices[places, tokens]
    return Said(
        tuple(numbers[places, tokens].tolist()),
        tuple(gaps.tolist()),
        float(best[-1] - choices[-1, ends].max()),
    )


def _penalised(
    logits: torch.Tensor, prompt: list[int], answer: list[int], penalty: float
) -> torch.Tensor:
    """Scores of the greedy choice, `(answer + 1, vocabulary)`."""
    if penalty == 1.0:
        return logits
    scores = logits.clone()
    for place in range(len(scores)):
        seen = torch.tensor(sorted({*prompt, *answer[:place]}), device=logits.device)
        row = scores[place, seen]
        scores[place, seen] = torch.where(row < 0, row * penalty, row / penalty)
    return scores


def _cast(model: Any, dtype: str) -> None:
    """The parameters alone: engines keep the frequencies of the positions, which are buffers, in
    float32.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[dtype])


def _switch_adapter(model: Any, on: bool, factor: float) -> None:
    """Turn the adapter's layers on or off, and what they add times a factor."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for module in model.modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            module.enable_adapters(on)
        # Attention layers have a number of this name.
        if isinstance(scaling := getattr(module, "scaling", None), dict):
            scaling["default"] *= factor


@torch.no_grad()
def _round_in_blocks(model: Any, bits: int) -> None:
    """Each matrix of the layers to `bits` for a weight and a scale for 32 of them, as llama.cpp's
    Q8_0 and Q4_0 do.
    """
    outside = {id(model.get_input_embeddings())}
    for module in model.modules():
        if (
            not isinstance(module, torch.nn.Linear)
            or id(module) in outside
            or module.weight.shape[1] % BLOCK
        ):
            continue
        blocks = module.weight.data.float().reshape(-1, BLOCK)
        if bits == 8:
            scale = blocks.abs().amax(1, keepdim=True) / 127
            rounded = (blocks / scale.clamp_min(1e-30)).round().clamp(
                -127, 127
            ) * scale.half().float()
        else:
            # The block's largest by magnitude becomes -8, with its sign in the scale.
            largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
            scale = largest / -8
            safe = torch.where(scale == 0, torch.ones_like(scale), scale)
            rounded = (blocks / safe + 8.5).floor().clamp(0, 15).sub(8) * scale.half().float()
        module.weight.data = rounded.reshape(module.weight.shape).to(module.weight.dtype)
