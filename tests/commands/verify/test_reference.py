"""The reference: its scores with and without adapter, and with simulated rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig

from finetune.commands.verify.reference import Reference
from finetune.inference.loading import Source, find_source, load_tokenizer_of

PAIR = (tuple(range(100, 130)), tuple(range(200, 206)))
Make = Callable[..., Reference]


@pytest.fixture(scope="module")
def make(adapter: Path) -> Make:
    source = find_source(str(adapter), None)
    tokenizer = load_tokenizer_of(source, None, trust_remote_code=False)
    return lambda dtype="float32": Reference(
        source, tokenizer, torch.device("cpu"), dtype, trust_remote_code=False
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_adapter_is_switched_off_and_on(dtype: str, make: Make):
    ours = make(dtype)
    base = replace(ours, source=Source(ours.source.base, None))
    tuned = ours.scores([PAIR])
    assert ours.scores([PAIR], base=True) == base.scores([PAIR]) == base.scores([PAIR], base=True)
    assert ours.scores([PAIR]) == tuned != base.scores([PAIR])


def test_scores_are_the_log_probabilities_of_a_forward_pass(make: Make):
    ours, (prompt, answer) = make(), PAIR
    (scored,) = ours.scores([PAIR])
    with torch.no_grad():
        logits = ours.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 :]
    logprobs = logits.log_softmax(-1)
    assert scored.logprobs == pytest.approx(
        [float(logprobs[place, token]) for place, token in enumerate(answer)], abs=1e-5
    )
    assert scored.gaps == pytest.approx(
        [float(logits[place].max() - logits[place, token]) for place, token in enumerate(answer)],
        abs=1e-4,
    )
    ends = float(logits[-1].max() - logits[-1, list(ours.stop_ids)].max())
    assert scored.end_gap == pytest.approx(ends, abs=1e-4)


def test_rounding_is_simulated_in_float32(make: Make):
    """Its error grows with the bits that a dtype lacks, and every weight is one of the dtype."""

    def error(dtype: str) -> float:
        (rounded,) = make().rounded_scores([PAIR], dtype)
        return max(abs(a - b) for a, b in zip(rounded.logprobs, exact.logprobs, strict=True))

    (exact,) = make().scores([PAIR])
    assert 0 < error("float32") <= error("float16") < error("bfloat16") < 1
    ours = make()
    ours.rounded_scores([PAIR], "bfloat16")
    for name, parameter in ours.model.named_parameters():
        assert parameter.dtype == torch.float32, name
        assert torch.equal(parameter, parameter.bfloat16().float()), name


def test_a_model_without_a_cache_of_keys_is_scored(make: Make, tmp_path: Path):
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=512, hidden_size=16, state_size=4, num_hidden_layers=2, initializer_range=0.5
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    mamba = replace(make(), source=Source(str(tmp_path), None))
    (exact,), (rounded,) = mamba.scores([PAIR]), mamba.rounded_scores([PAIR], "bfloat16")
    assert rounded.logprobs == pytest.approx(exact.logprobs, abs=0.5) and rounded != exact
