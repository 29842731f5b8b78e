"""The language of what commands say to people: English, or Simplified Chinese by gettext. Machines
get `--json`.

A text is English in the code: `_("{count} files").format(count=3)`. Its translations are in
locale/<language>/LC_MESSAGES/finetune.po, renewed by `make translations`, which also lists what is
not translated; that is shown in English. A text in a table that is made when a module is imported
is marked with `N_` and translated with `_` where it is shown.
"""

from __future__ import annotations

import contextlib
import gettext
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Literal, TypedDict

from finetune.errors import ConfigError

Language = Literal["en", "zh"]


class Text(TypedDict):
    """One message in both languages, kept beside the code that says it: `TEXT[language]`."""

    en: str
    zh: str


LANGUAGES = ("en", "zh")
LOCALE_DIR = Path(__file__).parents[1] / "locale"
# What POSIX reads for messages, first that is set and not empty.
_LOCALE_VARIABLES = ("LC_ALL", "LC_MESSAGES", "LANG")

_current = "en"


def pick_language(
    flag: str | None = None, environment: Mapping[str, str] | None = None
) -> Language:
    """The language to speak: the flag (`--lang en|zh`), else the locale's, else English.

    Args:
        flag: "en" or "zh", or None where the user gave none.
        environment: variables to read; None: this process's.

    Raises:
        ConfigError: another language than these two.
    """
    if flag is not None:
        if flag not in LANGUAGES:
            raise ConfigError(
                f"--lang is {flag!r}; it is en or zh",
                where="--lang",
                fix="use --lang en or --lang zh",
            )
        return "zh" if flag == "zh" else "en"
    variables = os.environ if environment is None else environment
    locale = next((variables[name] for name in _LOCALE_VARIABLES if variables.get(name)), "")
    return "zh" if locale.lower().startswith("zh") else "en"


def speak(language: str) -> None:
    """From now on `_` translates into this language; a command calls it once, with what
    `pick_language` said.
    """
    global _current
    assert language in LANGUAGES, f"{language!r} is not one of {LANGUAGES}"
    _current = language


def spoken() -> str:
    """The language that `_` translates into: "en", which every process begins with, or "zh"."""
    return _current


@contextlib.contextmanager
def speaking(language: str) -> Iterator[None]:
    """Speak a language for a while."""
    before = spoken()
    speak(language)
    try:
        yield
    finally:
        speak(before)


def _(text: str) -> str:
    """The text in the spoken language; in English where there is no translation."""
    return text if _current == "en" else _catalogue(_current).gettext(text)


def N_(text: str) -> str:
    """The text as it is, marked for the catalogue."""
    return text


@cache
def _catalogue(language: str) -> gettext.NullTranslations:
    return gettext.translation("finetune", LOCALE_DIR, [language])
