"""Optimizers of full fine-tuning with less state: by hand, on any number of processes, resumed, and
skipped.
"""

from __future__ import annotations

import math
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import run_helpers
import run_patches
import torch
from run_helpers import LAYOUTS, Materials
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from finetune.config.resolution import resolve_object
from finetune.errors import ConfigError
from finetune.planning.inputs import fine_tuning_workload
from finetune.planning.memory import memory_of
from finetune.planning.shapes import known_config, shape_of_config
from finetune.planning.workload import Cluster
from finetune.training.optimizers import JointOptimizer, make_small_optimizer
from finetune.training.prepare import prepare_fine_tuning

NAMES = ("adamw-8bit", "adafactor", "muon")
RATE = 1e-3
# Bytes a number of Qwen3-8B: 36 blocks of (q, k, v, o, gate, up, down), embedding and head; 4 for
# each row and column.
_SIDES = 36 * (2 * 8192 + 2 * (4096 + 1024) + 3 * (4096 + 12288)) + 2 * (151936 + 4096)
ADAFACTOR = 4 * _SIDES / 8.19e9


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    # 64 wide: bitsandbytes keeps 32 bits for tensors of less than 4096 numbers, and both kinds must
    # be there.
    return run_helpers.make_materials(tmp_path_factory.mktemp("optimizers"), hidden=64)


def settings(materials: Materials, folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    common = {"finetuning": "full", "optimizer": name, "learning_rate": RATE, "save_steps": 2}
    return materials.settings(folder, **{**common, **changes})


@pytest.fixture(scope="module")
def adamw(materials: Materials) -> Path:
    """A run with AdamW."""
    folder = materials.folder / "adamw"
    run_helpers.train(settings(materials, folder, "adamw"))
    return folder


def test_muon_is_torchs_and_the_rest_is_adamw(materials) -> None:
    """One step, against torch's own optimizers on the same gradients."""
    arguments = SimpleNamespace(
        learning_rate=RATE, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, optim="adamw"
    )
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(materials.model, dtype=torch.float32) for _ in range(2)
    )
    torch.manual_seed(2)
    for mine, their in zip(ours.parameters(), theirs.parameters(), strict=True):
        mine.grad = torch.randn_like(mine)
        their.grad = mine.grad.clone()
    decayed = [p for p in ours.parameters() if p.ndim == 2]
    others = [p for p in ours.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = make_small_optimizer("muon", ours, groups, arguments)
    assert isinstance(optimizer, JointOptimizer)
    optimizer.step()
    blocks = [p for p in theirs.model.layers.parameters() if p.ndim == 2]
    rest = [p for p in theirs.parameters() if not any(p is block for block in blocks)]
    torch.optim.Muon(blocks, lr=RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw").step()
    embedding = theirs.get_input_embeddings().weight
    torch.optim.AdamW([embedding], lr=RATE, weight_decay=0.1).step()
    torch.optim.AdamW([p for p in rest if p is not embedding], lr=RATE, weight_decay=0.0).step()
    for (name, mine), their in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-3, atol=2e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_trains_about_as_adamw_does_and_resumes_bit_by_bit(
    materials, adamw, tmp_path, name
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_helpers.train(settings(materials, whole, name))
    before, losses = run_helpers.losses(adamw), run_helpers.losses(whole)
    assert losses[0] == before[0] and losses[-1] < losses[0] - 0.3 * (before[0] - before[-1])
    wanted = settings(materials, killed, name, async_save=False)
    run_helpers.kill_and_resume(wanted, 6, resumed_at=4)
    run_helpers.assert_same_training(killed, whole)


@pytest.mark.parametrize("name", ["adamw-8bit", "muon"])
def test_a_step_that_is_not_finite_is_skipped(materials, tmp_path, name) -> None:
    output_dir = tmp_path / "run"
    run_helpers.train(
        settings(materials, output_dir, name, save_steps=1, save_total_limit=9, max_steps=4),
        patch=run_patches.spoil_losses,
        patch_arguments=(0, (3,), math.nan, "loss"),
    )
    (event,) = run_helpers.events(output_dir, "nonfinite")
    assert event["step"] == 3
    weights = [
        load_file(output_dir / f"checkpoint-{step}" / "weights.safetensors") for step in (2, 3, 4)
    ]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert not all(torch.equal(weights[1][key], weights[2][key]) for key in weights[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_and_one_after_them_train_the_same(materials, tmp_path, name) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    run_helpers.train(settings(materials, one, name))
    stopped = {"patch": run_patches.signal_self, "patch_arguments": (0, 4, signal.SIGTERM)}
    run_helpers.train(settings(materials, two, name, packing=False), 2, expect=3, **stopped)
    run_helpers.train(settings(materials, two, name))
    assert [event["step"] for event in run_helpers.events(two, "resume")] == [4]
    assert (
        run_helpers.largest_relative_difference(run_helpers.losses(one), run_helpers.losses(two))
        < 1e-5
    )


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


@pytest.mark.parametrize(
    ("name", "each"), [("adamw", 8), ("adamw-8bit", 2.03), ("adafactor", ADAFACTOR), ("muon", 0)]
)
def test_a_plan_counts_its_state(name: str, each: float) -> None:
    given = {
        "model": "Qwen/Qwen3-8B",
        "data": "x.jsonl",
        "output_dir": "out",
        "finetuning": "full",
        "optimizer": name,
    }
    shape = shape_of_config(known_config("Qwen/Qwen3-8B"))
    work = fine_tuning_workload(resolve_object(given, 1).config, shape, Cluster(devices_per_node=1))
    state = sum(term.bytes for term in memory_of(work).terms if term.kind == "optimizer")
    expected = (
        4 * shape.block_matrices + 8 * (shape.total - shape.block_matrices)
        if name == "muon"
        else each * shape.total
    )
    assert state == pytest.approx(expected, rel=0.2 if name == "adafactor" else 0.01)
