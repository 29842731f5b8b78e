"""docs/evidence/pretraining_parts.md from the runs of benchmarks/pretraining_parts.py.

python benchmarks/pretraining_parts_page.py
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "pretraining_parts.jsonl"
DOCUMENT = ROOT / "docs" / "evidence" / "pretraining_parts.md"
SHORT = 2**19  # tokens
SEEDS = range(1, 9)
# depth and factor on the rates of what is put into ours
PLACES = ((2, 1.0), (4, 1.0), (4, 2.0), (6, 2.0))
PLAIN = "ve,smear,resid,x0,backout"
# Words that leave a part out (with a plus: put one in); of "arch=" transformers' own models. What
# the page calls them.
VARIANTS = {
    "": "nanochat, unchanged",
    PLAIN: "all extras off",
    f"{PLAIN},qk,muon": "all extras and the factor on q and k off, Muon instead of NorMuon",
    "arch=nanochat": "ours, `--arch nanochat`",
    "arch=nanochat,muon": "ours, `--arch nanochat --optimizer muon`",
    "arch=lfm2": "ours, `--arch lfm2`",
    "arch=lfm2_value": "ours, `--arch lfm2_value`",
    "ve": "no value embeddings",
    "gate": "value embeddings without their gates",
    "smear": "no smear",
    "resid,x0": "no residual and embedding scalars",
    "backout": "no backout",
    "qk": "no factor on q and k",
    "norm": "no norm on q and k",
    "tied": "head and embedding tied",
    "softcap": "no softcap",
    "init": "no factor 0.4 in the initialization of the MLP",
    "+windows": "windows SSSL",
    "+zloss": "with z-loss 1e-4",
    "polar,equal": "Newton-Schulz instead of Polar Express, rows not equalized",
    "neuron": "no second moment of neurons",
    "cautious": "decay everywhere",
    "equal": "rows not equalized",
    "renorm": "norm left as computed",
    "aspect": "one rate for all shapes",
    "muon": "Muon instead of NorMuon",
    "rates": "AdamW's groups all at the head's rate and betas",
    "schedule": "half a cosine instead of linear warm-down",
}
OURS = "arch=lfm2_value"
PUT_IN = {
    f"{OURS},+backout": "backout",
    f"{OURS},+init": "factor 0.4 in the initialization of the MLP",
    f"{OURS},+backout,+init": "both",
}
# What leaves out several at once, and the parts of it.
SUMS = {
    PLAIN: ("ve", "smear", "resid,x0", "backout"),
    "muon": ("polar,equal", "neuron", "cautious", "renorm"),
}
SUMS[f"{PLAIN},qk,muon"] = (*SUMS[PLAIN], "qk", *SUMS["muon"])


def results() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def page(runs: list[dict[str, Any]]) -> str:
    """Means over seeds; differences to nanochat of the same depth, rate and seed."""
    short = [run for run in runs if run["tokens"] == SHORT]
    found = {(run["variant"], run["depth"], run["rate"], run["seed"]): run["bpb"] for run in short}

    def cell(variant: str, depth: int, rate: float, seeds: Iterable[int] = SEEDS) -> str:
        bits = [
            found[variant, depth, rate, seed]
            for seed in seeds
            if (variant, depth, rate, seed) in found
        ]
        if not bits:
            return ""
        more = list(beside(found, variant, depth, rate, seeds).values())
        difference = f" ({percent(more)})" if variant and more else ""
        count = {1: ", one seed", 2: ", two seeds"}.get(len(bits), "") if seeds is SEEDS else ""
        return f"{mean(bits):.4f}{difference}{count}"

    depths = sorted({run["depth"] for run in short})
    rates = sorted({run["rate"] for run in short})
    rows = [
        [VARIANTS[variant], *(cell(variant, depth, 1.0) for depth in depths)]
        for variant in VARIANTS
        if any(key[0] == variant for key in found)
    ]
    grid = [
        [
            f"depth {depth}, {VARIANTS[variant]}",
            *(cell(variant, depth, rate, [1]) for rate in rates),
        ]
        for depth in depths
        for variant in VARIANTS
        if any((variant, depth, rate, 1) in found for rate in rates if rate != 1)
    ]
    given = [
        [PUT_IN[variant], *(percent(more) if more else "" for more in differences)]
        for variant in PUT_IN
        if any(
            differences := [
                list(beside(found, variant, *place, base=OURS).values()) for place in PLACES
            ]
        )
    ]
    long = [run for run in runs if run["tokens"] != SHORT]
    lasting = [
        [
            *(f"{run['depth']}", f"{run['tokens']:,}", f"{run['batch']:,}"),
            *(VARIANTS[run["variant"]], f"{run['rate']:g}"),
            *(f"{run['bpb']:.4f}", f"{run['parameters']:,}"),
        ]
        for run in sorted(
            long, key=lambda run: (run["tokens"], run["depth"], run["variant"], run["rate"])
        )
    ]
    return TEXT.format(
        parts=table(["", *(f"depth {depth}" for depth in depths)], rows),
        sums=table(["", "at once", "sum of the parts"], list(sums(found, depths))),
        put_in=table(["", *(f"depth {depth}, rates × {rate:g}" for depth, rate in PLACES)], given),
        rates=table(["all rates times", *(f"{rate:g}" for rate in rates)], grid),
        long=(
            LONG.format(
                table(
                    [
                        "depth",
                        "tokens",
                        "a step",
                        "",
                        "all rates times",
                        "bits per byte",
                        "parameters",
                    ],
                    lasting,
                )
            )
            if lasting
            else ""
        ),
    )


def beside(
    found: dict[Any, float],
    variant: str,
    depth: int,
    rate: float,
    seeds: Iterable[int] = SEEDS,
    base: str = "",
) -> dict[int, float]:
    """Percent of bits per byte more than nanochat's of the same seed, for each seed that both were
    run with.
    """
    runs = {
        seed: (found.get((variant, depth, rate, seed)), found.get((base, depth, rate, seed)))
        for seed in seeds
    }
    return {seed: 100 * (own / other - 1) for seed, (own, other) in runs.items() if own and other}


def sums(found: dict[Any, float], depths: list[int]) -> Iterator[list[str]]:
    """Rows of what several parts give at once, and the sum of each alone, over the seeds that all
    were run with.
    """
    for (whole, parts), depth in product(SUMS.items(), depths):
        each = [beside(found, variant, depth, 1.0) for variant in (whole, *parts)]
        if seeds := sorted(set.intersection(*map(set, each))):
            at_once, total = (
                [each[0][seed] for seed in seeds],
                [sum(part[seed] for part in each[1:]) for seed in seeds],
            )
            yield [f"depth {depth}, {VARIANTS[whole]}", percent(at_once), percent(total)]


def percent(values: list[float]) -> str:
    """The mean, and half of the range."""
    return f"{mean(values):+.2f}%" + (
        f" ± {(max(values) - min(values)) / 2:.2f}" if len(values) > 1 else ""
    )


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


TEXT = """# What each part of a pretraining gives

