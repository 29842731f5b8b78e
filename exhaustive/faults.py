"""Faults put into the package on purpose: each must be caught by a test of `make test`.

    python exhaustive/faults.py                  # all: docs/evidence/fault_table.md (`make faults`)
    python exhaustive/faults.py packed           # those with this word in name or file, printed only
    python exhaustive/faults.py --area batching  # those of faults/batching.toml, printed only

Each is put into a copy of the tree, where the tests named beside it then run. Before that the tests
run without a fault: one that fails anyway catches nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FAULT_FILES = Path(__file__).resolve().parent / "faults"
TABLE = ROOT / "docs" / "evidence" / "fault_table.md"
COPIED = (
    "finetune",
    "tests",
    "exhaustive",
    "benchmarks",
    "ds_configs",
    "accelerate_configs",
    "data_samples",
    "launchers",
    "setup.cfg",
    "docs",
)
# Imported once, before processes are forked: most of a short test's time.
PRELOADED = ("pytest", "torch", "transformers", "accelerate", "peft", "datasets", "hypothesis")
MOST_TESTS = 5  # that are recorded for a fault
RESULT, OUTPUT = "result.json", "output.txt"  # of tests, in their copy of the tree
TEST_SECONDS = 300  # a fault that has a test hang is caught by it


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        area: the file of faults/ that has it.
        file: below finetune/.
        right: a text that occurs in the file once.
        wrong: what stands there instead.
        tests: files below tests/ that should catch it, with spaces between.
        only: pytest's -k, where the files have slow tests about other things.
    """

    area: str
    name: str
    file: str
    right: str
    wrong: str
    tests: str
    only: str = ""


def read_faults() -> list[Fault]:
    """All faults, area by area."""
    return [
        Fault(area=path.stem, **entry)
        for path in sorted(FAULT_FILES.glob("*.toml"))
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
    ]


def copy_tree(folder: Path) -> None:
    """What the tests need, into an empty folder."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in COPIED:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=ignored)
        else:
            shutil.copy(source, target)


class _Failures:
    """A plugin of pytest that collects the names of what failed."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and report.nodeid not in self.names:
            self.names.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.names.append(report.nodeid)


