"""Renew the Chinese catalogue, and list what is not translated.

    python docs/site/translations.py      # after texts have changed (`make translations`)

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
from babel.messages.pofile import write_po
from site_catalogues import MESSAGES, new_catalogue, read_catalogue

PACKAGE = Path(__file__).resolve().parents[2] / "finetune"


def texts() -> set[str]:
    """The texts of the package."""
    keywords = {"_": None, "N_": None}
    methods = [("**.py", "python"), ("**.jinja", "jinja2")]
    found = extract_from_dir(PACKAGE, methods, keywords=keywords, comment_tags=())
    return {text for _, _, text, _, _ in found if isinstance(text, str)}


def compiled(catalogue: Catalog) -> bytes:
    """What gettext reads."""
    written = BytesIO()
    write_mo(written, catalogue)
    return written.getvalue()


def renew() -> list[str]:
    """Bring the catalogue up to date; returns the texts without a translation."""
    before = read_catalogue(MESSAGES)
    now = new_catalogue()
    now.revision_date = before.revision_date
    now.creation_date = before.creation_date
    for text in sorted(texts()):
        known = before.get(text)
        now.add(text, known.string if known is not None else "")
    with MESSAGES.open("wb") as file:
        write_po(file, now, width=118, sort_output=True)
    MESSAGES.with_suffix(".mo").write_bytes(compiled(now))
    return [message.id for message in now if message.id and not message.string]


if __name__ == "__main__":
    missing = renew()
    for text in missing:
        print(f"not translated: {text!r}")
    print(f"{len(missing)} of {len(texts())} texts have no Chinese")
    sys.exit(0)
