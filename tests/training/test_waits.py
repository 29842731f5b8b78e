"""Inside a microbatch the host never waits for the device: it launches the next one while this one
is computed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import preference_rows
import pytest
import run_helpers
import torch
import waits
from launching import BIN, ROOT, run_command
from run_helpers import Materials
from transformers import Qwen3Config, Qwen3ForCausalLM

from finetune.batching.collate import collate
from finetune.config.pretrain_config import PretrainConfig
from finetune.modeling.attention import choose_attention
from finetune.modeling.loss import make_chunked_head, microbatch_losses, sums_by_group
from finetune.runtime.device import read_later
from finetune.training.optimizers import Rates, make_optimizer, skip_where

TESTS = ROOT / "tests"


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    return run_helpers.make_materials(tmp_path_factory.mktemp("waits"))


def found_in(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


def pretraining(materials: Materials, output_dir: Path) -> dict[str, Any]:
    tokens = materials.folder / "tokens.bin"
    if not tokens.exists():
        np.random.default_rng(0).integers(0, 64, 4000).astype(np.uint16).tofile(tokens)
    return {
        "train_data_path": str(tokens),
        "vocab_size": 64,
        "output_dir": str(output_dir),
        "depth": 1,
        "max_seq_len": 32,
        "device_batch_size": 2,
        "total_batch_size": 256,
        "num_iterations": 2,
        "report_to": "none",
        "device_type": "cpu",
        "dtype": "float32",
        "sample_every": 0,
    }


KINDS = {
    "LoRA": ("finetune.sft", {}),
    "LoRA, bfloat16": ("finetune.sft", {"dtype": "bfloat16"}),
    "full": ("finetune.sft", {"finetuning": "full"}),
    "LoRA, checkpointed": ("finetune.sft", {"gradient_checkpointing": True}),
    "pretraining": ("finetune.pretrain", {}),
    "preferences": ("finetune.dpo", {}),
    "preferences, full": ("finetune.dpo", {"finetuning": "full", "sft_weight": 0.5}),
}


def settings_of(materials: Materials, kind: str, output_dir: Path) -> tuple[str, dict[str, Any]]:
    module, changes = KINDS[kind]
    if module == "finetune.pretrain":
        return module, pretraining(materials, output_dir) | changes
    if module == "finetune.dpo":
        pairs = materials.folder / "pairs.jsonl"
        changes = {
            "data": str(pairs if pairs.exists() else preference_rows.make_pairs(pairs, 40)),
            **changes,
        }
    return module, materials.settings(output_dir, max_steps=2, **changes)


@pytest.mark.parametrize("kind", KINDS)
def test_no_microbatch_waits(materials, tmp_path, kind):
    module, settings = settings_of(materials, kind, tmp_path / "run")
    audit = tmp_path / "audit"
    run_helpers.train(
        settings, patch=waits.audit_rows, patch_arguments=(str(audit),), module=module
    )
    steps = found_in(audit)
    assert len(steps) == 2 and sum(step["rows"] for step in steps) > 2
    assert [step["found"] for step in steps] == [{}, {}]


def test_a_padded_microbatch_waits_for_its_mask_only(materials, tmp_path):
    """Samples have different numbers of targets there; and the audit finds what waits."""
    audit = tmp_path / "audit"
    settings = materials.settings(tmp_path / "run", max_steps=1, packing=False)
    run_helpers.train(settings, patch=waits.audit_rows, patch_arguments=(str(audit),))
    (step,) = found_in(audit)
    assert step["found"] and all(place.startswith("aten::index") for place in step["found"])
    rehearsed = step["rows"] + 1
    assert sum(step["found"].values()) == 2 * rehearsed, "forward and backward of the mask"


@pytest.mark.parametrize("kind", ["LoRA", "full", "pretraining"])
def test_a_step_asks_once_whether_it_was_finite(materials, tmp_path, kind):
    """Where nothing is logged. On a CPU the answer is read at once, on a device when the next step
    is done.
    """
    module, settings = settings_of(materials, kind, tmp_path / "run")
    settings |= {"logging_steps": 50} | ({} if kind == "pretraining" else {"max_steps": 3})
    audit = tmp_path / "audit"
    run_helpers.train(
        settings, patch=waits.audit_steps, patch_arguments=(str(audit),), module=module
    )
    steps = found_in(audit)
    assert len(steps) == (2 if kind == "pretraining" else 3)
    # The fused kernel of a CPU reads its own step count there; the last step is saved, and reads
    # nothing more.
    for step in steps:
        asked = [count for place, count in step["found"].items() if "device.py" in place]
        assert asked == [1] and sum(step["found"].values()) == 1, step


SIMULATED = """
import sys, importlib
sys.path.insert(0, {tests!r})
import torch, torch_npu, waits
with waits.Waits() as seen:  # what it must find: a copy that is not pinned, and one back
    torch.ones(2).to("npu", non_blocking=True).cpu()
