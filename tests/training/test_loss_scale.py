"""float16's loss scale goes on after a resume: against scalers that were never stopped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16 import loss_scaler
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

from finetune.training.state import TrainingState, read_scale, restore_scale

OVERFLOWS = [2, 3, 9, 10, 11, 20]  # of 30 steps


def grad_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)


def engine(*, dynamic: bool = True) -> Any:
    growth = {"init_scale": 2**10, "scale_window": 4, "min_scale": 1}
    hysteresis = {"delayed_shift": 2, "consecutive_hysteresis": False}
    scaler = DynamicLossScaler(**growth, **hysteresis) if dynamic else LossScaler(scale=128)
    return SimpleNamespace(fp16_enabled=lambda: True, optimizer=SimpleNamespace(loss_scaler=scaler))


def step_torch(scaler: torch.amp.GradScaler, number: int) -> float:
    weight = torch.nn.Parameter(torch.ones(1))
    scaler.scale(weight.sum() * (float("inf") if number in OVERFLOWS else 1.0)).backward()
    scaler.step(torch.optim.SGD([weight], lr=0.0))
    scaler.update()
    return float(scaler.get_scale())


def step_deepspeed(engine: Any, number: int) -> float:
    engine.optimizer.loss_scaler.update_scale(number in OVERFLOWS)
    return float(engine.optimizer.loss_scaler.cur_scale)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed asks for the rank, to log what it does to the scale."""
    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 1)


@pytest.mark.parametrize("kind", ["torch", "deepspeed"])
def test_a_scale_goes_on(kind: str) -> None:
    make, step = (grad_scaler, step_torch) if kind == "torch" else (engine, step_deepspeed)
    given = (lambda made: (made, None)) if kind == "torch" else (lambda made: (None, made))
    whole, stopped = make(), make()
    expected = [step(whole, number) for number in range(30)]
    assert len(set(expected)) > 3
    for stop in range(1, 30):
        assert step(stopped, stop - 1) == expected[stop - 1]
        again = make()
        restore_scale(read_scale(*given(stopped)), *given(again))
        assert [step(again, number) for number in range(stop, 30)] == expected[stop:], stop


def test_a_scale_moves_between_torch_and_deepspeed() -> None:
    scaler, other, back = grad_scaler(), engine(), grad_scaler()
    for number in range(7):
        step_torch(scaler, number)
    restore_scale(read_scale(scaler, None), None, other)
    assert other.optimizer.loss_scaler.cur_scale == scaler.get_scale()
    restore_scale(read_scale(None, other), back, None)
    assert read_scale(back, None) == read_scale(scaler, None)
    # A scale that does not change is nothing to keep.
    assert read_scale(torch.amp.GradScaler("cpu", enabled=False), None) is None
    assert read_scale(None, engine(dynamic=False)) is None
    restore_scale({"scale": 2.0, "good_steps": 1}, None, engine(dynamic=False))


def test_a_checkpoint_has_it_from_its_first_step_on(tmp_path) -> None:
    """Also if every step so far was skipped: there are no moments then, and a lower scale."""
    model, scaler, again = torch.nn.Linear(2, 2), grad_scaler(), grad_scaler()
    optimizer = torch.optim.AdamW(model.parameters())
    step_torch(scaler, OVERFLOWS[0])
    TrainingState(model, optimizer=optimizer, scaler=scaler).save(tmp_path, rank=0, world_size=1)
    TrainingState(model, optimizer=optimizer, scaler=again).load_moments(tmp_path)
    assert again.get_scale() == scaler.get_scale() == 2.0**9
