"""Checkpoint folders as files: staged, published by one rename, verified, rotated. Needs no torch.

To save, every rank writes its files into one staging folder, hashes them (SHA-256) while writing
and syncs them. Then one rank writes the manifest, syncs the folder and renames it to
`checkpoint-<step>`. Files that libraries write (a tokenizer's, an adapter's) are read back for
their hash. No rank reads what another has written.

After a kill or power loss at any moment the run folder holds the previous valid checkpoint, the new
one, or both. Anything else that may be left has a name that starts with a dot:

    .staging-<step>-<token>           a save that did not finish; `clean_staging` removes it
    .removing-checkpoint-<step>       a removal that did not finish; `clean_staging` removes it
    .invalid-checkpoint-<step>-<n>    a broken checkpoint whose name a new one took, kept for its
                                      owner

Nothing is unpickled here or anywhere else: a checkpoint holds safetensors, JSON and the text files
of a tokenizer. A folder with any other file is invalid as a whole, and those files are not opened.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from finetune.errors import ConfigError, FinetuneError, StateError
from finetune.storage import durable_files
from finetune.storage.shared_storage import (
    SEEN_WITHIN_SECONDS,
    is_shared,
    make_folder,
    poll_attempts,
)

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
MANIFEST_LIMIT_BYTES = 64 << 20
# Formats whose readers run no code: weights, JSON, and the other files of tokenizers.
ALLOWED_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model", ".md")

UNREAD_SECONDS = 10.0

_CHANGED = "content changed"
_CHECKPOINT_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# training/state.py: a file that one rank wrote
_OF_RANK = re.compile(r".*-([0-9]{5})\.safetensors")
# How long rank 0 waits for another node's files to appear through a network file system's cache.
VISIBLE_WITHIN_SECONDS = 60.0
KEEP_AT_LEAST = 2

_TOKEN = re.compile(r"[A-Za-z0-9]{1,64}")
_UNFINISHED = re.compile(r"\.staging-\d+-[A-Za-z0-9]{1,64}|\.removing-checkpoint-\d+")

logger = logging.getLogger("finetune")


# ---------------------------------------------------------------- the manifest and what it proves


@dataclass(frozen=True)
class Validity:
    """Whether a checkpoint folder may be used, and if not, why.

    Attributes:
        manifest: None if it cannot be trusted.
        unread: the system did not let it be read, here and now; it may be whole.
    """

    valid: bool
    why: str
    manifest: dict[str, Any] | None
    unread: bool = False


class _Invalid(Exception):
    """Why a folder is not a valid checkpoint; never leaves this file."""


def step_of(name: str) -> int | None:
    """Return the optimizer step in `checkpoint-<step>`, or None for any other name."""
    found = _CHECKPOINT_NAME.fullmatch(name)
    return int(found.group(1)) if found else None


def is_allowed(name: str) -> bool:
    """Return whether a checkpoint may hold a file of this name (relative to the folder)."""
    return name.endswith(ALLOWED_SUFFIXES)


def _canonical(content: Mapping[str, Any]) -> bytes:
    return (
        json.dumps(
            content,
            sort_keys=True,
            indent=1,
            allow_nan=False,
        )
        + "\n"
    ).encode("ascii")


def manifest_bytes(
    step: int, files: Mapping[str, Mapping[str, Any]], metadata: Mapping[str, Any]
) -> bytes:
    """Return the manifest of a checkpoint as it is on disk. Its `digest` is the SHA-256 of the same
    text without the digest.

    Args:
        files: `{"size_bytes": int, "sha256": str}` by relative name.

    Raises:
        TypeError, ValueError: the metadata is not JSON-serializable (or holds NaN).
    """
    content = {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        "files": {name: dict(record) for name, record in files.items()},
        "metadata": dict(metadata),
    }
    return _canonical({**content, "digest": hashlib.sha256(_canonical(content)).hexdigest()})


def _forbidden(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if not is_allowed(name) or name == MANIFEST_NAME)


def _some(names: Collection[str]) -> str:
    """Return the first few names, escaped so that any terminal can print them."""
    shown = ", ".join(ascii(name) for name in sorted(names)[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest, and check its digest, its schema, and its step against the folder's
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
        sha256 = record.get("sha256")
        is_digest = isinstance(sha256, str) and _SHA256.fullmatch(sha256)
        if type(record.get("size_bytes")) is not int or not is_digest:
            raise _Invalid(f"{MANIFEST_NAME} has no size and SHA-256 for {name!a}")
    return content


def share_out(
    sizes: Mapping[str, int], shares: int, preferred: Callable[[str], range] = lambda name: range(0)
) -> dict[str, int]:
    """Assign each file or tensor to a share: largest first, to the share with the least so far.

    Args:
        preferred: the shares that can use it: one of them gets it unless that makes a share larger
            than the mean.
    """
    taken = [0] * shares
    found: dict[str, int] = {}
    mean = sum(sizes.values()) / shares
    for name in sorted(sizes, key=lambda name: (not preferred(name), -sizes[name], name)):
        share = least = taken.index(min(taken))
        if preferred(name):
            best = min(preferred(name), key=taken.__getitem__)
            if taken[best] == taken[least] or taken[best] + sizes[name] <= mean:
                share = best
        taken[share] += sizes[name]
        found[name] = share
    return found


def reading_shares(files: Mapping[str, Mapping[str, Any]], readers: int) -> dict[str, int]:
    """Assign each file to one of the ranks that resume, which reads and hashes it.

    As far as that divides the bytes evenly, a rank reads the files that it will load, which its
    node then holds in memory.
    """
    numbers: dict[str, int] = {}
    for name in files:
        found = _OF_RANK.fullmatch(name)
        if found:
            numbers[name] = int(found.group(1))
    writers = max(numbers.values(), default=0) + 1

    def preferred(name: str) -> range:
        if name not in numbers:
            return range(0)
        first = numbers[name] * readers // writers
        return range(first, -(-(numbers[name] + 1) * readers // writers))

    sizes = {name: record["size_bytes"] for name, record in files.items()}
    return share_out(sizes, readers, preferred)


def _check(folder: Path, hashes: bool, reader: int, readers: int) -> dict[str, Any]:
    if step_of(folder.name) is None:
        raise _Invalid("the name is not checkpoint-<step>")
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        raise _Invalid("not a folder (links are not followed)")
    sizes, unexpected = durable_files.walk_files(folder)
    special = [name for name in unexpected if not name.endswith("/")]
    if special:
        raise _Invalid(f"holds a link or a special file: {_some(special)}")
    if MANIFEST_NAME not in sizes:
        raise _Invalid(f"{MANIFEST_NAME} is missing: not written by this package, or not whole")
    manifest = _read_manifest(folder)
    files = manifest["files"]
    extra = sizes.keys() - files.keys() - {MANIFEST_NAME}
    if extra:
        raise _Invalid(f"extra file, not in the manifest: {_some(extra)}")
    missing = files.keys() - sizes.keys()
    if missing:
        raise _Invalid(f"missing file: {_some(missing)}")
    if unexpected:
        raise _Invalid(f"holds an empty folder: {_some(unexpected)}")
    forbidden = _forbidden(files)
    if forbidden:
        raise _Invalid(f"a file of a kind that no checkpoint holds: {_some(forbidden)}")
    for name, record in sorted(files.items()):
        if sizes[name] != record["size_bytes"]:
            raise _Invalid(f"{name!a} has {sizes[name]} bytes, not {record['size_bytes']}")
    if hashes:
        names = [name for name, share in reading_shares(files, readers).items() if share == reader]
        found = durable_files.hash_files([folder / name for name in names])
        changed = [
            name
            for name, sha256 in zip(names, found, strict=True)
            if sha256 != files[name]["sha256"]
        ]
        if changed:
            raise _Invalid(f"{_CHANGED} (SHA-256 differs): {_some(changed)}")
    return manifest


def verify(
    folder: Path | str, *, hashes: bool = True, reader: int = 0, readers: int = 1
) -> Validity:
    """Check a checkpoint folder: every file's presence, size and hash, no other file, the
    manifest's digest, the step.

    Never raises for a broken folder: the result describes the problem. If several machines share
    the file system, a checkpoint that is younger than their caches, or cannot be read, is checked
    again before it counts as invalid.

    Args:
        folder: `.../checkpoint-<step>`.
        hashes: False does not read the files (about 1 s for each GB and core): names, sizes and the
            manifest are still checked.
        reader, readers: this process, and how many share the reading. A checkpoint is valid if each
            of them finds it valid.
    """
    folder = Path(folder)
    validity = _judge(folder, hashes, reader, readers)
    doubt_seconds = _doubt_seconds(folder, validity)
    if doubt_seconds > 0:
        for _ in poll_attempts(folder, doubt_seconds):
            validity = _judge(folder, hashes, reader, readers)
            if validity.valid or _CHANGED in validity.why:
                break
    return validity


def _doubt_seconds(folder: Path, validity: Validity) -> float:
    """Return how many seconds a problem may still turn out to be this machine's stale cache."""
    if validity.valid or _CHANGED in validity.why:
        return 0.0
    try:
        if not os.path.lexists(folder) or not is_shared(folder):
            return 0.0
        if validity.unread:
            return UNREAD_SECONDS
        age_seconds = time.time() - os.lstat(folder).st_mtime
        return SEEN_WITHIN_SECONDS - max(0.0, age_seconds)
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
    """Return everything named `checkpoint-<step>` in a run folder, lowest step first, valid or not.

    Raises:
        StateError: the folder exists but cannot be read.
    """
    try:
        names = os.listdir(run_folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StateError(
            f"the run folder cannot be read: {error.strerror or error}", str(run_folder)
        ) from error
    steps = {name: step for name in names if (step := step_of(name)) is not None}
    return [Path(run_folder) / name for name in sorted(steps, key=steps.__getitem__)]


def newest_valid(
    run_folder: Path | str, *, hashes: bool = True, damaged: Mapping[str, str] | None = None
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Find the valid checkpoint of the highest step, and the newer ones that were skipped, each
    with the reason.

    Args:
        hashes: as for `verify`.
        damaged: names of checkpoints that are known to be invalid, with the reason.

    Raises:
        StateError: the folder exists but cannot be read.
    """
    for _ in poll_attempts(run_folder):
        listed = list_checkpoints(run_folder)
        found, skipped, is_outdated = _newest_of(listed, hashes, damaged or {})
        if not is_outdated:
            break
    return found, skipped


def _newest_of(
    listed: list[Path], hashes: bool, damaged: Mapping[str, str]
) -> tuple[Path | None, list[tuple[Path, str]], bool]:
    """Do as `newest_valid`, and also return whether the list is outdated: something in it is gone,
    so something may have been added too.
    """
    skipped: list[tuple[Path, str]] = []
    is_outdated = False
    for folder in reversed(listed):
        known = damaged.get(folder.name)
        validity = verify(folder, hashes=hashes) if known is None else Validity(False, known, None)
        if validity.valid:
            return folder, skipped, is_outdated
        if os.path.lexists(folder):
            skipped.append((folder, validity.why))
        else:
            is_outdated = True
    return None, skipped, is_outdated


# ---------------------------------------------------------------- saving and removing


class CheckpointWriter:
    """One save. Every rank enters it; an error inside removes the staging folder and is explained.

        with CheckpointWriter(run_folder, step, token) as writer:
            name = f"slices-{rank}.safetensors"
            records = {name: write_tensors(writer.folder / name, tensors)}
            records |= writer.seal(["tokenizer.json"])  # written by something else
            ...                                         # gather the records of all ranks on rank 0
            if rank == 0:
                writer.publish(all_records, metadata)

    Args:
        run_folder: the run's folder; it exists, is locked by this run and is seen by all ranks.
        step: optimizer steps done.
        token: letters and digits, the same on every rank, new for every save.

    Raises (on entry, and from any OSError or safetensors input/output error inside):
        FinetuneError: the folder, the needed and free bytes, and the previous checkpoint.
    """

    def __init__(self, run_folder: Path | str, step: int, token: str) -> None:
        if step < 0 or not _TOKEN.fullmatch(token):
            raise ValueError(
                f"a step >= 0 and a token of letters and digits are needed, not {step!r} and"
                f" {token!r}"
            )
        self.run_folder = Path(run_folder)
        self.step = step
        self.folder = self.run_folder / f".staging-{step}-{token}"

    def __enter__(self) -> CheckpointWriter:
        try:
            make_folder(self.folder)  # another rank may be first
        except OSError as error:
            raise self._explained(error) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            return
        cause = durable_files.os_error_in(error)
        if cause is None:
            self.discard()
            return
        explained = self._explained(cause)  # before the files that it counts are gone
        self.discard()
        raise explained from error

    def seal(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Sync and read files that this rank has written; return their records: `{"size_bytes",
        "sha256"}` by name.

        Args:
            names: relative to the staging folder, with forward slashes.
        """
        paths = [self.folder / name for name in names]
        for path in paths:
            durable_files.sync_file(path)
        hashes = durable_files.hash_files(paths)
        return {
            name: {"size_bytes": os.lstat(path).st_size, "sha256": sha256}
            for name, path, sha256 in zip(names, paths, hashes, strict=True)
        }

    def publish(
        self, records: Mapping[str, Mapping[str, Any]], metadata: Mapping[str, Any]
    ) -> Path:
        """Make the staging folder the checkpoint of its step, verify it and return it. One rank
        calls this.

        A valid checkpoint that exists already is kept and the staging folder dropped (the same step
        of the same run holds the same training); an invalid one is moved aside.

        Args:
            records: of the files of all ranks, as `seal` and `durable_files.write_hashed` return
                them.
            metadata: JSON-serializable facts, without paths of this machine: global batch size,
                seed, schedule hash, data fingerprint, package versions.

        Raises:
            FinetuneError: a file is missing, unsealed or of a kind that no checkpoint holds; the
                checkpoint does not verify after it was written; or as for the class.
        """
        self._check_staged(records)
        try:
            manifest = manifest_bytes(self.step, records, metadata)
        except (TypeError, ValueError) as error:
            raise FinetuneError(
                f"the facts of a checkpoint must be plain JSON: {error}", str(self.folder)
            ) from error
        durable_files.write_new(self.folder / MANIFEST_NAME, manifest)
        self._sync_folders(records)
        target = self.run_folder / f"checkpoint-{self.step}"
        if durable_files.is_taken(target):
            found = verify(target)  # another process's, of the same step
            if found.valid:
                self.discard()
                return target
            if found.unread:
                raise FinetuneError(
                    f"{target.name} is there already and cannot be read: {found.why}",
                    str(self.run_folder),
                    "see to the mount or the disk, then start the same command again",
                )
            set_aside(target, found.why)
        durable_files.move(self.folder, target)
        durable_files.sync_folder(self.run_folder)
        written = verify(target, hashes=False)  # each rank has hashed its own files
        if not written.valid:
            raise FinetuneError(
                f"{target.name} was written but does not verify: {written.why}",
                str(self.run_folder),
                f"test the disk and the memory of this machine. {self._previous()}",
            )
        return target

    def discard(self) -> None:
        """Remove the staging folder if possible; else `clean_staging` does when the run resumes."""
        try:
            durable_files.remove_tree(self.folder, missing_ok=True)
        except OSError as error:
            logger.warning(
                "%s could not be removed (%s); the next start of this run does it",
                self.folder.name,
                error,
            )

    def _check_staged(self, records: Mapping[str, Mapping[str, Any]]) -> None:
        """Check that exactly the recorded files are in the staging folder; wait for those of other
        nodes to become visible.
        """
        refused = _forbidden(records)
        if refused:
            raise FinetuneError(
                f"a checkpoint must not hold {refused}",
                str(self.folder),
                "save it as safetensors or JSON",
            )
        for _ in poll_attempts(self.folder, VISIBLE_WITHIN_SECONDS):
            # This node may see the files of other nodes as they were a minute ago.
            sizes, unexpected = durable_files.walk_files(self.folder)
            absent = [name for name in records if sizes.get(name) != records[name]["size_bytes"]]
            unsealed = sorted({*sizes, *unexpected} - records.keys())
            if not absent and not unsealed:
                return
        if absent:
            raise FinetuneError(
                "files of other ranks are not seen by the rank that publishes:"
                f" {sorted(absent)[:5]}",
                str(self.folder),
                "put --output-dir on a file system that all nodes share",
            )
        raise FinetuneError(
            f"files in the staging folder that no rank sealed: {unsealed[:5]}", str(self.folder)
        )

    def _sync_folders(self, names: Collection[str]) -> None:
        inner = {parent for name in names for parent in Path(name).parents}
        for folder in sorted(inner | {Path(".")}, key=lambda path: len(path.parts), reverse=True):
            durable_files.sync_folder(self.folder / folder)

    def _previous(self) -> str:
        try:
            previous, _ = newest_valid(self.run_folder, hashes=False)
        except StateError:  # the disk is gone altogether
            return ""
        if previous is None:
            return "There is no previous checkpoint"
        return f"The previous checkpoint is {previous.name}"

    def _explained(self, error: OSError) -> FinetuneError:
        """Turn a system error into one with the sizes and the next step."""
        try:
            free = durable_files.format_bytes(durable_files.free_bytes(self.run_folder))
        except OSError as second:
            free = f"unknown ({second.strerror})"
        staged_bytes = 0
        with contextlib.suppress(OSError):
            staged_bytes = sum(durable_files.walk_files(self.folder)[0].values())
        fixes = {
            errno.ENOSPC: "free some space on it",
            errno.EDQUOT: "free some of your quota on it",
            errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
            errno.EROFS: "have it mounted for writing",
            errno.EIO: (
                "look for its errors in the system log and use another disk if there are any"
            ),
        }
        fix = fixes.get(error.errno or 0, "fix what the system reports about it")
        return FinetuneError(
            f"checkpoint-{self.step} could not be written: {error.strerror or error}; needed more"
            f" than the {durable_files.format_bytes(staged_bytes)} written, free {free}",
            str(self.run_folder),
            f"{fix}, then start the same command again. {self._previous()}".rstrip(),
        )


def set_aside(folder: Path, why: str) -> Path:
    """Rename a checkpoint so that nothing uses it, keep its files, and log that. Returns the new
    path.
    """
    number = 1
    while durable_files.is_taken(aside := folder.parent / f".invalid-{folder.name}-{number}"):
        number += 1
    durable_files.move(folder, aside)
    durable_files.sync_folder(folder.parent)
    logger.warning("%s was moved aside to %s: %s", folder.name, aside.name, why)
    return aside


def rotate(run_folder: Path | str, keep: int, *, known_valid: Collection[str]) -> list[str]:
    """Remove checkpoints older than the `keep` newest valid ones; return the names of the removed
    ones.

    No content is read: otherwise each kept checkpoint would make every save longer. Nothing is
    removed before two newer ones are known to be valid. A folder that is not a checkpoint of this
    package, judging by manifest, names and sizes, is left alone. So is the checkpoint that a kept
    one names as the best: a run finds its best checkpoint from any checkpoint that it resumes from.

    Args:
        run_folder: locked by this run.
        keep: at least 2, because the newest may turn out broken.
        known_valid: names of the checkpoints that this start has written, or verified when it
            resumed.

    Raises:
        ConfigError: `keep` is below 2.
    """
    if keep < KEEP_AT_LEAST:
        raise ConfigError(
            f"save_total_limit is {keep}, below {KEEP_AT_LEAST}",
            "save_total_limit",
            "give 2 or more",
        )
    removed: list[str] = []
    best: set[str] = set()
    kept = known = 0
    try:
        checkpoints = list_checkpoints(run_folder)
    except StateError as error:  # the save itself went well: no reason to stop the run
        logger.warning("no old checkpoint is removed: %s", error)
        return removed
    for folder in reversed(checkpoints):
        enough = kept >= keep and known >= KEEP_AT_LEAST
        validity = verify(folder, hashes=False)
        if not validity.valid:
            # else it was reported when it was new
            if not enough and durable_files.is_taken(folder):
                logger.warning("%s is invalid and left as it is: %s", folder.name, validity.why)
        elif not enough:
            kept += 1
            known += folder.name in known_valid
            metadata = (validity.manifest or {}).get("metadata", {})
            best.add(str((metadata.get("best") or {}).get("checkpoint")))
        elif folder.name not in best and _removed(folder, _remove_checkpoint):
            removed.append(folder.name)
    _finish_removals(run_folder)
    return removed


def _finish_removals(run_folder: Path | str) -> None:
    """Remove what earlier calls could not, because a process had a file of it open."""
    try:
        left = staging_folders(run_folder)
    except OSError as error:
        logger.warning("no old checkpoint is looked for: %s", error.strerror or error)
        return
    for folder in left:
        if folder.name.startswith(".removing-"):
            _removed(folder, durable_files.remove_tree)


def _removed(folder: Path, remove: Callable[[Path], None]) -> bool:
    """Remove a folder, or warn that it could not be done."""
    try:
        remove(folder)
    except OSError as error:
        logger.warning("%s could not be removed: %s", folder.name, error.strerror or error)
        return False
    return True


def _remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint so that a kill midway leaves nothing that looks like one."""
    doomed = folder.parent / f".removing-{folder.name}"
    durable_files.remove_tree(doomed, missing_ok=True)
    durable_files.move(folder, doomed)
    # otherwise a power loss could keep the old name and lose the files
    durable_files.sync_folder(folder.parent)
    durable_files.remove_tree(doomed)


def staging_folders(run_folder: Path | str) -> list[Path]:
    """List the folders of saves and removals in progress, or left behind if no run holds the
    folder's lock.
    """
    return [
        Path(run_folder) / name
        for name in sorted(os.listdir(run_folder))
        if _UNFINISHED.fullmatch(name)
    ]


def clean_staging(run_folder: Path | str) -> list[str]:
    """Remove what killed saves and removals left; return the names. Only for the holder of the run
    folder's lock.
    """
    return [
        folder.name
        for folder in staging_folders(run_folder)
        if _removed(folder, durable_files.remove_tree)
    ]
