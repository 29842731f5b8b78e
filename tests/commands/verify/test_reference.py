"""A model that is switched is the one that would be loaded; answers that are made together are those made singly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from launching import ROOT

from finetune.commands.verify import reference
from finetune.commands.verify.conversations import choose
from finetune.commands.verify.reference import TRAINED, Reference, Weights
from finetune.inference.loading import Source, find_source, load_tokenizer_of

LINEAR = (("rope_type", "linear"), ("rope_theta", 100_000.0), ("factor", 4.0))
# One after another of the same reference: each leaves something that the next must not have.
SWITCHED = (
    TRAINED,
    Weights(adapter=False),
    Weights(scale=2.0),
    Weights(scale=0.3, rope=LINEAR),
    Weights(adapter=False, rope=LINEAR),
    TRAINED,
    Weights(dtype="float16"),
    Weights(dtype="float16", compute="float16"),
    Weights(dtype="float16"),
    Weights(bits=8),
    Weights(bits=8, rope=LINEAR),
    Weights(compute="float32"),
    TRAINED,
)
Make = Callable[..., Reference]


@pytest.fixture(scope="module")
def make(adapter: Path) -> Make:
    source = find_source(str(adapter), None)
    tokenizer = load_tokenizer_of(source, None, trust_remote_code=False)
    return lambda dtype="float32": Reference(source, tokenizer, torch.device("cpu"), dtype, trust_remote_code=False)


def loaded(weights: Weights) -> Weights:
    """All that only a load can give; so that nothing is cast afterwards."""
    return Weights(dtype=weights.dtype, compute=weights.compute, bits=weights.bits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_switched_says_what_is_loaded(dtype: str, make: Make, monkeypatch: pytest.MonkeyPatch):
    prompt, answer = list(range(100, 130)), list(range(200, 206))
    ours = make(dtype)
    said = [ours._known.clear() or ours.said(weights, prompt, answer) for weights in SWITCHED]
    monkeypatch.setattr(Weights, "stored", property(loaded))
    assert said == [make(dtype).said(weights, prompt, answer) for weights in SWITCHED]
    base = replace(ours, source=Source(ours.source.base, None))
    assert said[SWITCHED.index(Weights(adapter=False))] == base.said(TRAINED, prompt, answer)


def test_answers_made_together_are_those_made_singly(make: Make, monkeypatch: pytest.MonkeyPatch):
    ours = make()
    prompts = choose([str(ROOT / "data_samples" / "valid.jsonl")], ours.template, 8)
    together = ours.answers(prompts, 12)
    assert len({len(prompt.ids) for prompt in prompts}) > 4
    monkeypatch.setattr(reference, "MOST_TOGETHER", 1)
    assert together == ours.answers(prompts, 12)
