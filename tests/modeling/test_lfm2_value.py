"""Value embeddings: the formula, transformers' LFM2 without them, generation, new tokens, and where
they load.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Lfm2Config, Lfm2ForCausalLM

from finetune.modeling.lfm2_value import Lfm2ValueConfig, Lfm2ValueForCausalLM, register
from finetune.modeling.scratch import make_model, scratch_config

IDS = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model() -> Lfm2ValueForCausalLM:
    """With nothing at its zero start."""
    made = (
        make_model(scratch_config("lfm2_value", 4, vocab_size=64, max_seq_len=32), seed=0)
        .double()
        .eval()
    )
    for number, parameter in enumerate(made.parameters()):
        if not parameter.any():
            torch.nn.init.normal_(
                parameter, std=0.05, generator=torch.Generator().manual_seed(number)
            )
    return made


def attention_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [layer.self_attn for layer in model.model.layers if layer.is_attention_layer]


def test_without_their_numbers_it_is_transformers_lfm2(model):
    for attention in attention_layers(model):
        attention.value_embedding.weight.data.zero_()
    settings = {
        name: value
        for name, value in model.config.to_dict().items()
        if name not in ("model_type", "auto_map")
    }
    plain = Lfm2ForCausalLM(Lfm2Config(**settings)).double().eval()
    weights = {name: weight for name, weight in model.state_dict().items() if "value_" not in name}
    plain.load_state_dict(weights)
    assert torch.equal(plain(IDS).logits, model(IDS).logits)


def test_values_are_those_of_the_formula(model):
    attention = attention_layers(model)[1]
    states = torch.randn(
        2, 17, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    values = attention.values(states, IDS)
    for sample, place, head in [(0, 0, 0), (1, 16, 1), (1, 5, 0)]:
        x, token = states[sample, place], IDS[sample, place]
        gate = 3 / (1 + torch.exp(-(attention.value_gate[head] @ x[:12])))
        part = slice(128 * head, 128 * (head + 1))
        expected = (
            attention.v_proj.weight[part] @ x + gate * attention.value_embedding.weight[token, part]
        )
        torch.testing.assert_close(values[sample, head, place], expected)


def test_a_cached_step_is_the_whole_again(model):
    whole = model(IDS).logits
    begun = model(IDS[:, :9], use_cache=True)
    steps = [begun.logits]
    for place in range(9, IDS.shape[1]):
        step = model(
            IDS[:, place : place + 1], past_key_values=begun.past_key_values, use_cache=True
        )
        steps.append(step.logits)
    torch.testing.assert_close(torch.cat(steps, 1), whole)


def test_tokens_and_not_their_embeddings_are_asked_for(model):
    with pytest.raises(ValueError, match="needs input_ids"):
        model(inputs_embeds=model.get_input_embeddings()(IDS))


def test_recomputed_activations_have_the_same_gradients(model):
    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model.train()
        model(IDS).logits.square().mean().backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    kept = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for name, gradient in gradients().items():
        assert gradient.any(), name
        torch.testing.assert_close(gradient, kept[name])


def test_new_tokens_add_nothing_to_values_yet(model):
    before = model(IDS).logits
    model.resize_token_embeddings(70, mean_resizing=False)
    for attention in attention_layers(model):
        assert attention.value_embedding.weight.shape[0] == 70
        assert (
            not attention.value_embedding.weight[64:].any()
            and attention.value_embedding.weight.requires_grad
        )
    torch.testing.assert_close(model(IDS).logits[..., :64], before)
    assert model(torch.tensor([[69, 3]])).logits.isfinite().all()


def test_it_loads_here_and_with_the_code_beside_it_elsewhere(model, tmp_path: Path):
    """In a process without this package: refused, unless the code in the folder may run."""
    model.float().save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is Lfm2ValueForCausalLM
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"]["AutoModelForCausalLM"]
    program = (
        "import sys, torch; sys.modules['finetune'] = None\nfrom transformers import"
        " AutoModelForCausalLM\nmodel = AutoModelForCausalLM.from_pretrained(sys.argv[1],"
        " trust_remote_code=sys.argv[2] =="
        " 'trusted')\nprint(model(torch.arange(20)[None]).logits.double().sum().item())"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    environment = {
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
    }
    refused = subprocess.run(
        [*command, "not"], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert refused.returncode != 0 and "trust_remote_code" in refused.stderr
    loaded = subprocess.run(
        [*command, "trusted"], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert loaded.returncode == 0, loaded.stderr
    expected = again(torch.arange(20)[None]).logits.double().sum().item()
    assert float(loaded.stdout.splitlines()[-1]) == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_registered_twice_does_no_harm():
    register()
    register()
    assert Lfm2ValueConfig.model_type == "lfm2_value"
