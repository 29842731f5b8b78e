"""`python -m finetune launch [options] sft|pretrain [flags]`: start a run on this machine's
devices, and look after it.

`launch` runs the checks first, sets variables that the workers' environment lacks (each with its
reason) and holds a port. Then it starts torch elastic's workers, keeps a log, restarts if that can
fix a failure, and explains failures. On several nodes the same command runs on each node, with its
own NODE_RANK; under srun nothing else is needed.
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
from finetune.errors import ExitCode, StateError
from finetune.runtime.language import _
from finetune.runtime.nodes import Nodes
from finetune.runtime.ports import (
    LOOPBACK,
    HeldPort,
    hold_port,
    listening_address,
    own_addresses,
)
from finetune.storage.launch_record import LaunchRecord


def main(arguments: Sequence[str] | None = None) -> int:
    """Launch. Return the run's exit code; 2: refused; 128 + n: stopped by signal n before training
    began.
    """
    options, flags = read_launch_options(arguments)
    try:
        spec = make_launch_spec(options, flags)
    # while torch looks for devices; once there is a log, signals are handled
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if isinstance(spec, Resolved):
        sys.stdout.write(format_config(spec) + "\n")
        return int(ExitCode.DONE)
    if options.dry_run:
        _show(spec)
        return int(ExitCode.DONE)
    from finetune.commands.doctor import command as doctor

    checks = doctor.quick_checks(
        spec.config,
        processes=spec.processes,
        nodes=spec.nodes.count,
        environment=spec.environment,
    )
    failed = [check for check in checks if check.verdict == "fail"]
    for check in failed:
        sys.stderr.write("[ERROR] " + _check_text(check).replace("\n", "\n  ") + "\n")
    if failed:
        return int(ExitCode.REFUSED)
    warnings = [check for check in checks if check.verdict == "warn"]
    log_dir = Path(options.log_dir or os.environ.get("FINETUNE_LOG_DIR") or "logs")
    return _launch(spec, warnings, log_dir)


def _show(spec: LaunchSpec) -> None:
    """Print the environment and the command, for --dry-run."""
    nodes = spec.nodes
    node = f"node {nodes.rank} of {nodes.count}"
    if nodes.count > 1:
        node += f", MASTER_ADDR={nodes.address}, port {nodes.port}"
    command = json.dumps([sys.executable, *spec.worker_arguments(1)], ensure_ascii=False)
    last = f"{node}: {spec.processes} x {spec.device_type}: {command}"
    for line in (*_notes(spec), last):
        sys.stdout.write(f"[INFO] {line}\n")


def _notes(spec: LaunchSpec) -> list[str]:
    line = _("environment: {name}={value}: {why}")
    added = [line.format(name=name, value=value, why=why) for name, value, why in spec.added]
    return [*spec.notes, *added]


def _check_text(check: Check) -> str:
    return f"{check.name}: {check.what}" + (f"\nfix:   {check.fix}" if check.fix else "")


def _launch(spec: LaunchSpec, warnings: Sequence[Check], log_dir: Path) -> int:
    nodes = spec.nodes
    held = _hold_port(nodes) if nodes.rank == 0 else None
    os.environ.clear()
    os.environ.update(spec.environment)  # the workers inherit it
    node = f"-node{nodes.rank}" if nodes.count > 1 else ""
    path = log_dir / f"{time.strftime('%Y%m%d-%H%M%S')}{node}-{os.getpid()}.log"
    with LaunchLog(path) as log:
        _introduce(log, spec, held)
        for check in warnings:
            log.warning(_check_text(check))
        return Supervisor(spec, held, log, LaunchRecord(path, spec.output_dir)).run()


def _hold_port(nodes: Nodes) -> HeldPort:
    """Hold node 0's port.

    Raises:
        StateError: it is taken and other nodes look for it, or none of ten is free.
    """
    address = LOOPBACK if nodes.count == 1 else listening_address(nodes.address)
    held = hold_port(nodes.port, address=address)
    if held.taken and nodes.count > 1:
        held.close()
        raise StateError(
            f"port {nodes.port} is taken on this machine, and the other nodes look for it",
            where="MASTER_PORT or --master-port",
            fix=(
                f"give another --master-port, the same on all nodes ({held.number} is free here),"
                f" or end the run that holds it (ss -ltnp 'sport = :{nodes.port}')"
            ),
        )
    return held


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
    for line in _notes(spec):
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
        taken = _("port {taken} is taken; {number} is used instead")
        log.warning(taken.format(taken=", ".join(map(str, held.taken)), number=held.number))
