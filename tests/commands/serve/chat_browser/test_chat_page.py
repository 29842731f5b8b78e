"""The page in a real browser: what a user does, in both languages and sizes, and what an attacker's
text cannot.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from browser import NEEDS_CHROMIUM, Page, browser
from serve_helpers import Served, stub_server
from xss_corpus import CORPUS, GROWING, HEAVY

pytestmark = NEEDS_CHROMIUM


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


def ask(page: Page, text: str) -> str:
    """Type a question, send it with Enter, and wait for the answer's text."""
    page.run("byId('question').focus()")
    page.type(text)
    page.press("Enter")
    page.wait("state.running === null && state.turns.at(-1).role === 'assistant'")
    return page.run("document.querySelector('.turn:last-child .body').innerText")


def test_types_streams_and_goes_on(page: Page):
    assert ask(page, "What is a router?") == "What is a router?"
    assert ask(page, "你好，世界 👋") == "你好，世界 👋"
    assert page.run("document.querySelectorAll('.turn').length") == 4
    page.run("byId('question').focus()")
    page.type("slow 400")
    page.press("Enter")
    early = page.wait(
        "(document.querySelector('.turn:last-child.assistant .body').innerText.match(/word/g) ||"
        " []).length"
    )
    # it grows
    page.wait(f"document.querySelectorAll('.turn')[5].innerText.match(/word/g).length > {early}")
    assert page.run("!byId('stop').hidden && byId('send').hidden")
    page.click("#stop")
    page.wait("state.running === null")
    assert page.run("document.querySelector('.turn:last-child .note').textContent") == "stopped"
    assert 0 < page.run("state.turns.at(-1).content.split(' ').length") < 400
    assert page.console == [] and page.violations == []


def test_stopping_ends_the_answer_in_the_worker(page: Page, served: Served):
    page.type("slow 400")
    page.press("Enter")
    page.wait("state.turns.at(-1).content.includes('word1')")
    assert served.health()["workers"][0]["active"] == 1
    page.press("Escape")
    page.wait("fetch('/health').then((r) => r.json()).then((h) => h.workers[0].active === 0)")


def test_regenerates_edits_and_begins_anew(page: Page):
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


def test_settings_reach_the_request(page: Page):
    page.click("#settings-open")
    page.run("byId('system').focus()")
    page.type("be brief")
    for name, value in (("max_tokens", "2"), ("temperature", "0.5"), ("seed", "7")):
        page.run(f"byId('{name}').focus()")
        page.type(value)
    page.press("Tab")
    page.press("Escape")
    body = page.run("JSON.stringify(requestBody())")
    assert json.loads(body) == {
        "model": "stub",
        "stream": True,
        "messages": [{"role": "system", "content": "be brief"}],
        "max_tokens": 2,
        "temperature": 0.5,
        "seed": 7,
    }
    assert ask(page, "0123456789012345678901234567890") == "01234567890123"  # two pieces of seven


