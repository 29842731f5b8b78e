"""Models from scratch: shapes by depth, the start, and the traps of transformers' NanoChat."""

from __future__ import annotations

import math
import re

import pytest
import torch

from finetune.config.run_config import RunConfig
from finetune.errors import ConfigError
from finetune.modeling.adapter import add_adapter, check_targets, linear_names
from finetune.modeling.attention import SHORT_CONVOLUTION_TYPES
from finetune.modeling.scratch import make_empty_model, make_model, scratch_config, width_and_heads
from finetune.planning.shapes import shape_of_model
from finetune.planning.traffic import flops_per_token, flops_utilisation, matrix_parameters
from finetune.planning.workload import Computing, Sharding, Workload

ARCHITECTURES = ("nanochat", "qwen3", "llama", "lfm2", "lfm2_value")


def test_shape_by_depth():
    """Width, heads, head_dim; from 2 heads of 128 on as nanochat's base_train."""
    shapes = {1: (64, 2, 32), 2: (128, 2, 64), 3: (256, 2, 128), 4: (256, 2, 128)}
    shapes |= {12: (768, 6, 128), 20: (1280, 10, 128), 26: (1664, 13, 128)}
    for depth, shape in shapes.items():
        width, heads = width_and_heads(depth)
        assert (width, heads, width // heads) == shape and width % heads == 0


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request):
    config = scratch_config(request.param, 2, vocab_size=100, max_seq_len=32)
    return make_model(config, seed=7)


def test_every_token_trains(model):
    """Trap: NanoChatConfig's pad token 1 is a padding_idx, whose embedding gets no gradient."""
    assert model.config.vocab_size == 128 and model.config.pad_token_id is None
    ids = torch.arange(32)[None]
    torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]).backward()
    assert (model.get_input_embeddings().weight.grad[:31].abs().sum(1) > 0).all()
    model.zero_grad()


def test_the_start_is_nanochats(model):
    """normal 0.8, normal 0.001, uniform of deviation 1/sqrt(width) (0.4 of it into the MLP)."""
    width = model.config.hidden_size
    seen = set()
    for name, parameter in model.named_parameters():
        deviation = parameter.detach().float().std().item()
        if parameter.ndim < 2:
            factor = 1.2 if re.search(r"\.[qk]_(layer)?norm\.", name) else 1.0
            assert (parameter == factor).all(), name
        elif "embed_tokens" in name or "lm_head" in name:
            wanted = 0.8 if "embed_tokens" in name else 0.001
            assert deviation == pytest.approx(wanted, rel=0.03)
        elif re.search(r"\.(o_proj|out_proj|fc2|down_proj|w2)\.weight$|value_gate$", name):
            assert not parameter.any(), name
            seen.add("output")
        else:
            factor = 0.4 if re.search(r"\.(fc1|gate_proj|up_proj)\.", name) else 1.0
            inputs = 4 if name.endswith("conv.conv.weight") else width  # taps of a channel
            near = 0.03 if inputs == width else 0.06
            assert deviation == pytest.approx(factor / math.sqrt(inputs), rel=near), name
            bound = factor * math.sqrt(3 / inputs)
            assert bound * 0.99 < parameter.detach().abs().max().item() <= bound * (1 + 1e-6), name
            seen.add("input")
    assert seen == {"output", "input"}


def test_the_start_depends_on_seed_and_name_only():
    state = torch.get_rng_state()
    config = scratch_config("nanochat", 1, vocab_size=64, max_seq_len=8)
    made = [make_model(config, seed=seed) for seed in (3, 3, 4)]
    assert torch.equal(state, torch.get_rng_state()), "the process's own generator was used"
    # adapters too
    given = {"model": "m", "data": "d", "output_dir": "o"}
    for model, seed in zip(made, (3, 3, 4), strict=True):
        add_adapter(model, RunConfig(**given, seed=seed), one_dtype=True)
    for (name, a), b, c in zip(
        made[0].named_parameters(), *(m.parameters() for m in made[1:]), strict=True
    ):
        assert torch.equal(a, b) and (not a.any() or not torch.equal(a, c)), name
    assert "lora_A" in str(made[0])


@pytest.mark.frozen
def test_numbers_of_the_start_are_frozen():
    """The same numbers on every machine; to change them is to change every run."""
    model = make_model(scratch_config("nanochat", 1, vocab_size=64, max_seq_len=8), seed=42)
    parameters = dict(model.named_parameters())
    for name, numbers in (
        ("model.embed_tokens.weight", [0.33896517753601074, 2.107712507247925]),
        ("model.layers.0.self_attn.q_proj.weight", [0.07233887910842896, 0.05012556165456772]),
        ("lm_head.weight", [-5.876656359760091e-05, 9.861028956947848e-05]),
    ):
        found = parameters[name].detach().flatten()[:2]
        torch.testing.assert_close(found, torch.tensor(numbers), rtol=1e-6, atol=0)


def test_lora_names(model):
    """Trap: q, k, v, o, gate, up, down would silently skip NanoChat's MLP."""
    kind, gated = model.config.model_type, ("gate_proj", "up_proj", "down_proj")
    mlps = {"nanochat": ("fc1", "fc2")} | dict.fromkeys(SHORT_CONVOLUTION_TYPES, ("w1", "w2", "w3"))
    names = mlps.get(kind, gated)
    absent = ("fc1", "fc2") if "fc1" not in names else gated
    check_targets(linear_names(model), list(names))
    with pytest.raises(ConfigError, match=absent[0]):
        check_targets(linear_names(model), [*names, *absent])


def flops_of(model, sequence: int) -> int:
    shape = shape_of_model(model)
    whole = {"trained": shape.total, "longest": sequence}
    return flops_per_token(Workload(shape, Computing(4, 4), Sharding(), **whole))


def test_flops_of_a_token_by_hand():
    """Depth 4, vocabulary 8192, sequence 512: 12 width^2 a layer and the head; 37.7 MFLOP, as
    nanochat prints. Of LFM2 two layers attend; a tap of the convolution is a number that a token
    passes.
    """
    empty = make_empty_model(scratch_config("nanochat", 4, vocab_size=8192, max_seq_len=512))
    assert matrix_parameters(empty) == 4 * 12 * 256**2 + 8192 * 256
    assert flops_of(empty, 512) == 6 * matrix_parameters(empty) + 12 * 4 * 256 * 512 == 37_748_736
    empty = make_empty_model(scratch_config("lfm2", 4, vocab_size=8192, max_seq_len=512))
    assert empty.config.layer_types == ["conv", "full_attention"] * 2
    assert matrix_parameters(empty) == 4 * (4 * 256**2 + 3 * 256 * 704) + 2 * 4 * 256 + 8192 * 256
    assert flops_of(empty, 512) == 6 * matrix_parameters(empty) + 12 * 2 * 256 * 512
    assert flops_utilisation(1000.0, 10**9, 1e13, 2) == pytest.approx(0.05)
    assert flops_utilisation(1000.0, 10**9, None, 2) is None
    for arch in ARCHITECTURES[1:]:  # about as large as nanochat
        empty = make_empty_model(scratch_config(arch, 12, vocab_size=32768, max_seq_len=512))
        assert matrix_parameters(empty) == pytest.approx(12 * 12 * 768**2 + 32768 * 768, rel=0.01)
    with pytest.raises(ValueError, match="nanochat, qwen3, llama, lfm2 and lfm2_value"):
        scratch_config("gpt5", 2, vocab_size=64, max_seq_len=8)
