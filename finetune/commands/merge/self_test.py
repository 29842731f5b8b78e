"""The test that what was written answers as the adapter did: logits, tokens and template of the
files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from finetune.errors import FinetuneError

# Norm of the logits' difference over the norm of the logits. Adding before multiplying rounds
# differently from adding after it: once per element in float32. A 16-bit weight is also rounded to
# 8 (bfloat16) or 11 bits.
TOLERANCES = {
    "float32": 1e-4,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}
TEMPLATE_NAME = "chat_template.jinja"
TEXTS = (
    "What does a router do?",
    "请用一句话解释单点故障。",
    "Links and costs: A-B 3, B-C 4.\nAnswer: 7 ms, 99.5%",
    "  two spaces,\ttab\n\n10.0.0.0/8 — “quotes” ₂ 🙂 ｆｕｌｌ　ｗｉｄｔｈ",
    "def f(x):\n    return {'a': [x, 1e-3]}  # naïve façade",
)
RANDOM_PROMPTS, RANDOM_TOKENS = 2, 48


@dataclass(frozen=True)
class SelfTest:
    """What the test measured, over all prompts."""

    prompts: int  # how many, and `tokens` of them together
    tokens: int
    # norm of (merged - adapted) over the norm of the adapted logits; at most `tolerance`
    difference: float
    tolerance: float
    effect: float  # norm of (adapted - base) over the same: what the adapter changes
    agreement: float  # share of positions where merged and adapted take the same token
    texts: int  # how many texts went through the tokenizer and back with the same result
    rounding: Rounding | None = None  # where the adapter was trained on a quantized base


@dataclass(frozen=True)
class Rounding:
    """The effect of a quantized base's rounding on the adapted model."""

    trained_on: str  # nf4 or int8
    merged_into: str  # the same, or none: the base's own weights
    # norm of (logits on the other base - logits as merged) / norm of the merged model's logits
    difference: float
    agreement: float  # share of positions where both take the same token


def self_test_prompts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    """Return token ids: texts, a question as the chat template writes it, and random tokens of the
    whole vocabulary.
    """
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    question = [{"role": "user", "content": TEXTS[0]}]
    chat = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    prompts.append(tokenizer(chat, add_special_tokens=False)["input_ids"])
    size, chooser = model.config.get_text_config().vocab_size, torch.Generator().manual_seed(0)
    shape = (RANDOM_PROMPTS, RANDOM_TOKENS)
    prompts += torch.randint(size, shape, generator=chooser).tolist()
    return prompts


def load_written(folder: Path, **settings: Any) -> PreTrainedModel:
    """Load what was written by plain transformers, in float32 unless its `settings` name another
    dtype.
    """
    return AutoModelForCausalLM.from_pretrained(
        folder, **({"dtype": torch.float32} | settings)
    ).eval()


def logits(model: torch.nn.Module, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return the logits of each prompt: float32 `(tokens, vocabulary)` on the CPU."""
    device = next(model.parameters()).device
    with torch.no_grad():
        return [
            model(torch.tensor([ids], device=device)).logits[0].float().cpu() for ids in prompts
        ]


def distance(ours: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> float:
    """Return the norm of the difference over the norm of the reference; infinite if a logit is not
    finite.
    """
    difference = sum(
        float((a.double() - b.double()).square().sum())
        for a, b in zip(ours, reference, strict=True)
    )
    norm = sum(float(b.double().square().sum()) for b in reference)
    ratio = (difference / max(norm, torch.finfo(torch.float64).tiny)) ** 0.5
    return ratio if ratio == ratio else float("inf")


def agreement(ours: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> float:
    same = sum(
        int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in zip(ours, reference, strict=True)
    )
    return same / sum(map(len, reference))


def check_logits(test: SelfTest, dtype: str) -> None:
    """Raise FinetuneError unless the merged model computes what the adapted one did."""
    if not test.difference <= test.tolerance:
        raise FinetuneError(
            "self-test failed: logits of the merged model differ from the adapter's by"
            f" {test.difference:.1e} of their norm, {test.tolerance:.0e} is allowed in {dtype}",
            "merge",
            (
                "try --dtype float32; serve the adapter as it is meanwhile"
                if dtype != "float32"
                else "report this"
            ),
        )
    if test.effect > 0 and test.difference >= test.effect:
        raise FinetuneError(
            f"self-test failed: the adapter changes the logits by {test.effect:.1e} of their norm,"
            f" rounding the merged weights to {dtype} by {test.difference:.1e}: what it learned"
            " would be lost",
            "merge",
            "use --dtype float32, or serve the adapter as it is",
        )


def check_tokenizer(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    template: Path | None,
    *,
    trust_remote_code: bool,
) -> int:
    """Compare the written tokenizer with the one in use, and its chat template with the file
    `template` byte by byte if it exists; return how many texts went through.

    Raises:
        FinetuneError: another template, or other tokens or text for one of the texts.
    """
    written: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if written.chat_template != tokenizer.chat_template:
        raise _tokenizer_error("the chat template was written otherwise than it is")
    if (
        template is not None
        and template.is_file()
        and (folder / TEMPLATE_NAME).read_bytes() != template.read_bytes()
    ):
        raise _tokenizer_error(f"{TEMPLATE_NAME} is not the adapter's, byte by byte")
    turns = [{"role": "user", "content": TEXTS[0]}, {"role": "assistant", "content": TEXTS[1]}]
    texts = [*TEXTS, tokenizer.apply_chat_template(turns, tokenize=False)]
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        if written(text)["input_ids"] != ids or written.decode(ids) != tokenizer.decode(ids):
            raise _tokenizer_error(f"it reads {text[:40]!r} otherwise than before")
    return len(texts)


def _tokenizer_error(what: str) -> FinetuneError:
    return FinetuneError(
        f"self-test failed: {what}", "tokenizer", "report this with the tokenizer's name"
    )
