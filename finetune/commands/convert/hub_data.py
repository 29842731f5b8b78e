"""Data sets by name: which hub, subset and split, as an entry of `data`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from finetune.commands.convert.draft import Draft

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SPLIT = re.compile(r"(\w+(?:\.\w+)*)(.*)", re.S)
_FILES = {".json", ".jsonl", ".parquet", ".arrow", ".csv", ".txt", ".gz", ".bz2", ".xz", ".zst"}


def is_hub_data(path: Any) -> bool:
    """Return whether a path names a hub's data set: no file or folder here, and no file's name."""
    return (
        isinstance(path, str)
        and _NAME.fullmatch(path) is not None
        and Path(path).suffix.lower() not in _FILES
        and not os.path.exists(path)
    )


def data_entry(path: Any, columns: dict[str, str] | None = None, most: Any = None) -> Any:
    """Return an entry of `data`: a path, or a path and its settings.

    Args:
        path: a path, or an entry from `hub_entry`.
        most: maximum number of records to use.
    """
    entry = dict(path) if isinstance(path, dict) else {"path": path}
    if columns:
        entry["columns"] = dict(columns)
    if most:
        entry["max_samples"] = int(most)
    return entry["path"] if entry.keys() == {"path"} else entry


def hub_entry(
    draft: Draft,
    name: str,
    hub: str,
    *,
    subset: Any = None,
    revision: Any = None,
    split: Any = None,
) -> Any:
    """Return the entry of `hub:owner/name/subset@revision:split`.

    The first records of a split (`train[:1000]`) are taken as `max_samples`; another part of it is
    named as left out.

    Args:
        name: of the data set, `owner/name`.
        hub: "hub" or "modelscope".
    """
    entry = f"{hub}:{name}"
    if subset and subset != "default":
        entry += f"/{subset}"
    if revision and revision != "main":
        entry += f"@{revision}"
    found = _SPLIT.fullmatch(str(split or "train"))
    first = re.fullmatch(r"\[:(\d+)\]", found[2]) if found else None
    if found is None or (found[2] and not first):
        draft.drop(f"dataset {name}", split, "a whole split is read: write its part to a file")
    if found is not None and found[1] != "train":
        entry += f":{found[1]}"
    return data_entry(entry, most=first[1] if first else None)
