"""ms-swift's runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from converted_runs import (
    DIFFERS,
    SWIFT,
    TRAINED,
    converted,
    section,
)

from finetune.commands.convert.command import main
from finetune.config.fields import DataSource
from finetune.errors import ConfigError


def test_swift(capsys: Any) -> None:
    config, text = converted(SWIFT, capsys, "--devices", "2")
    assert (config.model, config.data) == (
        "Qwen/Qwen2.5-7B-Instruct",
        (
            DataSource(path="modelscope:AI-ModelScope/alpaca-gpt4-data-zh", max_samples=500),
            "own.jsonl",
        ),
    )
    assert config.global_batch_size == 16  # theirs, where accumulation is left open
    assert (config.weight_decay, config.adam_beta2, config.lora_dropout) == (0.1, 0.95, 0.05)
    assert (config.warmup_steps, config.lr_scheduler, config.eval_steps) == (0.05, "cosine", 50)
    assert config.deepspeed == {"zero_optimization": {"stage": 2}} and config.valid_split == 0.01
    assert "#500" in section(text, DIFFERS) and "system You are" in section(text, TRAINED)


def test_swift_by_yaml_with_columns(capsys: Any) -> None:
    run = {
        "model": "m",
        "train_type": "full",
        "dataset": ["d.jsonl"],
        "columns": '{"question": "query", "a": "response"}',
    }
    config, _ = converted(run, capsys)
    assert config.sources[0].columns == {"prompt": "question", "response": "a"}
    assert (config.finetuning, config.learning_rate) == ("full", 1e-5)


def test_a_file_of_megatron_is_refused(folder: Path) -> None:
    (folder / "sft.yaml").write_text("model: m\ntuner_type: lora\ndataset: [d.jsonl]\nlr: 1e-4\n")
    with pytest.raises(ConfigError, match="lr is an option of megatron"):
        main(["sft.yaml"])


def test_swift_takes_models_from_modelscope(capsys: Any, folder: Path) -> None:
    (folder / "base").mkdir()
    command = "swift sft --model owner/name --dataset d.jsonl"
    config, text = converted(command, capsys)
    assert config.hub == "modelscope" and "from ModelScope" in section(text, DIFFERS)
    for other in (f"{command} --use_hf true", f"USE_HF=1 {command}"):
        config, text = converted(other, capsys)
        assert config.hub == "huggingface" and "ModelScope" not in text
    config, text = converted(command.replace("owner/name", "base"), capsys)
    assert config.hub == "auto" and "ModelScope" not in text
