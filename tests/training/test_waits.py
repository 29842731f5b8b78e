"""Inside a microbatch the host never waits for the device: it launches the next one while this one is computed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_helpers
import torch
import waits
from launching import BIN, ROOT, run_command
from run_helpers import Materials

from finetune.data.collate import collate

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
}


def settings_of(materials: Materials, kind: str, output_dir: Path) -> tuple[str, dict[str, Any]]:
    module, changes = KINDS[kind]
    if module == "finetune.pretrain":
        return module, pretraining(materials, output_dir) | changes
    return module, materials.settings(output_dir, max_steps=2, **changes)


@pytest.mark.parametrize("kind", KINDS)
def test_no_microbatch_waits(materials, tmp_path, kind):
    module, settings = settings_of(materials, kind, tmp_path / "run")
    audit = tmp_path / "audit"
    run_helpers.train(settings, patch=waits.audit_rows, patch_arguments=(str(audit),), module=module)
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


@pytest.mark.parametrize("kind", ["LoRA", "pretraining"])
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
    assert padded.keep.dtype == torch.bool and padded.keep.shape == (2, 5) and padded.cu_seq_lens is None
    assert torch.equal(made.targets, padded.targets)
