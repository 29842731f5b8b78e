"""The page in a real browser: what a user does, and what an attacker's text cannot."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from browser import NEEDS_CHROMIUM, Page, browser
from serve_helpers import Served, stub_server
from xss_corpus import CORPUS, GROWING

pytestmark = NEEDS_CHROMIUM
LAST = "document.querySelector('.turn:last-child"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with stub_server() as server:
        yield server


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with browser() as page:
        yield page


@pytest.fixture
def page(tab: Page, served: Served) -> Page:
    tab.size(1100, 760)
    tab.open(served.url)
    tab.run("localStorage.clear(); sessionStorage.clear()")
    tab.console, tab.violations, tab.requests, tab.dialogs = [], [], [], []
    tab.open(served.url)
    return tab


def send(page: Page, text: str) -> None:
    page.run("byId('question').focus()")
    page.type(text)
    page.press("Enter")


def ask(page: Page, text: str) -> str:
    """Type a question, send it with Enter, and wait for the answer's text."""
    send(page, text)
    page.wait("state.running === null && state.turns.at(-1).role === 'assistant'")
    return page.run(f"{LAST} .body').innerText")


def test_types_streams_stops_and_goes_on(page: Page, served: Served):
    assert ask(page, "What is a router?") == "What is a router?"
    assert ask(page, "你好，世界 👋") == "你好，世界 👋"
    assert page.run("document.querySelectorAll('.turn').length") == 4
    send(page, "slow 400")
    words = f"({LAST}.assistant .body').innerText.match(/word/g) || []).length"
    early = page.wait(words)
    page.wait(f"{words} > {early}")  # it grows
    assert page.run("!byId('stop').hidden && byId('send').hidden")
    assert served.health()["workers"][0]["active"] == 1
    page.click("#stop")
    page.wait("state.running === null")
    assert page.run(f"{LAST} .note').textContent") == "stopped"
    assert 0 < page.run("state.turns.at(-1).content.split(' ').length") < 400
    send(page, "slow 400")
    page.wait("state.turns.at(-1).content.includes('word1')")
    page.press("Escape")
    page.wait("fetch('/health').then((r) => r.json()).then((h) => h.workers[0].active === 0)")
    assert page.console == [] and page.violations == []


def test_regenerates_edits_and_begins_anew_and_says_errors(page: Page):
    ask(page, "first")
    page.run("state.turns.at(-1).content = 'changed by the test'")
    page.click(".turn:last-child .foot button:last-child")
    page.wait("state.running === null && state.turns.at(-1).content === 'first'")
    assert page.run("state.turns.length") == 2
    page.click(".turn.user .foot button:last-child")
    assert page.run("byId('question').value") == "first" and page.run("state.turns.length") == 0
    page.type(" again")
    page.press("Enter")
    page.wait("state.running === null && state.turns.at(-1).content === 'first again'")
    page.click("#new")
    assert page.run("state.turns.length") == 0 and page.run("!byId('welcome').hidden")
    for question, note in (("fail please", "failed"), ("refuse this", "too long")):
        ask(page, question)
        assert note in page.run(f"{LAST} .note').textContent")
    assert page.run(f"{LAST} .foot').innerText.includes('Try again')")


def test_settings_reach_the_request(page: Page):
    page.click("#settings-open")
    settings = {"max_tokens": 2, "temperature": 0.5, "seed": 7}
    for name, value in {"system": "be brief", **settings}.items():
        page.run(f"byId('{name}').focus()")
        page.type(str(value))
    page.press("Tab")
    page.press("Escape")
    messages = [{"role": "system", "content": "be brief"}]
    expected = {"model": "stub", "stream": True, "messages": messages, **settings}
    assert json.loads(page.run("JSON.stringify(requestBody())")) == expected
    assert ask(page, "0123456789012345678901234567890") == "01234567890123"  # two pieces of seven


