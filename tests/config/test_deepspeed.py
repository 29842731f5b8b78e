"""The list of DeepSpeed's names against the installed deepspeed, and what DeepSpeed is given."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

from finetune.config.deepspeed import (
    KNOWN,
    REMOVED,
    SCHEDULERS,
    deepspeed_dict,
    lookup,
    offloads,
)
from finetune.config.run_config import RunConfig

pytest.importorskip("deepspeed", reason="deepspeed is an extra, and is not installed here")

# Block -> where deepspeed declares its names as a pydantic model.
ZERO, PRECISION = "runtime.zero", "runtime.precision_config:DeepSpeed"
MODELS = {
    "zero_optimization": f"{ZERO}.config:DeepSpeedZeroConfig",
    "zero_optimization.offload_param": f"{ZERO}.offload_config:DeepSpeedZeroOffloadParamConfig",
    "zero_optimization.offload_optimizer": (
        f"{ZERO}.offload_config:DeepSpeedZeroOffloadOptimizerConfig"
    ),
    "zero_optimization.zenflow": "runtime.zenflow.zenflow_config:ZenFlowConfig",
    "zero_optimization.leaf_module": f"{ZERO}.leaf_module_config:DeepSpeedZeroLeafModuleConfig",
    "bf16": f"{PRECISION}BF16Config",
    "bfloat16": f"{PRECISION}BF16Config",
    "fp16": f"{PRECISION}FP16Config",
    "tensorboard": "monitor.config:TensorBoardConfig",
    "wandb": "monitor.config:WandbConfig",
    "csv_monitor": "monitor.config:CSVConfig",
    "comet": "monitor.config:CometConfig",
    "comms_logger": "comm.config:CommsLoggerConfig",
    "compile": "compile.config:CompileConfig",
    "timers.throughput": "utils.config:DeepSpeedThroughputTimerConfig",
    "hybrid_engine": "runtime.config:HybridEngineConfig",
}
# Block that deepspeed reads name by name -> a content with which it reads all.
READ: dict[str, dict[str, Any]] = {
    "activation_checkpointing": {},
    "aio": {},
    "flops_profiler": {},
    "torch_autocast": {"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": []},
    "data_types": {},
    "timers": {},
    "optimizer": {"type": "adam", "params": {}},
    "scheduler": {"type": "WarmupLR", "params": {}},
    "checkpoint": {},
}


class Recorder(dict):  # type: ignore[type-arg]
    """A dict that notes which names it was asked for."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        return self.get(str(name), self) is not self

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)

    def keys(self) -> Any:  # deepspeed asks `name in config.keys()`
        return self

    def __copy__(self) -> Recorder:
        return self


def asked_of(block: str, content: dict[str, Any]) -> set[str]:
    """Names that deepspeed looks up in a block, or at the top level where `block` is empty."""
    from deepspeed.runtime.config import DeepSpeedConfig

    inner = Recorder(content)
    outer = Recorder({"train_micro_batch_size_per_gpu": 1, **({block: inner} if block else inner)})
    DeepSpeedConfig(outer)
    return inner.asked if block else outer.asked


def test_the_names_are_those_that_deepspeed_reads_declares_and_refuses():
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.runtime import config, lr_schedules
    from deepspeed.runtime.model_checkpointing.config import get_checkpoint_writer_config

    asked = asked_of("", {"zero_optimization": {"stage": 3}})
    asked |= asked_of("", {"zero_optimization": True})
    assert REMOVED[""] == set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS) <= asked
    assert REMOVED["zero_optimization"] == set(config._REMOVED_ZERO_CONFIG_KEYS)
    # Only where zero_optimization is a bare true, which is refused; only where a group exists.
    bare, in_a_group = {"allgather_size"}, {"sequence_parallel_size"}
    assert asked - REMOVED[""] - bare | in_a_group == set(KNOWN)
    assert '"sequence_parallel_size" in config' in inspect.getsource(config.DeepSpeedConfig)
    for block, content in READ.items():
        assert asked_of(block, content) == set(KNOWN[block]), block
    writer, parallel = Recorder({"type": "fast"}), Recorder()
    get_checkpoint_writer_config({"writer": writer})
    config.get_checkpoint_parallel_write_pipeline({"parallel_write": parallel})
    assert writer.asked == set(KNOWN["checkpoint"]["writer"])
    assert parallel.asked == set(KNOWN["checkpoint"]["parallel_write"])
    for block, place in MODELS.items():
        module, name = place.split(":")
        fields = getattr(importlib.import_module(f"deepspeed.{module}"), name).model_fields
        declared = {alias for field, info in fields.items() for alias in (field, info.alias)}
        assert declared - {None} == set(lookup(KNOWN, block)), block

    def parameters(*classes: type) -> set[str]:
        names = {name for made in classes for name in inspect.signature(made.__init__).parameters}
        return names - {"self", "params", "model_params", "optimizer"}

    of_the_engine = {"torch_adam", "foreach"}
    adam = parameters(DeepSpeedCPUAdam, FusedAdam) | of_the_engine
    assert adam == set(KNOWN["optimizer"]["params"])
    schedules = [getattr(lr_schedules, name) for name in SCHEDULERS]
    assert parameters(*schedules) == set(KNOWN["scheduler"]["params"])


@pytest.mark.parametrize(
    ("dtype", "pin", "largest", "threshold"),
    [("bfloat16", True, 300_000, 300_000), ("float16", False, 5, 100_000)],
)
def test_what_deepspeed_is_given(dtype, pin, largest, threshold):
    """Offload is pinned where it can be and the keys do not say; the run's own keys stay."""
    zero = {
        "stage": 3,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
    }
    keys = {"zero_optimization": zero, "gradient_clipping": "auto", "fp16": {"loss_scale": 8}}
    config = RunConfig(model="m", data="d", output_dir="o", deepspeed=keys, max_grad_norm=0.5)
    made = deepspeed_dict(
        config, world_size=2, dtype=dtype, largest_adapter_tensor=largest, pin=pin
    )
    assert made["zero_optimization"]["offload_param"]["pin_memory"] is pin
    assert made["zero_optimization"]["offload_optimizer"]["pin_memory"] is False
    assert made["zero_optimization"]["stage3_param_persistence_threshold"] == threshold
    assert "pin_memory" not in config.deepspeed["zero_optimization"]["offload_param"]
    assert (made["gradient_clipping"], made["train_batch_size"]) == (0.5, 2)
    assert made["bf16"]["enabled"] is (dtype == "bfloat16")
    assert made["fp16"] == {"loss_scale": 8, "enabled": dtype == "float16"}
    assert made["data_types"] == {"grad_accum_dtype": "fp32"}
    assert offloads(keys, "param") and offloads(keys, "optimizer")
    for block in ({}, {"offload_param": {"device": "none"}}, {"offload_param": {}}):
        assert not offloads({"zero_optimization": {"stage": 3, **block}}, "param"), block
    assert not offloads(None, "param") and not offloads({}, "optimizer")
