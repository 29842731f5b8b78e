"""RunConfig: ranges, cross-checks, schema. Names and defaults are in tests/frozen."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from schedules import GUIDE

from finetune.batching.curriculum import Schedule, Stage
from finetune.config.fields import CurriculumConfig, StageConfig
from finetune.config.run_config import RunConfig

NEEDED = {"model": "m", "data": "d.jsonl", "output_dir": "runs/x"}


def make(**values: object) -> RunConfig:
    return RunConfig(**{**NEEDED, **values})


def messages(**values: object) -> str:
    with pytest.raises(ValidationError) as caught:
        make(**values)
    errors = caught.value.errors()
    return "\n".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in errors)


def test_ranges():
    for name, good, bad in (
        ("cutoff_len", [2, 4096], [1, 0, -1, 2048.0, "2048", True]),
        ("global_batch_size", [1, 128, "auto"], [0, -8, "32"]),
        ("num_epochs", [0.01, 3, 3.0], [0, -1, float("nan"), float("inf"), "3", True]),
        ("learning_rate", [1e-9, 1, "auto"], [0, -1e-5, float("nan"), "2e-5"]),
        ("warmup_steps", [0, 1, 100, 0.0, 0.999], [-1, 1.0, 1.5, 100.0, -0.1, True, "0.1"]),
        ("finetuning", ["lora", "full"], ["qlora", "LoRA", None]),
        ("resume", ["auto", "never", "runs/x/checkpoint-5"], ["", None, True]),
        ("packing", [True, False], ["true", 1, None]),
        ("data", ["a", ["a", "b"], ("a",)], [[], [1], "", [""], None, {"a": 1}]),
        ("report_to", ["auto", "wandb", ["wandb", "swanlab"]], [[], "mlflow", ["auto", "wandb"]]),
        ("report_to", ["none"], [["none", "wandb"]]),
        ("lora_target_modules", ["q_proj,v_proj"], [[1], "q_proj,,v_proj"]),
        ("deepspeed", [None, {"zero_optimization": {"stage": 2}}], ["ds.json", [1]]),
    ):
        for value in good:
            make(**{name: value})
        for value in bad:
            assert name in messages(**{name: value}), f"{name}={value!r} was accepted"


def test_values_that_follow_from_what_was_written():
    assert make(lora_r=64).lora_alpha == 128 and make(lora_r=64, lora_alpha=7).lora_alpha == 7
    assert make(lora_target_modules="q_proj, v_proj").lora_target_modules == ("q_proj", "v_proj")
    assert make(lora_target_modules=["all-linear"]).lora_target_modules == "all-linear"
    assert make(report_to="wandb,tensorboard").report_to == ("wandb", "tensorboard")
    assert make(data="a,b.json").data == ("a,b.json",), "a comma may be part of a file's name"
    with pytest.raises(ValidationError, match="frozen"):
        make().seed = 3  # type: ignore[misc]


def test_settings_that_contradict():
    five = {"micro_batch_size": 5}
    assert make(**five, gradient_accumulation_steps=2).micro_batch_size == 5, "it is derived"
    valid = {"valid_data": "v"}
    for values, words in (
        ({"lerning_rate": 1.0}, "Extra inputs"),
        ({**five, "global_batch_size": 32}, "32 is not a multiple of micro_batch_size 5"),
        ({**five, "gradient_accumulation_steps": 2, "global_batch_size": 32}, "multiple"),
        ({"keep_best": True, "eval_steps": 5}, "keep_best is true, and there is no validation"),
        ({"early_stopping": 2, **valid}, "early_stopping is 2, and eval_steps 0 evaluates"),
    ):
        assert words in messages(**values)
    make(keep_best=True, early_stopping=2, eval_steps=5, **valid)


def test_the_stages_of_the_guide_are_exact():
    curriculum = make().curriculum
    stages = tuple(Stage(each.until, each.mix, each.ramp) for each in curriculum.stages)
    assert Schedule(curriculum.levels, stages) == GUIDE


def stage(until: float, mix: tuple[float, ...] = (1.0, 1.0), ramp: str = "step") -> StageConfig:
    return StageConfig(until=until, mix=mix, ramp=ramp)


def test_stages_that_are_refused():
    for levels, stages, *words in (
        ("easy hard", [stage(0.5)], "last stage ends at 0.5, not at 1.0"),
        ("easy hard", [stage(0.5), stage(0.5), stage(1.0)], "does not increase"),
        ("easy hard", [stage(0.7), stage(0.5), stage(1.0)], "does not increase"),
        ("easy hard", [stage(1.0, (0.0, 0.0))], "weights of stage 1 are all zero"),
        ("easy hard", [stage(1.0, ramp="linear")], "no mix before it"),
        ("easy easy", [stage(1.0, (1.0,))], "more than once", "stage 1 has 1 weights for 2"),
    ):
        with pytest.raises(ValidationError) as caught:
            CurriculumConfig(levels=tuple(levels.split()), stages=stages)
        assert all(word in str(caught.value) for word in words), caught.value
    for bad in ({"until": 0.0}, {"until": 1.1}, {"mix": (-1.0, 2.0)}, {"ramp": "cubic"}):
        with pytest.raises(ValidationError):
            StageConfig(**{"until": 1.0, "mix": (1.0, 1.0), **bad})
