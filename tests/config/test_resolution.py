"""Sources into one configuration: precedence, DeepSpeed's numbers, batch sizes, errors, and what
comes back out.
"""

from __future__ import annotations

import json
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune.config.fields import source_names
from finetune.config.paths import check_paths, is_hub_id
from finetune.config.resolution import Resolved, format_config, resolve, resolve_object, to_yaml
from finetune.config.run_config import RunConfig
from finetune.errors import FinetuneError, Problems

NEEDED = {"model": "m", "data": ["d.jsonl"], "output_dir": "o"}
ZERO3 = {
    "zero_optimization": {"stage": 3},
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
}
# Those for pretraining are read as such in test_pretrain_presets.
CONFIGS = Path(__file__).parents[2] / "ds_configs"
SHIPPED = sorted(path for path in CONFIGS.glob("*.json") if not path.name.startswith("pretrain_"))


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def file(name: str, content: dict[str, Any]) -> str:
    Path(name).write_text(json.dumps(content) if name.endswith("json") else yaml.safe_dump(content))
    return name


def deepspeed(name: str = "ds.json", own: dict[str, Any] | None = None, **keys: Any) -> str:
    return file(name, {**ZERO3, **keys, "finetune": {**NEEDED, **(own or {})}})


def command(*files: str, world_size: int = 1, flags: str = "") -> Resolved:
    arguments = [word for name in files for word in ("--config", name)] + flags.split()
    return resolve(arguments, world_size=world_size)


def problems(*files: str, world_size: int = 1, flags: str = "") -> list[FinetuneError]:
    try:
        command(*files, world_size=world_size, flags=flags)
    except Problems as error:
        found = error.problems
    except FinetuneError as error:
        found = [error]
    else:
        return []
    assert all(problem.what and problem.where and problem.fix for problem in found)
    assert all(problem.exit_code == 2 for problem in found)
    return found


def only_problem(*files: str, **more: Any) -> FinetuneError:
    found = problems(*files, **more)
    assert len(found) == 1, [str(problem) for problem in found]
    return found[0]


# Precedence and origins


def test_the_later_source_wins_and_says_so() -> None:
    ds = deepspeed(own={"seed": 1, "lora_r": 8, "cutoff_len": 100}, gradient_clipping=0.5)
    run = file("run.yaml", {"seed": 2, "lora_r": 4})
    resolved = command(ds, run, flags="--seed 3 --micro-batch-size 1 --global-batch-size 8")
    assert (resolved.config.seed, resolved.config.lora_r, resolved.config.cutoff_len) == (3, 4, 100)
    origins = resolved.origins
    assert (origins["seed"], origins["lora_r"], origins["cutoff_len"]) == (
        "--seed",
        "run.yaml",
        "ds.json",
    )
    assert origins["max_grad_norm"] == "ds.json: gradient_clipping"
    assert origins["learning_rate"] == "default"
    assert origins["lora_alpha"] == "default for lora_r 4"
    assert origins["weight_decay"] == origins["curriculum"] == "default"
    assert origins["gradient_accumulation_steps"].startswith("derived from ")
    assert origins.keys() == RunConfig.model_fields.keys()


def test_overrides_of_a_python_caller_win() -> None:
    resolved = resolve(
        ["--config", deepspeed(), "--seed", "3"], overrides={"seed": 4}, world_size=1
    )
    assert resolved.config.seed == 4 and resolved.origins["seed"] == "override"


_SOME = {
    "seed": st.integers(0, 99),
    "cutoff_len": st.integers(2, 99),
    "learning_rate": st.floats(1e-6, 1.0),
    "packing": st.booleans(),
    "finetuning": st.sampled_from(["lora", "full"]),
    "lora_r": st.integers(1, 64),
    "save_steps": st.integers(0, 9),
    "template": st.none() | st.sampled_from(["a", "b"]),
    "lora_target_modules": st.just("all-linear")
    | st.lists(st.sampled_from("qkvo"), min_size=1, unique=True),
    "report_to": st.just("auto")
    | st.lists(st.sampled_from(["wandb", "trackio"]), min_size=1, unique=True),
}
_layers = st.lists(st.fixed_dictionaries({}, optional=_SOME), min_size=0, max_size=4)
_quiet = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def as_flags(values: dict[str, Any]) -> list[str]:
    words = []
    for name, value in values.items():
        given_words = (
            value if isinstance(value, list) else ["none" if value is None else str(value)]
        )
        words += [f"--{name.replace('_', '-')}", *given_words]
    return words


@_quiet
@given(layers=_layers, flags=st.fixed_dictionaries({}, optional=_SOME))
def test_precedence_is_a_merge_of_dicts(
    layers: list[dict[str, Any]], flags: dict[str, Any]
) -> None:
    """Against the simplest thing that could be right: update a dict in order, and remember who did
    it last.
    """
    expected, origins = dict(NEEDED), dict.fromkeys(NEEDED, "0.yaml")
    names = []
    for number, values in enumerate([NEEDED, *layers]):
        kind = ("yaml", "json", "json")[number % 3]
        said = values or {"seed": 42}
        names.append(
            file(f"{number}.{kind}", {**ZERO3, "finetune": said} if number % 3 == 2 else said)
        )
        expected |= said
        origins |= dict.fromkeys(said, names[-1])
    expected |= flags
    origins |= {name: f"--{name.replace('_', '-')}" for name in flags}
    arguments = [word for name in names for word in ("--config", name)] + as_flags(flags)
    resolved = resolve(arguments, world_size=1)
    actual = resolved.config.model_dump(mode="json")
    assert {name: actual[name] for name in expected} == expected
    assert {name: resolved.origins[name] for name in expected} == origins
    untouched = set(_SOME) - set(expected)
    assert {name: actual[name] for name in untouched} == {
        name: RunConfig.model_fields[name].default for name in untouched
    }


