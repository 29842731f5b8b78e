"""The equivalence grid: one run, executed in 64 ways, against one of them.

    python tests/grid.py              # all cells, the table into docs/equivalence_grid.md (`make grid`)
    python tests/grid.py 4            # every 16th cell or so: four of them, printed only

Each cell trains the same 20 steps in float32 and is compared with the first, one process without DeepSpeed on packed
rows: the samples of every step must be the same, losses within 1e-5 relative, and each trained tensor within 1e-3 by
norm(difference) / norm(update).
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import run_helpers as runs

TABLE = runs.ROOT / "docs" / "equivalence_grid.md"
STEPS = 20
LOSS_LIMIT, WEIGHT_LIMIT = 1e-5, 1e-3


@dataclass(frozen=True)
class Cell:
    """One way to execute the run."""

    finetuning: str
    layout: str
    processes: int
    packing: bool
    micro_batch_size: int

    @property
    def name(self) -> str:
        packing = "packed" if self.packing else "padded"
        return f"{self.finetuning}-{self.layout}-{self.processes}-{packing}-{self.micro_batch_size}"

    def settings(self, materials: runs.Materials, folder: Path) -> dict[str, Any]:
        return materials.settings(
            folder / self.name,
            finetuning=self.finetuning,
            packing=self.packing,
            micro_batch_size=self.micro_batch_size,
            max_steps=STEPS,
            **runs.LAYOUTS[self.layout],
        )


@dataclass(frozen=True)
class Outcome:
    """A cell against its reference; `why` is empty where the cell holds."""

    cell: Cell
    loss_difference: float
    weight_difference: float
    why: str


def cells() -> list[Cell]:
    """All 64, the references first within their kind."""
    ways = itertools.product(("lora", "full"), runs.LAYOUTS, (1, 2), (True, False), (1, 4))
    return [Cell(*way) for way in ways]


def starting_weights(materials: runs.Materials, finetuning: str) -> dict[str, Any]:
    """Trainable weights before the first step, by name; float32."""
    import torch

    from finetune.config.run_config import RunConfig
    from finetune.modeling.pretrained import add_adapter, load_model
    from finetune.training.state import trainable

    settings = materials.settings(materials.folder / "unused", finetuning=finetuning)
    config = RunConfig(**settings | {name: (settings[name],) for name in ("data", "report_to")})
    model = load_model(config, device_type="cpu", dtype="float32", model_dtype=torch.float32, zero3=False)
    if finetuning == "lora":
        model = add_adapter(model, config, one_dtype=False)
    return {name: parameter.detach().clone() for name, parameter in trainable(model)}


def trained_weights(run: Path, names: list[str]) -> dict[str, Any]:
    """The same after the last step, from its checkpoint, whole or in slices."""
    from finetune.training.saved_tensors import SavedTensors

    saved = SavedTensors(run / f"checkpoint-{STEPS}", "weights")
    return {name: saved.get(name) for name in names}


class Grid:
    """Runs cells and compares each with the reference of its kind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.materials = runs.make_materials(folder / "materials", layers=2)
        self._references: dict[str, tuple[Any, ...]] = {}

    def outcome(self, cell: Cell) -> Outcome:
        start, ids, losses, weights = self._reference(cell.finetuning)
        found_ids, found_losses, found_weights = self._execute(cell, list(start))
        loss = runs.largest_relative_difference(losses, found_losses)
        weight = max(
            float((found_weights[name] - weights[name]).norm() / (weights[name] - start[name]).norm().clamp(min=1e-12))
            for name in start
        )
        wrong = []
        if found_ids != ids:
            wrong.append("other samples")
        if not loss <= LOSS_LIMIT:
            wrong.append(f"losses differ by {loss:.1e}")
        if not weight <= WEIGHT_LIMIT:
            wrong.append(f"weights differ by {weight:.1e}")
        return Outcome(cell, loss, weight, "; ".join(wrong))

    def _reference(self, finetuning: str) -> tuple[Any, ...]:
        if finetuning not in self._references:
            start = starting_weights(self.materials, finetuning)
            cell = Cell(finetuning, "plain", 1, True, 1)
            ids, losses, weights = self._execute(cell, list(start))
            moved = [name for name in start if float((weights[name] - start[name]).norm()) == 0]
            assert not moved, f"the reference did not train {moved}: the grid would compare nothing"
            self._references[finetuning] = start, ids, losses, weights
        return self._references[finetuning]

    def _execute(self, cell: Cell, names: list[str]) -> tuple[list[list[int]], list[float], dict[str, Any]]:
        settings = cell.settings(self.materials, self.folder)
        run = Path(settings["output_dir"])
        if not run.exists():
            runs.train(settings, cell.processes)
        return runs.sample_ids(run), runs.losses(run), trained_weights(run, names)


def table(outcomes: list[Outcome], seconds: float) -> str:
    """The committed page."""
    held = sum(not outcome.why for outcome in outcomes)
    lines = [
        "# The equivalence grid",
        "",
        f"One run of {STEPS} steps in float32 on a CPU, executed in {len(outcomes)} ways. Reference: one process",
        "without DeepSpeed, packed, micro-batch 1. `make grid` makes this page.",
        "",
        f"Samples of every step the same, losses within {LOSS_LIMIT:g} relative, each trained tensor within "
        f"{WEIGHT_LIMIT:g} by",
        f"norm(difference) / norm(update): **{held} of {len(outcomes)} hold** ({seconds:.0f} s on 2 cores).",
        "",
        "| trained | sharding | processes | microbatches | micro-batch | loss differs by | weights differ by | |",
        "|---|---|--:|---|--:|--:|--:|---|",
    ]
    for outcome in outcomes:
        cell = outcome.cell
        sharding = {"plain": "none" if cell.processes == 1 else "DDP"}.get(cell.layout, cell.layout.replace("_", " + "))
        lines.append(
            f"| {cell.finetuning} | {sharding} | {cell.processes} | {'packed' if cell.packing else 'padded'} "
            f"| {cell.micro_batch_size} | {outcome.loss_difference:.1e} | {outcome.weight_difference:.1e} "
            f"| {outcome.why or 'holds'} |"
        )
    return "\n".join([*lines, ""])


def main(arguments: list[str]) -> int:
    chosen = cells()
    if arguments:
        chosen = chosen[5 :: max(1, len(chosen) // int(arguments[0]))]
    began = time.monotonic()
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        grid = Grid(Path(folder))
        for number, cell in enumerate(chosen, 1):
            outcomes.append(grid.outcome(cell))
            print(f"{number}/{len(chosen)} {cell.name}: {outcomes[-1].why or 'holds'}", flush=True)
    page = table(outcomes, time.monotonic() - began)
    print(page)
    if not arguments:
        TABLE.write_text(page, encoding="utf-8")
    return int(any(outcome.why for outcome in outcomes))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main(sys.argv[1:]))
