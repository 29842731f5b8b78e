"""Runs of other tools become run files that load, train what theirs trained, and name what they
cannot say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from converted_runs import DIFFERS, EXAMPLE, PRETRAIN, SWIFT, TRAINED, converted, section

from finetune.commands.convert.command import main
from finetune.commands.convert.draft import convert as drafted
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
    "torchrun swift/cli/sft.py --model m": "ms-swift",
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
    "swift sft --system 'open": ("not a command line", None),
    f"WANDB_API_KEY='{KEY} swift sft --model m": ("not a command line", None),
    f"swift sft {KEY} --model m": ("belongs to no option", None),
    "swift export --model m --dataset own.jsonl": ("does not train, or is not read", None),
    "llamafactory-cli api run.yaml": ("does not train, or is not read", None),
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
    def unreadable(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied")

    (folder / "run.sh").touch()
    monkeypatch.setattr(Path, "read_text", unreadable)
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


def test_a_value_of_theirs_that_means_nothing_is_not_named() -> None:
    run = {"model_name_or_path": "m", "dataset_name": "d", "use_dora": False, "pad_token": None}
    draft = drafted(TOOLS[1], run, 1)
    assert not draft.named["unsupported"] and not draft.named["harmless"]


def test_no_secret_is_shown(capsys: Any) -> None:
    names = [
        "swanlab_api_key",
        "hub_token",
        "hf_hub_token",
        "my_password",
        "lark_webhook_url",
        "lark_secret",
    ]
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


def test_rows_of_packed_samples_are_named(convert) -> None:
    for tool, changes, name in (
        ("axolotl", {}, "sample_packing"),
        ("ms-swift", {}, "packing"),
        ("trl", {}, "packing"),
        ("llamafactory", {}, "neat_packing"),
        ("llamafactory", PRETRAIN, "packing"),
    ):
        _, text = convert(tool, {**changes, name: True})
        assert f"#   {name} true: there a batch counts packed rows" in section(text, TRAINED)
        _, text = convert(tool, {**changes, name: False, "packing": False})
        assert "packed rows" not in text


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


def test_null_is_no_default_where_it_says_something(convert) -> None:
    for tool, norm in (("trl", 0), ("llamafactory", 0), ("ms-swift", 0), ("axolotl", 1)):
        assert convert(tool, {"max_grad_norm": None})[0].max_grad_norm == norm, tool


def test_devices_that_share_samples_count_once(convert) -> None:
    for tool, changes, size in (
        ("ms-swift", {"sequence_parallel_size": 4, "gradient_accumulation_steps": 3}, 6),
        ("ms-swift", {"sequence_parallel_size": 4}, 4),  # 2 accumulated, by all 8 devices
        ("ms-swift", {"deepspeed_autotp_size": 2}, 8),
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
        ("NPROC_PER_NODE=8 swift sft", 8),
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


@pytest.mark.parametrize("tool", ["llamafactory", "trl", "ms-swift"])
def test_the_revision_is_part_of_the_name(convert, folder: Path, tool: str) -> None:
    name = "model" if tool == "ms-swift" else "model_name_or_path"
    config, text = convert(tool, {name: "owner/base", "model_revision": "v1"})
    assert config.model == "owner/base@v1" and "model_revision" not in text
    config, _ = convert(tool, {name: "owner/base", "model_revision": "main"})
    assert config.model == "owner/base"
    (folder / "base").mkdir()
    config, text = convert(tool, {name: "base", "model_revision": "v1"})
    assert config.model == "base" and "model_revision v1" in section(text, TRAINED)


def test_a_base_in_few_bits(convert) -> None:
    for tool, changes, kind in (
        ("llamafactory", {"quantization_bit": 4, "quantization_method": "bnb"}, "nf4"),
        ("trl", {"use_peft": True, "load_in_4bit": True, "use_bnb_nested_quant": True}, "nf4"),
        ("trl", {"use_peft": True, "load_in_8bit": True}, "int8"),
        ("axolotl", {"adapter": "qlora", "load_in_4bit": True, "load_in_8bit": False}, "nf4"),
        ("ms-swift", {"quant_bits": 8}, "int8"),
    ):
        config, text = convert(tool, changes)
        assert config.quantization == kind and kind in section(text, DIFFERS)
    # of a model that is trained whole
    config, text = convert("trl", {"load_in_8bit": True})
    assert config.quantization == "none" and "load_in" not in section(text, DIFFERS)


BOTH = ["embed_tokens", "lm_head"]
RSLORA = {
    "llamafactory": {"loraplus_lr_ratio": 16.0, "additional_target": "embed_tokens,lm_head"},
    "trl": {"use_peft": True, "lora_modules_to_save": BOTH},
    "axolotl": {"peft_use_rslora": True, "loraplus_lr_ratio": 16, "lora_rank_pattern": {"q": 4}},
    "ms-swift": {"lorap_lr_ratio": 16.0, "modules_to_save": BOTH},
}


@pytest.mark.parametrize("tool", RSLORA)
def test_adapters_beyond_plain_lora(convert, tool: str) -> None:
    changes = RSLORA[tool] if tool == "axolotl" else {"use_rslora": True, **RSLORA[tool]}
    config, text = convert(tool, changes)
    assert config.use_rslora and not config.use_dora and config.modules_to_save == tuple(BOTH)
    assert config.lora_plus_ratio == (None if tool == "trl" else 16)
    assert config.rank_pattern == ({"q": 4} if tool == "axolotl" else None)
    assert "rslora" not in section(text, TRAINED)
    if tool == "llamafactory":
        config, text = convert(tool, {**changes, "finetuning_type": "full"})
        assert not config.use_rslora and "use_rslora true: all parameters are trained" in text


def test_optimizers_with_less_state(convert) -> None:
    optimizers = {"adamw_8bit": "adamw-8bit", "adafactor": "adafactor", "lion_8bit": "adamw"}
    for name, ours in optimizers.items():
        config, text = convert("trl", {"optim": name})
        assert config.optimizer == ours and ("optim lion_8bit" in text) == (name == "lion_8bit")
    config, text = convert("trl", {"optim": "adafactor", "use_peft": True})
    assert config.optimizer == "adamw" and "optim adafactor" in section(text, TRAINED)


def test_a_constant_rate_has_no_warm_up(convert) -> None:
    assert convert("llamafactory", {"lr_scheduler_type": "constant"})[0].warmup_steps == 0
