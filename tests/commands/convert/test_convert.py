"""Runs of other tools become run files that load, train what theirs trained, and name what they
cannot say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from converted_runs import (
    AXOLOTL,
    DIFFERS,
    EXAMPLE,
    PRETRAIN,
    SWIFT,
    SWIFT_KEYS,
    TRAINED,
    TRL,
    converted,
    section,
)

from finetune.commands.convert.command import main
from finetune.commands.convert.draft import convert
from finetune.commands.convert.read import TOOLS, read_run
from finetune.config.run_config import RunConfig
from finetune.errors import ConfigError

HERE = Path(__file__).parent


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_every_option_of_theirs_is_mapped_or_named(tool: Any) -> None:
    names = [
        line
        for line in (HERE / f"{tool.name}.txt").read_text().split("\n")
        if line and line[0] != "#"
    ]
    assert len(names) > 30 and set(names) - set(tool.options) == set()
    settings = set(RunConfig.model_fields)
    for name, setting in tool.settings.items():
        assert setting in settings, name
    for row in tool.rows:
        assert row.settings.keys() <= settings, row
    assert tool.always.keys() <= settings
    assert set(tool.defaults) <= tool.options and set(tool.aliases.values()) <= tool.options


def test_which_tool_it_is(folder: Path) -> None:
    (folder / "unclear.yaml").write_text("learning_rate: 1.0e-4\noutput_dir: o\n")
    with pytest.raises(ConfigError, match="cannot be told which tool"):
        read_run("unclear.yaml", None)
    assert read_run("unclear.yaml", "trl")[0].name == "trl"
    commands = {
        "llamafactory-cli train --stage sft --model_name_or_path m": "llamafactory",
        "python -m torch.distributed.run --nproc-per-node 8 src/train.py --stage sft": (
            "llamafactory"
        ),
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
    assert main([SWIFT, "--output", "new.yaml"]) == 0
    # SWIFT's data is not here: it is written, and not called a success
    said = capsys.readouterr().err
    assert "[WARNING] converted from ms-swift" in said and "where: own.jsonl" in said
    (folder / "own.jsonl").write_text('{"instruction": "q", "output": "a"}\n')
    assert main([SWIFT, "--output", "second.yaml"]) == 0
    assert "[SUCCESS] converted from ms-swift; start it: python -m finetune.sft" in (
        capsys.readouterr().err
    )


def test_a_value_of_theirs_that_means_nothing_is_not_named() -> None:
    draft = convert(
        TOOLS[1],
        {"model_name_or_path": "m", "dataset_name": "d", "use_dora": False, "pad_token": None},
        1,
    )
    assert not draft.named["unsupported"] and not draft.named["harmless"]


def test_no_secret_is_shown(capsys: Any) -> None:
    names = (
        "swanlab_api_key",
        "swanlab_lark_secret",
        "hub_token",
        "hf_hub_token",
        "my_password",
        "lark_webhook_url",
    )
    run = (
        EXAMPLE
        | dict.fromkeys(names, "abc-123")
        | {"settings": {"api-key": "abc-123", "rows": [{"token": "abc-123"}]}}
    )
    run |= {"proxy": "http://me:abc-123@mirror", "pad_token": "<|end|>"}
    _, text = converted(run, capsys)
    assert "abc-123" not in text and all(f"{name} (not shown)" in text for name in names)
    assert "'api-key': '(not shown)'" in text and "pad_token <|end|>" in text
    with pytest.raises(ConfigError) as refused:
        read_run("WANDB_API_KEY='abc-123abc-123 swift sft --model m", None)
    assert "abc-123" not in str(refused.value)


def test_no_secret_inside_of_a_value_is_shown(capsys: Any) -> None:
    key, digits = "hf_" + "Aa0" * 8, "0123456789abcdef" * 2 + "01234567"
    run = EXAMPLE | {
        "run_hint": f"see {key}",
        "extra": ["--api-key=" + "Q" * 12, f"wandb {digits}"],
        "note": "sk-" + "b" * 20,
    }
    run |= {"neftune_noise_alpha": f"Bearer {'z' * 16}", "lookup": f"https://u:{'p' * 9}@host/x"}
    _, text = converted(run, capsys)
    for secret in (key, "Q" * 12, digits, "b" * 20, "z" * 16, "p" * 9):
        assert secret not in text
    assert "run_hint see ***" in text and "lookup https://***@host/x" in text
    with pytest.raises(ConfigError) as refused:
        converted(EXAMPLE | {"save_steps": f"often {key}"}, capsys)
    assert "does not take" in str(refused.value) and key not in str(refused.value)
    with pytest.raises(ConfigError) as refused:
        read_run(f"swift sft {key} --model m", None)
    assert "belongs to no option" in str(refused.value) and key not in str(refused.value)


def test_a_line_that_cannot_be_read_refuses_no_other(folder: Path) -> None:
    script = "echo don't\n# it's so\nswift sft \\\r\n  --model m --dataset d.jsonl\n"
    (folder / "run.sh").write_bytes(script.encode())
    assert read_run("run.sh", None).options == {"model": "m", "dataset": "d.jsonl"}
    (folder / "run.sh").write_text("echo x\necho \\\n  so\nswift sft --system 'open\n")
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
    for start in (
        "torchrun swift/cli/sft.py",
        "python -m torch.distributed.run /opt/swift/cli/sft.py",
    ):
        assert read_run(f"{start} --model m", None).tool.name == "ms-swift"
    assert read_run("torchrun trl/scripts/sft.py --model m", None).tool.name == "trl"
    assert read_run("python examples/sft.py --model m", None).tool.name == "trl"
    with pytest.raises(ConfigError) as refused:
        converted({**EXAMPLE, "finetuning_type": "oft"}, capsys)
    assert refused.value.fix


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
def test_rows_of_packed_samples_are_named(
    capsys: Any, run: dict[str, Any], tool: str, name: str
) -> None:
    _, text = converted(run, capsys, "--from", tool)
    assert f"#   {name} true: there a batch counts packed rows" in section(text, TRAINED)
    _, text = converted({**run, name: False, "packing": False}, capsys, "--from", tool)
    assert "packed rows" not in text


@pytest.mark.parametrize(
    ("run", "tool", "names"),
    [
        (AXOLOTL, "axolotl", "shuffle_merged_datasets"),
        (
            SWIFT_KEYS,
            "ms-swift",
            "dataset_shuffle train_dataloader_shuffle enable_thinking use_chat_template",
        ),
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
    [
        (TRL, "trl", 0),
        (EXAMPLE, "llamafactory", 0),
        (SWIFT_KEYS, "ms-swift", 0),
        (AXOLOTL, "axolotl", 1),
    ],
)
def test_null_is_no_default_where_it_says_something(
    capsys: Any, run: dict[str, Any], tool: str, norm: float
) -> None:
    config, _ = converted({**run, "max_grad_norm": None}, capsys, "--from", tool)
    assert config.max_grad_norm == norm


@pytest.mark.parametrize(
    ("run", "tool", "size"),
    [
        (
            {**SWIFT_KEYS, "sequence_parallel_size": 4, "gradient_accumulation_steps": 3},
            "ms-swift",
            6,
        ),
        # 2 accumulated, by all 8 devices
        ({**SWIFT_KEYS, "sequence_parallel_size": 4}, "ms-swift", 4),
        ({**SWIFT_KEYS, "deepspeed_autotp_size": 2}, "ms-swift", 8),
        ({**AXOLOTL, "context_parallel_size": 2, "tensor_parallel_size": 2}, "axolotl", 16),
        ({**AXOLOTL, "sequence_parallel_degree": 8}, "axolotl", 8),
    ],
)
def test_devices_that_share_samples_count_once(
    capsys: Any, run: dict[str, Any], tool: str, size: int
) -> None:
    config, text = converted(run, capsys, "--from", tool, "--devices", "8")
    assert config.global_batch_size == size and "that share every sample there" in section(
        text, DIFFERS
    )
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
        ("swift sft --num_processes 4 --main_process_port 29501", 4),
        ("swift sft", None),
    ],
)
def test_the_launcher_says_how_many_devices(
    capsys: Any, command: str, processes: int | None
) -> None:
    command += " --model m --dataset d.jsonl --gradient_accumulation_steps 1"
    config, text = converted(command, capsys)
    assert read_run(command, None).processes == processes
    assert config.global_batch_size == (processes or 1) and "launcher's" not in text
    config, text = converted(command, capsys, "--devices", "32")
    assert config.global_batch_size == 32
    assert (f"the launcher's processes {processes}: --devices 32" in text) == (
        processes is not None
    )


@pytest.mark.parametrize(
    ("run", "tool"), [(EXAMPLE, "llamafactory"), (TRL, "trl"), (SWIFT_KEYS, "ms-swift")]
)
def test_the_revision_is_part_of_the_name(
    capsys: Any, folder: Path, run: dict[str, Any], tool: str
) -> None:
    name = "model" if tool == "ms-swift" else "model_name_or_path"
    config, text = converted({**run, "model_revision": "v1"}, capsys, "--from", tool)
    assert config.model == f"{run[name]}@v1" and "model_revision" not in text
    config, _ = converted({**run, "model_revision": "main"}, capsys, "--from", tool)
    assert config.model == run[name]
    (folder / "base").mkdir()
    config, text = converted({**run, name: "base", "model_revision": "v1"}, capsys, "--from", tool)
    assert config.model == "base" and "model_revision v1" in section(text, TRAINED)


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
        (
            "llamafactory",
            {
                "use_rslora": True,
                "loraplus_lr_ratio": 16.0,
                "additional_target": "embed_tokens,lm_head",
            },
        ),
        (
            "trl",
            {
                "use_peft": True,
                "use_rslora": True,
                "lora_modules_to_save": ["embed_tokens", "lm_head"],
            },
        ),
        (
            "axolotl",
            {"peft_use_rslora": True, "loraplus_lr_ratio": 16, "lora_rank_pattern": {"q_proj": 4}},
        ),
        (
            "ms-swift",
            {
                "use_rslora": True,
                "lorap_lr_ratio": 16.0,
                "modules_to_save": ["embed_tokens", "lm_head"],
            },
        ),
    ],
)
def test_adapters_beyond_plain_lora(capsys: Any, tool: str, run: dict[str, Any]) -> None:
    base = {"llamafactory": EXAMPLE, "trl": TRL, "axolotl": AXOLOTL, "ms-swift": SWIFT_KEYS}[tool]
    config, text = converted({**base, **run}, capsys, "--from", tool)
    assert (
        config.use_rslora
        and not config.use_dora
        and config.modules_to_save == ("embed_tokens", "lm_head")
    )
    assert config.lora_plus_ratio == (None if tool == "trl" else 16)
    assert config.rank_pattern == ({"q_proj": 4} if tool == "axolotl" else None)
    assert "rslora" not in section(text, TRAINED)
    if tool == "llamafactory":
        config, text = converted({**base, **run, "finetuning_type": "full"}, capsys, "--from", tool)
        assert not config.use_rslora and "use_rslora true: all parameters are trained" in text


def test_optimizers_with_less_state(capsys: Any) -> None:
    for name, ours in (
        ("adamw_8bit", "adamw-8bit"),
        ("adafactor", "adafactor"),
        ("lion_8bit", "adamw"),
    ):
        config, text = converted({**TRL, "optim": name}, capsys)
        assert config.optimizer == ours and ("optim lion_8bit" in text) == (name == "lion_8bit")
    config, text = converted({**TRL, "optim": "adafactor", "use_peft": True}, capsys)
    assert config.optimizer == "adamw" and "optim adafactor" in section(text, TRAINED)
