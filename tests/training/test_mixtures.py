"""Runs of a mixture of experts whose configuration asks for the balancing loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch
from chat_models import family
from run_helpers import LAYOUTS, Materials
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

LAYERS, EXPERTS = 2, 4


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    folder = tmp_path_factory.mktemp("mixture")
    made = run_helpers.make_materials(folder)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(family("chatml")),
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        initializer_range=0.1,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(made.model)
    return made


def trained(materials: Materials, folder: Path, processes: int, **changes: Any) -> list[dict]:
    own = {"learning_rate": 1e-3, "max_steps": 4}
    run_helpers.train(materials.settings(folder, **own, **changes), processes)
    return run_helpers.lines(folder / "trainer_log.jsonl")


def test_any_execution_balances_alike(materials, tmp_path):
    one = trained(materials, tmp_path / "one", 1, finetuning="full")
    shown = [line["expert_load"] for line in one]
    assert all(len(load) == LAYERS and 1 <= max(load) <= EXPERTS for load in shown)
    assert all(line["experts_idle"] == 0 and line["balance_loss"] > 0 for line in one)
    others = {"packing": False, "micro_batch_size": 1, "gradient_checkpointing": True}
    for layout in ("plain", "zero3"):
        two = trained(
            materials, tmp_path / layout, 2, finetuning="full", **others, **LAYOUTS[layout]
        )
        assert [line["expert_load"] for line in two] == shown
        for name in ("loss", "balance_loss", "grad_norm"):
            expected = [line[name] for line in one]
            assert [line[name] for line in two] == pytest.approx(expected, rel=1e-5), name


def test_it_changes_what_is_trained(materials, tmp_path):
    """With an adapter; and without the loss, tokens are still counted."""
    balanced = trained(materials, tmp_path / "balanced", 1)
    path = materials.model / "config.json"
    kept = path.read_text()
    path.write_text(json.dumps(json.loads(kept) | {"output_router_logits": False}))
    try:
        plain = trained(materials, tmp_path / "plain", 1)
    finally:
        path.write_text(kept)
    assert "balance_loss" not in plain[0] and "expert_load" in plain[0]
    first = balanced[0]
    assert first["loss"] == pytest.approx(plain[0]["loss"] + first["balance_loss"], rel=1e-5)
    assert balanced[-1]["loss/explain"] != plain[-1]["loss/explain"]
