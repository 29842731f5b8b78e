"""Scripts read by the rules of a shell, and files that launchers name; bash is the reference."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.commands.convert.accelerate_file import read_accelerate
from finetune.commands.convert.read import read_run
from finetune.commands.convert.shell import Shell

SCRIPTS = [
    "run --dataset 'NAME#10000' NAME#10000 --lr 5e-5 # a comment\nrun next",
    "run --a 1 \\\n  `# a comment` \\\n  --b 2",
    'A=1\nB="two words"\nrun $A "$B" $B ${A} "${B}!" \'$A\' \\$A "a\\"b"',
    "A=1\nA=2\nA+=3\nrun $A",
    'run ${MODEL:-Qwen/Qwen3-8B} ${MODEL-other} "${MODEL:-a b}"\nMODEL=own\nrun ${MODEL:-no}',
    "N=2\nrun $((16 / N)) $((16 / $N * 3 - 1)) $(expr 16 / $N) $(expr 3 \\* 4)",
    'ARGS=(\n  --x 1  # why\n  --y "two words"\n)\nrun "${ARGS[@]}" --z\nARGS+=(--more)\nrun "${ARGS[@]}"',
    'ARGS=(a=1  # why\n  b=2\n  --c=3)\nrun "${ARGS[@]}"',
    "export A=1 B=2; run $A$B; run again && run third | cat",
    "run <<EOF\n--not 'an option\nEOF\nrun --x",
    'run "" a\'b\'"c"d\trun',
    "NAMES='--x 1 --y 2'\nrun $NAMES",
]
PIECES = ["a", "--x", "#", " ", " ", "'q # r'", '"d $V"', "$V/", "${V}", "${W:-e f}", "\\ ", "=1"]
needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def of_bash(script: str) -> list[list[str]]:
    """The words that bash gives to `run`."""
    shown = r"""run() { for word in "$@"; do printf '%s\0' "$word"; done; printf '\1'; }"""
    words = ["bash", "-c", f"{shown}\ncat() {{ command cat; }}\n{script}"]
    env = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    return [call.split("\0")[:-1] for call in done.stdout.split("\1")[:-1]]


def ours(script: str) -> list[list[str]]:
    return [words[1:] for words in Shell(script).commands() if words[0] == "run"]


@needs_bash
def test_words_are_those_of_bash() -> None:
    for script in SCRIPTS:
        assert ours(script) == of_bash(script), script


@needs_bash
@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([*PIECES, "\\\n"]), max_size=8))
def test_random_words_are_those_of_bash(parts: list[str]) -> None:
    script = "V='v w'\nrun " + "".join(parts)
    assert ours(script) == of_bash(script)


def test_what_needs_a_program_stays_as_it_is_written() -> None:
    assert ours("run $(nproc) --x $(cat a b) ${A%.*} $UNKNOWN `date`") == [
        ["$(nproc)", "--x", "$(cat a b)", "${A%.*}", "$UNKNOWN", "`date`"]
    ]


OFFLOADED = {"stage": 3, "offload_param": {"device": "cpu"}}


def test_the_file_of_accelerate(tmp_path: Path) -> None:
    path, eight = tmp_path / "accelerate.yaml", {"num_processes": 8}
    shared = {"parallelism_config_sp_size": 2, "parallelism_config_cp_size": 2}
    sharded = shared | {"parallelism_config_dp_shard_size": 2}
    zero, fsdp = {"zero_stage": 3, "offload_param_device": "cpu"}, {"fsdp_version": 2}
    for content, options in (
        ({"deepspeed_config": zero}, {"deepspeed": {"zero_optimization": OFFLOADED}}),
        ({"deepspeed_config": {"deepspeed_config_file": "ds.json"}}, {"deepspeed": "ds.json"}),
        ({"distributed_type": "FSDP", "fsdp_config": fsdp}, {"fsdp": fsdp}),
        ({"distributed_type": "MULTI_GPU"}, {}),
        ({"distributed_type": "NO", "parallelism_config": sharded}, shared),
    ):
        path.write_text(json.dumps({"distributed_type": "DEEPSPEED", **eight, **content}))
        found = read_accelerate(["accelerate", "launch", "--config_file", str(path)])
        assert found == eight | options
        assert found == read_accelerate(["accelerate", "launch", f"--config-file={path}", "-m"])
    path.write_text("machine_rank: 0")
    assert read_accelerate(["accelerate", "launch", "--config_file", str(path)]) == {}


def test_processes_of_that_file_make_the_batch(tmp_path: Path) -> None:
    path = tmp_path / "zero3.config"
    path.write_text(json.dumps({"distributed_type": "DEEPSPEED", "num_processes": 8}))
    for script in ("trl/scripts/sft.py", "own.py"):  # of the user, too
        command = f"accelerate launch --config_file {path} {script} --dataset_name d --use_peft"
        run = read_run(command, "trl")
        assert run.processes == 8
        assert run.options["deepspeed"] == {"zero_optimization": {"stage": 2}}
        assert (run.options["dataset_name"], run.options["use_peft"]) == ("d", True)
