"""How tokens are drawn, and how tokens become text: against transformers' own processors and
decoding.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from launching import ROOT
from transformers import (
    AutoTokenizer,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from finetune.errors import ConfigError
from finetune.inference.answer import AnswerText
from finetune.inference.choose_tokens import RunningSequence, adjust, gumbel
from finetune.inference.sampling import Draws, Sampling

VOCABULARY = 11
TOKENIZER = AutoTokenizer.from_pretrained(ROOT / "data_samples" / "tiny-qwen3")


def make_sequence(sampling: Sampling, history: tuple[int, ...] = (1, 2)) -> RunningSequence:
    return RunningSequence(sampling, Draws(sampling.seed), history, len(history))


def transformers_scores(scores, sampling, history):
    """What transformers' sampling draws from."""
    ids, scores = torch.tensor([history]), scores.clone()
    for processor in (
        RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
        TemperatureLogitsWarper(sampling.temperature),
        TopKLogitsWarper(sampling.top_k or VOCABULARY),
        TopPLogitsWarper(sampling.top_p),
    ):
        scores = processor(ids, scores)
    return scores


# Apart from one another, so that no two are equal after the penalty and the temperature.
LOGITS = st.permutations([-7.5, -4.1, -2.2, -1.3, -0.4, 0.3, 0.9, 1.6, 2.5, 3.9, 6.2])


@settings(deadline=None, max_examples=80)
@given(
    logits=LOGITS,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.integers(0, VOCABULARY),
    top_p=st.floats(0.05, 1.0),
    penalty=st.sampled_from([1.0, 1.3]),
)
def test_the_same_tokens_are_left_as_in_transformers(logits, temperature, top_k, top_p, penalty):
    kinds = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    sampling = Sampling(**kinds, repetition_penalty=penalty, seed=1)
    history = (3, 3, 7)
    sequence = make_sequence(sampling, history)
    scores = torch.tensor([logits])
    before_top_p = transformers_scores(scores, sampling.changed(top_p=1.0), history)
    held = before_top_p.softmax(-1).sort(descending=True).values[0].cumsum(0)
    assume(float((held - top_p).abs().min()) > 1e-4)  # on the edge, rounding decides
    ours = adjust(scores.clone(), [sequence]) - gumbel([sequence.draws.key(0)], scores)
    theirs = transformers_scores(scores, sampling, history)
    assert torch.equal(ours.isinf(), theirs.isinf())
    kept = ~theirs.isinf()
    assert torch.allclose(ours[kept], theirs[kept], atol=1e-4)


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=5, top_p=0.9)]
)
def test_draws_follow_the_distribution(sampling: Sampling):
    """Chi-squared of 20,000 draws with fixed seeds against transformers' probabilities."""
    scores = torch.linspace(-1.5, 1.5, VOCABULARY)[None]
    draws = 20_000
    sequences = [make_sequence(sampling.changed(seed=seed)) for seed in range(draws)]
    chosen = adjust(scores.repeat(draws, 1), sequences).argmax(-1)
    drawn = chosen.bincount(minlength=VOCABULARY).double()
    expected = transformers_scores(scores, sampling, (1, 2)).softmax(-1)[0].double() * draws
    assert bool((drawn[expected == 0] == 0).all())
    used = expected > 0
    statistic = float(((drawn[used] - expected[used]) ** 2 / expected[used]).sum())
    freedom = int(used.sum()) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)  # five standard deviations


def test_positions_and_tokens_draw_independently():
    like = torch.zeros(1, 1000)
    first, second = (gumbel([Draws(7).key(position)], like)[0] for position in (0, 1))
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.1
    assert abs(float(torch.corrcoef(torch.stack([first[:-1], first[1:]]))[0, 1])) < 0.1
    big = gumbel([Draws(seed).key(0) for seed in range(200)], torch.zeros(1, 5000))
    assert bool(big.isfinite().all())
    assert float(big.mean()) == pytest.approx(0.5772, abs=0.01)  # Euler's constant
    assert float(big.std()) == pytest.approx(math.pi / math.sqrt(6), abs=0.01)


def test_values_out_of_range_are_refused():
    for name, value in (
        ("temperature", math.nan),
        ("top_p", 0),
        ("top_k", -1),
        ("max_new_tokens", 0),
        ("repetition_penalty", 0),
        ("seed", 2**63),
        ("stop", ("",)),
    ):
        with pytest.raises(ConfigError, match=name):
            Sampling(**{name: value})


def test_greedy_sequences_keep_their_logits_beside_drawing_ones():
    scores = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(0))
    each = (Sampling(), Sampling(temperature=1.0, seed=2), Sampling())
    sequences = list(map(make_sequence, each))
    adjusted = adjust(scores, sequences)
    assert torch.equal(adjusted[[0, 2]], scores[[0, 2]]) and not torch.equal(adjusted[1], scores[1])
    assert torch.equal(adjust(scores[1:2], sequences[1:2])[0], adjusted[1])
    with pytest.raises(ValueError, match="logits of 3 sequences for 1"):
        adjust(scores, sequences[:1])
    assert Draws(None).seed != Draws(None).seed


@settings(deadline=None, max_examples=80)
@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30), st.integers(1, 4))
def test_pieces_are_the_whole_text(ids: list[int], step: int):
    """Whatever the tokens, broken characters among them."""
    text = AnswerText(TOKENIZER)
    pieces = [text.add(ids[at : at + step]) for at in range(0, len(ids), step)] + [text.finish()]
    whole = TOKENIZER.decode(ids, skip_special_tokens=True)
    assert "".join(pieces) == text.text
    # bytes that are no character: replaced, here or there
    assert text.text == whole or "\ufffd" in whole


@settings(deadline=None, max_examples=60)
@given(st.text(st.sampled_from("aé中文👩‍🚀🇨🇳ü\n .a"), max_size=30))
def test_no_character_is_ever_broken(message: str):
    ids = TOKENIZER(message, add_special_tokens=False)["input_ids"]
    text = AnswerText(TOKENIZER)
    pieces = [text.add([token]) for token in ids] + [text.finish()]
    assert "\ufffd" not in text.text
    assert "".join(pieces) == text.text == TOKENIZER.decode(ids, skip_special_tokens=True)


def test_a_character_that_max_tokens_cuts_is_left_out():
    ids = TOKENIZER("an answer 👩", add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(ids[:-1]).endswith("\ufffd"), "the last character has several tokens"
    text = AnswerText(TOKENIZER)
    pieces = [text.add(ids[:-1]), text.finish(is_cut=True)]
    assert "".join(pieces) == text.text == "an answer "


@settings(deadline=None, max_examples=100)
@given(
    st.text(st.sampled_from("ab\n中"), max_size=20),
    st.lists(st.text(st.sampled_from("ab\n中"), min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_texts_cut_where_they_first_come(message: str, stops: list[str]):
    ids = TOKENIZER(message, add_special_tokens=False)["input_ids"]
    whole = TOKENIZER.decode(ids, skip_special_tokens=True)
    text = AnswerText(TOKENIZER, stops)
    pieces = []
    for token in ids:
        pieces.append(text.add([token]))
        if text.stopped:
            break
    pieces.append(text.finish())
    assert text.stopped == any(stop in whole for stop in stops)
    assert "".join(pieces) == text.text and whole.startswith(text.text)
    assert not any(stop in text.text for stop in stops)
    rest = whole[len(text.text) :]
    assert rest.startswith(tuple(stops)) if text.stopped else not rest
