"""Data sets by name, from the Hugging Face hub or ModelScope: the Arrow files that their libraries
keep of them.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from finetune.config.fields import HUB_PREFIXES
from finetune.data.report import first_line
from finetune.errors import DataError

# hub:owner/name, with /subset, @revision and :split behind it where they are needed.
_NAME = re.compile(
    r"(?P<name>[\w.-]+/[\w.-]+)(/(?P<subset>[^/@:]+))?(@(?P<revision>[^@:]+))?(:(?P<split>\w+(\.\w+)*))?"
)
_FORM = "write hub:OWNER/NAME, and where needed /SUBSET, @REVISION, :SPLIT behind it, in this order"


def hub_files(given: str) -> list[Path] | None:
    """Return the Arrow files of a data set by name, in order; None if it is not the name of a data
    set.

    The libraries download it where it is not cached, keep it under their own folders (HF_HOME,
    MODELSCOPE_CACHE), and read HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE.

    Raises:
        DataError: no name, or that of a local folder too; no such data set, subset, revision or
            split, out of reach and not cached; no ModelScope library.
    """
    prefix = next((prefix for prefix in HUB_PREFIXES if given.startswith(prefix)), None)
    if prefix is None:
        return None
    found = _NAME.fullmatch(given.removeprefix(prefix))
    if found is None:
        raise DataError("is no name of a data set", where=given, fix=_FORM)
    name = found["name"]
    if {".", ".."} & set(name.split("/")):
        raise DataError(
            "is no name of a data set", where=given, fix=f"write ./{name} for a folder; {_FORM}"
        )
    if Path(name).exists():  # which both libraries would read instead
        what = f"is also the name of a local file or folder: {name}"
        raise DataError(
            what, where=given, fix=f"write ./{name} for that one, or start where it is not"
        )
    if prefix == "modelscope:" and importlib.util.find_spec("modelscope") is None:
        raise DataError(
            "the library of ModelScope is not installed", where=given, fix="pip install modelscope"
        )
    load = _load_modelscope if prefix == "modelscope:" else _load_hub
    try:
        rows = load(name, found["subset"], found["revision"], found["split"] or "train")
    except Exception as error:  # the libraries, and those below them, raise their own classes
        fix = (
            "check name and connection (HF_ENDPOINT names a mirror; offline it must be cached);"
            f" {_FORM}"
        )
        raise DataError(
            f"the data set cannot be loaded: {first_line(error)}", where=given, fix=fix
        ) from error
    files = [Path(entry["filename"]) for entry in rows.cache_files]
    if not files:
        raise DataError(
            "the data set has no files on disk",
            where=given,
            fix="unset HF_DATASETS_IN_MEMORY_MAX_SIZE",
        )
    return list(dict.fromkeys(files))


def _load_hub(name: str, subset: str | None, revision: str | None, split: str) -> Any:
    """Load a data set from the Hugging Face hub, or from its cache."""
    import datasets

    commit = _commit(name, revision)
    rows = datasets.load_dataset(name, subset, revision=commit, split=split)
    for entry in rows.cache_files if commit else ():
        # Out of reach, datasets takes the latest that is cached; it keeps each under its commit.
        if commit not in Path(entry["filename"]).parts:
            raise ValueError(
                f"revision {revision} is not cached, another one is: {entry['filename']}"
            )
    return rows


def _commit(name: str, revision: str | None) -> str | None:
    """Ask the hub for the commit of a branch, tag or short commit: datasets stores no names of
    commits.

    Raises:
        ValueError: the hub does not know it, or is out of reach.
    """
    if revision is None or re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(name, revision=revision).sha
    except Exception as error:  # of huggingface_hub and of what is below it
        what = (
            f"the commit of revision {revision} is not known (offline write its 40 digits):"
            f" {first_line(error)}"
        )
        raise ValueError(what) from error


def _load_modelscope(name: str, subset: str | None, revision: str | None, split: str) -> Any:
    """Load a data set from ModelScope, or from its cache."""
    from modelscope.msdatasets import MsDataset

    version = {} if revision is None else {"version": revision}
    rows = MsDataset.load(
        name,
        subset_name=subset,
        split=split,
        **version,
    )
    # an MsDataset, or what it wraps
    return rows.to_hf_dataset() if hasattr(rows, "to_hf_dataset") else rows