@_quiet
@given(
    values=st.fixed_dictionaries(
        {}, optional={**_SOME, "max_steps": st.none() | st.integers(1, 9)}
    ),
    batch=st.tuples(
        st.sampled_from([None, 1, 2, 4]),
        st.sampled_from([None, 1, 3]),
        st.sampled_from([None, 8, 24]),
    ),
    keys=st.fixed_dictionaries(
        {}, optional={"gradient_clipping": st.floats(0, 2), "steps_per_print": st.just(7)}
    ),
    worlds=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_run_yaml_is_a_fixed_point(
    values: dict[str, Any], batch: tuple[Any, ...], keys: dict[str, Any], worlds: tuple[int, int]
) -> None:
    """run.yaml gives the same configuration again, and on another number of processes the same
    training.
    """
    names = ("micro_batch_size", "gradient_accumulation_steps", "global_batch_size")
    own = {
        **values,
        **{name: value for name, value in zip(names, batch, strict=True) if value is not None},
    }
    ds = deepspeed(
        own=own,
        **keys,
        optimizer={"type": "AdamW", "params": {"eps": 1e-7, "betas": [0.8, "auto"]}},
    )
    try:
        first = command(ds, world_size=worlds[0])
    except FinetuneError:
        return  # batch sizes that contradict; refused elsewhere
    Path("run.yaml").write_text(to_yaml(first.config))
    again = command("run.yaml", world_size=worlds[0])
    assert again.config.model_dump() == first.config.model_dump()
    assert to_yaml(again.config) == to_yaml(first.config)
    assert (
        resolve_object(first.config, world_size=worlds[0]).config.model_dump()
        == first.config.model_dump()
    )
    other = command("run.yaml", world_size=worlds[1])
    same = set(RunConfig.model_fields) - {"gradient_accumulation_steps"}
    assert other.config.model_dump(include=same) == first.config.model_dump(include=same)


# DeepSpeed's numbers

PAIRS = [
    ("micro_batch_size", 4, {"train_micro_batch_size_per_gpu": 4}, 2),
    ("global_batch_size", 64, {"train_batch_size": 64}, 128),
    ("gradient_accumulation_steps", 2, {"gradient_accumulation_steps": 2}, 4),
    ("max_grad_norm", 0.25, {"gradient_clipping": 0.25}, 0.5),
    ("learning_rate", 1e-3, {"optimizer": {"params": {"lr": 1e-3}}}, 1e-4),
    ("learning_rate", 1e-3, {"scheduler": {"params": {"warmup_max_lr": 1e-3}}}, 1e-4),
    ("adam_beta1", 0.8, {"optimizer": {"params": {"betas": [0.8, "auto"]}}}, 0.7),
    ("adam_beta2", 0.95, {"optimizer": {"params": {"betas": ["auto", 0.95]}}}, 0.9),
    ("adam_epsilon", 1e-6, {"optimizer": {"params": {"eps": 1e-6}}}, 1e-5),
    ("weight_decay", 0.1, {"optimizer": {"params": {"weight_decay": 0.1}}}, 0.2),
    ("warmup_steps", 50, {"scheduler": {"params": {"warmup_num_steps": 50}}}, 60),
    ("max_steps", 500, {"scheduler": {"params": {"total_num_steps": 500}}}, 600),
    ("lr_scheduler", "linear", {"scheduler": {"type": "WarmupDecayLR"}}, "constant"),
    ("lr_scheduler", "constant", {"scheduler": {"type": "WarmupLR"}}, "linear"),
    ("dtype", "bfloat16", {"bf16": {"enabled": True}, "fp16": {"enabled": False}}, "float16"),
    ("dtype", "float16", {"bf16": {"enabled": False}, "fp16": {"enabled": True}}, "bfloat16"),
    ("dtype", "float32", {"bf16": {"enabled": False}, "fp16": {"enabled": False}}, "bfloat16"),
]


@pytest.mark.parametrize(("name", "value", "keys", "other"), PAIRS)
def test_a_number_of_deepspeeds_becomes_ours(
    name: str, value: Any, keys: dict[str, Any], other: Any
) -> None:
    resolved = command(deepspeed(**keys))
    assert getattr(resolved.config, name) == value
    assert resolved.origins[name].startswith("ds.json: ")
    handed = json.dumps(resolved.config.deepspeed)
    assert (
        "optimizer" not in resolved.config.deepspeed
        and "scheduler" not in resolved.config.deepspeed
    )
    assert str(value) not in handed.replace('"stage": 3', ""), "the number has one owner now"


@pytest.mark.parametrize(("name", "value", "keys", "other"), PAIRS)
def test_auto_and_equal_numbers_are_ours(
    name: str, value: Any, keys: dict[str, Any], other: Any
) -> None:
    resolved = command(deepspeed(own={name: value}, **keys))
    assert getattr(resolved.config, name) == value and resolved.origins[name] == "ds.json"
    if name not in ("lr_scheduler", "dtype"):
        auto = json.loads(json.dumps(keys).replace(json.dumps(value), '"auto"'))
        assert getattr(command(deepspeed(own={name: other}, **auto)).config, name) == other


@pytest.mark.parametrize(("name", "value", "keys", "other"), PAIRS)
def test_two_different_numbers_in_one_file_are_refused_even_under_a_flag(
    name: str, value: Any, keys: dict[str, Any], other: Any
) -> None:
    problem = only_problem(deepspeed(own={name: other}, **keys), flags=f"--{name} {value}")
    assert repr(other) in problem.what and repr(value) in problem.what
    assert f"ds.json: finetune.{name}" in problem.where
    top = next(iter(keys)) if name != "dtype" else ".enabled"
    assert f"ds.json: {top}" in problem.where or top in problem.where


@pytest.mark.parametrize(("name", "value", "keys", "other"), PAIRS)
def test_between_files_the_later_wins(
    name: str, value: Any, keys: dict[str, Any], other: Any
) -> None:
    ds = deepspeed(**keys)
    assert getattr(command(ds, file("b.yaml", {name: other})).config, name) == other
    assert getattr(command(file("b.yaml", {name: other}), ds).config, name) == value
    assert getattr(command(ds, flags=f"--{name} {other}").config, name) == other


def test_contradictions_inside_deepspeeds_own_keys() -> None:
    keys = {"optimizer": {"params": {"lr": 1e-3}}, "scheduler": {"params": {"warmup_max_lr": 1e-4}}}
    problem = only_problem(deepspeed(**keys))
    assert (
        "optimizer.params.lr" in problem.where and "scheduler.params.warmup_max_lr" in problem.where
    )
    both = only_problem(deepspeed(bf16={"enabled": True}, fp16={"enabled": True}))
    assert "bf16.enabled" in both.where and "fp16.enabled" in both.where


def test_a_precision_switched_off_needs_the_other_named() -> None:
    keys = {"bf16": {"enabled": False}, "fp16": {"enabled": "auto"}}
    assert "bf16 is switched off" in only_problem(deepspeed(**keys)).what
    assert command(deepspeed(own={"dtype": "float16"}, **keys)).config.dtype == "float16"
    assert "bf16.enabled is 'yes'" in only_problem(deepspeed(bf16={"enabled": "yes"})).what


def test_auto_on_both_sides_leaves_the_choice_to_the_one_that_chooses() -> None:
    ds = deepspeed(own={"dtype": "auto"}, bf16={"enabled": True})
    resolved = command(ds)
    assert (
        resolved.config.dtype == "bfloat16" and resolved.origins["dtype"] == "ds.json: bf16.enabled"
    )
    assert command(deepspeed(own={"dtype": "auto"})).config.dtype == "auto"
    steps = {"scheduler": {"params": {"total_num_steps": 9}}}
    assert command(deepspeed(own={"max_steps": None}, **steps)).config.max_steps == 9


def test_old_name_of_bf16() -> None:
    ds = file(
        "ds.json",
        {"zero_optimization": {"stage": 2}, "bfloat16": {"enabled": True}, "finetune": NEEDED},
    )
    config = command(ds).config
    assert config.dtype == "bfloat16" and config.deepspeed["bf16"] == {"enabled": "auto"}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"gradient_cliping": 1.0}, "did you mean 'gradient_clipping'?"),
        ({"zero_optimisation": {}}, "did you mean 'zero_optimization'?"),
        ({"zero_optimization": {"stage": 3, "ofload_param": {}}}, "did you mean 'offload_param'?"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"devise": "cpu"}}},
            "did you mean 'device'?",
        ),
        ({"bf16": {"enable": True}}, "did you mean 'enabled'?"),
        ({"fp16": {"loss_scal": 0}}, "did you mean 'loss_scale'?"),
        ({"optimizer": {"params": {"weight_decy": 0}}}, "did you mean 'weight_decay'?"),
        ({"scheduler": {"params": {"warmup_steps": 0}}}, "did you mean 'warmup_num_steps'?"),
        ({"zero_optimization": True}, "must be a block"),
        ({"zero_optimization": {"stage": 4}}, "1 or 2 or 3"),
        ({"zero_optimization": {"stage": True}}, "1 or 2 or 3"),
        ({"gradient_allreduce_op": "sum"}, "it may be 'mean'"),
        ({"gradient_predivide_factor": 2.0}, "it may be 1"),
        ({"prescale_gradients": True}, "it may be False"),
        ({"managed_gradient_accumulation": False}, "it may be True"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "it may be 'fp32'"),
        ({"bf16": {"check_grad_overflow": False}}, "it may be True"),
        ({"bfloat16": {"bf16_master_weights_and_grads": True}}, "it may be False"),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, "it may be False"),
        ({"torch_autocast": {"enabled": True}}, "it may be False"),
        ({"hybrid_engine": {"enabled": True}}, "it may be False"),
        ({"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}}, "it may be False"),
        (
            {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}},
            "changes what is trained",
        ),
        ({"weight_quantization": {"quantized_initialization": {}}}, "changes what is trained"),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "needs ZeRO stage 3",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "gpu"}}},
            "'cpu' or 'nvme' or 'none'",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "without nvme_path",
        ),
        ({"optimizer": {"type": "Lion"}}, "finetune trains with AdamW"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "it may be True"),
        ({"optimizer": {"params": {"betas": 0.9}}}, "two numbers"),
        ({"scheduler": {"type": "OneCycle"}}, "WarmupLR (constant)"),
        ({"scheduler": {"type": ["WarmupLR"]}}, "WarmupLR (constant)"),
        ({"scheduler": {"params": {"warmup_min_lr": 1e-6}}}, "it may be 0"),
        ({"scheduler": {"params": {"warmup_type": "log"}}}, "'linear'"),
        ({"tensor_parallel": {"autotp_size": 2}}, "every process its own samples"),
        ({"data_efficiency": {"enabled": True}}, "every process its own samples"),
        ({"sequence_parallel_size": 2}, "every process its own samples"),
        ({"nebula": {"enabled": True}}, "was removed from DeepSpeed"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 8}}, "was removed from DeepSpeed"),
        ({"steps_per_print": "auto"}, "nothing fills it in"),
        ({"comet": {"api_key": "not-a-real-key"}}, "COMET_API_KEY"),
        ({"learning_rate": 1e-5}, 'move it into the "finetune" block'),
        ({"train_batch_size": "64"}, "a whole number"),
        ({"train_micro_batch_size_per_gpu": 3.0}, "a whole number"),
    ],
)
def test_refused_deepspeed_keys(keys: dict[str, Any], words: str) -> None:
    problem = only_problem(deepspeed(**keys))
    assert words in str(problem) and problem.where.startswith("ds.json")


