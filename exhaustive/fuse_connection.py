"""For tests: a FUSE mount that Python serves, straight over /dev/fuse (linux/fuse.h, protocol
7.31). Needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path

MINOR = 31
MAX_WRITE_BYTES = 1 << 20
THREADS = 8
_HEADER = struct.Struct("<IIQQIIIHH")
_REPLY = struct.Struct("<IiQ")
_ATTRIBUTES = struct.Struct("<6Q10I")
_INIT = struct.Struct("<4I2H2I2HI28x")
_INVALID_INODE = 2  # FUSE_NOTIFY_INVAL_INODE
# FUSE_ASYNC_READ, _BIG_WRITES, _PARALLEL_DIROPS, _MAX_PAGES
_FLAGS = 1 << 0 | 1 << 5 | 1 << 18 | 1 << 22
_FLOCK_LOCKS = 1 << 10
_NOSUID_NODEV = 2 | 4
_DETACH = 2

OPERATIONS = {
    1: "lookup", 2: "forget", 3: "getattr", 4: "setattr", 5: "readlink", 6: "symlink", 8: "mknod", 9: "mkdir",
    10: "unlink", 11: "rmdir", 12: "rename", 13: "link", 14: "open", 15: "read", 16: "write", 17: "statfs",
    18: "release", 20: "fsync", 25: "flush", 27: "opendir", 28: "readdir", 29: "releasedir", 30: "fsyncdir",
    32: "setlk", 33: "setlkw", 35: "create", 36: "interrupt", 42: "batch_forget", 45: "rename2",
}  # fmt: skip
NO_REPLY = {"forget", "batch_forget", "interrupt"}

_libc = ctypes.CDLL(None, use_errno=True)

# (operation, unique number of the request, node, its arguments) -> the reply, or None for one that
# comes later.
Handle = Callable[[str, int, int, bytes], bytes | None]


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def mount_bound(source: Path, target: Path) -> None:
    """A folder under a second name, in this process's own mounts."""
    _check(_libc.mount(os.fsencode(source), os.fsencode(target), None, 4096, None), str(target))


def leave_mounts(host: str) -> None:
    """Give this process mounts and a host name of its own, as a node has."""
    _check(_libc.unshare(0x00020000 | 0x04000000), "unshare")  # CLONE_NEWNS, CLONE_NEWUTS
    _check(_libc.mount(b"none", b"/", None, 16384 | 1 << 18, None), "/")  # MS_REC | MS_PRIVATE
    _check(_libc.sethostname(host.encode(), len(host)), "sethostname")


def why_not() -> str:
    """Why FUSE cannot be mounted here; empty where it can."""
    if os.geteuid() != 0:
        return "mounting FUSE needs root"
    try:
        descriptor = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        return f"/dev/fuse cannot be opened: {error.strerror}"
    os.close(descriptor)
    return ""


def attributes(state: os.stat_result) -> bytes:
    """struct fuse_attr."""
    times = (state.st_atime_ns, state.st_mtime_ns, state.st_ctime_ns)
    return _ATTRIBUTES.pack(
        state.st_ino, state.st_size, state.st_blocks, *(at // 10**9 for at in times), *(at % 10**9 for at in times),
        state.st_mode, state.st_nlink, state.st_uid, state.st_gid, state.st_rdev, 4096, 0,
    )  # fmt: skip


class FuseConnection:
    """A mount and the threads that answer for it, until it is unmounted.

    Args:
        flock: whether the server is asked for flock; else the kernel grants it by itself, on this
            mount alone.
    """

    def __init__(self, target: Path, handle: Handle, *, flock: bool) -> None:
        self.target, self.handle, self.flock = target, handle, flock
        self.descriptor = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self.descriptor},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
        arguments = (
            b"nfslike",
            os.fsencode(target),
            b"fuse.nfslike",
            _NOSUID_NODEV,
            options.encode(),
        )
        _check(_libc.mount(*arguments), str(target))
        for _ in range(THREADS):
            threading.Thread(target=self._serve, daemon=True).start()

    def unmount(self) -> None:
        _libc.umount2(os.fsencode(self.target), _DETACH)

    def reply(self, unique: int, data: bytes = b"", error: int = 0) -> None:
        with contextlib.suppress(OSError):  # who asked is gone
            os.write(self.descriptor, _REPLY.pack(_REPLY.size + len(data), -error, unique) + data)

    def forget_attributes(self, node: int) -> None:
        """Have the kernel ask for a file's attributes anew."""
        body = struct.pack("<Qqq", node, -1, 0)
        with contextlib.suppress(OSError):
            os.write(
                self.descriptor, _REPLY.pack(_REPLY.size + len(body), _INVALID_INODE, 0) + body
            )

    def _serve(self) -> None:
        while True:
            try:
                request = os.read(self.descriptor, MAX_WRITE_BYTES + 8192)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue  # the request was taken back
                return  # unmounted
            _, code, unique, node, *_ = _HEADER.unpack_from(request)
            self._answer(code, unique, node, request[_HEADER.size :])

    def _answer(self, code: int, unique: int, node: int, body: bytes) -> None:
        if code == 26:
            self._init(unique, body)
            return
        name = OPERATIONS.get(code)
        if name is None:
            self.reply(unique, error=errno.ENOSYS)
            return
        try:
            data = self.handle(name, unique, node, body)
        except OSError as error:
            data = None
            if name not in NO_REPLY:
                self.reply(unique, error=error.errno or errno.EIO)
        if data is not None and name not in NO_REPLY:
            self.reply(unique, data)

    def _init(self, unique: int, body: bytes) -> None:
        _, _, readahead, offered = struct.unpack_from("<4I", body)
        flags = offered & (_FLAGS | (_FLOCK_LOCKS if self.flock else 0))
        pages = MAX_WRITE_BYTES // 4096
        self.reply(
            unique, _INIT.pack(7, MINOR, readahead, flags, 16, 12, MAX_WRITE_BYTES, 1, pages, 0, 0)
        )
