"""Words, n-grams, scripts and MinHash against plain Python."""

from __future__ import annotations

import operator
import random
import re

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.commands.inspect.audit import _earliest
from finetune.commands.inspect.ngrams import BANDS, SCRIPTS, band_keys, words_of


def plain_words(text: str) -> list[str]:
    """Han, kana and Thai by the character; what else Python takes for a word (without its
    underscore), and marks.
    """
    alone = "\u4e00-\u9fff\u3040-\u30ff\u0e00-\u0e7f"
    return re.findall(rf"[{alone}]|[^\W_{alone}]+", text.lower())


TEXTS = st.lists(
    st.text(st.sampled_from("abAB 1,.\n-什么器のЖé"), max_size=40), min_size=1, max_size=6
)


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.integers(1, 4))
def test_ngrams_are_those_of_a_plain_loop(texts: list[str], length: int):
    grams, owners = words_of(texts).ngrams(length)
    expected = [
        (number, tuple(words[at : at + length]))
        for number, words in enumerate(map(plain_words, texts))
        for at in range(len(words) - length + 1)
    ]
    assert owners.tolist() == [number for number, _ in expected]
    named = {gram: words for gram, (_, words) in zip(grams.tolist(), expected, strict=True)}
    assert [named[gram] for gram in grams.tolist()] == [words for _, words in expected]
    assert len(named) == len({words for _, words in expected}), "different words, different hashes"


def test_scripts():
    texts = "What is it?|什么是路由器 hub|ルーターとは何ですか|라우터|12 + 3|"
    found = " ".join(SCRIPTS[number] for number in words_of(texts.split("|")).scripts)
    assert found == "Latin Chinese Japanese Korean none none"


def test_near_texts_share_bands_as_often_as_their_likeness_says():
    generator = random.Random(0)
    words = [f"word{number}" for number in range(3000)]
    for likeness in (0.3, 0.8):
        common, pairs = round(200 * 2 * likeness / (1 + likeness)), []
        for _ in range(150):
            text, other = (generator.choices(words, k=200) for _ in range(2))
            pairs += [" ".join(text), " ".join(text[:common] + other[common:])]
        rows, keys = band_keys(words_of(pairs))
        assert rows.tolist() == list(range(300))
        share = np.mean([(one == other).any() for one, other in keys.reshape(-1, 2, BANDS)])
        assert abs(share - (1 - (1 - likeness**8) ** 14)) < 0.1
    assert band_keys(words_of(["too few words", "of five words is enough"]))[0].tolist() == [1]


ROWS = st.lists(
    st.lists(st.integers(0, 3), min_size=BANDS, max_size=BANDS), min_size=1, max_size=12
)


@settings(max_examples=50, deadline=None)
@given(ROWS)
def test_the_earliest_with_a_band_in_common(rows: list[list[int]]):
    expected = [
        next(n for n, other in enumerate(rows) if any(map(operator.eq, row, other))) for row in rows
    ]
    assert _earliest(np.array(rows, dtype=np.uint64)).tolist() == expected
