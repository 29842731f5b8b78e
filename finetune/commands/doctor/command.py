"""`python -m finetune doctor`: what would keep a run from starting or kill it, found before it
starts.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from finetune.commands.doctor import suites
from finetune.commands.doctor.check import Check, worst
from finetune.commands.doctor.config import check_config
from finetune.commands.doctor.launched import check_this_world
from finetune.commands.doctor.network import check_nodes
from finetune.commands.doctor.suites import CheckContext
from finetune.config.base_config import BaseConfig
from finetune.config.fields import setting
from finetune.config.flags import Parsed
from finetune.config.kinds import KINDS, RunKind, kind_of_arguments
from finetune.config.options import SpokenOptions, read_known_options
from finetune.errors import ConfigError, ExitCode, raise_problems
from finetune.runtime.language import _
from finetune.runtime.launch_environment import launch_world
from finetune.runtime.terminal import console as terminal_console
from finetune.runtime.terminal import libraries_to_stderr

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
    min_devices: int | None = None,
    min_free_memory_gib: float | None = None,
) -> list[Check]:
    """The checks that need no torch and no process of a minute: for launchers, under two seconds.

    A failed check means that the run will not start or will die; nothing is raised, written or
    printed. How the nodes meet (port, addresses) is not asked: a launcher does that itself.

    Args:
        config: a resolved configuration (`resolution.resolve(...).config`); None checks the machine
            only.
        processes: processes that will be started on this machine; None: one.
        environment: the variables that the run will be started with; None: this process's.
        min_devices: least number of devices; None: as many as processes.
        min_free_memory_gib: GiB that must be free on each of them; None: not asked.
    """
    variables = os.environ if environment is None else environment
    nodes = variables.get("NNODES", "1")
    context = CheckContext(
        variables,
        config=config,
        processes=processes or 1,
        nodes=int(nodes) if nodes.isdigit() and int(nodes) else 1,
        min_devices=min_devices,
        min_free_memory_gib=min_free_memory_gib,
        wanted_device=config.device_type if config is not None else "auto",
    )
    return list(suites.quick(context, waits=True))


def examine(
    options: DoctorOptions,
    kind: RunKind,
    arguments: Sequence[str],
    parsed: Parsed,
    environment: Mapping[str, str],
) -> Iterator[Check]:
    """All checks that the options ask for, as they are made.

    Args:
        arguments: the run's command line; `parsed` is the same, taken apart.
    """
    nodes, _checks = check_nodes(environment)
    count = 1 if nodes is None else nodes.count
    processes = options.nproc or 1
    config: BaseConfig | None = None
    config_checks: list[Check] = []
    if parsed.config_files or parsed.deepspeed or set(parsed.values) - _NO_RUN:
        config, config_checks = check_config(arguments, kind, processes * count)
    context = CheckContext(
        environment,
        config=config,
        kind=kind,
        arguments=arguments,
        processes=processes,
        whole_machine=options.nproc is None,
        nodes=count,
        min_devices=options.min_devices,
        min_free_memory_gib=options.min_free_memory,
        wanted_device=_wanted_device(parsed) if config is None else config.device_type,
    )
    torch_checks: list[Check] = []
    if not options.quick:
        torch_checks, context = suites.with_torch(context)
    yield from config_checks
    yield from torch_checks
    yield from suites.quick(context)
    yield from suites.rendezvous(context)
    torch_failed = any(
        check.name.startswith("torch") and check.verdict == "fail" for check in torch_checks
    )
    if options.quick or torch_failed:
        return
    if config is not None:
        yield from suites.with_data(context)
    yield from suites.with_processes(context) if options.full else suites.with_operators(context)


def _wanted_device(parsed: Parsed) -> str:
    return str(parsed.values["device_type"].value) if "device_type" in parsed.values else "auto"


# ---------------------------------------------------------------- what is printed


def show(checks: Iterable[Check], console: Console) -> list[Check]:
    """Print each check as it comes, with the fix under what needs one; then a summary. Returns the
    checks.
    """
    made = []
    for check in checks:
        made.append(check)
        tag, style = TAGS[check.verdict]
        fix = None
        if check.fix is not None and check.verdict in ("warn", "fail"):
            fix = _("fix: {fix}").format(fix=check.fix)
        if not console.is_terminal:
            console.print(Text(f"{tag:<9} {check.name:<22} {check.what}"), soft_wrap=True)
            if fix:
                console.print(Text(f"{'':<9} {'':<22} {fix}"), soft_wrap=True)
            continue
        row = Table.grid(padding=(0, 1))
        row.add_column(width=9)
        row.add_column(width=22)
        row.add_column()
        what = Text(check.what, style="dim" if check.verdict == "skip" else "")
        row.add_row(Text(tag, style=style), check.name, what)
        if fix:
            row.add_row("", "", Text(fix, style=style))
        console.print(row)
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
