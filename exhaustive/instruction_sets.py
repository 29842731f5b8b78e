"""The numerical tests with the instruction sets and numbers of threads that other CPUs have.

    python exhaustive/instruction_sets.py      # all: docs/evidence/instruction_sets.md (`make test-isa`)
    python exhaustive/instruction_sets.py amx  # those with this word in their name, printed only

oneDNN and ATen choose their kernels by the CPU; both can be told to take those of a smaller one.
What the CPU lacks is not run, and the page says so.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "evidence" / "instruction_sets.md"
NUMERICAL = (
    "modeling",
    "inference",
    "training",
    "commands/merge",
    "commands/evaluate",
    "commands/verify",
)
CPU = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Setting:
    """Variables of the tests' environment, and the flag of /proc/cpuinfo without which it is skipped."""

    name: str
    variables: dict[str, str]
    flag: str = ""


SETTINGS = (
    Setting("oneDNN AVX2", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, "avx2"),
    Setting("oneDNN AVX512_CORE_BF16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, "avx512_bf16"),
    Setting("oneDNN AVX512_CORE_AMX", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, "amx_tile"),
    Setting("ATen default", {"ATEN_CPU_CAPABILITY": "default"}),
    Setting("ATen AVX2", {"ATEN_CPU_CAPABILITY": "avx2"}, "avx2"),
    Setting("2 threads", {"FINETUNE_TEST_THREADS": "2"}),
    Setting("4 threads", {"FINETUNE_TEST_THREADS": "4"}),
)


def processor() -> tuple[str, set[str]]:
    """Name and flags of this CPU, as Linux tells them."""
    text = CPU.read_text()
    name = re.search(r"model name\s*: (.*)", text)
    flags = re.search(r"flags\s*: (.*)", text)
    return name.group(1) if name else "unknown", set(flags.group(1).split() if flags else ())


def run_tests(setting: Setting) -> tuple[str, list[str]]:
    """pytest's last line, and the tests that failed."""
    tests = [f"tests/{name}" for name in NUMERICAL]
    words = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal"]
    done = subprocess.run(
        [*words, "-p", "no:cacheprovider", "-m", "not slow and not gpu", *tests],
        cwd=ROOT,
        env={**os.environ, **setting.variables},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode and not failed:
        failed = [f"pytest's exit code {done.returncode}", *lines[-20:]]
    return re.sub(r" in .*", "", lines[-1].strip("= ")) if lines else "", failed


def main() -> int:
    name, flags = processor()
    words = [word.lower() for word in sys.argv[1:]]
    lines, bad = [], 0
    for setting in SETTINGS:
        if not all(word in setting.name.lower() for word in words):
            continue
        variables = " ".join(f"{key}={value}" for key, value in setting.variables.items())
        if setting.flag and setting.flag not in flags:
            result, failed = f"not run: this CPU has no {setting.flag}", []
        else:
            result, failed = run_tests(setting)
        bad += bool(failed)
        lines.append(f"| {setting.name} | `{variables}` | {result} |")
        print(lines[-1], *failed, sep="\n", flush=True)
    if len(lines) == len(SETTINGS):
        head = [
            "# Instruction sets",
            "",
            f"The numerical tests (tests/{', tests/'.join(NUMERICAL)}) on one CPU ({name}) that was",
            "told to use the kernels of others. `make test-isa` writes this page.",
            "",
            "| setting | variables | result |",
            "|---|---|---|",
        ]
        TABLE.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
