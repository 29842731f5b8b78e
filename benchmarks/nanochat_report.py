"""What benchmarks/nanochat.py measured, as tables, a document and a plot."""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.runtime.host import usable_cores

COMMIT = "92d63d4"
DEPTH, SEQUENCE, VOCABULARY = 4, 512, 8192
REFERENCE = "nanochat"
VARIANTS = {
    "nanochat": "nanochat, unchanged",
    "nanochat-plain": (
        "nanochat without value embeddings, residual and embedding scalars, smear and backout"
    ),
    "ours": "ours, `--compile true`",
    "ours-lfm2": "ours, `--arch lfm2 --compile true`",
    "ours-lfm2_value": "ours, `--arch lfm2_value --compile true`",
    "nanochat-own-loader": "nanochat with its own loader on the same documents",
    "ours-eager": "ours, not compiled (our default on a CPU)",
    "ours-2-processes": "ours, compiled, two processes of one thread",
}
WARM_UP_STEPS = 2


def parts_of(variant: str) -> tuple[str, bool, str]:
    """Of NAME[-bf16][@FACTOR]: the name, whether in bfloat16, and the factor on nanochat's rates,
    or "".
    """
    name, _, factor = variant.partition("@")
    return name.removesuffix("-bf16"), name.endswith("-bf16"), factor


@dataclass(frozen=True)
class Measured:
    """One run. `rates_factor` on nanochat's rates; `step_seconds` of every step, in order;
    `bits_per_byte` by step.
    """

    variant: str
    rates_factor: float
    parameters: int
    step_seconds: list[float]
    first_evaluation_seconds: float
    wall_seconds: float
    bits_per_byte: dict[int, float]
    smallest_gradient_norm: float

    @property
    def steady_step_seconds(self) -> float:
        return statistics.median(self.step_seconds[WARM_UP_STEPS:] or self.step_seconds)


def machine_facts(options: argparse.Namespace) -> dict[str, Any]:
    """Options and machine."""
    import torch

    return vars(options) | {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": usable_cores(),
        "flags": cpu_flags(),
        "load_before": os.getloadavg(),
    }


def cpu_flags() -> list[str]:
    """What the processor can do that decides how fast this goes."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return []
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return [flag for flag in wanted if re.search(rf"^flags.*\b{flag}\b", text, re.MULTILINE)]


def make_tables(
    runs: list[Measured], options: argparse.Namespace, *, valid_bytes: int, valid_tokens: int
) -> str:
    """Three tables: speed, bits per byte, and these at the end beside the rates."""
    reference = next((run for run in runs if run.variant == REFERENCE), None)
    batch, steps = options.total_batch_size, sorted(runs[0].bits_per_byte)

    def ratio(run: Measured) -> str:
        return f"{reference.steady_step_seconds / run.steady_step_seconds:.2f}" if reference else ""

    speed = [
        f"| {run.variant} | {run.parameters:,} | {batch / run.steady_step_seconds:,.0f} |"
        f" {ratio(run)} | {run.first_evaluation_seconds + run.step_seconds[0]:.0f} |"
        f" {sum(run.step_seconds):,.0f} | {run.wall_seconds:,.0f} |"
        f" {run.smallest_gradient_norm:.2g} |"
        for run in runs
    ]
    quality = []
    for run in runs:
        last = run.bits_per_byte[steps[-1]]
        beside = f"{last - reference.bits_per_byte[steps[-1]]:+.4f}" if reference else ""
        cells = [f"{run.bits_per_byte[step]:.4f}" for step in steps]
        quality.append(f"| {' | '.join([run.variant, *cells, beside])} |")
    return "\n".join(
        [
            (
                "| variant | parameters | tok/s | x nanochat | first evaluation and step, s | all"
                " steps, s | wall, s | smallest gradient norm |"
            ),
            "|" + "---|" * 8,
            *speed,
            "",
            (
                "| bits per byte after tokens |"
                f" {' | '.join(f'{step * batch:,}' for step in steps)} | minus nanochat |"
            ),
            "|" + "---|" * (len(steps) + 2),
            *quality,
            "",
            *_grid(runs, steps[-1]),
            "",
            (
                f"Checked: {options.tokens:,} training tokens in {options.steps} steps each, the"
                f" same windows in every step (except nanochat-own-loader), and {valid_bytes:,}"
                f" validation bytes in {valid_tokens:,} tokens at every evaluation."
            ),
        ]
    )


def _grid(runs: list[Measured], last: int) -> list[str]:
    """Bits per byte at the end of every variant by the factor on its rates; each variant's best in
    bold.
    """
    factors = sorted({round(run.rates_factor, 2) for run in runs})
    found: dict[str, dict[float, float]] = {}
    for run in runs:
        found.setdefault(run.variant.split("@")[0], {})[round(run.rates_factor, 2)] = (
            run.bits_per_byte[last]
        )
    lines = [f"| nanochat's rates times | {' | '.join(f'{factor:g}' for factor in factors)} |"]
    lines.append("|" + "---|" * (len(factors) + 1))
    for name, row in found.items():
        best = min(row.values())
        cells = [f"{row[f]:.4f}" if f in row else "" for f in factors]
        cells = [
            f"**{cell}**" if row.get(f) == best else cell
            for f, cell in zip(factors, cells, strict=True)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def make_document(tables: str, options: argparse.Namespace) -> str:
    facts = machine_facts(options)
    names = dict.fromkeys(parts_of(variant)[0] for variant in options.only)
    variants = "\n".join(f"- **{name}**: {VARIANTS[name]}." for name in names)
    flags = ", ".join(facts["flags"]) or "unknown"
    return f"""# Pretraining compared with nanochat

