"""Folders that are made once: by content fingerprint, under a lock, atomically, and verified when
read.

One of the processes that a launcher starts on a node reads the whole entry to verify it. The others
rely on its result; otherwise hundreds would read the same gigabytes one after another. Nodes verify
in parallel.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from finetune.errors import DataError
from finetune.runtime.launch_environment import launch_world
from finetune.runtime.process_start import process_start
from finetune.storage.durable_files import hash_files, move, remove_tree, replace_file
from finetune.storage.run_lock import claimed, try_flock
from finetune.storage.shared_storage import has_name, make_folder, poll_attempts

logger = logging.getLogger("finetune")

META_FILE = "meta.json"
Make = Callable[[Path], Mapping[str, Any]]
_COMPARED_ENTRIES = 50  # older entries that are compared to find what changed


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/finetune/samples`, or the same under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "finetune" / "samples"


def key_of(parts: Mapping[str, str]) -> str:
    """Return the entry's name: a hash of all the parts."""
    text = json.dumps(dict(parts), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def open_or_make(
    cache_dir: Path,
    parts: Mapping[str, str],
    make: Make,
    what: str = "tokenized data",
) -> Path:
    """Return the folder for `parts`: found and verified, or made by `make` once for all processes
    that request it.

    Args:
        cache_dir: where entries live; made where missing.
        parts: what the contents depend on, by name ("data", "tokenizer", ...); each a hash or a
            short text.
        make: fills the folder it is given and returns JSON values to keep in its meta.json; `files`
            among them are SHA-256 that it knows already, by name. The folder may hold what a
            process that was stopped left there.
        what: is kept there, for messages.

    Raises:
        DataError: the cache folder cannot be written. Nothing of the entry stays.
        Exception: any error of `make`. After a DataError nothing of the entry stays. After other
            errors, and after a kill, the next `make` finds what its folder holds.
    """
    key = key_of(parts)
    folder = cache_dir / key
    with wrap_write_errors(folder, what):
        make_folder(cache_dir, parents=True)
        with locked(cache_dir / f"{key}.{socket.gethostname()}.lock", what) as note:
            if _verified_in_this_start(note, folder):
                return folder
            with locked(cache_dir / f"{key}.lock", what, shared=True):
                fault = _fault(folder)
            if fault is None:
                logger.info("%s: reusing %s", what, folder)
            else:
                with locked(cache_dir / f"{key}.lock", what):
                    fault = _fault(folder)  # another node may have made it meanwhile
                    if fault is not None:
                        why = fault or _what_changed(cache_dir, parts)
                        logger.info("%s: making %s (%s)", what, folder, why)
                        if fault:
                            remove_tree(folder)
                        _make(cache_dir, key, parts, make)
            _note_verified(note, folder)
    return folder


def find(cache_dir: Path, parts: Mapping[str, str]) -> Path | None:
    """Return the folder for `parts`, or None if it is missing or damaged."""
    folder = cache_dir / key_of(parts)
    return folder if _fault(folder) is None else None


@contextlib.contextmanager
def wrap_write_errors(folder: Path, what: str = "tokenized data") -> Iterator[None]:
    """Turn the system's errors into DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the cache of {what} cannot be written: {error}",
            where=str(folder),
            fix="free space there, or name another folder with --cache-dir",
        ) from error


def read_meta(folder: Path) -> dict[str, Any]:
    """Return the result of `make`, with `parts` and `files` (SHA-256 by name)."""
    return json.loads((folder / META_FILE).read_text(encoding="utf-8"))


def this_start() -> list[Any] | None:
    """Identify the launcher, which the processes of one start on one node share; None without
    one.
    """
    if launch_world().world_size == 1:
        return None
    launcher = process_start(os.getppid())
    if launcher.start_ticks is None:
        return None
    return [os.getppid(), launcher.boot_id, launcher.start_ticks]


def _seen(folder: Path) -> dict[str, list[int]]:
    """Return, for each file, what would differ if it had been written to since."""
    return {path.name: state_of(path) for path in sorted(folder.iterdir())}


def _verified_in_this_start(note: IO[str], folder: Path) -> bool:
    """Return whether another process of this start has checked the folder, and nothing was written
    there since.
    """
    start = this_start()
    if start is None:
        return False
    note.seek(0)
    try:
        return bool(json.load(note) == {"start": start, "files": _seen(folder)})
    except (OSError, ValueError):
        return False


def _note_verified(note: IO[str], folder: Path) -> None:
    """Note in the host's lock file that a process of this start has verified the folder."""
    note.seek(0)
    note.truncate()
    json.dump({"start": this_start(), "files": _seen(folder)}, note)
    note.flush()


def _make(cache_dir: Path, key: str, parts: Mapping[str, str], make: Make) -> None:
    """Fill a temporary folder and rename it; we hold the lock, so what is in it is of a process
    that was stopped.
    """
    temporary = cache_dir / f".making-{key}"
    temporary.mkdir(exist_ok=True)
    try:
        meta = dict(make(temporary))
    except DataError:
        shutil.rmtree(temporary)
        raise
    files = dict(meta.get("files", {}))
    rest = [path for path in sorted(temporary.iterdir()) if path.name not in files]
    for path, digest in zip(rest, hash_files(rest), strict=True):
        files[path.name] = digest
    meta |= {"parts": dict(parts), "files": files}
    (temporary / META_FILE).write_text(json.dumps(meta, indent=1), encoding="utf-8")
    _publish(temporary, cache_dir / key)


def _publish(temporary: Path, folder: Path) -> None:
    """Give a made folder its name; what another node has put there, whole, is kept: others may read
    it already.
    """
    try:
        move(temporary, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or _fault(folder) is not None:
            raise
        remove_tree(temporary)


def _fault(folder: Path) -> str | None:
    """Return what is wrong with the folder; None if nothing is, "" if it does not exist."""
    if not has_name(folder):
        return ""
    fault = ""
    # over a network, what another node has made may not be seen yet
    for _ in poll_attempts(folder):
        try:
            files = read_meta(folder)["files"]
            digests = hash_files([folder / name for name in files])
            damaged = [
                name for name, digest in zip(files, digests, strict=True) if digest != files[name]
            ]
            return f"{damaged[0]} was damaged" if damaged else None
        except FileNotFoundError as error:
            fault = f"{Path(error.filename).name} was missing"
        except OSError:
            fault = f"{META_FILE} was unreadable"
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"{META_FILE} was unreadable"
    return fault


def _what_changed(cache_dir: Path, parts: Mapping[str, str]) -> str:
    """Describe how the nearest older entry differs, to explain why the cache was not used."""
    nearest: list[str] | None = None
    entries = sorted(cache_dir.glob(f"*/{META_FILE}"), key=_written_at, reverse=True)
    for path in entries[:_COMPARED_ENTRIES]:
        try:
            older = json.loads(path.read_text(encoding="utf-8"))["parts"]
            changed = [
                change
                for name, now in parts.items()
                for change in _changes(name, older.get(name, ""), now)
            ]
        except (OSError, ValueError, KeyError, AttributeError):
            continue  # skip a damaged entry; it is made again when it is asked for
        if nearest is None or len(changed) < len(nearest):
            nearest = changed
    if nearest is None:
        return "the first of its kind"
    return "compared with the nearest earlier data: " + ", ".join(nearest)


def _written_at(path: Path) -> float:
    """Seconds; 0 if another process has removed the file meanwhile."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _changes(name: str, before: str, after: str) -> list[str]:
    """Nothing for equal parts, `name changed` for hashes, each value for JSON options."""
    if before == after:
        return []
    if not (before.startswith("{") and after.startswith("{")):
        return [f"{name} changed"]
    old, new = json.loads(before), json.loads(after)
    return [
        f"{key} {old.get(key)} -> {value}" for key, value in new.items() if old.get(key) != value
    ]


@contextlib.contextmanager
def locked(path: Path, what: str = "tokenized data", *, shared: bool = False) -> Iterator[IO[str]]:
    """Hold an flock on the file.

    The lock ends with its process, so a killed process blocks no other; the file stays.

    Where the file system has no locks that all machines see, a claim (storage/run_lock.py) replaces
    it.
    """
    mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    with path.open("a+", encoding="utf-8") as file, contextlib.ExitStack() as stack:
        is_locked = try_flock(file.fileno(), mode, path)
        # a complete entry is only read, and made under another name
        if is_locked is None and not shared:
            stack.enter_context(claimed(path.with_suffix(".claim"), what))
        elif is_locked is False:
            logger.info("%s: another process is making or checking it; waiting", what)
            fcntl.flock(file, mode)
        yield file


# ---------------------------------------------------------------- hashes of the data files
#
# Remembered on each node, so that a start checks the state of the files instead of reading them
# all. As in git's index, a file counts as unchanged while its size, times and inode are what they
# were when it was hashed. A file that is written to twice within one tick of its file system's
# clock would look unchanged. So a file that was young when it was hashed ("racy" in git) is hashed
# again, but not by the processes of the same start.

# More than the ticks of file systems' clocks (two seconds on FAT), and some seconds for a server
# whose clock is late.
YOUNG_SECONDS = 10

# Name of a file -> [its state, its SHA-256, "old" or, if it was young, `this_start()`].
Notes = dict[str, list[Any]]


def state_of(path: Path) -> list[int]:
    """Return what differs when a file was written to or replaced: size, times of content and inode,
    inode.
    """
    state = path.stat()
    return [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]


def source_hashes(sources: Sequence[Path], cache_dir: Path) -> list[str]:
    """SHA-256 of each file; those that are not known are read by one process of the node, the
    others wait for it.

    Raises:
        DataError: a file cannot be read.
        OSError: the cache folder cannot be written.
    """
    notes = cache_dir / f"sources.{socket.gethostname()}.json"
    with _wrap_source_errors():
        paths = [path.resolve(strict=True) for path in sources]
        known = _known(_read(notes), paths)
    if len(known) < len(set(paths)):
        with locked(notes.with_suffix(".lock")):
            known = _hash_the_rest(notes, paths)
    return [known[path] for path in paths]


def _hash_the_rest(notes: Path, paths: Sequence[Path]) -> dict[Path, str]:
    """Hash the files that are not known, and note them; the caller holds the lock of the notes."""
    written = _read(notes)
    known = _known(written, paths)
    rest = sorted(set(paths) - set(known))
    now = time.time_ns()
    with _wrap_source_errors():
        before = [state_of(path) for path in rest]
        digests = hash_files(rest)
        after = [state_of(path) for path in rest]
    for path, state, digest, later in zip(rest, before, digests, after, strict=True):
        if state != later:
            raise DataError(
                "the file was changed while it was read", str(path), "start again when it is whole"
            )
        is_young = max(state[1:3]) > now - YOUNG_SECONDS * 10**9
        written[str(path)] = [state, digest, this_start() if is_young else "old"]
    if rest:
        there = {name: note for name, note in written.items() if Path(name).exists()}
        replace_file(notes, json.dumps(there).encode())
    return known | dict(zip(rest, digests, strict=True))


def _read(notes: Path) -> Notes:
    """Read the notes of a node; empty if there are none, or if they are damaged."""
    try:
        written = json.loads(notes.read_bytes())
    except (OSError, ValueError):
        return {}
    notes_of_files = written.items() if isinstance(written, dict) else ()
    return {
        name: note for name, note in notes_of_files if isinstance(note, list) and len(note) == 3
    }


def _known(notes: Notes, paths: Sequence[Path]) -> dict[Path, str]:
    """Return the hashes that still hold."""
    start = this_start()
    found = {}
    for path in paths:
        state, digest, hashed_by = notes.get(str(path), (None, "", None))
        if state == state_of(path) and hashed_by is not None and hashed_by in ("old", start):
            found[path] = digest
    return found


@contextlib.contextmanager
def _wrap_source_errors() -> Iterator[None]:
    """Turn the system's errors into DataError."""
    try:
        yield
    except OSError as error:
        what = f"the file cannot be read: {error.strerror}"
        raise DataError(what, where=str(error.filename), fix="check its permissions") from error
