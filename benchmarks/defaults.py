"""Which learning rate and batch fine-tuning wants, by width of the model, size of the data, and
method.

    python benchmarks/defaults.py bases                      # three small models; the bundled one
    is one of them python benchmarks/defaults.py sweep                      # what is in the results
    is not run again python benchmarks/defaults.py page                       #
    docs/evidence/defaults_benchmark.md of what there is

bases: models of width 128 and 512 beside the bundled one of 256, pretrained on a part of its corpus
(its tokenizer). sweep: whole runs of three passes, each on one thread, on 167, 500 and all 1,500
records of train.jsonl: rates around the expected best for LoRA and for full training at a batch of
16; and batches of 4 to 64 on the bundled model. What counts is the loss on the held-out records at
the end of a run. Results go to benchmarks/results/defaults_sweep.jsonl.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpo import records

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "data_samples"
RESULTS = ROOT / "benchmarks" / "results" / "defaults_sweep.jsonl"
DOCUMENT = ROOT / "docs" / "evidence" / "defaults_benchmark.md"
WIDTHS = (128, 256, 512)
LAYERS = {128: 4, 256: 4, 512: 2}
ROWS = (167, 500, 1500)
EPOCHS, SEED = 3, 42
BASE_STEPS = {128: 700, 512: 500}  # of 8 windows of 512 tokens
RATES = {
    "lora": {
        128: (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
        256: (5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
        512: (5e-4, 1e-3, 2e-3, 4e-3),
    },
    "full": {
        128: (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 4e-3),
        256: (1e-4, 2e-4, 5e-4, 1e-3, 2e-3),
        512: (5e-5, 1e-4, 2e-4, 5e-4),
    },
}
BATCHES = {500: (8, 32), 1500: (8, 32)}
RATES_OF_BATCHES = {"lora": (5e-4, 1e-3, 2e-3, 4e-3), "full": (1e-4, 2e-4, 5e-4, 1e-3)}
SETTINGS = ("width", "rows", "method", "batch", "rate")
Run = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("bases", "sweep", "page"))
    parser.add_argument("--work-dir", type=Path, default=ROOT / "build" / "bench-defaults")
    parser.add_argument(
        "--share", default="1/1", help="of the runs, where several processes sweep: 1/2, 2/2"
    )
    options = parser.parse_args()
    options.work_dir.mkdir(parents=True, exist_ok=True)
    if options.part == "bases":
        make_bases(options.work_dir)
    elif options.part == "sweep":
        sweep(options.work_dir, options.share)
    else:
        DOCUMENT.write_text(page(results()), encoding="utf-8")
        print(DOCUMENT.read_text(encoding="utf-8"))


# ---------------------------------------------------------------------- models


def base_of(work: Path, width: int) -> Path:
    return DATA / "tiny-qwen3" if width == 256 else work / f"base-{width}"


def make_bases(work: Path) -> None:
    sys.path.insert(0, str(DATA / "generators"))
    import make_base_model
    import make_corpus
    from transformers import AutoTokenizer

    from finetune.__main__ import main as finetune_command

    tokens = work / "tokens"
    if not tokens.exists():
        tokenizer = AutoTokenizer.from_pretrained(DATA / "tiny-qwen3")
        parts, _ = make_corpus.write_corpus(work / "corpus", parts=4)
        documents = [
            make_base_model.write_documents(part, tokenizer, work / part.name) for part in parts
        ]
        words = [
            "prepare",
            "--data",
            *documents,
            "--output-dir",
            tokens,
            "--tokenizer",
            DATA / "tiny-qwen3",
        ]
        words += ["--special-tokens", "true", "--valid-fraction", make_base_model.VALID_FRACTION]
        if code := finetune_command([str(word) for word in words]):
            raise SystemExit(code)
    for width, steps in BASE_STEPS.items():
        if not (base_of(work, width) / "model.safetensors").exists():
            pretrain(work, tokens, width, steps)


def pretrain(work: Path, tokens: Path, width: int, steps: int) -> None:
    """From random numbers, as training that goes on: so the shape is free."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from finetune import run

    start = work / f"start-{width}"
    config = AutoConfig.from_pretrained(DATA / "tiny-qwen3")
    config.update({"hidden_size": width, "num_hidden_layers": LAYERS[width], "head_dim": 64})
    config.update(
        {"layer_types": ["full_attention"] * LAYERS[width], "max_window_layers": LAYERS[width]}
    )
    config.update({"num_attention_heads": width // 64, "num_key_value_heads": width // 64})
    config.update({"intermediate_size": 64 * math.ceil(width / 24)})
    torch.manual_seed(SEED)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(start)
    AutoTokenizer.from_pretrained(DATA / "tiny-qwen3").save_pretrained(start)
    run(
        {
            "kind": "pretrain",
            "model": str(start),
            "train_data_path": (str(tokens),),
            "valid_data_path": (str(tokens),),
            "output_dir": str(base_of(work, width)),
            "max_seq_len": 512,
            "device_batch_size": 8,
            "total_batch_size": 8 * 512,
            "num_iterations": steps,
            "learning_rate": 3e-3 if width == 128 else 1.5e-3,
            "lr_scheduler": "cosine",
            "dtype": "bfloat16",
            "device_type": "cpu",
            "save_steps": 0,
            "eval_steps": 300,
            "sample_every": 0,
            "report_to": ("none",),
        }
    )


# ---------------------------------------------------------------------- runs


def planned() -> Iterator[Run]:
    for rows in ROWS:
        for width in WIDTHS:
            for method, rates in RATES.items():
                for rate in rates[width]:
                    yield {
                        "width": width,
                        "rows": rows,
                        "method": method,
                        "batch": 16,
                        "rate": rate,
                    }
        for batch in BATCHES.get(rows, ()):
            for method, rates in RATES_OF_BATCHES.items():
                for rate in rates:
                    yield {
                        "width": 256,
                        "rows": rows,
                        "method": method,
                        "batch": batch,
                        "rate": rate,
                    }


def key(run: Run) -> tuple[Any, ...]:
    return tuple(run[name] for name in SETTINGS)


def results() -> list[Run]:
    return records(RESULTS) if RESULTS.exists() else []


def sweep(work: Path, share: str) -> None:
    """Run what there is no result of, all in this process.

    Args:
        share: which part of the runs is this process's, as `1/2`.
    """
    import torch

    torch.set_num_threads(1)
    lines = (DATA / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for rows in ROWS:  # the file is shuffled
        (work / f"train-{rows}.jsonl").write_text("".join(lines[:rows]), encoding="utf-8")
    done = {key(run) for run in results()}
    number, of = map(int, share.split("/"))
    cheapest_first = sorted(planned(), key=lambda run: run["rows"] * run["width"])
    for run in [run for run in cheapest_first if key(run) not in done][number - 1 :: of]:
        if (base_of(work, run["width"]) / "model.safetensors").exists():
            found = {**run, **train(work, run)}
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
            print(*key(run), f"{found['loss']:.4f}", file=sys.stderr, flush=True)


def train(work: Path, run: Run) -> dict[str, Any]:
    """The losses on the held-out records after one run."""
    from finetune import run as finetune_run

    folder = work / "runs" / "-".join(str(run[setting]) for setting in SETTINGS)
    result = finetune_run(
        {
            "model": str(base_of(work, run["width"])),
            "data": str(work / f"train-{run['rows']}.jsonl"),
            "valid_data": str(DATA / "valid.jsonl"),
            "output_dir": str(folder),
            "cache_dir": str(work / "cache"),
            "finetuning": run["method"],
            "learning_rate": run["rate"],
            "global_batch_size": run["batch"],
            "num_epochs": EPOCHS,
            "seed": SEED,
            "save_steps": 0,
            "dtype": "bfloat16",
            "device_type": "cpu",
            "report_to": "none",
        }
    )
    if result.state != "done":
        raise SystemExit(f"{folder}: {result.state} at step {result.steps}")
    metrics = result.metrics
    levels = {
        name.partition("/")[2]: value
        for name, value in metrics.items()
        if name.startswith("eval_loss/")
    }
    shutil.rmtree(folder)
    return {
        "loss": metrics["eval_loss"],
        "levels": levels,
        "steps": math.ceil(EPOCHS * run["rows"] / run["batch"]),
    }


# ---------------------------------------------------------------------- page


def page(found: list[Run]) -> str:
    bases = ", ".join(f"{width} ({LAYERS[width]} layers)" for width in WIDTHS)
    lines = [
        "# Learning rates and batches, measured",
        "",
        wrapped(
            "This page is written by `python benchmarks/defaults.py page` from"
            " `benchmarks/results/defaults_sweep.jsonl`. Do not edit it."
        ),
        "",
        wrapped(
            f"Each cell is a complete run with {EPOCHS} passes and the staged curriculum, in"
            f" bfloat16 on a CPU, with seed {SEED}. The models have hidden sizes {bases}. The model"
            " with hidden size 256 is `data_samples/tiny-qwen3`. The others are pretrained on"
            f" {BASE_STEPS[128] * 4096 / 1e6:.1f} and {BASE_STEPS[512] * 4096 / 1e6:.1f} million"
            " tokens of its corpus."
        ),
        "",
        wrapped(
            "The values are the loss per target on the 150 records of `valid.jsonl` after the run."
            " The best of each line is bold. `auto` is the learning rate that a run chooses by"
            " itself. `costs` is its extra loss compared with the best rate, interpolated between"
            " the neighboring rates."
        ),
        "",
    ]
    for method in RATES:
        for width in WIDTHS:
            cells = [run for run in found if run["method"] == method and run["width"] == width]
            if cells:
                lines += [f"## {method}, hidden size {width}", "", *table(cells), ""]
    return "\n".join(lines)


def wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def table(runs: list[Run]) -> list[str]:
    """A line for each size of the data and batch, a column for each rate."""
    rates = sorted({run["rate"] for run in runs})
    lines = [
        f"| records | batch | steps | {' | '.join(f'{rate:g}' for rate in rates)} | auto | costs |"
    ]
    lines.append("|" + "---|" * (len(rates) + 5))
    for rows, batch in sorted({(run["rows"], run["batch"]) for run in runs}):
        losses = {
            run["rate"]: run["loss"] for run in runs if (run["rows"], run["batch"]) == (rows, batch)
        }
        best = min(losses.values())
        cells = [f"{losses[rate]:.4f}" if rate in losses else "" for rate in rates]
        cells = [f"**{cell}**" if cell == f"{best:.4f}" else cell for cell in cells]
        rate = auto_rate(runs[0], batch)
        between = interpolated(losses, rate)
        cost = "outside" if between is None else f"{between / best - 1:+.0%}"
        cell = {
            "width": runs[0]["width"],
            "rows": rows,
            "method": runs[0]["method"],
            "batch": batch,
        }
        if {run["rate"] for run in planned() if cell.items() <= run.items()} - losses.keys():
            cost = "not all run"
        steps = math.ceil(EPOCHS * rows / batch)
        lines.append(f"| {rows:,} | {batch} | {steps} | {' | '.join(cells)} | {rate:g} | {cost} |")
    return lines


def auto_rate(run: Run, batch: int) -> float:
    from finetune.config.run_config import RunConfig
    from finetune.planning.learning_defaults import rate_for

    return rate_for(
        RunConfig(model="m", data="d", output_dir="o", finetuning=run["method"]),
        run["width"],
        batch,
    )


def interpolated(losses: dict[float, float], rate: float) -> float | None:
    """The loss at a rate between two that were run, on a line over the rates' logarithms; None
    outside.
    """
    below = max((one for one in losses if one <= rate), default=None)
    above = min((one for one in losses if one >= rate), default=None)
    if below is None or above is None:
        return None
    share = 0.0 if below == above else math.log(rate / below) / math.log(above / below)
    return losses[below] + share * (losses[above] - losses[below])


if __name__ == "__main__":
    main()