def test_both_languages_themes_and_sizes_and_the_keyboard(page: Page):
    page.run("document.body.focus(); byId('scroll').focus()")
    reached = set()
    for _ in range(12):
        page.press("Tab")
        reached.add(page.run("document.activeElement.id"))
    assert {"question", "new", "language", "theme", "settings-open"} <= reached
    assert page.run(
        "[...document.querySelectorAll('button')].every((b) => b.innerText.trim() || b.ariaLabel)"
    )
    assert page.run("document.documentElement.lang") == "en"
    page.click("#language")
    assert page.run("byId('send').title") == "发送"
    assert page.run("document.documentElement.lang") == "zh-CN"
    assert page.run("Object.keys(TEXTS.en).sort().join() === Object.keys(TEXTS.zh).sort().join()")
    light = page.run("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.run("getComputedStyle(document.body).backgroundColor") != light
    wide = "say | a | b |\n|---|---|\n| " + "long" * 60 + " | c |\n\n```\n" + "x" * 300 + "\n```"
    for width, height in ((320, 568), (844, 390), (1440, 900)):
        page.size(width, height, phone=width < 1000)
        ask(page, wide)
        assert page.run("document.documentElement.scrollWidth <= innerWidth"), width
        assert page.run("byId('send').getBoundingClientRect().bottom <= innerHeight"), width


def test_markdown_becomes_what_it_says(page: Page):
    ask(
        page,
        "say ## Title\n\n1. one\n2. two\n   - in\n\n> quote\n\n`c*d` and **b** and *i* and ~~s~~"
        " and a_b_c\n\n[l](https://x.invalid/a?b=1&c=2) https://y.invalid/z.\n\n```js\nlet a = 1 <"
        " 2;\n```\n\n|a|b|\n|-|-|\n|1|2|\n\n***",
    )
    inline = {"p code": ["c*d"], "strong": ["b"], "em": ["i"], "del": ["s"]}
    expected = inline | {
        "h4": ["Title"],
        "ol>li": ["one", "two\nin"],
        "ol ul>li": ["in"],
        "blockquote": ["quote"],
        "pre code": ["let a = 1 < 2;"],
        "td": ["1", "2"],
        "hr": [""],
        "a": ["https://x.invalid/a?b=1&c=2", "https://y.invalid/z"],
    }
    found = page.run(
        f"JSON.stringify(Object.fromEntries({list(expected)}.map((s) => [s,"
        " [...document.querySelectorAll('.turn:last-child .body ' + s)].map((n) => n.href ||"
        " n.innerText.trim())])))"
    )
    assert json.loads(found) == expected


def test_attacks_stay_text(page: Page, served: Served):
    """Of the prompt and the answer, whole and streamed: nothing runs or is fetched."""
    texts = json.dumps(CORPUS)
    for script in (
        f"for (const text of {texts}) state.turns.push({{role: 'user', content: text}}); drawAll()",
        f"state.turns = {texts}.map((content) => ({{role: 'assistant', content, reason: '', error:"
        " ''})); drawAll()",
        f"for (const text of {texts}) for (let n = 1; n <= text.length; n += 1)"
        " Markdown.render(text.slice(0, n))",
    ):
        page.run(script)
    ask(page, "say " + "\n\n".join(CORPUS))
    page.run(
        "for (const node of document.querySelectorAll('.body *')) { node.removeAttribute('target');"
        " node.dispatchEvent(new MouseEvent('mouseover')); }"
    )

    def every(expression: str) -> set[str]:
        script = f"[...document.querySelectorAll('.body *')].flatMap((n) => {expression})"
        return set(page.run(f"[...new Set({script})].join()").split(","))

    forbidden = "script,img,svg,iframe,object,embed,style,link,meta,base,form,input,video,details"
    assert not every("n.localName") & set(f"{forbidden},math".split(","))
    assert every("n.localName === 'a' ? [n.protocol] : []") <= {"https:", "http:", "mailto:"}
    allowed = "class data-copy data-text href rel start tabindex target title type"
    assert every("n.getAttributeNames()") <= set(allowed.split())
    assert page.run("window.hacked === undefined")
    assert page.dialogs == [] and page.violations == [] and page.console == []
    assert all(url.startswith(served.url + "/") for url in page.requests)


def test_long_texts_do_not_hang_the_page(page: Page):
    """100,000 characters of each: what is quadratic runs into the test's time limit."""
    for words in GROWING:
        page.run(
            "((a, b, c) => { Markdown.render(a + b.repeat(1e5 / b.length) + c, Infinity);"
            f" }})({', '.join(map(json.dumps, words))})"
        )
    page.run(
        "Markdown.render(Array.from({length: 700}, (_, n) => '`'.repeat(n) + ' a').join(' '),"
        " Infinity).length"
    )
    rest = (
        "(() => { const p = Markdown.render('*a* '.repeat(3e5)); return [p.length, p[1].className]"
    )
    assert page.run(f"{rest}; }})()") == [2, "rest"]
    # However long it takes to draw, it is drawn anew only after a pause of several times that.
    page.run(
        "(() => { window.drawn = 0; const draw = drawTurn;"
        "drawTurn = (turn) => { drawn += 1; draw(turn); }; state.drawSeconds = 1e5; })()"
    )
    assert ask(page, "say " + "`a` " * 500).startswith("a a a")
    # the question, the empty answer, and the whole one; not each piece
    assert page.run("drawn") <= 6


def test_the_token_is_asked_for(tab: Page):
    with stub_server(token="a-token-of-length-24-abc") as server:
        tab.call("Page.navigate", url=server.url)
        tab.wait(
            "document.readyState === 'complete' && typeof byId === 'function' &&"
            " byId('settings').open"
        )
        tab.run("byId('token').focus()")
        tab.type("a-token-of-length-24-abc")
        tab.press("Enter")
        tab.wait("state.model !== null")
        assert ask(tab, "hello") == "hello"
        assert tab.run("localStorage.getItem('finetune.token')") is None
