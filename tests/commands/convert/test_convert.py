"""Runs of other tools become run files that load, and name what they cannot express."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from converted_runs import DIFFERS, EXAMPLE, SWIFT, TRAINED, cases, converted, section

from finetune.commands.convert.command import main
from finetune.commands.convert.read import TOOLS, read_run
from finetune.config.run_config import RunConfig
from finetune.errors import ConfigError

HERE = Path(__file__).parent


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_every_option_of_theirs_is_mapped_or_named(tool: Any) -> None:
    lines = (HERE / f"{tool.name}.txt").read_text().splitlines()
    names = {line for line in lines if line and line[0] != "#"}
    assert len(names) > 30 and not names - set(tool.options)
    settings = set(RunConfig.model_fields)
    assert settings.issuperset(tool.settings.values()) and tool.always.keys() <= settings
    assert all(row.settings.keys() <= settings for row in tool.rows)
    assert {*tool.defaults, *tool.aliases.values()} <= tool.options


TOOL_OF = {
    "llamafactory-cli train --stage sft --model_name_or_path m": "llamafactory",
    "python -m torch.distributed.run --nproc-per-node 8 src/train.py --stage sft": "llamafactory",
    "axolotl train unclear.yaml": "axolotl",
    "NPROC_PER_NODE=8 swift pt --model m": "ms-swift",
    "python -m torch.distributed.run /opt/swift/cli/sft.py --model m": "ms-swift",
    "torchrun trl/scripts/sft.py --model m": "trl",
    "python examples/sft.py --model m": "trl",
    "--model_name_or_path m --dataset_name d --use_peft --max_length 5": "trl",
}
UNCLEAR = "learning_rate: 1.0e-4\noutput_dir: o\n"
KEY = "hf_" + "Aa0" * 8
# A run -> what is said of it; those with a file have its content too.
UNREADABLE = {
    "unclear.yaml": ("cannot be told which tool", UNCLEAR.encode()),
    "fsdp.yaml": (
        "configuration of accelerate's launcher",
        b"compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 8\n",
    ),
    "model.bin": ("not UTF-8", b"\xff\xfe\x00 --model m"),
    "run.sh": ("line 4", b"echo x\necho \\\n  so\nswift sft --system 'open\n"),
    "missing.yaml": ("does not exist", None),
    "missing": ("there is no such file", None),
    f"WANDB_API_KEY='{KEY} swift sft --model m": ("not a command line", None),
    f"swift sft {KEY} --model m": ("belongs to no option", None),
    "swift export --model m --dataset own.jsonl": ("does not train, or is not read", None),
    "PORT=1 megatron rlhf --model m --lr 1e-5": ("megatron rlhf has options of its own", None),
    "accelerate launch --config_file none.yaml sft.py --dataset_name own": (
        "accelerate's file none.yaml is not here",
        None,
    ),
}


def test_which_tool_it_is(folder: Path) -> None:
    (folder / "unclear.yaml").write_text(UNCLEAR)
    assert read_run("unclear.yaml", "trl").tool.name == "trl"
    assert {command: read_run(command, None).tool.name for command in TOOL_OF} == TOOL_OF
    assert read_run(f"FOLDER={'x' * 300} swift sft --model m", None).options == {"model": "m"}


@pytest.mark.parametrize("run", UNREADABLE, ids=lambda run: run[:20])
def test_what_is_no_run_is_refused(folder: Path, run: str) -> None:
    words, content = UNREADABLE[run]
    if content is not None:
        (folder / run).write_bytes(content)
    with pytest.raises(ConfigError, match=words) as refused:
        read_run(run, None)
    assert refused.value.fix and KEY not in str(refused.value)


def test_a_file_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "run.sh").touch()
    refused = PermissionError(13, "Permission denied")
    monkeypatch.setattr(Path, "read_text", mock.Mock(side_effect=refused))
    with pytest.raises(ConfigError, match="Permission denied"):
        read_run("run.sh", None)


def test_lines_that_do_not_train_refuse_no_other(folder: Path) -> None:
    for other in ("echo don't\n# it's so", "swift export --model m --quant_bits 4"):
        script = f"{other}\nswift sft \\\r\n  --model m --dataset d.jsonl\n"
        (folder / "run.sh").write_bytes(script.encode())
        assert read_run("run.sh", None).options == {"model": "m", "dataset": "d.jsonl"}


def test_nothing_is_overwritten(folder: Path, capsys: Any) -> None:
    (folder / "there.yaml").write_text("mine")
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        main([SWIFT, "--output", "there.yaml"])
    assert (folder / "there.yaml").read_text() == "mine"
    assert main([SWIFT]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("# From ms-swift: a command line.")
    # SWIFT's data is not here: that is not called a success
    assert "[WARNING] converted from ms-swift" in shown.err and "where: own.jsonl" in shown.err
    (folder / "own.jsonl").write_text('{"instruction": "q", "output": "a"}\n')
    assert main([SWIFT, "--output", "new.yaml"]) == 0
    start = "[SUCCESS] converted from ms-swift; start it: python -m finetune.sft --config new.yaml"
    assert start in capsys.readouterr().err


def test_no_secret_is_shown(capsys: Any) -> None:
    names = ["swanlab_api_key", "hf_hub_token", "my_password", "lark_webhook_url"]
    digits, url = "0123456789abcdef" * 2 + "01234567", f"https://u:{'p' * 9}@host/x"
    run = EXAMPLE | dict.fromkeys(names, "abc-123")
    run |= {"settings": {"api-key": "abc-123", "rows": [{"token": "abc-123"}]}}
    run |= {"pad_token": "<|end|>", "run_hint": f"see {KEY}", "note": "sk-" + "b" * 20}
    run |= {"extra": ["--api-key=" + "Q" * 12, f"wandb {digits}"], "lookup": url}
    _, text = converted(run | {"neftune_noise_alpha": f"Bearer {'z' * 16}"}, capsys)
    for secret in ("abc-123", KEY, "Q" * 12, digits, "b" * 20, "z" * 16, "p" * 9):
        assert secret not in text
    assert all(f"{name} (not shown)" in text for name in names)
    for shown in ("'api-key': '(not shown)'", "pad_token <|end|>", "run_hint see ***"):
        assert shown in text
    with pytest.raises(ConfigError, match="does not take") as refused:
        converted(EXAMPLE | {"save_steps": f"often {KEY}"}, capsys)
    assert KEY not in str(refused.value)


def test_false_is_named_where_true_is_what_happens_here(convert) -> None:
    for tool, names in (
        ("axolotl", "shuffle_merged_datasets"),
        ("ms-swift", "dataset_shuffle train_dataloader_shuffle enable_thinking use_chat_template"),
        ("llamafactory", "enable_thinking average_tokens_across_devices"),
        ("trl", "average_tokens_across_devices"),
    ):
        _, text = convert(tool, dict.fromkeys(names.split(), False))
        assert all(f"#   {name} false: " in section(text, TRAINED) for name in names.split())
        _, text = convert(tool, dict.fromkeys(names.split(), True))
        assert not any(name in text for name in names.split())


def test_devices_that_share_samples_count_once(convert) -> None:
    for tool, changes, size in (
        ("ms-swift", {"sequence_parallel_size": 4, "gradient_accumulation_steps": 3}, 6),
        ("ms-swift", {"sequence_parallel_size": 4}, 4),  # 2 accumulated, by all 8 devices
        ("axolotl", {"context_parallel_size": 2, "tensor_parallel_size": 2}, 16),
        ("axolotl", {"sequence_parallel_degree": 8}, 8),
    ):
        config, text = convert(tool, changes, "--devices", "8")
        assert config.global_batch_size == size
        assert "that share every sample there" in section(text, DIFFERS)
    with pytest.raises(ConfigError, match="does not divide 1"):
        convert(tool, changes)


@pytest.mark.parametrize(
    ("command", "processes"),
    [
        ("N=4\nexport NPROC_PER_NODE=$N NNODES=2\ncd runs && swift sft", 8),
        ("cd runs && env NPROC_PER_NODE=2 swift sft", 2),
        ("torchrun --nproc_per_node 4 --nnodes=2 swift/cli/sft.py", 8),
        ("accelerate launch --num_machines 2 --num_processes 16 swift/cli/sft.py", 16),
        ("torchrun --nproc_per_node gpu swift/cli/sft.py", None),
        ("swift sft --num_processes 4 --main_process_port 29501", 4),
    ],
)
def test_the_launcher_says_how_many_devices(capsys: Any, command: str, processes: Any) -> None:
    command += " --model m --dataset d.jsonl --gradient_accumulation_steps 1"
    config, text = converted(command, capsys)
    assert read_run(command, None).processes == processes
    assert config.global_batch_size == (processes or 1) and "launcher's" not in text
    config, text = converted(command, capsys, "--devices", "32")
    assert config.global_batch_size == 32
    assert (f"the launcher's processes {processes}: --devices 32" in text) == bool(processes)


def test_the_revision_is_part_of_the_name(convert, folder: Path) -> None:
    (folder / "base").mkdir()
    for tool, name in (("llamafactory", "model_name_or_path"), ("ms-swift", "model")):
        config, text = convert(tool, {name: "owner/base", "model_revision": "v1"})
        assert config.model == "owner/base@v1" and "model_revision" not in text
        config, _ = convert(tool, {name: "owner/base", "model_revision": "main"})
        assert config.model == "owner/base"
        config, text = convert(tool, {name: "base", "model_revision": "v1"})
        assert config.model == "base" and "model_revision v1" in section(text, TRAINED)


BOTH = ["embed_tokens", "lm_head"]
RSLORA = {
    "llamafactory": {"loraplus_lr_ratio": 16.0, "additional_target": "embed_tokens,lm_head"},
    "trl": {"use_peft": True, "lora_modules_to_save": BOTH},
    "ms-swift": {"lorap_lr_ratio": 16.0, "modules_to_save": BOTH},
}
RSLORA = {tool: {"use_rslora": True, **changes} for tool, changes in RSLORA.items()}
RSLORA["axolotl"] = {"peft_use_rslora": True, "loraplus_lr_ratio": 16}
RSLORA["axolotl"] |= {"lora_rank_pattern": {"q": 4}}


def test_adapters_beyond_plain_lora(convert) -> None:
    for tool, changes in RSLORA.items():
        config, text = convert(tool, changes)
        assert config.use_rslora and not config.use_dora and config.modules_to_save == tuple(BOTH)
        assert config.lora_plus_ratio == (None if tool == "trl" else 16)
        assert config.rank_pattern == ({"q": 4} if tool == "axolotl" else None)
        assert "rslora" not in section(text, TRAINED)
    full = {"use_rslora": True, "finetuning_type": "full"}
    config, text = convert("llamafactory", full)
    assert not config.use_rslora and "use_rslora true: all parameters are trained" in text


# What a run says -> what is written; and what the file's comments have under which heading.
SETTINGS = """
trl {max_grad_norm: null} -> {max_grad_norm: 0}
axolotl {max_grad_norm: null} -> {max_grad_norm: 1}
llamafactory {lr_scheduler_type: constant} -> {warmup_steps: 0}
trl {optim: adamw_8bit} -> {optimizer: adamw-8bit}
trl {optim: adafactor} -> {optimizer: adafactor}
trl {optim: adafactor, use_peft: true} -> {optimizer: adamw}; trained optim adafactor
trl {optim: lion_8bit} -> {optimizer: adamw}; trained optim lion_8bit
llamafactory {quantization_bit: 4, quantization_method: bnb} -> {quantization: nf4}; differs nf4
trl {use_peft: true, load_in_4bit: true} -> {quantization: nf4}; differs nf4
trl {use_peft: true, load_in_8bit: true} -> {quantization: int8}; differs int8
trl {load_in_8bit: true} -> {quantization: none}
axolotl {load_in_4bit: true, load_in_8bit: false} -> {quantization: nf4}; differs nf4
ms-swift {quant_bits: 8} -> {quantization: int8}; differs int8
axolotl {sample_packing: true} -> {}; trained sample_packing true: there a batch counts packed rows
ms-swift {packing: true} -> {}; trained packing true: there a batch counts packed rows
trl {packing: true} -> {}; trained packing true: there a batch counts packed rows
llamafactory {neat_packing: true} -> {}; trained neat_packing true: there a batch counts packed
axolotl {excess_length_strategy: truncate} -> {}; differs there: truncate
axolotl {save_total_limit: 0} -> {}; differs save_total_limit 0: there every checkpoint is kept
axolotl {save_total_limit: 1} -> {save_total_limit: 2}; differs save_total_limit 1: 2 are kept
axolotl {gradient_checkpointing: offload} -> {gradient_checkpointing: true}; differs offload
ms-swift {train_type: full} -> {finetuning: full, learning_rate: 1.0e-5}
trl {max_length: 512} -> {cutoff_len: 512, finetuning: full, learning_rate: 2.0e-5}
trl {max_seq_length: null} -> {}; trained max_length null: there nothing is cut
trl {dataset_train_split: null} -> {}; differs dataset_train_split null: train is written
"""


@cases(SETTINGS)
def test_settings_and_what_is_named(convert, tool, changes, becomes) -> None:
    settings, _, named = becomes.partition("; ")
    config, text = convert(tool, changes)
    expected = yaml.safe_load(settings)
    assert {name: getattr(config, name) for name in expected} == expected
    if named:
        heading, _, words = named.partition(" ")
        assert words in section(text, TRAINED if heading == "trained" else DIFFERS)


def test_columns_of_a_data_set(convert) -> None:
    given = '{"question": "query", "a": "response"}'
    for tool, changes, columns in (
        ("ms-swift", {"columns": given}, {"prompt": "question", "response": "a"}),
        ("trl", {"dataset_text_field": "body"}, {"text": "body"}),
    ):
        assert convert(tool, changes)[0].sources[0].columns == columns
