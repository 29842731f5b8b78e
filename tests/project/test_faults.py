"""The list of deliberate faults is current, and one of them is caught; all of them are `make
faults`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import FAULTS, caught_by, copy_tree
from launching import ROOT


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_fault_can_be_put_in(fault):
    source = (ROOT / "finetune" / fault.file).read_text(encoding="utf-8")
    assert fault.right in source and fault.wrong != fault.right
    assert all((ROOT / "tests" / name).is_file() for name in fault.tests.split())


def test_one_is_caught(tmp_path: Path):
    copy_tree(tmp_path)
    (fault,) = (fault for fault in FAULTS if fault.name == "the key is not used")
    assert caught_by(fault, tmp_path).startswith("tests/batching/")


def test_there_are_enough():
    assert len(FAULTS) >= 40 and len({fault.name for fault in FAULTS}) == len(FAULTS)