This page measures nanochat's model (github.com/karpathy/nanochat, 92d63d4) without one part at a time, and models from
transformers with our initialization. The values are bits per byte after 524,288 tokens. All runs use 4,096 tokens per
step, vocabulary 4,096, sequence 512, CPython's standard library and float32.

A minimal loop trains both on the same windows in the same order, with this package's schedule and parameter groups. The
learning rates are nanochat's, which scale with the square root of the batch size, times our factor for short runs.

Differences are to unchanged nanochat with the same seed. Values are means over three seeds unless one seed is stated;
± is half of the range over the seeds. A difference means nothing unless it is well above its ±, or, with one seed, at
least half a percent.

{parts}

The next table compares leaving out several parts at once with the sum of leaving out each alone. The extras are value
embeddings, smear, residual and embedding scalars, and backout. NorMuon's parts are Polar Express on equalized rows, the
second moment of neurons, decay only where weight and update have the same sign, and an orthogonal matrix's norm:

{sums}

Two parts are worth more than two percent at depth 4 in nanochat's model, and `--arch lfm2_value` does not have them.
The next table shows how adding them changes its bits per byte, with the same rates and seed. Values are means over
three seeds, at depth 6 over one. Neither part was adopted. (At depth 2 the middle layer is the last one, so backout is
only a factor before a norm.)

{put_in}

The next table has all rates of both sides times a factor, with one seed. `finetune.pretrain` uses 3.4 times these rates
for 4,096 tokens per step and 2.8 times for 8,192 ([the law](../guides/pretraining.md#optimizer)). Factors above four
were not run:

{rates}

{long}You need a checkout of nanochat. The runs take hours:

```
git clone https://github.com/karpathy/nanochat && git -C nanochat checkout 92d63d4
python benchmarks/pretraining_parts.py --nanochat nanochat --work-dir runs/parts --depths 2 4 --seeds 1 2 3
python benchmarks/pretraining_parts.py --nanochat nanochat --work-dir runs/parts --depths 2 4 --seeds 1 2 3 \\
  --variants arch=lfm2_value,+backout arch=lfm2_value,+init arch=lfm2_value,+backout,+init
python benchmarks/pretraining_parts.py --nanochat nanochat --work-dir runs/parts --depths 4 --seeds 1 2 3 --rates 2 \\
  --variants arch=lfm2_value arch=lfm2_value,+backout arch=lfm2_value,+init arch=lfm2_value,+backout,+init
python benchmarks/pretraining_parts.py --nanochat nanochat --work-dir runs/parts --depths 6 --seeds 1 --rates 2 \\
  --variants arch=lfm2_value,+backout
python benchmarks/pretraining_parts.py --nanochat nanochat --work-dir runs/parts --depths 2 4 6 --seeds 1 \\
  --rates 1 2 4 --variants "" arch=lfm2_value
python benchmarks/pretraining_parts.py --nanochat nanochat --work-dir runs/parts --depths 2 4 --seeds 1 \\
  --rates 2 4 --variants arch=nanochat
python benchmarks/pretraining_parts.py --nanochat nanochat --work-dir runs/parts --depths 4 --seeds 1 \\
  --rates 0.7 1.4 2 --variants "" arch=lfm2 arch=lfm2_value
python benchmarks/pretraining_parts.py --nanochat nanochat --work-dir runs/parts --depths 4 --seeds 1 \\
  --tokens 2097152 --total-batch-size 8192 --rates 1 2 --variants "" arch=lfm2_value
python benchmarks/pretraining_parts.py --nanochat nanochat --work-dir runs/parts --depths 2 --seeds 1 \\
  --tokens 11010048 --rates 1 2 4 --variants "" arch=lfm2_value
python benchmarks/pretraining_parts_page.py
```

The models are tiny, and all runs except the longest are far shorter than twelve tokens per parameter. A part can have a
different effect in larger models and longer runs.
"""
LONG = """Longer runs, with one seed. 11,010,048 tokens are twelve per parameter in nanochat's matrices and head at
depth 2, which is what its rates are meant for. These runs read the text 1.2 times; the others read less than all of it:

{}

"""


if __name__ == "__main__":
    DOCUMENT.write_text(page(results()), encoding="utf-8")
