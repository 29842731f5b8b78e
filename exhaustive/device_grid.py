"""The equivalence grid on one device: `python exhaustive/grid.py --device cuda [--jobs 10] [--every N]`.

The cells of exhaustive/grid.py that are one process (NCCL takes one rank a device), each against the
CPU's run of its model, and some in bfloat16 against the device's own: flash attention over document
bounds runs only there. Every cell is a run in a process of its own, `--jobs` of them at a time.
When every cell was run the table goes into docs/evidence/equivalence_grid_<device>.md.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import grid
import run_helpers as runs
import run_patches
from grid import LIMITS, MODELS, STEPS, Cell, Outcome

LOG_CHARACTERS = 3000  # of a cell that failed


def cells(device: str) -> list[Cell]:
    """Those in float32, then those in bfloat16."""
    # Two devices may round a scale of a quantised base otherwise (tests/training/test_cuda_runs.py
    # compares them).
    of_processes = [
        cell for cell in grid.cells() if cell.processes == 1 and cell.quantization == "none"
    ]
    packed = [
        Cell(kind, "plain", 1, True, 4, model) for model in MODELS for kind in ("lora", "full")
    ]
    # The compiler and Triton take half a minute for a device, and have nothing to do on a CPU.
    providers = (
        []
        if device == "cpu"
        else ["compile", *(["liger"] if importlib.util.find_spec("liger_kernel") else [])]
    )
    layers = [
        Cell(kind, "plain", 1, True, 4, fused_layers=provider)
        for kind in ("lora", "full")
        for provider in providers
    ]
    exact = [*of_processes, *packed, *layers]
    ways = (("plain", 1, True, 4), ("plain", 1, False, 1), ("plain", 1, False, 4))
    half = [Cell(kind, *way) for kind in ("lora", "full") for way in ways]
    half += [Cell("lora", *way, model="windows") for way in ways]
    half += [Cell("lora", "plain", 1, packing, 4, fused_lora=False) for packing in (True, False)]
    half += [Cell("lora", "zero3", 1, True, 4), *layers]
    chosen = [replace(cell, device=device) for cell in exact]
    return chosen + [replace(cell, device=device, dtype="bfloat16") for cell in half]


def execute(cell: Cell, materials: runs.Materials, folder: Path) -> str:
    """Run a cell; "" or, where it failed, the end of what it said."""
    try:
        module = "finetune.dpo" if cell.loss else "finetune.sft"
        runs.train(cell.settings(materials, folder), patch=run_patches.true_float32, module=module)
    except (AssertionError, TimeoutError, OSError) as error:
        return str(error)[-LOG_CHARACTERS:]
    return ""


def execute_all(
    chosen: Iterable[Cell], device: str, jobs: int, materials: runs.Materials, folder: Path
) -> dict[Cell, str]:
    """Run cells side by side, each of `jobs` processes with a server of its own that forks them;
    cell -> error.
    """
    began, errors = time.monotonic(), {}
    with ProcessPoolExecutor(
        jobs, get_context("spawn"), initializer=prepare, initargs=(device,)
    ) as pool:
        tasks: dict[Future[str], Cell] = {
            pool.submit(execute, cell, materials, folder): cell for cell in chosen
        }
        for number, task in enumerate(as_completed(tasks), 1):
            cell = tasks[task]
            errors[cell] = str(task.exception()) if task.exception() else task.result()
            said = f"FAILED\n{errors[cell]}" if errors[cell] else "ran"
            print(
                f"{number}/{len(tasks)} {time.monotonic() - began:.0f} s {cell.name}: {said}",
                flush=True,
            )
    return errors


def prepare(device: str) -> None:
    """The environment of a process that starts cells, before it has asked for devices."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # cuBLAS reads it
    os.environ["DS_ACCELERATOR"] = device
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def outcomes_of(whole: grid.Grid, chosen: list[Cell], errors: dict[Cell, str]) -> list[Outcome]:
    """Each cell against its reference, all of which have run."""
    found = []
    for cell in chosen:
        failed = [name for name, ran in (("reference", cell.run), ("run", cell)) if errors[ran]]
        if failed:
            found.append(Outcome(cell, float("nan"), float("nan"), f"the {failed[0]} failed"))
            continue
        try:
            found.append(whole.outcome(cell))
        except Exception as error:  # a line of the table: the other cells are compared all the same
            found.append(
                Outcome(cell, float("nan"), float("nan"), f"{type(error).__name__}: {error}")
            )
    return found


def page(outcomes: list[Outcome], seconds: float, device: str, jobs: int) -> str:
    """The committed page."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or device
    held = sum(not outcome.why for outcome in outcomes)
    (loss, weight), (half_loss, half_weight) = LIMITS["float32"], LIMITS["bfloat16"]
    lines = [
        f"# The equivalence grid on {device}",
        "",
        (
            f"Runs of {STEPS} steps on one {name} (torch {torch.__version__},"
            f" {datetime.date.today()}), executed in"
        ),
        (
            f"{len(outcomes)} ways, {jobs} at a time. `python exhaustive/grid.py --device {device}"
            f" --jobs {jobs}` writes this"
        ),
        "page. The default model is a Qwen3 with tied embeddings.",
        "",
        (
            "In float32 (without TF32) the reference is a run on the CPU: one process without"
            " DeepSpeed, packed, with micro-batch 1."
        ),
        (
            f"Every step must have the same samples. Losses must agree within {loss:g} relative,"
            f" and each trained tensor within {weight:g} by"
        ),
        (
            "norm(difference) / norm(update). In bfloat16 the reference is the device's own run in"
            " bfloat16. Losses must agree within"
        ),
        f"{half_loss:g} and tensors within {half_weight:g}.",
        "",
        (
            f"**{held} of {len(outcomes)} hold** ({seconds:.0f} s). With dropout, each way of"
            " execution draws different masks, so only"
        ),
        "samples and learning rates are compared.",
        "",
    ]
    return "\n".join([*lines, *grid.rows(outcomes), ""])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="grid.py", description=__doc__)
    parser.add_argument(
        "--device", default="cuda", help="the reference of float32 is always of the CPU"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument(
        "--every", type=int, default=1, help="take every Nth cell; the page is then not written"
    )
    parser.add_argument(
        "number", type=int, nargs="?", help="about so many cells instead, printed only"
    )
    asked = parser.parse_args(arguments)
    chosen = cells(asked.device)
    every = max(1, len(chosen) // asked.number) if asked.number else asked.every
    chosen = chosen[:: max(1, every)]
    prepare(asked.device)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        whole = grid.Grid(Path(name))
        for model in {cell.model for cell in chosen}:
            whole.make_model(model)
        references = [
            cell for cell in dict.fromkeys(cell.run for cell in chosen) if cell.device == "cpu"
        ]
        errors = execute_all(references, "cpu", asked.jobs, whole.materials, whole.folder)
        rest = [
            cell
            for cell in dict.fromkeys([*(cell.run for cell in chosen), *chosen])
            if cell not in errors
        ]
        errors |= execute_all(rest, asked.device, asked.jobs, whole.materials, whole.folder)
        outcomes = outcomes_of(whole, chosen, errors)
    for outcome in outcomes:
        print(f"{outcome.cell.name}: {outcome.why or 'holds'}")
    text = page(outcomes, time.monotonic() - began, asked.device, asked.jobs)
    print(text)
    if every == 1 and asked.device != "cpu":
        (runs.ROOT / "docs" / "evidence" / f"equivalence_grid_{asked.device}.md").write_text(
            text, encoding="utf-8"
        )
    return int(any(outcome.why for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
