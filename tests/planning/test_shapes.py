"""A model's sizes and parameters, read off transformers' model of its configuration."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from plan_workloads import SMALL, known_shape, lora_parameters, of_kind, workload

from finetune.errors import ConfigError
from finetune.planning.memory import memory_of
from finetune.planning.shapes import (
    KNOWN_MODELS,
    ModelShape,
    known_config,
    read_shape,
    shape_of_config,
    shape_of_model,
)
from finetune.planning.traffic import computed_flops_per_token, flops_per_token
from finetune.planning.workload import Computing, Sharding, Workload

# Taken when each of these families was counted by a table of its own, without transformers. Family,
# with biases and a tied head or without: parameters, of them norms and biases, numbers in matrices
# that a token passes, the largest module, an adapter of rank 4; bytes of a device of four, trained
# whole, the same compiled, LoRA under ZeRO-3; and operations of a token.
COUNTED = {
    ("llama", False): (
        240096,
        480,
        215040,
        24576,
        13312,
        1108825472,
        1097979264,
        2098318000,
        10616832,
    ),
    ("llama", True): (
        217184,
        2144,
        215040,
        24576,
        13312,
        1108367232,
        1097521024,
        2098211568,
        10616832,
    ),
    ("mistral", False): (
        240096,
        480,
        215040,
        24576,
        13312,
        1108825472,
        1097979264,
        2098318000,
        10616832,
    ),
    ("mistral", True): (
        215520,
        480,
        215040,
        24576,
        13312,
        1108333952,
        1097487744,
        2098207408,
        10616832,
    ),
    ("ministral", False): (
        240096,
        480,
        215040,
        24576,
        13312,
        1108825472,
        1097979264,
        2098318000,
        10616832,
    ),
    ("ministral", True): (
        215520,
        480,
        215040,
        24576,
        13312,
        1108333952,
        1097487744,
        2098207408,
        10616832,
    ),
    ("qwen2", False): (
        240736,
        1120,
        215040,
        24576,
        13312,
        1108838272,
        1097992064,
        2098319600,
        10616832,
    ),
    ("qwen2", True): (
        216160,
        1120,
        215040,
        24576,
        13312,
        1108346752,
        1097500544,
        2098209008,
        10616832,
    ),
    ("qwen3", False): (
        240224,
        608,
        215040,
        24576,
        13312,
        1115119488,
        1097981824,
        2102512624,
        10616832,
    ),
    ("qwen3", True): (
        216480,
        1440,
        215040,
        24576,
        13312,
        1114644608,
        1097506944,
        2102404112,
        10616832,
    ),
    ("seed_oss", False): (
        240736,
        1120,
        215040,
        24576,
        13312,
        1108838272,
        1097992064,
        2098319600,
        10616832,
    ),
    ("seed_oss", True): (
        216992,
        1952,
        215040,
        24576,
        13312,
        1108363392,
        1097517184,
        2098211088,
        10616832,
    ),
    ("smollm3", False): (
        240096,
        480,
        215040,
        24576,
        13312,
        1108825472,
        1097979264,
        2098318000,
        10616832,
    ),
    ("smollm3", True): (
        217184,
        2144,
        215040,
        24576,
        13312,
        1108367232,
        1097521024,
        2098211568,
        10616832,
    ),
    ("granite", False): (
        240096,
        480,
        215040,
        24576,
        13312,
        1108825472,
        1097979264,
        2098318000,
        10616832,
    ),
    ("granite", True): (
        217184,
        2144,
        215040,
        24576,
        13312,
        1108367232,
        1097521024,
        2098211568,
        10616832,
    ),
    ("gemma", False): (
        240096,
        480,
        215040,
        24576,
        13312,
        1108825472,
        1097979264,
        2098318000,
        10616832,
    ),
    ("gemma", True): (
        216352,
        1312,
        215040,
        24576,
        13312,
        1108350592,
        1097504384,
        2098209488,
        10616832,
    ),
    ("gemma2", False): (
        240480,
        864,
        215040,
        24576,
        13312,
        1313682304,
        1299313536,
        2299514480,
        10616832,
    ),
    ("gemma2", True): (
        216736,
        1696,
        215040,
        24576,
        13312,
        1313305728,
        1298838656,
        2299405968,
        10616832,
    ),
    ("gemma3_text", False): (
        240608,
        992,
        215040,
        24576,
        13312,
        1121418624,
        1097989504,
        2105659312,
        10616832,
    ),
    ("gemma3_text", True): (
        216864,
        1824,
        215040,
        24576,
        13312,
        1120943744,
        1097514624,
        2105550800,
        10616832,
    ),
    ("phi3", False): (
        190944,
        480,
        165888,
        30720,
        8960,
        1102501248,
        1094800768,
        2094719152,
        5597184,
    ),
    ("phi3", True): (166368, 480, 165888, 30720, 8960, 1102009728, 1094309248, 2094608560, 5597184),
    ("olmo2", False): (
        240608,
        992,
        215040,
        24576,
        13312,
        1115127168,
        1097989504,
        2102513584,
        10616832,
    ),
    ("olmo2", True): (
        216864,
        1824,
        215040,
        24576,
        13312,
        1114652288,
        1097514624,
        2102405072,
        10616832,
    ),
    ("starcoder2", False): (
        161728,
        1984,
        135168,
        24576,
        9216,
        1100806912,
        1092188928,
        2092170592,
        5480448,
    ),
    ("starcoder2", True): (
        137152,
        1984,
        135168,
        24576,
        9216,
        1100315392,
        1091697408,
        2092060000,
        5480448,
    ),
    ("nanochat", False): (
        208896,
        0,
        184320,
        24576,
        11264,
        1107877888,
        1095327744,
        2101664256,
        10444800,
    ),
    ("nanochat", True): (
        185152,
        832,
        184320,
        24576,
        11264,
        1107403008,
        1094852864,
        2101555744,
        10444800,
    ),
}


def of_four(
    shape: ModelShape, *, lora: bool, sharding: Sharding, compiled: bool = False
) -> Workload:
    made = workload(shape, lora=lora, sharding=sharding, devices=4, local_processes=2)
    return replace(made, computing=replace(made.computing, checkpointing=False, compiled=compiled))


@pytest.mark.parametrize(("kind", "biased"), COUNTED)
def test_families_count_as_they_did_by_hand(kind: str, biased: bool):
    head = {} if kind in ("phi3", "starcoder2") else {"head_dim": 32}
    extra = {"attention_bias": biased, "mlp_bias": biased} if biased else {}
    shape = shape_of_config(
        {**SMALL, **head, **extra, "model_type": kind, "tie_word_embeddings": biased}
    )
    zero3 = of_four(
        shape, lora=True, sharding=Sharding(engine=True, stage=3, persistence_threshold=10_000)
    )
    whole, compiled = (
        of_four(shape, lora=False, sharding=Sharding(), compiled=on) for on in (False, True)
    )
    *sizes, of_whole, of_compiled, of_zero3, flops = COUNTED[kind, biased]
    assert sizes == [
        *(shape.total, shape.small, shape.passed, shape.largest_module),
        lora_parameters(shape, 4, shape.adapted("all-linear")),
    ]
    assert computed_flops_per_token(zero3) == flops
    needs = [memory_of(work).device() for work in (whole, compiled, zero3)]
    assert needs == pytest.approx([of_whole, of_compiled, of_zero3], rel=0.15)


@pytest.mark.parametrize(
    "kind", ["gpt2", "gpt_neox", "opt", "cohere2", "exaone4", "mixtral", "qwen3_next", "gemma3"]
)
def test_parameters_are_those_of_transformers(kind: str):
    from transformers import CONFIG_MAPPING

    from finetune.modeling.scratch import make_empty_model

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
def test_experts_that_do_not_compute_a_token_are_parameters_but_no_work(
    kind: str, billions: float, active: float
):
    shape = shape_of_config({"model_type": kind})
    assert shape.total / 1e9 == pytest.approx(billions, rel=0.002)
    assert (shape.total - shape.idle) / 1e9 == pytest.approx(active, rel=0.002)
    assert shape.passed < shape.total - shape.idle
    attention = 12 * shape.query_width * 2048
    work = workload(shape, lora=False, sharding=Sharding(), devices=1)
    assert flops_per_token(work) == 6 * shape.passed + attention
    assert of_kind(work, "weights") >= 4 * shape.total
    for targets in ("all-linear", ["o_proj", "down_proj"]):
        with pytest.raises(ConfigError, match="is not counted where a mixture has its experts"):
            shape.adapted(targets)


def test_operations_and_small_parameters_are_those_that_the_run_counts():
    from transformers import Qwen3Config

    from finetune.modeling.scratch import make_empty_model, scratch_config
    from finetune.planning.traffic import matrix_parameters

    for arch in ("nanochat", "qwen3", "llama", "lfm2", "lfm2_value"):
        model = make_empty_model(scratch_config(arch, 3, vocab_size=1000, max_seq_len=64))
        shape = shape_of_model(model)
        work = Workload(shape, Computing(4, 4), Sharding(), trained=shape.total, longest=64)
        own = 6 * matrix_parameters(model) + 12 * shape.query_width * 64
        assert flops_per_token(work) == own
    tied = Qwen3Config(**SMALL, head_dim=32, tie_word_embeddings=True)
    model = make_empty_model(tied)
    shape = shape_of_config(json.loads(tied.to_json_string()))
    assert shape.passed == sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert shape.small == sum(p.numel() for p in model.parameters() if p.ndim == 1)


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("qwen3", ["all-linear", ["q_proj", "down_proj"], ["v_proj", "lm_head"]]),
        ("gpt2", ["all-linear", ["c_attn"]]),
        ("qwen3_moe", [["q_proj", "o_proj"]]),
    ],
)
def test_adapters_are_as_large_as_pefts(kind: str, targets: list):
    from peft import LoraConfig, get_peft_model
    from transformers import CONFIG_MAPPING

    from finetune.modeling.scratch import make_empty_model

    config = CONFIG_MAPPING[kind](**SMALL)
    shape = shape_of_config(json.loads(config.to_json_string()))
    for wanted in targets:
        lora = LoraConfig(
            r=4, target_modules=wanted, task_type="CAUSAL_LM", fan_in_fan_out=kind == "gpt2"
        )
        adapted = get_peft_model(make_empty_model(config), lora)
        trained = [p.numel() for p in adapted.parameters() if p.requires_grad]
        assert lora_parameters(shape, 4, shape.adapted(wanted)) == sum(trained)
    with pytest.raises(ConfigError, match="W_pack"):
        shape.adapted(["W_pack"])


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_known_models_are_as_large_as_their_names_say(name: str):
    promised = float(name.rpartition("-")[2].removesuffix("B"))
    assert known_config(f"{name}-Instruct") == known_config(name)
    # Some names leave the embedding out, or round: Qwen2.5-1.5B has 1.54, Qwen3-1.7B 1.72,
    # Qwen2.5-7B 7.62.
    assert abs(known_shape(name).total / 1e9 / promised - 1) < 0.11


def test_what_no_model_can_be_made_of_is_refused(tmp_path):
    from transformers import CONFIG_MAPPING

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
    assert "secret" not in CONFIG_MAPPING
    (tmp_path / "config.json").write_text("[")
    for path in (tmp_path, tmp_path / "nothing.json"):
        with pytest.raises(ConfigError, match="configuration cannot be read"):
            read_shape(path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        read_shape(tmp_path)
