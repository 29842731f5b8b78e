"""The nodes of a run: who they are, the port and address at which they meet, and whether the first
one answers.
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from finetune.commands.doctor.check import Check, fail, failed, ok, skip, warn
from finetune.errors import FinetuneError, StateError
from finetune.runtime.language import _
from finetune.runtime.nodes import Nodes, nodes_here
from finetune.runtime.ports import DEFAULT_PORT, hold_port

CONNECT_TIMEOUT_SECONDS = 3.0
_LOOPBACK = ("127.", "::1", "localhost")


def check_nodes(environment: Mapping[str, str]) -> tuple[Nodes | None, list[Check]]:
    """The nodes of the run by the shell's variables (or Slurm's), and the checks of that."""
    name = "nodes"
    try:
        nodes = nodes_here(environment)
    except FinetuneError as error:
        return None, failed(name, error)
    if nodes.count == 1:
        return nodes, [ok(name, _("one node"))]
    what = _("node {rank} of {count}, meeting at {address}:{port}")
    what = what.format(rank=nodes.rank, count=nodes.count, address=nodes.address, port=nodes.port)
    return nodes, [ok(name, what, count=nodes.count, rank=nodes.rank)]


# ---------------------------------------------------------------- ports


def first_free_port(first: int) -> int | None:
    """The first port from there on that can be bound, in as many tries as the launcher makes; None
    where none can.
    """
    try:
        held = hold_port(first, address="")
    except StateError:
        return None
    held.close()
    return held.number


def holder_of(port: int) -> int | None:
    """The process that listens on a port; None where it cannot be seen."""
    import psutil

    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.AccessDenied, OSError):
        return None
    listening = [
        one
        for one in connections
        if one.laddr and one.laddr.port == port and one.status == "LISTEN"
    ]
    return listening[0].pid if listening else None


def check_port(
    nodes: Nodes,
    find: Callable[[int], int | None] = first_free_port,
    holder: Callable[[int], int | None] = holder_of,
) -> Check:
    """Whether the processes can meet at MASTER_PORT; asked where it will be bound, on the first
    node.
    """
    name, port = "port", nodes.port or DEFAULT_PORT
    if nodes.rank != 0:
        return skip(name, _("port {port} is taken on the first node, not here").format(port=port))
    free = find(port)
    if free == port:
        return ok(name, _("port {port} is free").format(port=port), port=port)
    pid = holder(port)
    values = {"port": port, "holder": pid, "next_free": free}
    what = _("port {port} is taken by pid {pid}") if pid else _("port {port} is taken")
    what = what.format(port=port, pid=pid)
    if free is None:
        return fail(
            name, what, _("choose a MASTER_PORT far from {port}").format(port=port), **values
        )
    fix = (
        _("export MASTER_PORT={free} on every node")
        if nodes.count > 1
        else _("export MASTER_PORT={free}")
    )
    if nodes.port is not None:
        return fail(name, what, fix.format(free=free), **values)
    itself = _("{fix}; python -m finetune launch takes a free one by itself")
    return warn(name, what, itself.format(fix=fix.format(free=free)), **values)


def ephemeral_ports(root: Path = Path("/")) -> tuple[int, int] | None:
    """The ports that the kernel gives away; None where it does not tell, or where some are reserved
    already.
    """
    folder = root / "proc/sys/net/ipv4"
    try:
        low, high = map(int, (folder / "ip_local_port_range").read_text().split())
        reserved = (folder / "ip_local_reserved_ports").read_text().strip()
    except (OSError, ValueError):
        return None
    return None if re.search(r"\d", reserved) else (low, high)


# ---------------------------------------------------------------- addresses


def local_addresses() -> dict[str, list[str]]:
    """Addresses (IPv4 and IPv6) of each network interface that is up."""
    import psutil

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [one.address.split("%")[0] for one in addresses if one.family in families]
        for name, addresses in psutil.net_if_addrs().items()
        if name in up
    }


def lookup(host: str, timeout_seconds: float = CONNECT_TIMEOUT_SECONDS) -> list[str]:
    """Addresses of a name, at most that long; empty where it has none."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    asked = pool.submit(socket.getaddrinfo, host, None, 0, socket.SOCK_STREAM)
    try:
        return sorted({str(info[4][0]) for info in asked.result(timeout_seconds)})
    except (OSError, UnicodeError, concurrent.futures.TimeoutError):
        return []
    finally:
        pool.shutdown(wait=False)


def is_loopback(address: str) -> bool:
    return address.startswith(_LOOPBACK)