assert sum(seen.found.values()) == 2, seen.found
waits.audit_rows(0, sys.argv[2])
sys.exit(importlib.import_module(sys.argv[1]).main(sys.argv[3:]))
"""


@pytest.mark.parametrize(
    "kind", ["LoRA", "pretraining", pytest.param("preferences", marks=pytest.mark.slow)]
)
def test_copies_to_and_from_a_simulated_npu_do_not_wait(materials, tmp_path, kind):
    """It computes on the CPU; copies are seen there, and must be of pinned memory."""
    module, settings = settings_of(materials, kind, tmp_path / "run")
    config, script, audit = tmp_path / "run.json", tmp_path / "audited.py", tmp_path / "audit"
    config.write_text(json.dumps(settings | {"device_type": "npu"}))
    script.write_text(SIMULATED.format(tests=str(TESTS)))
    paths = os.pathsep.join([str(TESTS / "fake_npu"), str(ROOT)])
    words = [BIN / "python", script, module, audit, "--config", config]
    result = run_command([str(word) for word in words], env={"PYTHONPATH": paths})
    assert result.returncode == 0, result.stderr
    assert [step["found"] for step in found_in(audit)] == [{}, {}]


def test_what_a_packed_microbatch_needs_is_made_once():
    ids = np.arange(5, dtype=np.int32)
    mask = np.array([False, True, False, True, True])
    made = collate([(ids, mask, 0), (ids[:3], mask[:3], 1)], packing=True, pad_token_id=0)
    assert made.keep.tolist() == [0, 2, 3, 5] and made.keep.dtype == torch.int64
    assert made.cu_seq_lens.tolist() == [0, 5, 8] and made.cu_seq_lens.dtype == torch.int32
    here = made.to(torch.device("cpu"))
    inputs = here.model_inputs(torch.device("cpu"))
    assert inputs["cu_seq_lens_q"] is made.cu_seq_lens and inputs["logits_to_keep"] is made.keep
    padded = collate([(ids, mask, 0), (ids[:3], mask[:3], 1)], packing=False, pad_token_id=0)
    assert (
        padded.keep.dtype == torch.bool
        and padded.keep.shape == (2, 5)
        and padded.cu_seq_lens is None
    )
    assert torch.equal(made.targets, padded.targets)


# ---------------------------------------------------------------- what CUDA's driver says


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
# On the CPU nothing waits; there the tests show that they work.
ON_DEVICES = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]
)


@pytest.fixture
def refusing(device: str) -> Iterator[Callable[[], None]]:
    """Called, it has torch raise where the host would wait for the device, until the test ends."""
    if device == "cpu":
        yield lambda: None
        return
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def model_on(device: str, dtype: torch.dtype) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=500, hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=16
    )
    config._attn_implementation = choose_attention(config)
    return Qwen3ForCausalLM(config).to(device, dtype)


@ON_DEVICES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_packed_microbatch_waits(device, dtype, refusing):
    model, device = model_on(device, dtype), torch.device(device)
    head = make_chunked_head(model)
    members = [
        (np.arange(40, dtype=np.int32), np.arange(40) % 3 == 1, 0),
        (np.arange(9, dtype=np.int32), None, 1),
    ]
    members[1] = (members[1][0], np.arange(9) > 4, 1)
    waiting = collate(members, packing=True, pad_token_id=0)

    def row() -> torch.Tensor:
        microbatch = waiting.to(device)
        losses = microbatch_losses(model, microbatch, device, head)
        (losses.sum() * 0.1).backward()
        return sums_by_group(losses.detach(), microbatch.groups, 2)

    row()  # libraries are loaded and memory is taken in the first
    refusing()
    for _ in range(3):
        row()


@ON_DEVICES
@pytest.mark.parametrize("nonfinite", [False, True])
def test_the_optimizers_step_does_not_wait(device, nonfinite, refusing):
    model = model_on(device, torch.float32)
    settings = PretrainConfig(train_data_path=("x.bin",), output_dir="out")
    optimizer = make_optimizer(model, settings, Rates(0.02, 0.3, 0.008, 0.01, 0.28), fused=True)

    def step() -> Callable[[], float]:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, torch.nan if nonfinite else 0.1)
        found = (~torch.isfinite(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))).float()
        assert skip_where(optimizer, found)
        optimizer.step()
        return read_later(found)

    before = [parameter.detach().clone() for parameter in model.parameters()]
    step()
    refusing()
    read = step()
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    assert read() == float(nonfinite)
    same = [torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True)]
    assert all(same) if nonfinite else not any(same)
