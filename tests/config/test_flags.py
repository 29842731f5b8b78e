"""The command line: forms of a flag, what is refused, the help, and the frozen list of flags."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_helpers import flag_table

from finetune.config.fields import FOREIGN, OTHERWISE, nearest, unknown_name
from finetune.config.options import EXTRA, ONLY_IN_FILES, flags_of, help_text, parse
from finetune.config.pretrain_config import PretrainConfig
from finetune.config.resolution import resolve
from finetune.config.run_config import RunConfig
from finetune.errors import FinetuneError, Problems

FROZEN = Path(__file__).parents[1] / "frozen" / "flags.txt"
FLAGS = flags_of(RunConfig)
NEEDED = ["--model", "m", "--data", "d.jsonl", "--output-dir", "o"]

# Written out from the plan of the product, so that a renamed field is noticed.
_PROMISED = """
--config --model --data --valid-data --output-dir --cutoff-len --micro-batch-size --gradient-accumulation-steps
--global-batch-size --max-steps --num-epochs --learning-rate --warmup-steps --weight-decay --lr-scheduler --finetuning
--lora-r --lora-alpha --lora-dropout --lora-target-modules --use-curriculum --curriculum-seed --dtype --device-type
--gradient-checkpointing --seed --save-steps --save-total-limit --eval-steps --logging-steps --report-to --resume
--packing --timeout-seconds --template --on-bad-row --log-samples --print-config
"""
PROMISED = _PROMISED.split()
_OF_THE_GUIDES = (
    "--use_wandb --wandb_project --wandb_run_name --distributed --world_size --nproc_per_node"
    " --backend --fp8 --bf16 --node_rank --master_addr --master_port --total_batch_size"
    " --warmup_ratio"
)


def values(*arguments: str) -> dict[str, object]:
    parsed = parse(arguments, RunConfig)
    assert not parsed.problems, [str(problem) for problem in parsed.problems]
    return {name: sourced.value for name, sourced in parsed.values.items()}


def problems(*arguments: str) -> list[FinetuneError]:
    try:
        resolve([*NEEDED, *arguments], world_size=1)
    except Problems as error:
        return error.problems
    except FinetuneError as error:
        return [error]
    return []


def only_problem(*arguments: str) -> str:
    found = problems(*arguments)
    assert len(found) == 1, [str(problem) for problem in found]
    assert found[0].what and found[0].where and found[0].fix
    assert found[0].exit_code == 2
    return str(found[0])


def test_every_promised_flag_exists() -> None:
    names = {*FLAGS, *EXTRA}
    assert [flag for flag in PROMISED if flag[2:].replace("-", "_") not in names] == []


@pytest.mark.frozen
def test_flags_are_frozen() -> None:
    """A changed name, type or default breaks somebody's script: change the file on purpose or not
    at all.

    To do it on purpose: PYTHONPATH=tests python -c "from run_helpers import flag_table; \
    from finetune.config.run_config import RunConfig; print(flag_table(RunConfig), end='')" >
    tests/frozen/flags.txt
    """
    assert flag_table(RunConfig) == FROZEN.read_text()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--learning-rate", "1e-5"], {"learning_rate": 1e-5}),
        (["--learning_rate", "1e-5"], {"learning_rate": 1e-5}),
        (["--learning-rate=1e-5"], {"learning_rate": 1e-5}),
        (["--learning_rate=.5"], {"learning_rate": 0.5}),
        (["--Learning-Rate=1"], {"learning_rate": 1.0}),
        (["--seed", "1", "--seed", "2"], {"seed": 2}),
        (["--packing"], {"packing": True}),
        (["--packing", "--seed", "3"], {"packing": True, "seed": 3}),
        (["--packing", "false"], {"packing": False}),
        (["--packing", "False"], {"packing": False}),
        (["--packing=TRUE"], {"packing": True}),
        (["--packing", "true", "--packing=false"], {"packing": False}),
        (["--gradient-checkpointing"], {"gradient_checkpointing": True}),
        (["--data", "a", "b", "c"], {"data": ["a", "b", "c"]}),
        (["--data", "a", "b", "--data", "c"], {"data": "c"}),
        (["--data=a b.json"], {"data": "a b.json"}),
        (["--data=a=b"], {"data": "a=b"}),
        (["--lora-target-modules", "q_proj,v_proj"], {"lora_target_modules": "q_proj,v_proj"}),
        (["--max-steps", "none"], {"max_steps": None}),
        (["--template", "None"], {"template": None}),
        (["--warmup-steps", "100"], {"warmup_steps": 100}),
        (["--warmup-steps", "0.1"], {"warmup_steps": 0.1}),
        (["--model", "123"], {"model": "123"}),
        (["--model", "true"], {"model": "true"}),
        (["--weight-decay", "-1"], {"weight_decay": -1.0}),
        (["--resume", "runs/a/checkpoint-3"], {"resume": "runs/a/checkpoint-3"}),
        (["--local-rank=3"], {}),
        (["--local_rank", "0"], {}),
        ([], {}),
    ],
)
def test_forms_of_a_flag(arguments: list[str], expected: dict[str, object]) -> None:
    found = values(*arguments)
    assert found == expected
    assert {name: type(value) for name, value in found.items()} == {
        name: type(v) for name, v in expected.items()
    }


def test_config_collects_and_the_rest_does_not() -> None:
    parsed = parse(
        ["--config", "a.json", "--seed", "1", "--config", "b.yaml", "c.py", "--print-config"],
        RunConfig,
    )
    assert parsed.config_files == ["a.json", "b.yaml", "c.py"]
    assert parsed.print_config


def test_help_is_found_after_a_list_of_words() -> None:
    parsed = parse(["--data", "a", "-h"], RunConfig)
    assert parsed.help and parsed.values["data"].value == "a"


@given(st.sampled_from(sorted(set(FLAGS) - ONLY_IN_FILES)), st.booleans(), st.booleans())
def test_dashes_underscores_and_equals_are_the_same(name: str, dashes: bool, equals: bool) -> None:
    word = "false" if FLAGS[name].is_switch else "7"
    typed = "--" + (name.replace("_", "-") if dashes else name)
    assert values(*([f"{typed}={word}"] if equals else [typed, word])) == values(f"--{name}", word)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lerning-rate", "1"], "did you mean --learning-rate?"),
        (["--packing", "maybe"], "'maybe' belongs to no flag"),
        (["--packing", "1"], "'1' belongs to no flag"),
        (["--packing=yes"], "write true or false"),
        (["--no-packing"], "write --packing false"),
        (["--seed"], "--seed has no value"),
        (["--seed", "--packing"], "--seed has no value"),
        (["--seed", "1", "2"], "'2' belongs to no flag"),
        (["--data=a", "b"], "'b' belongs to no flag"),
        (["stray"], "'stray' belongs to no flag"),
        (["--"], "'--' belongs to no flag"),
        (["-x"], "unknown flag -x"),
        (["--curriculum", "x.yaml"], "put curriculum into a YAML file"),
        (["--local-rank", "x"], "leave it to the launcher"),
        (["--seed", "1.5"], "whole number"),
        (["--seed", "9" * 5000], "whole number"),
        (["--learning-rate", "fast"], "a number above 0"),
        (["--learning-rate", "1e999"], "a number above 0"),
        (["--learning-rate", "nan"], "a number above 0"),
        (["--dtype", "bf16"], "did you mean bfloat16?"),
        (["--finetuning", "qlora"], "--quantization nf4"),
        (["--finetuning", "full", "--quantization", "nf4"], "finetuning is full"),
        (["--device-type", "npu", "--quantization", "int8"], "not on npu"),
        (["--report-to", "mlflow"], "tensorboard"),
        (["--save-total-limit", "1"], "at least 2"),
        (["--template="], "not empty"),
        (["--zero_optimization", "3"], "unknown flag --zero_optimization"),
    ],
)
def test_refused(arguments: list[str], words: str) -> None:
    assert words in only_problem(*arguments)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--per_device_train_batch_size", "--micro-batch-size"),
        ("--batch_size", "--micro-batch-size"),
        ("--num_train_epochs", "--num-epochs"),
        ("--finetuning_type", "--finetuning"),
        ("--lora_rank", "--lora-r"),
        ("--max_seq_length", "--cutoff-len"),
        ("--cutoff", "--cutoff-len"),
        ("--train_data", "--data"),
        ("--train_data_path", "--data"),
        ("--valid_data_path", "--valid-data"),
        ("--dataset", "--data"),
        ("--lora_target", "--lora-target-modules"),
        ("--model_name_or_path", "--model"),
        ("--gradient_accumulation", "--gradient-accumulation-steps"),
        ("--total_steps", "--max-steps"),
        ("--resume_from", "--resume"),
        ("--lr", "--learning-rate"),
    ],
)
def test_names_of_other_packages_are_refused_with_ours(theirs: str, ours: str) -> None:
    assert f"{theirs} is called {ours} here" in only_problem(theirs, "x", "y")
    assert f"{theirs} is called {ours} here" in only_problem(f"{theirs}=x")


@pytest.mark.parametrize(
    "name", ["--load_in_4bit", "--load-in-8bit", "--quantization_bit", "--qlora", "--use_qlora"]
)
def test_other_words_for_a_quantised_base_name_ours(name: str) -> None:
    assert "use --quantization" in only_problem(name, "true")


def test_pretraining_names_no_setting_that_it_lacks() -> None:
    problem = unknown_name("--load-in-4bit", "the command", PretrainConfig.model_fields, flags=True)
    assert "only fine-tuning" in problem.what and "finetune.sft" in problem.fix


@pytest.mark.parametrize("name", _OF_THE_GUIDES.split())
def test_flags_of_the_guides_scripts_are_refused_with_a_remedy(name: str) -> None:
    assert "is not a flag here" in only_problem(name, "1")


def test_the_table_of_foreign_names_is_sound() -> None:
    """No foreign name hides a setting of ours, and every replacement exists."""
    fields = set(RunConfig.model_fields)
    assert {*FOREIGN, *OTHERWISE} & fields == set()
    assert set(FOREIGN.values()) <= fields
    assert set(FOREIGN) & set(OTHERWISE) == set()
    used = set(re.findall(r"--([a-z][a-z0-9_-]+)", " ".join(fix for _, fix in OTHERWISE.values())))
    assert {name.replace("-", "_") for name in used} - {"nproc_per_node"} <= fields, (
        "nproc_per_node is torchrun's"
    )


def test_everything_wrong_is_told_together() -> None:
    found = problems(
        "--modle", "x", "--seed", "x", "stray", "--dtype", "int8", "--packing=2", "--lora-r", "0"
    )
    assert len(found) == 6, [problem.what for problem in found]
    assert len(problems("--modle", "x", "y")) == 1, (
        "words after an unknown flag are taken for its value"
    )


@given(st.text(max_size=12))
def test_nearest_never_fails(name: str) -> None:
    assert nearest(name, ["zero_optimization", "bf16"]) in ("zero_optimization", "bf16", None)


@given(
    st.lists(
        st.text(max_size=8)
        | st.sampled_from(["--seed", "--data", "--packing", "--help=", "=", "-", "--=1"])
    )
)
def test_any_command_line_is_answered(arguments: list[str]) -> None:
    """Parsed or refused with words, never an exception of another kind."""
    for problem in parse(arguments, RunConfig).problems:
        assert problem.what and problem.where and problem.fix


def test_help_names_every_flag_with_unit_and_default() -> None:
    text = help_text(RunConfig)
    assert all(flag in text for flag in PROMISED)
    flat = " ".join(text.split())
    assert "--micro-batch-size SAMPLES" in flat and "--cutoff-len TOKENS" in flat
    assert (
        "[default auto: 4e-4 for lora, 4e-5 for full at width 4096" in flat
        and "[default 2048]" in flat
        and "[required]" in flat
    )
    assert max(map(len, text.splitlines())) <= 120


def test_help_exits_with_0_and_imports_no_torch() -> None:
    code = (
        "import sys\nfrom finetune.config.resolution import resolve\n"
        "try:\n    resolve(['--help', '--nonsense'], world_size=1)\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "else:\n    raise AssertionError('no exit')\n"
        "assert not {'torch', 'numpy', 'deepspeed'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.startswith("usage: python -m finetune.sft")
