"""The words of the base model's corpus: those of the shipped records, out of their sentences."""

from __future__ import annotations

import re
from functools import cache

from drawing import ANSWER, Draw
from networks_explain import FORMS, read_facts
from reasoning_texts import TEXTS as REASONING
from topology_texts import HEADINGS, NONE, NOT_REACHED, NOTHING_CUTS, REACHED, WITHOUT, YES_NO
from topology_texts import TEXTS as TOPOLOGY

UNITS = ("MB", "kB", "kbit", "Mbit", "Mbit/s", "Gbit/s", "ms", "us", "s", "km", "min", "%")


def shipped_texts(language: str) -> list[str]:
    """Every text of the shipped records in one language, without the blanks to fill: facts, forms,
    steps, headings.
    """
    facts = [fact.answer for fact in read_facts() if fact.language == language]
    forms = [form for kind in FORMS.values() for form in kind[language]]
    for texts in (*REASONING.values(), *TOPOLOGY.values()):
        one = (
            (*texts.questions_en, texts.steps_en)
            if language == "en"
            else (*texts.questions_zh, texts.steps_zh)
        )
        forms += one
    heads = [
        ANSWER[language],
        *HEADINGS[language],
        REACHED[language],
        NOT_REACHED[language],
        WITHOUT[language],
    ]
    heads += [NONE[language], NOTHING_CUTS[language], *YES_NO[language]]
    return [*facts, *(re.sub(r"\{\w+\}", " ", text) for text in (*forms, *heads))]


@cache
def words(language: str) -> tuple[str, ...]:
    """The words of the shipped texts. Chinese does not mark words: pieces of two to four characters
    stand for them.
    """
    text = "\n".join(shipped_texts(language))
    found = set(re.findall(r"[A-Za-z][A-Za-z-]*", text))
    for run in re.findall(r"[\u4e00-\u9fff]+", text):
        found |= {
            run[start : start + size] for size in (2, 3, 4) for start in range(0, len(run), size)
        }
    return tuple(sorted(found | {"<="}))


def word(draw: Draw, language: str) -> str:
    """A word, or a number with a unit."""
    if draw.chance(0.85):
        return draw.pick(words(language))
    unit = draw.pick(UNITS)
    return f"{draw.integer(1, 500)}{'' if unit == '%' else ' '}{unit}"


@cache
def terms() -> tuple[tuple[str, str], ...]:
    """English and Chinese names of the same things, where they differ."""
    facts = read_facts()
    pairs = {(one.term, other.term) for one, other in zip(facts[0::2], facts[1::2], strict=True)}
    return tuple(sorted(pair for pair in pairs if pair[0] != pair[1]))


@cache
def names_of_things(language: str) -> tuple[str, ...]:
    """The terms of the facts."""
    return tuple(fact.term for fact in read_facts() if fact.language == language)
