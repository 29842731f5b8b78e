"""What a launch starts on this node: chosen from options, environment and settings, before anything
starts.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from finetune.commands.launch.options import DEFAULT_RESTARTS, LaunchOptions
from finetune.config.base_config import BaseConfig
from finetune.config.files import given_values
from finetune.config.kinds import KINDS
from finetune.config.resolution import Resolved, resolve
from finetune.errors import ConfigError
from finetune.runtime.device import DEVICE_KINDS
from finetune.runtime.host import usable_cores
from finetune.runtime.language import _
from finetune.runtime.launch_environment import probe_torch_npu
from finetune.runtime.nodes import Nodes, nodes_here, number_of
from finetune.storage.checkpoint_files import newest_valid, step_of
from finetune.storage.run_folder import STATUS_NAME

SHUTDOWN_SECONDS = 600
# What HCCL accepts, in seconds (CANN's environment variable reference); any other value ends a run.
HCCL_CONNECT_SECONDS = (120, 7200)
_ALLOCATORS = {"npu": "PYTORCH_NPU_ALLOC_CONF", "cuda": "PYTORCH_CUDA_ALLOC_CONF"}
_INTERFACES = {"npu": "HCCL_SOCKET_IFNAME", "cuda": "NCCL_SOCKET_IFNAME"}
# Variables that only a launcher sets for its workers: those of an old script would mislead ours.
STALE = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_PORT",
    "MASTER_ADDR",
)
OLD_SECRET = "FINETUNE_RENDEZVOUS_SECRET"  # of 0.1 launches, which had their own rendezvous
PROBE_SECONDS = 300
_PROBE = (
    "import json; from finetune.runtime import device; kind = device.available_device_types()[0]; "
    "print(json.dumps([kind, device.device_count(kind)]))"
)


@dataclass(frozen=True)
class LaunchSpec:
    """A launch on this node."""

    module: str  # of a worker
    flags: tuple[str, ...]  # the run's, as given
    config: BaseConfig
    device_type: str
    nodes: Nodes
    processes: int
    max_restarts: int
    shutdown_seconds: int  # from the signal to stop to SIGKILL
    environment: Mapping[str, str]  # of the workers, `added` included
    added: Sequence[Variable] = ()
    # variables that another launcher left, which are ignored
    stale: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # other messages for people

    @property
    def output_dir(self) -> Path:
        return Path(self.config.output_dir)

    @property
    def digest(self) -> str:
        """Return what the nodes of one launch have in common, so that two launches on the same
        machines stay separate.
        """
        common = {
            "module": self.module,
            "flags": self.flags,
            "nodes": self.nodes.count,
        }
        return hashlib.sha256(json.dumps(common).encode()).hexdigest()[:16]

    def worker_arguments(self, attempt: int) -> list[str]:
        """Return a worker's command line after the interpreter; a later attempt resumes what the
        earlier ones have saved.
        """
        arguments = ["-u", "-m", self.module, *self.flags]
        if attempt > 1 and self.config.resume != "auto" and self._has_newer_checkpoint():
            arguments += ["--resume", "auto"]
        return arguments

    def _has_newer_checkpoint(self) -> bool:
        """Return whether the run folder holds more than what --resume names."""
        if self.config.resume == "never":
            return (self.output_dir / STATUS_NAME).exists()
        newest, _ = newest_valid(self.output_dir, hashes=False)
        if newest is None:
            return False
        return (step_of(newest.name) or 0) > (step_of(Path(self.config.resume).name) or 0)


def make_launch_spec(options: LaunchOptions, flags: Sequence[str]) -> LaunchSpec | Resolved:
    """Decide what to start here; for --print-config return the configuration.

    Raises:
        ConfigError: flags, variables or settings that are wrong (`Problems` for several).
        SystemExit: with 0, after the run's --help was printed.
    """
    if "RANK" in os.environ and "LOCAL_RANK" in os.environ:
        raise ConfigError(
            "launch starts the workers, and was itself started as a worker (RANK and LOCAL_RANK are"
            " set)",
            where="the environment",
            fix=(
                "start it once per node, without torchrun or accelerate launch; or unset RANK"
                " LOCAL_RANK"
            ),
        )
    nodes = nodes_here(
        os.environ,
        count=options.nnodes,
        rank=options.node_rank,
        address=options.master_addr,
        port=options.master_port,
    )
    kind = KINDS[options.kind]
    if {"-h", "--help"} & set(flags):
        return resolve(flags, world_size=1, model_class=kind.config_class)
    nproc = options.nproc or os.environ.get("NPROC_PER_NODE") or "auto"
    requested = None if nproc == "auto" else _processes(nproc)
    # --device-type as files and flags have it: the other settings depend on the processes.
    given = given_values(kind.parse(list(flags)), kind.config_class)
    device_type, visible = _devices(str(given.get("device_type", "auto")), count=requested is None)
    processes = requested or visible
    resolved = resolve(flags, world_size=processes * nodes.count, model_class=kind.config_class)
    if resolved.print_config:
        return resolved
    config = resolved.config
    environment = without_stale(os.environ)
    trackers = getattr(config, "report_to", "auto")
    added = variables(
        environment,
        device_type=device_type,
        processes=processes,
        nodes=nodes.count,
        timeout_seconds=config.timeout_seconds,
        interface=interface_to(nodes.address) if nodes.count > 1 else None,
        report_to=() if trackers == "auto" else tuple(trackers),
        npu_variables=config.npu_variables,
    )
    more, notes = _compile_flags(config)
    if environment.pop(OLD_SECRET, ""):
        unused = _(
            "{name} is set and not used any more: torch's store has no secret. Keep its port inside"
            " the cluster (docs/guides/launching.md, Trusted networks)"
        )
        notes = (*notes, unused.format(name=OLD_SECRET))
    return LaunchSpec(
        module=kind.module,
        flags=(*flags, *more),
        config=config,
        device_type=device_type,
        nodes=nodes,
        processes=processes,
        max_restarts=number_of("MAX_RESTARTS", options.max_restarts, os.environ, DEFAULT_RESTARTS),
        shutdown_seconds=number_of(
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", None, environment, SHUTDOWN_SECONDS
        ),
        environment=environment | {variable.name: variable.value for variable in added},
        added=added,
        stale={
            name: os.environ[name]
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
            if name in os.environ
        },
        notes=notes,
    )


def _compile_flags(config: BaseConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (flags, notes) for TORCH_COMPILE, which older scripts set, if the run has --compile
    and leaves it open.
    """
    value = os.environ.get("TORCH_COMPILE")
    if value not in ("0", "1") or getattr(config, "compile", True) is not None:
        return (), ()
    flag = "true" if value == "1" else "false"
    note = _("TORCH_COMPILE={value} is taken as --compile {flag}").format(value=value, flag=flag)
    return ("--compile", flag), (note,)


