"""Renew the Chinese catalogue, and list what is not translated.

    python docs/translations.py      # after texts have changed (`make translations`)

Texts marked by `_` and `N_` are extracted from the package, the catalogue takes new ones and drops
what is gone, and its compiled form is written beside it. What has no Chinese is listed; it is shown
in English until it has.
"""

from __future__ import annotations

import sys
from io import BytesIO
from pathlib import Path

from babel.messages.catalog import Catalog
from babel.messages.extract import extract_from_dir
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po

PACKAGE = Path(__file__).resolve().parent.parent / "finetune"
CATALOGUE = PACKAGE / "locale" / "zh" / "LC_MESSAGES" / "finetune.po"


def texts() -> set[str]:
    """The texts of the package."""
    keywords = {"_": None, "N_": None}
    methods = [("**.py", "python"), ("**.jinja", "jinja2")]
    found = extract_from_dir(PACKAGE, methods, keywords=keywords, comment_tags=())
    return {text for _, _, text, _, _ in found if isinstance(text, str)}


def read() -> Catalog:
    """The catalogue as it stands."""
    with CATALOGUE.open("rb") as file:
        return read_po(file, locale="zh", domain="finetune")


def compiled(catalogue: Catalog) -> bytes:
    """What gettext reads."""
    written = BytesIO()
    write_mo(written, catalogue)
    return written.getvalue()


def renew() -> list[str]:
    """Bring the catalogue up to date; returns the texts without a translation."""
    before = read()
    now = Catalog(
        locale="zh",
        domain="finetune",
        project="finetune",
        version="0",
        header_comment="",
        msgid_bugs_address="none",
        last_translator="the finetune authors",
        language_team="finetune",
        fuzzy=False,
    )
    now.revision_date = before.revision_date
    now.creation_date = before.creation_date
    for text in sorted(texts()):
        known = before.get(text)
        now.add(text, known.string if known is not None else "")
    with CATALOGUE.open("wb") as file:
        write_po(file, now, width=118, sort_output=True)
    CATALOGUE.with_suffix(".mo").write_bytes(compiled(now))
    return [message.id for message in now if message.id and not message.string]


if __name__ == "__main__":
    missing = renew()
    for text in missing:
        print(f"not translated: {text!r}")
    print(f"{len(missing)} of {len(texts())} texts have no Chinese")
    sys.exit(0)