@pytest.mark.parametrize(
    "keys", [{"gradient_clipping": 1.0}, {"zero_optimization": {"offload_param": None}}]
)
def test_deepspeed_without_a_zero_stage_is_refused(keys: dict[str, Any]) -> None:
    problem = only_problem(file("ds.json", {**keys, "finetune": NEEDED}))
    assert "no ZeRO stage" in problem.what and "--deepspeed none" in problem.fix


def test_a_secret_is_not_repeated() -> None:
    assert "not-a-real-key" not in str(only_problem(deepspeed(comet={"api_key": "not-a-real-key"})))


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"lerning_rate": 1}, "did you mean learning_rate?"),
        ({"per_device_train_batch_size": 1}, "is called micro_batch_size here"),
        ({"zero_optimization": {}}, "to the top level"),
        ({"deepspeed": "x.json"}, "inside the finetune block"),
        ({"load_in_4bit": True}, "use --quantization nf4"),
        ({"learning_rate": "fast"}, "a number above 0"),
        ({"packing": "true"}, "true or false"),
        ({"curriculum": {"levels": ["a"], "stagse": []}}, "did you mean 'stages'?"),
        (
            {"curriculum": {"stages": [{"until": 1.0, "mix": [1, 1, 1], "rump": "step"}]}},
            "did you mean 'ramp'?",
        ),
        (
            {"curriculum": {"stages": [{"until": 2, "mix": [1, 1, 1]}]}},
            "curriculum.stages[0].until is 2",
        ),
        ({"curriculum": {"stages": [{"mix": [1, 1, 1]}]}}, "curriculum.stages[0].until is not set"),
        (
            {"curriculum": {"stages": [{"until": 1.0, "mix": [1, 1]}]}},
            "stage 1 has 2 weights for 3 difficulties",
        ),
        ({"curriculum": {"stages": []}}, "give a list that is not empty"),
        ({"curriculum": {"levels": [1]}}, "give a valid string"),
        (
            {"curriculum": {"stages": [{"until": 2, "mix": [1, 1, 1]}]}},
            "give a value less than or equal to 1",
        ),
        ({"curriculum": "fast"}, "curriculum is 'fast'"),
    ],
)
def test_refused_settings(own: dict[str, Any], words: str) -> None:
    problem = only_problem(deepspeed(own=own))
    assert words in str(problem) and problem.where.startswith("ds.json: finetune.")


