"""`python -m finetune plan`: whether a run fits the machines it is meant for, and how long a step
takes, before either is booked. Computes from the configuration and the model's config.json;
`--check RUN` compares with a run that was made.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator

from finetune.config.fields import (
    PathOption,
    Precedence,
    Resolution,
    SourcedValue,
    Text,
    flag,
    rule_broken,
    setting,
)
from finetune.config.files import BLOCK
from finetune.config.kinds import KINDS, RunKind, kind_of_arguments, run_kind
from finetune.config.options import SpokenOptions, read_known_options, validated
from finetune.config.resolution import resolve, resolve_object
from finetune.errors import ConfigError, ExitCode
from finetune.runtime.device import peak_flops
from finetune.runtime.terminal import write_filled

if TYPE_CHECKING:
    from finetune.config.base_config import BaseConfig
    from finetune.planning.plan import Plan
    from finetune.planning.workload import Cluster

UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
UNITS |= {
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def bytes_of(text: str) -> int:
    """`64GiB`, `512 GB`, `1.5TiB`, `25GB/s` or plain bytes as a number.

    Raises:
        PydanticCustomError: not a size above 0; in a command's options it becomes a ConfigError.
    """
    if not isinstance(text, str):  # a number of a caller in Python
        raise rule_broken((f"{text!r} has no unit", "write for example '64GiB', '512GB' or '25GB'"))
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)(?:/s)?\s*", text)
    unit = UNITS.get(match.group(2).upper()) if match else None
    if match is None or unit is None or float(match.group(1)) <= 0:
        raise rule_broken(
            (f"{text!r} is not a size above 0", "write for example 64GiB, 512GB or 25GB")
        )
    return int(float(match.group(1)) * unit)


Size = Annotated[int, BeforeValidator(bytes_of, json_schema_input_type=str)]
MACHINES = "the machines"


of_run = partial(setting, None, group="the run")
of_machines = partial(setting, group=MACHINES)


class PlanOptions(SpokenOptions):
    """The command line, without the flags of the run."""

    usage: ClassVar[str] = (
        "python -m finetune plan [sft|pretrain] [--config FILE...] [FLAGS OF TRAINING] [THE"
        " MACHINES]\n       python -m finetune plan --check RUN [THE MACHINES]"
    )
    summary: ClassVar[str] = """\
