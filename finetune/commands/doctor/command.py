"""`python -m finetune doctor`: what would keep a run from starting or kill it, found before it
starts.

The checks that cost nothing come first, then those that need torch, then those that need processes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from finetune.commands.doctor import devices, host, network, versions
from finetune.commands.doctor.check import Check, fail, skip, worst
from finetune.commands.doctor.config import Demands, check_config, check_locations, demands_of
from finetune.commands.doctor.dry_run import check_dry_run
from finetune.commands.doctor.launched import check_launched, check_this_world
from finetune.commands.doctor.probe import ask
from finetune.config.base_config import BaseConfig
from finetune.config.fields import setting
from finetune.config.flags import Parsed
from finetune.config.kinds import KINDS, RunKind, kind_of_arguments
from finetune.config.options import SpokenOptions, read_known_options
from finetune.errors import ConfigError, ExitCode, raise_problems
from finetune.runtime.host import HostMeter
from finetune.runtime.language import _
from finetune.runtime.launch_environment import launch_world
from finetune.runtime.smi import SmiReport, read_devices
from finetune.runtime.terminal import console as terminal_console
from finetune.runtime.terminal import libraries_to_stderr

DATA_TIMEOUT_SECONDS = 300.0
TAGS = {
    "ok": ("[OK]", "green"),
    "warn": ("[WARNING]", "yellow"),
    "fail": ("[ERROR]", "red"),
    "skip": ("[SKIP]", "dim"),
}
# Flags of a run that describe the machine and do not make a run by themselves.
_NO_RUN = {"device_type", "timeout_seconds"}


class DoctorOptions(SpokenOptions):
    """The command line; other arguments are those of the run."""

    usage: ClassVar[str] = (
        "python -m finetune doctor [KIND] [--quick|--full|--launched] [--config FILE] [FLAGS OF A"
        " RUN]"
    )
    summary: ClassVar[str] = (
        "Examine this machine, and with a configuration whether that run will start on it.\nWrites"
        " nothing outside a temporary folder (and where DeepSpeed's operators are built, if the run"
        " needs them)."
    )
    epilog: ClassVar[str] = (
        "The other flags are those of the run: python -m finetune.KIND --help lists them.\n"
        "Exit code: 0 nothing failed; 1 at least one check failed; 2 the command line is wrong."
    )
    positional: ClassVar[tuple[str, ...]] = ("kind",)
    aliases: ClassVar[Mapping[str, str]] = {"nproc_per_node": "nproc"}

    kind: str | None = setting(
        None,
        group="options",
        unit="|".join(KINDS),
        shown_default="by the run's flags and files",
        description="The kind of run.",
    )
    quick: bool = setting(
        False, group="options", description="Only what needs no torch: under two seconds."
    )
    full: bool = setting(
        False,
        group="options",
        description=(
            "Also build and try DeepSpeed's operators, start --nproc processes (all-reduce, a"
            " product compared over the ranks), and train, save and resume a tiny model."
        ),
    )
    launched: bool = setting(
        False,
        group="options",
        description=(
            "Under torchrun or accelerate launch: the checks between processes, in that world."
        ),
    )
    nproc: int | None = setting(
        None,
        group="options",
        unit="N",
        shown_default="1",
        gt=0,
        description="Processes that the run will have on this machine.",
    )
    min_devices: int | None = setting(
        None, group="options", unit="N", gt=0, description="Least number of devices."
    )
    min_free_memory: float | None = setting(
        None,
        group="options",
        unit="GiB",
        gt=0,
        description="GiB that must be free on each of them.",
    )

    def problems(self) -> list[tuple[str, str]]:
        found = []
        if self.kind is not None and self.kind not in KINDS:
            found.append(
                (
                    f"{self.kind!r} is no kind of run",
                    f"give {' or '.join(KINDS)}, or leave it out",
                )
            )
        if self.quick + self.full + self.launched > 1:
            found.append(("--quick, --full and --launched exclude one another", "keep one of them"))
        return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command: 0 nothing failed, 1 something did.

    Raises:
        FinetuneError: the command line is wrong (exit code 2); the caller prints it.
    """
    options, arguments = read_known_options(DoctorOptions, argv)
    kind = KINDS[options.kind] if options.kind else kind_of_arguments(arguments)
    parsed = kind.parse(arguments)
    raise_problems(parsed.problems)
    if options.launched:
        if not launch_world().launched:
            raise ConfigError(
                "--launched is for processes that a launcher started",
                "the environment has no RANK",
                "torchrun --nproc_per_node 2 -m finetune doctor --launched, or use --full, which"
                " starts them itself",
            )
        with libraries_to_stderr():
            world, made = check_this_world(_wanted_device(parsed))
        if not world.is_main:
            return exit_code(made)
        checks: Iterable[Check] = made
    else:
        checks = examine(options, kind, arguments, parsed, dict(os.environ))
    if options.as_json:
        made = list(checks)
        sys.stdout.write(json.dumps(to_json(made), ensure_ascii=False, indent=2) + "\n")
    else:
        made = show(checks, terminal_console(highlight=False))
    return exit_code(made)


