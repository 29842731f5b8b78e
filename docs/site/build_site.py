"""The site, in English and Chinese, without a network: `python docs/site/build_site.py` (`make
site`) into build/site/.

    python docs/site/build_site.py                   # both languages; what is wrong, a dead link
    too, ends it python docs/site/build_site.py --translations    # renew docs/locale, list what it
    lacks (`make site-translations`)

docs/**/*.md stay plain Markdown, as people read them in the repository. They are copied to
build/site/source/, where links that lead out of the site become names of files, and stand beside
pages that site_reference.py makes of the code.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path, PurePath
from urllib.parse import unquote, urlsplit

from site_catalogues import renew
from site_reference import CAUSES, reference_pages

from finetune.runtime.language import LANGUAGES

ROOT = Path(__file__).resolve().parents[2]
DOCS, OUT = ROOT / "docs", ROOT / "build" / "site"
LOCALE = DOCS / "locale"
SPHINX_LANGUAGES = {"en": "en", "zh": "zh_CN"}
# Beside docs/: they stand at the top of the repository.
TOP_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
README = {"en": "README.md", "zh": "README.zh-CN.md"}
# Pages that bring their own Chinese; pages that are in English only.
OWN_CHINESE = ("readme", "reference/symptoms")
ENGLISH_ONLY = (
    "CHANGELOG",
    *(f"evidence/{path.stem}" for path in sorted((DOCS / "evidence").glob("*.md"))),
)

# Caption -> pages, as the sidebar shows them.
PAGES = {
    "Start": [
        "README <readme>",
        "start/start",
        "start/tutorial",
        "start/installation",
        "start/from_other_tools",
        "start/from_the_guides",
    ],
    "Guides": [
        "guides/launching",
        "guides/doctor",
        "guides/planning",
        "guides/monitoring",
        "guides/curriculum",
        "guides/preferences",
        "guides/pretraining",
        "guides/pretraining_data",
        "guides/chat_and_serve",
        "guides/evaluation",
        "guides/merging",
        "guides/verifying",
        "guides/convert",
        "guides/python",
    ],
    "Concepts": [
        "concepts/concepts",
        "concepts/promises",
        "concepts/compare",
        "concepts/limits",
        "concepts/architecture",
    ],
    "Reference": [
        "reference/configuration",
        "reference/settings",
        "reference/settings_preferences",
        "reference/settings_pretraining",
        "reference/data",
        "reference/run_folder",
        "reference/events",
        "reference/commands",
        "reference/exit_codes",
        "reference/python",
        "reference/models",
        "reference/diagnosis",
        "reference/symptoms",
    ],
    "Evidence": [
        "evidence/benchmarks_sft",
        "evidence/benchmarks_packing",
        "evidence/benchmarks_pretraining",
        "evidence/pretraining_parts",
        "evidence/defaults_benchmark",
        "evidence/peers_settings_benchmark",
        "evidence/preferences_benchmark",
        "evidence/curriculum_benchmark",
        "evidence/equivalence_grid",
        "evidence/equivalence_grid_cuda",
        "evidence/crash_table",
        "evidence/packing_leak",
        "evidence/fault_table",
        "evidence/roofline",
        "evidence/scale",
    ],
    "Project": [name.removesuffix(".md") for name in TOP_PAGES],
}


def stage(language: str) -> Path:
    """The pages of a language as Sphinx reads them: a folder of Markdown files."""
    source = OUT / "source" / language
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(DOCS / "images", source / "images")
    pages = {path.relative_to(DOCS).as_posix(): path for path in sorted(DOCS.rglob("*.md"))}
    pages |= {name: ROOT / name for name in TOP_PAGES} | {"readme.md": ROOT / README[language]}
    names = {path: name for name, path in pages.items()}
    # Links of a README to the other language's stay on this one's page.
    names |= {ROOT / name: "readme.md" for name in README.values()}
    for name, path in pages.items():
        text = path.read_text(encoding="utf-8")
        text = with_links_here(text, path, names)
        if name == "reference/diagnosis.md":
            text = text.partition(CAUSES)[0] + f"{CAUSES}\n[symptoms](symptoms.md)\n"
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text, encoding="utf-8")
    for name, text in reference_pages(language).items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text, encoding="utf-8")
    with (source / "index.md").open("a", encoding="utf-8") as index:
        for caption, names in PAGES.items():
            index.write(
                "\n".join(
                    ["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *names, "```", ""]
                )
            )
    return source


_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?!https?://|mailto:|#)[^)#\s]*)(#[^)\s]*)?\)")


def with_links_here(text: str, path: Path, names: Mapping[Path, str]) -> str:
    """Return a page whose links lead to pages of the site; of other files the name is left.

    Args:
        text: of the page.
        path: where it is in the repository.
        names: path in the repository -> page of the site, from its top.

    Raises:
        FileNotFoundError: a link leads nowhere; behind this nobody would see it.
    """
    here = PurePath(names[path]).parent

    def link(match: re.Match[str]) -> str:
        title, target, anchor = match[1], (path.parent / match[2]).resolve(), match[3] or ""
        if not target.exists():
            raise FileNotFoundError(f"{match[0]} leads nowhere: there is no {target}")
        if target in names:
            if names[target] == "readme.md":
                anchor = ""  # its headings are named otherwise in Chinese
            return f"[{title}]({os.path.relpath(names[target], here)}{anchor})"
        if DOCS / "images" in target.parents:
            return match[0]
        name = str(target.relative_to(ROOT))
        return title if name in title else f"{title} (`{name}`)"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [
        _LINK.sub(link, part).replace("](docs/images/", "](images/") for part in parts[::2]
    ]
    return "".join(parts)


def sphinx(builder: str, source: Path, target: Path, language: str) -> None:
    """Run Sphinx; every warning is an error."""
    words = [
        sys.executable,
        "-m",
        "sphinx",
        "-b",
        builder,
        "-W",
        "--keep-going",
        "-q",
        "-c",
        DOCS / "site",
    ]
    words += [
        "-d",
        OUT / "doctrees" / f"{builder}-{language}",
        "-D",
        f"language={SPHINX_LANGUAGES[language]}",
    ]
    subprocess.run([*words, source, target], cwd=ROOT, check=True)


class _Page(HTMLParser):
    """What a page links to, loads, and can be linked to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors.update(filter(None, (given.get("id"), given.get("name"))))
        if tag == "a" and given.get("href"):
            self.links.append(str(given["href"]))
        loaded = given.get("src") if tag != "link" else given.get("href")
        if loaded and given.get("rel") not in (
            "search",
            "index",
            "next",
            "prev",
            "author",
            "copyright",
            "top",
        ):
            self.loads.append(loaded)


