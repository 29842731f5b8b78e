"""Ordinary tests see no CUDA device, so that they are the same on a machine that has one."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conftest


def test_devices_are_hidden_unless_asked_for(monkeypatch):
    for marks, wanted, driver, hidden in (
        ("not slow", None, True, True),
        ("", None, True, True),
        ("not slow and not gpu", None, True, True),
        ("gpu", None, True, False),
        ("not slow", "cuda", True, False),
        ("not slow", "cpu", True, True),
        ("not slow", None, False, False),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
        monkeypatch.setenv("FINETUNE_TEST_DEVICE", wanted or "")
        monkeypatch.setattr(Path, "exists", lambda path, driver=driver: driver)
        config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=marks))
        conftest.pytest_configure(config)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ("" if hidden else "3"), (marks, wanted)
