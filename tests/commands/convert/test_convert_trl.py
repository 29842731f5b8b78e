"""TRL's runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from converted_runs import (
    DIFFERS,
    TRAINED,
    TRL,
    converted,
    section,
)

from finetune.commands.convert.read import read_run
from finetune.config.run_config import RunConfig


def test_trl_by_command_line(capsys: Any, folder: Path) -> None:
    script = (
        "MODEL=Qwen/Qwen2.5-0.5B\naccelerate launch --num_processes 2 trl sft \\\n "
        " --model_name_or_path ${MODEL} --dataset_name trl-lib/Capybara \\\n  --learning_rate"
        " 2.0e-4 --packing --use_peft --lora_r 32 --lora_alpha 16 --lora_target_modules q_proj"
        " k_proj --max_steps 100 --output_dir out # a comment\n"
    )
    (folder / "run.sh").write_text(script)
    config, text = converted("run.sh", capsys, "--devices", "2")
    assert (config.model, config.data, config.max_steps) == (
        "Qwen/Qwen2.5-0.5B",
        ("hub:trl-lib/Capybara",),
        100,
    )
    assert (config.learning_rate, config.lora_r, config.lora_alpha, config.lora_dropout) == (
        2e-4,
        32,
        16,
        0.05,
    )
    assert config.lora_target_modules == ("q_proj", "k_proj") and config.global_batch_size == 16
    assert (config.dtype, config.cutoff_len, config.lr_scheduler) == ("bfloat16", 1024, "linear")
    assert "TRL trains every token of a conversation" in section(text, DIFFERS)


def test_trl_by_yaml(capsys: Any) -> None:
    run = {
        "model_name_or_path": "m",
        "dataset_name": "d.jsonl",
        "dataset_text_field": "body",
        "output_dir": "o",
    }
    config, _ = converted({**run, "max_length": 512, "assistant_only_loss": True}, capsys)
    assert (config.finetuning, config.learning_rate, config.cutoff_len) == ("full", 2e-5, 512)
    assert config.sources[0].columns == {"text": "body"}


def test_options_that_are_turned_off_by_name(capsys: Any, folder: Path) -> None:
    """transformers' parser has --no_NAME for what is true by default."""
    command = "trl sft --model_name_or_path m --dataset_name d.jsonl --no_gradient_checkpointing"
    config, text = converted(f"{command} --no_remove_unused_columns", capsys)
    assert config.gradient_checkpointing is False and "look it up" not in text


def test_null_as_length_is_named(capsys: Any) -> None:
    for name in ("max_length", "max_seq_length"):
        config, text = converted({**TRL, name: None, "dataset_train_split": None}, capsys)
        assert config.cutoff_len == RunConfig.model_fields["cutoff_len"].default
        assert "max_length null: there nothing is cut" in section(text, TRAINED)
        assert "dataset_train_split null: train is written" in section(text, DIFFERS)


def test_what_trl_passes_on_to_accelerate(capsys: Any, folder: Path) -> None:
    """Behind its own name and in its YAML: processes count, the sharding is ours, ports and ranks
    are nobody's.
    """
    command = (
        "trl sft --model_name_or_path m --dataset_name d.jsonl --output_dir o"
        " --gradient_accumulation_steps 1"
    )
    options = "--num_processes 4 --num_machines 1 --main_process_port 29501 --machine_rank 0"
    config, text = converted(f"{command} {options} --accelerate_config zero3", capsys)
    assert config.global_batch_size == 8 * 4 and config.deepspeed == {
        "zero_optimization": {"stage": 3}
    }
    assert not any(
        name in text
        for name in ("num_processes", "num_machines", "main_process_port", "machine_rank")
    )
    config, text = converted(f"{command} --accelerate_config multi_gpu", capsys)
    assert config.deepspeed is None and "accelerate_config multi_gpu: its launcher's" in text
    assert section(text, TRAINED) == "" or "accelerate_config" not in section(text, TRAINED)
    config, _ = converted(f"{command} --zero_stage 2 --use_deepspeed", capsys)
    assert config.deepspeed == {"zero_optimization": {"stage": 2}}
    config, text = converted({**TRL, "num_processes": 2, "gradient_accumulation_steps": 1}, capsys)
    assert config.global_batch_size == 16 and "num_processes" not in text
    (folder / "theirs.yaml").write_text(
        "model_name_or_path: m\ndataset_name: d\noutput_dir: o\nnum_processes: 2\n"
    )
    assert read_run("trl sft --config theirs.yaml", None).processes == 2
    config, text = converted(f"{command} --num_processes 4", capsys, "--devices", "2")
    assert config.global_batch_size == 16 and "the launcher's processes 4: --devices 2" in text
