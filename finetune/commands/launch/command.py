"""`python -m finetune launch [options] sft|pretrain [flags]`: start a run on this machine's devices, and look after it.

Checks first, sets what the workers' environment lacks (each variable with its reason), holds a port, starts torch
elastic's workers, keeps a log, restarts what a restart can cure, and explains what failed. The same command on each of
several nodes, with its own NODE_RANK; under srun with nothing further.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from finetune.commands.doctor.check import Check
from finetune.commands.launch import texts
from finetune.commands.launch.log import LaunchLog
from finetune.commands.launch.plan import Plan, digest, make_plan
from finetune.commands.launch.supervise import Launch, Supervisor
from finetune.config.kinds import kind_names, run_kind
from finetune.config.resolution import Resolved, format_config
from finetune.errors import ExitCode
from finetune.runtime.language import Language, pick_language
from finetune.runtime.ports import HeldPort, candidates, hold_port
from finetune.storage.launch_record import LaunchRecord


def main(arguments: Sequence[str] | None = None) -> int:
    """Launch. The exit code is the run's; 2: refused; 128 + n: stopped by signal n before training began."""
    options = parser().parse_args(_with_dashes(sys.argv[1:] if arguments is None else arguments))
    language = pick_language(options.lang)
    try:
        planned = make_plan(options, language)
    except KeyboardInterrupt:  # torch is being asked for the devices; from the log on, signals are handled
        return 128 + signal.SIGINT
    if isinstance(planned, Resolved):
        sys.stdout.write(format_config(planned) + "\n")
        return int(ExitCode.DONE)
    if options.dry_run:
        _show(planned, language)
        return int(ExitCode.DONE)
    checks = quick_checks(planned)
    failed = [check for check in checks if check.verdict == "fail"]
    for check in failed:
        sys.stderr.write("[ERROR] " + _check_text(check, language).replace("\n", "\n  ") + "\n")
    return int(ExitCode.REFUSED) if failed else _launch(planned, checks, options, language)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m finetune launch",
        description="Start a run on this machine's devices, or on one of several nodes, and look after it.",
        epilog="Exit code: the run's (0 done, 1 failed, 2 refused, 3 stopped with a checkpoint, 4 out of memory after "
        "the last restart); 128 + n where signal n came before training began. See docs/launching.md.",
    )
    made.add_argument(
        "--nproc",
        "--nproc-per-node",
        metavar="N|auto",
        default=os.environ.get("NPROC_PER_NODE") or "auto",
        help="processes on this node; auto: its visible devices, 1 on a CPU (NPROC_PER_NODE)",
    )
    made.add_argument("--nnodes", type=int, metavar="N", help="nodes (NNODES, Slurm; 1)")
    made.add_argument("--node-rank", type=int, metavar="N", help="this node, from 0 (NODE_RANK, Slurm)")
    made.add_argument("--master-addr", metavar="HOST", help="node 0 as all nodes reach it (MASTER_ADDR, Slurm)")
    made.add_argument(
        "--master-port",
        type=int,
        metavar="PORT",
        help="port to meet at; if it is taken, the next of ten that is free (MASTER_PORT, 29500)",
    )
    made.add_argument(
        "--max-restarts",
        type=int,
        metavar="N",
        default=os.environ.get("MAX_RESTARTS") or "3",
        help="attempts after the first, for failures that one can cure (MAX_RESTARTS, 3)",
    )
    made.add_argument(
        "--log-dir",
        metavar="FOLDER",
        default=os.environ.get("FINETUNE_LOG_DIR") or "logs",
        help="where the log goes (FINETUNE_LOG_DIR, logs)",
    )
    made.add_argument("--lang", choices=("en", "zh"), help="language; otherwise the locale's")
    made.add_argument("--dry-run", action="store_true", help="show what would be started, and start nothing")
    made.add_argument("kind", choices=kind_names(), help="what to run")
    made.add_argument("flags", nargs=argparse.REMAINDER, help="flags of python -m finetune.sft or finetune.pretrain")
    return made


def _with_dashes(arguments: Sequence[str]) -> list[str]:
    """Our own flags with dashes, as all flags may have underscores; the run's are left as they are."""
    words = list(arguments)
    end = next((number for number, word in enumerate(words) if word in kind_names()), len(words))
    for number, word in enumerate(words[:end]):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            words[number] = name.replace("_", "-") + equals + value
    return words


