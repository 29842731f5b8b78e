"""Texts, curves and the edges of fields stand out from what they are on: WCAG 2.2, criteria 1.4.3
and 1.4.11.
"""

from __future__ import annotations

import re

import pytest
from launching import ROOT

TEXT, SHAPE = 4.5, 3.0
# Style sheet -> least ratio, colours, and what they are on. Names of the sheets' variables.
PAIRS = {
    "commands/report/page.css": [
        (TEXT, "ink soft good bad warn", "page card"),
        (TEXT, "s0 s1 s2 s3 s4 s5", "card"),
        (TEXT, "bad", "bad-fill"),
        (TEXT, "ink", "warn-fill"),
    ],
    "commands/serve/static/style.css": [
        (TEXT, "ink soft accent bad", "ground raised sunk"),
        (TEXT, "ink accent", "bubble code"),
        (TEXT, "accent-ink", "accent"),
        (SHAPE, "edge", "ground raised"),
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


@pytest.mark.parametrize("sheet", PAIRS)
def test_every_theme_can_be_read(sheet: str) -> None:
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)  # WCAG's own example
    css = (ROOT / "finetune" / sheet).read_text(encoding="utf-8")
    blocks = re.findall(r":root[^{]*\{([^}]*)\}", css)
    themes = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in blocks]
    themes = [theme for theme in themes if "ink" in theme]
    assert len(themes) >= 2, "light and dark"
    for theme in themes:
        for least, colours, grounds in PAIRS[sheet]:
            for colour in colours.split():
                for ground in grounds.split():
                    assert contrast(theme[colour], theme[ground]) >= least, (colour, ground)
    # What would be paler than its colour says; opacity 0 hides what a pointer or the keyboard then
    # shows.
    paler = r"([^{}]+)\{[^}]*(?:color: var\(--soft\)|::placeholder)[^}]*opacity: 0?\.\d+"
    assert re.findall(paler, css) == []
