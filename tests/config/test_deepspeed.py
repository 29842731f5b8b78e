"""The list of DeepSpeed's names against the installed deepspeed: what it reads, and what its models
declare.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from finetune.config.deepspeed import (
    ALLOWED,
    ANY,
    KNOWN,
    PRECISIONS,
    REMOVED,
    SCHEDULERS,
    SHARED,
    deepspeed_dict,
    lookup,
    offloads,
    refused_values,
    split,
    unknown_keys,
)
from finetune.config.fields import Resolution
from finetune.config.run_config import RunConfig

pytest.importorskip("deepspeed", reason="deepspeed is an extra, and is not installed here")

# Block -> where deepspeed declares its names as a pydantic model.
MODELS = {
    "zero_optimization": "deepspeed.runtime.zero.config:DeepSpeedZeroConfig",
    "zero_optimization.offload_param": (
        "deepspeed.runtime.zero.offload_config:DeepSpeedZeroOffloadParamConfig"
    ),
    "zero_optimization.offload_optimizer": (
        "deepspeed.runtime.zero.offload_config:DeepSpeedZeroOffloadOptimizerConfig"
    ),
    "zero_optimization.zenflow": "deepspeed.runtime.zenflow.zenflow_config:ZenFlowConfig",
    "zero_optimization.leaf_module": (
        "deepspeed.runtime.zero.leaf_module_config:DeepSpeedZeroLeafModuleConfig"
    ),
    "bf16": "deepspeed.runtime.precision_config:DeepSpeedBF16Config",
    "bfloat16": "deepspeed.runtime.precision_config:DeepSpeedBF16Config",
    "fp16": "deepspeed.runtime.precision_config:DeepSpeedFP16Config",
    "tensorboard": "deepspeed.monitor.config:TensorBoardConfig",
    "wandb": "deepspeed.monitor.config:WandbConfig",
    "csv_monitor": "deepspeed.monitor.config:CSVConfig",
    "comet": "deepspeed.monitor.config:CometConfig",
    "comms_logger": "deepspeed.comm.config:CommsLoggerConfig",
    "compile": "deepspeed.compile.config:CompileConfig",
    "timers.throughput": "deepspeed.utils.config:DeepSpeedThroughputTimerConfig",
    "hybrid_engine": "deepspeed.runtime.config:HybridEngineConfig",
}


class Recorder(dict):  # type: ignore[type-arg]
    """A dict that notes which names it was asked for."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.asked: set[str] = set()

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return super().__contains__(name)

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)

    def keys(self) -> Any:  # deepspeed asks `name in config.keys()`
        return self

    def __copy__(self) -> Recorder:
        return self


