"""Whole runs on one CUDA device: near the CPU's, resumed bit by bit, in float16, compiled, and out of memory.

FINETUNE_TEST_DEVICE=cpu has them run on a CPU, to try the tests themselves; what a CPU does not
have is left out there.
"""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_helpers
import run_patches
import torch
from run_helpers import LAYOUTS, Materials, events, losses, sample_ids

from finetune.training.state import read_description

DEVICE = os.environ.get("FINETUNE_TEST_DEVICE", "cuda")
ON_CUDA = DEVICE == "cuda"
MATERIALS = {"layers": 2}
HALF_LIMIT = 2e-2  # relative, of losses: bfloat16 has 8 bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(ON_CUDA and not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def settings(materials: Materials, output_dir: Path, **changes: Any) -> dict[str, Any]:
    """bfloat16 on the device."""
    return materials.settings(output_dir, **{"device_type": DEVICE, "dtype": "bfloat16", **changes})


def assert_near(here: Path, there: Path, limit: float = HALF_LIMIT) -> None:
    """A run on the device is near another."""
    assert all(event["device_type"] == DEVICE for event in events(here, "start"))
    assert sample_ids(here) == sample_ids(there)
    assert losses(here) == pytest.approx(losses(there), rel=limit)


FINETUNING = pytest.mark.parametrize("finetuning", ["lora", "full"])
CPU = {"device_type": "cpu", "dtype": "float32"}


@FINETUNING
@pytest.mark.parametrize("fused_layers", ["auto", "off"])
def test_bfloat16_on_the_device_is_near_float32_on_the_cpu(
    materials, tmp_path, finetuning, fused_layers
):
    here, there = tmp_path / "here", tmp_path / "there"
    changes = {"finetuning": finetuning, "learning_rate": 1e-3}
    # and auto chooses
    auto = {"micro_batch_size": "auto", "gradient_checkpointing": "auto"}
    auto |= {"fused_layers": fused_layers}
    run_helpers.train(settings(materials, here, **auto, **changes))
    run_helpers.train(settings(materials, there, **CPU, **changes))
    assert_near(here, there)
    (event,) = events(here, "execution")
    assert event["chosen"].keys() == {"micro_batch_size", "gradient_checkpointing"}


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_quantized_base_is_near_the_plain_run_and_smaller(tmp_path, kind):
    """What is allocated after the second step is weights, moments and gradients."""
    materials = run_helpers.make_materials(tmp_path / "materials", hidden=512 if ON_CUDA else 64)
    held, note = {}, tmp_path / "held"
    patch = {"patch": run_patches.note_memory, "patch_arguments": (2, str(note))}
    for name in ("none", kind):
        changes = {"quantization": name, "learning_rate": 1e-3}
        run_helpers.train(settings(materials, tmp_path / name, **changes), **patch)
        held[name] = int(note.read_text())
    # Weights in 4 bits are off by a tenth of their norm, in 8 bits by a hundredth.
    assert_near(tmp_path / kind, tmp_path / "none", {"nf4": 0.05, "int8": HALF_LIMIT}[kind])
    numbers = 512 * (2 * 32 + 2 * 16) + 3 * 512 * 1024  # of the block's seven matrices
    saved = {"nf4": 2 - 0.52, "int8": 2 - 1.01}[kind] * numbers
    if ON_CUDA:
        assert held["none"] - held[kind] == pytest.approx(saved, rel=0.1)


def test_compiled_pretraining_is_eager_pretraining(tmp_path):
    """NanoChat of depth 2 with Muon on random tokens."""
    choose = np.random.default_rng(0)
    for name in ("train", "val"):
        choose.integers(0, 300, 20_000).astype("<u2").tofile(tmp_path / f"{name}.bin")
    common = {"train_data_path": str(tmp_path / "train.bin"), "vocab_size": 300, "depth": 2}
    common |= {"valid_data_path": str(tmp_path / "val.bin"), "max_seq_len": 64, "save_steps": 0}
    common |= {"device_batch_size": 4, "total_batch_size": 8 * 64, "num_iterations": 6}
    common |= {"sample_every": 0, "dtype": "bfloat16", "device_type": DEVICE, "log_samples": True}
    for name, compiled in (("eager", False), ("compiled", True)):
        own = {"compile": compiled, "output_dir": str(tmp_path / name), "report_to": "none"}
        ranks = run_helpers.start(common | own, module="finetune.pretrain")
        assert ranks.wait(600) == [0], ranks.output()
    assert_near(tmp_path / "compiled", tmp_path / "eager")


