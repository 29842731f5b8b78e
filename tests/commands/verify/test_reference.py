"""The reference: its scores with and without adapter, and with simulated rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from finetune.commands.verify.evidence import ScoredAnswer
from finetune.inference.loading import Source

PAIR = (tuple(range(100, 130)), tuple(range(200, 206)))


def test_the_adapter_is_switched_off_and_on(make):
    ours = make()
    base = replace(ours, source=Source(ours.source.base, None))
    tuned, prompt = ours.scores([PAIR]), torch.tensor([PAIR[0]])
    with torch.no_grad():
        logits = ours.model(prompt).logits
    assert ours.scores([PAIR], base=True) == base.scores([PAIR]) == base.scores([PAIR], base=True)
    with torch.no_grad():
        assert torch.equal(ours.model(prompt).logits, logits)
    assert ours.scores([PAIR]) == tuned != base.scores([PAIR])


def test_scores_are_the_log_probabilities_of_a_forward_pass(make):
    ours, (prompt, answer) = make(), PAIR
    (scored,) = ours.scores([PAIR])
    with torch.no_grad():
        logits = ours.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 :]
    places, tokens = torch.arange(len(answer)), torch.tensor(answer)
    chosen = logits[places, tokens]
    expected = logits.log_softmax(-1)[places, tokens].tolist()
    assert scored.logprobs == pytest.approx(expected, abs=1e-5)
    assert scored.gaps == pytest.approx((logits[:-1].max(-1).values - chosen).tolist(), abs=1e-4)
    ends = float(logits[-1].max() - logits[-1, list(ours.stop_ids)].max())
    assert scored.end_gap == pytest.approx(ends, abs=1e-4)


def test_rounding_is_simulated_in_float32(make):
    """Its error grows with the bits that a dtype lacks, and every weight is one of the dtype."""
    (exact,) = make().scores([PAIR])
    scores = {}
    for dtype in ("float32", "float16", "bfloat16"):
        ours = make()
        (scores[dtype],) = ours.rounded_scores([PAIR], dtype)

    def error(reference: ScoredAnswer, dtype: str) -> float:
        pairs = zip(reference.logprobs, scores[dtype].logprobs, strict=True)
        return max(abs(a - b) for a, b in pairs)

    assert error(exact, "float32") > 0, "the merged weights have the base's dtype"
    of_float16, of_bfloat16 = (error(scores["float32"], name) for name in ("float16", "bfloat16"))
    assert 0 < of_float16 < of_bfloat16 < 1
    for name, parameter in ours.model.named_parameters():
        assert parameter.dtype == torch.float32, name
        assert torch.equal(parameter, parameter.bfloat16().float()), name