# Which kind of file


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({**NEEDED, "zero_optimization": {"stage": 2}}, "zero_optimization is a DeepSpeed key"),
        ({**NEEDED, "fp16": True}, "fp16 is not a setting here"),
        ({"modle": "m", **NEEDED}, "did you mean model?"),
        ({"zero_optimisation": {"stage": 2}}, "did you mean 'zero_optimization'?"),
        ({"finetune": 3}, "the finetune block is 3"),
        ({**NEEDED, "deepspeed": 3}, "give DeepSpeed's keys"),
        ({**NEEDED, "deepspeed": "missing.json"}, "does not exist"),
    ],
)
def test_kinds_are_told_by_their_keys(content: dict[str, Any], words: str) -> None:
    for name in ("a.json", "a.yaml"):
        assert any(words in str(problem) for problem in problems(file(name, content)))


def test_a_finetune_block_alone_is_a_run_without_deepspeed() -> None:
    assert command(file("a.json", {"finetune": NEEDED})).config.deepspeed is None
    assert (
        command(file("a.json", {**NEEDED, "gradient_accumulation_steps": 4})).config.deepspeed
        is None
    )


def test_deepspeed_in_a_run_file() -> None:
    keys = {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5}
    inside = command(file("a.yaml", {**NEEDED, "deepspeed": keys}))
    by_path = command(file("a.yaml", {**NEEDED, "deepspeed": file("ds.json", keys)}))
    assert inside.config == by_path.config
    assert inside.config.deepspeed == {
        "zero_optimization": {"stage": 2},
        "gradient_clipping": "auto",
    }
    assert inside.config.max_grad_norm == 0.5
    assert inside.origins["max_grad_norm"] == "a.yaml: deepspeed: gradient_clipping"
    both = {**NEEDED, "max_grad_norm": 0.1, "deepspeed": keys}
    assert "given twice" in only_problem(file("a.yaml", both)).what
    off = command(
        file("a.yaml", {**NEEDED, "deepspeed": keys}), file("b.yaml", {"deepspeed": None})
    )
    assert off.config.deepspeed is None and off.origins["deepspeed"] == "b.yaml"


