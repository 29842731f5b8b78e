"""`python -m finetune launch [options] sft|pretrain [flags]`: start a run on this machine's devices, and look after it.

Checks first, sets what the workers' environment lacks (each variable with its reason), holds a port, starts torch
elastic's workers, keeps a log, restarts what a restart can cure, and explains what failed. The same command on each of
several nodes, with its own NODE_RANK; under srun with nothing further.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune.config import BaseConfig, RunConfig
from finetune.config_file import Resolved, format_config, resolve
from finetune.config_pretrain import PretrainConfig
from finetune.device import DEVICE_KINDS, probe_torch_npu
from finetune.errors import ConfigError, ExitCode
from finetune.operations import launch_texts as texts
from finetune.operations.language import Language, pick_language
from finetune.operations.launch_environment import LaunchFacts, Variable, interface_to, variables, without_stale
from finetune.operations.launch_log import LaunchLog
from finetune.operations.launch_nodes import Nodes, nodes_here
from finetune.operations.launch_record import LaunchRecord
from finetune.operations.ports import HeldPort, candidates, hold_port
from finetune.operations.supervise import Launch, Supervisor

KINDS: dict[str, tuple[str, type[BaseConfig]]] = {
    "sft": ("finetune.sft", RunConfig),
    "pretrain": ("finetune.pretrain", PretrainConfig),
}
PROBE_SECONDS = 300
_PROBE = (
    "import json; from finetune import device; kind = device.available_device_types()[0]; "
    "print(json.dumps([kind, device.device_count(kind)]))"
)


@dataclass(frozen=True)
class Plan:
    """A launch before anything is started or held."""

    kind: str
    flags: tuple[str, ...]
    config: BaseConfig
    device_type: str
    nodes: Nodes
    processes: int
    stale: dict[str, str]
    added: list[Variable]
    environment: dict[str, str]
    notes: tuple[str, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Launch. The exit code is the run's; 2: refused; 128 + n: stopped by signal n before training began."""
    options = parser().parse_args(_with_dashes(sys.argv[1:] if arguments is None else arguments))
    language = pick_language(options.lang)
    planned = make_plan(options, language)
    if isinstance(planned, Resolved):
        sys.stdout.write(format_config(planned) + "\n")
        return int(ExitCode.DONE)
    if options.dry_run:
        _show(planned, language)
        return int(ExitCode.DONE)
    refused = _checked(planned, language)
    return refused if refused is not None else _launch(planned, options, language)


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
    made.add_argument("kind", choices=KINDS, help="what to run")
    made.add_argument("flags", nargs=argparse.REMAINDER, help="flags of python -m finetune.sft or finetune.pretrain")
    return made


def _with_dashes(arguments: Sequence[str]) -> list[str]:
    """Our own flags with dashes, as all flags may have underscores; the run's are left as they are."""
    words = list(arguments)
    end = next((number for number, word in enumerate(words) if word in KINDS), len(words))
    for number, word in enumerate(words[:end]):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            words[number] = name.replace("_", "-") + equals + value
    return words


def make_plan(options: argparse.Namespace, language: Language) -> Plan | Resolved:
    """What would be started here; for --print-config the configuration.

    Raises:
        ConfigError: flags, variables or settings that are wrong (`Problems` for several).
        SystemExit: with 0, after the run's --help was printed.
    """
    if "RANK" in os.environ and "LOCAL_RANK" in os.environ:
        raise ConfigError(
            "launch starts the workers, and was itself started as a worker (RANK and LOCAL_RANK are set)",
            where="the environment",
            fix="start it once per node, without torchrun or accelerate launch; or unset RANK LOCAL_RANK",
        )
    nodes = nodes_here(
        os.environ,
        count=options.nnodes,
        rank=options.node_rank,
        address=options.master_addr,
        port=options.master_port,
    )
    module_class = KINDS[options.kind][1]
    # The number of processes may hang on the device type, which is among the settings: --nproc or 1 for a first look.
    given = None if options.nproc == "auto" else _count(options.nproc)
    first = resolve(options.flags, world_size=(given or 1) * nodes.count, model_class=module_class) if given else None
    device_type = first.config.device_type if first else _device_type_in(options.flags)
    device_type, visible = _devices(device_type, count=given is None)
    processes = given or visible
    resolved = first or resolve(options.flags, world_size=processes * nodes.count, model_class=module_class)
    if resolved.print_config:
        return resolved
    return _plan(options, resolved, nodes, processes, device_type, language)


