"""Runs of other tools become run files that load, train what theirs trained, and name what they cannot say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.commands.convert.command import main
from finetune.commands.convert.draft import convert
from finetune.commands.convert.read import TOOLS, read_run
from finetune.config.resolution import resolve
from finetune.config.run_config import RunConfig
from finetune.data.formats import detect_format
from finetune.errors import ConfigError, FinetuneError

HERE = Path(__file__).parent

# The options and values that the examples of LLaMA-Factory for Qwen3 have (August 2026).
EXAMPLE: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen3-4B-Instruct-2507",
    "trust_remote_code": True,
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
    "dataloader_num_workers": 4,
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
FULL = {"finetuning_type": "full", "learning_rate": 1.0e-5, "output_dir": "saves/qwen3-4b/full/sft", **ZERO3}
PRETRAIN = {"stage": "pt", "dataset": "c4_demo", "output_dir": "saves/qwen3-4b/lora/pretrain"}
INFO = {
    "identity": {"file_name": "identity.json"},
    "alpaca_en_demo": {"file_name": "alpaca_en_demo.json"},
    "c4_demo": {"file_name": "c4_demo.jsonl", "columns": {"prompt": "text"}},
}
DEEPSPEED = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": False,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(INFO))
    return tmp_path


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
    for line in said.splitlines():  # everything that is said stands in the file too
        assert line.strip().lstrip("#").rstrip(":").lower() in text.lower() or line.startswith("[SUCCESS]"), line
    config = resolve(["--config", "check.yaml"], world_size=1).config
    assert isinstance(config, RunConfig)
    return config, text


def section(text: str, words: str) -> str:
    """The lines under a heading of the comments."""
    return text.partition(words)[2].partition("#\n")[0].partition("\nmodel:")[0] if words in text else ""


TRAINED, DIFFERS = "No counterpart, and it changes what is trained:", "Means something else here:"


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_every_option_of_theirs_is_mapped_or_named(tool: Any) -> None:
    names = [line for line in (HERE / f"{tool.name}.txt").read_text().split("\n") if line and line[0] != "#"]
    assert len(names) > 100 and set(names) - set(tool.options) == set()
    settings = set(RunConfig.model_fields)
    for name, option in tool.options.items():
        assert not isinstance(option, str) or option in settings, name
    assert tool.defaults.keys() <= tool.options.keys() and set(tool.aliases.values()) <= tool.options.keys()


# ------------------------------------------------------------------------------------------------- LLaMA-Factory


def test_the_example_of_lora(capsys: Any) -> None:
    config, text = converted(EXAMPLE, capsys, "--devices", "4")
    expected = {
        "model": "Qwen/Qwen3-4B-Instruct-2507",
        "data": ("data/identity.json", "data/alpaca_en_demo.json"),
        "finetuning": "lora",
        "lora_r": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "lora_target_modules": "all-linear",
        "cutoff_len": 2048,
        "micro_batch_size": 1,
        "global_batch_size": 32,
        "learning_rate": 1e-4,
        "lr_scheduler": "cosine",
        "warmup_steps": 0.1,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "num_epochs": 3.0,
        "dtype": "bfloat16",
        "seed": 42,
        "use_curriculum": False,
        "on_bad_row": "drop",
        "deepspeed": None,
        "logging_steps": 10,
        "save_steps": 500,
    }
    assert {name: getattr(config, name) for name in expected} == expected
    assert "max_samples 1000" in section(text, TRAINED) and section(text, TRAINED).count("\n") == 2
    assert "1 a device x 8 accumulated x 4 devices" in section(text, DIFFERS)
    assert "template qwen3_nothink" in section(text, DIFFERS)
    assert "plot_loss true" in text and "do_train" not in text and "save_only_model" not in text


def test_the_example_of_zero_3(capsys: Any) -> None:
    config, text = converted({**EXAMPLE, **ZERO3}, capsys, "--devices", "8")
    assert config.deepspeed == {"zero_optimization": {"stage": 3}} and config.global_batch_size == 16
    assert "the file is not here: ZeRO-3 is written" in text
    Path("examples/deepspeed").mkdir(parents=True)
    Path(ZERO3["deepspeed"]).write_text(json.dumps(DEEPSPEED))
    config, text = converted({**EXAMPLE, **ZERO3}, capsys)
    assert config.deepspeed is not None and config.deepspeed["zero_optimization"]["stage"] == 3
    assert "the file is not here" not in text


def test_the_example_of_all_parameters(capsys: Any) -> None:
    config, text = converted({**EXAMPLE, **FULL}, capsys)
    assert (config.finetuning, config.learning_rate, config.global_batch_size) == ("full", 1e-5, 2)
    assert config.deepspeed and "lora" not in text.partition("\nmodel:")[2].replace("saves/qwen3-4b/lora", "")


def test_the_example_of_pretraining(capsys: Any) -> None:
    config, text = converted({**EXAMPLE, **PRETRAIN}, capsys)
    (source,) = config.sources
    assert (source.path, source.columns) == ("data/c4_demo.jsonl", {"text": "text"})
    assert "texts are cut off" in section(text, DIFFERS) and "template" not in section(text, DIFFERS)


def test_defaults_of_theirs_are_written_out(capsys: Any) -> None:
    config, _ = converted({"model_name_or_path": "m", "dataset": "identity", "output_dir": "o"}, capsys)
    assert (config.learning_rate, config.lr_scheduler, config.warmup_steps) == (5e-5, "linear", 0)
    assert (config.lora_r, config.lora_alpha, config.global_batch_size, config.dtype) == (8, 16, 8, "float32")


def test_dataset_info_is_carried_over_or_named(capsys: Any, folder: Path) -> None:
    info = {
        "a": {"file_name": "a.jsonl", "columns": {"prompt": "question", "query": "context", "response": "answer"}},
        "b": {
            "file_name": "b.json",
            "formatting": "sharegpt",
            "columns": {"messages": "turns", "system": "rules", "tools": "functions", "images": "pictures"},
            "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "oracle"},
        },
        "c": {"hf_hub_url": "owner/name", "split": "test", "subset": "small", "num_samples": 7},
        "d": {"file_name": "d.json", "formatting": "openai"},
        "pairs": {"file_name": "p.json", "ranking": True},
    }
    (folder / "data" / "dataset_info.json").write_text(json.dumps(info))
    changes = {
        "dataset": "a, b,c",
        "eval_dataset": "d",
        "mix_strategy": "interleave_under",
        "interleave_probs": "1,2,1",
    }
    config, text = converted({**EXAMPLE, **changes}, capsys)
    first, second, third = config.sources
    assert first.columns == {"instruction": "question", "input": "context", "output": "answer"}
    assert detect_format({"question": "?", "answer": "!", "instruction": "?"}) == "alpaca"
    assert second.columns == {"messages": "turns", "system": "rules", "tools": "functions"}
    assert (third.path, third.columns) == ("owner/name", None)
    assert [source.path for source in config.valid_sources] == ["data/d.json"]
    assert config.data_weights == (1.0, 2.0, 1.0)
    named = section(text, TRAINED)
    for words in ("b: images", "b: assistant_tag oracle", "c: split test", "c: subset small", "c: num_samples 7"):
        assert words in named, words
    with pytest.raises(ConfigError, match="rankings"):
        converted({**EXAMPLE, "dataset": "pairs"}, capsys)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stage": "dpo"}, "stage dpo has no counterpart"),
        ({"finetuning_type": "freeze"}, "freeze has no counterpart"),
        ({"dataset": "nothing"}, "dataset_info.json has no nothing"),
        ({"dataset": None}, "names no dataset"),
        ({"lora_rank": 0}, "lora_r is 0"),
        ({"save_steps": "often"}, "a value that LLaMA-Factory does not take"),
    ],
)
def test_what_cannot_be_trained_is_refused(capsys: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(FinetuneError, match=words):
        converted({**EXAMPLE, **changes}, capsys)
    assert not Path("ours.yaml").exists()


def test_what_changes_the_training_stands_apart(capsys: Any) -> None:
    changes = {
        "quantization_bit": 3, "neftune_noise_alpha": 5, "mask_history": True, "use_galore": True,
        "lr_scheduler_type": "polynomial", "flash_attn": "fa2", "optim": "adafactor", "misspelt": 1,
        "pissa_convert": False,
    }  # fmt: skip
    config, text = converted({**EXAMPLE, **changes}, capsys)
    named = section(text, TRAINED)
    for name in changes.keys() - {"flash_attn", "pissa_convert"}:
        assert f"#   {name} " in named, name
    assert "flash_attn fa2" in text.replace(named, "") and "pissa_convert" not in text
    assert config.lr_scheduler == "cosine"


def test_validation_best_and_early_stopping(capsys: Any) -> None:
    changes = {"val_size": 0.1, "eval_strategy": "steps", "eval_steps": 50, "early_stopping_steps": 3}
    changes |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    config, _ = converted({**EXAMPLE, **changes}, capsys)
    assert (config.valid_split, config.eval_steps, config.keep_best, config.early_stopping) == (0.1, 50, True, 3)


# --------------------------------------------------------------------------------------------------- TRL


def test_trl_by_command_line(capsys: Any, folder: Path) -> None:
    script = (
        "MODEL=Qwen/Qwen2.5-0.5B\naccelerate launch --num_processes 2 trl sft \\\n  --model_name_or_path ${MODEL} "
        "--dataset_name trl-lib/Capybara \\\n  --learning_rate 2.0e-4 --packing --use_peft --lora_r 32 --lora_alpha 16 "
        "--lora_target_modules q_proj k_proj --max_steps 100 --output_dir out # a comment\n"
    )
    (folder / "run.sh").write_text(script)
    config, text = converted("run.sh", capsys, "--devices", "2")
    assert (config.model, config.data, config.max_steps) == ("Qwen/Qwen2.5-0.5B", ("trl-lib/Capybara",), 100)
    assert (config.learning_rate, config.lora_r, config.lora_alpha, config.lora_dropout) == (2e-4, 32, 16, 0.05)
    assert config.lora_target_modules == ("q_proj", "k_proj") and config.global_batch_size == 16
    assert (config.dtype, config.cutoff_len, config.lr_scheduler) == ("bfloat16", 1024, "linear")
    assert "TRL trains every token of a conversation" in section(text, DIFFERS)


def test_trl_by_yaml(capsys: Any) -> None:
    run = {"model_name_or_path": "m", "dataset_name": "d.jsonl", "dataset_text_field": "body", "output_dir": "o"}
    config, _ = converted({**run, "max_length": 512, "assistant_only_loss": True}, capsys)
    assert (config.finetuning, config.learning_rate, config.cutoff_len) == ("full", 2e-5, 512)
    assert config.sources[0].columns == {"text": "body"}


@pytest.mark.parametrize(
    ("tool", "run", "kind"),
    [
        ("llamafactory", {"quantization_bit": 4, "quantization_method": "bnb"}, "nf4"),
        ("trl", {"use_peft": True, "load_in_4bit": True, "use_bnb_nested_quant": True}, "nf4"),
        ("trl", {"use_peft": True, "load_in_8bit": True}, "int8"),
        ("axolotl", {"adapter": "qlora", "load_in_4bit": True, "load_in_8bit": False}, "nf4"),
        ("ms-swift", {"quant_bits": 8}, "int8"),
    ],
)
def test_a_base_in_few_bits(capsys: Any, tool: str, run: dict[str, Any], kind: str) -> None:
    base = {"llamafactory": EXAMPLE, "trl": TRL, "axolotl": AXOLOTL, "ms-swift": SWIFT_KEYS}[tool]
    config, text = converted({**base, **run}, capsys, "--from", tool)
    assert config.quantization == kind and kind in section(text, DIFFERS)
    if tool == "trl":  # of a model that is trained whole
        config, text = converted({**base, **run, "use_peft": False}, capsys, "--from", tool)
        assert config.quantization == "none" and "load_in" not in section(text, DIFFERS)


@pytest.mark.parametrize(
    ("tool", "run"),
    [
        ("llamafactory", {"use_rslora": True, "loraplus_lr_ratio": 16.0, "additional_target": "embed_tokens,lm_head"}),
        ("trl", {"use_peft": True, "use_rslora": True, "lora_modules_to_save": ["embed_tokens", "lm_head"]}),
        ("axolotl", {"peft_use_rslora": True, "loraplus_lr_ratio": 16, "lora_rank_pattern": {"q_proj": 4}}),
        ("ms-swift", {"use_rslora": True, "lorap_lr_ratio": 16.0, "modules_to_save": ["embed_tokens", "lm_head"]}),
    ],
)
def test_adapters_beyond_plain_lora(capsys: Any, tool: str, run: dict[str, Any]) -> None:
    base = {"llamafactory": EXAMPLE, "trl": TRL, "axolotl": AXOLOTL, "ms-swift": SWIFT_KEYS}[tool]
    config, text = converted({**base, **run}, capsys, "--from", tool)
    assert config.use_rslora and not config.use_dora and config.modules_to_save == ("embed_tokens", "lm_head")
    assert config.lora_plus_ratio == (None if tool == "trl" else 16)
    assert config.rank_pattern == ({"q_proj": 4} if tool == "axolotl" else None)
    assert "rslora" not in section(text, TRAINED)
    if tool == "llamafactory":
        config, text = converted({**base, **run, "finetuning_type": "full"}, capsys, "--from", tool)
        assert not config.use_rslora and "use_rslora true: all parameters are trained" in text


def test_optimizers_with_less_state(capsys: Any) -> None:
    for name, ours in (("adamw_8bit", "adamw-8bit"), ("adafactor", "adafactor"), ("lion_8bit", "adamw")):
        config, text = converted({**TRL, "optim": name}, capsys)
        assert config.optimizer == ours and ("optim lion_8bit" in text) == (name == "lion_8bit")
    config, text = converted({**TRL, "optim": "adafactor", "use_peft": True}, capsys)
    assert config.optimizer == "adamw" and "optim adafactor" in section(text, TRAINED)


# ----------------------------------------------------------------------------------------------- Axolotl


AXOLOTL = {
    "base_model": "owner/base",
    "load_in_8bit": True,
    "datasets": [
        {"path": "owner/alpaca", "type": "alpaca"},
        {"path": "chat.jsonl", "type": "chat_template", "field_messages": "conversations", "roles_to_train": ["user"]},
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


def test_axolotl(capsys: Any) -> None:
    config, text = converted(AXOLOTL, capsys)
    assert (config.model, config.global_batch_size, config.num_epochs) == ("owner/base", 8, 4.0)
    assert [source.columns for source in config.sources] == [None, {"messages": "conversations"}, {"text": "body"}]
    assert (config.lora_r, config.lora_alpha, config.lora_target_modules) == (32, 16, "all-linear")
    assert (config.valid_split, config.dtype, config.lr_scheduler) == (0.05, "bfloat16", "cosine")
    assert config.warmup_steps == 0.03
    named = section(text, TRAINED)
    assert config.quantization == "int8" and "load_in_8bit true" in section(text, DIFFERS)
    assert config.modules_to_save == ("embed_tokens", "lm_head")
    for words in ("optim adamw_bnb_8bit", "roles_to_train"):
        assert words in named, words
    with pytest.raises(ConfigError, match="rl dpo"):
        converted({**AXOLOTL, "rl": "dpo"}, capsys)


# ---------------------------------------------------------------------------------------------- ms-swift

SWIFT = (
    "CUDA_VISIBLE_DEVICES=0 swift sft --model Qwen/Qwen2.5-7B-Instruct --tuner_type lora --dataset "
    "'AI-ModelScope/alpaca-gpt4-data-zh#500' own.jsonl --torch_dtype bfloat16 --num_train_epochs 1 "
    "--learning_rate 1e-4 --lora_rank 8 --lora_alpha 32 --target_modules all-linear --eval_steps 50 --save_steps 50 "
    "--save_total_limit 2 --max_length 2048 --output_dir output --system 'You are a helpful assistant.' "
    "--warmup_ratio 0.05 --deepspeed zero2 --split_dataset_ratio 0.01"
)


def test_swift(capsys: Any) -> None:
    config, text = converted(SWIFT, capsys, "--devices", "2")
    assert (config.model, config.data) == (
        "Qwen/Qwen2.5-7B-Instruct",
        ("AI-ModelScope/alpaca-gpt4-data-zh", "own.jsonl"),
    )
    assert config.global_batch_size == 16  # theirs, where accumulation is left open
    assert (config.weight_decay, config.adam_beta2, config.lora_dropout) == (0.1, 0.95, 0.05)
    assert (config.warmup_steps, config.lr_scheduler, config.eval_steps) == (0.05, "cosine", 50)
    assert config.deepspeed == {"zero_optimization": {"stage": 2}} and config.valid_split == 0.01
    assert "#500" in section(text, TRAINED) and "system You are" in section(text, TRAINED)


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


# ------------------------------------------------------------------------------------------- the command


def test_which_tool_it_is(folder: Path) -> None:
    (folder / "unclear.yaml").write_text("learning_rate: 1.0e-4\noutput_dir: o\n")
    with pytest.raises(ConfigError, match="cannot be told which tool"):
        read_run("unclear.yaml", None)
    assert read_run("unclear.yaml", "trl")[0].name == "trl"
    commands = {
        "llamafactory-cli train --stage sft --model_name_or_path m": "llamafactory",
        "python -m torch.distributed.run --nproc-per-node 8 src/train.py --stage sft": "llamafactory",
        "axolotl train unclear.yaml": "axolotl",
        "NPROC_PER_NODE=8 swift pt --model m": "ms-swift",
        "--model_name_or_path m --dataset_name d --use_peft --max_length 5": "trl",
    }
    for command, name in commands.items():
        assert read_run(command, None)[0].name == name, command
    with pytest.raises(ConfigError, match="does not exist"):
        read_run("missing.yaml", None)
    with pytest.raises(ConfigError, match="not a command line"):
        read_run("swift sft --system 'open", None)


def test_nothing_is_overwritten(folder: Path, capsys: Any) -> None:
    (folder / "there.yaml").write_text("mine")
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        main([SWIFT, "--output", "there.yaml"])
    assert (folder / "there.yaml").read_text() == "mine"
    assert main([SWIFT]) == 0
    assert capsys.readouterr().out.startswith("# From ms-swift: a command line.")


def test_a_value_of_theirs_that_means_nothing_is_not_named() -> None:
    draft = convert(TOOLS[1], {"model_name_or_path": "m", "dataset_name": "d", "use_dora": False, "pad_token": None}, 1)
    assert not draft.trained and not draft.executed


def test_no_secret_is_shown(capsys: Any) -> None:
    names = ("swanlab_api_key", "swanlab_lark_secret", "hub_token", "hf_hub_token", "my_password", "lark_webhook_url")
    run = (
        EXAMPLE | dict.fromkeys(names, "abc-123") | {"settings": {"api-key": "abc-123", "rows": [{"token": "abc-123"}]}}
    )
    run |= {"proxy": "http://me:abc-123@mirror", "pad_token": "<|end|>"}
    _, text = converted(run, capsys)
    assert "abc-123" not in text and all(f"{name} (not shown)" in text for name in names)
    assert "'api-key': '(not shown)'" in text and "pad_token <|end|>" in text
    with pytest.raises(ConfigError) as refused:
        read_run("WANDB_API_KEY='abc-123abc-123 swift sft --model m", None)
    assert "abc-123" not in str(refused.value)


def test_a_line_that_cannot_be_read_refuses_no_other(folder: Path) -> None:
    script = "echo don't\n# it's so\nswift sft \\\r\n  --model m --dataset d.jsonl\n"
    (folder / "run.sh").write_bytes(script.encode())
    assert read_run("run.sh", None).options == {"model": "m", "dataset": "d.jsonl"}
    (folder / "run.sh").write_text("echo don't\necho \\\n  so\nswift sft --system 'open\n")
    with pytest.raises(ConfigError, match="line 4"):
        read_run("run.sh", None)


def test_what_is_no_text_of_a_run_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = f"FOLDER={'x' * 300} swift sft --model m"
    assert read_run(command, None).options == {"model": "m"}
    (folder / "model.bin").write_bytes(b"\xff\xfe\x00 --model m")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_run("model.bin", None)

    def unreadable(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", unreadable)
    with pytest.raises(ConfigError, match="Permission denied") as refused:
        read_run("model.bin", None)
    assert refused.value.fix


def test_the_longest_start_tells_the_tool(capsys: Any) -> None:
    for start in ("torchrun swift/cli/sft.py", "python -m torch.distributed.run /opt/swift/cli/sft.py"):
        assert read_run(f"{start} --model m", None).tool.name == "ms-swift"
    assert read_run("torchrun trl/scripts/sft.py --model m", None).tool.name == "trl"
    assert read_run("python examples/sft.py --model m", None).tool.name == "trl"
    with pytest.raises(ConfigError) as refused:
        converted({**EXAMPLE, "finetuning_type": "oft"}, capsys)
    assert refused.value.fix


TRL = {"model_name_or_path": "m", "dataset_name": "d.jsonl", "output_dir": "o"}
SWIFT_KEYS = {"model": "m", "dataset": ["d.jsonl"], "output_dir": "o"}


@pytest.mark.parametrize(
    ("run", "tool", "name"),
    [
        ({**AXOLOTL, "sample_packing": True}, "axolotl", "sample_packing"),
        ({**SWIFT_KEYS, "packing": True}, "ms-swift", "packing"),
        ({**TRL, "packing": True}, "trl", "packing"),
        ({**EXAMPLE, "packing": True}, "llamafactory", "packing"),
        ({**EXAMPLE, "neat_packing": True}, "llamafactory", "neat_packing"),
        ({**EXAMPLE, **PRETRAIN}, "llamafactory", "packing"),
    ],
)
def test_rows_of_packed_samples_are_named(capsys: Any, run: dict[str, Any], tool: str, name: str) -> None:
    _, text = converted(run, capsys, "--from", tool)
    assert f"#   {name} true: there a batch counts packed rows" in section(text, TRAINED)
    _, text = converted({**run, name: False, "packing": False}, capsys, "--from", tool)
    assert "packed rows" not in text


@pytest.mark.parametrize(
    ("run", "tool", "names"),
    [
        (AXOLOTL, "axolotl", "shuffle_merged_datasets"),
        (SWIFT_KEYS, "ms-swift", "dataset_shuffle train_dataloader_shuffle enable_thinking use_chat_template"),
        (EXAMPLE, "llamafactory", "enable_thinking average_tokens_across_devices"),
        (TRL, "trl", "average_tokens_across_devices"),
    ],
)
def test_false_is_named_where_true_is_what_happens_here(
    capsys: Any, run: dict[str, Any], tool: str, names: str
) -> None:
    _, text = converted({**run, **dict.fromkeys(names.split(), False)}, capsys, "--from", tool)
    assert all(f"#   {name} false: " in section(text, TRAINED) for name in names.split())
    _, text = converted({**run, **dict.fromkeys(names.split(), True)}, capsys, "--from", tool)
    assert not any(name in text for name in names.split())


@pytest.mark.parametrize(
    ("run", "tool", "norm"),
    [(TRL, "trl", 0), (EXAMPLE, "llamafactory", 0), (SWIFT_KEYS, "ms-swift", 0), (AXOLOTL, "axolotl", 1)],
)
def test_null_is_no_default_where_it_says_something(capsys: Any, run: dict[str, Any], tool: str, norm: float) -> None:
    config, _ = converted({**run, "max_grad_norm": None}, capsys, "--from", tool)
    assert config.max_grad_norm == norm


def test_null_as_length_is_named(capsys: Any) -> None:
    for name in ("max_length", "max_seq_length"):
        config, text = converted({**TRL, name: None, "dataset_train_split": None}, capsys)
        assert config.cutoff_len == RunConfig.model_fields["cutoff_len"].default
        assert "max_length null: there nothing is cut" in section(text, TRAINED)
        assert "dataset_train_split null: train is written" in section(text, DIFFERS)


@pytest.mark.parametrize(
    ("run", "tool", "size"),
    [
        ({**SWIFT_KEYS, "sequence_parallel_size": 4, "gradient_accumulation_steps": 3}, "ms-swift", 6),
        ({**SWIFT_KEYS, "sequence_parallel_size": 4}, "ms-swift", 4),  # 2 accumulated, by all 8 devices
        ({**SWIFT_KEYS, "deepspeed_autotp_size": 2}, "ms-swift", 8),
        ({**AXOLOTL, "context_parallel_size": 2, "tensor_parallel_size": 2}, "axolotl", 16),
        ({**AXOLOTL, "sequence_parallel_degree": 8}, "axolotl", 8),
    ],
)
def test_devices_that_share_samples_count_once(capsys: Any, run: dict[str, Any], tool: str, size: int) -> None:
    config, text = converted(run, capsys, "--from", tool, "--devices", "8")
    assert config.global_batch_size == size and "that share every sample there" in section(text, DIFFERS)
    with pytest.raises(ConfigError, match="does not divide 1"):
        converted(run, capsys, "--from", tool)


@pytest.mark.parametrize(
    ("command", "processes"),
    [
        ("NPROC_PER_NODE=8 swift sft", 8),
        ("N=4\nexport NPROC_PER_NODE=$N NNODES=2\ncd runs && swift sft", 8),
        ("cd runs && env NPROC_PER_NODE=2 swift sft", 2),
        ("torchrun --nproc_per_node 4 --nnodes=2 swift/cli/sft.py", 8),
        ("python -m torch.distributed.run --nproc-per-node=4 swift/cli/sft.py", 4),
        ("accelerate launch --num_machines 2 --num_processes 16 swift/cli/sft.py", 16),
        ("torchrun --nproc_per_node gpu swift/cli/sft.py", None),
        ("swift sft", None),
    ],
)
def test_the_launcher_says_how_many_devices(capsys: Any, command: str, processes: int | None) -> None:
    command += " --model m --dataset d.jsonl --gradient_accumulation_steps 1"
    config, text = converted(command, capsys)
    assert read_run(command, None).processes == processes
    assert config.global_batch_size == (processes or 1) and "launcher's" not in text
    config, text = converted(command, capsys, "--devices", "32")
    assert config.global_batch_size == 32
    assert (f"the launcher's processes {processes}: --devices 32" in text) == (processes is not None)


@pytest.mark.parametrize(("run", "tool"), [(EXAMPLE, "llamafactory"), (TRL, "trl"), (SWIFT_KEYS, "ms-swift")])
def test_the_revision_is_part_of_the_name(capsys: Any, folder: Path, run: dict[str, Any], tool: str) -> None:
    name = "model" if tool == "ms-swift" else "model_name_or_path"
    config, text = converted({**run, "model_revision": "v1"}, capsys, "--from", tool)
    assert config.model == f"{run[name]}@v1" and "model_revision" not in text
    config, _ = converted({**run, "model_revision": "main"}, capsys, "--from", tool)
    assert config.model == run[name]
    (folder / "base").mkdir()
    config, text = converted({**run, name: "base", "model_revision": "v1"}, capsys, "--from", tool)
    assert config.model == "base" and "model_revision v1" in section(text, TRAINED)


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


def test_how_long_samples_and_old_checkpoints_end_is_said(capsys: Any) -> None:
    _, text = converted({**AXOLOTL, "excess_length_strategy": "truncate", "save_total_limit": 0}, capsys)
    assert "there: truncate" in section(text, DIFFERS) and "drop" not in section(text, DIFFERS)
    assert "save_total_limit 0: there every checkpoint is kept" in section(text, DIFFERS)