def test_deepspeed_by_flag() -> None:
    ds = file("ds.json", {"zero_optimization": {"stage": 2}, "optimizer": {"params": {"lr": 1e-3}}})
    run = file("run.yaml", {**NEEDED, "learning_rate": 1e-4})
    resolved = command(run, flags=f"--deepspeed {ds}")
    assert (
        resolved.config.deepspeed == {"zero_optimization": {"stage": 2}}
        and resolved.config.learning_rate == 1e-3
    )
    assert command(run, flags=f"--deepspeed {ds} --learning-rate 1e-5").config.learning_rate == 1e-5
    assert command(deepspeed("c.json"), flags="--deepspeed none").config.deepspeed is None
    note = " ".join(command(run, flags=f"--deepspeed {deepspeed('c.json')}").notes)
    assert "finetune block of c.json is not read" in note


def test_python_file_of_literals() -> None:
    Path("run.py").write_text(
        'model = "m"\ndata = ["a", "b"]\noutput_dir = "o"\nlearning_rate = 1e-5\n'
    )
    resolved = command("run.py")
    assert resolved.config.data == ("a", "b") and resolved.origins["learning_rate"] == "run.py"


# The three batch numbers


def batch(
    own: dict[str, int], flags: str = "", world_size: int = 1
) -> tuple[tuple[int, int, int], str]:
    resolved = command(deepspeed(own=own), flags=flags, world_size=world_size)
    config = resolved.config
    numbers = (
        config.micro_batch_size,
        config.gradient_accumulation_steps,
        config.global_batch_size,
    )
    return numbers, " ".join(resolved.notes)


MICRO, ACCUMULATION, GLOBAL = "micro_batch_size", "gradient_accumulation_steps", "global_batch_size"


@pytest.mark.parametrize(
    ("own", "flags", "world_size", "expected", "note"),
    [
        ({}, "", 4, ("auto", None, "auto"), ""),
        ({MICRO: 3}, "", 4, (3, None, "auto"), ""),
        ({MICRO: 1, GLOBAL: 32}, "", 1, (1, 32, 32), "gradient_accumulation_steps 32"),
        ({MICRO: 1, GLOBAL: 32}, "", 4, (1, 8, 32), "gradient_accumulation_steps 8"),
        ({MICRO: 1, GLOBAL: 32}, "", 5, (1, 7, 32), "uneven"),
        ({MICRO: 1, GLOBAL: 32}, "", 64, (1, 1, 32), "uneven"),
        ({MICRO: 4, GLOBAL: 32}, "", 2, (4, 4, 32), "gradient_accumulation_steps 4"),
        ({GLOBAL: 10}, "", 4, ("auto", None, 10), ""),
        ({GLOBAL: 10, MICRO: 1}, "", 4, (1, 3, 10), "uneven"),
        ({GLOBAL: 128, MICRO: 1}, "", 16, (1, 8, 128), "gradient_accumulation_steps 8"),
        ({ACCUMULATION: 8}, "", 16, (1, 8, 128), "global_batch_size 128: micro_batch_size 1 x"),
        ({MICRO: 2, ACCUMULATION: 8}, "", 4, (2, 8, 64), "global_batch_size 64"),
        ({GLOBAL: 64, ACCUMULATION: 8}, "", 4, (2, 8, 64), "micro_batch_size 2"),
        ({MICRO: 1, ACCUMULATION: 8, GLOBAL: 128}, "", 16, (1, 8, 128), ""),
        (
            {MICRO: 4, GLOBAL: 32},
            "--gradient-accumulation-steps 2",
            2,
            (4, 2, 16),
            "global_batch_size 16 instead of 32",
        ),
        ({GLOBAL: 32}, "--gradient-accumulation-steps 2", 2, (8, 2, 32), "micro_batch_size 8"),
        (
            {MICRO: 4, ACCUMULATION: 2},
            "--global-batch-size 64",
            2,
            (4, 8, 64),
            "steps 8 instead of 2",
        ),
        (
            {MICRO: 4, ACCUMULATION: 2, GLOBAL: 99},
            "--global-batch-size 64",
            2,
            (4, 8, 64),
            "steps 8 instead of 2",
        ),
        (
            {ACCUMULATION: 2, GLOBAL: 64},
            "--micro-batch-size 4",
            2,
            (4, 8, 64),
            "steps 8 instead of 2",
        ),
        (
            {GLOBAL: 64},
            "--micro-batch-size 4 --gradient-accumulation-steps 3",
            2,
            (4, 3, 24),
            "instead of 64",
        ),
    ],
)
def test_of_three_batch_numbers_the_two_highest_win(
    own: dict[str, int], flags: str, world_size: int, expected: tuple[int, int, int], note: str
) -> None:
    numbers, notes = batch(own, flags, world_size)
    assert numbers == expected and note in notes


