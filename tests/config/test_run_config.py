"""RunConfig: names, defaults, ranges, cross-checks, schema; and that nothing heavy is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from finetune.config.base_config import BaseConfig
from finetune.config.fields import GROUPS, CurriculumConfig, StageConfig, ordered_fields
from finetune.config.run_config import RunConfig

NEEDED = {"model": "m", "data": "d.jsonl", "output_dir": "runs/x"}


def make(**values: object) -> RunConfig:
    return RunConfig(**{**NEEDED, **values})


def messages(**values: object) -> str:
    with pytest.raises(ValidationError) as caught:
        make(**values)
    return "\n".join(
        f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}" for entry in caught.value.errors()
    )


def test_defaults_are_those_that_were_agreed() -> None:
    """Written by hand from the requirements, so that a changed default is noticed."""
    expected = {
        "model": "m",
        "data": ("d.jsonl",),
        "data_weights": (),
        "max_samples": None,
        "columns": None,
        "valid_data": (),
        "valid_split": None,
        "split_by": None,
        "drop_duplicates": False,
        "output_dir": "runs/x",
        "cutoff_len": 2048,
        "micro_batch_size": "auto",
        "gradient_accumulation_steps": None,
        "global_batch_size": "auto",
        "max_steps": None,
        "num_epochs": 3.0,
        "learning_rate": "auto",
        "warmup_steps": 0.03,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "lr_scheduler": "cosine",
        "finetuning": "lora",
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.0,
        "lora_target_modules": "all-linear",
        "optimizer": "adamw",
        "quantization": "none",
        "use_rslora": False,
        "use_dora": False,
        "lora_plus_ratio": None,
        "rank_pattern": None,
        "alpha_pattern": None,
        "layers_to_transform": None,
        "modules_to_save": (),
        "train_tokens": (),
        "use_curriculum": True,
        "curriculum_seed": 42,
        "difficulty_field": "difficulty",
        "dtype": "auto",
        "device_type": "auto",
        "gradient_checkpointing": "auto",
        "seed": 42,
        "save_steps": 100,
        "save_total_limit": 2,
        "async_save": True,
        "keep_best": False,
        "early_stopping": 0,
        "eval_generate": None,
        "answer_field": "answer",
        "max_new_tokens": 512,
        "best_metric": "loss",
        "eval_steps": 0,
        "logging_steps": 1,
        "report_to": "auto",
        "resume": "auto",
        "allow_data_change": False,
        "packing": True,
        "timeout_seconds": 1800,
        "fused_lora": True,
        "fused_layers": "auto",
        "npu_tuning": "none",
        "hccl_buffer_mb": None,
        "template": None,
        "hub": "auto",
        "on_bad_row": "refuse",
        "on_media": "refuse",
        "train_thinking": True,
        "log_samples": False,
        "trust_remote_code": False,
        "dataloader_num_workers": 0,
        "preprocessing_num_workers": None,
        "cache_dir": None,
        "deepspeed": None,
    }
    actual = {
        name: getattr(make(), name) for name in RunConfig.model_fields if name != "curriculum"
    }
    assert actual == expected


def test_guide_stages_are_exact() -> None:
    curriculum = make().curriculum
    assert curriculum.levels == ("explain", "reasoning", "topology")
    assert [(stage.until, stage.mix, stage.ramp) for stage in curriculum.stages] == [
        (0.3, (80, 20, 0), "step"),
        (0.7, (40, 40, 20), "step"),
        (1.0, (25, 35, 40), "step"),
    ]


def test_defaults_that_follow_from_others() -> None:
    assert make(lora_r=64).lora_alpha == 128
    assert make(lora_r=64, lora_alpha=7).lora_alpha == 7


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("cutoff_len", [2, 4096], [1, 0, -1, 2048.0, "2048", True]),
        ("micro_batch_size", [1, 32], [0, -1, 1.0, True, "1"]),
        ("global_batch_size", [1, 128, "auto"], [0, -8, "32"]),
        ("gradient_accumulation_steps", [None, 1], [0, 0.5]),
        ("max_steps", [None, 1], [0, -1, 1.5]),
        ("num_epochs", [0.01, 3, 3.0], [0, -1, float("nan"), float("inf"), "3", True]),
        ("learning_rate", [1e-9, 1, "auto"], [0, -1e-5, float("nan"), "2e-5"]),
        ("warmup_steps", [0, 1, 100, 0.0, 0.5, 0.999], [-1, 1.0, 1.5, 100.0, -0.1, True, "0.1"]),
        ("weight_decay", [0, 0.1], [-0.1]),
        ("max_grad_norm", [0, 1], [-1.0]),
        ("adam_beta1", [0, 0.9], [1, -0.1]),
        ("adam_beta2", [0, 0.999], [1, -0.1]),
        ("adam_epsilon", [1e-12], [0, -1]),
        ("lr_scheduler", ["cosine", "linear", "constant"], ["Cosine", "polynomial", None]),
        ("finetuning", ["lora", "full"], ["qlora", "LoRA", None]),
        ("lora_r", [1], [0, 1.5]),
        ("lora_dropout", [0, 0.05], [1, -0.1]),
        ("dtype", ["auto", "float32", "float16", "bfloat16"], ["bf16", None]),
        ("device_type", ["auto", "npu", "cuda", "mps", "cpu"], ["gpu", "xpu"]),
        ("gradient_checkpointing", [None, True, False], ["true", 1]),
        ("seed", [0, 2**32 - 1], [-1, 2**32]),
        ("save_steps", [0, 1], [-1]),
        ("save_total_limit", [2, 10], [1, 0]),
        ("eval_steps", [0, 1], [-1]),
        ("logging_steps", [1], [0]),
        ("timeout_seconds", [1], [0, 1800.5]),
        ("resume", ["auto", "never", "runs/x/checkpoint-5"], ["", None, True]),
        ("on_bad_row", ["refuse", "drop"], ["ignore"]),
        ("packing", [True, False], ["true", 1, None]),
        ("preprocessing_num_workers", [None, 1], [0]),
        ("model", ["a/b"], ["", 3]),
        ("data", ["a", ["a", "b"], ("a",)], [[], [1], "", [""], None, {"a": 1}]),
        ("valid_data", [[], "a", ["a"]], [[""], 1]),
        ("report_to", ["auto", "wandb", ["wandb", "swanlab"]], [[], "mlflow", ["auto", "wandb"], ["none", "wandb"]]),
        ("lora_target_modules", ["all-linear", ["q_proj"], "q_proj,v_proj"], [[], "", [1], "q_proj,,v_proj"]),
        ("deepspeed", [None, {"zero_optimization": {"stage": 2}}], ["ds.json", [1]]),
    ],
)  # fmt: skip
def test_ranges(name: str, good: list[object], bad: list[object]) -> None:
    for value in good:
        make(**{name: value})
    for value in bad:
        assert name in messages(**{name: value}), f"{name}={value!r} was accepted"


def test_names_joined_by_commas_are_separate_names() -> None:
    assert make(lora_target_modules="q_proj, v_proj").lora_target_modules == ("q_proj", "v_proj")
    assert make(lora_target_modules=["all-linear"]).lora_target_modules == "all-linear"
    assert make(report_to="wandb,tensorboard").report_to == ("wandb", "tensorboard")
    assert make(data="a,b.json").data == ("a,b.json",), "a comma may be part of a file's name"


def test_unknown_names_and_changes_are_refused() -> None:
    assert "Extra inputs" in messages(lerning_rate=1.0)
    with pytest.raises(ValidationError, match="frozen"):
        make().seed = 3  # type: ignore[misc]


def test_global_batch_must_be_a_multiple_of_the_micro_batch() -> None:
    text = messages(micro_batch_size=5, global_batch_size=32)
    assert "global_batch_size 32 is not a multiple of micro_batch_size 5" in text
    assert make(micro_batch_size=5, gradient_accumulation_steps=2).micro_batch_size == 5, (
        "the global batch is derived"
    )
    assert "multiple" in messages(
        micro_batch_size=5, gradient_accumulation_steps=2, global_batch_size=32
    )


def stage(until: float, mix: tuple[float, ...] = (1.0, 1.0), ramp: str = "step") -> StageConfig:
    return StageConfig(until=until, mix=mix, ramp=ramp)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([stage(0.5)], "last stage ends at 0.5, not at 1.0"),
        ([stage(0.5), stage(0.5), stage(1.0)], "does not increase"),
        ([stage(0.7), stage(0.5), stage(1.0)], "does not increase"),
        ([stage(1.0, (1.0,))], "stage 1 has 1 weights for 2 difficulties"),
        ([stage(1.0, (0.0, 0.0))], "weights of stage 1 are all zero"),
        ([stage(1.0, ramp="linear")], "no mix before it"),
    ],
)
def test_curriculum_rules(stages: list[StageConfig], words: str) -> None:
    with pytest.raises(ValidationError, match="(?s)" + words):
        CurriculumConfig(levels=("easy", "hard"), stages=stages)


@pytest.mark.parametrize(
    "bad", [{"until": 0.0}, {"until": 1.1}, {"mix": (-1.0, 2.0)}, {"ramp": "cubic"}]
)
def test_stage_ranges(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        StageConfig(**{"until": 1.0, "mix": (1.0, 1.0), **bad})


def test_several_rules_broken_are_told_together() -> None:
    with pytest.raises(ValidationError) as caught:
        CurriculumConfig(levels=("easy", "easy"), stages=(stage(0.4, (1.0,)), stage(0.3)))
    text = str(caught.value)
    assert all(
        words in text
        for words in ("more than once", "1 weights for 2", "does not increase", "not at 1.0")
    )


def test_schema_describes_every_field() -> None:
    properties = RunConfig.model_json_schema()["properties"]
    assert properties.keys() == RunConfig.model_fields.keys()
    for name, schema in properties.items():
        assert schema.get("description", "").endswith("."), name
        assert schema["group"] in GROUPS, name
    counted = {
        name
        for name, schema in properties.items()
        if name.endswith(("_steps", "_size", "_len", "_seconds"))
    }
    assert [name for name in sorted(counted) if "unit" not in properties[name]] == []


def test_own_fields_come_before_inherited_ones() -> None:
    names = ordered_fields(RunConfig)
    assert set(names) == set(RunConfig.model_fields)
    assert names.index("model") < names.index("output_dir") < names.index("micro_batch_size")


def test_a_second_command_can_share_the_base() -> None:
    assert "deepspeed" in BaseConfig.model_fields and "lora_r" not in BaseConfig.model_fields


def test_no_heavy_import() -> None:
    code = (
        "import sys, finetune.config.resolution\nheavy = {'torch', 'numpy', 'transformers',"
        " 'deepspeed', 'accelerate', 'datasets'} & set(sys.modules)\nassert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