# ---------------------------------------------------------------- the checks


def quick_checks(
    config: BaseConfig | None = None,
    *,
    processes: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Check]:
    """Make the checks that need no torch and no process of a minute: for launchers, under two
    seconds.

    A failed check means that the run will not start or will die; nothing is raised, written or
    printed. How the nodes meet (port, addresses) is not asked: a launcher does that itself.

    Args:
        config: a resolved configuration (`resolution.resolve(...).config`); None checks the machine
            only.
        processes: processes that will be started on this machine; None: one.
        environment: the variables that the run will be started with; None: this process's.
    """
    variables = os.environ if environment is None else environment
    nodes = variables.get("NNODES", "1")
    examination = Examination(
        variables,
        config,
        wanted_device=config.device_type if config is not None else "auto",
        processes=processes or 1,
        nodes=int(nodes) if nodes.isdigit() and int(nodes) else 1,
    )
    return list(examination.quick(waits=True))


def examine(
    options: DoctorOptions,
    kind: RunKind,
    arguments: Sequence[str],
    parsed: Parsed,
    environment: Mapping[str, str],
) -> Iterator[Check]:
    """Make all checks that the options ask for, one after another.

    Args:
        arguments: the run's command line; `parsed` is the same, parsed.
    """
    nodes, node_checks = network.check_nodes(environment)
    count = 1 if nodes is None else nodes.count
    processes = options.nproc or 1
    config: BaseConfig | None = None
    if parsed.config_files or parsed.deepspeed or set(parsed.values) - _NO_RUN:
        config, config_checks = check_config(arguments, kind, processes * count)
        yield from config_checks
    examination = Examination(
        environment,
        config,
        wanted_device=_wanted_device(parsed) if config is None else config.device_type,
        processes=processes,
        whole_machine=options.nproc is None,
        nodes=count,
        min_devices=options.min_devices,
        min_free_memory_gib=options.min_free_memory,
    )
    torch_failed = False
    if not options.quick:
        for check in examination.with_torch():
            torch_failed |= check.name.startswith("torch") and check.verdict == "fail"
            yield check
    yield from examination.quick()
    yield from node_checks
    if nodes is not None:
        yield network.check_port(nodes)
        yield network.check_master_address(nodes)
        yield network.check_master_reachable(nodes)
        yield network.check_own_name(nodes, environment)
    if options.quick or torch_failed:
        return
    if config is not None:
        yield from examination.with_data(kind, arguments)
    yield from examination.with_operators(everything=options.full)
    if options.full:
        device_type = examination.device_type
        yield from check_launched(processes, device_type, environment)
        yield check_dry_run(kind, processes, device_type, config, environment)


def _wanted_device(parsed: Parsed) -> str:
    return str(parsed.values["device_type"].value) if "device_type" in parsed.values else "auto"