def test_a_number_that_stays_what_it_was_is_not_called_replaced() -> None:
    assert "instead of" not in batch({MICRO: 4, ACCUMULATION: 2}, "--global-batch-size 8")[1]
    assert "instead of" not in batch({MICRO: 4, ACCUMULATION: 8})[1]


@given(
    levels=st.tuples(*[st.integers(0, 3)] * 3),
    micro=st.integers(1, 6),
    accumulation=st.integers(1, 6),
    size=st.integers(1, 48),
    world_size=st.integers(1, 5),
)
@_quiet
def test_batch_numbers_agree_whatever_is_given(
    levels: tuple[int, int, int], micro: int, accumulation: int, size: int, world_size: int
) -> None:
    """Any two sources, any world: it agrees with itself and with the two highest, or is refused
    with a reason.
    """
    values = dict(zip((MICRO, ACCUMULATION, GLOBAL), (micro, accumulation, size), strict=True))
    given_levels = dict(zip(values, levels, strict=True))
    files = [
        file(f"{n}.yaml", {"seed": 1, **{k: v for k, v in values.items() if given_levels[k] == n}})
        for n in (1, 2)
    ]
    flags = " ".join(f"--{k} {v}" for k, v in values.items() if given_levels[k] == 3)
    needed = file("0.yaml", NEEDED)
    try:
        config = command(needed, *files, flags=flags, world_size=world_size).config
    except FinetuneError as error:
        assert "nearest that agree" in str(error)
        return
    final = {name: getattr(config, name) for name in values}
    if given_levels[MICRO] == given_levels[ACCUMULATION] == 0:
        assert final[MICRO] == "auto" and final[ACCUMULATION] is None
        return
    if final[GLOBAL] == "auto":
        assert (
            given_levels[GLOBAL] == given_levels[ACCUMULATION] == 0 and final[ACCUMULATION] is None
        )
        return
    assert final[GLOBAL] % final[MICRO] == 0
    assert final[ACCUMULATION] == ceil(final[GLOBAL] / (final[MICRO] * world_size))
    said = [name for name in values if given_levels[name] > 0]
    if len(said) <= 2:
        assert all(final[name] == values[name] for name in said)
    else:
        highest = sorted(levels)[1]
        above = [name for name in values if given_levels[name] > highest]
        assert all(final[name] == values[name] for name in above)
        assert sum(final[name] == values[name] for name in values) >= 2


@pytest.mark.parametrize(
    ("own", "world_size", "words"),
    [
        (
            {MICRO: 3, GLOBAL: 32},
            1,
            ["32 is not a multiple", "micro_batch_size 3", "30 or 33", "2 or 4"],
        ),
        (
            {MICRO: 64, GLOBAL: 32},
            1,
            ["32 is not a multiple", "global_batch_size 64", "micro_batch_size 32"],
        ),
        (
            {MICRO: 4, ACCUMULATION: 2, GLOBAL: 64},
            2,
            ["4 x", "2 x 2 processes is 16", "not global_batch_size 64"],
        ),
        ({ACCUMULATION: 3, GLOBAL: 32}, 2, ["not a whole micro-batch", "30 or 36"]),
    ],
)
def test_batch_numbers_that_do_not_agree(
    own: dict[str, int], world_size: int, words: list[str]
) -> None:
    text = str(only_problem(deepspeed(own=own), world_size=world_size))
    assert "nearest that agree" in text
    assert all(word in text for word in words), text


def test_deepspeeds_batch_numbers_are_the_same_numbers() -> None:
    keys = {
        "train_batch_size": 128,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 8,
    }
    assert command(deepspeed(**keys), world_size=16).config.global_batch_size == 128
    problem = only_problem(deepspeed(**keys), world_size=2)
    assert (
        "ds.json: train_batch_size" in problem.where
        and "is 16, not global_batch_size 128" in problem.what
    )


# Other rules


def test_max_steps_and_num_epochs() -> None:
    ds = deepspeed(own={"max_steps": 10})
    assert command(ds).config.max_steps == 10
    by_flag = command(ds, flags="--num-epochs 2")
    assert by_flag.config.max_steps is None and by_flag.config.num_epochs == 2
    assert "max_steps 10 (ds.json: finetune.max_steps) is not used" in " ".join(by_flag.notes)
    both = command(ds, flags="--num-epochs 2 --max-steps 5")
    assert both.config.max_steps == 5 and "num_epochs 2.0 (--num-epochs) is not used" in " ".join(
        both.notes
    )
    assert command(ds, flags="--max-steps none").config.max_steps is None
    assert command(deepspeed(own={"num_epochs": 2}), flags="--max-steps 7").config.max_steps == 7


