"""A few cells of the equivalence grid (exhaustive/grid.py); all of them are `make grid`."""

from __future__ import annotations

import pytest
from grid import MODELS, Cell, Grid, cells
from pretraining_cells import PRETRAINING

SAMPLE = (
    Cell("lora", "plain", 2, packing=False, micro_batch_size=4),
    Cell("lora", "zero3_offload", 2, packing=True, micro_batch_size=4),
    Cell("lora", "zero2", 2, packing=True, micro_batch_size=1, fused_lora=False),
    Cell("lora", "plain", 2, packing=True, micro_batch_size=4, mixed=True),
    Cell("lora", "zero3", 2, packing=False, micro_batch_size=4, quantization="nf4"),
    Cell("full", "zero2", 2, packing=False, micro_batch_size=1),
    Cell("full", "zero3_offload", 2, packing=True, micro_batch_size=1),
    Cell("full", "plain", 2, packing=True, micro_batch_size=2, pretraining="lfm2_value by normuon"),
)


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Grid:
    return Grid(tmp_path_factory.mktemp("grid"))


def test_the_grid_is_whole() -> None:
    assert len(set(cells())) == 64 + 8 * len(MODELS) + 20 + 48 + 4 * len(PRETRAINING)
    assert set(SAMPLE) <= set(cells())


@pytest.mark.parametrize("cell", SAMPLE, ids=lambda cell: cell.name)
def test_another_execution_is_the_same_training(grid: Grid, cell: Cell) -> None:
    outcome = grid.outcome(cell)
    assert not outcome.why, outcome


def test_the_grid_can_fail(grid: Grid) -> None:
    """A run of another learning rate, under the name of a cell, does not pass for it."""
    from run_helpers import train

    cell = Cell("lora", "plain", 1, packing=False, micro_batch_size=4)
    train(cell.settings(grid.materials, grid.folder) | {"learning_rate": 1.1e-2})
    assert "losses differ" in grid.outcome(cell).why
