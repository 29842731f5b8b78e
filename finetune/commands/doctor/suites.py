"""Which checks are asked, in which order: those that cost nothing, those that need torch, those that need processes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from finetune.commands.doctor import ascend, cann, devices, host, network, ports, versions
from finetune.commands.doctor import config as run_config
from finetune.commands.doctor.check import GIB, Check, fail, skip
from finetune.commands.doctor.config import Demands
from finetune.commands.doctor.facts import Facts
from finetune.commands.doctor.variables import check_variables
from finetune.config.kinds import RunKind, run_kinds
from finetune.config.run_config import BaseConfig
from finetune.runtime.host import HostMeter
from finetune.runtime.smi import SmiReport, read_devices


@dataclass(frozen=True)
class Subject:
    """What is examined: a machine, and a run that is to start on it.

    Attributes:
        config: the resolved configuration; None where there is none, or it is wrong.
        words: the training command's words, for checks in processes of their own.
        processes: processes that will be started on this machine.
        whole_machine: nobody said how many; then all devices are looked at.
        min_devices, min_free_memory_gib: what the preset asks for; None where it does not.
        reports: what npu-smi and nvidia-smi say.
        device_type: what the run takes, as far as is known.
    """

    environment: Mapping[str, str]
    config: BaseConfig | None = None
    kind: RunKind = field(default_factory=lambda: next(run_kinds()))
    words: Sequence[str] = ()
    processes: int = 1
    whole_machine: bool = False
    nodes: int = 1
    min_devices: int | None = None
    min_free_memory_gib: float | None = None
    reports: Sequence[SmiReport] = field(default_factory=read_devices)
    wanted_device: str = "auto"
    device_type: str = ""

    def __post_init__(self) -> None:
        if not self.device_type:
            torch_version, cuda = versions.torch_build()
            usable = [
                *(["npu"] if find_spec("torch_npu") is not None else []),
                *(["cuda"] if cuda or not torch_version else []),
            ]
            object.__setattr__(self, "device_type", devices.accelerator(self.reports, self.wanted_device, usable))

    @property
    def demands(self) -> Demands:
        return run_config.demands_of(self.config, self.device_type, self.processes, self.nodes)

    def report(self, device_type: str) -> SmiReport | None:
        return next((report for report in self.reports if report.device_type == device_type), None)


def software(subject: Subject) -> Iterator[Check]:
    """Python, packages, and what goes with the devices."""
    requirements = versions.own_requirements(("deepspeed",) if subject.demands.deepspeed else ())
    yield versions.check_python()
    yield versions.check_packages(requirements)
    torch_version, cuda = versions.torch_build()
    npu, npus_here = subject.report("npu"), cann.npus_present()
    importable = find_spec("torch_npu") is not None
    here = npus_here or bool(npu and npu.devices)
    home = cann.cann_home(subject.environment)
    yield cann.check_ascend_home(
        subject.environment, needed=importable or here, builds_operators=subject.demands.cpu_adam and importable
    )
    yield ascend.check_pairing(
        torch=torch_version,
        torch_cuda=cuda,
        torch_npu=versions.installed_version("torch_npu"),
        importable=importable,
        cann=cann.cann_version(Path(home)) if home else None,
        npus_here=here,
        floor=versions.lowest_torch(requirements),
    )
    wanted = subject.wanted_device == "cuda"
    yield versions.check_cuda_build(torch_version, cuda, subject.report("cuda"), wanted)


def accelerators(subject: Subject) -> Iterator[Check]:
    """Devices, their memory and health."""
    kind = subject.device_type
    yield devices.check_devices(
        subject.reports,
        kind,
        subject.environment,
        processes=subject.processes,
        min_devices=subject.min_devices,
    )
    if kind not in devices.TOOLS:
        return
    seen = devices.visible_devices(subject.reports, kind, subject.environment)
    needed, used = subject.min_free_memory_gib, max(subject.processes, subject.min_devices or 0)
    if subject.whole_machine and not subject.min_devices:
        used = len(seen)
    yield devices.check_device_memory(
        seen,
        needed_devices=used,
        needed_bytes=None if needed is None else int(needed * GIB),
    )
    yield devices.check_device_health(seen[:used])


def machine(subject: Subject) -> Iterator[Check]:
    """Host memory, limits, disk, compiler."""
    demands, config = subject.demands, subject.config
    yield host.check_host_memory(HostMeter().look(), demands.host_bytes, demands.host_for)
    yield host.check_shared_memory(subject.processes, demands.loader_workers)
    yield host.check_locked_memory(demands.pinned, subject.nodes)
    yield host.check_open_files()
    output = Path(config.output_dir) if config is not None else Path.cwd()
    yield host.check_disk("output", output, demands.disk_bytes)
    if config is not None and config.cache_dir is not None:
        yield host.check_disk("cache", Path(config.cache_dir))
    yield host.check_compiler(built_here(subject), subject.environment)


def built_here(subject: Subject) -> tuple[str, str] | None:
    """What DeepSpeed has to build for this run; None for nothing."""
    if subject.demands.cpu_adam:
        return ("DeepSpeed's CPU Adam", "DeepSpeed 的 CPU Adam")
    if subject.demands.deepspeed and subject.device_type == "cpu":
        return ("DeepSpeed's operator for processes on one CPU", "DeepSpeed 的 CPU 多进程算子")
    return None


def variables(subject: Subject) -> list[Check]:
    """Variables that contradict one another, or this machine."""
    report = subject.report(subject.device_type)
    return check_variables(
        Facts(
            subject.environment,
            interfaces=network.local_addresses(),
            device_type=subject.device_type,
            devices_here=len(report.devices) if report is not None and report.devices else None,
            deepspeed=subject.demands.deepspeed,
            processes=subject.processes,
            nodes=subject.nodes,
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            timeout_seconds=subject.config.timeout_seconds if subject.config is not None else 1800,
            ephemeral_ports=ephemeral_ports(),
        )
    )


def ephemeral_ports(root: Path = Path("/")) -> tuple[int, int] | None:
    """The ports that the kernel gives away; None where it does not say, or where some are reserved already."""
    folder = root / "proc/sys/net/ipv4"
    try:
        low, high = map(int, (folder / "ip_local_port_range").read_text().split())
        reserved = (folder / "ip_local_reserved_ports").read_text().strip()
    except (OSError, ValueError):
        return None
    return None if re.search(r"\d", reserved) else (low, high)


def meeting(subject: Subject) -> Iterator[Check]:
    """Nodes, port and addresses."""
    nodes, checks = network.check_nodes(subject.environment)
    yield from checks
    if nodes is None:
        return
    yield ports.check_port(nodes)
    yield network.check_master_address(nodes, network.local_addresses())
    yield network.check_master_reachable(nodes)
    yield network.check_own_name(nodes, subject.environment)


def quick(subject: Subject, *, waits: bool = False) -> Iterator[Check]:
    """Everything that needs neither torch nor another machine nor a process of its own."""
    yield from software(subject)
    yield from accelerators(subject)
    yield from machine(subject)
    yield from variables(subject)
    if subject.config is not None:
        yield from run_config.check_places(subject.config, waits=waits)


def with_torch(subject: Subject) -> tuple[list[Check], Subject]:
    """What torch sees; and the subject, with the device type that torch takes."""
    from finetune.commands.doctor.torch_device import check_torch

    listed = sum(len(report.devices) for report in subject.reports)
    checks, taken = check_torch(subject.environment, subject.wanted_device, subject.config, listed, subject.processes)
    return checks, replace(subject, device_type=taken or subject.device_type)


def with_data(subject: Subject) -> Iterator[Check]:
    """Model folder, tokenizer, template and data, read as a run would."""
    from finetune.commands.doctor.probe import DATA_TIMEOUT_SECONDS, ask

    request: dict[str, Any] = {
        "kind": subject.kind.name,
        "module": subject.kind.module,
        "words": list(subject.words),
        "world_size": subject.processes * subject.nodes,
    }
    environment = {**subject.environment, "TOKENIZERS_PARALLELISM": "false"}
    answer = ask(
        "finetune.commands.doctor.data_probe", request, environment=environment, timeout_seconds=DATA_TIMEOUT_SECONDS
    )
    if answer.report is None:
        yield fail(
            "data",
            (f"model and data could not be read: {answer.reason}", f"无法读取模型与数据：{answer.reason}"),
            (
                "python -m finetune inspect shows the rows and what is wrong with them",
                "用 python -m finetune inspect 查看数据及其问题",
            ),
        )
        return
    for found in answer.report:
        yield Check(**found)


def with_processes(subject: Subject) -> Iterator[Check]:
    """--full: operators built and tried, a world started, a step trained, saved and resumed."""
    from finetune.commands.doctor.dry_run import check_dry_run
    from finetune.commands.doctor.launched import check_launched

    yield from with_operators(subject, everything=True)
    yield from check_launched(subject.processes, subject.device_type, subject.environment)
    yield check_dry_run(subject.processes, subject.device_type, subject.config, subject.environment)


def with_operators(subject: Subject, *, everything: bool = False) -> Iterator[Check]:
    """DeepSpeed's operators, as far as the run builds them.

    Args:
        everything: also those that the run does not need, wherever DeepSpeed is installed; then a failure is a warning.
    """
    from finetune.commands.doctor.operators import check_cpu_adam, check_shared_memory_operator

    demands = subject.demands
    if find_spec("deepspeed") is None:
        if everything:
            yield skip("cpu_adam", "DeepSpeed is not installed", "未安装 DeepSpeed")
        return
    if subject.device_type == "cpu" and (everything or demands.deepspeed):
        yield _as_needed(check_shared_memory_operator(subject.environment), demands.deepspeed)
    if everything or demands.cpu_adam:
        yield _as_needed(check_cpu_adam(subject.device_type, subject.environment), demands.cpu_adam)


def _as_needed(check: Check, needed: bool) -> Check:
    return check if needed or check.verdict != "fail" else replace(check, verdict="warn")
