"""LLaMA-Factory's runs: its examples, its data sets, and what stands apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from converted_runs import (
    DEEPSPEED,
    DIFFERS,
    EXAMPLE,
    FULL,
    PRETRAIN,
    TRAINED,
    ZERO3,
    converted,
    section,
)

from finetune.commands.convert.command import main
from finetune.config.fields import DataSource
from finetune.errors import ConfigError, FinetuneError

OF_THE_EXAMPLE = """
model: Qwen/Qwen3-4B-Instruct-2507
finetuning: lora
lora_r: 8
lora_alpha: 16
lora_dropout: 0.0
lora_target_modules: all-linear
cutoff_len: 2048
max_samples: 1000
micro_batch_size: 1
global_batch_size: 32
learning_rate: 0.0001
lr_scheduler: cosine
warmup_steps: 0.1
num_epochs: 3.0
dtype: bfloat16
use_curriculum: false
on_bad_row: drop
save_steps: 500
"""


def test_the_example_of_lora(capsys: Any) -> None:
    config, text = converted(EXAMPLE, capsys, "--devices", "4")
    expected = yaml.safe_load(OF_THE_EXAMPLE)
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.data == ("data/identity.json", "data/alpaca_en_demo.json")
    assert not section(text, TRAINED) and "plot_loss true" in text
    assert "1 a device x 8 accumulated x 4 devices" in section(text, DIFFERS)
    assert "template qwen3_nothink" in section(text, DIFFERS)
    assert "do_train" not in text and "save_only_model" not in text


def test_the_example_of_zero_3(capsys: Any) -> None:
    config, text = converted({**EXAMPLE, **ZERO3}, capsys, "--devices", "8")
    assert config.deepspeed == {"zero_optimization": {"stage": 3}}
    assert config.global_batch_size == 16 and "the file is not here: ZeRO-3 is written" in text
    Path("examples/deepspeed").mkdir(parents=True)
    Path(ZERO3["deepspeed"]).write_text(json.dumps(DEEPSPEED))
    config, text = converted({**EXAMPLE, **ZERO3}, capsys)
    assert config.deepspeed["zero_optimization"]["stage"] == 3
    assert "the file is not here" not in text
    ignored = {"comms_config": {"comms_logger": {"enabled": False}}, "monitor_config": {}}
    config, text = converted(EXAMPLE | {"deepspeed": DEEPSPEED | ignored}, capsys)
    assert not ignored.keys() & config.deepspeed.keys() and "zero_optimization" in config.deepspeed
    assert "deepspeed: comms_config" in text and "deepspeed: monitor_config" in text


def test_the_examples_of_all_parameters_and_of_pretraining(capsys: Any) -> None:
    config, text = converted({**EXAMPLE, **FULL, "output_dir": "o"}, capsys)
    assert (config.finetuning, config.learning_rate, config.global_batch_size) == ("full", 1e-5, 2)
    assert config.deepspeed and "lora" not in text.partition("\nmodel:")[2]
    config, text = converted({**EXAMPLE, **PRETRAIN}, capsys)
    (source,) = config.sources
    assert (source.path, source.columns) == ("data/c4_demo.jsonl", {"text": "text"})
    differs = section(text, DIFFERS)
    assert "texts are cut off" in differs and "template" not in differs


def test_dataset_info_is_carried_over_or_named(capsys: Any, folder: Path) -> None:
    columns = {"prompt": "question", "query": "context", "response": "answer"}
    turns = {"messages": "turns", "system": "rules", "tools": "functions", "images": "pictures"}
    tags = {"role_tag": "role", "content_tag": "content", "assistant_tag": "oracle"}
    info = {
        "a": {"file_name": "a.jsonl", "columns": columns},
        "b": {"file_name": "b.json", "formatting": "sharegpt", "columns": turns, "tags": tags},
        "c": {"hf_hub_url": "owner/name", "split": "test", "subset": "small", "num_samples": 7},
        "d": {"file_name": "d.json", "formatting": "openai"},
    }
    (folder / "data" / "dataset_info.json").write_text(json.dumps(info))
    changes = {"dataset": "a, b,c", "eval_dataset": "d"}
    changes |= {"mix_strategy": "interleave_under", "interleave_probs": "1,2,1"}
    config, text = converted({**EXAMPLE, **changes}, capsys)
    first, second, third = config.sources
    assert first.columns == {"instruction": "question", "input": "context", "output": "answer"}
    assert second.columns == {"messages": "turns", "system": "rules", "tools": "functions"}
    assert (third.path, third.columns) == ("hub:owner/name/small:test", None)
    assert [source.max_samples for source in config.sources] == [1000, 1000, 7]
    assert [source.path for source in config.valid_sources] == ["data/d.json"]
    assert config.data_weights == (1.0, 2.0, 1.0)
    named = section(text, TRAINED)
    assert "b: images" in named and "b: assistant_tag oracle" in named


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"finetuning_type": "freeze"}, "freeze has no counterpart"),
        ({"dataset": "nothing"}, "dataset_info.json has no nothing"),
        ({"dataset": None}, "names no dataset"),
        ({"lora_rank": 0}, "lora_r is 0"),
        ({"save_steps": "often"}, "a value that LLaMA-Factory does not take"),
    ],
)
def test_what_cannot_be_trained_is_refused(capsys: Any, changes, words) -> None:
    with pytest.raises(FinetuneError, match=words):
        converted({**EXAMPLE, **changes}, capsys)
    assert not Path("ours.yaml").exists()


def test_what_changes_the_training_stands_apart(capsys: Any) -> None:
    changes = {"quantization_bit": 3, "neftune_noise_alpha": 5, "mask_history": True, "misspelt": 1}
    changes |= {"lr_scheduler_type": "polynomial", "optim": "adafactor", "use_galore": True}
    run = {**EXAMPLE, **changes, "flash_attn": "fa2", "pissa_convert": False}
    config, text = converted(run, capsys)
    named = section(text, TRAINED)
    assert all(f"#   {name} " in named for name in changes), named
    assert "flash_attn fa2" in text.replace(named, "") and "pissa_convert" not in text
    assert config.lr_scheduler == "cosine"


V1 = yaml.safe_load("""
model: Qwen/Qwen3-4B
model_class: llm
peft_config: {name: lora, r: 16, lora_dropout: 0.0, target_modules: all}
kernel_config: {name: auto}
dist_config: {name: fsdp2, dcp_path: null}
train_dataset: data/sets.yaml
output_dir: outputs/v1
micro_batch_size: 2
global_batch_size: 16
learning_rate: 1.0e-5
max_steps: 10
sample_backend: hf
""")
SETS = """
identity: {file_name: data/identity.json, converter: alpaca}
more: {file_name: more.json, dataset_dir: data, num_samples: 500}
hub: {path: owner/chats, split: train_sft, weight: 2.0}
"""


def test_the_new_form(capsys: Any) -> None:
    Path("data/sets.yaml").write_text(SETS)
    config, text = converted(V1, capsys, "--devices", "4")
    more = DataSource(path="data/more.json", max_samples=500)
    assert config.data == ("data/identity.json", more, "hub:owner/chats:train_sft")
    assert (config.micro_batch_size, config.global_batch_size, config.max_steps) == (2, 16, 10)
    # what is not given has LLaMA-Factory's defaults: torch's AdamW, a constant rate, peft's alpha
    assert (config.lora_r, config.lora_alpha, config.lora_dropout) == (16, 16, 0.0)
    assert (config.learning_rate, config.lr_scheduler) == (1e-5, "constant")
    assert (config.weight_decay, config.dtype, config.save_steps) == (0.01, "bfloat16", 0)
    assert config.gradient_checkpointing and "weight 2.0" in section(text, TRAINED)
    assert "dist_config fsdp2" in text and "template not set" in section(text, DIFFERS)


def test_the_new_form_with_all_parameters_and_deepspeed(capsys: Any) -> None:
    Path("data/sets.yaml").write_text("identity: {file_name: data/identity.json}\n")
    zero = {"name": "deepspeed", "config_file": "examples/deepspeed/ds_z3_offload_config.json"}
    run = V1 | {"peft_config": None, "global_batch_size": None, "optim_config": {"name": "muon"}}
    config, text = converted(run | {"dist_config": zero, "cp_size": 2}, capsys, "--devices", "8")
    assert config.finetuning == "full" and config.global_batch_size == 2 * 8 // 2
    assert config.deepspeed["zero_optimization"]["offload_param"] == {"device": "cpu"}
    assert "optim_config" in section(text, TRAINED)
    inside = run | {"dist_config": {"name": "fsdp2", "cp_size": 2}}
    assert converted(inside, capsys, "--devices", "8")[0].global_batch_size == 2 * 8 // 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_class": "cls"}, "a model of class cls"),
        ({"global_batch_size": 15}, "no multiple of micro_batch_size 2 x 4 devices"),
        ({"train_dataset": "data/missing.yaml"}, "data/missing.yaml is not here"),
        ({"train_dataset": "data/pairs.yaml"}, "options of v1's DPO are not read"),
    ],
)
def test_the_new_form_is_refused(change: dict[str, Any], words: str) -> None:
    Path("data/sets.yaml").write_text(SETS)
    Path("data/pairs.yaml").write_text("pairs: {path: owner/pairs, converter: pair}\n")
    Path("theirs.yaml").write_text(yaml.safe_dump(V1 | change))
    with pytest.raises(ConfigError, match=words):
        main(["theirs.yaml", "--devices", "4", "--from", "llamafactory-v1"])


def test_a_start_that_would_be_refused_is_no_success(capsys: Any) -> None:
    """Records that the run's kind does not read, and a file that is not there."""
    run = {"model_name_or_path": "m", "dataset": "identity", "output_dir": "o"}
    Path("theirs.yaml").write_text(yaml.safe_dump(run))
    good = {"instruction": "q", "output": "a"}
    for content, words in (
        (None, "no such file or folder"),
        ([{"prompt": "q", "chosen": "a", "rejected": "b"}], "python -m finetune"),
        ([{"instruction": "q"}, good], "[SUCCESS]"),
    ):
        if content is not None:
            Path("data/identity.json").write_text(json.dumps(content))
        assert main(["theirs.yaml"]) == 0
        said = capsys.readouterr().err
        assert words in said and ("[SUCCESS]" in said) != ("would be refused" in said)


def test_defaults_of_theirs_are_written_out(capsys: Any) -> None:
    run = {"model_name_or_path": "m", "dataset": "identity", "output_dir": "o"}
    config, text = converted(run, capsys)
    assert "bf16 not set: there the model's own format" in section(text, DIFFERS)
    assert (config.learning_rate, config.lr_scheduler, config.warmup_steps) == (5e-5, "linear", 0)
    assert (config.lora_r, config.lora_alpha, config.global_batch_size) == (8, 16, 8)


def test_validation_best_and_early_stopping(capsys: Any) -> None:
    changes = {"val_size": 0.1, "eval_strategy": "steps", "eval_steps": 50}
    changes |= {"early_stopping_steps": 3, "load_best_model_at_end": True}
    config, _ = converted({**EXAMPLE, **changes, "metric_for_best_model": "eval_loss"}, capsys)
    assert (config.valid_split, config.eval_steps) == (0.1, 50)
    assert (config.keep_best, config.early_stopping) == (True, 3)
