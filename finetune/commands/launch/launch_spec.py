"""What a launch starts on this node: decided from options, environment and settings, before
anything is started.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from finetune.commands.launch.environment import (
    SHUTDOWN_SECONDS,
    LaunchFacts,
    Variable,
    interface_to,
    variables,
    without_stale,
)
from finetune.commands.launch.options import DEFAULT_RESTARTS, LaunchOptions
from finetune.commands.launch.records import SECRET_CHARACTERS, SECRET_NAME
from finetune.config.base_config import BaseConfig
from finetune.config.files import given_values
from finetune.config.kinds import KINDS, RunKind
from finetune.config.resolution import Resolved, resolve
from finetune.errors import ConfigError
from finetune.runtime.device import DEVICE_KINDS
from finetune.runtime.language import _
from finetune.runtime.launch_environment import probe_torch_npu
from finetune.runtime.nodes import Nodes, nodes_here, number_of
from finetune.storage.checkpoint_files import newest_valid, step_of
from finetune.storage.run_folder import STATUS_NAME

PROBE_SECONDS = 300
_PROBE = (
    "import json; from finetune.runtime import device; kind = device.available_device_types()[0]; "
    "print(json.dumps([kind, device.device_count(kind)]))"
)


@dataclass(frozen=True)
class LaunchSpec:
    """A launch on this node."""

    module: str  # of a worker
    flags: tuple[str, ...]  # the run's, as they were given
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
    notes: tuple[str, ...] = ()  # what else people should know
    # shared by the nodes; not in the environment of the workers
    secret: str = field(default="", repr=False)

    @property
    def output_dir(self) -> Path:
        return Path(self.config.output_dir)

    @property
    def command(self) -> str:
        """What is run, for people on other nodes."""
        return f"{self.module} {' '.join(self.flags)}"

    @property
    def digest(self) -> str:
        """What the nodes of one launch have in common: two launches on the same machines must not
        be taken for one.
        """
        common = {"module": self.module, "flags": self.flags, "nodes": self.nodes.count}
        return hashlib.sha256(json.dumps(common).encode()).hexdigest()[:16]

    def worker_arguments(self, attempt: int) -> list[str]:
        """A worker's command line after the interpreter; another attempt resumes what the first has
        left.
        """
        resumed = attempt > 1 and self.config.resume != "auto" and self._has_come_further()
        return ["-u", "-m", self.module, *self.flags, *(["--resume", "auto"] if resumed else [])]

    def _has_come_further(self) -> bool:
        """Whether the run folder holds more than what --resume names."""
        if self.config.resume == "never":
            return (self.output_dir / STATUS_NAME).exists()
        newest, _ = newest_valid(self.output_dir, hashes=False)
        return newest is not None and (step_of(newest.name) or 0) > (
            step_of(Path(self.config.resume).name) or 0
        )


def make_launch_spec(options: LaunchOptions, flags: Sequence[str]) -> LaunchSpec | Resolved:
    """What would be started here; for --print-config the configuration.

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
    asked = None if nproc == "auto" else _processes(nproc)
    device_type, visible = _devices(_wanted_device_type(flags, kind), count=asked is None)
    processes = asked or visible
    resolved = resolve(flags, world_size=processes * nodes.count, model_class=kind.config_class)
    if resolved.print_config:
        return resolved
    config = resolved.config
    environment = without_stale(os.environ)
    secret = _secret(environment.pop(SECRET_NAME, ""))
    trackers = getattr(config, "report_to", "auto")
    facts = LaunchFacts(
        device_type=device_type,
        processes=processes,
        nodes=nodes.count,
        timeout_seconds=config.timeout_seconds,
        interface=interface_to(nodes.address) if nodes.count > 1 else None,
        report_to=() if trackers == "auto" else tuple(trackers),
        npu_variables=config.npu_variables,
    )
    added = variables(facts, environment)
    more, notes = _compile_flags(config)
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
        secret=secret if nodes.count > 1 else "",
    )


def _secret(text: str) -> str:
    if text and len(text) < SECRET_CHARACTERS:
        raise ConfigError(
            f"{SECRET_NAME} has {len(text)} characters: it could be found by trying",
            where=SECRET_NAME,
            fix=(
                f"give one of {SECRET_CHARACTERS} or more, the same on all nodes: openssl rand"
                " -hex 16"
            ),
        )
    return text


def _compile_flags(config: BaseConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(flags, notes) for TORCH_COMPILE, which older scripts set, where the run has --compile and
    leaves it open.
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


def _wanted_device_type(flags: Sequence[str], kind: RunKind) -> str:
    """--device-type as files and flags have it, without the other settings, which depend on the
    processes.
    """
    given = given_values(kind.parse(list(flags)), kind.config_class)
    return str(given.get("device_type", "auto"))


def _devices(device_type: str, *, count: bool) -> tuple[str, int]:
    """The device type that the run will have, and how many devices it sees here; asked in a process
    of its own.

    Args:
        count: whether the number is wanted; else 1 stands for it, and nothing is started where the
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
        return device_type, 1  # the run itself reports that it is not there
    if devices == 0:
        raise ConfigError(
            f"no {found} device is visible",
            where=f"{DEVICE_KINDS[found].visible_variable}",
            fix="make devices visible, or add --device-type cpu",
        )
    return found, devices or 1