Says what a run needs of each device and each host, term by term, how long a step takes, the largest microbatch that
fits, and how to shard and offload. Needs no weights, no device and no network; writes nothing.
The other flags are those of `python -m finetune sft --help` or `pretrain --help`."""
    epilog: ClassVar[str] = (
        "Exit code: 0 it fits (or no memory was given), 1 it does not, or a --check missed by more"
        " than 15%; 2 wrong input."
    )
    groups: ClassVar[tuple[str, ...]] = ("the run", MACHINES, "output")
    positional: ClassVar[tuple[str, ...]] = ("run_kind",)
    aliases: ClassVar[Mapping[str, str]] = {"nnodes": "nodes", "nproc_per_node": "devices_per_node"}

    run_kind: Text | None = of_run(
        "Which command the configuration is for.",
        unit="|".join(KINDS),
        shown_default="by its names",
    )
    kind: Text | None = of_run("The same, as a flag; it wins.", unit="|".join(KINDS))
    # `model_config` itself belongs to pydantic's models.
    model_file: PathOption | None = of_run(
        "A config.json.", unit="FILE", shown_default="the model's own", alias="model_config"
    )
    check: PathOption | None = of_run("Compare with what this run's folder logged.", unit="RUN")
    nodes: int = of_machines(1, "Machines.", ge=1)
    devices_per_node: int | None = of_machines(
        None, "Devices of each.", ge=1, shown_default="those of this machine, else 1"
    )
    device_name: Text | None = of_machines(
        None,
        'E.g. 910B3 or "H100 PCIe"; decides the peak and, where auto, the device type.',
        unit="NAME",
        shown_default="this machine's",
    )
    device_memory: Size | None = of_machines(
        None,
        "Of one device, e.g. 64GiB.",
        unit="SIZE",
        shown_default="this machine's, where it has some",
    )
    host_memory: Size | None = of_machines(
        None,
        "Of one node, e.g. 512GiB.",
        unit="SIZE",
        shown_default="this machine's, where --devices-per-node is not given",
    )
    host_bandwidth: Size | None = of_machines(
        None,
        "Bytes a second between one device and its host.",
        unit="SIZE",
        shown_default="a copy measured here",
    )
    network_bandwidth: Size | None = of_machines(
        None, "Bytes a second that one device sends.", unit="SIZE", shown_default="unknown"
    )
    peak_tflops: float | None = of_machines(
        None, "Of one device, where no table has it.", gt=0, shown_default="by its name"
    )
    efficiency: float = of_machines(0.4, "Share of the peak that is reached.", gt=0, le=1)

    def problems(self) -> list[tuple[str, str]]:
        return [
            (f"there is no kind of runs named {name!r}", f"use {' or '.join(KINDS)}")
            for name in (self.run_kind, self.kind)
            if name is not None and name not in KINDS
        ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Raises:
        FinetuneError: the command line, configuration or model cannot be planned for; the caller
            prints it.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    options, arguments = read_known_options(PlanOptions, words or ["--help"])
    if options.check is not None:
        return _check(options, options.check, arguments)
    from finetune.commands.plan.text import plan_text

    name = options.kind or options.run_kind
    kind = KINDS[name] if name else kind_of_arguments(arguments)
    cluster = cluster_of(options)
    parsed = kind.parse(arguments)
    if not parsed.config_files and not parsed.problems:  # only flags describe the run
        for missing in _missing(kind, parsed.values, with_model=options.model_file is not None):
            arguments = [flag(missing), "not-said", *arguments]
    config = resolve(arguments, world_size=cluster.devices, model_class=kind.config_class).config
    plan = _plan_of(config, cluster, options)
    _print(plan.to_json() if options.as_json else plan_text(plan))
    return int(ExitCode.FAILED if plan.fits is False else ExitCode.DONE)


def _plan_of(config: BaseConfig, cluster: Cluster, options: PlanOptions) -> Plan:
    """Return the plan of resolved settings on the machines of the options."""
    from finetune.planning.inputs import shape_for
    from finetune.planning.learning_defaults import with_batch_of_data
    from finetune.planning.plan import make_plan

    config = with_batch_of_data(config)
    if config.device_type != "auto":
        cluster = replace(cluster, device_type=config.device_type)
    return make_plan(config, shape_for(config, options.model_file), cluster, options.efficiency)


def _check(options: PlanOptions, run: Path, arguments: Sequence[str]) -> int:
    from finetune.commands.plan.check import check_run

    if arguments:
        raise ConfigError(
            f"--check takes the run's own settings, and {arguments[0]} was given",
            "the command line",
            "leave it out; --model-config FILE is for a model that has moved",
        )
    checked = check_run(run, options.model_file)
    _print(checked.to_json() if options.as_json else checked.text())
    return int(ExitCode.DONE if checked.agrees else ExitCode.FAILED)


def _missing(kind: RunKind, given: Collection[str], *, with_model: bool) -> list[str]:
    """Return settings that a run requires and a plan can do without.

    Args:
        given: names of the settings that are given.
        with_model: whether the model may be missing too, because a config.json was given.
    """
    fields = kind.config_class.model_fields
    required = {name for name, info in fields.items() if info.is_required()} - set(given)
    return sorted(required if with_model else required - {"model"})


def _print(what: dict[str, Any] | str) -> None:
    if isinstance(what, str):
        write_filled(what)
    else:
        sys.stdout.write(json.dumps(what, ensure_ascii=False, indent=2) + "\n")


# ---------------------------------------------------------------- from Python


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
    """Plan a run: what it needs of each device and host, and how long a step takes.

    Planning needs no weights, device or network.

    Args:
        config: as for `finetune.run`; a dict may omit settings that a plan can do without.
        model_config: a config.json; by default the model's own. With it a dict needs no model.
        nodes: number of machines.
        devices_per_node: by default the devices of this machine, or 1 if it has none.
        device_name: e.g. `910B3` or `H100 PCIe`; decides the peak FLOPS and, if that is auto, the
            device type.
        device_memory: memory of one device, with its unit, e.g. `64GiB`.
        host_memory: memory of one node, with its unit.
        host_bandwidth: bytes per second between one device and its host, e.g. `25GB/s`; by default
            measured.
        network_bandwidth: bytes per second that one device sends.
        peak_tflops: peak TFLOPS of one device, if no table has it.
        efficiency: share of the peak that is reached.

    Returns:
        The plan. `fits` is None if no memory was given. `to_json()` returns what `plan --json`
        prints.

    Raises:
        FinetuneError: the configuration or model cannot be planned for.

    >>> import finetune
    >>> plan = finetune.plan({"model": "data_samples/tiny-qwen3"}, nodes=2, devices_per_node=8,
    ...                      device_name="910B3", device_memory="64GiB", host_memory="512GiB")
    >>> plan.fits, plan.cluster.devices, plan.memory.work.sharding.name
    (True, 16, 'none')
    """
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
    kind, cluster = run_kind(config), cluster_of(options)
    if isinstance(config, Mapping) and BLOCK not in config:
        aliases = kind.config_class.aliases
        named = {aliases.get(name, name) for name in config}
        missing = _missing(kind, named, with_model=model_config is not None)
        config = {**config, **dict.fromkeys(missing, "not-said")}
    resolved = resolve_object(config, cluster.devices, kind.config_class)
    return _plan_of(resolved.config, cluster, options)


# ---------------------------------------------------------------- the machines


def cluster_of(options: PlanOptions) -> Cluster:
    """Return the machines that the options describe; options that are left out come from this
    machine if it is meant.
    """
    from finetune.planning.workload import Cluster

    here = options.devices_per_node is None
    type_here, name_here, count_here, memory_here = _devices_here() if here else ("", "", 0, None)
    device = options.device_name or name_here
    host_memory = options.host_memory
    if host_memory is None and here:
        from finetune.runtime.host import HostMeter

        host_memory = HostMeter().look().memory_total_bytes
    return Cluster(
        nodes=options.nodes,
        devices_per_node=options.devices_per_node or count_here or 1,
        device_type=(
            _type_of(device) if options.device_name else type_here or ("cpu" if here else "cuda")
        ),
        device_name=device,
        device_memory_bytes=memory_here if options.device_memory is None else options.device_memory,
        host_memory_bytes=host_memory,
        peak_flops=options.peak_tflops * 1e12 if options.peak_tflops else peak_flops(device),
        network_bytes_per_second=options.network_bandwidth,
        host_bytes_per_second=options.host_bandwidth,
    )


def _type_of(name: str) -> str:
    words = name.lower()
    if "cpu" in words.split():
        return "cpu"
    return "npu" if "910" in words or "ascend" in words else "cuda"


def _devices_here() -> tuple[str, str, int, int | None]:
    """(type, name, count, memory in bytes) of this machine's accelerators; ("", "", 0, None) where
    there are none.
    """
    from finetune.runtime.smi import read_devices

    for report in read_devices():
        if report.devices:
            first = report.devices[0]
            return report.device_type, first.name or "", len(report.devices), first.total_bytes
    return "", "", 0, None
