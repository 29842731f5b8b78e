"""A model's sizes and parameters, read off transformers' model of its configuration."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from peft import LoraConfig, get_peft_model
from plan_workloads import SMALL, known_shape, lora_parameters, of_kind, workload
from transformers import CONFIG_MAPPING

from finetune.errors import ConfigError
from finetune.modeling.scratch import make_empty_model
from finetune.planning.memory import memory_of
from finetune.planning.shapes import (
    KNOWN_MODELS,
    known_config,
    read_shape,
    shape_of_config,
    shape_of_model,
)
from finetune.planning.traffic import computed_flops_per_token, flops_per_token
from finetune.planning.workload import Sharding

# Counted without transformers. Family, with biases and a tied head or without: parameters, of them
# norms and biases, numbers in matrices that a token passes, the largest module, an adapter of rank
# 4; MB of a device of four, trained whole, the same compiled, LoRA under ZeRO-3; operations of a
# token.
COUNTED = {
    ("llama", False): (240096, 480, 215040, 24576, 13312, 1109, 1098, 2098, 10616832),
    ("qwen3", True): (216480, 1440, 215040, 24576, 13312, 1115, 1098, 2102, 10616832),
    ("gemma2", False): (240480, 864, 215040, 24576, 13312, 1314, 1299, 2300, 10616832),
    ("phi3", False): (190944, 480, 165888, 30720, 8960, 1103, 1095, 2095, 5597184),
    ("nanochat", False): (208896, 0, 184320, 24576, 11264, 1108, 1095, 2102, 10444800),
}


def of_four(shape, *, lora, sharding, compiled=False):
    made = workload(shape, lora=lora, sharding=sharding, devices=4, local_processes=2)
    return replace(made, computing=replace(made.computing, checkpointing=False, compiled=compiled))


@pytest.mark.parametrize(("kind", "biased"), COUNTED)
def test_families_count_as_they_did_by_hand(kind: str, biased: bool):
    own = {} if kind == "phi3" else {"head_dim": 32}
    own |= {"attention_bias": True, "mlp_bias": True} if biased else {}
    shape = shape_of_config({**SMALL, **own, "model_type": kind, "tie_word_embeddings": biased})
    stage3 = Sharding(engine=True, stage=3, persistence_threshold=10_000)
    works = [of_four(shape, lora=False, sharding=Sharding(), compiled=on) for on in (False, True)]
    works.append(of_four(shape, lora=True, sharding=stage3))
    *sizes, of_whole, of_compiled, of_zero3, flops = COUNTED[kind, biased]
    adapter = lora_parameters(shape, 4, shape.adapted("all-linear"))
    assert sizes == [shape.total, shape.small, shape.passed, shape.largest_module, adapter]
    assert computed_flops_per_token(works[-1]) == flops
    needs = [memory_of(work).device() / 1e6 for work in works]
    assert needs == pytest.approx([of_whole, of_compiled, of_zero3], rel=0.15)


@pytest.mark.parametrize("kind", ["gpt2", "opt", "mixtral", "qwen3_next", "gemma3"])
def test_parameters_are_those_of_transformers(kind: str):
    model = make_empty_model(CONFIG_MAPPING[kind]())
    shape = shape_of_model(model)
    matrices = sum(matrix.size for matrix in shape.matrices if not matrix.is_end)
    heads = shape.embedding * (1 if shape.tied else 2)
    assert shape.total == sum(parameter.numel() for parameter in model.parameters())
    assert shape.small + matrices + heads == shape.total


@pytest.mark.parametrize(
    # as they are published: Mixtral 8x7B, DeepSeek-V3, GPT-OSS-120B
    ("kind", "billions", "active"),
    [("mixtral", 46.7, 12.9), ("deepseek_v3", 671, 37.6), ("gpt_oss", 116.8, 5.75)],
)
def test_experts_that_do_not_compute_a_token_are_parameters_but_no_work(kind, billions, active):
    shape = shape_of_config({"model_type": kind})
    assert shape.total / 1e9 == pytest.approx(billions, rel=0.002)
    assert (shape.total - shape.idle) / 1e9 == pytest.approx(active, rel=0.002)
    assert shape.passed < shape.total - shape.idle
    attention = 12 * shape.query_width * 2048
    work = workload(shape, lora=False, sharding=Sharding(), devices=1)
    assert flops_per_token(work) == 6 * shape.passed + attention
    assert of_kind(work, "weights") >= 4 * shape.total
    with pytest.raises(ConfigError, match="is not counted where a mixture has its experts"):
        shape.adapted("all-linear")


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("qwen3", ["all-linear", ["q_proj", "down_proj"], ["v_proj", "lm_head"]]),
        ("gpt2", ["all-linear", ["c_attn"]]),
        ("qwen3_moe", [["q_proj", "o_proj"]]),
    ],
)
def test_adapters_are_as_large_as_pefts(kind: str, targets: list):
    config = CONFIG_MAPPING[kind](**SMALL)
    shape = shape_of_config(json.loads(config.to_json_string()))
    for wanted in targets:
        settings = {"target_modules": wanted, "fan_in_fan_out": kind == "gpt2"}
        lora = LoraConfig(r=4, task_type="CAUSAL_LM", **settings)
        adapted = get_peft_model(make_empty_model(config), lora)
        trained = [p.numel() for p in adapted.parameters() if p.requires_grad]
        assert lora_parameters(shape, 4, shape.adapted(wanted)) == sum(trained)
    with pytest.raises(ConfigError, match="W_pack"):
        shape.adapted(["W_pack"])


def test_known_models_are_as_large_as_their_names_say():
    for name in KNOWN_MODELS:
        promised = float(name.rpartition("-")[2].removesuffix("B"))
        assert known_config(f"{name}-Instruct") == known_config(name)
        # some names leave the embedding out, or round: Qwen2.5-7B has 7.62
        assert abs(known_shape(name).total / 1e9 / promised - 1) < 0.11, name


def test_what_no_model_can_be_made_of_is_refused(tmp_path):
    own_code = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.X"}
    for model_type in ("secret", None):
        with pytest.raises(ConfigError, match="a model's own code is not run here"):
            shape_of_config({**SMALL, "model_type": model_type, "auto_map": own_code})
    known = {**SMALL, "model_type": "llama"}
    assert shape_of_config({**known, "auto_map": own_code}) == shape_of_config(known)
    for wrong, match in (
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_attention_heads": 0}, "no plan can be made of this llama"),
        ({"model_type": "vit"}, "ViTConfig"),
        ({"model_type": "qwen3_moe", "num_experts_per_tok": None}, "num_experts_per_tok"),
    ):
        with pytest.raises(ConfigError, match=match):
            shape_of_config({**known, **wrong})
    (tmp_path / "config.json").write_text("[")
    for path in (tmp_path, tmp_path / "nothing.json"):
        with pytest.raises(ConfigError, match="configuration cannot be read"):
            read_shape(path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        read_shape(tmp_path)
