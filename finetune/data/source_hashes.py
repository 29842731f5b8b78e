"""SHA-256 of the data files, remembered on each node, so that a start looks at their state instead
of reading them all.

As git's index does: a file is taken for unchanged while size, times and inode are what they were
when it was hashed. A file written to twice within one tick of its file system's clock would look
unchanged, so what was young when it was hashed is hashed again ("racy" in git's words), but for the
processes of the same start.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.data.cache import locked, this_start
from finetune.errors import DataError
from finetune.storage.durable_files import hash_files, replace_file

# More than the ticks of file systems' clocks (two seconds on FAT), and some seconds for a server
# whose clock is late.
YOUNG_SECONDS = 10

# Name of a file -> [its state, SHA-256, "old" or, of a young one, what the processes of that start
# have in common].
Notes = dict[str, list[Any]]


def state_of(path: Path) -> list[int]:
    """What differs when a file was written to or replaced: size, times of content and of inode,
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
    try:
        paths = [path.resolve(strict=True) for path in sources]
        notes = cache_dir / f"sources.{socket.gethostname()}.json"
        known = _known(_read(notes), paths)
    except OSError as error:
        raise _unreadable(error) from error
    if len(known) < len(set(paths)):
        with locked(notes.with_suffix(".lock")):
            known = _hash_the_rest(notes, paths)
    return [known[path] for path in paths]


def _hash_the_rest(notes: Path, paths: Sequence[Path]) -> dict[Path, str]:
    written = _read(notes)
    known = _known(written, paths)
    rest = sorted(set(paths) - set(known))
    now = time.time_ns()
    try:
        before = [state_of(path) for path in rest]
        digests = hash_files(rest)
        after = [state_of(path) for path in rest]
    except OSError as error:
        raise _unreadable(error) from error
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
    try:
        written = json.loads(notes.read_bytes())
    except (OSError, ValueError):
        return {}
    notes_of_files = written.items() if isinstance(written, dict) else ()
    return {
        name: note for name, note in notes_of_files if isinstance(note, list) and len(note) == 3
    }


def _known(notes: Notes, paths: Sequence[Path]) -> dict[Path, str]:
    """The hashes that still hold."""
    start = this_start()
    found = {}
    for path in paths:
        state, digest, hashed_by = notes.get(str(path), (None, "", None))
        if state == state_of(path) and hashed_by is not None and hashed_by in ("old", start):
            found[path] = digest
    return found


def _unreadable(error: OSError) -> DataError:
    what = f"the file cannot be read: {error.strerror}"
    return DataError(what, where=str(error.filename), fix="check its permissions")