def _processes(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"{text!r} processes per node",
            where="--nproc or NPROC_PER_NODE",
            fix="give a number from 1, or auto",
        )
    return int(text)


def _devices(device_type: str, *, count: bool) -> tuple[str, int]:
    """Return the device type that the run will have, and how many devices it sees here; a separate
    process finds out.

    Args:
        device_type: requested; auto for any.
        count: whether the number is needed; if not, 1 replaces it, and nothing is started if the
            type is known.

    Raises:
        ConfigError: torch cannot be loaded.
    """
    if device_type == "cpu" or (device_type in DEVICE_KINDS and not count):
        return device_type, 1
    probe_torch_npu()
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE],
        capture_output=True,
        text=True,
        timeout=PROBE_SECONDS,
        check=False,
    )
    if probe.returncode != 0:
        reason = (probe.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(
            f"torch cannot be loaded: {reason}",
            where="import torch",
            fix="python -m finetune doctor",
        )
    found, devices = json.loads(probe.stdout.splitlines()[-1])
    if device_type not in ("auto", found):
        return device_type, 1  # the run itself reports that the device is missing
    if devices == 0:
        raise ConfigError(
            f"no {found} device is visible",
            where=DEVICE_KINDS[found].visible_variable,
            fix="make devices visible, or add --device-type cpu",
        )
    return found, devices or 1


# ---------------------------------------------------------------- the environment of the workers
# Each variable that the launch sets, with the reason. The user's own are always kept.
#
# Some variables of old scripts are not set. torch elastic sets TORCHELASTIC_USE_AGENT_STORE for
# each worker itself, regardless of the value. Neither torch nor NCCL reads NCCL_TIMEOUT. The
# workers get WORLD_SIZE and RANK. USE_LIBUV=0 helps only if torch was built without libuv;
# `rendezvous`, which imports torch, sets it then.


class Variable(NamedTuple):
    """A variable that the launch sets, and why."""

    name: str
    value: str
    why: str


def variables(
    environment: Mapping[str, str],
    *,
    device_type: str,
    processes: int,
    nodes: int,
    timeout_seconds: int,
    interface: str | None,
    report_to: Sequence[str],
    npu_variables: Mapping[str, tuple[str, str]],
) -> list[Variable]:
    """Return what to set: nothing that the user has set (an empty value is the user's too).

    Args:
        environment: the user's variables.
        device_type: npu, cuda, mps or cpu.
        processes: workers on this node.
        interface: network interface that leads to the first node; None if it is unknown or this
            machine's own.
        report_to: trackers of the run.
        npu_variables: what the run requests on NPUs: name -> (value, why).
    """
    added: list[Variable] = []

    def add(name: str, value: str, why: str) -> None:
        if name not in environment:
            added.append(Variable(name, value, why))

    cores = usable_cores()
    threads = _("{cores} cores for {processes} process(es); torch elastic would set 1")
    add(
        "OMP_NUM_THREADS",
        str(max(1, cores // processes)),
        threads.format(cores=cores, processes=processes),
    )
    add(
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        str(SHUTDOWN_SECONDS),
        _("seconds to save a checkpoint after a signal"),
    )
    if device_type in _ALLOCATORS:
        why = _("less fragmentation with microbatches of many lengths")
        add(_ALLOCATORS[device_type], "expandable_segments:True", why)
    if device_type == "npu":
        limit = _("--timeout-seconds, as for the process group")
        lowest, highest = HCCL_CONNECT_SECONDS
        add("HCCL_CONNECT_TIMEOUT", str(min(max(timeout_seconds, lowest), highest)), limit)
        add("HCCL_EXEC_TIMEOUT", str(timeout_seconds), limit)
        for name, (value, why) in npu_variables.items():
            add(name, value, why)
    if nodes > 1 and interface:
        # otherwise gloo uses the address of the host name, often 127.0.1.1
        why = _("the interface that leads to the first node")
        add("GLOO_SOCKET_IFNAME", interface, why)
        if device_type in _INTERFACES:
            add(_INTERFACES[device_type], f"={interface}", why)
    if "wandb" not in report_to:
        add("WANDB_MODE", "disabled", _("the run does not report to wandb"))
    elif "WANDB_API_KEY" not in environment and not has_wandb_login(environment):
        why = _(
            "no wandb login here, and asking for one would stop the run; `wandb sync` uploads later"
        )
        add("WANDB_MODE", "offline", why)
    return added


def has_wandb_login(environment: Mapping[str, str]) -> bool:
    """Return whether `wandb login` was done on this machine: it writes a line into .netrc. The key
    itself is not read.
    """
    path = Path(environment.get("NETRC") or Path(environment.get("HOME", "/")) / ".netrc")
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any("wandb" in line.split("password")[0] for line in lines)


def without_stale(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what another launcher left behind."""
    return {name: value for name, value in environment.items() if name not in STALE}


def interface_to(address: str) -> str | None:
    """Return the network interface that leads to an address; None if none does, or only the
    loopback.
    """
    try:
        family, *_rest, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing: the system only chooses the route
            own = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if name != "lo" and any(known.address.partition("%")[0] == own for known in addresses):
            return name
    return None