@pytest.mark.parametrize(
    ("finetuning", "layout", "optimizer"),
    [
        *(("lora", "plain", "adamw"), ("full", "plain", "adamw")),
        *(("lora", "zero3", "adamw"), ("full", "zero3_offload", "adamw")),
        *(("full", "plain", name) for name in ("adamw-8bit", "adafactor", "muon")),
    ],
)
def test_killed_and_resumed_it_is_the_same_run_bit_by_bit(tmp_path, finetuning, layout, optimizer):
    """Flash attention's backward adds to a query's gradient without an order, block of keys by
    block: here a document is one block (64 tokens at most). Of the step's other kernels none adds
    without an order, but for the sums by difficulty (index_add), which are not compared.
    """
    # narrower, all state of an 8-bit optimizer is in 32 bits
    materials = run_helpers.make_materials(tmp_path / "materials", hidden=64)
    common = {"finetuning": finetuning, "save_steps": 2, "cutoff_len": 64, **LAYOUTS[layout]}
    common |= {"optimizer": optimizer, "learning_rate": 1e-3}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_helpers.train(settings(materials, whole, **common))
    wanted = settings(materials, killed, **common)
    first = run_helpers.start(wanted, patch=run_patches.kill_self, patch_arguments=(0, 6))
    assert first.wait() == [-signal.SIGKILL], first.output()
    run_helpers.train(wanted)
    (event,) = events(killed, "resume")
    assert event["step"] in (2, 4)  # a save in progress at the kill is none
    assert sample_ids(whole) == sample_ids(killed)
    for name in ("grad_norm", "learning_rate"):
        assert run_helpers.values(killed, name) == run_helpers.values(whole, name), name
    run_helpers.assert_same_training(killed, whole)


@FINETUNING
def test_float16_halves_its_scale_and_goes_on_with_it(materials, tmp_path, finetuning):
    """Step 2 overflows on purpose: it is skipped, and the resumed run must know the smaller scale."""
    common = {"finetuning": finetuning, "save_steps": 2, "warmup_steps": 0}
    common["dtype"] = "float16" if ON_CUDA else "float32"
    overflow = {"patch": run_patches.spoil_losses}
    overflow |= {"patch_arguments": (0, (2,), math.inf, "gradient")}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run_helpers.train(settings(materials, whole, **common), **overflow)
    wanted = settings(materials, stopped, **common)
    stop = {"patch": run_patches.overflow_then_stop, "patch_arguments": (2, 4), "expect": 3}
    run_helpers.train(wanted, **stop)
    run_helpers.train(wanted)
    assert [event["step"] for event in events(stopped, "resume")] == [4]
    assert losses(whole) == pytest.approx(losses(stopped), rel=1e-3) and None not in losses(whole)
    before, resumed, uninterrupted = (
        read_description(folder / f"checkpoint-{step}").get("loss_scale")
        for folder, step in ((stopped, 4), (stopped, 6), (whole, 6))
    )
    assert resumed == uninterrupted
    if ON_CUDA:
        assert before["scale"] == resumed["scale"] <= 2.0**15
        assert resumed["good_steps"] == before["good_steps"] + 2


def test_out_of_memory_the_run_goes_on_with_smaller_microbatches(materials, tmp_path):
    """The allocator's own error, by a limit on what this process may take of the device."""
    plain, limited = tmp_path / "plain", tmp_path / "limited"
    run_helpers.train(settings(materials, plain, dtype="float32"), patch=run_patches.true_float32)
    limit = {"patch": run_patches.limit_device_memory, "patch_arguments": (100,)}
    run_helpers.train(settings(materials, limited, dtype="float32"), **limit)
    (event,) = events(limited, "oom")
    # the run's largest microbatch is rehearsed in the first step
    assert (event["step"], event["old"][-10:], event["new"][-9:]) == (1, "192 tokens", "96 tokens")
    assert_near(limited, plain, 1e-5)