def asked_of(block: str, content: dict[str, Any]) -> set[str]:
    """Names that deepspeed looks up in a block of the configuration, or at the top level where
    `block` is empty.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    inner = Recorder(content)
    outer = Recorder({"train_micro_batch_size_per_gpu": 1})
    if block:
        outer[block] = inner
    else:
        outer.update(inner)
    DeepSpeedConfig(outer)
    return inner.asked if block else outer.asked


def test_top_level_names_are_those_that_deepspeed_reads() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    asked = asked_of("", {"zero_optimization": {"stage": 3}})
    asked |= asked_of("", {"zero_optimization": True})
    removed = REMOVED[""]
    assert removed <= asked, "deepspeed refuses these by name"
    # read only where zero_optimization is a bare true, which we refuse
    deprecated = {"allgather_size"}
    in_a_group = {"sequence_parallel_size"}  # read only where a process group exists
    assert asked - removed - deprecated | in_a_group == set(KNOWN)
    assert all(
        f'"{name}" in config' in inspect.getsource(DeepSpeedConfig.__init__) for name in in_a_group
    )


@pytest.mark.parametrize(
    ("block", "content"),
    [
        ("activation_checkpointing", {}),
        ("aio", {}),
        ("flops_profiler", {}),
        ("torch_autocast", {"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": []}),
        ("data_types", {}),
        ("timers", {}),
        ("optimizer", {"type": "adam", "params": {}}),
        ("scheduler", {"type": "WarmupLR", "params": {}}),
    ],
)
def test_names_of_blocks_that_deepspeed_reads_one_by_one(
    block: str, content: dict[str, Any]
) -> None:
    assert asked_of(block, content) == set(KNOWN[block])


def test_names_of_the_checkpoint_block() -> None:
    assert asked_of("checkpoint", {}) == set(KNOWN["checkpoint"])
    from deepspeed.runtime.config import get_checkpoint_parallel_write_pipeline
    from deepspeed.runtime.model_checkpointing.config import get_checkpoint_writer_config

    writer, parallel = Recorder({"type": "fast"}), Recorder()
    get_checkpoint_writer_config({"writer": writer})
    get_checkpoint_parallel_write_pipeline({"parallel_write": parallel})
    assert writer.asked == set(KNOWN["checkpoint"]["writer"])
    assert parallel.asked == set(KNOWN["checkpoint"]["parallel_write"])


@pytest.mark.parametrize("block", MODELS)
def test_names_of_blocks_that_deepspeed_declares(block: str) -> None:
    module, name = MODELS[block].split(":")
    fields = getattr(importlib.import_module(module), name).model_fields
    declared = {alias for field, info in fields.items() for alias in (field, info.alias or field)}
    assert declared == set(lookup(KNOWN, block))


def test_parameters_of_the_optimizers_and_schedules() -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.runtime import lr_schedules

    def parameters(*classes: type) -> set[str]:
        names = {name for made in classes for name in inspect.signature(made.__init__).parameters}
        return names - {"self", "params", "model_params", "optimizer"}

    handled_by_the_engine = {"torch_adam", "foreach"}
    assert parameters(DeepSpeedCPUAdam, FusedAdam) | handled_by_the_engine == set(
        KNOWN["optimizer"]["params"]
    )
    schedules = [getattr(lr_schedules, name) for name in SCHEDULERS]
    assert parameters(*schedules) == set(KNOWN["scheduler"]["params"])


def test_removed_names_are_those_that_deepspeed_refuses() -> None:
    from deepspeed.runtime import config

    assert REMOVED[""] == set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    assert REMOVED["zero_optimization"] == set(config._REMOVED_ZERO_CONFIG_KEYS)


def blocks(known: dict[str, Any], path: str = "") -> Iterator[str]:
    for name, inner in known.items():
        if inner is not None and inner != ANY:
            yield path + name
            yield from blocks(inner, f"{path}{name}.")


def test_every_block_is_compared_with_something() -> None:
    """So that a block added to the list cannot go unchecked."""
    read = (
        "activation_checkpointing aio flops_profiler torch_autocast data_types timers optimizer"
        " scheduler checkpoint"
    )
    inside = {
        "checkpoint.writer",
        "checkpoint.parallel_write",
        "optimizer.params",
        "scheduler.params",
    }
    assert set(blocks(KNOWN)) == {*MODELS, *read.split(), *inside}


def test_what_we_pass_deepspeed_takes() -> None:
    """A configuration with every known block, as handed on, makes a DeepSpeedConfig once our
    numbers are filled in.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    user = {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": "auto",
            "offload_param": {"device": "cpu", "pin_memory": False},
            "offload_optimizer": {"device": "cpu"},
        },
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-8}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": 5, "total_num_steps": "auto"},
        },
        "activation_checkpointing": {"partition_activations": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "wall_clock_breakdown": False,
    }
    resolution = Resolution(RunConfig)
    _, handed_on = split(user, "ds.json", {}, resolution)
    assert resolution.problems == []
    assert handed_on["bf16"] == {"enabled": "auto"}
    assert user["bf16"] == {"enabled": True}, "the user's dict is not touched"
    filled = {name: value for name, value in handed_on.items() if value != "auto"}
    made = DeepSpeedConfig({**filled, "train_micro_batch_size_per_gpu": 1})
    assert made.zero_config.offload_optimizer.device == "cpu" and made.optimizer_name is None


OFFLOADED = {
    "stage": 3,
    "offload_param": {"device": "cpu"},
    "offload_optimizer": {"device": "cpu", "pin_memory": False},
}


@pytest.mark.parametrize("pin", [True, False])
def test_offload_is_pinned_where_it_can_be_and_the_keys_do_not_say(pin: bool) -> None:
    config = RunConfig(
        model="m", data="d", output_dir="o", deepspeed={"zero_optimization": OFFLOADED}
    )
    made = deepspeed_dict(config, world_size=2, dtype="bfloat16", largest_adapter_tensor=1, pin=pin)
    zero = made["zero_optimization"]
    assert (
        zero["offload_param"]["pin_memory"] is pin
        and zero["offload_optimizer"]["pin_memory"] is False
    )
    assert "pin_memory" not in config.deepspeed["zero_optimization"]["offload_param"], (
        "the run's own keys stay"
    )


def test_what_is_not_offloaded_is_not_pinned() -> None:
    for block in ({}, {"offload_param": {"device": "none"}}, {"offload_param": {}}):
        keys = {"zero_optimization": {"stage": 3, **block}}
        assert not offloads(keys, "param") and not offloads(keys, "optimizer")
    assert not offloads(None, "param") and not offloads({}, "optimizer")
    assert offloads({"zero_optimization": OFFLOADED}, "param") and offloads(
        {"zero_optimization": OFFLOADED}, "optimizer"
    )


def test_every_shared_path_is_a_known_name() -> None:
    paths = [*SHARED] + [f"{block}.enabled" for block in PRECISIONS]
    for path in [*paths, *ALLOWED]:
        *outer, last = path.split(".")
        assert last in (lookup(KNOWN, ".".join(outer)) if outer else KNOWN), path


def test_a_block_that_is_null_is_no_problem() -> None:
    config = {"zero_optimization": {"stage": 2, "offload_optimizer": None}, "aio": None}
    assert list(unknown_keys(config, "x")) == [] and list(refused_values(config)) == []
