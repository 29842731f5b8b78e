"""The site: it builds in both languages with every link alive, its pictures and pages are those of
today's code.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT, environment

sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "docs" / "site")]
import build_site  # noqa: E402
import concept_pictures  # noqa: E402
import site_catalogues  # noqa: E402
import site_reference  # noqa: E402
import speed_picture  # noqa: E402

GUIDE = ROOT / "docs" / "guides" / "merging.md"
NAMES = {
    GUIDE: "guides/merging.md",
    ROOT / "README.md": "readme.md",
    ROOT / "docs" / "reference" / "data.md": "reference/data.md",
}


def test_pictures_are_made_from_todays_code_and_results() -> None:
    for name, picture in concept_pictures.pictures().items():
        path = concept_pictures.IMAGES / name
        assert path.read_text(encoding="utf-8") == picture, "run: python docs/concept_pictures.py"
    chart = (speed_picture.IMAGES / speed_picture.FILE).read_text(encoding="utf-8")
    assert chart == speed_picture.speed(), "run: python docs/speed_picture.py"
    names = {name for name, _, _ in speed_picture.on_the_gpu() + speed_picture.on_the_cpu()}
    assert {"finetune", "Unsloth", "TRL, tuned", "LLaMA-Factory, tuned"} <= names


def test_every_page_has_its_place_once() -> None:
    names = [name for names in build_site.PAGES.values() for name in names]
    placed = [re.sub(r".*<(.+)>", r"\1", name) for name in names]
    docs = ROOT / "docs"
    pages = {str(path.relative_to(docs).with_suffix("")) for path in docs.rglob("*.md")} - {"index"}
    made = (*build_site.TOP_PAGES, *site_reference.reference_pages("en"), "readme.md")
    assert sorted(placed) == sorted(pages | {name.removesuffix(".md") for name in made})


def test_links_out_of_the_site_become_names() -> None:
    kept = "![d](../images/e.svg)\n```\n[f](../x)\n```\n"
    text = (
        f"[a](../../README.md#x) [b](../reference/data.md#y) [c](../../exhaustive/grid.py) {kept}"
    )
    shown = f"[a](../readme.md) [b](../reference/data.md#y) c (`exhaustive/grid.py`) {kept}"
    assert build_site.with_links_here(text, GUIDE, NAMES) == shown
    for link in ("[a](gone.md)", "[a](../../tests/gone.py)"):
        with pytest.raises(FileNotFoundError, match="leads nowhere"):
            build_site.with_links_here(link, GUIDE, NAMES)


def test_old_addresses_and_the_page_on_diagnosis_lead_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "index.html").touch()
    build_site.redirect_old_addresses(tmp_path)
    assert "url=guides/merging.html" in (tmp_path / "merging.html").read_text(encoding="utf-8")
    assert not (tmp_path / "settings.html").exists()
    monkeypatch.setattr(build_site, "OUT", tmp_path)
    page = build_site.stage("en") / "reference" / "diagnosis.md"
    assert "[symptoms](symptoms.md)" in page.read_text(encoding="utf-8")


def test_a_dead_link_and_what_is_loaded_from_elsewhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html#there">x</a><a href="b.html#gone">x</a><a href="c.html">x</a>'
        '<a href="https://example.org/">x</a><script src="https://example.org/x.js"></script>'
    )
    (tmp_path / "b.html").write_text('<h1 id="there">x</h1><img src="a.html">')
    assert build_site.dead_links(tmp_path) == [
        "a.html: b.html#gone",
        "a.html: c.html",
        "a.html loads https://example.org/x.js",
    ]


def test_reference_pages_say_what_the_code_goes_by() -> None:
    pages = site_reference.reference_pages("en")
    for name, said in {
        "settings": "| `learning_rate` |",
        "settings_preferences": "| `simpo_gamma` |",
        "exit_codes": "| 4 | `OUT_OF_MEMORY` | a sharded run ran out of device memory",
        "commands": "\n## launch\n",
    }.items():
        assert said in pages[f"reference/{name}.md"]
    chinese = site_reference.reference_pages("zh")["reference/symptoms.md"]
    assert "(certain;" not in chinese and "显存" in chinese
    assert chinese.count("\n## ") == pages["reference/symptoms.md"].count("\n## ")


def test_a_catalogue_keeps_what_is_translated_and_says_what_changed(tmp_path: Path, capsys) -> None:
    templates, catalogue = tmp_path / "templates", tmp_path / "zh" / "page.po"
    head = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=utf-8\\n"\n'

    def page(*texts: str) -> str:
        body = "".join(f'\nmsgid "{text}"\nmsgstr ""\n' for text in texts)
        (templates / "page.pot").write_text(head + body)
        site_catalogues.renew(templates, catalogue.parent, skipped=set())
        return catalogue.read_text(encoding="utf-8")

    templates.mkdir()
    text = page("The first paragraph of it.", "`code` 12", "Another one that stays.")
    assert "`code` 12" not in text, "what is no words needs no Chinese"
    for ending, chinese in (("of it.", "第一段。"), ("stays.", "另一段。")):
        text = text.replace(f'{ending}"\nmsgstr ""', f'{ending}"\nmsgstr "{chinese}"')
    catalogue.write_text(text, encoding="utf-8")
    capsys.readouterr()
    text = page("The first paragraph of it, changed.", "Another one that stays.")
    assert "#, fuzzy" in text and "第一段。" in text and 'stays."\nmsgstr "另一段。"' in text
    assert "1 of 2 texts have no Chinese" in capsys.readouterr().out


@pytest.mark.slow
def test_it_builds_in_both_languages() -> None:
    """Warnings are errors, and `build.py` looks at every link of every page."""
    words = [sys.executable, ROOT / "docs" / "site" / "build_site.py"]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for language in ("en", "zh"):
        pages = list((build_site.OUT / language).rglob("*.html"))
        assert len(pages) > sum(map(len, build_site.PAGES.values()))
    chinese = (build_site.OUT / "zh" / "index.html").read_text(encoding="utf-8")
    for said in ("概念", '<html class="no-js" lang="zh-CN"', "../en/index.html"):
        assert said in chinese
