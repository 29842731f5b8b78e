"""The language of messages for people: English, or Simplified Chinese by gettext. Machines get
`--json`.

Messages are English in the code: `_("{count} files").format(count=3)`. Their translations are in
locale/<language>/LC_MESSAGES/finetune.po, updated by `make translations`, which also lists messages
without translation; these are shown in English. A message in a table that is made when a module is
imported is marked with `N_`, and translated with `_` when it is shown.
"""

from __future__ import annotations

import contextlib
import gettext
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

from finetune.errors import ConfigError

Language = Literal["en", "zh"]


LANGUAGES = ("en", "zh")
LOCALE_DIR = Path(__file__).parents[1] / "locale"
# POSIX uses the first of these that is set and not empty.
_LOCALE_VARIABLES = ("LC_ALL", "LC_MESSAGES", "LANG")

_current = "en"


def pick_language(flag: str | None = None) -> Language:
    """Return the language of messages: the flag (`--lang en|zh`), else the locale's, else English.

    Raises:
        ConfigError: the flag is neither en nor zh.
    """
    if flag is not None and flag not in LANGUAGES:
        raise ConfigError(
            f"--lang is {flag!r}; it is en or zh",
            where="--lang",
            fix="use --lang en or --lang zh",
        )
    locale = next((os.environ[name] for name in _LOCALE_VARIABLES if os.environ.get(name)), "en")
    return "zh" if (flag or locale).lower().startswith("zh") else "en"


def speak(language: str) -> None:
    """Let `_` translate into this language from now on; a command calls it once, with the result of
    `pick_language`.
    """
    global _current
    assert language in LANGUAGES, f"{language!r} is not one of {LANGUAGES}"
    _current = language


def spoken() -> str:
    """Return the language that `_` translates into: "en", with which every process starts, or
    "zh".
    """
    return _current


@contextlib.contextmanager
def speaking(language: str) -> Iterator[None]:
    """Use a language within a block."""
    before = spoken()
    speak(language)
    try:
        yield
    finally:
        speak(before)


def _(text: str) -> str:
    """Return the text in the current language; in English if there is no translation."""
    return text if _current == "en" else _catalog(_current).gettext(text)


def N_(text: str) -> str:
    """Return the text unchanged; it is marked for the catalog."""
    return text


@cache
def _catalog(language: str) -> gettext.NullTranslations:
    return gettext.translation("finetune", LOCALE_DIR, [language])
