"""Scripts read by the rules of a shell, and files that launchers name; bash is the reference."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from converted_runs import converted
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.commands.convert.accelerate_file import read_accelerate
from finetune.commands.convert.read import read_run
from finetune.commands.convert.shell import Shell
from finetune.config.fields import DataSource
from finetune.errors import ConfigError

SCRIPTS = [
    "run --dataset 'NAME#10000' NAME#10000 --lr 5e-5 # a comment\nrun next",
    "run --a 1 \\\n  `# a comment` \\\n  --b 2",
    'A=1\nB="two words"\nrun $A "$B" $B ${A} "${B}!" \'$A\' \\$A "a\\"b"',
    'run ${MODEL:-Qwen/Qwen3-8B} ${MODEL-other} "${MODEL:-a b}"\nMODEL=own\nrun ${MODEL:-no}',
    "N=2\nrun $((16 / N)) $((16 / $N * 3 - 1)) $(expr 16 / $N) $(expr 3 \\* 4)",
    'ARGS=(\n  --x 1  # why\n  --y "two words"\n)\nrun "${ARGS[@]}" --z\nARGS+=(--more)\nrun "${ARGS[@]}"',
    'ARGS=(a=1  # why\n  b=2\n  --c=3)\nrun "${ARGS[@]}"',
    "export A=1 B=2; run $A$B; run again && run third | cat",
    "run <<EOF\n--not 'an option\nEOF\nrun --x",
    "A='x y'\nrun --one=$A --two=\"$A\"",
    'run "" a\'b\'"c"d\trun',
    "NAMES='--x 1 --y 2'\nrun $NAMES",
]


def of_bash(script: str) -> list[list[str]]:
    """The words that bash gives to `run`."""
    shown = r"""run() { for word in "$@"; do printf '%s\0' "$word"; done; printf '\1'; }"""
    done = subprocess.run(
        ["bash", "-c", f"{shown}\ncat() {{ command cat; }}\n{script}"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin"},
    )
    calls = done.stdout.split("\1")[:-1]
    return [call.split("\0")[:-1] for call in calls]


def ours(script: str) -> list[list[str]]:
    return [words[1:] for words in Shell(script).commands() if words[0] == "run"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("script", SCRIPTS)
def test_words_are_those_of_bash(script: str) -> None:
    assert ours(script) == of_bash(script)


pieces = st.sampled_from(
    [
        "a",
        "--x",
        "#",
        " ",
        " ",
        "'q # r'",
        '"d $V"',
        "$V/",
        "${V}",
        "${W:-e f}",
        "\\ ",
        "\\\n",
        "=1",
    ]
)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@settings(max_examples=60, deadline=None)
@given(st.lists(pieces, max_size=8))
def test_random_words_are_those_of_bash(parts: list[str]) -> None:
    script = "V='v w'\nrun " + "".join(parts)
    assert ours(script) == of_bash(script)


def test_what_needs_a_program_stays_as_it_is_written() -> None:
    assert ours("run $(nproc) --x $(cat a b) ${A%.*} $UNKNOWN `date`") == [
        ["$(nproc)", "--x", "$(cat a b)", "${A%.*}", "$UNKNOWN", "`date`"]
    ]


# ---------------------------------------------------------------- launchers


@pytest.mark.parametrize(
    ("content", "options"),
    [
        (
            {"distributed_type": "DEEPSPEED", "num_processes": 8, "deepspeed_config": {"zero_stage": 3, "offload_param_device": "cpu"}},
            {"num_processes": 8, "deepspeed": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}},
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}},
            {"deepspeed": "ds.json"},
        ),
        (
            {"distributed_type": "FSDP", "num_processes": 4, "fsdp_config": {"fsdp_version": 2}},
            {"num_processes": 4, "fsdp": {"fsdp_version": 2}},
        ),
        ({"distributed_type": "MULTI_GPU", "num_processes": 2}, {"num_processes": 2}),
        (
            {"num_processes": 8, "parallelism_config": {"parallelism_config_sp_size": 2, "parallelism_config_cp_size": 2, "parallelism_config_dp_shard_size": 2}},
            {"num_processes": 8, "parallelism_config_sp_size": 2, "parallelism_config_cp_size": 2},
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["accelerate.yaml", "zero3.config"])
def test_the_file_of_accelerate(tmp_path: Path, content: dict, options: dict, name: str) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(content))
    assert read_accelerate(["accelerate", "launch", "--config_file", str(path)]) == options
    assert read_accelerate(["accelerate", "launch", f"--config-file={path}", "-m"]) == options


def test_processes_of_that_file_make_the_batch(tmp_path: Path) -> None:
    path = tmp_path / "zero3.config"
    path.write_text(json.dumps({"distributed_type": "DEEPSPEED", "num_processes": 8}))
    command = f"accelerate launch --config_file {path} trl/scripts/sft.py --dataset_name own.jsonl"
    run = read_run(command, None)
    assert run.processes == 8 and run.options["deepspeed"] == {"zero_optimization": {"stage": 2}}
    with pytest.raises(ConfigError, match=r"accelerate's file none.yaml is not here"):
        read_run("accelerate launch --config_file none.yaml sft.py --dataset_name own", None)


def test_processes_that_share_samples_make_no_batch(folder: Path, capsys: Any) -> None:
    degrees = {"parallelism_config_sp_size": 2, "parallelism_config_dp_shard_size": 2}
    content = {"num_processes": 4, "parallelism_config": degrees}
    (folder / "ulysses.yaml").write_text(json.dumps(content))
    command = "accelerate launch --config_file ulysses.yaml trl/scripts/sft.py"
    command += " --model_name_or_path m --dataset_name d.jsonl"
    for more in ([], ["--devices", "4"]):
        config, text = converted(command, capsys, *more)
        assert config.global_batch_size == 16 and "2 that share every sample" in text
    (folder / "ulysses.yaml").write_text(json.dumps(content | {"num_processes": 3}))
    with pytest.raises(ConfigError, match="2 devices share every sample"):
        converted(command, capsys)


def test_that_file_counts_for_a_script_of_the_user_too(tmp_path: Path) -> None:
    path = tmp_path / "zero3.yaml"
    path.write_text("distributed_type: DEEPSPEED\nnum_processes: 8\n")
    command = f"accelerate launch --config_file {path} own.py --dataset_name d --use_peft"
    run = read_run(command, "trl")
    assert run.processes == 8
    assert run.options == {
        "deepspeed": {"zero_optimization": {"stage": 2}},
        "dataset_name": "d",
        "use_peft": True,
    }


@pytest.mark.parametrize("kind", ["sft", "pt", "rlhf"])
def test_megatron_is_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"megatron {kind} has options of its own"):
        read_run(f"PORT=1 megatron {kind} --model m --dataset d --lr 1e-5", None)


def test_commands_that_do_not_train_are_refused(folder: Path) -> None:
    """They take data, too (for quantization, for answers); a script may have one beside a training."""
    for command in ("swift export --model m --dataset own.jsonl", "llamafactory-cli api run.yaml"):
        with pytest.raises(ConfigError, match="does not train, or is not read"):
            read_run(command, None)
    script = "swift export --model m --quant_bits 4\nswift sft --model m --dataset own.jsonl\n"
    (folder / "both.sh").write_text(script)
    assert read_run("both.sh", None).options["dataset"] == "own.jsonl"


def test_a_file_of_accelerate_is_no_run(folder: Path) -> None:
    keys = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 8\n"
    (folder / "fsdp.yaml").write_text(keys)
    with pytest.raises(ConfigError, match="configuration of accelerate's launcher"):
        read_run("fsdp.yaml", None)


def test_hubs_in_front_of_a_name(capsys: Any, folder: Path) -> None:
    run = "swift sft --model m --dataset HF::owner/texts:full#7 MS::owner/more"
    config, _ = converted(run, capsys)
    assert config.data == (
        DataSource(path="hub:owner/texts/full", max_samples=7),
        "modelscope:owner/more",
    )
