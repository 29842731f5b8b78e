"""Packed sequences against padded microbatches: the same training, side by side.

    python benchmarks/packing.py                       # on this machine's best device, a few
    minutes on two cores python benchmarks/packing.py --model DIR --micro-batch-size 8
    --global-batch-size 128 --steps 30

Each data set is trained for the same steps packed and padded, in turn, each time in a process of
its own, so that peak memory is its own. Both have the same micro-batch: a packed sequence holds at
most micro-batch x cutoff tokens, a padded microbatch micro-batch samples. Throughput is the median
over the steps after the first, in tokens of the data: padding does not count. Exits with 1 if
losses differ by more than rounding or nothing was learned from.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WARM_UP_STEPS = 3
LOSS_LIMITS = {"float32": 1e-5, "bfloat16": 5e-2, "float16": 5e-2}
WORDS = (
    "router",
    "switch",
    "packet",
    "frame",
    "port",
    "link",
    "route",
    "mask",
    "delay",
    "node",
    "cost",
    "path",
)


@dataclass(frozen=True)
class Measured:
    """One run."""

    losses: list[float]
    gradient_norms: list[float]
    tokens_per_second: float
    peak_memory_bytes: int
    padding_share: float
    device: str
    dtype: str


def main() -> int:
    options = _options()
    if options.child is not None:
        _train_and_print(json.loads(options.child.read_text(encoding="utf-8")))
        return 0
    right = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = []
        for title, data in _data_sets(folder, options):
            packed, padded = _measure(folder, title, data, options)
            line, agrees = _line(title, packed, padded)
            lines.append(line)
            right &= agrees
        print(_heading(packed[0], options))
        print("\n".join(lines))
    return 0 if right else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(ROOT / "data_samples" / "tiny-qwen3"))
    parser.add_argument("--finetuning", choices=("lora", "full"), default="full")
    parser.add_argument("--device-type", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--cutoff-len", type=int, default=1024, help="tokens")
    parser.add_argument("--micro-batch-size", type=int, default=4, help="samples")
    parser.add_argument("--global-batch-size", type=int, default=32, help="samples")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _data_sets(folder: Path, options: argparse.Namespace) -> list[tuple[str, Path]]:
    bundled = ROOT / "data_samples" / "train.jsonl"
    return [
        ("bundled data", bundled),
        ("long-tailed", _long_tailed(folder / "long_tailed.jsonl", options.cutoff_len)),
    ]


def _long_tailed(path: Path, cutoff_len: int, records: int = 1000) -> Path:
    """Answers of log-normal length: half below a 16th of the cutoff, the longest beyond it."""
    choose = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(records):
            length = int(choose.lognormvariate(0, 1.2) * cutoff_len / 32) + 1
            answer = " ".join(choose.choices(WORDS, k=min(length, cutoff_len)))
            question = " ".join(choose.choices(WORDS, k=choose.randint(2, 12)))
            file.write(json.dumps({"instruction": question, "input": "", "output": answer}) + "\n")
    return path


def _measure(
    folder: Path, title: str, data: Path, options: argparse.Namespace
) -> tuple[list[Measured], list[Measured]]:
    """Packed and padded runs in turn, so that what else the machine does falls on both."""
    runs: dict[bool, list[Measured]] = {True: [], False: []}
    for number in range(options.repeats):
        for packing in (True, False):
            name = f"{title.replace(' ', '_')}-{'packed' if packing else 'padded'}-{number}"
            print(f"{name} ...", file=sys.stderr, flush=True)
            runs[packing].append(
                _in_a_process(folder, name, _settings(folder / name, data, packing, options))
            )
    return runs[True], runs[False]


def _settings(
    output_dir: Path, data: Path, packing: bool, options: argparse.Namespace
) -> dict[str, Any]:
    return {
        "model": options.model,
        "data": str(data),
        "output_dir": str(output_dir),
        "cache_dir": str(output_dir.parent / "cache"),
        "finetuning": options.finetuning,
        "device_type": options.device_type,
        "dtype": options.dtype,
        "cutoff_len": options.cutoff_len,
        "micro_batch_size": options.micro_batch_size,
        "global_batch_size": options.global_batch_size,
        "max_steps": options.steps,
        "warmup_steps": 0,
        "packing": packing,
        "save_steps": 0,
        "report_to": "none",
        "log_samples": True,
    }


def _in_a_process(folder: Path, name: str, settings: dict[str, Any]) -> Measured:
    config = folder / f"{name}.json"
    config.write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, __file__, "--child", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{name} failed:\n{done.stderr[-4000:]}")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def _train_and_print(settings: dict[str, Any]) -> None:
    """In the child: train, and print what was measured as the last line."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    import finetune
    from finetune.runtime import device

    result = finetune.run(settings)
    steps = [record for record in result.history if "loss" in record]
    start = next(
        json.loads(line)
        for line in (result.output_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()
        if json.loads(line)["event"] == "start"
    )
    measured = Measured(
        losses=[record["loss"] for record in steps],
        gradient_norms=[record["grad_norm"] for record in steps],
        tokens_per_second=statistics.median(
            record["tokens_per_second"] for record in steps[WARM_UP_STEPS:]
        ),
        peak_memory_bytes=device.peak_memory_bytes(torch.device(start["device_type"])) or 0,
        padding_share=start["plan"]["padding_share"],
        device=start["device_type"],
        dtype=start["dtype"],
    )
    print(json.dumps(vars(measured)))


def _heading(run: Measured, options: argparse.Namespace) -> str:
    facts = (
        f"{Path(options.model).name}, {options.finetuning}, {run.device}, {run.dtype}; micro-batch"
        f" {options.micro_batch_size}, global batch {options.global_batch_size}, cutoff"
        f" {options.cutoff_len}; {options.steps} steps, {options.repeats} runs per variant"
    )
    columns = (
        "data",
        "padding of padded microbatches",
        "packed tok/s",
        "padded tok/s",
        "ratio (each pair)",
        "packed peak",
        "padded peak",
        "largest loss difference",
        "smallest gradient norm",
        "",
    )
    return f"{facts}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def _line(title: str, packed: list[Measured], padded: list[Measured]) -> tuple[str, bool]:
    """A line of the table, and whether both trained the same."""
    difference = max(
        abs(a - b) / abs(a)
        for one, other in zip(packed, padded, strict=True)
        for a, b in zip(one.losses, other.losses, strict=True)
    )
    smallest_norm = min(norm for run in (*packed, *padded) for norm in run.gradient_norms)
    agrees = difference < LOSS_LIMITS[packed[0].dtype] and smallest_norm > 0
    ratios = [
        one.tokens_per_second / other.tokens_per_second
        for one, other in zip(packed, padded, strict=True)
    ]
    cells = (
        title,
        f"{padded[0].padding_share:.0%}",
        f"{statistics.median(run.tokens_per_second for run in packed):,.0f}",
        f"{statistics.median(run.tokens_per_second for run in padded):,.0f}",
        f"{statistics.median(ratios):.2f} ({', '.join(f'{ratio:.2f}' for ratio in ratios)})",
        f"{max(run.peak_memory_bytes for run in packed) / 2**20:,.0f} MiB",
        f"{max(run.peak_memory_bytes for run in padded) / 2**20:,.0f} MiB",
        f"{difference:.1e}",
        f"{smallest_norm:.2g}",
        "the same training" if agrees else "NOT the same training",
    )
    return f"| {' | '.join(cells)} |", agrees


if __name__ == "__main__":
    sys.exit(main())
