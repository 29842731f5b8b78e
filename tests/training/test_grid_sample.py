"""A few cells of exhaustive/grid.py and kills of exhaustive/crash.py; all are `make grid` and `make crash`."""

from __future__ import annotations

import pytest
from crash import KINDS_BEHIND, Crashes
from grid import Cell, Grid

QUICK = (
    Cell("lora", "zero3", 2, packing=False, micro_batch_size=4, quantization="nf4"),
    Cell("full", "zero3_offload", 2, packing=True, micro_batch_size=1),
)
SLOW = (
    Cell("lora", "plain", 2, packing=False, micro_batch_size=4),
    Cell("lora", "plain", 2, packing=True, micro_batch_size=4, mixed=True),
    Cell("lora", "zero2", 2, packing=True, micro_batch_size=1, fused_lora=False),
    Cell("full", "plain", 2, packing=True, micro_batch_size=2, pretraining="lfm2_value by normuon"),
)


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    return Grid(tmp_path_factory.mktemp("grid"))


@pytest.mark.parametrize(
    "cell",
    [*QUICK, *(pytest.param(cell, marks=pytest.mark.slow) for cell in SLOW)],
    ids=lambda cell: cell.name,
)
def test_another_execution_is_the_same_training(grid, cell):
    assert not grid.outcome(cell).why


@pytest.mark.slow
def test_a_run_killed_while_it_writes_in_the_background(tmp_path):
    """It goes on to the same weights."""
    kill = Crashes(tmp_path, seed=4).kill_behind(1, *KINDS_BEHIND[0])
    assert not kill.why and kill.steps_done > kill.resumed_from, kill
