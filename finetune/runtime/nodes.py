"""This node's rank, the number of nodes and the first node's address: from flags, variables such as
NODE_RANK, or Slurm.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from finetune.errors import ConfigError, raise_problems

SCONTROL_SECONDS = 20
_Default = TypeVar("_Default", int, None)


@dataclass(frozen=True)
class Nodes:
    """The nodes of a launch."""

    count: int
    rank: int  # which one this is, from 0
    address: str  # host name or address of node 0, as all nodes reach it
    port: int | None  # to try first; None: any (one node)


def nodes_here(
    environment: Mapping[str, str],
    *,
    count: int | None = None,
    rank: int | None = None,
    address: str | None = None,
    port: int | None = None,
) -> Nodes:
    """Read the nodes from the flags, else NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, else the
    Slurm step, else one node.

    Raises:
        ConfigError: a number is invalid, or something that several nodes need is unknown
            (`Problems` for several).
    """
    slurm = _slurm(environment)
    count = number_of("NNODES", count, environment, slurm.get("count")) or 1
    port = number_of("MASTER_PORT", port, environment, None)
    if count == 1:
        return Nodes(1, 0, "127.0.0.1", port)
    rank = number_of("NODE_RANK", rank, environment, slurm.get("rank"))
    address = address or environment.get("MASTER_ADDR") or slurm.get("address")
    missing = [
        name
        for name, value in (("NODE_RANK", rank), ("MASTER_ADDR", address))
        if value in (None, "")
    ]
    raise_problems(
        [
            ConfigError(
                f"{name} is not set, and the launch has {count} nodes",
                where=f"{name} or --{name.lower().replace('_', '-')}",
                fix=(
                    "set NODE_RANK to 0 on the first node, 1 on the next, ..., and MASTER_ADDR to"
                    " the first node's address on all; srun sets what is needed by itself"
                ),
            )
            for name in missing
        ]
    )
    assert rank is not None and address
    if not 0 <= rank < count:
        raise ConfigError(
            f"node rank {rank} of {count} nodes: ranks go from 0 to {count - 1}",
            where="NODE_RANK or --node-rank",
            fix="number the nodes from 0, or give the right NNODES or --nnodes",
        )
    return Nodes(count, rank, address, 29500 if port is None else port)


def number_of(
    name: str, flag: int | None, environment: Mapping[str, str], otherwise: _Default
) -> int | _Default:
    """Return a number of the launch: the flag, else the variable of that name, else the default."""
    if flag is not None:
        return flag
    text = environment.get(name, "")
    if not text:
        return otherwise
    if not text.isdecimal():
        raise ConfigError(
            f"{name}={text} is not a number", where=name, fix=f"set {name} to a number, or unset it"
        )
    return int(text)


def _slurm(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the nodes of an srun step, which has one task per node; nothing outside a step."""
    if "SLURM_STEP_NODELIST" not in environment or "SLURM_NODEID" not in environment:
        return {}
    if environment.get("SLURM_LOCALID", "0") != "0":
        raise ConfigError(
            f"srun started several launches on node {environment['SLURM_NODEID']}, and each starts"
            " all its workers",
            where="srun",
            fix="srun --ntasks-per-node=1 (launchers/slurm.sbatch does)",
        )
    hosts = slurm_hosts(environment["SLURM_STEP_NODELIST"])
    return {
        "count": len(hosts),
        "rank": int(environment["SLURM_NODEID"]),
        "address": hosts[0],
    }


def slurm_hosts(nodelist: str) -> list[str]:
    """Return the host names of a Slurm node list: from scontrol if it is installed, else by parsing
    the list.
    """
    if shutil.which("scontrol"):
        command = ["scontrol", "show", "hostnames", nodelist]
        shown = subprocess.run(
            command, capture_output=True, text=True, timeout=SCONTROL_SECONDS, check=False
        )
        if shown.returncode == 0 and shown.stdout.split():
            return shown.stdout.split()
    return expand_nodelist(nodelist)


def expand_nodelist(nodelist: str) -> list[str]:
    """Expand `n[01-03,7]-ib,gpu5` to n01-ib, n02-ib, n03-ib, n7-ib, gpu5.

    Raises:
        ConfigError: the list is not in that form.
    """
    hosts: list[str] = []
    for part in re.split(r",(?![^\[]*\])", nodelist):
        pieces = re.split(r"\[([^\]]+)\]", part)  # text and ranges alternate
        choices = [_numbers(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        made = ["".join(words) for words in itertools.product(*choices)]
        if not part or any("[" in host or "]" in host for host in made):
            raise ConfigError(
                f"the Slurm node list {nodelist!r} cannot be read",
                where="SLURM_STEP_NODELIST",
                fix="set NNODES, NODE_RANK and MASTER_ADDR instead",
            )
        hosts.extend(made)
    return hosts


def _numbers(ranges: str) -> list[str]:
    """Expand `01-03,7` to 01, 02, 03, 7: with as many digits as the first number of a range."""
    numbers: list[str] = []
    for span in ranges.split(","):
        first, dash, last = span.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            return [f"[{ranges}]"]
        numbers += [f"{n:0{len(first)}d}" for n in range(int(first), int(last or first) + 1)]
    return numbers
