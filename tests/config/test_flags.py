"""The command line: forms of a flag, what is refused, and the frozen list of flags."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_helpers import flag_table

from finetune.config.fields import FOREIGN, OTHERWISE, nearest, unknown_name
from finetune.config.options import parse
from finetune.config.preference_config import PreferenceConfig
from finetune.config.pretrain_config import PretrainConfig
from finetune.config.resolution import resolve
from finetune.config.run_config import RunConfig
from finetune.errors import FinetuneError, Problems

FROZEN = Path(__file__).parents[1] / "frozen"
NEEDED = ["--model", "m", "--data", "d.jsonl", "--output-dir", "o"]


def values(*arguments: str) -> dict[str, object]:
    parsed = parse(arguments, RunConfig)
    assert not parsed.problems, [str(problem) for problem in parsed.problems]
    return {name: sourced.value for name, sourced in parsed.values.items()}


def problems(*arguments: str) -> list[FinetuneError]:
    with pytest.raises(FinetuneError) as caught:
        resolve([*NEEDED, *arguments], world_size=1)
    return caught.value.problems if isinstance(caught.value, Problems) else [caught.value]


def only_problem(*arguments: str) -> str:
    (found,) = problems(*arguments)
    assert found.what and found.where and found.fix and found.exit_code == 2
    return str(found)


@pytest.mark.frozen
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("flags", RunConfig),
        ("pretrain_flags", PretrainConfig),
        ("preference_flags", PreferenceConfig),
    ],
)
def test_flags_are_frozen(name, config):
    """A changed name, type or default breaks somebody's script.

    To change one on purpose: PYTHONPATH=tests python -c "from run_helpers import flag_table; \
    from finetune.config.run_config import RunConfig; print(flag_table(RunConfig), end='')" >
    tests/frozen/flags.txt
    """
    assert flag_table(config) == (FROZEN / f"{name}.txt").read_text()


def test_forms_of_a_flag():
    for arguments, expected in (
        ("--learning_rate=.5", {"learning_rate": 0.5}),
        ("--Learning-Rate=1", {"learning_rate": 1.0}),
        ("--seed 1 --seed 2", {"seed": 2}),
        ("--packing true --packing=false", {"packing": False}),
        ("--data a b --data c", {"data": "c"}),
        ("--lora-target-modules q_proj,v_proj", {"lora_target_modules": "q_proj,v_proj"}),
        ("--max-steps none --template None", {"max_steps": None, "template": None}),
        ("--warmup-steps 0.1", {"warmup_steps": 0.1}),
        ("--local-rank=3 --local_rank 0", {}),
    ):
        found = values(*arguments.split())
        assert found == expected
        assert [type(found[name]) for name in expected] == [
            type(each) for each in expected.values()
        ]


def test_refused():
    for arguments, words in (
        ("--lerning-rate 1", "did you mean --learning-rate?"),
        ("--no-packing", "write --packing false"),
        ("--local-rank x", "leave it to the launcher"),
        ("--warmup_ratio 1", "is not a flag here"),
        ("--finetuning full --quantization nf4", "finetuning is full"),
        ("--seed --packing", "--seed has no value"),
        ("--", "'--' belongs to no flag"),
        ("-x", "unknown flag -x"),
        ("--curriculum x.yaml", "put curriculum into a YAML file"),
        ("--seed " + "9" * 5000, "whole number"),
        ("--learning-rate 1e999", "a number above 0"),
        ("--finetuning qlora", "--quantization nf4"),
        ("--device-type npu --quantization int8", "not on npu"),
        ("--per_device_train_batch_size 4", "is called --micro-batch-size here"),
    ):
        assert words in only_problem(*arguments.split(" "))


def test_the_table_of_foreign_names_is_sound():
    """No foreign name hides a setting of ours, and every replacement exists."""
    fields = set(RunConfig.model_fields)
    assert {*FOREIGN, *OTHERWISE} & fields == set() == set(FOREIGN) & set(OTHERWISE)
    assert set(FOREIGN.values()) <= fields
    used = set(re.findall(r"--([a-z][a-z0-9_-]+)", " ".join(fix for _, fix in OTHERWISE.values())))
    torchruns = {"nproc_per_node"}
    assert {name.replace("-", "_") for name in used} - torchruns <= fields
    problem = unknown_name("--load-in-4bit", "the command", PretrainConfig.model_fields, flags=True)
    assert "only fine-tuning" in problem.what and "finetune.sft" in problem.fix


@given(
    st.lists(
        st.text(max_size=8)
        | st.sampled_from(["--seed", "--data", "--packing", "--help=", "=", "-", "--=1"])
    )
)
def test_any_command_line_is_answered(arguments):
    """Parsed or refused with words, never an exception of another kind."""
    for problem in parse(arguments, RunConfig).problems:
        assert problem.what and problem.where and problem.fix
    for name in arguments:
        assert nearest(name, ["zero_optimization", "bf16"]) in ("zero_optimization", "bf16", None)
