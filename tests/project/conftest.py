"""The launcher of the real model, as a module."""

from __future__ import annotations

import sys
from collections.abc import Iterator
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
