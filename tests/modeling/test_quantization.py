"""Layers in few bits compute as the linear layer of what they hold, and hold little."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_config
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from finetune.modeling.lora import fuse_lora
from finetune.modeling.pretrained import count_parameters
from finetune.modeling.quantization import (
    compute_exactly,
    is_quantized,
    quantized_loading,
    weight_of,
)

KINDS = ("nf4", "int8")
LAYERS = 7 * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    more = {"num_hidden_layers": 2, "tie_word_embeddings": False, "attention_bias": True}
    config = tiny_config("qwen3", **sizes, **more, initializer_range=0.1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def load(folder: Any, kind: str, dtype: torch.dtype = torch.float32) -> Any:
    told = quantized_loading(kind, dtype, torch.device("cpu"), zero3=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **told)
    compute_exactly(model)
    assert sum(map(is_quantized, model.modules())) == LAYERS
    return model


def ids() -> torch.Tensor:
    return torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(3))


def adapted(model: Any) -> Any:
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    made = get_peft_model(model, lora)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return made


def results(model: Any, run: Any = None) -> list[torch.Tensor]:
    logits = (run or model)(ids()).logits
    logits.float().square().mean().backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    return [logits.detach(), *gradients]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert float((ours - theirs).norm()) <= tolerance * float(theirs.norm())


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_linear_layer_of_what_it_holds(folder, kind: str) -> None:
    """Against a model of plain layers with the dequantised weights: base, adapter, gradients."""
    quantised = load(folder, kind)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rounding = []
    for name, module in quantised.named_modules():
        if is_quantized(module):
            own, held = plain.get_submodule(name).weight, weight_of(module, torch.float32)
            rounding.append(float((held - own.data).norm() / own.data.norm()))
            own.data = held.clone()
    low, high = {"nf4": (0.05, 0.15), "int8": (0.001, 0.01)}[kind]
    assert len(rounding) == LAYERS and low < min(rounding) and max(rounding) < high
    assert type(quantised.lm_head) is torch.nn.Linear
    before = quantised.train()(ids()).logits
    assert_same([before], [plain(ids()).logits], 1e-6)
    # bitsandbytes' own forward without gradients repacks 4-bit weights and rounds activations
    with torch.no_grad():
        assert torch.equal(quantised.eval()(ids()).logits, before)
        alone = torch.cat([quantised(row[None]).logits for row in ids()])
    torch.testing.assert_close(alone, before, rtol=1e-5, atol=1e-5)
    assert torch.equal(quantised.train()(ids()).logits, before)
    assert_same(results(adapted(quantised)), results(adapted(plain)), 1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_adapters_are_those_of_peft(folder, kind: str, dtype: torch.dtype) -> None:
    model = adapted(load(folder, kind, dtype))
    fused = copy.deepcopy(model)
    assert fuse_lora(fused) == LAYERS

    def cast(inputs: torch.Tensor, model: Any) -> Any:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            return model(inputs)

    expected = results(model, lambda inputs: cast(inputs, model))
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    assert_same(results(fused, lambda inputs: cast(inputs, fused)), expected, tolerance)
    again = results(fused, lambda inputs: checkpoint(cast, inputs, fused, use_reentrant=False))
    assert_same(again, expected, tolerance)


@pytest.mark.parametrize(
    ("kind", "each"), [("nf4", 0.5 + 1 / 64 + 4 / (64 * 256)), ("int8", 1 + 4 / 64)]
)
def test_it_holds_little_and_counts_all(folder, kind: str, each: float) -> None:
    model, plain = load(folder, kind, torch.bfloat16), AutoModelForCausalLM.from_pretrained(folder)
    assert count_parameters(model)["total"] == count_parameters(plain)["total"]
    weight = model.model.layers[0].mlp.gate_proj.weight
    if kind == "nf4":
        held = [weight.data, weight.quant_state.absmax, weight.quant_state.state2.absmax]
        assert weight.dtype == torch.bfloat16  # as DeepSpeed wants it
    else:
        held = [weight.data, weight.SCB]
        assert weight.CB is None
    assert sum(part.nbytes for part in held) == pytest.approx(each * 64 * 128, rel=0.01)
