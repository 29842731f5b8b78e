"""File systems that several machines share: their clients' caches, and locks of one machine only.

An NFS client caches names, sizes and times for up to 60 seconds (nfs(5): acregmax, acdirmax); other
file systems have their own caches. So a name that another machine has made may be missing, or a
size too small: a missing file is looked for again until that time is over. A local disk needs one
attempt.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

SEEN_WITHIN_SECONDS = 60.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 1.0
# Local to this machine. Any other type may be shared: no list of those would be complete.
_LOCAL_TYPES = """
    apfs bcachefs btrfs devtmpfs erofs exfat ext2 ext3 ext4 f2fs fuseblk hfs jfs msdos ntfs ntfs3
    overlay ramfs reiserfs rootfs squashfs tmpfs ufs vfat xfs zfs
"""
_LOCAL = frozenset(_LOCAL_TYPES.split())
# nfs(5), mount.lustre(8): with one of these options each client grants locks on its own.
_LOCAL_LOCKS = {"nolock", "local_lock=flock", "local_lock=all", "localflock"}


def mount_of(path: Path | str) -> tuple[str, str]:
    """Return the type and the mount options of the file system of a path, which need not exist; ""
    if unknown.
    """
    real_path = Path(os.path.realpath(path))
    found = None
    for mount in psutil.disk_partitions(all=True):
        # Of several mounts at one path the last covers the others.
        if real_path.is_relative_to(mount.mountpoint) and (
            found is None or len(mount.mountpoint) >= len(found.mountpoint)
        ):
            found = mount
    return ("", "") if found is None else (found.fstype, found.opts)


def is_shared(path: Path | str) -> bool:
    """Return whether other machines may work in the same folder."""
    return mount_of(path)[0] not in _LOCAL


def has_local_locks(path: Path | str) -> bool:
    """Return whether flock there excludes only processes of this machine."""
    return not _LOCAL_LOCKS.isdisjoint(mount_of(path)[1].split(","))


def poll_attempts(path: Path | str, within_seconds: float = SEEN_WITHIN_SECONDS) -> Iterator[None]:
    """Yield once per attempt: one attempt on a local disk; on shared storage as many as fit in
    `within_seconds`, and a last one at the deadline.

        for _ in poll_attempts(folder):
            if the_file_exists():
                break
    """
    yield
    if within_seconds <= 0 or not is_shared(path):
        return
    deadline = time.monotonic() + within_seconds
    pause = FIRST_PAUSE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        yield


def make_folder(path: Path, *, parents: bool = False) -> None:
    """Make a folder that others may make too, perhaps on a machine whose changes are not visible
    here yet.
    """
    problem: FileExistsError | None = None
    for _ in poll_attempts(path):
        try:
            path.mkdir(parents=parents, exist_ok=True)
            return
        except FileExistsError as error:
            problem = error
    if problem is not None:
        raise problem


def has_name(path: Path) -> bool:
    """Return whether a file or folder exists, even if a shared file system's client has cached that
    it does not.
    """
    if os.path.lexists(path) or not is_shared(path):
        return os.path.lexists(path)
    refresh_directory_cache(path.parent / f".{path.name}.asked")
    if path.name not in os.listdir(path.parent):
        return False
    wait_for(path)
    return True


def refresh_directory_cache(unused: Path) -> None:
    """Let this machine forget what it has cached of a folder, by making an unused name in it: after
    that it queries the server for the folder's names.
    """
    unused.touch()
    unused.unlink(missing_ok=True)


def wait_for(path: Path | str) -> None:
    """Wait until this machine sees a name that another has made, or until the time is over."""
    for _ in poll_attempts(path):
        if os.path.lexists(path):
            return