def _show(plan: Plan, language: Language) -> None:
    """--dry-run: the environment and the command."""
    for note in plan.notes:
        sys.stdout.write(f"[INFO] {note}\n")
    for line in _variable_lines(plan, language):
        sys.stdout.write(f"[INFO] {line}\n")
    nodes = plan.nodes
    where = f"node {nodes.rank} of {nodes.count}"
    if nodes.count > 1:
        where += f", MASTER_ADDR={nodes.address}, ports {candidates(nodes.port)[0]}-{candidates(nodes.port)[-1]}"
    words = [sys.executable, "-u", "-m", run_kind(plan.kind).module, *plan.flags]
    sys.stdout.write(
        f"[INFO] {where}: {plan.processes} x {plan.device_type}: {json.dumps(words, ensure_ascii=False)}\n"
    )


def _variable_lines(plan: Plan, language: Language) -> list[str]:
    return [
        texts.VARIABLE[language].format(name=name, value=value, why=why[language]) for name, value, why in plan.added
    ]


def quick_checks(plan: Plan) -> list[Check]:
    """Doctor's quick checks of this machine and run: those that fail or warn."""
    from finetune.commands.doctor import command as doctor

    environment = plan.environment | {"NNODES": str(plan.nodes.count)}
    checks = doctor.quick_checks(plan.config, processes=plan.processes, environment=environment)
    return [check for check in checks if check.verdict in ("fail", "warn")]


def _check_text(check: Check, language: Language) -> str:
    fix = f"\nfix:   {check.fix[language]}" if check.fix else ""
    return f"{check.name}: {check.what[language]}{fix}"


def _launch(plan: Plan, checks: Sequence[Check], options: argparse.Namespace, language: Language) -> int:
    nodes = plan.nodes
    held = hold_port(nodes.port, loopback=nodes.count == 1) if nodes.rank == 0 else None
    node = f"-node{nodes.rank}" if nodes.count > 1 else ""
    path = Path(options.log_dir) / f"{time.strftime('%Y%m%d-%H%M%S')}{node}-{os.getpid()}.log"
    with LaunchLog(path) as log:
        _introduce(log, plan, held, language)
        for check in checks:
            log.warning(_check_text(check, language))
        record = LaunchRecord(path, Path(plan.config.output_dir))
        launch = Launch(
            module=run_kind(plan.kind).module,
            flags=plan.flags,
            resume=plan.config.resume,
            digest=digest(plan),
            nodes=nodes,
            processes=plan.processes,
            held=held,
            environment=plan.environment,
            output_dir=Path(plan.config.output_dir),
            timeout_seconds=plan.config.timeout_seconds,
            shutdown_seconds=float(plan.environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]),
            max_restarts=int(options.max_restarts),
            language=language,
        )
        code = Supervisor(launch, log, record).run()
    if held is not None:
        held.close()
    return code


def _introduce(log: LaunchLog, plan: Plan, held: HeldPort | None, language: Language) -> None:
    nodes = plan.nodes
    log.info(
        texts.STARTED[language].format(
            time=time.strftime("%Y-%m-%d %H:%M:%S"),
            rank=nodes.rank,
            nodes=nodes.count,
            processes=plan.processes,
            log=log.path,
        )
    )
    if plan.stale:
        names = " ".join(f"{name}={value}" for name, value in plan.stale.items())
        log.warning(texts.STALE[language].format(names=names, bare=" ".join(plan.stale)))
    for note in plan.notes:
        log.info(note)
    for line in _variable_lines(plan, language):
        log.info(line)
    if held is None:
        return
    if nodes.count > 1 and not _is_ours(nodes.address):
        log.warning(texts.NOT_HERE[language].format(address=nodes.address))
    if held.taken:
        others = texts.OTHERS_FIND_IT[language] if nodes.count > 1 else ""
        taken = ", ".join(map(str, held.taken))
        log.warning(texts.PORT_TAKEN[language].format(taken=taken, number=held.number, others=others))


def _is_ours(address: str) -> bool:
    """Whether an address is of this machine."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(target)
    except OSError:
        return False
    return True
