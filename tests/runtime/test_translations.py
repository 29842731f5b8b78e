"""Texts: the catalogue fits the English, and a text without a translation is shown in English."""

from __future__ import annotations

import re

import translations

from finetune.runtime.language import _, speaking


def placeholders(text: str) -> set[str]:
    return set(re.findall(r"\{(\w*)[^{}]*\}", text))


def test_a_translation_has_the_placeholders_of_its_text():
    wrong = [
        message.id
        for message in translations.read()
        if message.id
        and message.string
        and placeholders(message.id) != placeholders(message.string)
    ]
    assert wrong == []


def test_the_compiled_catalogue_is_current():
    written = translations.CATALOGUE.with_suffix(".mo").read_bytes()
    assert written == translations.compiled(translations.read()), "run: make translations"


def test_a_text_without_translation_is_english():
    text = "a text that nobody has translated: {count}"
    with speaking("zh"):
        assert _(text).format(count=3) == "a text that nobody has translated: 3"
        assert _("fine-tuning") == "微调"
    assert _("fine-tuning") == "fine-tuning"


def test_nearly_everything_is_translated():
    """A new text may wait for its Chinese; that a whole command lost it would be a fault of the
    extraction.
    """
    found, catalogue = translations.texts(), translations.read()
    translated = sum(bool((message := catalogue.get(text)) and message.string) for text in found)
    assert len(found) > 300 and translated > 0.8 * len(found)
