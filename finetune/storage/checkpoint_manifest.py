"""What makes a checkpoint folder a valid one: a manifest that names every file with its size and
SHA-256.

Nothing is unpickled here or anywhere else: a checkpoint holds safetensors, JSON and the text files
of a tokenizer; a folder with anything more is invalid as a whole, and what it holds more is not
even opened.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import StateError
from finetune.storage import durable_files
from finetune.storage.shared_storage import SEEN_WITHIN_SECONDS, is_shared, looks

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
MANIFEST_LIMIT_BYTES = 64 << 20
# Formats whose readers build data and run nothing: weights, JSON, and what tokenizers keep beside
# their JSON.
ALLOWED_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model", ".md")

UNREAD_SECONDS = 10.0

_CHANGED = "content changed"
_CHECKPOINT_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# training/state.py: a file that one rank wrote
_OF_RANK = re.compile(r".*-([0-9]{5})\.safetensors")


@dataclass(frozen=True)
class Validity:
    """Whether a checkpoint folder may be used, and if not, why; `manifest` is None where it could
    not be trusted.

    `unread`: the system did not let it be read, here and now; it may be whole.
    """

    valid: bool
    why: str
    manifest: dict[str, Any] | None
    unread: bool = False


class _Invalid(Exception):
    """Why a folder is not a valid checkpoint; never leaves this file."""


def step_of(name: str) -> int | None:
    """The optimizer step in `checkpoint-<step>`, or None for any other name."""
    found = _CHECKPOINT_NAME.fullmatch(name)
    return int(found.group(1)) if found else None


def is_allowed(name: str) -> bool:
    """Whether a checkpoint may hold a file of this name (relative to the folder)."""
    return name.endswith(ALLOWED_SUFFIXES)


def _canonical(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, sort_keys=True, indent=1, allow_nan=False) + "\n").encode("ascii")


def manifest_bytes(
    step: int, files: Mapping[str, Mapping[str, Any]], metadata: Mapping[str, Any]
) -> bytes:
    """The manifest of a checkpoint as it lies on the disk; its `digest` is the SHA-256 of the same
    text without it.

    Args:
        files: `{"size_bytes": int, "sha256": str}` by relative name.

    Raises:
        TypeError, ValueError: the metadata is not plain JSON (or holds NaN).
    """
    content = {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        "files": {name: dict(record) for name, record in files.items()},
        "metadata": dict(metadata),
    }
    return _canonical({**content, "digest": hashlib.sha256(_canonical(content)).hexdigest()})


def _some(names: list[str]) -> str:
    """The first few names, escaped so that any terminal can print them."""
    shown = ", ".join(ascii(name) for name in sorted(names)[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, checked in itself: its digest, its schema, its step against the folder's
    name.
    """
    raw = durable_files.read_bytes(folder / MANIFEST_NAME, MANIFEST_LIMIT_BYTES)
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _Invalid(f"{MANIFEST_NAME} is not JSON ({len(raw)} bytes)") from error
    if not isinstance(content, dict):
        raise _Invalid(f"{MANIFEST_NAME} is not a JSON object")
    if content.get("schema_version") != SCHEMA_VERSION:
        raise _Invalid(
            f"{MANIFEST_NAME} has schema version {content.get('schema_version')!r}, not"
            f" {SCHEMA_VERSION}"
        )
    try:
        # Byte for byte, so that not even a changed space or a doubled key passes.
        expected = manifest_bytes(content["step"], content["files"], content["metadata"])
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _Invalid(f"{MANIFEST_NAME} lacks its parts") from error
    if raw != expected:
        raise _Invalid(f"{MANIFEST_NAME} does not match its own digest")
    if type(content["step"]) is not int or content["step"] != step_of(folder.name):
        raise _Invalid(f"{MANIFEST_NAME} is of step {content['step']!r}")
    for name, record in content["files"].items():
        size_bytes, sha256 = record.get("size_bytes"), record.get("sha256")
        if (
            type(size_bytes) is not int
            or not isinstance(sha256, str)
            or not _SHA256.fullmatch(sha256)
        ):
            raise _Invalid(f"{MANIFEST_NAME} has no size and SHA-256 for {name!a}")
    return content


def share_out(
    sizes: Mapping[str, int], shares: int, wanted: Callable[[str], range] = lambda name: range(0)
) -> dict[str, int]:
    """Which of several shares each thing goes to: largest first, to whoever has least so far.

    Args:
        wanted: the shares that have a use for it: one of them has it as long as that makes none
            larger than the mean.
    """
    taken, found, mean = [0] * shares, {}, sum(sizes.values()) / shares
    for name in sorted(sizes, key=lambda name: (not wanted(name), -sizes[name], name)):
        share = least = taken.index(min(taken))
        if wanted(name):
            best = min(wanted(name), key=taken.__getitem__)
            if taken[best] == taken[least] or taken[best] + sizes[name] <= mean:
                share = best
        taken[share] += sizes[name]
        found[name] = share
    return found


