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
import architecture_picture  # noqa: E402
import build_site  # noqa: E402
import concept_pictures  # noqa: E402
import speed_picture  # noqa: E402

GUIDE, DATA = (ROOT / "docs" / name for name in ("guides/merging.md", "reference/data.md"))
NAMES = {GUIDE: "guides/merging.md", DATA: "reference/data.md", ROOT / "README.md": "readme.md"}


def test_pictures_are_made_from_todays_code_and_results() -> None:
    for name, picture in concept_pictures.pictures().items():
        path = concept_pictures.IMAGES / name
        assert path.read_text(encoding="utf-8") == picture, "run: python docs/concept_pictures.py"
    chart = (speed_picture.IMAGES / speed_picture.FILE).read_text(encoding="utf-8")
    assert chart == speed_picture.speed(), "run: python docs/speed_picture.py"
    layers = architecture_picture.PICTURE.read_text(encoding="utf-8")
    assert layers == architecture_picture.picture(), "run: python docs/architecture_picture.py"


def test_the_page_on_the_architecture_says_what_is_there() -> None:
    page = (ROOT / "docs" / "concepts" / "architecture.md").read_text(encoding="utf-8")
    paths = [path for path in (ROOT / "finetune").iterdir() if path.name[0] not in "_."]
    folders = {path.name for path in paths if path.is_dir()}
    assert folders - {"locale"} == set(architecture_picture.FOLDERS)
    tree = re.search(r"```\nfinetune/\n(.*?)```", page, re.S)[1]
    assert folders == set(re.findall(r"^  (\w+)/ ", tree, re.M))
    commands = {path.parent.name for path in (ROOT / "finetune" / "commands").glob("*/command.py")}
    assert commands <= set(re.findall(r"\w+", tree))
    for name in re.findall(r"`((?:\w+/)+\w+\.py)`", page):
        assert (ROOT / "finetune" / name).is_file() or (ROOT / name).is_file(), name


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


def test_a_dead_link_and_what_is_loaded_from_elsewhere_are_found(tmp_path: Path) -> None:
    links = ("b.html#there", "b.html#gone", "c.html", "https://example.org/")
    text = "".join(f'<a href="{link}">x</a>' for link in links)
    (tmp_path / "a.html").write_text(f'{text}<script src="https://example.org/x.js"></script>')
    (tmp_path / "b.html").write_text('<h1 id="there">x</h1><img src="a.html">')
    dead = ["a.html: b.html#gone", "a.html: c.html", "a.html loads https://example.org/x.js"]
    assert build_site.dead_links(tmp_path) == dead


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
