"""A model's sizes and parameters, read off transformers' model of its configuration."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_workloads import SMALL, known_shape, lora_parameters, of_kind, workload

from finetune.errors import ConfigError
from finetune.planning.shapes import (
    KNOWN_MODELS,
    known_config,
    read_shape,
    shape_of_config,
)
from finetune.planning.traffic import computed_flops_per_token, flops_per_token
from finetune.planning.workload import Sharding

# Counted without transformers. Family, with biases and a tied head or without: parameters, of them
# norms and biases, numbers in matrices that a token passes, the largest module, an adapter of rank
# 4; operations of a token.
COUNTED = {
    ("llama", False): (240096, 480, 215040, 24576, 13312, 10616832),
    ("qwen3", True): (216480, 1440, 215040, 24576, 13312, 10616832),
    ("gemma2", False): (240480, 864, 215040, 24576, 13312, 10616832),
    ("phi3", False): (190944, 480, 165888, 30720, 8960, 5597184),
    ("nanochat", False): (208896, 0, 184320, 24576, 11264, 10444800),
}


@pytest.mark.parametrize(("kind", "biased"), COUNTED)
def test_families_count_as_they_did_by_hand(kind: str, biased: bool):
    own = {} if kind == "phi3" else {"head_dim": 32}
    own |= {"attention_bias": True, "mlp_bias": True} if biased else {}
    shape = shape_of_config({**SMALL, **own, "model_type": kind, "tie_word_embeddings": biased})
    work = workload(shape, lora=True, sharding=Sharding(), devices=4)
    work = replace(work, computing=replace(work.computing, checkpointing=False))
    adapter = lora_parameters(shape, 4, shape.adapted("all-linear"))
    sizes = (shape.total, shape.small, shape.passed, shape.largest_module, adapter)
    assert (*sizes, computed_flops_per_token(work)) == COUNTED[kind, biased]


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
    with pytest.raises(ConfigError, match="W_pack"):
        shape_of_config(known).adapted(["W_pack"])
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
