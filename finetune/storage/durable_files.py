"""Files that survive a kill and a power loss: written, synced, replaced, hashed, removed.

Everything uses plain `os` calls, one system call each, so that a test can stop a process at every
one of them. A write is durable only when the file *and* the folder that names it are synced:
neither alone is enough (fsync(2)).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from finetune.errors import FinetuneError
from finetune.runtime.parent_watchdog import progress
from finetune.storage.shared_storage import poll_attempts

if TYPE_CHECKING:
    import numpy as np

CHUNK_BYTES = 8 << 20
# While a file is written: otherwise the system would cache a tenth of the memory, and one fsync
# would block for as long as writing that takes.
SYNC_EVERY_BYTES = 1 << 30
# Below this a thread pool costs more than it saves; one core hashes about 1.5 GB/s if it has SHA
# instructions.
PARALLEL_HASHING_FROM_BYTES = 64 << 20
# Errors of a file system without fsync of folders (some FUSE and SMB mounts): it cannot do more.
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF, errno.ENOSYS}
# Passing errors of reading on a network file system: the file was replaced meanwhile (NFS
# identifies files by inode), or a request got lost on a `soft` mount.
_PASSING = {errno.ESTALE, errno.EIO}
READ_ATTEMPTS = 3
MOVED_WITHIN_SECONDS = 10.0
# Names that an NFS client, or libfuse, gives to a file that is removed while a process there has it
# open.
_STILL_OPEN = re.compile(r"\.nfs[0-9a-f]{16,}|\.fuse_hidden[0-9a-f]{16}")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW

P = ParamSpec("P")
T = TypeVar("T")


def _sync_descriptor(descriptor: int) -> None:
    if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync alone stops at the drive's cache
        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
        except OSError:  # not on network volumes
            pass
    os.fsync(descriptor)


@contextlib.contextmanager
def _opened(path: Path, flags: int, mode: int = 0o666) -> Iterator[int]:
    """Open a file or folder, and close it at the end of the block."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _opened_regular(path: Path) -> Iterator[int]:
    """Open a regular file for reading.

    Raises:
        OSError: the path is a link, a folder, a pipe or a device, or cannot be read.
    """
    # O_NONBLOCK: opening a pipe that someone left here must not wait for its writer.
    with _opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as descriptor:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield descriptor


def _retried(read: Callable[P, T]) -> Callable[P, T]:
    """Let a function that opens and reads a file try again after an error that may pass."""

    @functools.wraps(read)
    def read_again(*arguments: P.args, **named: P.kwargs) -> T:
        for _ in range(READ_ATTEMPTS - 1):
            try:
                return read(*arguments, **named)
            except OSError as error:
                if error.errno not in _PASSING:
                    raise
        return read(*arguments, **named)

    return read_again


@_retried
def read_bytes(path: Path, limit_bytes: int) -> bytes:
    """Return the whole content of a regular file.

    Raises:
        OSError: it cannot be read, is not a regular file, or is larger than `limit_bytes`.
    """
    with _opened_regular(path) as descriptor:
        if os.fstat(descriptor).st_size > limit_bytes:
            raise OSError(errno.EFBIG, f"larger than {limit_bytes} bytes", str(path))
        return b"".join(_read_chunks(descriptor))


def _read_chunks(descriptor: int) -> Iterator[bytes]:
    while chunk := os.read(descriptor, CHUNK_BYTES):
        yield chunk


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _write_synced(path: Path, data: bytes, flags: int, mode: int = 0o666) -> None:
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | flags, mode) as descriptor:
        _write_all(descriptor, memoryview(data))
        _sync_descriptor(descriptor)


def write_new(path: Path, data: bytes) -> None:
    """Write and sync a file that must not exist yet; its folder is still to be synced."""
    _write_synced(path, data, os.O_EXCL)


