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
    """Without the libraries that this fault's test does not need, which take ten seconds."""
    code = "import sys, faults; faults.PRELOADED = ('pytest',); sys.exit(faults.main())"
    words = [sys.executable, "-c", code, "the key is not used", "--trust"]
    done = subprocess.run(words, cwd=ROOT / "exhaustive", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_permutation.py" in done.stdout and "1 of 1 caught" in done.stdout


def test_there_are_enough() -> None:
    names = Counter(fault.name for fault in FAULTS)
    assert len(names) >= 250 and max(names.values()) == 1
