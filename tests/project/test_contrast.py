"""Texts, curves and the edges of fields stand out from what they are on: WCAG 2.2, criteria 1.4.3
and 1.4.11.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import ROOT

REPORT = ROOT / "finetune/commands/report/page.css"
CHAT = ROOT / "finetune/commands/serve/static/style.css"
TEXT, SHAPE = 4.5, 3.0
# Style sheet -> (colour, what it is on, least ratio). Names of the sheets' variables.
PAIRS = {
    REPORT: [
        *(
            (ink, ground, TEXT)
            for ink in ("ink", "soft", "good", "bad", "warn")
            for ground in ("page", "card")
        ),
        *((f"s{number}", "card", TEXT) for number in range(6)),
        *(("bad", "bad-fill", TEXT), ("ink", "warn-fill", TEXT)),
    ],
    CHAT: [
        *(
            (ink, ground, TEXT)
            for ink in ("ink", "soft", "accent", "bad")
            for ground in ("ground", "raised", "sunk")
        ),
        *((ink, ground, TEXT) for ink in ("ink", "accent") for ground in ("bubble", "code")),
        *(("accent-ink", "accent", TEXT), ("edge", "ground", SHAPE), ("edge", "raised", SHAPE)),
    ],
}


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_ratio_is_that_of_wcag() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    # the grey that just fails
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("sheet", PAIRS, ids=lambda sheet: sheet.parent.name)
def test_every_theme_can_be_read(sheet: Path) -> None:
    css = sheet.read_text(encoding="utf-8")
    blocks = [
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        for block in re.findall(r":root[^{]*\{([^}]*)\}", css)
    ]
    themes = [block for block in blocks if "ink" in block]
    assert len(themes) >= 2, "light and dark"
    for theme in themes:
        for colour, ground, least in PAIRS[sheet]:
            assert contrast(theme[colour], theme[ground]) >= least, (colour, ground)
    # What would be paler than its colour says; opacity 0 hides what a pointer or the keyboard then
    # shows.
    paler = re.findall(
        r"([^{}]+)\{[^}]*(?:color: var\(--soft\)|::placeholder)[^}]*opacity: 0?\.\d+", css
    )
    assert paler == []
