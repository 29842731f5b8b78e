"""Value embeddings: the formula, transformers' LFM2 without them, new tokens, where they load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Lfm2Config, Lfm2ForCausalLM

from finetune.modeling.lfm2_value import Lfm2ValueForCausalLM, register
from finetune.modeling.scratch import make_model, scratch_config

IDS = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model() -> Lfm2ValueForCausalLM:
    """With nothing at its zero start."""
    config = scratch_config("lfm2_value", 4, vocab_size=64, max_seq_len=32)
    made = make_model(config, seed=0).double().eval()
    for number, parameter in enumerate(made.parameters()):
        if not parameter.any():
            generator = torch.Generator().manual_seed(number)
            torch.nn.init.normal_(parameter, std=0.05, generator=generator)
    return made


def attention_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [layer.self_attn for layer in model.model.layers if layer.is_attention_layer]


def test_without_their_numbers_it_is_transformers_lfm2(model):
    for attention in attention_layers(model):
        attention.value_embedding.weight.data.zero_()
    sizes = model.config.to_dict()
    sizes.pop("model_type")
    plain = Lfm2ForCausalLM(Lfm2Config(**sizes)).double().eval()
    assert not plain.load_state_dict(model.state_dict(), strict=False).missing_keys
    assert torch.equal(plain(IDS).logits, model(IDS).logits)


def test_values_are_those_of_the_formula(model):
    attention = attention_layers(model)[1]
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(2, 17, 256, dtype=torch.float64, generator=generator)
    values = attention.values(states, IDS)
    for sample, place, head in [(0, 0, 0), (1, 16, 1), (1, 5, 0)]:
        x, token = states[sample, place], IDS[sample, place]
        gate = 3 / (1 + torch.exp(-(attention.value_gate[head] @ x[:12])))
        part = slice(128 * head, 128 * (head + 1))
        own = gate * attention.value_embedding.weight[token, part]
        expected = attention.v_proj.weight[part] @ x + own
        torch.testing.assert_close(values[sample, head, place], expected)


def test_a_cached_step_is_the_whole_again(model):
    whole = model(IDS).logits
    begun = model(IDS[:, :9], use_cache=True)
    for place in range(9, 17):
        step = model(IDS[:, place, None], past_key_values=begun.past_key_values, use_cache=True)
        torch.testing.assert_close(step.logits[:, 0], whole[:, place])
    with pytest.raises(ValueError, match="needs input_ids"):
        model(inputs_embeds=model.get_input_embeddings()(IDS))


def test_recomputed_activations_have_the_same_gradients(model):
    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(model(IDS).logits.square().mean(), [*model.train().parameters()])

    kept = gradients()
    assert all(gradient.any() for gradient in kept)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.testing.assert_close(gradients(), kept)


def test_new_tokens_add_nothing_to_values_yet(model):
    before = model(IDS).logits
    model.resize_token_embeddings(70, mean_resizing=False)
    for attention in attention_layers(model):
        table = attention.value_embedding.weight
        assert len(table) == 70 and not table[64:].any() and table.requires_grad
    torch.testing.assert_close(model(IDS).logits[..., :64], before)
    assert model(torch.tensor([[69, 3]])).logits.isfinite().all()


def test_it_loads_here_and_with_the_code_beside_it_elsewhere(model, tmp_path: Path):
    """In a process without this package: refused, unless the code in the folder may run."""
    model.float().save_pretrained(tmp_path)
    register()  # twice does no harm
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is Lfm2ValueForCausalLM
    program = """
import sys, torch
sys.modules["finetune"] = None
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code" in str(error)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
print(model(torch.arange(20)[None]).logits.double().sum().item())
"""
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", program, str(tmp_path)]
    given = {"env": environment | {"OMP_NUM_THREADS": "1"}, "cwd": tmp_path}
    loaded = subprocess.run(command, capture_output=True, text=True, **given)
    assert loaded.returncode == 0, loaded.stderr
    expected = again(torch.arange(20)[None]).logits.double().sum().item()
    assert float(loaded.stdout.splitlines()[-1]) == pytest.approx(expected, rel=1e-4, abs=1e-4)