def write_hashed(path: Path, parts: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write and sync a file that must not exist yet; its folder is still to be synced.

    Args:
        parts: the content, as bytes; large parts are not copied.

    Returns:
        The record `{"size_bytes", "sha256"}` of the written bytes: nothing is read back.
    """
    digest = hashlib.sha256()
    size_bytes = unsynced_bytes = 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with _opened(path, flags) as descriptor:
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(view), CHUNK_BYTES):
                chunk = view[start : start + CHUNK_BYTES]
                # while the system writes the chunk before; one core does both at 1 GB/s
                digest.update(chunk)
                _write_all(descriptor, chunk)
                progress.mark_moved()
                size_bytes += len(chunk)
                unsynced_bytes += len(chunk)
                if unsynced_bytes >= SYNC_EVERY_BYTES:
                    _sync_descriptor(descriptor)
                    unsynced_bytes = 0
        _sync_descriptor(descriptor)
    return {"size_bytes": size_bytes, "sha256": digest.hexdigest()}


def move(source: Path, target: Path) -> None:
    """Rename a file or folder. Over a network `os.rename` can succeed and report a missing file.

    If the server's first answer got lost, the request is sent twice, and the second answer is that
    the old name does not exist.
    """
    moved = os.lstat(source)
    try:
        os.rename(source, target)
    except FileNotFoundError:
        for _ in poll_attempts(target.parent, MOVED_WITHIN_SECONDS):
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(moved, os.lstat(target)):
                    return
        raise


def replace_file(path: Path, data: bytes, mode: int = 0o666, *, writer: str = "") -> None:
    """Replace a file's content atomically: it always holds the old or the new content, even after a
    power loss.

    One writer of a name at a time: the temporary name is fixed, so that killed writers do not leave
    many files.

    Args:
        mode: permissions, reduced by the umask.
        writer: distinguishes simultaneous writers; the last one's content remains.
    """
    temporary = path.with_name(f".{path.name}{writer}.tmp")
    try:
        _write_synced(temporary, data, os.O_TRUNC, mode)
        move(temporary, path)
    except OSError:
        remove_tree(temporary, missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Sync a file's content to the device, even if another process wrote it."""
    with _opened_regular(path) as descriptor:
        _sync_descriptor(descriptor)


@functools.cache
def new_file_mode() -> int:
    """Return the permissions of any new file here.

    All threads share the umask, and reading it means setting it: so it is read once, before threads
    write.
    """
    umask = os.umask(0o077)
    os.umask(umask)
    return 0o666 & ~umask


def share_file(path: Path) -> None:
    """Give a file the permissions of any new file: safetensors 0.8 makes files that only the owner
    can read.
    """
    os.chmod(path, new_file_mode())


def sync_folder(path: Path) -> None:
    """Sync a folder's names to the device: files made, renamed and removed in it."""
    with _opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        try:
            _sync_descriptor(descriptor)
        except OSError as error:
            if error.errno not in _NO_FOLDER_SYNC:
                raise


@_retried
def hash_file(path: Path) -> str:
    """Return the SHA-256 of a regular file, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    with _opened_regular(path) as descriptor:
        for chunk in _read_chunks(descriptor):
            digest.update(chunk)
            progress.mark_moved()
    return digest.hexdigest()


def hash_files(paths: Sequence[Path]) -> list[str]:
    """Return the SHA-256 of several regular files, in order; large files are hashed in parallel
    (hashlib releases the GIL).
    """
    total_bytes = sum(os.lstat(path).st_size for path in paths)
    if len(paths) < 2 or total_bytes < PARALLEL_HASHING_FROM_BYTES:
        return [hash_file(path) for path in paths]
    with ThreadPoolExecutor(max_workers=min(8, len(paths), os.cpu_count() or 1)) as pool:
        return list(pool.map(hash_file, paths))


def is_still_open(name: str) -> bool:
    """Return whether a name is that of a file which was removed while a process had it open. The
    file goes when the process closes it.
    """
    return _STILL_OPEN.fullmatch(name) is not None


def walk_files(folder: Path) -> tuple[dict[str, int], list[str]]:
    """List a folder and the folders below it, without following links and without what
    `is_still_open`.

    Returns:
        Sizes of the regular files in bytes, by name (relative, with forward slashes). And the names
        of everything that is neither a regular file nor a folder, and of empty folders; the latter
        end with a slash.
    """
    sizes: dict[str, int] = {}
    unexpected: list[str] = []
    open_folders = [(folder, "")]
    while open_folders:
        here, prefix = open_folders.pop()
        with os.scandir(here) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
        if not entries and prefix:
            unexpected.append(prefix)
        for entry in entries:
            name = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                open_folders.append((here / entry.name, name + "/"))
            elif not entry.is_file(follow_symlinks=False):
                unexpected.append(name)
            elif not is_still_open(entry.name):
                # the listing is older than the file's removal
                with contextlib.suppress(FileNotFoundError):
                    sizes[name] = entry.stat(follow_symlinks=False).st_size
    return sizes, unexpected


def is_taken(path: Path) -> bool:
    """Return whether anything has this name, a broken link included.

    Raises:
        OSError: the system cannot answer; `os.path.lexists` would return False.
    """
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def remove_tree(path: Path, *, missing_ok: bool = False) -> None:
    """Remove a file, a link (never its target) or a folder with its content.

    Several processes may remove the same folder at the same time.

    Raises:
        FileNotFoundError: it does not exist, unless `missing_ok`.
        OSError: EBUSY if a process still has a file of it open and the file system keeps that file
            under another name; all other files are removed.
    """
    if not missing_ok:
        os.lstat(path)
    while is_taken(path):
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(os.lstat(path).st_mode):
                with _opened(path, _FOLDER) as folder:
                    is_empty = _empty_folder(folder)
                if not is_empty:
                    raise OSError(errno.EBUSY, "a process still has a file of it open", str(path))
                os.rmdir(path)
            else:
                os.unlink(path)


def _empty_folder(folder: int) -> bool:
    """Remove what is in an open folder; return False if files are left that a process has open.

    shutil.rmtree would remove these too, and from another machine that takes them from their
    reader.
    """
    with os.scandir(folder) as scan:
        entries = list(scan)
    is_empty = True
    for entry in entries:
        # another process was faster, or the listing is old
        with contextlib.suppress(FileNotFoundError):
            if is_still_open(entry.name):
                is_empty = False
            elif not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=folder)
            else:
                inner = os.open(entry.name, _FOLDER | os.O_CLOEXEC, dir_fd=folder)
                try:
                    inner_is_empty = _empty_folder(inner)
                finally:
                    os.close(inner)
                if inner_is_empty:
                    os.rmdir(entry.name, dir_fd=folder)
                is_empty = is_empty and inner_is_empty
    return is_empty and not any(map(is_still_open, os.listdir(folder)))


def free_bytes(path: Path) -> int:
    """Return how many bytes an unprivileged user can still write on the file system of `path`."""
    state = os.statvfs(path)
    return state.f_bavail * state.f_frsize


def format_bytes(size_bytes: int) -> str:
    """Format a size for people: 999 B, 1.5 KiB, 18.2 MiB."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    power = min((size_bytes.bit_length() - 1) // 10, 4)
    return f"{size_bytes / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def os_error_in(error: BaseException) -> OSError | None:
    """Return the system's error behind an exception, or None.

    safetensors and tokenizers write in Rust and raise their own errors, or a plain Exception, with
    `(os error 28)` or `code: 28` in the text.
    """
    if isinstance(error, OSError):
        return error
    found = re.search(r"(?:os error |code: )(\d+)", str(error))
    if type(error).__name__ not in ("SafetensorError", "Exception") or found is None:
        return None
    number = int(found.group(1))
    return OSError(number, os.strerror(number))


@contextlib.contextmanager
def explain_full_disk(where: str = "") -> Iterator[None]:
    """Turn a write that failed because a disk or quota is full into a FinetuneError.

    Args:
        where: to name if the error does not name a file.
    """
    try:
        yield
    except Exception as error:
        cause = os_error_in(error)
        if cause is None or cause.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise FinetuneError(
            f"the disk is full: {cause.strerror}",
            where=str(cause.filename or where),
            fix="free some space on it (or some of your quota), then start the same command again",
        ) from error


def save_array(path: Path, array: np.ndarray) -> None:
    """Save an array as `np.save` does, without pickles. Given a file, np.save would lose the error
    of closing it.
    """
    import numpy as np

    with path.open("wb") as file:
        np.save(SimpleNamespace(write=file.write), array, allow_pickle=False)
