"""The Chinese of the site's pages: docs/locale/zh/LC_MESSAGES/PAGE.po, brought up to date, and what
they lack.
"""

from __future__ import annotations

import re
from pathlib import Path

from babel.messages.catalog import Catalog
from babel.messages.pofile import read_po, write_po

import finetune

MESSAGES = Path(finetune.__file__).parent / "locale" / "zh" / "LC_MESSAGES" / "finetune.po"


def renew(templates: Path, folder: Path, skipped: set[str]) -> int:
    """Write what Sphinx extracted into the catalogues; list what has no Chinese, by page. Returns
    the exit code, 0.

    A paragraph that has changed keeps its old Chinese beside it, marked fuzzy: it is shown in
    English until someone has looked at it. What another page, or the package's own catalogue, has
    in Chinese is taken from there.
    """
    known, missing, texts = _known(folder), 0, 0
    pages = {
        path.relative_to(templates).with_suffix(""): path
        for path in sorted(templates.rglob("*.pot"))
    }
    for page, path in pages.items():
        if page.as_posix() in skipped or page.name == "sphinx":
            continue
        target = (folder / page).with_suffix(".po")
        catalogue = read_catalogue(target) if target.is_file() else new_catalogue()
        made = catalogue.creation_date  # the template's is today's, and no news
        catalogue.update(read_catalogue(path), no_fuzzy_matching=not target.is_file())
        catalogue.creation_date = made
        catalogue.obsolete.clear()
        for message in list(catalogue):
            if message.id and not needs_words(str(message.id)):
                catalogue.delete(message.id, message.context)
            elif not message.string:
                message.string = known.get(message.id, "")
            message.locations, message.auto_comments, message.user_comments = [], [], []
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            write_po(file, catalogue, width=0, omit_header=False, include_previous=True)
        lacking = untranslated(catalogue)
        missing, texts = missing + len(lacking), texts + len(catalogue)
        if lacking:
            print(f"{page}: {len(lacking)} of {len(catalogue)}, e.g. {lacking[0][:70]!r}")
    for path in folder.rglob("*.po"):
        if path.relative_to(folder).with_suffix("") not in pages and path.stem != "sphinx":
            path.unlink()
            print(f"{path.relative_to(folder)}: its page is gone")
    print(f"{missing} of {texts} texts have no Chinese")
    return 0


def untranslated(catalogue: Catalog) -> list[str]:
    """Texts without Chinese, or whose Chinese is of an older text."""
    return [
        str(message.id)
        for message in catalogue
        if message.id and (not message.string or message.fuzzy)
    ]


def needs_words(text: str) -> bool:
    """Whether a text says something besides code, numbers and addresses."""
    return (
        re.search(r"[A-Za-z]{2}", re.sub(r"`[^`]*`|\]\([^)]*\)|https?://\S+", "", text)) is not None
    )


def _known(folder: Path) -> dict[str, str]:
    """What there is in Chinese already, wherever it is said."""
    return {
        message.id: message.string
        for path in (MESSAGES, *folder.rglob("*.po"))
        for message in read_catalogue(path)
        if message.id and message.string and not message.fuzzy
    }


def read_catalogue(path: Path) -> Catalog:
    with path.open("rb") as file:
        return read_po(file, locale="zh")


def new_catalogue() -> Catalog:
    return Catalog(
        locale="zh",
        project="finetune",
        version="0",
        header_comment="",
        msgid_bugs_address="none",
        last_translator="the finetune authors",
        language_team="finetune",
        fuzzy=False,
    )