def redirect_old_addresses(folder: Path) -> None:
    """Write a page where each page was before the sections: old links lead on."""
    for name in (name for names in PAGES.values() for name in names if "/" in name):
        old = folder / f"{PurePath(name).name}.html"
        if not (DOCS / f"{name}.md").exists() or old.exists():
            continue
        old.write_text(
            f'<!doctype html><meta http-equiv="refresh" content="0; url={name}.html">'
            f'<a href="{name}.html">moved</a>\n',
            encoding="utf-8",
        )


def dead_links(folder: Path) -> list[str]:
    """Links of the built pages that lead nowhere, and what they would load from elsewhere."""
    pages = {path.resolve(): _Page(path) for path in folder.rglob("*.html")}
    found = []
    for path, page in pages.items():
        for link in (*page.links, *page.loads):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loads and parts.scheme != "data":
                    found.append(f"{path.relative_to(folder)} loads {link}")
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.is_file() or (
                anchor and target in pages and anchor not in pages[target].anchors
            ):
                found.append(f"{path.relative_to(folder)}: {link}")
    return found


def main(arguments: list[str]) -> int:
    if arguments == ["--translations"]:
        sphinx("gettext", stage("en"), OUT / "gettext", "en")
        return renew(
            OUT / "gettext", LOCALE / "zh" / "LC_MESSAGES", skipped={*OWN_CHINESE, *ENGLISH_ONLY}
        )
    for language in LANGUAGES:
        shutil.rmtree(OUT / language, ignore_errors=True)
        if (LOCALE / language).is_dir():  # compiled catalogues are written beside
            shutil.copytree(
                LOCALE / language, OUT / "locale" / SPHINX_LANGUAGES[language], dirs_exist_ok=True
            )
        sphinx("html", stage(language), OUT / language, language)
        redirect_old_addresses(OUT / language)
    shutil.copy(DOCS / "site" / "languages.html", OUT / "index.html")
    dead = [line for language in LANGUAGES for line in dead_links(OUT / language)]
    print("\n".join(dead) or f"the site is in {OUT.relative_to(ROOT)}/: open index.html")
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
