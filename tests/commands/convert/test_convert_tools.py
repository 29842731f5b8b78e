"""Runs of Axolotl, ms-swift and TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from converted_runs import AXOLOTL, DIFFERS, SWIFT, TRAINED, TRL, converted, section

from finetune.commands.convert.command import main
from finetune.commands.convert.read import read_run
from finetune.config.fields import DataSource
from finetune.errors import ConfigError

PLAIN = {"base_model": "m", "datasets": [{"path": "own.jsonl", "type": "alpaca"}]}


def test_axolotl(capsys: Any) -> None:
    config, text = converted(AXOLOTL, capsys)
    assert (config.model, config.global_batch_size, config.num_epochs) == ("owner/base", 8, 4.0)
    columns = [source.columns for source in config.sources]
    assert columns == [None, {"messages": "conversations"}, {"text": "body"}]
    assert (config.lora_r, config.lora_alpha, config.lora_target_modules) == (32, 16, "all-linear")
    assert (config.valid_split, config.dtype, config.lr_scheduler) == (0.05, "bfloat16", "cosine")
    assert config.warmup_steps == 0.03 and config.modules_to_save == ("embed_tokens", "lm_head")
    assert config.quantization == "int8" and "load_in_8bit true" in section(text, DIFFERS)
    named = section(text, TRAINED)
    assert "optim adamw_bnb_8bit" in named and "roles_to_train" in named


def test_what_stands_behind_two_dashes_is_the_launchers(capsys: Any, folder: Path) -> None:
    run = {**AXOLOTL, "gradient_accumulation_steps": 1}
    (folder / "theirs.yaml").write_text(yaml.safe_dump(run))
    options = "--nproc_per_node=4 --nnodes 2 --master_port 29501"
    command = f"axolotl train theirs.yaml --launcher torchrun -- {options}"
    config, text = converted(command, capsys)
    assert config.global_batch_size == 2 * 8 and "launcher " not in text and "29501" not in text


def test_moments_in_8_bits_under_deepspeed_are_float32(capsys: Any) -> None:
    """DeepSpeed shards the moments of AdamW; the run is written with it, and the option named."""
    run = PLAIN | {"optimizer": "adamw_bnb_8bit", "deepspeed": "deepspeed_configs/zero2.json"}
    config, text = converted(run, capsys)
    assert config.optimizer == "adamw" and config.deepspeed is not None
    assert "adamw_bnb_8bit" in section(text, TRAINED)
    assert converted({**run, "deepspeed": None}, capsys)[0].optimizer == "adamw-8bit"


def test_plugins(convert) -> None:
    """Kernels of plugins change nothing; trainings of plugins are refused."""
    changes = {"liger_rope": True, "unknown_and_not_used": None, "use_swanlab": True}
    config, text = convert("axolotl", changes)
    assert "liger_rope" not in section(text, TRAINED) and "unknown_and" not in text
    assert "swanlab" in config.report_to
    with pytest.raises(ConfigError, match="diffusion is a training of its own"):
        convert("axolotl", {"diffusion": {"noise_schedule": "cosine"}})


def test_swift(capsys: Any) -> None:
    config, text = converted(SWIFT, capsys, "--devices", "2")
    hub = DataSource(path="modelscope:AI-ModelScope/alpaca-gpt4-data-zh", max_samples=500)
    assert (config.model, config.data) == ("Qwen/Qwen2.5-7B-Instruct", (hub, "own.jsonl"))
    assert config.global_batch_size == 16  # theirs, where accumulation is left open
    assert converted(SWIFT, capsys, "--devices", "3")[0].global_batch_size == 18  # not fewer
    assert (config.weight_decay, config.adam_beta2, config.lora_dropout) == (0.1, 0.95, 0.05)
    assert (config.warmup_steps, config.lr_scheduler, config.eval_steps) == (0.05, "cosine", 50)
    assert config.deepspeed == {"zero_optimization": {"stage": 2}} and config.valid_split == 0.01
    assert "#500" in section(text, DIFFERS) and "system You are" in section(text, TRAINED)


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
    hubs = "swift sft --model m --dataset HF::owner/texts:full#7 MS::owner/more"
    full = DataSource(path="hub:owner/texts/full", max_samples=7)
    assert converted(hubs, capsys)[0].data == (full, "modelscope:owner/more")


def test_trl_by_command_line(capsys: Any, folder: Path) -> None:
    script = (
        "MODEL=Qwen/Qwen2.5-0.5B\naccelerate launch --num_processes 2 trl sft \\\n "
        " --model_name_or_path ${MODEL} --dataset_name trl-lib/Capybara \\\n  --learning_rate"
        " 2.0e-4 --packing --use_peft --lora_r 32 --lora_alpha 16 --lora_target_modules q_proj"
        " k_proj --max_steps 100 --output_dir out # a comment\n"
    )
    (folder / "run.sh").write_text(script)
    config, text = converted("run.sh", capsys, "--devices", "2")
    assert (config.model, config.data) == ("Qwen/Qwen2.5-0.5B", ("hub:trl-lib/Capybara",))
    assert (config.learning_rate, config.max_steps, config.global_batch_size) == (2e-4, 100, 16)
    assert (config.lora_r, config.lora_alpha, config.lora_dropout) == (32, 16, 0.05)
    assert config.lora_target_modules == ("q_proj", "k_proj")
    assert (config.dtype, config.cutoff_len, config.lr_scheduler) == ("bfloat16", 1024, "linear")
    assert "TRL trains every token of a conversation" in section(text, DIFFERS)


def test_what_trl_passes_on_to_accelerate(convert, capsys: Any, folder: Path) -> None:
    """Processes count; ports and ranks do not."""
    command = "trl sft --model_name_or_path m --dataset_name d.jsonl --output_dir o"
    command += " --gradient_accumulation_steps 1"
    options = "--num_processes 4 --num_machines 1 --main_process_port 29501 --machine_rank 0"
    config, text = converted(f"{command} {options} --accelerate_config zero3", capsys)
    assert config.global_batch_size == 8 * 4
    assert config.deepspeed == {"zero_optimization": {"stage": 3}}
    assert not any(name.lstrip("-") in text for name in options.split()[::2])
    config, text = converted(f"{command} --accelerate_config multi_gpu", capsys)
    assert config.deepspeed is None and "accelerate_config multi_gpu: its launcher's" in text
    assert "accelerate_config" not in section(text, TRAINED)
    config, _ = converted(f"{command} --zero_stage 2 --use_deepspeed", capsys)
    assert config.deepspeed == {"zero_optimization": {"stage": 2}}
    config, text = convert("trl", {"num_processes": 2, "gradient_accumulation_steps": 1})
    assert config.global_batch_size == 16 and "num_processes" not in text
    (folder / "theirs.yaml").write_text(yaml.safe_dump({**TRL, "num_processes": 2}))
    run = read_run("trl sft --config theirs.yaml --output_dir p", None)
    assert run.processes == 2 and (run.options["output_dir"], run.options["dataset_name"]) == (
        "p",  # the command line counts more
        "d.jsonl",
    )
