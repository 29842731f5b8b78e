"""Whole runs on one CUDA device: near the CPU's, resumed bit by bit, in float16, compiled, and out
of memory.

FINETUNE_TEST_DEVICE=cpu has them run on a CPU, to try the tests themselves; what a CPU does not
have is left out there.
"""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import preference_rows
import pytest
import run_helpers
import run_patches
import torch
from launching import ROOT
from run_helpers import LAYOUTS, Materials

from finetune.inference.generation import load_for_generation
from finetune.inference.sampling import Sampling
from finetune.training.state import read_description

DEVICE = os.environ.get("FINETUNE_TEST_DEVICE", "cuda")
ON_CUDA = DEVICE == "cuda"
HALF_LIMIT = 2e-2  # relative, of losses: bfloat16 has 8 bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(ON_CUDA and not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    return run_helpers.make_materials(tmp_path_factory.mktemp("cuda"), layers=2)


def settings(materials: Materials, output_dir: Path, **changes: Any) -> dict[str, Any]:
    """bfloat16 on the device."""
    return materials.settings(output_dir, **{"device_type": DEVICE, "dtype": "bfloat16", **changes})


def started_on_the_device(output_dir: Path) -> bool:
    return all(event["device_type"] == DEVICE for event in run_helpers.events(output_dir, "start"))


def difference(first: Path, second: Path) -> float:
    return run_helpers.largest_relative_difference(
        run_helpers.losses(first), run_helpers.losses(second)
    )


# ---------------------------------------------------------------- the same training as elsewhere


@pytest.mark.parametrize("finetuning", ["lora", "full"])
@pytest.mark.parametrize("fused_layers", ["auto", "off"])
def test_bfloat16_on_the_device_is_near_float32_on_the_cpu(
    materials, tmp_path, finetuning, fused_layers
):
    here, there = tmp_path / "here", tmp_path / "there"
    changes = {"finetuning": finetuning, "learning_rate": 1e-3}
    run_helpers.train(settings(materials, here, fused_layers=fused_layers, **changes))
    run_helpers.train(settings(materials, there, device_type="cpu", dtype="float32", **changes))
    assert started_on_the_device(here)
    assert run_helpers.sample_ids(here) == run_helpers.sample_ids(there)
    assert difference(there, here) < HALF_LIMIT


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_preferences_in_bfloat16_are_near_float32_on_the_cpu(materials, tmp_path, loss):
    """LoRA on packed pairs, and on labels; the reference is the model with its adapter off, by the
    same kernels.
    """
    data = preference_rows.make_pairs(materials.folder / f"{loss}.jsonl", 40, labels=loss == "kto")
    changes = {
        "data": str(data),
        "loss": loss,
        "learning_rate": 5e-3,
        "warmup_steps": 0,
        "packing": True,
    }
    for name, way in (("here", {}), ("there", {"device_type": "cpu", "dtype": "float32"})):
        run_helpers.train(
            settings(materials, tmp_path / name, **changes, **way), module="finetune.dpo"
        )
    here, there = tmp_path / "here", tmp_path / "there"
    assert started_on_the_device(here) and run_helpers.sample_ids(here) == run_helpers.sample_ids(
        there
    )
    assert difference(there, here) < HALF_LIMIT
    # And something was learned: before the first step every loss is that of two models alike.
    steps = run_helpers.losses(here)
    if loss == "dpo":
        assert steps[0] == pytest.approx(math.log(2), rel=1e-3)
        assert steps[-1] < 0.9 * steps[0], "what is compared is no constant"


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_base_in_few_bits_is_near_the_plain_run_and_smaller(tmp_path, kind):
    """bfloat16, on the device for both; what is allocated after the second step is weights, moments
    and gradients.
    """
    materials = run_helpers.make_materials(tmp_path / "materials", hidden=512 if ON_CUDA else 64)
    held = {}
    for quantization in ("none", kind):
        folder = tmp_path / quantization
        wanted = settings(materials, folder, quantization=quantization, learning_rate=1e-3)
        run_helpers.train(
            wanted, patch=run_patches.note_memory, patch_arguments=(2, str(tmp_path / "held"))
        )
        assert started_on_the_device(folder)
        held[quantization] = int((tmp_path / "held").read_text())
    assert run_helpers.sample_ids(tmp_path / "none") == run_helpers.sample_ids(tmp_path / kind)
    # Relative, of losses: weights in 4 bits are off by a tenth of their norm, in 8 bits by a
    # hundredth.
    assert difference(tmp_path / "none", tmp_path / kind) < {"nf4": 0.05, "int8": HALF_LIMIT}[kind]
    numbers = 512 * (2 * 32 + 2 * 16) + 3 * 512 * 1024  # of the block's seven matrices
    spared = {"nf4": 2 - 0.52, "int8": 2 - 1.01}[kind] * numbers
    if ON_CUDA:
        assert held["none"] - held[kind] == pytest.approx(spared, rel=0.1)


