"""A report in a real browser: on a phone nothing is cut, and what scrolls does so by the
keyboard.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import NEEDS_CHROMIUM, Page, browser
from fake_runs import make_run

from finetune.__main__ import main as finetune

pytestmark = NEEDS_CHROMIUM


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("report") / ("a-long-name-of-a-run-" * 4)
    make_run(folder, steps=100, state="failed", exit_code=1)
    assert finetune(["report", str(folder)]) == 0
    with browser() as tab:
        tab.call("Page.navigate", url=f"file://{folder}/report.html")
        tab.wait("document.readyState === 'complete' && document.querySelector('main') !== null")
        yield tab


@pytest.mark.parametrize("width", [320, 800])
def test_nothing_sticks_out(page: Page, width: int):
    page.size(width, 700, phone=width < 800)
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    cut = """[...document.querySelectorAll('h1, h2, p, dt, dd, figcaption, pre, td, th')].filter(
        (node) => !node.closest('.scroll') && node.getBoundingClientRect().right > innerWidth + 1
    ).map((node) => node.innerText)"""
    assert page.run(cut) == []


def test_labels_of_charts_can_be_read_on_a_phone(page: Page):
    page.size(360, 700, phone=True)
    labels = """[...document.querySelectorAll('svg text')].map((node) => {
        const t = node.getBoundingClientRect(), s = node.ownerSVGElement.getBoundingClientRect();
        return [t.height, t.left >= s.left - 1 && t.right <= s.right + 1]; })"""
    heights, inside = zip(*page.run(labels), strict=True)
    assert min(heights) >= 11 and all(inside)  # of the line; its letters have 10 pixels


def test_a_wide_table_scrolls_by_the_keyboard(page: Page):
    page.size(320, 700)
    page.run("document.activeElement.blur()")
    nodes = "[...document.querySelectorAll('.scroll, summary')]"
    wide = f"{nodes}.filter((node) => node.scrollWidth > node.clientWidth).length"
    reached = set()
    for _ in range(20):
        page.press("Tab")
        reached.add(page.run(f"{nodes}.indexOf(document.activeElement)"))
    assert len(reached - {-1}) >= page.run(wide)