def _test(folder: Path, fault: Fault, most: int) -> None:
    """Run a fault's tests in the copy of the tree, in a process of their own."""
    os.setsid()
    output = os.open(folder / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    sys.path.insert(0, str(folder))
    import pytest

    words = [f"tests/{name}" for name in fault.tests.split()]
    words += ["-q", "-m", "not slow", f"--maxfail={most}", f"--timeout={TEST_SECONDS}"]
    words += ["-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={folder / 'temporary'}"]
    words += ["-k", fault.only] if fault.only else []
    failures = _Failures()
    code = pytest.main(words, plugins=[failures])
    (folder / RESULT).write_text(json.dumps({"code": int(code), "failed": failures.names}))
    os._exit(0)


def _failed(fault: Fault, folder: Path) -> list[str]:
    """What `_test` found; nothing where the tests could not be run, which is printed."""
    result = folder / RESULT
    if not result.exists():  # the fault ended the process itself
        return [f"tests/{fault.tests.split()[0]} (the process ended)"]
    done = json.loads(result.read_text())
    if done["code"] > 2 or bool(done["failed"]) != bool(done["code"]):
        output = (folder / OUTPUT).read_text(errors="replace")
        print(f"{fault.name}: pytest {done['code']}\n{output[-2000:]}", flush=True)
        return []
    return list(done["failed"])


def _put(path: Path, text: str) -> None:
    """Write a module. What was compiled of it goes: it is known by second and size only."""
    path.write_text(text, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


def run_faults(
    faults: Sequence[Fault], *, jobs: int = 1, most: int = MOST_TESTS, put: bool = True
) -> Iterator[tuple[Fault, list[str], float]]:
    """Run the tests of each fault with the fault in a copy of the tree.

    Args:
        jobs: copies that are tested at once.
        most: failures after which a fault's tests end.
        put: False leaves the fault out.

    Yields:
        A fault, the tests that failed (none where they could not be run, which is printed), and the
        seconds it took, in the order in which they end.
    """
    for name in PRELOADED:
        importlib.import_module(name)
    context = multiprocessing.get_context("fork")
    waiting = list(faults)
    working: dict[Any, tuple[Fault, Path, str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="faults") as temporary:
        free = [Path(temporary, f"copy{number}") for number in range(max(1, jobs))]
        for folder in free:
            folder.mkdir()
            copy_tree(folder)
        while waiting or working:
            while waiting and free:
                fault, folder = waiting.pop(0), free.pop()
                path = folder / "finetune" / fault.file
                source = path.read_text(encoding="utf-8")
                assert source.count(fault.right) == 1, f"{fault.name}: {fault.file} has changed"
                if put:
                    _put(path, source.replace(fault.right, fault.wrong))
                (folder / RESULT).unlink(missing_ok=True)
                process = context.Process(target=_test, args=(folder, fault, most))
                process.start()
                working[process] = (fault, folder, source, time.monotonic())
            ended = [process for process in working if not process.is_alive()]
            for process in ended:
                fault, folder, source, began = working.pop(process)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what tests may have left running
                _put(folder / "finetune" / fault.file, source)
                free.append(folder)
                yield fault, _failed(fault, folder), time.monotonic() - began
            if not ended:
                time.sleep(0.05)


def without_faults(faults: Sequence[Fault], jobs: int) -> set[str]:
    """Tests named by faults that fail without any."""
    by_tests = {(fault.tests, fault.only): fault for fault in faults}
    found = run_faults(list(by_tests.values()), jobs=jobs, most=1000, put=False)
    return {name for _, failed, _ in found for name in failed}


def table(found: dict[Fault, list[str]], faults: Sequence[Fault]) -> str:
    """The page."""
    caught = sum(map(bool, found.values()))
    lines = [
        "# Deliberate faults",
        "",
        "Each fault was put into the package to check that a test of `make test` fails:",
        f"**{caught} of {len(found)} caught**. `make faults` writes this page. For a fault at most",
        f"{MOST_TESTS} tests are recorded, and the first is shown.",
        "",
        "| fault | in | caught by | tests |",
        "|---|---|---|--:|",
    ]
    for fault in faults:
        failed = found[fault]
        by = f"`{failed[0].removeprefix('tests/')}`" if failed else "**nothing**"
        count = f"{len(failed)}{'+' if len(failed) >= MOST_TESTS else ''}"
        lines.append(f"| {fault.name} | `{fault.file}` | {by} | {count} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="of a fault's name or file")
    parser.add_argument("--area", help="one file of faults/")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--trust", action="store_true", help="do not run tests without faults")
    parser.add_argument("--record", type=Path, help="JSON file: fault -> tests that failed")
    asked = parser.parse_args()
    everything = read_faults()
    chosen = [
        fault
        for fault in everything
        if all(word in f"{fault.name} {fault.file}" for word in asked.words)
        and asked.area in (None, fault.area)
    ]
    anyway = set() if asked.trust else without_faults(chosen, asked.jobs)
    for name in sorted(anyway):
        print(f"fails without a fault: {name}", flush=True)
    found = {}
    for fault, failed, seconds in run_faults(chosen, jobs=asked.jobs):
        found[fault] = [name for name in failed if name not in anyway]
        first = found[fault][0] if found[fault] else "NOT CAUGHT"
        print(f"{fault.area}: {fault.name}: {first} ({seconds:.0f} s)", flush=True)
        if asked.record:
            record = {fault.name: failed for fault, failed in found.items()}
            asked.record.write_text(json.dumps(record, indent=1))
    missed = [fault for fault in chosen if not found[fault]]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} caught")
    if len(chosen) == len(everything):
        TABLE.write_text(table(found, chosen), encoding="utf-8")
    return 1 if missed or anyway else 0


if __name__ == "__main__":
    sys.exit(main())