def test_sources_and_their_weights() -> None:
    """Of weights from several places the higher count; run.yaml says the same sources again."""
    plain = command(
        file("a.yaml", {**NEEDED, "data": ["x.jsonl", "d/x.jsonl", "y.json", "y.json"]})
    )
    assert (
        all(source.weight is None for source in plain.config.sources)
        and plain.config.data[0] == "x.jsonl"
    )
    assert source_names(plain.config.sources) == (
        "x.jsonl",
        "d/x.jsonl",
        "y.json (1)",
        "y.json (2)",
    )
    entries = [
        {"path": "p", "weight": "natural"},
        {
            "path": "q.jsonl",
            "weight": 2,
            "columns": {"prompt": "question"},
            "difficulty": "explain",
        },
    ]
    mixed = file("b.yaml", {**NEEDED, "data": entries})
    found = command(mixed).config
    assert [source.weight for source in found.sources] == ["natural", 2.0]
    assert (
        found.sources[1].columns == {"prompt": "question"}
        and found.sources[1].difficulty == "explain"
    )
    assert yaml.safe_load(to_yaml(found))["data"] == [entries[0], {**entries[1], "weight": 2.0}]
    assert (
        resolve_object(yaml.safe_load(to_yaml(found)), 1).config
        == resolve_object(found, 1).config
        == found
    )
    by_flag = command(mixed, flags="--data-weights natural 1e-1")
    assert [source.weight for source in by_flag.config.sources] == ["natural", 0.1]
    assert "the weights in data (b.yaml: data) are not used" in str(by_flag.notes)
    old = file("c.yaml", {**NEEDED, "data": ["p", "q"], "data_weights": [3, 1]})
    assert [source.weight for source in command(old).config.sources] == [3.0, 1.0]
    one = command(
        file("d.yaml", {**NEEDED, "data": {"path": "p", "weight": 2}}), flags="--data-weights 1"
    )
    assert [source.weight for source in one.config.sources] == [1.0]
    other = command(old, flags="--data r")
    assert other.config.sources[
        0
    ].weight is None and "data_weights (c.yaml: data_weights) is dropped" in str(other.notes)
    assert format_config(command(mixed)).count("data[1].weight") == 1


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "x", "3,1", "true"])
def test_what_is_no_weight_is_refused(weight: str) -> None:
    (problem,) = problems(file("a.yaml", NEEDED), flags=f"--data-weights {weight}")
    assert "a weight is" in problem.what and "give a number above 0, or natural" in problem.fix
    twice = problems(
        file("b.yaml", {**NEEDED, "data": [{"path": "p", "weight": 1}], "data_weights": [1]})
    )
    assert "an entry of data has a weight" in twice[0].what
    some = problems(file("e.yaml", {**NEEDED, "data": ["p", {"path": "q", "weight": 1}]}))
    assert "p in data has no weight, and others have" in some[0].what
    unknown = problems(file("c.yaml", {**NEEDED, "data": {"path": "p", "difficulty": "hard"}}))
    assert "p has the difficulty 'hard'" in unknown[0].what
    assert (
        "valid_data has a weight"
        in problems(file("d.yaml", {**NEEDED, "valid_data": {"path": "p", "weight": 1}}))[0].what
    )


def test_data_by_flag_drops_the_files_validation_data() -> None:
    ds = deepspeed(own={"valid_data": ["v"]})
    dropped = command(ds, flags="--data other")
    assert (
        dropped.config.valid_data == ()
        and "valid_data (ds.json: finetune.valid_data) is dropped" in str(dropped.notes)
    )
    assert command(ds, flags="--data other --valid-data w").config.valid_data == ("w",)
    assert command(ds, flags="--valid-data w").config.valid_data == ("w",)
    assert command(ds, file("b.yaml", {"data": "other"})).config.valid_data == ("v",)
    assert command(ds).config.valid_data == ("v",)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--warmup-steps 10 --max-steps 10", "warning: warmup_steps 10 is not below max_steps 10"),
        ("--valid-data d.jsonl", "warning: d.jsonl is in data and in valid_data"),
        ("--finetuning full --lora-r 3", "not used, because finetuning is full: lora_r (--lora-r)"),
        (
            "--use-curriculum false --curriculum-seed 3",
            "not used, because use_curriculum is false: curriculum_seed",
        ),
    ],
)
def test_what_is_probably_wrong_is_said(flags: str, words: str) -> None:
    assert words in " ".join(command(deepspeed(), flags=flags).notes)
    assert words not in " ".join(command(deepspeed()).notes)


def test_missing_settings_and_their_slips() -> None:
    found = problems()
    assert [problem.what.split()[0] for problem in found] == ["model", "data", "output_dir"]
    found = problems(flags="--modle m --data d --output-dir o")
    assert len(found) == 1, "the slip is the reason why model is missing"
    assert len(problems("nowhere.json")) == 1, "the file may set what is missing"


def test_problems_of_all_sources_come_together() -> None:
    ds = deepspeed(own={"sede": 1}, gradient_cliping=1)
    found = problems(ds, "nowhere.json", flags="--lora-r 0 stray --dtpe x")
    text = "\n".join(map(str, found))
    assert len(found) == 6
    for words in ("sede", "gradient_cliping", "nowhere.json", "lora_r is 0", "--dtpe", "'stray'"):
        assert words in text


# Python callers


