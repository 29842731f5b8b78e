"""File systems that several machines share: what their clients may not see yet, and which locks
only one machine sees.

A client of NFS believes what it knows of names, sizes and times for up to 60 seconds (nfs(5):
acregmax, acdirmax); other kinds have caches of their own. So there a name may be missing that
another machine has made, or a size be too small: what is missing is looked for again until that
time is over. A disk of this machine is believed at once.
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
    """The type and the mount options of the file system that a path, there or not, is on; "" where
    unknown.
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
    """Whether other machines may work in the same folder."""
    return mount_of(path)[0] not in _LOCAL


def has_local_locks(path: Path | str) -> bool:
    """Whether flock there keeps only processes of this machine out."""
    return not _LOCAL_LOCKS.isdisjoint(mount_of(path)[1].split(","))


def looks(path: Path | str, within_seconds: float = SEEN_WITHIN_SECONDS) -> Iterator[None]:
    """One look for each turn of a loop: one on a disk of this machine, else as many as fit, and one
    when time is over.

    for _ in looks(folder):
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
    """`mkdir` of a folder that others may make or have made, perhaps on a machine whose work is not
    seen here yet.
    """
    problem: FileExistsError | None = None
    for _ in looks(path):
        try:
            path.mkdir(parents=parents, exist_ok=True)
            return
        except FileExistsError as error:
            problem = error
    if problem is not None:
        raise problem


def has_name(path: Path) -> bool:
    """Whether a file or folder is there: `exists`, which on a shared file system does not believe
    an old "no".

    Where this machine has made a name in a folder itself, it asks for the folder's names anew.
    """
    if os.path.lexists(path) or not is_shared(path):
        return os.path.lexists(path)
    ask_anew(path.parent / f".{path.name}.asked")
    if path.name not in os.listdir(path.parent):
        return False
    wait_for(path)
    return True


def ask_anew(unused: Path) -> None:
    """Have this machine forget what it believes the folder of an unused name to hold, by making
    that name.
    """
    unused.touch()
    unused.unlink(missing_ok=True)


def wait_for(path: Path | str) -> None:
    """Until a name that was made by another machine is seen by this one, or long enough."""
    for _ in looks(path):
        if os.path.lexists(path):
            return