@pytest.mark.parametrize("finetuning", ["lora", "full"])
@pytest.mark.parametrize("fused_layers", ["auto", "compile"])
def test_answers_at_evaluations_leave_no_trace(materials, tmp_path, finetuning, fused_layers):
    """Kernels, compiled layers, dropout: weights and losses are those of the run that asks nothing,
    to the bit.
    """
    rows = [json.loads(line) for line in materials.valid.read_text().splitlines()]
    valid = tmp_path / "valid.jsonl"
    valid.write_text(
        "".join(json.dumps(row | {"answer": row["output"]}) + "\n" for row in rows),
        encoding="utf-8",
    )
    changes = {
        "finetuning": finetuning,
        "fused_layers": fused_layers,
        "lora_dropout": 0.3,
        "valid_data": str(valid),
    }
    for name, count in (("with", 8), ("without", None)):
        run_helpers.train(
            settings(materials, tmp_path / name, **changes, eval_steps=2, eval_generate=count)
        )
    assert started_on_the_device(tmp_path / "with")
    assert run_helpers.losses(tmp_path / "with") == run_helpers.losses(tmp_path / "without")
    weights = [run_helpers.result_weights(tmp_path / name) for name in ("with", "without")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    asked = run_helpers.events(tmp_path / "with", "eval")
    assert [event["eval_answers"] for event in asked] == [8] * 4


def test_compiled_pretraining_is_eager_pretraining(tmp_path):
    """NanoChat of depth 2 with Muon on random tokens."""
    choose = np.random.default_rng(0)
    for name in ("train", "val"):
        choose.integers(0, 300, 20_000).astype("<u2").tofile(tmp_path / f"{name}.bin")
    common = {
        "train_data_path": str(tmp_path / "train.bin"),
        "valid_data_path": str(tmp_path / "val.bin"),
        "vocab_size": 300,
        "depth": 2,
        "max_seq_len": 64,
        "device_batch_size": 4,
        "total_batch_size": 8 * 64,
        "num_iterations": 6,
        "save_steps": 0,
        "sample_every": 0,
        "dtype": "bfloat16",
        "device_type": DEVICE,
        "log_samples": True,
        "report_to": "none",
    }
    for name, compiled in (("eager", False), ("compiled", True)):
        made = common | {"compile": compiled, "output_dir": str(tmp_path / name)}
        ranks = run_helpers.start(made, module="finetune.pretrain")
        assert ranks.wait(600) == [0], ranks.output()
        assert started_on_the_device(tmp_path / name)
    assert run_helpers.sample_ids(tmp_path / "eager") == run_helpers.sample_ids(
        tmp_path / "compiled"
    )
    assert difference(tmp_path / "eager", tmp_path / "compiled") < HALF_LIMIT


@pytest.mark.parametrize("continuous", [True, False])
def test_greedy_answers_are_those_of_the_cpu(continuous):
    model = str(ROOT / "data_samples" / "tiny-qwen3")
    rows = (ROOT / "data_samples" / "valid.jsonl").read_text(encoding="utf-8").splitlines()[:12]
    questions = [[{"role": "user", "content": json.loads(row)["instruction"]}] for row in rows]
    answers = []
    for device in ("cpu", DEVICE):
        with load_for_generation(
            model, device_type=device, dtype="float32", continuous=continuous
        ) as generator:
            made = generator.generate(questions, Sampling(max_new_tokens=24))
            answers.append([list(answer.token_ids) for answer in made])
    assert answers[0] == answers[1]


# ---------------------------------------------------------------- stopped and resumed


@pytest.mark.parametrize(
    ("finetuning", "layout"),
    [("lora", "plain"), ("full", "plain"), ("lora", "zero3"), ("full", "zero3_offload")],
)
def test_killed_and_resumed_it_is_the_same_run_bit_by_bit(materials, tmp_path, finetuning, layout):
    """Flash attention's backward adds to a query's gradient without an order, block of keys by
    block: here a document is one block (64 tokens at most). Of the step's other kernels none adds
    without an order, but for the sums by difficulty (index_add), which are not compared.
    """
    common = {"finetuning": finetuning, "save_steps": 2, "cutoff_len": 64, **LAYOUTS[layout]}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_helpers.train(settings(materials, whole, **common))
    wanted = settings(materials, killed, **common)
    first = run_helpers.start(wanted, patch=run_patches.kill_self, patch_arguments=(0, 6))
    assert first.wait() == [-signal.SIGKILL], first.output()
    run_helpers.train(wanted)
    (event,) = run_helpers.events(killed, "resume")
    assert event["step"] in (2, 4)  # a save under way at the kill is none
    assert (whole / "samples.jsonl").read_bytes() == (killed / "samples.jsonl").read_bytes()
    for name in ("loss", "grad_norm", "learning_rate"):
        assert run_helpers.values(whole, name) == run_helpers.values(killed, name), name
    weights, expected = run_helpers.result_weights(killed), run_helpers.result_weights(whole)
    assert weights.keys() == expected.keys()
    assert [name for name in weights if not torch.equal(weights[name], expected[name])] == []


@pytest.mark.parametrize("optimizer", ["adamw-8bit", "adafactor", "muon"])
def test_optimizers_with_less_state_resume_bit_by_bit(tmp_path, optimizer):
    # below it all state is in 32 bits
    materials = run_helpers.make_materials(tmp_path / "materials", hidden=64)
    common = {
        "finetuning": "full",
        "optimizer": optimizer,
        "learning_rate": 1e-3,
        "save_steps": 2,
        "cutoff_len": 64,
    }
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run_helpers.train(settings(materials, whole, **common))
    wanted = settings(materials, stopped, **common)
    run_helpers.train(
        wanted, patch=run_patches.signal_self, patch_arguments=(0, 4, signal.SIGTERM), expect=3
    )
    run_helpers.train(wanted)
    assert [event["step"] for event in run_helpers.events(stopped, "resume")] == [4]
    assert (
        run_helpers.losses(whole) == run_helpers.losses(stopped)
        and run_helpers.losses(whole)[-1] is not None
    )
    weights, expected = run_helpers.result_weights(stopped), run_helpers.result_weights(whole)
    assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []


@pytest.mark.parametrize("finetuning", ["lora", "full"])
def test_float16_halves_its_scale_and_goes_on_with_it(materials, tmp_path, finetuning):
    """Step 2 overflows on purpose: it is skipped, and the resumed run must know the smaller
    scale.
    """
    dtype = "float16" if ON_CUDA else "float32"
    # Without a warm-up, so that the adapter of the first checkpoint has learned something in step
    # 1.
    common = {"finetuning": finetuning, "save_steps": 2, "warmup_steps": 0, "dtype": dtype}
    overflow = {
        "patch": run_patches.spoil_losses,
        "patch_arguments": (0, (2,), math.inf, "gradient"),
    }
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run_helpers.train(settings(materials, whole, **common), **overflow)
    wanted = settings(materials, stopped, **common)
    run_helpers.train(
        wanted, patch=run_patches.overflow_then_stop, patch_arguments=(2, 4), expect=3
    )
    run_helpers.train(wanted)
    assert [event["step"] for event in run_helpers.events(stopped, "resume")] == [4]
    for folder in (whole, stopped):
        assert [math.isfinite(loss) for loss in run_helpers.losses(folder)] == [True] * 6
    assert run_helpers.losses(whole) == pytest.approx(run_helpers.losses(stopped), rel=1e-3)
    scales = [
        saved_scale(folder / f"checkpoint-{step}")
        for folder, step in ((stopped, 4), (stopped, 6), (whole, 6))
    ]
    if ON_CUDA:
        before, resumed, uninterrupted = scales
        assert resumed == uninterrupted and before["scale"] == resumed["scale"]
        assert before["scale"] <= 2.0**15 and resumed["good_steps"] == before["good_steps"] + 2
    else:
        assert scales == [None] * 3  # no scale without float16


def saved_scale(checkpoint: Path) -> dict[str, float] | None:
    return read_description(checkpoint).get("loss_scale")


# -------------------------------------------------------------- what goes wrong, and what is chosen


def test_out_of_memory_the_run_goes_on_with_smaller_microbatches(materials, tmp_path):
    """The allocator's own error, by a limit on what this process may take of the device."""
    plain, limited = tmp_path / "plain", tmp_path / "limited"
    run_helpers.train(settings(materials, plain, dtype="float32"), patch=run_patches.true_float32)
    ranks = run_helpers.train(
        settings(materials, limited, dtype="float32"),
        patch=run_patches.limit_device_memory,
        patch_arguments=(100,),
    )
    (event,) = run_helpers.events(limited, "oom")
    assert event["step"] == 1, ranks.output()  # the run's largest microbatch is rehearsed there
    assert (event["old"], event["new"]) == (
        "microbatches of at most 192 tokens",
        "microbatches of at most 96 tokens",
    )
    assert run_helpers.sample_ids(plain) == run_helpers.sample_ids(limited)
    assert difference(plain, limited) < 1e-5
    assert run_helpers.status(limited)["state"] == "done"


def test_a_step_that_is_not_finite_is_skipped(materials, tmp_path):
    output_dir = tmp_path / "run"
    run_helpers.train(
        settings(materials, output_dir, save_steps=1, save_total_limit=9),
        patch=run_patches.spoil_losses,
        patch_arguments=(0, (3,), math.nan, "loss"),
    )
    (event,) = run_helpers.events(output_dir, "nonfinite")
    assert event["step"] == 3 and event["ids"] == run_helpers.sample_ids(output_dir)[2]
    losses = run_helpers.losses(output_dir)
    assert losses[2] is None and None not in losses[:2] + losses[3:]
    weights = [run_helpers.result_weights(output_dir / f"checkpoint-{step}") for step in (2, 3, 4)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not all(torch.equal(weights[1][name], weights[2][name]) for name in weights[0])


@pytest.mark.parametrize("finetuning", ["lora", "full"])
def test_auto_chooses_and_says_why(materials, tmp_path, finetuning):
    output_dir = tmp_path / "run"
    auto = {"micro_batch_size": "auto", "gradient_checkpointing": "auto", "finetuning": finetuning}
    ranks = run_helpers.train(settings(materials, output_dir, **auto))
    (event,) = run_helpers.events(output_dir, "execution")
    assert set(event["chosen"]) == {"micro_batch_size", "gradient_checkpointing"}
    assert event["chosen"]["micro_batch_size"] >= 1 and event["reason"].startswith("auto: ")
    assert event["chosen"]["gradient_checkpointing"] in (True, False)
    assert "auto: " in ranks.output()
