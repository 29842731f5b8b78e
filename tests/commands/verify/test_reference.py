"""A model that is switched is the one that would be loaded; answers that are made together are
those made singly.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deployments import changed
from launching import ROOT
from transformers import AutoModelForCausalLM, DeepseekV3Config, MambaConfig

from finetune.commands.verify import reference
from finetune.commands.verify.conversations import choose
from finetune.commands.verify.evidence import Said
from finetune.commands.verify.reference import TRAINED, Reference, Weights
from finetune.inference.loading import Source, find_source, load_tokenizer_of

LINEAR = (("rope_type", "linear"), ("rope_theta", 100_000.0), ("factor", 4.0))
# One after another of the same reference: each leaves something that the next must not have.
SWITCHED = (
    TRAINED,
    Weights(adapter=False),
    Weights(scale=2.0),
    Weights(scale=0.3, rope=LINEAR),
    Weights(adapter=False, rope=LINEAR),
    TRAINED,
    Weights(dtype="float16"),
    Weights(dtype="float16", compute="float16"),
    Weights(dtype="float16"),
    Weights(bits=8),
    Weights(bits=8, rope=LINEAR),
    Weights(compute="float32"),
    TRAINED,
)
Make = Callable[..., Reference]


@pytest.fixture(scope="module")
def make(adapter: Path) -> Make:
    source = find_source(str(adapter), None)
    tokenizer = load_tokenizer_of(source, None, trust_remote_code=False)
    return lambda dtype="float32": Reference(
        source, tokenizer, torch.device("cpu"), dtype, trust_remote_code=False
    )


def loaded(weights: Weights) -> Weights:
    """All that only a load can give; so that nothing is cast afterwards."""
    return Weights(dtype=weights.dtype, compute=weights.compute, bits=weights.bits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_switched_says_what_is_loaded(
    dtype: str, make: Make, monkeypatch: pytest.MonkeyPatch
):
    prompt, answer = list(range(100, 130)), list(range(200, 206))
    ours = make(dtype)
    said = [ours._known.clear() or ours.said(weights, prompt, answer) for weights in SWITCHED]
    monkeypatch.setattr(Weights, "stored", property(loaded))
    assert said == [make(dtype).said(weights, prompt, answer) for weights in SWITCHED]
    base = replace(ours, source=Source(ours.source.base, None))
    assert said[SWITCHED.index(Weights(adapter=False))] == base.said(TRAINED, prompt, answer)


def test_a_stronger_adapter_is_one_with_another_alpha(make: Make, adapter: Path, tmp_path: Path):
    ours, folder = make(), tmp_path / "stronger"
    shutil.copytree(adapter, folder)
    alpha = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["lora_alpha"]
    changed(folder, "adapter_config.json", lora_alpha=2 * alpha)
    stronger = replace(ours, source=Source(ours.source.base, folder))
    assert said_of(ours, Weights(scale=2.0)) == said_of(stronger, TRAINED) != said_of(ours, TRAINED)


@pytest.mark.parametrize("model", ["qwen3", "deepseek_v3"])
def test_other_positions_are_those_of_another_config(model: str, make: Make, tmp_path: Path):
    ours, base, other = make(), tmp_path / "base", tmp_path / "other"
    if model == "qwen3":
        shutil.copytree(ours.source.base, base)
    else:
        save_deepseek(base)
    shutil.copytree(base, other)
    changed(other, "config.json", rope_parameters=dict(LINEAR))
    adapter = ours.source.adapter if model == "qwen3" else None
    ours, other = (replace(ours, source=Source(str(folder), adapter)) for folder in (base, other))
    trained = said_of(ours, TRAINED)
    assert said_of(ours, Weights(rope=LINEAR)) == said_of(other, TRAINED) != trained
    ours._known.clear()
    assert said_of(ours, TRAINED) == trained


def said_of(reference: Reference, weights: Weights) -> Said:
    return reference.said(weights, list(range(100, 130)), list(range(200, 206)))


def save_deepseek(folder: Path) -> None:
    """Its attention is scaled by YaRN's mscale."""
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    config = DeepseekV3Config(
        vocab_size=512, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, max_position_embeddings=512, initializer_range=0.5,
        rope_parameters=yarn | {"original_max_position_embeddings": 64},
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def test_weights_in_another_16_bit_format_keep_their_numbers(make: Make):
    """Few numbers of float16 are numbers of bfloat16."""
    exact, ours = make("float32"), make("bfloat16")
    ours.model(Weights(dtype="float16"))
    rounded = Weights(dtype="float16", compute="float16")
    expected = dict(exact.model(rounded).named_parameters())
    for name, parameter in ours.model(rounded).named_parameters():
        assert parameter.dtype == torch.float16 and torch.equal(parameter, expected[name]), name


def test_a_model_without_a_cache_of_keys_is_judged(make: Make, tmp_path: Path):
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=512, hidden_size=16, state_size=4, num_hidden_layers=2, initializer_range=0.5
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    mamba = replace(make(), source=Source(str(tmp_path), None))
    rounded, exact = (
        said_of(mamba, weights)
        for weights in (Weights(dtype="bfloat16", compute="bfloat16"), TRAINED)
    )
    assert rounded.logprobs == pytest.approx(exact.logprobs, abs=0.5) and rounded != exact


def test_answers_made_together_are_those_made_singly(make: Make, monkeypatch: pytest.MonkeyPatch):
    ours = make()
    prompts = choose([str(ROOT / "data_samples" / "valid.jsonl")], ours.template, 8)
    together = ours.answers(prompts, 12)
    assert len({len(prompt.ids) for prompt in prompts}) > 4
    monkeypatch.setattr(reference, "MOST_TOGETHER", 1)
    assert together == ours.answers(prompts, 12)
