"""What a launch is going to start on this node: decided from options, environment and settings, before anything is."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from finetune.commands.launch import texts
from finetune.commands.launch.environment import LaunchFacts, Variable, interface_to, variables, without_stale
from finetune.config.flags import flags_of, parse
from finetune.config.kinds import run_kind
from finetune.config.layers import layer_of_file
from finetune.config.resolution import Resolved, resolve
from finetune.config.run_config import BaseConfig
from finetune.errors import ConfigError
from finetune.runtime.device import DEVICE_KINDS, probe_torch_npu
from finetune.runtime.language import Language
from finetune.runtime.nodes import Nodes, nodes_here

PROBE_SECONDS = 300
_PROBE = (
    "import json; from finetune.runtime import device; kind = device.available_device_types()[0]; "
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
    model_class = run_kind(options.kind).config_class
    if {"-h", "--help"} & set(options.flags):
        return resolve(options.flags, world_size=1, model_class=model_class)
    wanted = _device_type(options.flags, model_class)
    given = None if options.nproc == "auto" else _count(options.nproc)
    device_type, visible = _devices(wanted, count=given is None)
    processes = given or visible
    resolved = resolve(options.flags, world_size=processes * nodes.count, model_class=model_class)
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
        flags, notes = (*flags, "--compile", flag), (texts.COMPILE[language].format(value=compiled, flag=flag),)
    environment |= {variable.name: variable.value for variable in added}
    return Plan(options.kind, flags, config, device_type, nodes, processes, stale, added, environment, notes)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"{text!r} processes per node", where="--nproc or NPROC_PER_NODE", fix="give a number from 1, or auto"
        )
    return int(text)


def _device_type(flags: Sequence[str], model_class: type[BaseConfig]) -> str:
    """--device-type as the files and flags say, without the rest of the settings, which hang on the processes."""
    parsed = parse(list(flags), flags_of(model_class), model_class.aliases)
    wanted = "auto"
    for path in parsed.config_files:
        given = layer_of_file(path, 1, model_class).values.get("device_type")
        wanted = wanted if given is None else given.value
    return str(parsed.values["device_type"][0] if "device_type" in parsed.values else wanted)


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


def digest(plan: Plan) -> str:
    """What the nodes of one launch have in common: two launches on the same machines must not meet each other."""
    common: Mapping[str, object] = {"kind": plan.kind, "flags": plan.flags, "nodes": plan.nodes.count}
    return hashlib.sha256(json.dumps(common).encode()).hexdigest()[:16]
