"""The language of what commands say to people: English or Simplified Chinese. Machines get `--json`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, TypedDict

Language = Literal["en", "zh"]
# What POSIX reads for messages, first that is set and not empty.
_LOCALE_VARIABLES = ("LC_ALL", "LC_MESSAGES", "LANG")


class Text(TypedDict):
    """One message in both languages, kept beside the code that says it: `TEXT[language]`."""

    en: str
    zh: str


def pick_language(flag: str | None = None, environment: Mapping[str, str] | None = None) -> Language:
    """The language to speak: the flag (`--lang en|zh`), else the locale's, else English.

    Args:
        flag: "en" or "zh", or None where the user gave none.
        environment: variables to read; None: this process's.

    Raises:
        ConfigError: another language than these two.
    """
    if flag is not None:
        if flag not in ("en", "zh"):
            from finetune.errors import ConfigError

            raise ConfigError(f"--lang is {flag!r}; it is en or zh", where="--lang", fix="use --lang en or --lang zh")
        return "zh" if flag == "zh" else "en"
    variables = os.environ if environment is None else environment
    locale = next((variables[name] for name in _LOCALE_VARIABLES if variables.get(name)), "")
    return "zh" if locale.lower().startswith("zh") else "en"