def test_both_languages_themes_and_sizes(page: Page):
    assert page.run("document.documentElement.lang") == "en"
    page.click("#language")
    assert (
        page.run("byId('send').title") == "发送"
        and page.run("document.documentElement.lang") == "zh-CN"
    )
    names = page.run("Object.keys(TEXTS.en).filter((name) => !(name in TEXTS.zh)).join()")
    assert names == "" and page.run("Object.keys(TEXTS.zh).length === Object.keys(TEXTS.en).length")
    light = page.run("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.run("getComputedStyle(document.body).backgroundColor") != light
    for width, height, phone in (
        (320, 568, True),
        (390, 844, True),
        (844, 390, True),
        (1440, 900, False),
    ):
        page.size(width, height, phone=phone)
        ask(
            page,
            "say | a | b |\n|---|---|\n| " + "long" * 60 + " | c |\n\n```\n" + "x" * 300 + "\n```",
        )
        assert page.run("document.documentElement.scrollWidth <= innerWidth"), (width, height)
        assert page.run("byId('send').getBoundingClientRect().bottom <= innerHeight"), (
            width,
            height,
        )


def test_usable_with_the_keyboard(page: Page):
    page.run("document.body.focus(); byId('scroll').focus()")
    reached = set()
    for _ in range(12):
        page.press("Tab")
        reached.add(page.run("document.activeElement.id"))
    assert {"question", "new", "language", "theme", "settings-open"} <= reached
    unnamed = (
        "[...document.querySelectorAll('button')].filter((b) => !b.innerText.trim() &&"
        " !b.ariaLabel).length"
    )
    assert page.run(unnamed) == 0


def test_errors_are_said_and_the_question_stays(page: Page):
    ask(page, "fail please")
    assert "failed" in page.run("document.querySelector('.turn:last-child .note').textContent")
    ask(page, "refuse this")
    assert "too long" in page.run("document.querySelector('.turn:last-child .note').textContent")
    assert page.run(
        "document.querySelector('.turn:last-child .foot').innerText.includes('Try again')"
    )


def test_markdown_becomes_what_it_says(page: Page):
    ask(
        page,
        "say ## Title\n\n1. one\n2. two\n   - in\n\n> quote\n\n`c*d` and **b** and *i* and ~~s~~"
        " and a_b_c\n\n[l](https://x.invalid/a?b=1&c=2) https://y.invalid/z.\n\n```js\nlet a = 1 <"
        " 2;\n```\n\n|a|b|\n|-|-|\n|1|2|\n\n***",
    )
    kinds = [
        "h4",
        "ol>li",
        "ol ul>li",
        "blockquote",
        "p code",
        "strong",
        "em",
        "del",
        "pre code",
        "td",
        "hr",
        "a",
    ]
    found = page.run(
        f"JSON.stringify(Object.fromEntries({kinds}.map((s) => [s,"
        " [...document.querySelectorAll('.turn:last-child .body ' + s)].map((n) => n.href ||"
        " n.innerText.trim())])))"
    )
    assert json.loads(found) == {
        "h4": ["Title"],
        "ol>li": ["one", "two\nin"],
        "ol ul>li": ["in"],
        "blockquote": ["quote"],
        "p code": ["c*d"],
        "strong": ["b"],
        "em": ["i"],
        "del": ["s"],
        "pre code": ["let a = 1 < 2;"],
        "td": ["1", "2"],
        "hr": [""],
        "a": ["https://x.invalid/a?b=1&c=2", "https://y.invalid/z"],
    }


def test_attacks_stay_text(page: Page, served: Served):
    """Through the prompt and the model's answer, whole and as it streams; nothing runs, and nothing
    is fetched.
    """
    texts = json.dumps(CORPUS)
    page.run(
        f"for (const text of {texts}) state.turns.push({{role: 'user', content: text}}); drawAll()"
    )
    page.run(
        f"state.turns = {texts}.map((content) => ({{role: 'assistant', content, reason: '', error:"
        " ''})); drawAll()"
    )
    page.run(
        f"for (const text of {texts}) for (let n = 1; n <= text.length; n += 1)"
        " Markdown.render(text.slice(0, n))"
    )
    for text in CORPUS[::4]:
        ask(page, "say " + text)
    ask(page, "say " + "\n\n".join(CORPUS))
    page.run(
        "for (const node of document.querySelectorAll('.body a')) node.removeAttribute('target')"
    )
    page.run(
        "for (const node of document.querySelectorAll('.body *')) node.dispatchEvent(new"
        " MouseEvent('mouseover'))"
    )
    forbidden = "script,img,svg,iframe,object,embed,style,link,meta,base,form,input,video,details,math,[onclick],[onerror]"
    assert page.run(f"document.querySelectorAll('.body :is({forbidden})').length") == 0
    schemes = page.run(
        "[...new Set([...document.querySelectorAll('.body a')].map((a) => a.protocol))].join()"
    )
    assert set(schemes.split(",")) <= {"https:", "http:", "mailto:"}
    attributes = page.run(
        "[...new Set([...document.querySelectorAll('.body *')].flatMap((n) =>"
        " n.getAttributeNames()))].sort().join()"
    )
    assert set(attributes.split(",")) <= {
        "class", "data-copy", "data-text", "href", "rel", "start", "tabindex", "target", "title", "type"
    }  # fmt: skip
    assert page.run("window.hacked === undefined")
    assert page.dialogs == [] and page.violations == [] and page.console == []
    assert {url.split("/v1/")[0] for url in page.requests if "/v1/" in url} == {served.url}
    assert all(url.startswith(served.url + "/") for url in page.requests)


def test_the_policy_stops_what_would_get_through(page: Page):
    """The second wall, tried from inside the page: inline code, innerHTML, eval, images and
    connections elsewhere.
    """
    page.run(
        "(() => { const s = document.createElement('script');"
        "try { s.text = 'window.hacked = 1'; document.body.append(s); } catch (error) {} })()"
    )
    page.run(
        "try { document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=window.hacked=2>')"
        " } catch (e) {}"
    )
    page.run(
        "(() => { const i = new Image(); i.src = 'http://127.0.0.1:9/x.png';"
        " document.body.append(i); })()"
    )
    assert (
        page.run("fetch('http://127.0.0.1:9/').then(() => 'reached', () => 'refused')") == "refused"
    )
    page.run("new Promise((done) => setTimeout(done, 200))")
    assert page.run("window.hacked === undefined")
    kinds = " ".join(page.violations)
    for directive in ("trusted-types", "img-src", "connect-src"):
        assert directive in kinds, f"{directive} was not violated: the policy did not see it"


def test_heavy_texts_do_not_hang_the_page(page: Page):
    for text in HEAVY:
        page.run(f"Markdown.render({json.dumps(text)})")  # a hang runs into the test's time limit


def test_the_time_is_in_proportion_to_the_length(page: Page):
    """300,000 characters of each: what is quadratic runs into the time limit."""
    for beginning, unit, end in GROWING:
        words = ", ".join(map(json.dumps, (beginning, unit, end)))
        page.run(
            "((a, b, c) => { Markdown.render(a + b.repeat(3e5 / b.length) + c, Infinity);"
            f" }})({words})"
        )
    page.run(
        "Markdown.render(Array.from({length: 700}, (_, n) => '`'.repeat(n) + ' a').join(' '),"
        " Infinity).length"
    )
    rest = page.run(
        "(() => { const p = Markdown.render('*a* '.repeat(3e5)); return [p.length, p[1].className];"
        " })()"
    )
    assert rest == [2, "rest"]


def test_a_page_stays_free_while_a_long_answer_is_written(page: Page):
    """However long it takes to draw, it is drawn anew only after a pause of several times that."""
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