@dataclass
class Examination:
    """A machine, and a run that is to start on it.

    Attributes:
        environment: the variables that the run will be started with.
        config: the resolved configuration; None if there is none, or it is wrong.
        wanted_device: the requested device type, or auto.
        processes: processes that will be started on this machine.
        whole_machine: the number of processes is not given; then all devices are looked at.
        min_devices, min_free_memory_gib: what the preset asks for; None if it does not.
        torch_device: the type that torch takes; None as long as torch was not asked.
        reports: of npu-smi and the NVIDIA driver.
    """

    environment: Mapping[str, str]
    config: BaseConfig | None
    wanted_device: str
    processes: int
    nodes: int
    whole_machine: bool = False
    min_devices: int | None = None
    min_free_memory_gib: float | None = None
    torch_device: str | None = None
    reports: Sequence[SmiReport] = field(default_factory=read_devices)

    @cached_property
    def device_type(self) -> str:
        """The type that the run takes, as far as is known."""
        if self.torch_device is not None:
            return self.torch_device
        torch_version, cuda = versions.torch_build()
        usable = ["npu"] if find_spec("torch_npu") is not None else []
        usable += ["cuda"] if cuda or not torch_version else []
        return devices.accelerator(self.reports, self.wanted_device, usable)

    @cached_property
    def demands(self) -> Demands:
        return demands_of(self.config, self.device_type, self.processes, self.nodes)

    def _report(self, device_type: str) -> SmiReport | None:
        return next((report for report in self.reports if report.device_type == device_type), None)

    def quick(self, *, waits: bool = False) -> Iterator[Check]:
        """What needs neither torch nor another machine nor a process of its own.

        Args:
            waits: see `check_locations`.
        """
        yield from self._software()
        yield from self._accelerators()
        yield from self._machine()
        yield from network.check_variables(
            self.environment, self.device_type, self.processes, self.nodes
        )
        if self.config is not None:
            yield from check_locations(self.config, waits=waits)

    def _software(self) -> Iterator[Check]:
        """Python, packages, and what goes with the devices."""
        requirements = versions.own_requirements(("deepspeed",) if self.demands.deepspeed else ())
        yield versions.check_python()
        yield versions.check_packages(requirements)
        torch_version, cuda = versions.torch_build()
        npu = self._report("npu")
        npus_here = versions.npus_present() or bool(npu and npu.devices)
        importable = find_spec("torch_npu") is not None
        yield versions.check_ascend_home(
            self.environment,
            needed=importable or npus_here,
            builds_operators=self.demands.cpu_adam and importable,
        )
        home = versions.cann_home(self.environment)
        installed = versions.AscendSoftware(
            torch=torch_version,
            torch_npu=versions.installed_version("torch_npu"),
            cann=versions.cann_version(Path(home)) if home else None,
            floor=versions.lowest_torch(requirements),
        )
        yield versions.check_pairing(
            installed, torch_cuda=cuda, importable=importable, npus_here=npus_here
        )
        yield versions.check_cuda_build(
            torch_version, cuda, self._report("cuda"), self.wanted_device == "cuda"
        )

    def _accelerators(self) -> Iterator[Check]:
        """Devices, their memory and health."""
        yield devices.check_devices(
            self.reports,
            self.device_type,
            self.environment,
            processes=self.processes,
            min_devices=self.min_devices,
        )
        if self.device_type not in devices.TOOLS:
            return
        seen = devices.visible_devices(self._report(self.device_type), self.environment)
        used = max(self.processes, self.min_devices or 0)
        if self.whole_machine and not self.min_devices:
            used = len(seen)
        needed = self.min_free_memory_gib
        needed_bytes = None if needed is None else int(needed * 2**30)
        yield devices.check_device_memory(seen, needed_devices=used, needed_bytes=needed_bytes)
        yield devices.check_device_health(seen[:used])

    def _machine(self) -> Iterator[Check]:
        """Host memory, limits, disk, compiler."""
        demands, config = self.demands, self.config
        yield host.check_host_memory(HostMeter().look(), demands.host_bytes, demands.host_for)
        yield host.check_shared_memory(self.processes, demands.loader_workers)
        yield host.check_locked_memory(demands.pinned, self.nodes)
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
        elif demands.deepspeed and self.device_type == "cpu":
            built = _("DeepSpeed's operator for processes on one CPU")
        yield host.check_compiler(built, self.environment)

    def with_torch(self) -> list[Check]:
        """What torch sees, and which device type it takes."""
        listed = sum(len(report.devices) for report in self.reports)
        checks, self.torch_device = devices.check_torch(
            self.environment, self.wanted_device, self.config, listed, self.processes
        )
        return checks

    def with_data(self, kind: RunKind, arguments: Sequence[str]) -> list[Check]:
        """Model folder, tokenizer, template and data, read as a run would."""
        answer = ask(
            "finetune.commands.doctor.data_probe",
            {
                "kind": kind.name,
                "module": kind.module,
                "arguments": list(arguments),
                "world_size": self.processes * self.nodes,
            },
            environment={**self.environment, "TOKENIZERS_PARALLELISM": "false"},
            timeout_seconds=DATA_TIMEOUT_SECONDS,
        )
        if answer.report is not None:
            return [Check(**found) for found in answer.report]
        what = _("model and data could not be read: {reason}").format(reason=answer.reason)
        fix = _("python -m finetune inspect shows the records and what is wrong with them")
        return [fail("data", what, fix)]

    def with_operators(self, *, everything: bool) -> Iterator[Check]:
        """DeepSpeed's operators, as far as the run builds them.

        Args:
            everything: also those that the run does not need; then a failure is a warning.
        """
        demands = self.demands
        if find_spec("deepspeed") is None:
            if everything:
                yield skip("cpu_adam", _("DeepSpeed is not installed"))
            return
        if self.device_type == "cpu" and (everything or demands.deepspeed):
            check = host.check_shared_memory_operator(self.environment)
            yield check if demands.deepspeed else _at_most_a_warning(check)
        if everything or demands.cpu_adam:
            check = host.check_cpu_adam(self.device_type, self.environment)
            yield check if demands.cpu_adam else _at_most_a_warning(check)


