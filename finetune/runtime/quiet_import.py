"""bitsandbytes imported without a word, and without a download."""

from __future__ import annotations

import logging
import sys
from importlib.util import find_spec


def import_bitsandbytes() -> None:
    """Import bitsandbytes where it is installed; call it before peft is imported, which imports it
    too.

    On some CPUs it asks the package `kernels` to download a kernel for inference, and complains
    without it (0.50.2, backends/cpu/ops.py). Training computes quantised layers otherwise
    (modeling/quantisation.py).
    """
    if "bitsandbytes" in sys.modules or find_spec("bitsandbytes") is None:
        return
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    loaded = sys.modules.get("kernels")
    sys.modules["kernels"] = None  # type: ignore[assignment]  # an import of it fails
    try:
        import bitsandbytes  # noqa: F401
    finally:
        del sys.modules["kernels"]
        if loaded is not None:
            sys.modules["kernels"] = loaded
