"""Learning-rate schedules against transformers' get_scheduler, which computes them step by step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from finetune.config.schedules import ScheduleSettings, learning_rate_schedule, warmup_count

NAMES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("total_steps", "warmup_steps"), [(1, 0), (1, 1), (7, 0), (20, 3), (100, 99), (50, 50), (5, 20)]
)
def test_every_step_is_that_of_transformers(name, total_steps, warmup_steps):
    factor = learning_rate_schedule(name, ScheduleSettings(total_steps, warmup_steps))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_scheduler(
        NAMES[name], optimizer, num_warmup_steps=warmup_steps, num_training_steps=total_steps
    )
    for step in range(total_steps):
        assert factor(step) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12), step
        optimizer.step()
        theirs.step()


def test_warmdown_and_unknown_names():
    settings = ScheduleSettings(10, 4, warmdown_ratio=0.5, final_fraction=0.2)
    factor = learning_rate_schedule("warmdown", settings)
    expected = [0.25, 0.5, 0.75, 1, 1, 1, 0.84, 0.68, 0.52, 0.36, 0.2]
    assert [factor(step) for step in range(11)] == pytest.approx(expected)
    with pytest.raises(ValueError, match="polynomial"):
        learning_rate_schedule("polynomial", settings)


@given(st.integers(1, 100_000), st.integers(0, 99), st.integers(1, 99))
def test_warm_up_below_one_is_a_decimal_fraction_rounded_up(total, percent, steps):
    """0.55 x 180 is 99.00000000000001 in floating point, and must not become 100 steps."""
    rounded_up = -(-percent * total // 100)
    assert warmup_count(percent / 100, total) == min(rounded_up, total - 1)
    assert warmup_count(steps, total) == steps
