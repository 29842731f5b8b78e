"""A start that is killed while DeepSpeed loads its operator must not hang every later one."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from finetune.training.operators import one_at_a_time, prefer_own_ninja


def test_the_lock_of_a_killed_process_is_removed_and_another_programs_stays(tmp_path: Path):
    """torch's lock file: if another program may be building, torch waits for it."""
    child = os.fork()
    if child == 0:
        with one_at_a_time(tmp_path):
            (tmp_path / "lock").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert (tmp_path / "lock").exists()
    with one_at_a_time(tmp_path):
        assert not (tmp_path / "lock").exists()
    (tmp_path / "lock").touch()
    with one_at_a_time(tmp_path):
        assert (tmp_path / "lock").exists()


def test_the_environments_own_ninja_is_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own, system = str(tmp_path / "own"), str(tmp_path / "system")
    for folder in (own, system):
        os.mkdir(folder)
        Path(folder, "ninja").touch(0o755)
    monkeypatch.setattr(sys, "executable", f"{own}/python")
    monkeypatch.setenv("PATH", system)
    for _ in range(2):
        prefer_own_ninja()
        assert os.environ["PATH"] == f"{own}{os.pathsep}{system}"
    (tmp_path / "own" / "ninja").unlink()
    monkeypatch.setenv("PATH", system)
    prefer_own_ninja()
    assert os.environ["PATH"] == system
