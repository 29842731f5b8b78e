"""`python -m finetune doctor`: what would keep a run from starting or kill it, found before it starts."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from finetune.commands.doctor import suites as rounds
from finetune.commands.doctor.check import Check, worst
from finetune.commands.doctor.config import check_config
from finetune.commands.doctor.suites import Subject
from finetune.config.kinds import kind_names, kind_of_arguments, run_kind
from finetune.config.run_config import BaseConfig
from finetune.errors import ConfigError, ExitCode, raise_problems
from finetune.runtime.language import Language, pick_language

if TYPE_CHECKING:
    from rich.console import Console

USAGE = """usage: python -m finetune doctor [sft|pretrain] [--quick|--full|--launched] [--nproc N] [--config FILE]
                                 [FLAGS OF TRAINING]

Examines this machine, and with a configuration whether that run will start on it. Writes nothing outside a temporary
folder (and the place where DeepSpeed's operators are built, where the run needs them).

  --quick              only what needs no torch: under two seconds
  --full               also build and try DeepSpeed's operators, start --nproc processes (all-reduce, a product compared
                       over the ranks), and train, save and resume a tiny model
  --launched           under torchrun or accelerate launch: the checks between processes, in that world
  --nproc N            processes that the run will have on this machine (default 1)
  --min-devices N      least number of devices
  --min-free-memory G  GiB that must be free on each of them
  --json               one JSON object instead of lines
  --lang en|zh         language (default: the locale's)
  The other flags are those of `python -m finetune sft --help` or `pretrain --help`.

Exit code: 0 nothing failed; 1 at least one check failed; 2 the command line is wrong.
"""
TAGS = {"ok": ("[OK]", "green"), "warn": ("[WARNING]", "yellow"), "fail": ("[ERROR]", "red"), "skip": ("[SKIP]", "dim")}
# Training flags that say something about the machine and do not make a run by themselves.
_NO_RUN = {"device_type", "timeout_seconds"}


def quick_checks(
    config: BaseConfig | None = None,
    *,
    processes: int | None = None,
    environment: Mapping[str, str] | None = None,
    min_devices: int | None = None,
    min_free_memory_gib: float | None = None,
) -> list[Check]:
    """The checks that need no torch and no process of a minute: for launchers, under two seconds.

    A failed check means that the run will not start or will die; nothing is raised, written or printed. How the nodes
    meet (port, addresses) is not asked: a launcher does that itself.

    Args:
        config: a resolved configuration (`config_file.resolve(...).config`); None checks the machine only.
        processes: processes that will be started on this machine; None: one.
        environment: the variables that the run will be started with; None: this process's.
        min_devices: least number of devices; None: as many as processes.
        min_free_memory_gib: GiB that must be free on each of them; None: not asked.
    """
    variables = os.environ if environment is None else environment
    nodes = variables.get("NNODES", "1")
    subject = Subject(
        variables,
        config=config,
        processes=processes or 1,
        nodes=int(nodes) if nodes.isdigit() and int(nodes) else 1,
        min_devices=min_devices,
        min_free_memory_gib=min_free_memory_gib,
        wanted_device=config.device_type if config is not None else "auto",
    )
    return list(rounds.quick(subject, waits=True))


def examine(options: argparse.Namespace, words: Sequence[str], environment: Mapping[str, str]) -> Iterator[Check]:
    """All checks that the options ask for, as they are made.

    Raises:
        ConfigError: flags that neither doctor nor the training command knows (`Problems` for several).
    """
    kind = run_kind(options.kind) if options.kind else kind_of_arguments(words)
    parsed = kind.parse(words)
    raise_problems(parsed.problems)
    wanted = str(parsed.values.get("device_type", ("auto", ""))[0])
    nodes, _ = rounds.network.check_nodes(environment)
    count = 1 if nodes is None else nodes.count
    processes = options.nproc or 1
    config, config_checks = None, []
    if parsed.config_files or parsed.deepspeed or set(parsed.values) - _NO_RUN:
        config, config_checks = check_config(words, kind, processes * count)
    subject = Subject(
        environment,
        config=config,
        kind=kind,
        words=words,
        processes=processes,
        whole_machine=options.nproc is None,
        nodes=count,
        min_devices=options.min_devices,
        min_free_memory_gib=options.min_free_memory,
        wanted_device=wanted if config is None else config.device_type,
    )
    torch_checks: list[Check] = []
    if not options.quick:
        torch_checks, subject = rounds.with_torch(subject)
    yield from config_checks
    yield from torch_checks
    yield from rounds.quick(subject)
    yield from rounds.meeting(subject)
    if options.quick:
        return
    readable = not any(check.name.startswith("torch") and check.verdict == "fail" for check in torch_checks)
    if config is not None and readable:
        yield from rounds.with_data(subject)
    if readable:
        yield from rounds.with_processes(subject) if options.full else rounds.with_operators(subject)


# ---------------------------------------------------------------- what is said


def show(checks: Iterable[Check], language: Language, console: Console) -> list[Check]:
    """Print each check as it comes, with the fix under what needs one; then how it stands. Returns the checks."""
    from rich.table import Table
    from rich.text import Text

    made = []
    for check in checks:
        made.append(check)
        tag, style = TAGS[check.verdict]
        said = Text(check.what[language], style="dim" if check.verdict == "skip" else "")
        fix = None if check.fix is None or check.verdict in ("ok", "skip") else check.fix[language]
        mark = "修复：" if language == "zh" else "fix: "
        if not console.is_terminal:
            console.print(Text(f"{tag:<9} {check.name:<22} {said.plain}"), soft_wrap=True)
            if fix:
                console.print(Text(f"{'':<9} {'':<22} {mark}{fix}"), soft_wrap=True)
            continue
        row = Table.grid(padding=(0, 1))
        row.add_column(width=9)
        row.add_column(width=22)
        row.add_column()
        row.add_row(Text(tag, style=style), check.name, said)
        if fix:
            row.add_row("", "", Text(f"{mark}{fix}", style=style))
        console.print(row)
    console.print(Text(summary(made, language), style=TAGS[worst(made)][1]), soft_wrap=True)
    return made


def summary(checks: Sequence[Check], language: Language) -> str:
    """How many of each verdict, and what that means."""
    count = {verdict: sum(check.verdict == verdict for check in checks) for verdict in TAGS}
    if language == "zh":
        end = "请先修复错误" if count["fail"] else "可以启动"
        return f"{count['ok']} 项通过，{count['warn']} 项警告，{count['fail']} 项错误，{count['skip']} 项跳过：{end}"
    end = "mend the errors first" if count["fail"] else "ready to start"
    return f"{count['ok']} ok, {count['warn']} warnings, {count['fail']} errors, {count['skip']} skipped: {end}"


def to_json(checks: Sequence[Check], language: Language) -> dict[str, Any]:
    """The form of `--json`."""
    return {
        "verdict": worst(checks),
        "exit_code": exit_code(checks),
        "checks": [check.to_json(language) for check in checks],
    }


def exit_code(checks: Iterable[Check]) -> int:
    return int(ExitCode.FAILED if worst(checks) == "fail" else ExitCode.DONE)


# ---------------------------------------------------------------- the command


def main(argv: Sequence[str] | None = None) -> int:
    """The command: 0 nothing failed, 1 something did.

    Raises:
        FinetuneError: the command line is wrong (exit code 2); the caller prints it.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        sys.stdout.write(USAGE)
        return int(ExitCode.DONE)
    options, words = _options(arguments)
    language = pick_language(options.lang)
    if options.launched:
        return _launched(options, words, language)
    checks = examine(options, words, dict(os.environ))
    if options.json:
        made = list(checks)
        sys.stdout.write(json.dumps(to_json(made, language), ensure_ascii=False, indent=2) + "\n")
    else:
        from rich.console import Console

        made = show(checks, language, Console(file=sys.stdout, highlight=False))
    return exit_code(made)


def _options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Doctor's own options, and the words that are left for the training command."""
    kind = arguments[0] if arguments and arguments[0] in kind_names() else None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("quick", "full", "launched", "json"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--lang")
    parser.add_argument("--nproc", "--nproc-per-node", "--nproc_per_node", type=int)
    parser.add_argument("--min-devices", "--min_devices", type=int)
    parser.add_argument("--min-free-memory", "--min_free_memory", type=float)
    try:
        options, words = parser.parse_known_args(arguments[1:] if kind else arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(
            f"{error.argument_name}: {error.message}", where="the command line", fix="see doctor --help"
        ) from error
    options.kind = kind
    if sum((options.quick, options.full, options.launched)) > 1:
        raise ConfigError("--quick, --full and --launched exclude one another", "the command line", "keep one of them")
    for name in ("nproc", "min_devices", "min_free_memory"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{name} is {value}", f"--{name.replace('_', '-')}", "give a number above 0")
    return options, words


def _launched(options: argparse.Namespace, words: Sequence[str], language: Language) -> int:
    """In a launched world: the same checks between processes as --full makes, judged on every rank, said by rank 0."""
    from dataclasses import asdict

    from finetune.commands.doctor.launched import judge
    from finetune.commands.doctor.launched_worker import work
    from finetune.commands.doctor.probe import Answer
    from finetune.runtime import device as devices
    from finetune.runtime.parent_watchdog import die_with_launcher

    world = devices.launch_world()
    if not world.launched:
        raise ConfigError(
            "--launched is for processes that a launcher started",
            "the environment has no RANK",
            "torchrun --nproc_per_node 2 -m finetune doctor --launched, or use --full, which starts them itself",
        )
    die_with_launcher(world)
    parsed = (run_kind(options.kind) if options.kind else kind_of_arguments(words)).parse(words)
    raise_problems(parsed.problems)
    devices.probe_torch_npu()
    device_type = devices.choose_device_type(str(parsed.values.get("device_type", ("auto", ""))[0]))
    reports = [asdict(report) for report in work(world, device_type, exchange=True)]
    checks = judge(reports, world.world_size, Answer(None, 0, ""))
    if world.is_main and options.json:
        sys.stdout.write(json.dumps(to_json(checks, language), ensure_ascii=False, indent=2) + "\n")
    elif world.is_main:
        from rich.console import Console

        show(checks, language, Console(file=sys.stdout, highlight=False))
    return exit_code(checks)