def _at_most_a_warning(check: Check) -> Check:
    return replace(check, verdict="warn") if check.verdict == "fail" else check


# ---------------------------------------------------------------- what is printed


def show(checks: Iterable[Check], console: Console) -> list[Check]:
    """Print each check as it comes, with the fix under what needs one; then a summary. Returns the
    checks.
    """
    made = []
    for check in checks:
        made.append(check)
        tag, style = TAGS[check.verdict]
        rows = [(Text(tag, style), check.name, Text(check.what, "dim" * (check.verdict == "skip")))]
        if check.fix is not None:
            rows.append((Text(), "", Text(_("fix: {fix}").format(fix=check.fix), style)))
        if console.is_terminal:
            table = Table.grid(padding=(0, 1))
            for width in (9, 22, None):
                table.add_column(width=width)
            for row in rows:
                table.add_row(*row)
            console.print(table)
        else:
            for row in rows:
                line = f"{row[0].plain:<9} {row[1]:<22} {row[2].plain}"
                console.print(Text(line), soft_wrap=True)
    console.print(Text(summary(made), style=TAGS[worst(made)][1]), soft_wrap=True)
    return made


def summary(checks: Sequence[Check]) -> str:
    """How many of each verdict, and what that means."""
    count = {verdict: sum(check.verdict == verdict for check in checks) for verdict in TAGS}
    text = _("{ok} ok, {warn} warnings, {fail} errors, {skip} skipped: ready to start")
    if count["fail"]:
        text = _("{ok} ok, {warn} warnings, {fail} errors, {skip} skipped: fix the errors first")
    return text.format(**count)


def to_json(checks: Sequence[Check]) -> dict[str, Any]:
    """The form of `--json`."""
    return {
        "verdict": worst(checks),
        "exit_code": exit_code(checks),
        "checks": [check.to_json() for check in checks],
    }


def exit_code(checks: Iterable[Check]) -> int:
    return int(ExitCode.FAILED if worst(checks) == "fail" else ExitCode.DONE)
