"""Texts: the catalogue fits the English and is current."""

from __future__ import annotations

import re

import translations
from site_catalogues import MESSAGES, read_catalogue


def test_the_catalogue_fits_and_is_current():
    def placeholders(text: str) -> set[str]:
        return set(re.findall(r"\{(\w*)[^{}]*\}", text))

    catalogue = read_catalogue(MESSAGES)
    translated = [message for message in catalogue if message.id and message.string]
    wrong = [m.id for m in translated if placeholders(m.id) != placeholders(m.string)]
    assert wrong == []
    written = MESSAGES.with_suffix(".mo").read_bytes()
    assert written == translations.compiled(catalogue), "run: make translations"
    # A new text may wait for its Chinese; that a whole command lost it would be a fault of the
    # extraction.
    found, ids = translations.texts(), {message.id for message in translated}
    assert len(found) > 300 and sum(text in ids for text in found) > 0.8 * len(found)
