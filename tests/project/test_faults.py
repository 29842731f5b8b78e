"""The list of deliberate faults is current, and one of them is caught; all of them are `make
faults`.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

from faults import read_faults
from launching import ROOT

FAULTS = read_faults()


def test_every_fault_can_be_put_in() -> None:
    for fault in FAULTS:
        source = (ROOT / "finetune" / fault.file).read_text(encoding="utf-8")
        assert source.count(fault.right) == 1, f"{fault.name}: not once in {fault.file}"
        assert fault.wrong != fault.right, fault.name
        for name in fault.tests.split():
            assert (ROOT / "tests" / name).is_file(), f"{fault.name}: {name}"


def test_one_is_caught() -> None:
    words = [sys.executable, ROOT / "exhaustive" / "faults.py", "the key is not used"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_permutation.py" in done.stdout and "1 of 1 caught" in done.stdout


def test_there_are_enough() -> None:
    assert len(FAULTS) >= 250
    names = Counter(fault.name for fault in FAULTS)
    assert not [name for name, count in names.items() if count > 1]
