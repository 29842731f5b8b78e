"""For tests: one folder as several nodes see it over a network, by real mounts, with the caches of
the kernel.

Every node is a FUSE mount of its own of the same folder, so each has its own dentries, attributes
and pages, as clients of NFS have. Files are known by their inodes (as by NFS's handles): what
another node replaced or removed is stale (ESTALE). A file that is removed while this node has it
open is renamed to `.nfs...` until it is closed. What else the storage does wrong is said while it
is mounted (shared_folder.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fuse_connection import FuseConnection, attributes

RELEASED_WITHIN_SECONDS = 0.1  # a close is told to the server a moment after it returned


@dataclass
class Fault:
    """An operation that fails.

    Attributes:
        operation: as in fuse_connection.OPERATIONS, or several with "|" between them.
        name: a regular expression that is found in the path below the folder.
        times: how often; -1 for ever.
        node: number, or None for all.
        done: it is done all the same.
    """

    operation: str
    number: int
    name: str = ""
    times: int = 1
    node: int | None = None
    done: bool = False

    def strikes(self, operation: str, path: str, node: int) -> bool:
        fits = (
            self.node in (None, node)
            and re.fullmatch(self.operation, operation)
            and re.search(self.name, path)
        )
        if not fits or self.times == 0:
            return False
        self.times -= 1
        return True


@dataclass
class Settings:
    """How the storage behaves; seconds and bytes.

    Attributes: entry_seconds, attribute_seconds: how long a node believes what it knows of a name,
        or of a size and a time.
        absent_seconds: how long a node believes that there is no such name.
        listing_seconds: how long it believes what a folder held.
        lag_seconds: how long what another node made is not there at all.
        flock: "shared", or the number of the error that answers it.
        bytes_per_second: of reading and writing, all nodes together; 0 without limit.
        quota_bytes: that can still be written; what is more is taken, lost, and refused when the
            file is closed.
        close_to_open: opening a file asks for its attributes anew, as NFS does.
    """

    entry_seconds: float = 0.0
    attribute_seconds: float = 0.0
    absent_seconds: float = 0.0
    listing_seconds: float = 0.0
    lag_seconds: float = 0.0
    flock: str | int = "shared"
    bytes_per_second: float = 0.0
    quota_bytes: float = float("inf")
    close_to_open: bool = True


@dataclass(frozen=True)
class Waiting:
    """Somebody who waits for a lock: inode, owner and kind; how to answer; node and number of the
    request.
    """

    wanted: tuple[int, tuple[int, int], int]
    reply: Callable[[int], None]
    asked: tuple[int, int]


@dataclass
class Server:
    """What the nodes have in common."""

    settings: Settings = field(default_factory=Settings)
    faults: list[Fault] = field(default_factory=list)
    paused_until: float = 0.0
    free_at: float = 0.0
    made: dict[tuple[int, str], tuple[int, float]] = field(default_factory=dict)
    locks: dict[int, dict[tuple[int, int], int]] = field(default_factory=dict)
    waiting: list[Waiting] = field(default_factory=list)
    mutex: threading.RLock = field(default_factory=threading.RLock)
    silly: int = 0

    def transfer(self, size_bytes: int) -> None:
        """Take as long as the disk does."""
        if self.settings.bytes_per_second:
            with self.mutex:
                self.free_at = (
                    max(self.free_at, time.monotonic())
                    + size_bytes / self.settings.bytes_per_second
                )
                wait = self.free_at - time.monotonic()
            time.sleep(max(0.0, wait))

    def wait_out(self) -> None:
        while (left := self.paused_until - time.monotonic()) > 0:
            time.sleep(left)

    def lock(self, inode: int, owner: tuple[int, int], kind: int) -> bool:
        """Take, change or (kind F_UNLCK) leave a lock."""
        with self.mutex:
            taken = self._take(inode, owner, kind)
            for entry in list(self.waiting):
                if self._take(*entry.wanted):
                    self.waiting.remove(entry)
                    entry.reply(0)
            return taken

    def _take(self, inode: int, owner: tuple[int, int], kind: int) -> bool:
        held = self.locks.setdefault(inode, {})
        others = [other for who, other in held.items() if who != owner]
        if kind == fcntl.F_UNLCK:
            held.pop(owner, None)
        elif fcntl.F_WRLCK in others or (kind == fcntl.F_WRLCK and others):
            return False
        else:
            held[owner] = kind
        return True

    def wait(self, waiting: Waiting) -> bool:
        """Take a lock now, or answer when it is taken; whether it was now."""
        with self.mutex:
            if self.lock(*waiting.wanted):
                return True
            self.waiting.append(waiting)
            return False

    def interrupt(self, asked: tuple[int, int]) -> None:
        with self.mutex:
            for entry in [entry for entry in self.waiting if entry.asked == asked]:
                self.waiting.remove(entry)
                entry.reply(errno.EINTR)


@dataclass
class Node:
    """A file or folder that a client knows; `descriptor` is O_PATH: it stays the same file under
    any name.
    """

    descriptor: int
    inode: int
    path: str
    lookups: int = 0

    @property
    def link(self) -> str:
        return f"/proc/self/fd/{self.descriptor}"

    def state(self) -> os.stat_result:
        state = os.fstat(self.descriptor)
        if state.st_nlink == 0:
            raise OSError(errno.ESTALE, "removed")
        return state


@dataclass
class Opened:
    descriptor: int
    node: Node
    writes: bool
    over_quota: bool = False


class Client:
    """One node's mount: `operation` -> method `_operation(node, body)`."""

    def __init__(
        self, server: Server, folder: Path, target: Path, number: int, *, flock: bool
    ) -> None:
        self.server, self.number = server, number
        descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        self.nodes = {1: Node(descriptor, os.fstat(descriptor).st_ino, "", 1)}
        self.by_inode = {self.nodes[1].inode: 1}
        self.opened: dict[int, Opened] = {}
        self.listings: dict[int, tuple[float, list[tuple[int, int, str]]]] = {}
        self.silly: dict[int, tuple[int, str]] = {}
        self.mutex = threading.RLock()
        self.next = 2
        self.connection = FuseConnection(target, self.handle, flock=flock)

    def handle(self, operation: str, unique: int, number: int, body: bytes) -> bytes | None:
        self.server.wait_out()
        if operation in ("forget", "batch_forget"):
            return self._forget(operation, number, body)
        if operation == "interrupt":
            self.server.interrupt((self.number, struct.unpack_from("<Q", body)[0]))
            return None
        node = self.nodes[number]
        if operation in ("setlk", "setlkw"):
            return self._lock(operation == "setlkw", unique, node, body)
        path = node.path + ("/" + self._name(operation, body) if operation in _NAMED else "")
        struck = next(
            (f for f in self.server.faults if f.strikes(operation, path, self.number)), None
        )
        if struck is not None and not struck.done:
            raise OSError(struck.number, "fault")
        reply = getattr(self, f"_{operation}")(node, body)
        if struck is not None:
            raise OSError(struck.number, "fault")
        return reply

    @staticmethod
    def _name(operation: str, body: bytes) -> str:
        return os.fsdecode(body[_NAMED[operation] :].split(b"\0")[0])

    # ------------------------------------------------------------ names

    def _entry(self, parent: Node, name: str) -> bytes:
        settings = self.server.settings
        parent.state()
        try:
            made_by, made_at = self.server.made.get((parent.inode, name), (self.number, 0.0))
            if made_by != self.number and time.monotonic() - made_at < settings.lag_seconds:
                raise FileNotFoundError(errno.ENOENT, "not seen yet")
            descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=parent.descriptor)
        except FileNotFoundError:
            if not settings.absent_seconds:
                raise
            return _entry(0, settings.absent_seconds, 0, bytes(88))
        with self.mutex:
            state = os.fstat(descriptor)
            number = self.by_inode.get(state.st_ino)
            if number is None:
                number, self.next = self.next, self.next + 1
                self.nodes[number] = Node(descriptor, state.st_ino, "")
                self.by_inode[state.st_ino] = number
            else:
                os.close(descriptor)
            node = self.nodes[number]
            node.path, node.lookups = f"{parent.path}/{name}", node.lookups + 1
        return _entry(number, settings.entry_seconds, settings.attribute_seconds, attributes(state))

    def _made(self, parent: Node, name: str) -> bytes:
        self._changed(parent)
        self.server.made[parent.inode, name] = (self.number, time.monotonic())
        return self._entry(parent, name)

    def _changed(self, folder: Node) -> None:
        self.listings.pop(folder.inode, None)

    def _forget(self, operation: str, number: int, body: bytes) -> None:
        pairs = [(number, struct.unpack_from("<Q", body)[0])]
        if operation == "batch_forget":
            count = struct.unpack_from("<I", body)[0]
            pairs = [struct.unpack_from("<QQ", body, 8 + 16 * index) for index in range(count)]
        with self.mutex:
            for known, times in pairs:
                node = self.nodes[known]
                node.lookups -= times
                if node.lookups <= 0 and known != 1:
                    del self.nodes[known], self.by_inode[node.inode]
                    os.close(node.descriptor)

    def _lookup(self, node: Node, body: bytes) -> bytes:
        return self._entry(node, self._name("lookup", body))

    def _mkdir(self, node: Node, body: bytes) -> bytes:
        name = self._name("mkdir", body)
        os.mkdir(name, struct.unpack_from("<I", body)[0], dir_fd=node.descriptor)
        return self._made(node, name)

    def _mknod(self, node: Node, body: bytes) -> bytes:
        name = self._name("mknod", body)
        os.mknod(name, struct.unpack_from("<I", body)[0], dir_fd=node.descriptor)
        return self._made(node, name)

    def _symlink(self, node: Node, body: bytes) -> bytes:
        name, target, _ = body.split(b"\0")
        os.symlink(target, name, dir_fd=node.descriptor)
        return self._made(node, os.fsdecode(name))

    def _link(self, node: Node, body: bytes) -> bytes:
        name, old = self._name("link", body), self.nodes[struct.unpack_from("<Q", body)[0]]
        os.link(old.link, name, dst_dir_fd=node.descriptor, follow_symlinks=True)
        return self._made(node, name)

    def _readlink(self, node: Node, body: bytes) -> bytes:
        return os.fsencode(os.readlink("", dir_fd=node.descriptor))

    def _unlink(self, node: Node, body: bytes) -> bytes:
        name = self._name("unlink", body)
        self._changed(node)
        if not self._hide(node, name):
            os.unlink(name, dir_fd=node.descriptor)
        return b""

    def _hide(self, folder: Node, name: str) -> bool:
        """Rename a file that this node has open; whether it did."""
        state = os.stat(name, dir_fd=folder.descriptor, follow_symlinks=False)
        deadline = time.monotonic() + RELEASED_WITHIN_SECONDS
        while any(opened.node.inode == state.st_ino for opened in list(self.opened.values())):
            if time.monotonic() < deadline:
                time.sleep(0.002)
                continue
            if name.startswith(".nfs"):
                raise OSError(errno.EBUSY, "open")
            with self.server.mutex:
                self.server.silly += 1
                hidden = f".nfs{state.st_ino:016x}{self.server.silly:08x}"
            os.rename(name, hidden, src_dir_fd=folder.descriptor, dst_dir_fd=folder.descriptor)
            self.silly[state.st_ino] = (os.dup(folder.descriptor), hidden)
            return True
        return False

    def _rmdir(self, node: Node, body: bytes) -> bytes:
        self._changed(node)
        os.rmdir(self._name("rmdir", body), dir_fd=node.descriptor)
        return b""

    def _rename(self, node: Node, body: bytes, skip: int = 8) -> bytes:
        to = self.nodes[struct.unpack_from("<Q", body)[0]]
        old, new, _ = (os.fsdecode(part) for part in body[skip:].split(b"\0"))
        is_new = True
        with contextlib.suppress(FileNotFoundError):
            state = os.stat(new, dir_fd=to.descriptor, follow_symlinks=False)
            is_new = False
            if not stat.S_ISDIR(state.st_mode):
                self._hide(to, new)
        os.rename(old, new, src_dir_fd=node.descriptor, dst_dir_fd=to.descriptor)
        self._changed(node)
        self._changed(to)
        if is_new:
            self.server.made[to.inode, new] = (self.number, time.monotonic())
        return b""

    def _rename2(self, node: Node, body: bytes) -> bytes:
        if struct.unpack_from("<I", body, 8)[0]:
            raise OSError(errno.EINVAL, "flags")
        return self._rename(node, body, 16)

    # ------------------------------------------------------------ attributes

    def _getattr(self, node: Node, body: bytes) -> bytes:
        return self._attributes(node)

    def _attributes(self, node: Node) -> bytes:
        seconds = self.server.settings.attribute_seconds
        return struct.pack("<QII", int(seconds), int(seconds % 1 * 1e9), 0) + attributes(
            node.state()
        )

    def _setattr(self, node: Node, body: bytes) -> bytes:
        valid, _, _, size, _, atime, mtime, _, an, mn, _, mode = struct.unpack_from("<II6Q4I", body)
        state = node.state()
        if valid & 1:
            os.chmod(node.link, mode)
        if valid & 8:
            os.truncate(node.link, size)
        if valid & 0x1B0:
            now = time.time_ns()
            seen = (now if valid & 128 else atime * 10**9 + an) if valid & 16 else state.st_atime_ns
            written = (
                (now if valid & 256 else mtime * 10**9 + mn) if valid & 32 else state.st_mtime_ns
            )
            os.utime(node.link, ns=(seen, written))
        return self._attributes(node)

    def _statfs(self, node: Node, body: bytes) -> bytes:
        s = os.statvfs(self.nodes[1].link)
        numbers = (
            s.f_blocks,
            s.f_bfree,
            s.f_bavail,
            s.f_files,
            s.f_ffree,
            s.f_bsize,
            s.f_namemax,
            s.f_frsize,
        )
        return struct.pack("<5Q3I28x", *numbers)

    # ------------------------------------------------------------ content

    def _open(self, node: Node, body: bytes) -> bytes:
        node.state()
        flags = struct.unpack_from("<I", body)[0]
        descriptor = os.open(node.link, flags & (os.O_ACCMODE | os.O_NONBLOCK) | os.O_CLOEXEC)
        if self.server.settings.close_to_open:
            self.connection.forget_attributes(self.by_inode[node.inode])
        return self._handle(descriptor, node, flags)

    def _handle(self, descriptor: int, node: Node, flags: int) -> bytes:
        self.opened[descriptor] = Opened(descriptor, node, bool(flags & os.O_ACCMODE))
        return struct.pack("<QII", descriptor, 0, 0)

    def _create(self, node: Node, body: bytes) -> bytes:
        flags, mode = struct.unpack_from("<II", body)
        name = self._name("create", body)
        node.state()
        keep = os.O_ACCMODE | os.O_EXCL | os.O_TRUNC
        descriptor = os.open(
            name,
            flags & keep | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC,
            mode,
            dir_fd=node.descriptor,
        )
        entry = self._made(node, name)
        return entry + self._handle(
            descriptor, self.nodes[struct.unpack_from("<Q", entry)[0]], flags
        )

    def _read(self, node: Node, body: bytes) -> bytes:
        node.state()
        handle, offset, size = struct.unpack_from("<QQI", body)
        data = os.pread(handle, size, offset)
        self.server.transfer(len(data))
        return data

    def _write(self, node: Node, body: bytes) -> bytes:
        node.state()
        handle, offset, size = struct.unpack_from("<QQI", body)
        self.server.transfer(size)
        with self.server.mutex:
            fits = size <= self.server.settings.quota_bytes
            self.server.settings.quota_bytes -= size if fits else 0
        if fits:
            os.pwrite(handle, memoryview(body)[40 : 40 + size], offset)
        else:
            self.opened[handle].over_quota = True
        return struct.pack("<II", size, 0)

    def _flush(self, node: Node, body: bytes) -> bytes:
        opened = self.opened[struct.unpack_from("<Q", body)[0]]
        if opened.over_quota:
            opened.over_quota = False  # it is said once
            raise OSError(errno.EDQUOT, "quota")
        return b""

    def _fsync(self, node: Node, body: bytes) -> bytes:
        self._flush(node, body)
        os.fsync(struct.unpack_from("<Q", body)[0])
        return b""

    def _release(self, node: Node, body: bytes) -> bytes:
        handle, _, _, owner = struct.unpack_from("<QIIQ", body)
        self.server.lock(node.inode, (self.number, owner), fcntl.F_UNLCK)
        del self.opened[handle]
        os.close(handle)
        if node.inode in self.silly and not any(
            o.node.inode == node.inode for o in list(self.opened.values())
        ):
            folder, hidden = self.silly.pop(node.inode)
            with contextlib.suppress(FileNotFoundError):  # another node took it away
                os.unlink(hidden, dir_fd=folder)
            os.close(folder)
            self.listings.clear()
        return b""

    # ------------------------------------------------------------ folders

    def _opendir(self, node: Node, body: bytes) -> bytes:
        node.state()
        known = self.listings.get(node.inode)
        if known is None or time.monotonic() - known[0] >= self.server.settings.listing_seconds:
            with os.scandir(node.link) as scan:
                names = sorted((entry.name, entry.stat(follow_symlinks=False)) for entry in scan)
            seen = [
                (state.st_ino, state.st_mode >> 12, name)
                for name, state in names
                if self._is_seen(node, name)
            ]
            known = self.listings[node.inode] = (time.monotonic(), seen)
        return struct.pack("<QII", 0, 0, 0)

    def _is_seen(self, folder: Node, name: str) -> bool:
        made_by, made_at = self.server.made.get((folder.inode, name), (self.number, 0.0))
        return (
            made_by == self.number or time.monotonic() - made_at >= self.server.settings.lag_seconds
        )

    def _readdir(self, node: Node, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        listing = self.listings.get(node.inode)
        if listing is None:
            self._opendir(node, b"")
            listing = self.listings[node.inode]
        reply = b""
        for index, (inode, kind, name) in enumerate(listing[1][offset:], int(offset) + 1):
            raw = os.fsencode(name)
            record = struct.pack("<QQII", inode, index, len(raw), kind) + raw + bytes(-len(raw) % 8)
            if len(reply) + len(record) > size:
                break
            reply += record
        return reply

    def _releasedir(self, node: Node, body: bytes) -> bytes:
        return b""

    def _fsyncdir(self, node: Node, body: bytes) -> bytes:
        return b""

    # ------------------------------------------------------------ flock

    def _lock(self, waits: bool, unique: int, node: Node, body: bytes) -> bytes | None:
        handle, owner, _, _, kind = struct.unpack_from("<4QI", body)
        if isinstance(self.server.settings.flock, int):
            raise OSError(self.server.settings.flock, "no locks")
        if kind != fcntl.F_UNLCK:
            node.state()
            if kind == fcntl.F_WRLCK and not self.opened[handle].writes:
                raise OSError(errno.EBADF, "NFS locks for writing only what is open for writing")
        wanted = (node.inode, (self.number, owner), kind)
        if not waits:
            if self.server.lock(*wanted):
                return b""
            raise OSError(errno.EAGAIN, "held")
        reply = partial(self._locked, unique)
        return b"" if self.server.wait(Waiting(wanted, reply, (self.number, unique))) else None

    def _locked(self, unique: int, number: int) -> None:
        self.connection.reply(unique, error=number)


# Where the name begins in an operation's arguments.
_NAMED = {
    "lookup": 0,
    "mkdir": 8,
    "mknod": 16,
    "unlink": 0,
    "rmdir": 0,
    "rename": 8,
    "link": 8,
    "create": 16,
}
_NAMED |= {"rename2": 16, "symlink": 0}


def _entry(number: int, entry_seconds: float, attribute_seconds: float, packed: bytes) -> bytes:
    """struct fuse_entry_out."""
    whole = (int(entry_seconds), int(attribute_seconds))
    parts = (int(entry_seconds % 1 * 1e9), int(attribute_seconds % 1 * 1e9))
    return struct.pack("<4Q2I", number, 0, *whole, *parts) + packed