def test_resolve_object_takes_a_config_a_dict_and_a_path() -> None:
    batch = {"global_batch_size": 8, "micro_batch_size": 1}
    content = {**NEEDED, **batch, "deepspeed": {**ZERO3, "gradient_clipping": 0.5}}
    a = resolve_object(RunConfig(**content), world_size=2)
    b = resolve_object({**content, "output_dir": Path("o")}, world_size=2)
    c = resolve_object(Path(file("a.yaml", content)), world_size=2)
    d = resolve_object({**ZERO3, "gradient_clipping": 0.5, "finetune": {**NEEDED, **batch}}, 2)
    assert a.config == b.config == c.config == d.config
    assert a.config.max_grad_norm == 0.5 and a.config.gradient_accumulation_steps == 4
    assert (a.origins["model"], b.origins["model"], c.origins["model"]) == (
        "RunConfig",
        "the dict",
        "a.yaml",
    )


def test_a_resolved_config_runs_on_another_number_of_processes() -> None:
    first = command(deepspeed(own={MICRO: 2, ACCUMULATION: 2}), world_size=4).config
    other = resolve_object(first, world_size=1).config
    assert (other.global_batch_size, other.gradient_accumulation_steps) == (16, 8)
    changed = first.model_copy(update={"micro_batch_size": 4})
    assert resolve_object(changed, world_size=4).config.gradient_accumulation_steps == 1


@pytest.mark.parametrize("wrong", [3, None, ["a"], {"modle": 1}, {1: 2}, {}, "nowhere.yaml"])
def test_refused_objects(wrong: Any) -> None:
    with pytest.raises(FinetuneError) as caught:
        resolve_object(wrong, world_size=1)
    assert caught.value.exit_code == 2


# Coming back out


def test_format_config_shows_every_value_with_its_origin() -> None:
    resolved = command(deepspeed(own={"seed": 7}), flags="--data a b --print-config", world_size=2)
    assert resolved.print_config
    text = format_config(resolved)
    lines = {line.split()[0]: line for line in text.splitlines() if line and line[0] not in "#-"}
    for name, origin in resolved.origins.items():
        shown = [line for path, line in lines.items() if path.split(".")[0].split("[")[0] == name]
        assert shown and all(line.endswith(origin) for line in shown), name
    assert lines["data"].split() == ["data", "a", "b", "--data"]
    assert lines["seed"].split() == ["seed", "7", "ds.json"]
    assert lines["deepspeed.zero_optimization.stage"].split()[1:] == ["3", "ds.json"]
    assert (
        len(
            {
                line.index(line.split()[-1])
                for line in (lines["seed"], lines["packing"], lines["data"])
            }
        )
        == 1
    )
    assert all(note in text for note in resolved.notes)


def test_run_yaml_leaves_out_what_the_machine_decides() -> None:
    content = yaml.safe_load(to_yaml(command(deepspeed(), world_size=3).config))
    assert content.keys() == RunConfig.model_fields.keys() - {"gradient_accumulation_steps"}
    assert next(iter(content)) == "model"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configs_are_complete_runs(path: Path) -> None:
    resolved = resolve(["--config", str(path)], world_size=2)
    assert resolved.config.deepspeed and not [
        note for note in resolved.notes if note.startswith("warning")
    ]


# Paths


def test_check_paths(tmp_path: Path) -> None:
    for name in ("train.jsonl", "valid.jsonl", "weights.safetensors", "chat.jinja"):
        Path(name).write_text("{}")
    Path("base/inner").mkdir(parents=True)

    def found(**values: Any) -> str:
        checked = check_paths(
            RunConfig(**{"model": "base", "data": "train.jsonl", "output_dir": "o", **values})
        )
        assert all(problem.what and problem.where and problem.fix for problem in checked)
        return "\n".join(map(str, checked))

    assert found() == ""
    assert (
        found(valid_data="valid.jsonl", template="chat.jinja", cache_dir="cache", resume="base")
        == ""
    )
    assert found(model="Qwen/Qwen3-8B") == found(model="gpt2") == found(template="chatml") == ""
    assert is_hub_id("base/other") and not is_hub_id("base") and not is_hub_id("base/inner")
    assert "did you mean train.jsonl?" in found(data="tran.jsonl")
    assert "write --data train.jsonl valid.jsonl" in found(data="train.jsonl,valid.jsonl")
    assert found(data="base") == found(data=["*.jsonl", "base"]) == "", (
        "what is in a folder is read where data is"
    )
    assert "does not exist" in found(data="*.parquet")
    assert "is a file, not a folder" in found(model="weights.safetensors")
    for missing in ("./bas", "/nowhere/base", "base/inner/x", "~/base", "../none"):
        assert "does not exist" in found(model=missing), missing
    assert "must be a folder" in found(output_dir="train.jsonl")
    assert "no such folder" in found(resume="o/checkpoint-3")
    assert "template file" in found(template="chat.jnja")
    both = check_paths(RunConfig(model="./no", data=("a", "b"), output_dir="train.jsonl"))
    assert len(both) == 4


def test_the_example_in_the_docs_works() -> None:
    docs = Path(__file__).parents[2] / "docs" / "reference" / "configuration.md"
    example = docs.read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]
    Path("run.yaml").write_text(example)
    config = command(file("a.json", NEEDED), "run.yaml").config
    assert [stage.ramp for stage in config.curriculum.stages] == ["step", "linear"]
