"""Axolotl's runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from converted_runs import (
    AXOLOTL,
    DIFFERS,
    TRAINED,
    converted,
    section,
)

from finetune.errors import ConfigError


def test_axolotl(capsys: Any) -> None:
    config, text = converted(AXOLOTL, capsys)
    assert (config.model, config.global_batch_size, config.num_epochs) == ("owner/base", 8, 4.0)
    assert [source.columns for source in config.sources] == [
        None,
        {"messages": "conversations"},
        {"text": "body"},
    ]
    assert (config.lora_r, config.lora_alpha, config.lora_target_modules) == (32, 16, "all-linear")
    assert (config.valid_split, config.dtype, config.lr_scheduler) == (0.05, "bfloat16", "cosine")
    assert config.warmup_steps == 0.03
    named = section(text, TRAINED)
    assert config.quantization == "int8" and "load_in_8bit true" in section(text, DIFFERS)
    assert config.modules_to_save == ("embed_tokens", "lm_head")
    for words in ("optim adamw_bnb_8bit", "roles_to_train"):
        assert words in named, words
    with pytest.raises(ConfigError, match="rl grpo"):
        converted({**AXOLOTL, "rl": "grpo"}, capsys)


def test_how_long_samples_and_old_checkpoints_end_is_said(capsys: Any) -> None:
    _, text = converted(
        {**AXOLOTL, "excess_length_strategy": "truncate", "save_total_limit": 0}, capsys
    )
    assert "there: truncate" in section(text, DIFFERS) and "drop" not in section(text, DIFFERS)
    assert "save_total_limit 0: there every checkpoint is kept" in section(text, DIFFERS)
    config, text = converted({**AXOLOTL, "save_total_limit": 1}, capsys)
    assert config.save_total_limit == 2
    assert "save_total_limit 1: 2 are kept" in section(text, DIFFERS)


def test_what_stands_behind_two_dashes_is_the_launchers(capsys: Any, folder: Path) -> None:
    (folder / "theirs.yaml").write_text(
        yaml.safe_dump({**AXOLOTL, "gradient_accumulation_steps": 1})
    )
    command = (
        "axolotl train theirs.yaml --launcher torchrun -- --nproc_per_node=4 --nnodes 2"
        " --master_port 29501"
    )
    config, text = converted(command, capsys)
    assert config.global_batch_size == 2 * 8 and "launcher " not in text and "29501" not in text


def test_moments_in_8_bits_under_deepspeed_are_float32(capsys: Any) -> None:
    """DeepSpeed shards the moments of AdamW; the run is written with it, and the option named."""
    run = {
        "base_model": "m",
        "datasets": [{"path": "own.jsonl", "type": "alpaca"}],
        "optimizer": "adamw_bnb_8bit",
        "deepspeed": "deepspeed_configs/zero2.json",
        "learning_rate": 1e-4,
        "output_dir": "o",
    }
    config, text = converted(run, capsys)
    assert config.optimizer == "adamw" and config.deepspeed is not None
    assert "adamw_bnb_8bit" in section(text, TRAINED)
    config, text = converted({**run, "deepspeed": None}, capsys)
    assert config.optimizer == "adamw-8bit"


def test_offloaded_activations_are_computed_again(capsys: Any) -> None:
    run = {"base_model": "m", "datasets": [{"path": "own.jsonl", "type": "alpaca"}]}
    run |= {"gradient_checkpointing": "offload", "output_dir": "o"}
    config, text = converted(run, capsys)
    assert config.gradient_checkpointing is True
    assert "gradient_checkpointing offload" in section(text, DIFFERS)


def test_plugins(capsys: Any) -> None:
    """Kernels of plugins change nothing; trainings of plugins are refused."""
    run = {**AXOLOTL, "liger_rope": True, "unknown_and_not_used": None, "use_swanlab": True}
    config, text = converted(run, capsys)
    assert "liger_rope" not in section(text, TRAINED) and "unknown_and" not in text
    assert "swanlab" in config.report_to
    with pytest.raises(ConfigError, match="diffusion is a training of its own"):
        converted({**AXOLOTL, "diffusion": {"noise_schedule": "cosine"}}, capsys)
