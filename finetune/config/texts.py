"""Texts of settings as given: `~` and `${VAR}` in paths, and texts that nothing can hold."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from finetune.config.fields import HUB_PREFIXES
from finetune.config.rules import Resolution

PATH_SETTINGS = (
    "output_dir",
    "cache_dir",
    "resume",
    "model",
    "tokenizer",
    "template",
    "data",
    "valid_data",
    "train_data_path",
    "valid_data_path",
)
_UNSET = re.compile(r"\$\{(\w+)\}")


def resolve_texts(resolution: Resolution) -> None:
    """Expand `~`, `$VAR` and `${VAR}` in every setting that names files or folders.

    A shell does not expand `--output-dir=~/out`, and a run file has no shell. A variable that is
    not set, a NUL character and half of a surrogate pair are noted as problems.
    """
    for name, sourced in list(resolution.values.items()):
        if any(map(_unusable, _texts_of(sourced.value))):
            what = f"{name} has a NUL character or half of a surrogate pair"
            resolution.refuse(what, [name], "write it as plain text")
            del resolution.values[name]
        elif name in PATH_SETTINGS:
            value = _expanded(sourced.value)
            resolution.values[name] = replace(sourced, value=value)
            for text in _texts_of(value):
                if unset := _UNSET.search(text):
                    what = f"{name} names the variable {unset[1]}, which is not set"
                    resolution.refuse(what, [name], "set it, or write the path itself")


def _expanded(value: Any) -> Any:
    if isinstance(value, str) and not value.startswith(HUB_PREFIXES):
        return os.path.expanduser(os.path.expandvars(value))
    if isinstance(value, list):
        return [_expanded(entry) for entry in value]
    if isinstance(value, Mapping) and "path" in value:  # an entry of data with more settings
        return {**value, "path": _expanded(value["path"])}
    return value


def _texts_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts_of(name)
            yield from _texts_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts_of(inner)


# Bytes of a path that are not UTF-8 are U+DC80 to U+DCFF in Python: those are real paths.
_UNUSABLE = re.compile("[\\0\\ud800-\\udc7f\\udd00-\\udfff]")


def _unusable(text: str) -> bool:
    return _UNUSABLE.search(text) is not None
