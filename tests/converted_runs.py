"""For tests of `convert`: runs of other tools, and what becomes of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.commands.convert.command import main
from finetune.config.kinds import kind_of_arguments
from finetune.config.resolution import resolve
from finetune.config.run_config import RunConfig

# The options and values that the examples of LLaMA-Factory for Qwen3 have (August 2026).
EXAMPLE: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen3-4B-Instruct-2507",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_target": "all",
    "dataset": "identity,alpaca_en_demo",
    "template": "qwen3_nothink",
    "cutoff_len": 2048,
    "max_samples": 1000,
    "preprocessing_num_workers": 16,
    "output_dir": "saves/qwen3-4b/lora/sft",
    "logging_steps": 10,
    "save_steps": 500,
    "plot_loss": True,
    "overwrite_output_dir": True,
    "save_only_model": False,
    "report_to": "none",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "learning_rate": 1.0e-4,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
    "ddp_timeout": 180000000,
    "resume_from_checkpoint": None,
}
ZERO3 = {"deepspeed": "examples/deepspeed/ds_z3_config.json", "gradient_accumulation_steps": 2}
FULL = {"finetuning_type": "full", "learning_rate": 1.0e-5, "output_dir": "o", **ZERO3}
PRETRAIN = {"stage": "pt", "dataset": "c4_demo", "output_dir": "saves/qwen3-4b/lora/pretrain"}
INFO = {
    "identity": {"file_name": "identity.json"},
    "alpaca_en_demo": {"file_name": "alpaca_en_demo.json"},
    "c4_demo": {"file_name": "c4_demo.jsonl", "columns": {"prompt": "text"}},
    "dpo_en_demo": {
        "file_name": "dpo_en_demo.json",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "own_pairs": {
        "file_name": "own_pairs.json",
        "ranking": True,
        "columns": {"prompt": "instruction", "chosen": "better", "rejected": "worse"},
    },
    "kto_en_demo": {
        "file_name": "kto_en_demo.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "kto_tag": "label"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user"},
    },
}
DEEPSPEED = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": False,
        "reduce_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}

AXOLOTL = {
    "base_model": "owner/base",
    "load_in_8bit": True,
    "datasets": [
        {"path": "owner/alpaca", "type": "alpaca"},
        {
            "path": "chat.jsonl",
            "type": "chat_template",
            "field_messages": "conversations",
            "roles_to_train": ["user"],
        },
        {"path": "text.jsonl", "type": "completion", "field": "body"},
    ],
    "val_set_size": 0.05,
    "sequence_len": 4096,
    "sample_packing": True,
    "adapter": "lora",
    "lora_r": 32,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "lora_target_linear": True,
    "lora_modules_to_save": ["embed_tokens", "lm_head"],
    "gradient_accumulation_steps": 4,
    "micro_batch_size": 2,
    "num_epochs": 4,
    "optimizer": "adamw_bnb_8bit",
    "learning_rate": 0.0002,
    "bf16": "auto",
    "gradient_checkpointing": True,
    "evals_per_epoch": 4,
    "wandb_project": None,
}
SWIFT = (
    "CUDA_VISIBLE_DEVICES=0 swift sft --model Qwen/Qwen2.5-7B-Instruct --tuner_type lora --dataset"
    " 'AI-ModelScope/alpaca-gpt4-data-zh#500' own.jsonl --torch_dtype bfloat16 --num_train_epochs 1"
    " --learning_rate 1e-4 --lora_rank 8 --lora_alpha 32 --target_modules all-linear --eval_steps"
    " 50 --save_steps 50 --save_total_limit 2 --max_length 2048 --output_dir output --system 'You"
    " are a helpful assistant.' --warmup_ratio 0.05 --deepspeed zero2 --split_dataset_ratio 0.01"
)
SWIFT_KEYS = {"model": "m", "dataset": ["d.jsonl"], "output_dir": "o"}
TRL = {"model_name_or_path": "m", "dataset_name": "d.jsonl", "output_dir": "o"}

TRAINED, DIFFERS = "No counterpart, and it changes what is trained:", "Means something else here:"


def converted(run: dict[str, Any] | str, capsys: Any, *arguments: str) -> tuple[RunConfig, str]:
    """The run file's settings as our own reader has them, and the file's text."""
    source = run
    if isinstance(run, dict):
        source = "theirs.yaml"
        Path(source).write_text(yaml.safe_dump(run))
    assert main([str(source), "--output", "ours.yaml", *arguments]) == 0
    text, said = Path("ours.yaml").read_text(), capsys.readouterr().err
    Path("ours.yaml").unlink()
    Path("check.yaml").write_text(text)
    said, _, problem = said.partition("[WARNING]")
    # Nothing is wrong but that the data of most runs here is not here.
    assert not problem or "no such file or folder" in problem
    for line in said.partition("[SUCCESS]")[0].splitlines():  # what is said is in the file too
        assert line.strip().lstrip("#").rstrip(":").lower() in text.lower(), line
    words = ["--config", "check.yaml"]
    config = resolve(words, world_size=1, model_class=kind_of_arguments(words).config_class).config
    assert isinstance(config, RunConfig)
    return config, text


def section(text: str, words: str) -> str:
    """The lines under a heading of the comments."""
    return re.split(r"#\n|\nkind:|\nmodel:", text.partition(words)[2])[0]


def cases(table: str) -> pytest.MarkDecorator:
    """Tool, changes and what becomes of them, of each line."""
    lines = [line.partition(" -> ") for line in table.strip().splitlines()]
    named = [(*run.partition(" ")[::2], becomes) for run, _, becomes in lines]
    values = [(tool, yaml.safe_load(changes), becomes) for tool, changes, becomes in named]
    return pytest.mark.parametrize(("tool", "changes", "becomes"), values)
