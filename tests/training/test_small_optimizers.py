"""Optimizers of full fine-tuning with less state: by hand, on any number of processes, resumed, and skipped."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import run_patches
import torch
from run_helpers import LAYOUTS, Materials, events, losses
from safetensors.torch import load_file

import finetune
from finetune.config.resolution import resolve_object
from finetune.errors import ConfigError
from finetune.planning.inputs import fine_tuning_workload
from finetune.planning.memory import memory_of
from finetune.planning.shapes import known_config, shape_of_config
from finetune.planning.workload import Cluster
from finetune.training.prepare import prepare_fine_tuning
from finetune.training.trainer import RunTrainer

NAMES = ("adamw-8bit", "adafactor", "muon")
RATE, DECAY = 1e-3, 0.5


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    # 64 wide: bitsandbytes keeps 32 bits for tensors of less than 4096 numbers, and both must be there.
    return run_helpers.make_materials(tmp_path_factory.mktemp("optimizers"), hidden=64)


def settings(materials: Materials, folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    common = {"finetuning": "full", "optimizer": name, "learning_rate": RATE, "save_steps": 2}
    return materials.settings(folder, **{**common, **changes})


def first_step(
    name: str, weight: torch.Tensor, gradient: torch.Tensor, in_block: bool
) -> torch.Tensor:
    """Of the definition; vectors do not decay."""
    decayed = weight * (1 - RATE * (DECAY if weight.ndim == 2 else 0.0))
    if name == "muon" and in_block and weight.ndim == 2:
        parameter = torch.nn.Parameter(weight.clone())
        parameter.grad = gradient
        muon = {"lr": RATE, "weight_decay": DECAY, "adjust_lr_fn": "match_rms_adamw"}
        torch.optim.Muon([parameter], **muon).step()
        return parameter.detach()
    if name != "adafactor":  # Adam's first step has the size of the rate
        return decayed - RATE * gradient / (gradient.abs() + 1e-8)
    squares = gradient.double().square() + 1e-30
    if weight.ndim == 2:
        rows, columns = squares.mean(1, keepdim=True), squares.mean(0, keepdim=True)
        squares = rows * columns / rows.mean()
    update = gradient.double() / squares.sqrt()
    return (decayed - RATE * update / update.square().mean().sqrt().clamp(min=1.0)).float()


@pytest.mark.parametrize("name", NAMES)
def test_the_first_step_is_that_of_the_definition(materials, tmp_path, monkeypatch, name) -> None:
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    plain = RunTrainer._get_grad_norm

    def looking(self: RunTrainer, *arguments: Any, **options: Any) -> Any:
        norm = plain(self, *arguments, **options)
        for key, parameter in self.model.named_parameters():
            seen[key] = (parameter.detach().clone(), parameter.grad.clone())
        return norm

    monkeypatch.setattr(RunTrainer, "_get_grad_norm", looking)
    changes = {"max_steps": 1, "warmup_steps": 0, "weight_decay": DECAY, "save_steps": 0}
    finetune.run(settings(materials, tmp_path / "run", name, **changes))
    result = run_helpers.result_weights(tmp_path / "run")
    for key, (weight, gradient) in seen.items():
        expected = first_step(name, weight, gradient, ".layers." in key)
        assert (result[key] - expected).norm() < 0.03 * (expected - weight).norm(), key


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_trains_about_as_adamw_does_and_the_same_after_any_resume(
    materials, tmp_path, name
) -> None:
    adamw, whole, killed, two = (tmp_path / name for name in ("adamw", "whole", "killed", "two"))
    run_helpers.train(settings(materials, adamw, "adamw"))
    run_helpers.train(settings(materials, whole, name))
    before, after = losses(adamw), losses(whole)
    assert after[0] == before[0] and after[-1] < after[0] - 0.3 * (before[0] - before[-1])
    run_helpers.kill_and_resume(
        settings(materials, killed, name, async_save=False), 6, resumed_at=4
    )
    run_helpers.assert_same_training(killed, whole)
    stop = {
        "patch": run_patches.signal_self,
        "patch_arguments": (0, 4, signal.SIGTERM),
        "expect": 3,
    }
    run_helpers.train(settings(materials, two, name, packing=False), 2, **stop)
    run_helpers.train(settings(materials, two, name))
    assert [event["step"] for event in events(two, "resume")] == [4]
    assert losses(two) == pytest.approx(after, rel=1e-5)


def test_a_step_that_is_not_finite_is_skipped(materials, tmp_path) -> None:
    """By the host: this optimizer has no kernel that could. test_optimizers.py has Muon."""
    output_dir = tmp_path / "run"
    patch = {"patch": run_patches.spoil_losses, "patch_arguments": (0, (3,), math.nan, "loss")}
    changes = {"save_steps": 1, "save_total_limit": 9, "max_steps": 4}
    run_helpers.train(settings(materials, output_dir, "adamw-8bit", **changes), **patch)
    assert [event["step"] for event in events(output_dir, "nonfinite")] == [3]
    two, three, four = (
        load_file(output_dir / f"checkpoint-{step}" / "weights.safetensors") for step in (2, 3, 4)
    )
    assert all(torch.equal(two[key], three[key]) for key in two)
    assert not all(torch.equal(three[key], four[key]) for key in two)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"finetuning": "lora"}, "the state of an adapter is small"),
        (LAYOUTS["zero2"], "DeepSpeed shards AdamW's two flat moments"),
        ({"device_type": "npu", "optimizer": "adamw-8bit"}, "not on npu"),
    ],
)
def test_what_it_does_not_go_with_is_refused(materials, tmp_path, changes, words) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve_object(settings(materials, tmp_path, "muon") | changes, 1)


def test_it_makes_another_run_and_adamw_does_not(materials, tmp_path) -> None:
    plain, named, other = (
        prepare_fine_tuning(resolve_object(made, 1).config).identity
        for made in (
            materials.settings(tmp_path, finetuning="full", learning_rate=RATE),
            settings(materials, tmp_path, "adamw"),
            settings(materials, tmp_path, "muon"),
        )
    )
    assert plain == named and other == plain | {"optimizer": "muon"}


# Of Adafactor: 4 bytes for each row and column of Qwen3-8B's matrices (36 blocks of q, k, v, o, gate, up,
# down; embedding and head).
SIDES = 36 * (2 * 8192 + 2 * (4096 + 1024) + 3 * (4096 + 12288)) + 2 * (151936 + 4096)


@pytest.mark.parametrize(
    ("name", "each"),
    [("adamw", 8), ("adamw-8bit", 2.03), ("adafactor", 4 * SIDES / 8.19e9), ("muon", 0)],
)
def test_a_plan_counts_its_state(name: str, each: float) -> None:
    given = {"model": "Qwen/Qwen3-8B", "data": "x.jsonl", "output_dir": "out", "finetuning": "full"}
    config = resolve_object(given | {"optimizer": name}, 1).config
    shape = shape_of_config(known_config("Qwen/Qwen3-8B"))
    work = fine_tuning_workload(config, shape, Cluster(devices_per_node=1))
    state = sum(term.bytes for term in memory_of(work).terms if term.kind == "optimizer")
    others = shape.total - shape.block_matrices
    expected = 4 * shape.block_matrices + 8 * others if name == "muon" else each * shape.total
    assert state == pytest.approx(expected, rel=0.2 if name == "adafactor" else 0.01)
