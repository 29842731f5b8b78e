"""File systems that several machines share: what their clients may not see yet, and which locks
only one machine sees.

An NFS client caches names, sizes and times for up to 60 seconds (nfs(5): acregmax, acdirmax); other
kinds have caches of their own. So a name that another machine has made may be missing, or a size
too small: what is missing is looked for again until that time is over. A disk of this machine needs
one attempt.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

SEEN_WITHIN_SECONDS = 60.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 1.0
# Of this machine alone. Any other may be shared: there are more kinds of those than any list has.
_LOCAL = {
    "apfs",
    "bcachefs",
    "btrfs",
    "devtmpfs",
    "erofs",
    "exfat",
    "ext2",
    "ext3",
    "ext4",
    "f2fs",
    "fuseblk",
    "hfs",
    "jfs",
    "msdos",
    "ntfs",
    "ntfs3",
    "overlay",
    "ramfs",
    "reiserfs",
    "rootfs",
    "squashfs",
    "tmpfs",
    "ufs",
    "vfat",
    "xfs",
    "zfs",
}
# nfs(5), mount.lustre(8): with one of these each client grants locks by itself.
_LOCAL_LOCKS = {"nolock", "local_lock=flock", "local_lock=all", "localflock"}


def mount_of(path: Path | str) -> tuple[str, str]:
    """Return the type and the mount options of the file system of a path, which need not exist; ""
    if unknown.
    """
    place = os.path.realpath(path)
    mounts = [
        mount
        for mount in psutil.disk_partitions(all=True)
        if Path(place).is_relative_to(mount.mountpoint)
    ]
    # Of several at one place the last was put over the others.
    nearest = max(
        enumerate(mounts), key=lambda each: (len(each[1].mountpoint), each[0]), default=None
    )
    return (nearest[1].fstype, nearest[1].opts) if nearest is not None else ("", "")


def is_shared(path: Path | str) -> bool:
    """Return whether other machines may work in the same folder."""
    return mount_of(path)[0] not in _LOCAL


def has_local_locks(path: Path | str) -> bool:
    """Return whether flock there keeps only processes of this machine out."""
    return not _LOCAL_LOCKS.isdisjoint(mount_of(path)[1].split(","))


def poll_attempts(path: Path | str, within_seconds: float = SEEN_WITHIN_SECONDS) -> Iterator[None]:
    """Yield once per attempt: one attempt on a disk of this machine; on shared storage as many as
    fit, and a last one at the deadline.

    for _ in poll_attempts(folder):
        if what_is_needed_is_there():
            break
    """
    yield
    if within_seconds <= 0 or not is_shared(path):
        return
    deadline, pause = time.monotonic() + within_seconds, FIRST_PAUSE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        yield


def make_folder(path: Path, *, parents: bool = False) -> None:
    """Make a folder that others may make or have made, perhaps on a machine whose work is not seen
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
    """Return whether a file or folder is there, even if a shared file system's client has cached
    that it is not.

    If this machine has made a name in a folder itself, it asks the server for the folder's names.
    """
    if os.path.lexists(path) or not is_shared(path):
        return os.path.lexists(path)
    refresh_directory_cache(path.parent / f".{path.name}.asked")
    if path.name not in os.listdir(path.parent):
        return False
    wait_for(path)
    return True


def refresh_directory_cache(unused: Path) -> None:
    """Have this machine forget what it has cached of the folder of an unused name, by making that
    name.
    """
    unused.touch()
    unused.unlink(missing_ok=True)


def wait_for(path: Path | str) -> None:
    """Wait until this machine sees a name that another one has made, or long enough."""
    for _ in poll_attempts(path):
        if os.path.lexists(path):
            return
