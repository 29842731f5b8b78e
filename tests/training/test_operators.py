"""A start that is killed while DeepSpeed loads its operator must not hang every later one."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from finetune.training.operators import one_at_a_time, prefer_own_ninja


def die_inside(folder: Path) -> None:
    """A process that has made torch's lock file and is killed before it removes it."""
    child = os.fork()
    if child == 0:
        with one_at_a_time(folder):
            (folder / "lock").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def test_the_lock_of_a_killed_process_is_removed(tmp_path, caplog):
    die_inside(tmp_path)
    assert (tmp_path / "lock").exists()
    with one_at_a_time(tmp_path):
        assert not (tmp_path / "lock").exists()


def test_a_lock_that_is_not_known_to_be_left_behind_stays(tmp_path):
    """Another program may be building: then torch waits for it, as it always does."""
    with one_at_a_time(tmp_path):
        pass
    (tmp_path / "lock").touch()
    with one_at_a_time(tmp_path):
        assert (tmp_path / "lock").exists()


def test_processes_take_turns(tmp_path):
    order = os.open(tmp_path / "order", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            with one_at_a_time(tmp_path):
                for _ in range(200):
                    os.write(order, b"%d\n" % os.getpid())
            os._exit(0)
        children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    writers = (tmp_path / "order").read_text().split()
    assert len(writers) == 800
    assert sum(first != second for first, second in zip(writers, writers[1:], strict=False)) == 3


def test_the_environments_own_ninja_is_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("system", "own"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "ninja").write_text("")
        (tmp_path / folder / "ninja").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "own" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "system"))
    prefer_own_ninja()
    assert shutil.which("ninja") == str(tmp_path / "own" / "ninja")
    prefer_own_ninja()
    assert os.environ["PATH"] == f"{tmp_path / 'own'}{os.pathsep}{tmp_path / 'system'}"
    (tmp_path / "own" / "ninja").unlink()
    monkeypatch.setenv("PATH", str(tmp_path / "system"))
    prefer_own_ninja()
    assert os.environ["PATH"] == str(tmp_path / "system")
