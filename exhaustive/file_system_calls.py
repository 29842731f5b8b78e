"""For tests: watch, count, kill at, or break any file-system call that a piece of Python makes
through `os`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Every call of `os` that touches the file system, reads included.
WATCHED = (
    "open", "close", "read", "write", "pwrite", "fsync", "ftruncate", "mkdir", "rmdir", "rename", "replace", "unlink",
    "remove", "listdir", "scandir", "stat", "lstat", "fstat", "statvfs",
)  # fmt: skip

Hook = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def watched(hook: Hook) -> Iterator[None]:
    """Send every call through `hook(name, original, args, kwargs)`, which makes it (or not) and
    returns its result.
    """
    originals = {name: getattr(os, name) for name in WATCHED}

    def through(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: hook(name, originals[name], args, kwargs)

    try:
        for name in WATCHED:
            setattr(os, name, through(name))
        yield
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


def killed_at(number: int, action: Callable[[], None], *, torn: bool = False) -> bool:
    """Run `action` in a child that is killed with SIGKILL at its call `number` (from 0); False
    where it ends before.

    torn: only writes count, and the last one still does half of its work.
    """
    child = os.fork()
    if child == 0:
        count = 0

        def hook(
            name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            nonlocal count
            if torn and name != "write":
                return original(*args, **kwargs)
            if count == number:
                if torn:
                    original(args[0], bytes(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return original(*args, **kwargs)

        try:
            with watched(hook):
                action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the action failed by itself"
    return os.WIFSIGNALED(status)


@contextmanager
def breaking(number: int, error_number: int) -> Iterator[list[str]]:
    """Let call `number` (from 0) raise an OSError; the list names the calls made. Closing still
    closes.
    """
    names: list[str] = []

    def hook(
        name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        names.append(name)
        if len(names) == number + 1:
            if name == "close":
                original(*args)
            raise OSError(error_number, os.strerror(error_number))
        return original(*args, **kwargs)

    with watched(hook):
        yield names


class _File:
    def __init__(self, data: bytes = b"") -> None:
        self.data, self.durable = bytearray(data), bytes(data)


class _Folder:
    def __init__(self) -> None:
        self.entries: dict[str, _File | _Folder] = {}
        self.durable: dict[str, _File | _Folder] = {}


class PowerLoss:
    """A disk that keeps only what fsync(2) promises: a file's content once it is synced, a name
    once its folder is.

    Mirrors every call made below `root`; after each that changes something, `after_call(self)` may
    look at `restore`.
    """

    def __init__(self, root: Path, after_call: Callable[[PowerLoss], None]) -> None:
        self.root = os.path.realpath(root)
        self.tree = self._load(Path(root))
        self.after_call = after_call
        self.looking = False  # what `after_call` does itself is not mirrored
        self.opened: dict[int, tuple[str, _File | _Folder]] = {}

    def _load(self, folder: Path) -> _Folder:
        node = _Folder()
        for path in folder.iterdir():
            node.entries[path.name] = (
                self._load(path) if path.is_dir() else _File(path.read_bytes())
            )
        node.durable = dict(node.entries)
        return node

    def _find(self, path: str) -> tuple[_Folder, str] | None:
        """The folder node and the name in it, or None for a path outside the root (or the root
        itself).
        """
        parts = os.path.relpath(path, self.root).split(os.sep)
        if parts[0] in ("..", "."):
            return None
        node = self.tree
        for part in parts[:-1]:
            node = node.entries[part]  # type: ignore[assignment]
        return node, parts[-1]

    def _path(self, path: Any, dir_fd: int | None = None) -> str:
        text = os.fsdecode(path)
        return (
            os.path.join(self.opened[dir_fd][0], text)
            if dir_fd is not None
            else os.path.abspath(text)
        )

    def hook(
        self, name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        result = original(*args, **kwargs)
        if not self.looking and self._mirror(name, args, kwargs, result):
            self.looking = True
            self.after_call(self)
            self.looking = False
        return result

    def _mirror(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> bool:
        if name == "open":
            return self._open(self._path(args[0], kwargs.get("dir_fd")), args[1], result)
        if name == "close":
            self.opened.pop(args[0], None)
        elif name == "write" and args[0] in self.opened:
            self.opened[args[0]][1].data += bytes(args[1])[:result]  # type: ignore[union-attr]
            return True
        elif name == "fsync" and args[0] in self.opened:
            node = self.opened[args[0]][1]
            node.durable = bytes(node.data) if isinstance(node, _File) else dict(node.entries)
            return True
        elif name == "mkdir" and (found := self._find(self._path(args[0]))):
            found[0].entries[found[1]] = _Folder()
            return True
        elif name in ("rename", "replace") and (found := self._find(self._path(args[0]))):
            target = self._find(self._path(args[1]))
            assert target is not None
            target[0].entries[target[1]] = found[0].entries.pop(found[1])
            return True
        elif name in ("unlink", "remove", "rmdir") and (
            found := self._find(self._path(args[0], kwargs.get("dir_fd")))
        ):
            del found[0].entries[found[1]]
            return True
        return False

    def _open(self, path: str, flags: int, descriptor: int) -> bool:
        if os.path.realpath(path) == self.root:
            self.opened[descriptor] = (path, self.tree)
            return False
        if (found := self._find(path)) is None:
            return False
        created = found[1] not in found[0].entries
        node = found[0].entries.setdefault(found[1], _File())
        if flags & os.O_TRUNC and isinstance(node, _File):
            node.data = bytearray()
        self.opened[descriptor] = (path, node)
        return created or bool(flags & os.O_TRUNC)

    def restore(self, target: Path, *, names_kept: str) -> None:
        """Write out what is there after the power is back: contents as last synced, names as last
        synced or later.

        names_kept: where names that were not synced are kept nevertheless: "all", "none" or "below"
        the top folder.
        """

        def write(node: _Folder, folder: Path, kept: bool) -> None:
            folder.mkdir()
            for name, child in (node.entries if kept else node.durable).items():
                if isinstance(child, _Folder):
                    write(child, folder / name, names_kept != "none")
                else:
                    (folder / name).write_bytes(child.durable)

        write(self.tree, target, names_kept == "all")
