"""A few families of docs/reference/models.md, checked cheaply; `make models` takes all through the whole chain."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_families import FAMILIES, Family, make_config, make_family, make_tokenizer
from models import PAGE, Chain, listed
from tiny_models import CPU, documents, make_microbatch
from transformers import AutoModelForCausalLM

from finetune.config.run_config import RunConfig
from finetune.inference.engine import StaticEngine
from finetune.inference.generation import load_for_generation
from finetune.inference.sampling import Sampling
from finetune.modeling.adapter import add_adapter, passed_over
from finetune.modeling.attention import can_pack, choose_attention
from finetune.modeling.loss import microbatch_losses

BY_NAME = {family.name: family for family in FAMILIES}


def tiny(family: Family, folder: Path) -> torch.nn.Module:
    config = make_config(family, make_tokenizer(family, folder))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=choose_attention(config))


def test_the_page_has_the_families_that_are_tested():
    page = PAGE.read_text(encoding="utf-8")
    assert listed(page) == [(family.name, family.model_type) for family in FAMILIES]
    assert "**fails" not in page


@pytest.mark.parametrize(
    ("name", "without"),
    [("Jamba", {"dt_proj"}), ("Granite 4 hybrid", {"out_proj"})],
)
def test_every_adapter_takes_part(name, without, tmp_path):
    """State-space layers read some weights past their modules: an adapter there would learn nothing."""
    model = tiny(BY_NAME[name], tmp_path)
    assert can_pack(model.config) == (name != "Jamba")
    assert {found.rpartition(".")[2] for found in passed_over(model)} == without
    config = RunConfig(model="unused", data=("unused",), output_dir="unused")
    adapted = add_adapter(model, config, one_dtype=False)
    microbatch_losses(adapted, make_microbatch(documents(), packing=False), CPU).sum().backward()
    ups = {key: p.grad for key, p in adapted.named_parameters() if "lora_B" in key}
    assert not [key for key, gradient in ups.items() if gradient is None or not gradient.any()]


def test_a_model_with_latent_attention_answers(tmp_path):
    """Its keys are wider than its values, and continuous batching has one width for both."""
    make_family(BY_NAME["DeepSeek-V3"], tmp_path)
    with load_for_generation(str(tmp_path), dtype="float32", device_type="cpu") as generator:
        assert isinstance(generator.engine, StaticEngine)
        answer = generator.generate([[3, 4, 5]], Sampling(temperature=0.0, max_new_tokens=2))[0]
    assert answer.completion_tokens


@pytest.mark.slow
def test_a_family_goes_through_the_whole_chain(tmp_path):
    assert not Chain(BY_NAME["Falcon-H1"], tmp_path / "family").run().failures