def check_master_address(
    nodes: Nodes,
    interfaces: Mapping[str, Iterable[str]],
    resolve: Callable[[str], list[str]] = lookup,
) -> Check:
    """Whether the master's address resolves, is no loopback for several nodes, and is this
    machine's on node 0.
    """
    name = "master_address"
    if nodes.count < 2:
        return skip(name, _("one node"))
    addresses = resolve(nodes.address)
    values = {"address": nodes.address, "resolved": addresses}
    if not addresses:
        what = _("MASTER_ADDR {address} does not resolve").format(address=nodes.address)
        fix = _(
            "export MASTER_ADDR as the first node's IP address, or add the name to /etc/hosts on"
            " every node"
        )
        return fail(name, what, fix, **values)
    if all(map(is_loopback, addresses)):
        what = _("MASTER_ADDR {address} is {resolved}: other nodes would look for it on themselves")
        fix = _("export MASTER_ADDR as the address of the first node that the others reach")
        return fail(name, what.format(address=nodes.address, resolved=addresses[0]), fix, **values)
    own = {address for several in interfaces.values() for address in several}
    if nodes.rank == 0 and not any(address in own or is_loopback(address) for address in addresses):
        what = _(
            "MASTER_ADDR {address} ({resolved}) is no address of this machine, which is the first"
            " node"
        )
        fix = _("start NODE_RANK=0 on the machine that MASTER_ADDR names, or correct MASTER_ADDR")
        return fail(
            name, what.format(address=nodes.address, resolved=", ".join(addresses)), fix, **values
        )
    what = _("MASTER_ADDR {address} is {resolved}").format(
        address=nodes.address, resolved=addresses[0]
    )
    return ok(name, what, **values)


def reach(host: str, port: int, timeout_seconds: float = CONNECT_TIMEOUT_SECONDS) -> str:
    """How connecting ends: "open", "refused" (the host answers, nobody listens yet), or why it
    cannot be reached.
    """
    try:
        with socket.create_connection((host, port), timeout_seconds):
            return "open"
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return f"no answer in {timeout_seconds:g} s"
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)


def check_master_reachable(nodes: Nodes, connect: Callable[[str, int], str] = reach) -> Check:
    """Whether the first node answers; asked on the others. Refused is an answer too: it has not
    started yet.
    """
    name, address, port = "master_reachable", nodes.address, nodes.port
    if nodes.count < 2:
        return skip(name, _("one node"))
    if nodes.rank == 0:
        return skip(name, _("this is the first node: ask on the others"))
    result = connect(address, port or DEFAULT_PORT)
    values: dict[str, Any] = {"address": address, "port": port, "result": result}
    if result == "open":
        return ok(name, _("{address}:{port} answers").format(address=address, port=port), **values)
    if result == "refused":
        what = _("{address} answers; nobody listens on {port} yet").format(
            address=address, port=port
        )
        return ok(name, what, **values)
    what = _("the first node {address}:{port} cannot be reached: {result}")
    fix = _(
        "open port {port} and the ports above 1024 between the nodes (firewall), and check the"
        " address and cable"
    ).format(port=port)
    return fail(name, what.format(address=address, port=port, result=result), fix, **values)


def check_own_name(
    nodes: Nodes,
    environment: Mapping[str, str],
    resolve: Callable[[str], list[str]] = lookup,
    host_name: str | None = None,
) -> Check:
    """Whether this machine's name leads to an address that others reach: gloo takes it where no
    interface is named.
    """
    name = "own_address"
    if nodes.count < 2:
        return skip(name, _("one node"))
    if environment.get("GLOO_SOCKET_IFNAME"):
        return ok(name, f"GLOO_SOCKET_IFNAME={environment['GLOO_SOCKET_IFNAME']}")
    host = host_name or socket.gethostname()
    addresses = resolve(host)
    if addresses and not all(map(is_loopback, addresses)):
        what = _("{host} is {address}").format(host=host, address=addresses[0])
        return ok(name, what, resolved=addresses)
    if addresses:
        what = _(
            "this machine's name {host} is {address}: gloo would offer the others an address they"
            " cannot reach"
        )
        what = what.format(host=host, address=addresses[0])
    else:
        what = _(
            "this machine's name {host} does not resolve: gloo would have no address to offer the"
            " others"
        )
        what = what.format(host=host)
    fix = _("export GLOO_SOCKET_IFNAME=<the interface between the nodes> (ip -br addr shows them)")
    return warn(name, what, fix, resolved=addresses)
