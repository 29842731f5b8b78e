"""`python -m finetune doctor`: what would keep a run from starting or kill it, found before it
starts.

The checks that cost nothing come first, then those that need torch, then those that need processes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from finetune.commands.doctor import devices, host, network, versions
from finetune.commands.doctor.check import Check, worst
from finetune.commands.doctor.config import Demands, check_config, check_locations, demands_of
from finetune.commands.doctor.dry_run import check_dry_run
from finetune.commands.doctor.launched import check_launched, check_this_world
from finetune.commands.doctor.probe import ask
from finetune.config.base_config import BaseConfig
from finetune.config.fields import setting
from finetune.config.kinds import KINDS, RunKind, kind_of_arguments
from finetune.config.options import Parsed, SpokenOptions, read_known_options
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
UNWRAPPED = 100_000  # columns: a file or pipe gets each text on one line
# Flags of a run that describe the machine and do not make a run by themselves.
_NO_RUN = {"device_type", "timeout_seconds"}


option = partial(setting, group="options")


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

    kind: str | None = option(
        None,
        unit="|".join(KINDS),
        shown_default="by the run's flags and files",
        description="The kind of run.",
    )
    quick: bool = option(False, description="Only what needs no torch: under two seconds.")
    full: bool = option(
        False,
        description=(
            "Also build and try DeepSpeed's operators, start --nproc processes (all-reduce, a"
            " product compared over the ranks), and train, save and resume a tiny model."
        ),
    )
    launched: bool = option(
        False,
        description=(
            "Under torchrun or accelerate launch: the checks between processes, in that world."
        ),
    )
    nproc: int | None = option(
        None,
        unit="N",
        shown_default="1",
        gt=0,
        description="Processes that the run will have on this machine.",
    )
    min_devices: int | None = option(
        None,
        unit="N",
        gt=0,
        description="Least number of devices.",
    )
    min_free_memory: float | None = option(
        None,
        unit="GiB",
        gt=0,
        description="GiB that must be free on each of them.",
    )

    def problems(self) -> list[tuple[str, str]]:
        found = []
        if self.kind is not None and self.kind not in KINDS:
            fix = f"give {' or '.join(KINDS)}, or leave it out"
            found.append((f"{self.kind!r} is no kind of run", fix))
        if self.quick + self.full + self.launched > 1:
            found.append(("--quick, --full and --launched exclude one another", "keep one of them"))
        return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. 0: nothing failed; 1: something did.

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
            world, found = check_this_world(_wanted_device(parsed))
        if not world.is_main:
            return exit_code(found)
        checks: Iterable[Check] = found
    else:
        checks = examine(options, kind, arguments, parsed, dict(os.environ))
    if options.as_json:
        checks = list(checks)
        sys.stdout.write(json.dumps(to_json(checks), ensure_ascii=False, indent=2) + "\n")
    else:
        checks = show(checks, terminal_console(highlight=False))
    return exit_code(checks)


def _wanted_device(parsed: Parsed) -> str:
    return str(parsed.values["device_type"].value) if "device_type" in parsed.values else "auto"


# ---------------------------------------------------------------- the checks


def quick_checks(
    config: BaseConfig | None = None,
    *,
    processes: int = 1,
    nodes: int = 1,
    environment: Mapping[str, str] | None = None,
) -> list[Check]:
    """Make the checks that need no torch and no process of a minute: for launchers, under two
    seconds.

    A failed check means that the run will not start or will die; nothing is raised, written or
    printed. How the nodes meet (port, addresses) is not asked: a launcher does that itself.

    Args:
        config: a resolved configuration (`resolution.resolve(...).config`); None checks the machine
            only.
        processes: processes that will be started on this machine.
        nodes: machines of the run.
        environment: the variables that the run will be started with; None: this process's.
    """
    variables = os.environ if environment is None else environment
    device_type = "auto" if config is None else config.device_type
    machine = Machine(variables, config, device_type, nodes, DoctorOptions(nproc=processes))
    return list(machine.quick_checks(waits=True))


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
    config, wanted_device = None, _wanted_device(parsed)
    if parsed.config_files or parsed.deepspeed or set(parsed.values) - _NO_RUN:
        config, config_checks = check_config(arguments, kind, processes * count)
        yield from config_checks
    if config is not None:
        wanted_device = config.device_type
    machine = Machine(environment, config, wanted_device, count, options)
    torch_failed = False
    if not options.quick:
        for check in machine.torch_checks():
            torch_failed |= check.name.startswith("torch") and check.verdict == "fail"
            yield check
    yield from machine.quick_checks()
    yield from node_checks
    if nodes is not None:
        yield network.check_port(nodes)
        if nodes.count > 1:
            yield network.check_master_address(nodes)
            yield network.check_master_reachable(nodes)
            yield network.check_own_name(environment)
        else:
            for name in ("master_address", "master_reachable", "own_address"):
                yield Check(name).skip(_("one node"))
    if options.quick or torch_failed:
        return
    if config is not None:
        yield from machine.data_checks(kind, arguments)
    yield from machine.operator_checks()
    if options.full:
        yield from check_launched(processes, machine.device_type, environment)
        yield check_dry_run(kind, processes, machine.device_type, config, environment)


@dataclass
class Machine:
    """This machine, and a run that is to start on it.

    Attributes:
        environment: the variables that the run will be started with.
        config: the resolved configuration; None if there is none, or it is wrong.
        wanted_device: the requested device type, or auto.
        nodes: machines of the run.
        options: processes here (all devices are examined if their number is not given), and what a
            preset asks of the devices.
        reports: of npu-smi and the NVIDIA driver.
        device_type: the type that the run takes, as far as is known; torch knows best.
    """

    environment: Mapping[str, str]
    config: BaseConfig | None
    wanted_device: str
    nodes: int
    options: DoctorOptions
    reports: Sequence[SmiReport] = field(default_factory=read_devices)

    def __post_init__(self) -> None:
        self.processes = self.options.nproc or 1
        self.has_torch_npu = find_spec("torch_npu") is not None
        self.torch_version, self.torch_cuda = versions.torch_build()
        usable = ["npu"] if self.has_torch_npu else []
        usable += ["cuda"] if self.torch_cuda or not self.torch_version else []
        self.device_type = devices.accelerator(self.reports, self.wanted_device, usable)

    @property
    def demands(self) -> Demands:
        return demands_of(self.config, self.device_type, self.processes, self.nodes)

    def quick_checks(self, *, waits: bool = False) -> Iterator[Check]:
        """Run the checks that need neither torch nor another machine nor a separate process.

        Args:
            waits: see `check_locations`.
        """
        yield from self._software()
        yield from self._devices()
        yield from self._host()
        yield from network.check_variables(self.environment, self.processes, self.nodes)
        if self.config is not None:
            yield from check_locations(self.config, waits=waits)

    def _software(self) -> Iterator[Check]:
        """Check Python, packages, and what goes with the devices."""
        requirements = versions.own_requirements(("deepspeed",) if self.demands.deepspeed else ())
        yield versions.check_python()
        yield versions.check_packages(requirements)
        npu, home = devices.report_of(self.reports, "npu"), versions.cann_home(self.environment)
        npus_here = versions.npus_present() or bool(npu and npu.devices)
        yield versions.check_ascend_home(
            self.environment,
            needed=self.has_torch_npu or npus_here,
            builds_operators=self.demands.cpu_adam and self.has_torch_npu,
        )
        yield versions.check_pairing(
            self.torch_version,
            versions.installed_version("torch_npu"),
            versions.cann_version(Path(home)) if home else None,
            versions.lowest_torch(requirements),
            torch_cuda=self.torch_cuda,
            importable=self.has_torch_npu,
            npus_here=npus_here,
        )
        cuda, requested = devices.report_of(self.reports, "cuda"), self.wanted_device == "cuda"
        yield versions.check_cuda_build(self.torch_version, self.torch_cuda, cuda, requested)

    def _devices(self) -> Iterator[Check]:
        """Check the devices, their memory and health."""
        min_devices = self.options.min_devices
        yield devices.check_devices(
            self.reports,
            self.device_type,
            self.environment,
            processes=self.processes,
            min_devices=min_devices,
        )
        if self.device_type not in devices.TOOLS:
            return
        report = devices.report_of(self.reports, self.device_type)
        seen = devices.visible_devices(report, self.environment)
        used = max(self.processes, min_devices or 0)
        if self.options.nproc is None and min_devices is None:
            used = len(seen)
        needed = self.options.min_free_memory
        needed_bytes = None if needed is None else int(needed * 2**30)
        yield devices.check_device_memory(seen, needed_devices=used, needed_bytes=needed_bytes)
        yield devices.check_device_health(seen[:used])

    def _host(self) -> Iterator[Check]:
        """Check host memory, limits, disk and compiler."""
        demands, config = self.demands, self.config
        yield host.check_host_memory(HostMeter().look(), demands.host_bytes, demands.host_for)
        yield host.check_shared_memory(self.processes, demands.loader_workers)
        yield host.check_locked_memory(demands.pinned, self.nodes)
        yield host.check_open_files()
        folders = {"output": Path.cwd() if config is None else Path(config.output_dir)}
        if config is not None and config.cache_dir is not None:
            folders["cache"] = Path(config.cache_dir)
        for use, folder in folders.items():
            yield host.check_disk(use, folder, demands.disk_bytes if use == "output" else 0)
            yield from host.check_locks(use, folder)
        built = ""
        if demands.cpu_adam:
            built = _("DeepSpeed's CPU Adam")
        elif demands.deepspeed and self.device_type == "cpu":
            built = _("DeepSpeed's operator for processes on one CPU")
        yield host.check_compiler(built, self.environment)

    def torch_checks(self) -> list[Check]:
        """Check what torch sees, and which device type it takes."""
        listed = sum(len(report.devices) for report in self.reports)
        checks, device_type = devices.check_torch(
            self.environment, self.wanted_device, self.config, listed, self.processes
        )
        self.device_type = device_type or self.device_type
        return checks

    def data_checks(self, kind: RunKind, arguments: Sequence[str]) -> list[Check]:
        """Check model folder, tokenizer, template and data, read as a run would."""
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
        what = _("model and data could not be read: {reason}")
        fix = _("python -m finetune inspect shows the records and what is wrong with them")
        return [Check("data").fail(what, fix, reason=answer.reason)]

    def operator_checks(self) -> Iterator[Check]:
        """Check DeepSpeed's operators, as far as the run builds them; with --full also the others,
        whose failure is a warning.
        """
        demands, full = self.demands, self.options.full
        if find_spec("deepspeed") is None:
            if full:
                yield Check("cpu_adam").skip(_("DeepSpeed is not installed"))
            return
        if self.device_type == "cpu" and (full or demands.deepspeed):
            check = host.check_shared_memory_operator(self.environment)
            yield check if demands.deepspeed else _at_most_a_warning(check)
        if full or demands.cpu_adam:
            check = host.check_cpu_adam(self.device_type, self.environment)
            yield check if demands.cpu_adam else _at_most_a_warning(check)


def _at_most_a_warning(check: Check) -> Check:
    return replace(check, verdict="warn") if check.verdict == "fail" else check


# ---------------------------------------------------------------- what is printed


def show(checks: Iterable[Check], console: Console) -> list[Check]:
    """Print each check as it comes, with the fix under what needs one; then a summary.

    Returns: the checks.
    """
    shown = []
    if not console.is_terminal:
        console.width = UNWRAPPED
    for check in checks:
        shown.append(check)
        tag, style = TAGS[check.verdict]
        what = Text(check.what, "dim" if check.verdict == "skip" else "")
        console.print(_row(Text(tag, style), check.name, what))
        if check.fix is not None:
            fix = Text(_("fix: {fix}").format(fix=check.fix), style)
            console.print(_row(Text(), "", fix))
    console.print(Text(summary(shown), style=TAGS[worst(shown)][1]), soft_wrap=True)
    return shown


def _row(tag: Text, name: str, text: Text) -> Table:
    table = Table.grid(Column(width=9), Column(width=22), padding=(0, 1))
    table.add_row(tag, name, text)
    return table


def summary(checks: Sequence[Check]) -> str:
    """Count the checks of each verdict, and state what that means."""
    count = {verdict: sum(check.verdict == verdict for check in checks) for verdict in TAGS}
    text = _("{ok} ok, {warn} warnings, {fail} errors, {skip} skipped: ready to start")
    if count["fail"]:
        text = _("{ok} ok, {warn} warnings, {fail} errors, {skip} skipped: fix the errors first")
    return text.format(**count)


def to_json(checks: Sequence[Check]) -> dict[str, Any]:
    """Return the form of `--json`."""
    return {
        "verdict": worst(checks),
        "exit_code": exit_code(checks),
        "checks": [asdict(check) for check in checks],
    }


def exit_code(checks: Iterable[Check]) -> int:
    return int(ExitCode.FAILED if worst(checks) == "fail" else ExitCode.DONE)
