"""`python -m finetune launch [options] sft|pretrain [flags]`: start a run on this machine's
devices, and look after it.

Checks first, sets what the workers' environment lacks (each variable with its reason), holds a
port, starts torch elastic's workers, keeps a log, restarts what a restart can cure, and explains
what failed. The same command on each of several nodes, with its own NODE_RANK; under srun with
nothing further.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from finetune.commands.doctor.check import Check
from finetune.commands.launch.launch_spec import LaunchSpec, make_launch_spec
from finetune.commands.launch.log import LaunchLog
from finetune.commands.launch.options import read_launch_options
from finetune.commands.launch.supervise import Supervisor
from finetune.config.resolution import Resolved, format_config
from finetune.errors import ExitCode
from finetune.runtime.language import _
from finetune.runtime.ports import (
    LOOPBACK,
    HeldPort,
    candidates,
    hold_port,
    listening_address,
    own_addresses,
)
from finetune.storage.launch_record import LaunchRecord


def main(arguments: Sequence[str] | None = None) -> int:
    """Launch. The exit code is the run's; 2: refused; 128 + n: stopped by signal n before training
    began.
    """
    options, flags = read_launch_options(arguments)
    try:
        spec = make_launch_spec(options, flags)
    # torch is being asked for the devices; from the log on, signals are handled
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if isinstance(spec, Resolved):
        sys.stdout.write(format_config(spec) + "\n")
        return int(ExitCode.DONE)
    if options.dry_run:
        _show(spec)
        return int(ExitCode.DONE)
    checks = quick_checks(spec)
    failed = [check for check in checks if check.verdict == "fail"]
    for check in failed:
        sys.stderr.write("[ERROR] " + _check_text(check).replace("\n", "\n  ") + "\n")
    if failed:
        return int(ExitCode.REFUSED)
    return _launch(
        spec, checks, Path(options.log_dir or os.environ.get("FINETUNE_LOG_DIR") or "logs")
    )


def _show(spec: LaunchSpec) -> None:
    """--dry-run: the environment and the command."""
    nodes = spec.nodes
    node = f"node {nodes.rank} of {nodes.count}"
    if nodes.count > 1:
        node += (
            f", MASTER_ADDR={nodes.address}, ports"
            f" {candidates(nodes.port)[0]}-{candidates(nodes.port)[-1]}"
        )
    command = json.dumps([sys.executable, *spec.worker_arguments(1)], ensure_ascii=False)
    shown = [
        *spec.notes,
        *_variable_lines(spec),
        f"{node}: {spec.processes} x {spec.device_type}: {command}",
    ]
    sys.stdout.write("".join(f"[INFO] {line}\n" for line in shown))


def _variable_lines(spec: LaunchSpec) -> list[str]:
    line = _("environment: {name}={value}: {why}")
    return [line.format(name=name, value=value, why=why) for name, value, why in spec.added]


def quick_checks(spec: LaunchSpec) -> list[Check]:
    """Doctor's quick checks of this machine and run: those that fail or warn."""
    from finetune.commands.doctor import command as doctor

    environment = {**spec.environment, "NNODES": str(spec.nodes.count)}
    checks = doctor.quick_checks(spec.config, processes=spec.processes, environment=environment)
    return [check for check in checks if check.verdict in ("fail", "warn")]


def _check_text(check: Check) -> str:
    return f"{check.name}: {check.what}" + (f"\nfix:   {check.fix}" if check.fix else "")


def _launch(spec: LaunchSpec, checks: Sequence[Check], log_dir: Path) -> int:
    nodes = spec.nodes
    address = LOOPBACK if nodes.count == 1 else listening_address(nodes.address)
    held = hold_port(nodes.port, address=address) if nodes.rank == 0 else None
    node = f"-node{nodes.rank}" if nodes.count > 1 else ""
    path = log_dir / f"{time.strftime('%Y%m%d-%H%M%S')}{node}-{os.getpid()}.log"
    with LaunchLog(path) as log:
        _introduce(log, spec, held)
        for check in checks:
            log.warning(_check_text(check))
        code = Supervisor(spec, held, log, LaunchRecord(path, spec.output_dir)).run()
    if held is not None:
        held.close()
    return code


def _introduce(log: LaunchLog, spec: LaunchSpec, held: HeldPort | None) -> None:
    nodes = spec.nodes
    started = _("{time}: node {rank} of {nodes}, {processes} process(es) on it, log in {log}")
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    log.info(
        started.format(
            time=now, rank=nodes.rank, nodes=nodes.count, processes=spec.processes, log=log.path
        )
    )
    if spec.stale:
        stale = _("{names} set by another launcher or an old script: ignored. fix: unset {bare}")
        names = " ".join(f"{name}={value}" for name, value in spec.stale.items())
        log.warning(stale.format(names=names, bare=" ".join(spec.stale)))
    for line in (*spec.notes, *_variable_lines(spec)):
        log.info(line)
    if held is None:
        return
    if nodes.count > 1 and not own_addresses(nodes.address):
        not_here = _(
            "MASTER_ADDR {address} is not an address of this machine, and this is node 0. Unless it"
            " leads here by another route, the other nodes will not find this one. fix: set it to"
            " an address that `ip address` shows here"
        )
        log.warning(not_here.format(address=nodes.address))
    if held.taken:
        others = _(" (the other nodes find it by themselves)") if nodes.count > 1 else ""
        taken = _("port {taken} is taken; {number} is used instead{others}")
        log.warning(
            taken.format(taken=", ".join(map(str, held.taken)), number=held.number, others=others)
        )
