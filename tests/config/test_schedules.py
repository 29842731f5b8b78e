"""Learning-rate schedules against transformers' get_scheduler, which computes them step by step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from finetune.config.schedules import (
    SCHEDULES,
    ScheduleSettings,
    learning_rate_schedule,
    warmup_count,
)

NAMES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}


def of_transformers(name: str, total_steps: int, warmup_steps: int) -> list[float]:
    """The factor of every update of a run, as a scheduler that is stepped gives it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(
        NAMES[name], optimizer, num_warmup_steps=warmup_steps, num_training_steps=total_steps
    )
    factors = []
    for _ in range(total_steps):
        factors.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return factors


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("total_steps", "warmup_steps"),
    [(1, 0), (1, 1), (7, 0), (20, 3), (100, 1), (100, 99), (50, 50), (5, 20)],
)
def test_every_step_is_that_of_transformers(name: str, total_steps: int, warmup_steps: int):
    factor = learning_rate_schedule(name, ScheduleSettings(total_steps, warmup_steps))
    ours = [factor(step) for step in range(total_steps)]
    assert ours == pytest.approx(of_transformers(name, total_steps, warmup_steps), abs=1e-12)


@given(st.sampled_from(sorted(NAMES)), st.integers(1, 5000), st.integers(0, 6000), st.data())
def test_rises_in_a_line_and_then_only_falls_to_zero(
    name: str, total: int, warmup: int, data: st.DataObject
):
    factor = learning_rate_schedule(name, ScheduleSettings(total, warmup))
    step = data.draw(st.integers(0, total - 1), label="step")
    assert 0 <= factor(step) <= 1
    if step < warmup:
        assert factor(step) == step / warmup < factor(step + 1)
    else:
        assert factor(step + 1) <= factor(step)
    if warmup < total:
        assert factor(total) == pytest.approx(1.0 if name == "constant" else 0.0, abs=1e-12)


def test_values_by_hand():
    settings = ScheduleSettings(total_steps=14, warmup_steps=4)
    at = {step: learning_rate_schedule("cosine", settings)(step) for step in (0, 1, 4, 9)}
    assert at == pytest.approx({0: 0.0, 1: 0.25, 4: 1.0, 9: 0.5})
    assert learning_rate_schedule("linear", settings)(9) == pytest.approx(0.5)
    assert learning_rate_schedule("constant", settings)(13) == 1.0


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="polynomial"):
        learning_rate_schedule("polynomial", ScheduleSettings(total_steps=9, warmup_steps=0))


def test_every_name_of_the_settings_is_a_schedule():
    from typing import get_args, get_type_hints

    from finetune.config.pretrain_config import PretrainConfig
    from finetune.config.run_config import RunConfig

    names = {
        name
        for config in (RunConfig, PretrainConfig)
        for name in get_args(get_type_hints(config)["lr_scheduler"])
    }
    assert names == set(SCHEDULES)


@pytest.mark.parametrize(
    ("asked", "total", "steps"),
    [
        (0, 100, 0),
        (0.0, 100, 0),
        (0.03, 100, 3),
        (0.03, 150, 5),
        (0.03, 1, 0),
        (0.5, 3, 2),
        (1, 100, 1),
        (40, 20, 40),
    ],
)
def test_warm_up_below_one_is_a_fraction_rounded_up(asked: float, total: int, steps: int):
    assert warmup_count(asked, total) == steps


@given(st.integers(1, 100_000), st.integers(0, 99))
def test_the_fraction_is_the_decimal_that_was_written(total: int, percent: int):
    """0.55 x 180 is 99.00000000000001 in floating point, and must not become 100 steps."""
    rounded_up = -(-percent * total // 100)
    assert warmup_count(percent / 100, total) == min(rounded_up, total - 1)