def reading_shares(files: Mapping[str, Mapping[str, Any]], readers: int) -> dict[str, int]:
    """Which of the ranks that resume looks at the content of each file.

    As far as that shares the bytes evenly, a rank looks at those that it will load, which its node
    then holds in memory: as many ranks as have written, at theirs.
    """
    numbers = {name: int(found.group(1)) for name in files if (found := _OF_RANK.fullmatch(name))}
    writers = max(numbers.values(), default=0) + 1

    def wanted(name: str) -> range:
        if name not in numbers:
            return range(0)
        first = numbers[name] * readers // writers
        return range(first, -(-(numbers[name] + 1) * readers // writers))

    return share_out(
        {name: record["size_bytes"] for name, record in files.items()}, readers, wanted
    )


def _check(folder: Path, hashes: bool, reader: int, readers: int) -> dict[str, Any]:
    if step_of(folder.name) is None:
        raise _Invalid("the name is not checkpoint-<step>")
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        raise _Invalid("not a folder (links are not followed)")
    sizes, strange = durable_files.walk_files(folder)
    if special := [name for name in strange if not name.endswith("/")]:
        raise _Invalid(f"holds a link or a special file: {_some(special)}")
    if MANIFEST_NAME not in sizes:
        raise _Invalid(f"{MANIFEST_NAME} is missing: not written by this package, or not whole")
    manifest = _read_manifest(folder)
    files = manifest["files"]
    if extra := [name for name in sizes if name not in files and name != MANIFEST_NAME]:
        raise _Invalid(f"extra file, not in the manifest: {_some(extra)}")
    if missing := [name for name in files if name not in sizes]:
        raise _Invalid(f"missing file: {_some(missing)}")
    if strange:
        raise _Invalid(f"holds an empty folder: {_some(strange)}")
    if forbidden := [name for name in files if not is_allowed(name) or name == MANIFEST_NAME]:
        raise _Invalid(f"a file of a kind that no checkpoint holds: {_some(forbidden)}")
    for name, record in sorted(files.items()):
        if sizes[name] != record["size_bytes"]:
            raise _Invalid(f"{name!a} has {sizes[name]} bytes, not {record['size_bytes']}")
    if hashes:
        names = [name for name, share in reading_shares(files, readers).items() if share == reader]
        found = durable_files.hash_files([folder / name for name in names])
        if changed := [
            name
            for name, sha256 in zip(names, found, strict=True)
            if sha256 != files[name]["sha256"]
        ]:
            raise _Invalid(f"{_CHANGED} (SHA-256 differs): {_some(changed)}")
    return manifest


def verify(
    folder: Path | str, *, hashes: bool = True, reader: int = 0, readers: int = 1
) -> Validity:
    """Check a checkpoint folder: every file's presence, size and hash, no other file, the
    manifest's digest, the step.

    Never raises for a broken folder: what is wrong is the answer. Where several machines share the
    file system, a checkpoint that is younger than their caches, or cannot be read, is looked at
    again before it is found invalid.

    Args:
        folder: `.../checkpoint-<step>`.
        hashes: False leaves out the reading of the files (about 1 s for each GB and core): names,
            sizes and the manifest are still checked.
        reader, readers: this process and how many share the reading; it is valid if each finds it
        valid.
    """
    validity = _judge(Path(folder), hashes, reader, readers)
    if (doubt_seconds := _doubt_seconds(Path(folder), validity)) > 0:
        for _ in looks(folder, doubt_seconds):
            validity = _judge(Path(folder), hashes, reader, readers)
            if validity.valid or _CHANGED in validity.why:
                break
    return validity


def _doubt_seconds(folder: Path, validity: Validity) -> float:
    """How long what is wrong with a checkpoint may still turn out to be this machine's old view of
    it.
    """
    if validity.valid or _CHANGED in validity.why:
        return 0.0
    try:
        if not os.path.lexists(folder) or not is_shared(folder):
            return 0.0
        if validity.unread:
            return UNREAD_SECONDS
        return min(
            SEEN_WITHIN_SECONDS, SEEN_WITHIN_SECONDS - (time.time() - os.lstat(folder).st_mtime)
        )
    except (OSError, ValueError):
        return 0.0


def _judge(folder: Path, hashes: bool, reader: int, readers: int) -> Validity:
    try:
        return Validity(True, "", _check(folder, hashes, reader, readers))
    except _Invalid as reason:
        return Validity(False, str(reason), None)
    except OSError as error:
        name = os.path.basename(os.fsdecode(error.filename)) if error.filename else "it"
        return Validity(
            False, f"{name!a} cannot be read: {error.strerror or error}", None, unread=True
        )
    except ValueError as error:  # a name with a NUL, a number too long to convert
        return Validity(False, f"cannot be read: {error}", None)


def list_checkpoints(run_folder: Path | str) -> list[Path]:
    """Everything named `checkpoint-<step>` in a run folder, lowest step first; whether it is valid
    is for `verify`.

    Raises:
        StateError: the folder is there but cannot be read.
    """
    try:
        names = os.listdir(run_folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StateError(
            f"the run folder cannot be read: {error.strerror or error}", str(run_folder)
        ) from error
    found = [(step, name) for name in names if (step := step_of(name)) is not None]
    return [Path(run_folder) / name for _, name in sorted(found)]


def newest_valid(
    run_folder: Path | str, *, hashes: bool = True, damaged: Mapping[str, str] | None = None
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The valid checkpoint of the highest step, and the newer ones that were skipped, each with the
    reason.

    Args:
        hashes: as for `verify`.
        damaged: names of those that are known not to be valid, with the reason.

    Raises:
        StateError: the folder is there but cannot be read.
    """
    for _ in looks(run_folder):
        found, skipped, is_old = _newest_of(list_checkpoints(run_folder), hashes, damaged or {})
        if not is_old:
            break
    return found, skipped


def _newest_of(
    listed: list[Path], hashes: bool, damaged: Mapping[str, str]
) -> tuple[Path | None, list[tuple[Path, str]], bool]:
    """As `newest_valid`, and whether the list is old: something in it is gone, so something may
    have come as well.
    """
    skipped: list[tuple[Path, str]] = []
    is_old = False
    for folder in reversed(listed):
        known = damaged.get(folder.name)
        validity = verify(folder, hashes=hashes) if known is None else Validity(False, known, None)
        if validity.valid:
            return folder, skipped, is_old
        if os.path.lexists(folder):
            skipped.append((folder, validity.why))
        else:
            is_old = True
    return None, skipped, is_old
