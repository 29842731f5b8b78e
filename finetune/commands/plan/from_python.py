"""`finetune.plan(...)`: the command's plan as an object."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.commands.plan.command import PlanOptions, cluster_of, plan_of
from finetune.config.base_config import BaseConfig
from finetune.config.files import BLOCK
from finetune.config.kinds import RunKind, run_kind
from finetune.config.options import validated
from finetune.config.resolution import resolve_object
from finetune.config.rules import Precedence, Resolution, SourcedValue
from finetune.planning.plan import Plan


def plan(
    config: BaseConfig | Mapping[str, Any] | str | Path,
    *,
    model_config: Path | str | None = None,
    nodes: int = 1,
    devices_per_node: int | None = None,
    device_name: str | None = None,
    device_memory: str | None = None,
    host_memory: str | None = None,
    host_bandwidth: str | None = None,
    network_bandwidth: str | None = None,
    peak_tflops: float | None = None,
    efficiency: float = 0.4,
) -> Plan:
    """What a run needs of each device and host, and how long a step takes; needs no weights, device
    or network.

    Args:
        config: what `finetune.run` takes; of a dict, settings that a plan can do without may be
            missing.
        model_config: a config.json; by default the model's own. With it a dict needs no model.
        nodes: machines.
        devices_per_node: by default those of this machine, else 1.
        device_name: e.g. `910B3` or `H100 PCIe`; decides the peak and, where auto, the device type.
        device_memory: of one device, with its unit, e.g. `64GiB`; host_memory likewise of one node.
        host_bandwidth: bytes a second between one device and its host, e.g. `25GB/s`; by default
            measured.
        network_bandwidth: bytes a second that one device sends.
        peak_tflops: of one device, where no table has it.
        efficiency: share of the peak that is reached.

    Returns: The plan; `fits` is None where no memory was given, `to_json()` is what `plan --json`
        prints.

    Raises:
        FinetuneError: the configuration or model cannot be planned for.

    >>> import finetune
    >>> plan = finetune.plan({"model": "data_samples/tiny-qwen3"}, nodes=2, devices_per_node=8,
    ...                      device_name="910B3", device_memory="64GiB", host_memory="512GiB")
    >>> plan.fits, plan.cluster.devices, plan.memory.work.sharding.name
    (True, 16, 'none')
    """
    kind = run_kind(config)
    given = {
        "model_config": model_config,
        "nodes": nodes,
        "devices_per_node": devices_per_node,
        "device_name": device_name,
        "device_memory": device_memory,
        "host_memory": host_memory,
        "host_bandwidth": host_bandwidth,
        "network_bandwidth": network_bandwidth,
        "peak_tflops": peak_tflops,
        "efficiency": efficiency,
    }
    values = {
        name: SourcedValue(value, Precedence.FLAG, name)
        for name, value in given.items()
        if value is not None
    }
    options = validated(PlanOptions, Resolution(PlanOptions, values=values))
    cluster = cluster_of(options)
    if isinstance(config, Mapping):
        config = _with_placeholders(config, kind, may_lack_model=model_config is not None)
    return plan_of(
        resolve_object(config, cluster.devices, kind.config_class).config, cluster, options
    )


def _with_placeholders(
    settings: Mapping[str, Any], kind: RunKind, *, may_lack_model: bool
) -> Mapping[str, Any]:
    """The settings with what a run must have and a plan can do without."""
    if BLOCK in settings:
        return settings
    said = {kind.config_class.aliases.get(name, name) for name in settings}
    said |= set() if may_lack_model else {"model"}
    required = [name for name, info in kind.config_class.model_fields.items() if info.is_required()]
    return {**settings, **{name: "not-said" for name in required if name not in said}}
