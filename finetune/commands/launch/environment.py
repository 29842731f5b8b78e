"""The environment of the workers: each variable that the launch sets, with the reason. The user's
own always stay.

Not set, though old scripts do: TORCHELASTIC_USE_AGENT_STORE, which torch elastic sets for each
worker itself (whatever was there before); NCCL_TIMEOUT, which neither torch nor NCCL reads;
WORLD_SIZE and RANK, which the workers get. USE_LIBUV=0 helps only where torch was built without
libuv: `elastic_agent`, which has torch, sees to it.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from finetune.runtime.host import usable_cores
from finetune.runtime.language import _

SHUTDOWN_SECONDS = 600
# What HCCL accepts, in seconds (CANN's environment variable reference); it ends a run for a value
# outside.
HCCL_CONNECT_SECONDS = (120, 7200)
# What only a launcher sets for its workers. Left by an old script, it would tell ours something
# wrong.
STALE = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_PORT",
    "MASTER_ADDR",
)


class Variable(NamedTuple):
    """A variable that the launch sets, and why."""

    name: str
    value: str
    why: str


@dataclass(frozen=True)
class LaunchFacts:
    """What the environment depends on."""

    device_type: str  # npu, cuda, mps or cpu
    processes: int  # workers on this node
    nodes: int
    timeout_seconds: int
    # Network interface that leads to the first node; None where it is not known or is this
    # machine's own.
    interface: str | None = None
    report_to: tuple[str, ...] = ()  # trackers of the run
    # What the run asks for on NPUs: name -> (value, why).
    npu_variables: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def variables(facts: LaunchFacts, environment: Mapping[str, str]) -> list[Variable]:
    """What to set; nothing that the user set already (an empty value is the user's too)."""
    wanted = [
        *_always(facts),
        *_memory(facts),
        *_collectives(facts),
        *_trackers(facts, environment),
    ]
    return [variable for variable in wanted if variable.name not in environment]


def _always(facts: LaunchFacts) -> list[Variable]:
    cores = usable_cores()
    why = _("{cores} cores for {processes} process(es); torch elastic would set 1")
    return [
        Variable(
            "OMP_NUM_THREADS",
            str(max(1, cores // facts.processes)),
            why.format(cores=cores, processes=facts.processes),
        ),
        Variable(
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
            str(SHUTDOWN_SECONDS),
            _("seconds to save a checkpoint after a signal"),
        ),
    ]


def _memory(facts: LaunchFacts) -> list[Variable]:
    name = {"npu": "PYTORCH_NPU_ALLOC_CONF", "cuda": "PYTORCH_CUDA_ALLOC_CONF"}.get(
        facts.device_type
    )
    if name is None:
        return []
    return [
        Variable(
            name,
            "expandable_segments:True",
            _("less fragmentation with microbatches of many lengths"),
        )
    ]


def _collectives(facts: LaunchFacts) -> list[Variable]:
    """Time limits and, between nodes, the network interface: gloo takes the host name's address,
    often 127.0.1.1.
    """
    found = []
    seconds = facts.timeout_seconds
    if facts.device_type == "npu":
        limit = _("--timeout-seconds, as for the process group")
        lowest, highest = HCCL_CONNECT_SECONDS
        found.append(
            Variable("HCCL_CONNECT_TIMEOUT", str(min(max(seconds, lowest), highest)), limit)
        )
        found.append(Variable("HCCL_EXEC_TIMEOUT", str(seconds), limit))
        found += [Variable(name, value, why) for name, (value, why) in facts.npu_variables.items()]
    if facts.nodes > 1 and facts.interface:
        why = _("the interface that leads to the first node")
        found.append(Variable("GLOO_SOCKET_IFNAME", facts.interface, why))
        exact = {"npu": "HCCL_SOCKET_IFNAME", "cuda": "NCCL_SOCKET_IFNAME"}.get(facts.device_type)
        if exact is not None:
            found.append(Variable(exact, f"={facts.interface}", why))
    return found


def _trackers(facts: LaunchFacts, environment: Mapping[str, str]) -> list[Variable]:
    if "wandb" not in facts.report_to:
        return [Variable("WANDB_MODE", "disabled", _("the run does not report to wandb"))]
    if "WANDB_API_KEY" in environment or has_wandb_login(environment):
        return []
    why = _(
        "no wandb login here, and asking for one would stop the run; `wandb sync` uploads later"
    )
    return [Variable("WANDB_MODE", "offline", why)]


def has_wandb_login(environment: Mapping[str, str]) -> bool:
    """Whether `wandb login` was done on this machine: it writes a line into .netrc. The key itself
    is not read out.
    """
    path = Path(environment.get("NETRC") or Path(environment.get("HOME", "/")) / ".netrc")
    try:
        return any(
            "wandb" in line.split("password")[0]
            for line in path.read_text(errors="replace").splitlines()
        )
    except OSError:
        return False


def without_stale(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what another launcher left behind."""
    return {name: value for name, value in environment.items() if name not in STALE}


def interface_to(address: str) -> str | None:
    """The network interface that leads to an address; None where none does, or only the
    loopback.
    """
    try:
        family, *_rest, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing: the system only chooses the route
            ours = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if name != "lo" and any(known.address.partition("%")[0] == ours for known in addresses):
            return name
    return None
