"""Inside a microbatch the host never waits for the device: it launches the next one while this one is computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import preference_rows
import pytest
import run_helpers
import torch
import waits
from run_helpers import Materials
from transformers import Qwen3Config, Qwen3ForCausalLM

from finetune.batching.collate import collate
from finetune.config.pretrain_config import PretrainConfig
from finetune.modeling.attention import choose_attention
from finetune.modeling.loss import make_chunked_head, microbatch_losses, sums_by_group
from finetune.runtime.device import read_later
from finetune.training.optimizers import Rates, make_optimizer, skip_where


@pytest.fixture(scope="module")
def materials(materials: Materials) -> Materials:
    preference_rows.make_pairs(materials.folder / "pairs.jsonl", 40)
    tokens = np.random.default_rng(0).integers(0, 64, 4000).astype(np.uint16)
    tokens.tofile(materials.folder / "tokens.bin")
    return materials


def found_in(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


KINDS = {
    "LoRA": ("finetune.sft", {}),
    "full, bfloat16": (
        "finetune.sft",
        {"finetuning": "full", "dtype": "bfloat16", "gradient_checkpointing": True},
    ),
    "pretraining": ("finetune.pretrain", {}),
    "preferences, full": ("finetune.dpo", {"finetuning": "full", "sft_weight": 0.5}),
}


def settings_of(materials: Materials, kind: str, output_dir: Path) -> tuple[str, dict[str, Any]]:
    module, changes = KINDS[kind]
    if module == "finetune.pretrain":
        given = {"train_data_path": str(materials.folder / "tokens.bin"), "vocab_size": 64}
        given |= {"max_seq_len": 32, "device_batch_size": 2, "total_batch_size": 256}
        given |= {"num_iterations": 2, "depth": 1}
        given |= {"sample_every": 0, "report_to": "none", "device_type": "cpu", "dtype": "float32"}
        return module, given | changes | {"output_dir": str(output_dir)}
    if module == "finetune.dpo":
        changes = {"data": str(materials.folder / "pairs.jsonl"), **changes}
    return module, materials.settings(output_dir, max_steps=2, **changes)


@pytest.mark.parametrize("kind", KINDS)
def test_no_microbatch_waits(materials, tmp_path, kind):
    module, settings = settings_of(materials, kind, tmp_path / "run")
    patch = {"patch": waits.audit_rows, "patch_arguments": (str(tmp_path / "audit"),)}
    run_helpers.train(settings, module=module, **patch)
    steps = found_in(tmp_path / "audit")
    assert len(steps) == 2 and sum(step["rows"] for step in steps) > 2
    assert [step["found"] for step in steps] == [{}, {}]


def test_a_padded_microbatch_waits_for_its_mask_only(materials, tmp_path):
    """Samples have different numbers of targets there; and the audit finds what waits."""
    settings = materials.settings(tmp_path / "run", max_steps=1, packing=False)
    patch = {"patch": waits.audit_rows, "patch_arguments": (str(tmp_path / "audit"),)}
    run_helpers.train(settings, **patch)
    (step,) = found_in(tmp_path / "audit")
    assert step["found"] and all(place.startswith("aten::index") for place in step["found"])
    rehearsed = step["rows"] + 1
    assert sum(step["found"].values()) == 2 * rehearsed, "forward and backward of the mask"


def test_a_step_asks_once_whether_it_was_finite(materials, tmp_path):
    """Where nothing is logged. On a CPU the answer is read immediately, on a device when the next step is done."""
    module, settings = settings_of(materials, "pretraining", tmp_path / "run")
    patch = {"patch": waits.audit_steps, "patch_arguments": (str(tmp_path / "audit"),)}
    run_helpers.train(settings | {"logging_steps": 50}, module=module, **patch)
    steps = found_in(tmp_path / "audit")
    assert len(steps) == 2
    for step in steps:
        asked = [count for place, count in step["found"].items() if "device.py" in place]
        assert asked == [1] and sum(step["found"].values()) == 1, step


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


# On the CPU nothing waits; there it shows that the test works.
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])
@pytest.mark.parametrize("nonfinite", [False, True])
def test_neither_a_packed_microbatch_nor_the_optimizers_step_waits(device, nonfinite):
    """After the first round, in which libraries are loaded, torch raises where the host would wait."""
    sizes = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    config = Qwen3Config(**sizes, head_dim=16)
    config._attn_implementation = choose_attention(config)
    model, on = Qwen3ForCausalLM(config).to(device), torch.device(device)
    settings = PretrainConfig(train_data_path=("x.bin",), output_dir="out")
    optimizer = make_optimizer(model, settings, Rates(0.02, 0.3, 0.008, 0.01, 0.28), fused=True)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    head, long, short = make_chunked_head(model), np.arange(40), np.arange(9)
    members = [(long.astype(np.int32), long % 3 == 1, 0), (short.astype(np.int32), short > 4, 1)]
    waiting = collate(members, packing=True, pad_token_id=0)
    factor = torch.full((), torch.nan if nonfinite else 0.1, device=on)
    try:
        for _ in range(3):
            microbatch = waiting.to(on)
            losses = microbatch_losses(model, microbatch, on, head)
            (losses.sum() * factor).backward()
            sums_by_group(losses.detach(), microbatch.groups, 2)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            found = (~torch.isfinite(norm)).float()
            assert skip_where(optimizer, found)
            optimizer.step()
            read = read_later(found)
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("error")
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert read() == float(nonfinite)
    same = [torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True)]
    assert all(same) if nonfinite else not any(same)
