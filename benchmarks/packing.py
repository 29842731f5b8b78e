"""Packed against padded rows, side by side: the same training, how fast and with how much memory.

    python benchmarks/packing.py            # about two minutes on 2 cores

Two data sets: the bundled one, and rows with a long tail of lengths. On each, the same run is executed packed and
padded, in turn (packed, padded, padded, packed), each in a process of its own. Before a ratio is printed it is asserted
that the work was equal: the same samples and tokens in every step, losses within 1e-5 relative, gradient norms above 0.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS, WARMUP_STEPS = 30, 5  # the first steps are not timed
CUTOFF_LEN = 512
TURNS = (True, False, False, True)


@dataclass(frozen=True)
class Execution:
    """One run: what its log says of every step, and its peak memory."""

    losses: list[float]
    gradient_norms: list[float]
    tokens_per_second: float
    samples: str
    peak_memory_bytes: int


def long_tailed_rows(path: Path, rows: int = 600) -> Path:
    """Rows whose answers' lengths follow a log-normal distribution: most are short, a few fill the cutoff."""
    choose = random.Random(7)
    words = ("router", "switch", "link", "path", "packet", "mask", "route", "cost", "host", "port")
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            count = min(400, max(2, int(choose.lognormvariate(3.2, 1.0))))
            row = {"instruction": f"Say words {number}", "output": " ".join(choose.choices(words, k=count))}
            file.write(json.dumps(row) + "\n")
    return path


def execute(data: Path, folder: Path, *, packing: bool) -> Execution:
    """Run `finetune.sft` in a process of its own and read its log."""
    command = [
        *(sys.executable, "-m", "finetune.sft", "--model", "data_samples/tiny-qwen3", "--data", str(data)),
        *("--output-dir", str(folder), "--max-steps", str(STEPS), "--cutoff-len", str(CUTOFF_LEN)),
        *("--micro-batch-size", "4", "--global-batch-size", "32", "--packing", str(packing).lower()),
        *("--use-curriculum", "false", "--save-steps", "0", "--report-to", "none", "--log-samples"),
        *("--dtype", "float32", "--device-type", "cpu"),
    ]
    with open(folder.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise RuntimeError(folder.with_suffix(".log").read_text(errors="replace")[-2000:])
    records = [json.loads(line) for line in (folder / "trainer_log.jsonl").read_text().splitlines()]
    return Execution(
        losses=[record["loss"] for record in records],
        gradient_norms=[record["grad_norm"] for record in records],
        tokens_per_second=statistics.median(record["tokens_per_second"] for record in records[WARMUP_STEPS:]),
        samples=(folder / "samples.jsonl").read_text(),
        peak_memory_bytes=usage.ru_maxrss * 1024,
    )


def assert_equal_work(first: Execution, second: Execution) -> float:
    """Raise AssertionError unless both trained the same; returns the largest relative difference of losses."""
    assert first.samples == second.samples, "other samples"
    assert min(first.gradient_norms + second.gradient_norms) > 0, "a gradient norm of 0: nothing was trained"
    difference = max(abs(a - b) / a for a, b in zip(first.losses, second.losses, strict=True))
    assert difference < 1e-5, f"losses differ by {difference:.1e}"
    return difference


def compare(name: str, data: Path, folder: Path) -> str:
    """A line of the table."""
    runs: dict[bool, list[Execution]] = {True: [], False: []}
    for number, packing in enumerate(TURNS):
        runs[packing].append(execute(data, folder / f"{name}-{number}", packing=packing))
    difference = max(assert_equal_work(runs[True][0], other) for others in runs.values() for other in others)
    speed = {packing: [run.tokens_per_second for run in found] for packing, found in runs.items()}
    memory = {packing: max(run.peak_memory_bytes for run in found) / 2**20 for packing, found in runs.items()}
    packed, padded = statistics.mean(speed[True]), statistics.mean(speed[False])
    spread = max(abs(a - b) / (a + b) for a, b in speed.values())
    return (
        f"| {name} | {packed:,.0f} | {padded:,.0f} | {packed / padded:.2f} | ±{spread:.0%} "
        f"| {memory[True]:,.0f} | {memory[False]:,.0f} | {difference:.1e} |"
    )


def main() -> None:
    print("| data | packed tok/s | padded tok/s | ratio | spread | packed MiB | padded MiB | losses differ by |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(compare("bundled", ROOT / "data_samples" / "train.jsonl", folder), flush=True)
        print(compare("long-tailed", long_tailed_rows(folder / "long.jsonl"), folder), flush=True)


if __name__ == "__main__":
    main()