def _plan(
    options: argparse.Namespace,
    resolved: Resolved,
    nodes: Nodes,
    processes: int,
    device_type: str,
    language: Language,
) -> Plan:
    config = resolved.config
    trackers = getattr(config, "report_to", "auto")
    facts = LaunchFacts(
        device_type=device_type,
        processes=processes,
        nodes=nodes.count,
        timeout_seconds=config.timeout_seconds,
        interface=interface_to(nodes.address) if nodes.count > 1 else None,
        report_to=() if trackers == "auto" else tuple(trackers),
    )
    environment = without_stale(os.environ)
    stale = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ}
    added = variables(facts, environment)
    flags, notes = tuple(options.flags), ()
    if (compiled := os.environ.get("TORCH_COMPILE")) in ("0", "1") and getattr(config, "compile", True) is None:
        flag = "true" if compiled == "1" else "false"
        flags, notes = (*flags, "--compile", flag), (texts.COMPILE[language].format(value=compiled, flag=flag))
    environment |= {variable.name: variable.value for variable in added}
    return Plan(options.kind, flags, config, device_type, nodes, processes, stale, added, environment, notes)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"{text!r} processes per node", where="--nproc or NPROC_PER_NODE", fix="give a number from 1, or auto"
        )
    return int(text)


def _device_type_in(flags: Sequence[str]) -> str:
    """--device-type among the flags; auto where it is not there or in a file."""
    words = [word.replace("_", "-") for word in flags]
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--device-type":
            return value if equals else words[number + 1] if number + 1 < len(words) else "auto"
    return "auto"


def _devices(device_type: str, *, count: bool) -> tuple[str, int]:
    """The device type that the run will have, and how many devices it sees here; asked in a process of its own.

    Args:
        count: whether the number is wanted; else 1 stands for it, and nothing is started where the type is known.

    Raises:
        ConfigError: torch cannot be loaded.
    """
    if device_type == "cpu" or (device_type in DEVICE_KINDS and not count):
        return device_type, 1
    probe_torch_npu()
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
    )
    if probe.returncode != 0:
        reason = (probe.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"torch cannot be loaded: {reason}", where="import torch", fix="python -m finetune doctor")
    found, devices = json.loads(probe.stdout.splitlines()[-1])
    if device_type not in ("auto", found):
        return device_type, 1  # the run says that it is not there
    if devices == 0:
        raise ConfigError(
            f"no {found} device is visible",
            where=f"{DEVICE_KINDS[found].visible_variable}",
            fix="make devices visible, or add --device-type cpu",
        )
    return found, devices or 1


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
    words = [sys.executable, "-u", "-m", KINDS[plan.kind][0], *plan.flags]
    sys.stdout.write(
        f"[INFO] {where}: {plan.processes} x {plan.device_type}: {json.dumps(words, ensure_ascii=False)}\n"
    )


def _variable_lines(plan: Plan, language: Language) -> list[str]:
    return [
        texts.VARIABLE[language].format(name=name, value=value, why=why[language]) for name, value, why in plan.added
    ]


def _checked(plan: Plan, language: Language) -> int | None:
    """Doctor's quick checks; the exit code where one fails."""
    from finetune.operations.doctor import quick_checks

    failed = False
    environment = plan.environment | {"NNODES": str(plan.nodes.count)}
    for check in quick_checks(plan.config, processes=plan.processes, environment=environment):
        if check.verdict not in ("warn", "fail"):
            continue
        failed = failed or check.verdict == "fail"
        tag = "ERROR" if check.verdict == "fail" else "WARNING"
        fix = f"\n  fix:   {check.fix[language]}" if check.fix else ""
        sys.stderr.write(f"[{tag}] {check.name}: {check.what[language]}{fix}\n")
    return int(ExitCode.REFUSED) if failed else None


def _launch(plan: Plan, options: argparse.Namespace, language: Language) -> int:
    nodes = plan.nodes
    held = hold_port(nodes.port, loopback=nodes.count == 1) if nodes.rank == 0 else None
    node = f"-node{nodes.rank}" if nodes.count > 1 else ""
    path = Path(options.log_dir) / f"{time.strftime('%Y%m%d-%H%M%S')}{node}-{os.getpid()}.log"
    with LaunchLog(path) as log:
        _introduce(log, plan, held, language)
        record = LaunchRecord(path, Path(plan.config.output_dir))
        launch = Launch(
            module=KINDS[plan.kind][0],
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


def digest(plan: Plan) -> str:
    """What the nodes of one launch have in common: two launches on the same machines must not meet each other."""
    common: Mapping[str, object] = {"kind": plan.kind, "flags": plan.flags, "nodes": plan.nodes.count}
    return hashlib.sha256(json.dumps(common).encode()).hexdigest()[:16]
