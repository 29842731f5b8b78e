"""What comes with peft says nothing and downloads nothing."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from finetune.runtime import launch_environment


def test_bitsandbytes_finds_no_kernels_while_it_is_imported(tmp_path, monkeypatch, capfd) -> None:
    (tmp_path / "bitsandbytes.py").write_text(
        "import logging\n"
        "try:\n    import kernels\nexcept ImportError:\n    kernels = None\n"
        "logging.getLogger('bitsandbytes.backends.cpu.ops').warning('Failed to load')\n"
    )
    kernels = ModuleType("kernels")
    monkeypatch.setitem(sys.modules, "kernels", kernels)
    # put back at the end, whether it was there or not
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    del sys.modules["bitsandbytes"]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        launch_environment.importlib.util, "find_spec", lambda name: ModuleSpec(name, None)
    )
    launch_environment.import_bitsandbytes()
    assert sys.modules["bitsandbytes"].kernels is None and sys.modules["kernels"] is kernels
    assert "Failed" not in capfd.readouterr().err
