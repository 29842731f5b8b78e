"""Which checks are made, in which order: those that cost nothing, those that need torch, those that
need processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from finetune.commands.doctor import ascend, devices, host, network, versions
from finetune.commands.doctor.check import Check, fail, skip
from finetune.commands.doctor.config import Demands, check_locations, demands_of
from finetune.commands.doctor.dry_run import check_dry_run
from finetune.commands.doctor.facts import Facts
from finetune.commands.doctor.launched import check_launched
from finetune.commands.doctor.operators import check_cpu_adam, check_shared_memory_operator
from finetune.commands.doctor.probe import ask
from finetune.commands.doctor.torch_device import check_torch
from finetune.commands.doctor.variables import check_variables
from finetune.config.base_config import BaseConfig
from finetune.config.kinds import KINDS, RunKind
from finetune.runtime.host import HostMeter, usable_cores
from finetune.runtime.language import _
from finetune.runtime.smi import SmiReport, read_devices

DATA_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class CheckContext:
    """What is examined: a machine, and a run that is to start on it.

    Attributes:
        config: the resolved configuration; None where there is none, or it is wrong.
        arguments: the run's command line, for checks in processes of their own.
        processes: processes that will be started on this machine.
        whole_machine: the number of processes is not given; then all devices are looked at.
        min_devices, min_free_memory_gib: what the preset asks for; None where it does not.
        reports: of npu-smi and the NVIDIA driver.
        wanted_device: the device type that is asked for, or auto.
        torch_device: the one that torch takes; None where torch was not asked.
    """

    environment: Mapping[str, str]
    config: BaseConfig | None = None
    kind: RunKind = field(default_factory=lambda: next(iter(KINDS.values())))
    arguments: Sequence[str] = ()
    processes: int = 1
    whole_machine: bool = False
    nodes: int = 1
    min_devices: int | None = None
    min_free_memory_gib: float | None = None
    reports: Sequence[SmiReport] = field(default_factory=read_devices)
    wanted_device: str = "auto"
    torch_device: str | None = None

    @cached_property
    def device_type(self) -> str:
        """What the run takes, as far as is known."""
        if self.torch_device is not None:
            return self.torch_device
        torch_version, cuda = versions.torch_build()
        usable = ["npu"] if find_spec("torch_npu") is not None else []
        usable += ["cuda"] if cuda or not torch_version else []
        return devices.accelerator(self.reports, self.wanted_device, usable)

    @cached_property
    def demands(self) -> Demands:
        return demands_of(self.config, self.device_type, self.processes, self.nodes)

    def report(self, device_type: str) -> SmiReport | None:
        return next((report for report in self.reports if report.device_type == device_type), None)


# ---------------------------------------------------------------- neither torch nor another machine


def quick(context: CheckContext, *, waits: bool = False) -> Iterator[Check]:
    """Everything that needs neither torch nor another machine nor a process of its own.

    Args:
        waits: see `check_locations`.
    """
    yield from software(context)
    yield from accelerators(context)
    yield from machine(context)
    yield from variables(context)
    if context.config is not None:
        yield from check_locations(context.config, waits=waits)


def software(context: CheckContext) -> Iterator[Check]:
    """Python, packages, and what goes with the devices."""
    requirements = versions.own_requirements(("deepspeed",) if context.demands.deepspeed else ())
    yield versions.check_python()
    yield versions.check_packages(requirements)
    torch_version, cuda = versions.torch_build()
    npu = context.report("npu")
    npus_here = ascend.npus_present() or bool(npu and npu.devices)
    importable = find_spec("torch_npu") is not None
    yield ascend.check_ascend_home(
        context.environment,
        needed=importable or npus_here,
        builds_operators=context.demands.cpu_adam and importable,
    )
    home = ascend.cann_home(context.environment)
    installed = ascend.AscendSoftware(
        torch=torch_version,
        torch_npu=versions.installed_version("torch_npu"),
        cann=ascend.cann_version(Path(home)) if home else None,
        floor=versions.lowest_torch(requirements),
    )
    yield ascend.check_pairing(
        installed, torch_cuda=cuda, importable=importable, npus_here=npus_here
    )
    yield versions.check_cuda_build(
        torch_version, cuda, context.report("cuda"), context.wanted_device == "cuda"
    )


def accelerators(context: CheckContext) -> Iterator[Check]:
    """Devices, their memory and health."""
    yield devices.check_devices(
        context.reports,
        context.device_type,
        context.environment,
        processes=context.processes,
        min_devices=context.min_devices,
    )
    if context.device_type not in devices.TOOLS:
        return
    seen = devices.visible_devices(context.report(context.device_type), context.environment)
    used = max(context.processes, context.min_devices or 0)
    if context.whole_machine and not context.min_devices:
        used = len(seen)
    needed = context.min_free_memory_gib
    needed_bytes = None if needed is None else int(needed * 2**30)
    yield devices.check_device_memory(seen, needed_devices=used, needed_bytes=needed_bytes)
    yield devices.check_device_health(seen[:used])


def machine(context: CheckContext) -> Iterator[Check]:
    """Host memory, limits, disk, compiler."""
    demands, config = context.demands, context.config
    yield host.check_host_memory(HostMeter().look(), demands.host_bytes, demands.host_for)
    yield host.check_shared_memory(context.processes, demands.loader_workers)
    yield host.check_locked_memory(demands.pinned, context.nodes)
    yield host.check_open_files()
    output = Path(config.output_dir) if config is not None else Path.cwd()
    yield host.check_disk("output", output, demands.disk_bytes)
    yield from host.check_locks("output", output)
    if config is not None and config.cache_dir is not None:
        yield host.check_disk("cache", Path(config.cache_dir))
        yield from host.check_locks("cache", Path(config.cache_dir))
    built = ""
    if demands.cpu_adam:
        built = _("DeepSpeed's CPU Adam")
    elif demands.deepspeed and context.device_type == "cpu":
        built = _("DeepSpeed's operator for processes on one CPU")
    yield host.check_compiler(built, context.environment)


def variables(context: CheckContext) -> list[Check]:
    """Variables that contradict one another, or this machine."""
    report = context.report(context.device_type)
    return check_variables(
        Facts(
            context.environment,
            interfaces=network.local_addresses(),
            device_type=context.device_type,
            devices_here=len(report.devices) if report is not None and report.devices else None,
            deepspeed=context.demands.deepspeed,
            processes=context.processes,
            nodes=context.nodes,
            cores=usable_cores(),
            timeout_seconds=context.config.timeout_seconds if context.config is not None else 1800,
            ephemeral_ports=network.ephemeral_ports(),
        )
    )


def rendezvous(context: CheckContext) -> Iterator[Check]:
    """Nodes, port and addresses."""
    nodes, checks = network.check_nodes(context.environment)
    yield from checks
    if nodes is None:
        return
    yield network.check_port(nodes)
    yield network.check_master_address(nodes, network.local_addresses())
    yield network.check_master_reachable(nodes)
    yield network.check_own_name(nodes, context.environment)


# ---------------------------------------------------------------- in processes of their own


def with_torch(context: CheckContext) -> tuple[list[Check], CheckContext]:
    """What torch sees; and the context, with the device type that torch takes."""
    listed = sum(len(report.devices) for report in context.reports)
    checks, taken = check_torch(
        context.environment, context.wanted_device, context.config, listed, context.processes
    )
    return checks, replace(context, torch_device=taken)


def with_data(context: CheckContext) -> list[Check]:
    """Model folder, tokenizer, template and data, read as a run would."""
    request: dict[str, Any] = {
        "kind": context.kind.name,
        "module": context.kind.module,
        "arguments": list(context.arguments),
        "world_size": context.processes * context.nodes,
    }
    answer = ask(
        "finetune.commands.doctor.data_probe",
        request,
        environment={**context.environment, "TOKENIZERS_PARALLELISM": "false"},
        timeout_seconds=DATA_TIMEOUT_SECONDS,
    )
    if answer.report is None:
        what = _("model and data could not be read: {reason}").format(reason=answer.reason)
        return [
            fail(
                "data",
                what,
                _("python -m finetune inspect shows the records and what is wrong with them"),
            )
        ]
    return [Check(**found) for found in answer.report]


def with_processes(context: CheckContext) -> Iterator[Check]:
    """--full: operators built and tried, a world started, a step trained, saved and resumed."""
    yield from with_operators(context, everything=True)
    yield from check_launched(context.processes, context.device_type, context.environment)
    yield check_dry_run(
        context.kind, context.processes, context.device_type, context.config, context.environment
    )


def with_operators(context: CheckContext, *, everything: bool = False) -> Iterator[Check]:
    """DeepSpeed's operators, as far as the run builds them.

    Args:
        everything: also those that the run does not need, wherever DeepSpeed is installed; then a
            failure is a warning.
    """
    demands = context.demands
    if find_spec("deepspeed") is None:
        if everything:
            yield skip("cpu_adam", _("DeepSpeed is not installed"))
        return
    if context.device_type == "cpu" and (everything or demands.deepspeed):
        yield _as_needed(check_shared_memory_operator(context.environment), demands.deepspeed)
    if everything or demands.cpu_adam:
        yield _as_needed(check_cpu_adam(context.device_type, context.environment), demands.cpu_adam)


def _as_needed(check: Check, needed: bool) -> Check:
    return check if needed or check.verdict != "fail" else replace(check, verdict="warn")
