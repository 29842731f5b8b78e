"""Sources into one configuration: precedence, DeepSpeed's numbers, batch sizes, errors."""

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
AUTO = {"enabled": "auto"}
ZERO3 = {"zero_optimization": {"stage": 3}, "bf16": AUTO, "fp16": AUTO}
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def file(name: str, content: dict[str, Any]) -> str:
    Path(name).write_text(json.dumps(content) if name.endswith("json") else yaml.safe_dump(content))
    return name


def deepspeed(name: str = "ds.json", own: dict[str, Any] | None = None, **keys: Any) -> str:
    return file(name, {**ZERO3, **keys, "finetune": {**NEEDED, **(own or {})}})


def nested(keys: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's keys of dotted names, with ZeRO-3."""
    made = json.loads(json.dumps(ZERO3))
    for path, value in keys.items():
        *outer, last = path.split(".")
        block = made
        for name in outer:
            block = block.setdefault(name, {})
        block[last] = value
    return made


def command(*files: str, world_size: int = 1, flags: str = "") -> Resolved:
    arguments = [word for name in files for word in ("--config", name)] + flags.split()
    return resolve(arguments, world_size=world_size)


def problems(*files: str, world_size: int = 1, flags: str = "") -> list[FinetuneError]:
    with pytest.raises(FinetuneError) as caught:
        command(*files, world_size=world_size, flags=flags)
    found = caught.value.problems if isinstance(caught.value, Problems) else [caught.value]
    assert all(each.what and each.where and each.fix and each.exit_code == 2 for each in found)
    return found


def only_problem(*files: str, **more: Any) -> FinetuneError:
    found = problems(*files, **more)
    assert len(found) == 1, [str(problem) for problem in found]
    return found[0]


# Precedence and origins


def test_the_later_source_wins_and_says_so():
    ds = deepspeed(own={"seed": 1, "lora_r": 8, "cutoff_len": 100}, gradient_clipping=0.5)
    run = file("run.yaml", {"seed": 2, "lora_r": 4})
    resolved = command(ds, run, flags="--seed 3 --micro-batch-size 1 --global-batch-size 8")
    assert (resolved.config.seed, resolved.config.lora_r, resolved.config.cutoff_len) == (3, 4, 100)
    expected = {"seed": "--seed", "lora_r": "run.yaml", "cutoff_len": "ds.json"}
    expected |= {"learning_rate": "default", "lora_alpha": "default for lora_r 4"}
    expected |= {"max_grad_norm": "ds.json: gradient_clipping", "curriculum": "default"}
    assert resolved.origins | expected == resolved.origins
    assert resolved.origins["gradient_accumulation_steps"].startswith("derived from ")
    assert resolved.origins.keys() == RunConfig.model_fields.keys()
    caller = resolve(["--config", ds, "--seed", "3"], overrides={"seed": 4}, world_size=1)
    assert caller.config.seed == 4 and caller.origins["seed"] == "override"


_quiet = settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


MICRO, ACCUMULATION, GLOBAL = "micro_batch_size", "gradient_accumulation_steps", "global_batch_size"


@_quiet
@given(
    own=st.fixed_dictionaries(
        {},
        optional={
            "finetuning": st.sampled_from(["lora", "full"]),
            "report_to": st.sampled_from(["auto", ["wandb", "trackio"]]),
            "max_steps": st.none() | st.integers(1, 9),
            MICRO: st.sampled_from([1, 2, 4]),
            ACCUMULATION: st.sampled_from([1, 3]),
            GLOBAL: st.sampled_from([8, 24]),
        },
    ),
    clipping=st.floats(0, 2),
    worlds=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_run_yaml_is_a_fixed_point(own, clipping, worlds):
    """The same configuration again, and on other numbers of processes the same training."""
    optimizer = {"type": "AdamW", "params": {"eps": 1e-7, "betas": [0.8, "auto"]}}
    ds = deepspeed(own=own, gradient_clipping=clipping, optimizer=optimizer)
    try:
        first = command(ds, world_size=worlds[0]).config
    except FinetuneError:
        return  # batch sizes that contradict; refused elsewhere
    text = to_yaml(first)
    Path("run.yaml").write_text(text)
    kept = RunConfig.model_fields.keys() - {"gradient_accumulation_steps"}
    assert yaml.safe_load(text).keys() == kept and text.startswith("model:")
    again = command("run.yaml", world_size=worlds[0]).config
    assert again.model_dump() == first.model_dump() and to_yaml(again) == text
    same = resolve_object(first, world_size=worlds[0]).config
    assert same.model_dump() == first.model_dump()
    other = command("run.yaml", world_size=worlds[1]).config
    assert other.model_dump(include=kept) == first.model_dump(include=kept)


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
def test_a_number_of_deepspeeds_becomes_ours(name, value, keys, other):
    def found(*files: str, flags: str = "") -> Any:
        return getattr(command(*files, flags=flags).config, name)

    ds = deepspeed(**keys)
    resolved = command(ds)
    assert getattr(resolved.config, name) == value
    assert resolved.origins[name].startswith("ds.json: ")
    handed = resolved.config.deepspeed
    assert not {"optimizer", "scheduler"} & handed.keys()
    left = json.dumps(handed).replace('"stage": 3', "")
    assert str(value) not in left, "the number has one owner now"
    later = file("b.yaml", {name: other})
    assert (found(ds, later), found(later, ds)) == (other, value)
    assert found(ds, flags=f"--{name} {other}") == other
    # In one file an equal number and auto are ours; a different one is refused, even under a flag.
    resolved = command(deepspeed(own={name: value}, **keys))
    assert getattr(resolved.config, name) == value and resolved.origins[name] == "ds.json"
    if name not in ("lr_scheduler", "dtype"):
        auto = json.loads(json.dumps(keys).replace(json.dumps(value), '"auto"'))
        assert found(deepspeed(own={name: other}, **auto)) == other
    problem = only_problem(deepspeed(own={name: other}, **keys), flags=f"--{name} {value}")
    assert repr(other) in problem.what and repr(value) in problem.what
    assert f"ds.json: finetune.{name}" in problem.where


def test_the_number_format_of_deepspeed():
    off = {"bf16": {"enabled": False}, "fp16": {"enabled": "auto"}}
    assert "bf16 is switched off" in only_problem(deepspeed(**off)).what
    assert command(deepspeed(own={"dtype": "float16"}, **off)).config.dtype == "float16"
    both = only_problem(deepspeed(bf16={"enabled": True}, fp16={"enabled": True}))
    assert "bf16.enabled" in both.where and "fp16.enabled" in both.where
    resolved = command(deepspeed(own={"dtype": "auto"}, bf16={"enabled": True}))
    assert resolved.origins["dtype"] == "ds.json: bf16.enabled"
    old = {"zero_optimization": {"stage": 2}, "bfloat16": {"enabled": True}, "finetune": NEEDED}
    config = command(file("ds.json", old)).config
    assert config.dtype == "bfloat16" and config.deepspeed["bf16"] == AUTO


ZERO = "zero_optimization"


def test_refused_deepspeed_keys():
    for keys, words in (
        ({"gradient_cliping": 1.0}, "did you mean 'gradient_clipping'?"),
        ({"bf16.enabled": "yes"}, "bf16.enabled is 'yes'"),
        ({ZERO: True}, "must be a block"),
        ({f"{ZERO}.stage": 2, f"{ZERO}.offload_param.device": "cpu"}, "needs ZeRO stage 3"),
        ({f"{ZERO}.offload_param.device": "nvme"}, "without nvme_path"),
        ({"optimizer.type": "Lion"}, "finetune trains with AdamW"),
        ({"optimizer.params.betas": 0.9}, "two numbers"),
        ({f"{ZERO}.zenflow.topk_ratio": 0.1}, "changes what is trained"),
        ({"scheduler.type": ["WarmupLR"]}, "WarmupLR (constant)"),
        ({"optimizer.params.lr": 1e-3, "scheduler.params.warmup_max_lr": 1e-4}, "given twice"),
        ({"tensor_parallel.autotp_size": 2}, "every process its own samples"),
        ({"nebula.enabled": True}, "was removed from DeepSpeed"),
        ({"steps_per_print": "auto"}, "nothing fills it in"),
        ({"comet.api_key": "not-a-real-key"}, "COMET_API_KEY"),
        ({"learning_rate": 1e-5}, 'move it into the "finetune" block'),
        ({"train_batch_size": "64"}, "a whole number"),
    ):
        problem = only_problem(deepspeed(**nested(keys)))
        assert words in str(problem) and problem.where.startswith("ds.json")
        assert "not-a-real-key" not in str(problem), "a secret is not repeated"


# What would train something else, or be refused by DeepSpeed when all is loaded.
WRONG_VALUES = """
zero_optimization.stage=4 zero_optimization.stage=true zero_optimization.offload_param.device="gpu"
zero_optimization.zero_quantized_gradients=true gradient_allreduce_op="sum"
gradient_predivide_factor=2.0 prescale_gradients=true managed_gradient_accumulation=false
data_types.grad_accum_dtype="bf16" bf16.check_grad_overflow=false
bfloat16.bf16_master_weights_and_grads=true fp16.fp16_master_weights_and_grads=true
torch_autocast.enabled=true hybrid_engine.enabled=true optimizer.params.adam_w_mode=false
scheduler.params.warmup_min_lr=1e-6 scheduler.params.warmup_type="log"
"""


def test_values_that_deepspeed_may_not_have():
    for word in WRONG_VALUES.split():
        path, _, value = word.partition("=")
        problem = only_problem(deepspeed(**nested({path: json.loads(value)})))
        assert f"DeepSpeed key {path} is" in problem.what and "it may be" in problem.fix, word


def run(**own: Any) -> dict[str, Any]:
    """The content of a file with a block of ours."""
    return {**ZERO3, "finetune": {**NEEDED, **own}}


def stages(**stage: Any) -> dict[str, Any]:
    return run(curriculum={"stages": [{"until": 1.0, "mix": [1, 1, 1], **stage}]})


def test_refused_files():
    for content, words in (
        ({"gradient_clipping": 1.0, "finetune": NEEDED}, "no ZeRO stage"),
        ({**NEEDED, ZERO: {"stage": 2}}, "zero_optimization is a DeepSpeed key"),
        ({"modle": "m", **NEEDED}, "did you mean model?"),
        ({"finetune": 3}, "the finetune block is 3"),
        (run(lerning_rate=1), "did you mean learning_rate?"),
        (run(zero_optimization={}), "to the top level"),
        (run(deepspeed="x.json"), "inside the finetune block"),
        (run(packing="true"), "true or false"),
        (run(curriculum={"levels": ["a"], "stagse": []}), "did you mean 'stages'?"),
        (run(curriculum={"stages": [{"mix": [1]}]}), "curriculum.stages[0].until is not set"),
        (run(curriculum={"stages": []}), "give a list that is not empty"),
        (run(curriculum={"levels": [1]}), "give a valid string"),
        (stages(until=2), "give a value less than or equal to 1"),
        ({**NEEDED, "deepspeed": 3}, "give DeepSpeed's keys"),
        (run(data=[{"weight": 2}]), "data[0].path is not set"),
    ):
        found = problems(file("a.json", content))
        assert any(words in str(problem) for problem in found)
        assert all(each.where.startswith("a.json") or ZERO not in content for each in found)


def test_where_deepspeeds_keys_may_be():
    shared_name = {**NEEDED, "gradient_accumulation_steps": 4}
    assert command(file("a.json", shared_name)).config.deepspeed is None
    keys = {ZERO: {"stage": 2}, "gradient_clipping": 0.5}
    inside = command(file("a.yaml", {**NEEDED, "deepspeed": keys}))
    by_path = command(file("a.yaml", {**NEEDED, "deepspeed": file("ds.json", keys)}))
    assert inside.config == by_path.config
    assert inside.config.deepspeed == keys | {"gradient_clipping": "auto"}
    assert inside.origins["max_grad_norm"] == "a.yaml: deepspeed: gradient_clipping"
    on = file("a.yaml", {**NEEDED, "deepspeed": keys})
    off = command(on, file("b.yaml", {"deepspeed": None}))
    assert off.config.deepspeed is None and off.origins["deepspeed"] == "b.yaml"


def test_deepspeed_by_flag():
    ds = file("ds.json", {ZERO: {"stage": 2}, "optimizer": {"params": {"lr": 1e-3}}})
    run = file("run.yaml", {**NEEDED, "learning_rate": 1e-4})
    config = command(run, flags=f"--deepspeed {ds}").config
    assert config.deepspeed == {ZERO: {"stage": 2}} and config.learning_rate == 1e-3
    assert command(deepspeed("c.json"), flags="--deepspeed none").config.deepspeed is None
    note = " ".join(command(run, flags=f"--deepspeed {deepspeed('c.json')}").notes)
    assert "finetune block of c.json is not read" in note


# The three batch numbers


def test_notes_say_what_was_derived_and_what_it_replaces():
    four = {MICRO: 4, GLOBAL: 32}
    for own, flags, world_size, note in (
        ({MICRO: 1, GLOBAL: 32}, "", 5, "gradient_accumulation_steps 7: global_batch_size 32 / "),
        ({ACCUMULATION: 2, GLOBAL: 32}, "", 2, "micro_batch_size 8 instead of 1 (1 with"),
        ({ACCUMULATION: 8}, "", 16, "global_batch_size 128: micro_batch_size 1 x"),
        (four, f"--{ACCUMULATION} 2", 2, "global_batch_size 16 instead of 32 (ds.json: finetune."),
        (four | {ACCUMULATION: 2}, f"--{GLOBAL} 64", 2, "steps 8 instead of 2 (ds.json: finetune."),
    ):
        assert note in " ".join(
            command(deepspeed(own=own), flags=flags, world_size=world_size).notes
        )
    later = command(deepspeed(own=four), file("b.yaml", {ACCUMULATION: 2}))
    assert "global_batch_size 8 instead of 32 (ds.json: finetune." in " ".join(later.notes)


@given(
    levels=st.tuples(*[st.integers(0, 3)] * 3),
    micro=st.integers(1, 6),
    accumulation=st.integers(1, 6),
    size=st.integers(1, 48),
    world_size=st.integers(1, 5),
)
@_quiet
def test_batch_numbers_agree_whatever_is_given(levels, micro, accumulation, size, world_size):
    """It agrees with itself and with the two highest sources, or is refused with a reason."""
    values = dict(zip((MICRO, ACCUMULATION, GLOBAL), (micro, accumulation, size), strict=True))
    level = dict(zip(values, levels, strict=True))
    files = [
        file(f"{n}.yaml", {"seed": 1, **{k: v for k, v in values.items() if level[k] == n}})
        for n in (1, 2)
    ]
    flags = " ".join(f"--{k} {v}" for k, v in values.items() if level[k] == 3)
    try:
        config = command(file("0.yaml", NEEDED), *files, flags=flags, world_size=world_size).config
    except FinetuneError as error:
        assert "nearest that agree" in str(error)
        return
    final = {name: getattr(config, name) for name in values}
    if "auto" in final.values():  # the model decides
        assert level[ACCUMULATION] == 0 == min(level[MICRO], level[GLOBAL])
        assert final[ACCUMULATION] is None
        return
    assert final[GLOBAL] % final[MICRO] == 0
    assert final[ACCUMULATION] == ceil(final[GLOBAL] / (final[MICRO] * world_size))
    said = [name for name in values if level[name] > 0]
    if len(said) <= 2:
        assert all(final[name] == values[name] for name in said)
    else:
        above = [name for name in values if level[name] > sorted(levels)[1]]
        assert all(final[name] == values[name] for name in above)
        assert sum(final[name] == values[name] for name in values) >= 2


DEEPSPEEDS = {
    "train_batch_size": 128,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 8,
}


def test_batch_numbers_that_do_not_agree():
    for own, keys, world_size, words in (
        ({MICRO: 3, GLOBAL: 32}, {}, 1, "32 is not a multiple|size 3|30 or 33|2 or 4"),
        ({MICRO: 4, ACCUMULATION: 2, GLOBAL: 64}, {}, 2, "2 x 2 processes is 16|not global"),
        ({ACCUMULATION: 3, GLOBAL: 32}, {}, 2, "not a whole micro-batch|30 or 36"),
        ({}, DEEPSPEEDS, 2, "ds.json: train_batch_size|is 16, not global_batch_size 128"),
    ):
        text = str(only_problem(deepspeed(own=own, **keys), world_size=world_size))
        assert all(word in text for word in ["nearest that agree", *words.split("|")]), text


# Other rules


def test_max_steps_and_num_epochs():
    ds = deepspeed(own={"max_steps": 10})
    by_flag = command(ds, flags="--num-epochs 2")
    assert by_flag.config.max_steps is None and by_flag.config.num_epochs == 2
    assert "max_steps 10 (ds.json: finetune.max_steps) is not used" in " ".join(by_flag.notes)
    both = command(ds, flags="--num-epochs 2 --max-steps 5")
    assert both.config.max_steps == 5
    assert "num_epochs 2.0 (--num-epochs) is not used" in " ".join(both.notes)
    assert command(deepspeed(own={"max_steps": 3, "num_epochs": 2})).config.max_steps == 3


def test_sources_and_their_weights():
    """Of weights from several places the higher count; run.yaml says the same sources again."""
    plain = file("a.yaml", {**NEEDED, "data": ["x.jsonl", "d/x.jsonl", "y.json", "y.json"]})
    config = command(plain).config
    names = ("x.jsonl", "d/x.jsonl", "y.json (1)", "y.json (2)")
    assert source_names(config.sources) == names
    own = {"columns": {"prompt": "question"}, "difficulty": "explain", "max_samples": 5}
    entries = [{"path": "p", "weight": "natural"}, {"path": "q.jsonl", "weight": 2, **own}]
    mixed = file("b.yaml", {**NEEDED, "data": entries, "max_samples": 9})
    found = command(mixed).config
    assert [source.weight for source in found.sources] == ["natural", 2.0]
    assert [source.max_samples for source in found.sources] == [9, 5], "its own counts"
    assert found.sources[1].columns == own["columns"] and found.sources[1].difficulty == "explain"
    written = yaml.safe_load(to_yaml(found))
    assert written["data"] == [entries[0], {**entries[1], "weight": 2.0}]
    assert resolve_object(written, 1).config == resolve_object(found, 1).config == found
    by_flag = command(mixed, flags="--data-weights natural 1e-1")
    assert [source.weight for source in by_flag.config.sources] == ["natural", 0.1]
    assert "the weights in data (b.yaml: data) are not used" in str(by_flag.notes)
    old = file("c.yaml", {**NEEDED, "data": ["p", "q"], "data_weights": [3, 1]})
    assert [source.weight for source in command(old).config.sources] == [3.0, 1.0]
    other = command(old, flags="--data r")
    assert other.config.sources[0].weight is None
    assert "data_weights (c.yaml: data_weights) is dropped" in str(other.notes)


def test_sources_that_are_refused():
    for content, flags, words in (
        *(({}, f"--data-weights {bad}", "a weight is") for bad in ["0", "inf", "3,1", "true"]),
        ({}, "--data-weights 3 1", "data_weights has 2 weights for 1 entries of data"),
        ({"data": [{"path": "p", "weight": 1}], "data_weights": [1]}, "", "entry of data has a"),
        ({"data": ["p", {"path": "q", "weight": 1}]}, "", "p in data has no weight, and others"),
        ({"data": {"path": "p", "difficulty": "hard"}}, "", "p has the difficulty 'hard'"),
        ({"valid_data": {"path": "p", "weight": 1}}, "", "valid_data has a weight"),
    ):
        assert words in only_problem(file("a.yaml", {**NEEDED, **content}), flags=flags).what


def test_data_by_flag_drops_the_files_validation_data():
    ds = deepspeed(own={"valid_data": ["v"]})
    dropped = command(ds, flags="--data other")
    assert dropped.config.valid_data == ()
    assert "valid_data (ds.json: finetune.valid_data) is dropped" in str(dropped.notes)
    assert command(ds, flags="--data other --valid-data w").config.valid_data == ("w",)
    assert command(ds, file("b.yaml", {"data": "other"})).config.valid_data == ("v",)


def test_what_is_probably_wrong_is_said():
    for flags, words in (
        ("--warmup-steps 10 --max-steps 10", "warning: warmup_steps 10 is not below max_steps 10"),
        ("--valid-data d.jsonl", "warning: d.jsonl is in data and in valid_data"),
        ("--finetuning full --lora-r 3", "not used, because finetuning is full: lora_r (--lora-r)"),
    ):
        assert words in " ".join(command(deepspeed(), flags=flags).notes)
        assert words not in " ".join(command(deepspeed()).notes)


def test_problems_of_all_sources_come_together():
    ds = deepspeed(own={"sede": 1}, gradient_cliping=1)
    found = problems(ds, "nowhere.json", flags="--lora-r 0 stray --dtpe x")
    words = ("sede", "gradient_cliping", "nowhere.json", "lora_r is 0", "--dtpe", "'stray'")
    text = "\n".join(map(str, found))
    assert len(found) == len(words) and all(word in text for word in words)
    assert [each.what.split()[0] for each in problems()] == ["model", "data", "output_dir"]
    assert only_problem(flags="--modle m --data d --output-dir o"), "why model is missing"
    assert only_problem("nowhere.json"), "the file may set what is missing"


# Python callers, and coming back out


def test_resolve_object_takes_a_config_a_dict_and_a_path():
    batch = {"global_batch_size": 8, "micro_batch_size": 1}
    content = {**NEEDED, **batch, "deepspeed": {**ZERO3, "gradient_clipping": 0.5}}
    a = resolve_object(RunConfig(**content), world_size=2)
    b = resolve_object({**content, "output_dir": Path("o")}, world_size=2)
    c = resolve_object(Path(file("a.yaml", content)), world_size=2)
    d = resolve_object({**ZERO3, "gradient_clipping": 0.5, "finetune": {**NEEDED, **batch}}, 2)
    assert a.config == b.config == c.config == d.config
    assert a.config.max_grad_norm == 0.5 and a.config.gradient_accumulation_steps == 4
    origins = [each.origins["model"] for each in (a, b, c)]
    assert origins == ["RunConfig", "the dict", "a.yaml"]
    assert "gradient_accumulation_steps" not in to_yaml(a.config), "it is of the machine"
    changed = a.config.model_copy(update={"micro_batch_size": 4})
    assert resolve_object(changed, world_size=2).config.gradient_accumulation_steps == 1
    for wrong in (3, {"modle": 1}, {1: 2}, {}, "nowhere.yaml"):
        with pytest.raises(FinetuneError) as caught:
            resolve_object(wrong, world_size=1)
        assert caught.value.exit_code == 2, wrong


def test_format_config_shows_every_value_with_its_origin():
    resolved = command(deepspeed(own={"seed": 7}), flags="--data a b", world_size=2)
    text = format_config(resolved)
    lines = {line.split()[0]: line for line in text.splitlines() if line and line[0] not in "#-"}
    for name, origin in resolved.origins.items():
        shown = [line for path, line in lines.items() if path.split(".")[0].split("[")[0] == name]
        assert shown and all(line.endswith(origin) for line in shown), name
    assert lines["data"].split() == ["data", "a", "b", "--data"]
    assert lines["deepspeed.zero_optimization.stage"].split()[1:] == ["3", "ds.json"]
    assert all(note in text for note in resolved.notes)


def test_the_example_in_the_docs_works():
    docs = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    Path("run.yaml").write_text(docs.split("```yaml\n")[1].split("```")[0])
    config = command(file("a.json", NEEDED), "run.yaml").config
    assert [stage.ramp for stage in config.curriculum.stages] == ["step", "linear"]


# Paths


def test_check_paths():
    for name in ("train.jsonl", "valid.jsonl", "weights.safetensors", "chat.jinja"):
        Path(name).write_text("{}")
    Path("base/inner").mkdir(parents=True)

    def found(**values: Any) -> str:
        config = {"model": "base", "data": "train.jsonl", "output_dir": "o", **values}
        checked = check_paths(RunConfig(**config))
        assert all(problem.what and problem.where and problem.fix for problem in checked)
        return "\n".join(map(str, checked))

    for right in (
        {"valid_data": "valid.jsonl", "template": "chat.jinja", "cache_dir": "c", "resume": "base"},
        {"model": "Qwen/Qwen3-8B", "template": "chatml", "data": ["*.jsonl", "base"]},
    ):
        assert found(**right) == "", right
    assert is_hub_id("base/other") and not is_hub_id("base") and not is_hub_id("base/inner")
    for wrong, words in (
        ({"data": "tran.jsonl"}, "did you mean train.jsonl?"),
        ({"data": "train.jsonl,valid.jsonl"}, "write --data train.jsonl valid.jsonl"),
        ({"model": "weights.safetensors"}, "is a file, not a folder"),
        *(({"model": bad}, "does not exist") for bad in ("./bas", "base/inner/x")),
        ({"output_dir": "train.jsonl"}, "must be a folder"),
        ({"resume": "o/checkpoint-3"}, "no such folder"),
        ({"template": "chat.jnja"}, "template file"),
    ):
        assert words in found(**wrong), wrong
    assert found(model="./no", data=("a", "b")).count("does not exist") == 3, "all are named"