This page is written by `benchmarks/nanochat.py`. It compares nanochat ({COMMIT},
[source](https://github.com/karpathy/nanochat)) with this package. Both ran one after another on the same machine and
read the same windows of tokens. You need nanochat's code. The run takes about four hours on two cores:

```
git clone https://github.com/karpathy/nanochat && git -C nanochat checkout {COMMIT}
python benchmarks/nanochat.py --nanochat nanochat --work-dir runs/nanochat --tokens {options.tokens} \\
    --only {",".join(options.only)} --write-doc
```

{facts["cores"]} cores ({flags}), Python {facts["python"]}, torch {facts["torch"]}. Depth {DEPTH}, sequence {SEQUENCE},
vocabulary {VOCABULARY:,}, {options.total_batch_size:,} tokens per step, {options.device_batch_size} windows at a time.

{variants}

{tables}

## What is equal, and what is not

- Equal: corpus (the standard library of the running Python), tokenizer, depth, width, heads, windows and their order,
  batch size, number of steps, validation windows. Bits per byte counts text only, on both sides.
- Each package uses its own defaults for learning rates, warm-up, warm-down, weight decay, initialization and optimizer.
  nanochat runs with `--window-pattern L`, as it recommends without flash attention.
- Both packages scale learning rates by batch size and width. Ours also scales them by the length of the run.
  NAME@FACTOR has nanochat's rates times the factor, on both sides. NAME-bf16 is in bfloat16.
- nanochat reads our windows instead of using its own loader. Its loader begins every window at a document and truncates
  what does not fit. On documents much longer than a window it reads little more than their beginnings. `--only
  nanochat-own-loader` measures that, on the same validation windows.
- Without its extras nanochat still has the factor 1.2 on queries and keys.
- Tokens per second are from the median step, including optimizer and loader, without evaluation and compilation. The
  first evaluation and the first step include the compilation, from an empty cache.
"""


def draw_plot(runs: list[Measured], path: Path, options: argparse.Namespace) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("matplotlib is not installed: the table has no plot")
        return
    axes = (figure := Figure()).subplots()
    for run in runs:
        points = sorted(run.bits_per_byte.items())[1:]
        axes.plot(
            [s * options.total_batch_size for s, _ in points],
            [b for _, b in points],
            ".-",
            label=run.variant,
        )
    axes.set(xlabel="tokens", ylabel="bits per byte of validation text")
    axes.legend()
    figure.savefig(path)
