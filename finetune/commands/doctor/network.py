"""How the processes of a run find one another: nodes, the port and address at which they meet, and
variables of other launches.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from functools import partial

import psutil

from finetune.commands.doctor.check import Check, failed
from finetune.errors import FinetuneError, StateError
from finetune.runtime.host import usable_cores
from finetune.runtime.language import _
from finetune.runtime.nodes import Nodes, nodes_here
from finetune.runtime.parent_watchdog import call_with_timeout
from finetune.runtime.ports import DEFAULT_PORT, hold_port

CONNECT_TIMEOUT_SECONDS = 3.0


def check_nodes(environment: Mapping[str, str]) -> tuple[Nodes | None, list[Check]]:
    """Read the nodes of the run from the shell's variables (or Slurm's), and check them."""
    try:
        nodes = nodes_here(environment)
    except FinetuneError as error:
        return None, failed("nodes", error)
    if nodes.count == 1:
        return nodes, [Check("nodes").ok(_("one node"))]
    check = Check("nodes", values={"count": nodes.count, "rank": nodes.rank})
    what = _("node {rank} of {count}, meeting at {address}:{port}")
    return nodes, [check.ok(what, **vars(nodes))]


# ---------------------------------------------------------------- ports


def first_free_port(first: int) -> int | None:
    """Return the first port from there on that can be bound, in as many tries as the launcher
    makes; None if none can.
    """
    try:
        held = hold_port(first, address="")
    except StateError:
        return None
    held.close()
    return held.number


def holder_of(port: int) -> int | None:
    """Return the process that listens on a port; None if it cannot be seen."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.AccessDenied, OSError):
        return None
    for connection in connections:
        if connection.status == "LISTEN" and connection.laddr.port == port:
            return connection.pid
    return None


def check_port(nodes: Nodes) -> Check:
    """Check that the processes can meet at MASTER_PORT, which is bound on the first node."""
    port = nodes.port or DEFAULT_PORT
    if nodes.rank != 0:
        return Check("port").skip(_("port {port} is taken on the first node, not here"), port=port)
    free = first_free_port(port)
    if free == port:
        return Check("port", values={"port": port}).ok(_("port {port} is free"))
    pid = holder_of(port)
    check = Check(
        "port",
        values={
            "port": port,
            "holder": pid,
            "next_free": free,
        },
    )
    what = _("port {port} is taken by pid {pid}") if pid else _("port {port} is taken")
    if free is None:
        return check.fail(what, _("choose a MASTER_PORT far from {port}"), pid=pid)
    fix = _("export MASTER_PORT={free}")
    if nodes.count > 1:
        fix = _("export MASTER_PORT={free} on every node")
    fix = fix.format(free=free)
    if nodes.port is not None:
        return check.fail(what, fix, pid=pid)
    fix = _("{fix}; python -m finetune launch takes a free one by itself").format(fix=fix)
    return check.warn(what, fix, pid=pid)


# ---------------------------------------------------------------- addresses


def local_addresses() -> dict[str, list[str]]:
    """Return the addresses (IPv4 and IPv6) of each network interface that is up."""
    families = (socket.AF_INET, socket.AF_INET6)
    states = psutil.net_if_stats()
    return {
        name: [each.address.split("%")[0] for each in addresses if each.family in families]
        for name, addresses in psutil.net_if_addrs().items()
        if name in states and states[name].isup
    }


def lookup(host: str) -> list[str]:
    """Return the addresses of a name; empty if it has none, or does not resolve in time."""
    ask = partial(socket.getaddrinfo, host, None, 0, socket.SOCK_STREAM)
    try:
        found = call_with_timeout(ask, CONNECT_TIMEOUT_SECONDS)
    except (OSError, UnicodeError):
        return []
    return sorted({str(info[4][0]) for info in found})


def is_loopback(address: str) -> bool:
    return address.startswith(("127.", "::1", "localhost"))


def check_master_address(nodes: Nodes) -> Check:
    """Check that the master's address resolves, is not loopback, and is node 0's own."""
    address, resolved = nodes.address, lookup(nodes.address)
    check = Check("master_address", values={"address": address, "resolved": resolved})
    shown = ", ".join(resolved)
    if not resolved:
        return check.fail(
            _("MASTER_ADDR {address} does not resolve"),
            _(
                "export MASTER_ADDR as the first node's IP address, or add the name to /etc/hosts"
                " on every node"
            ),
        )
    if all(map(is_loopback, resolved)):
        return check.fail(
            _("MASTER_ADDR {address} is {resolved}: other nodes would look for it on themselves"),
            _("export MASTER_ADDR as the address of the first node that the others reach"),
            resolved=shown,
        )
    own = [each for addresses in local_addresses().values() for each in addresses]
    if nodes.rank == 0 and not any(each in own or is_loopback(each) for each in resolved):
        return check.fail(
            _(
                "MASTER_ADDR {address} ({resolved}) is no address of this machine, which is the"
                " first node"
            ),
            _("start NODE_RANK=0 on the machine that MASTER_ADDR names, or correct MASTER_ADDR"),
            resolved=shown,
        )
    return check.ok(_("MASTER_ADDR {address} is {resolved}"), resolved=shown)


def reach(host: str, port: int) -> str:
    """Connect, and return the result.

    Returns:
        "open", "refused" (the host answers, but no process listens yet), or why the host cannot be
        reached.
    """
    try:
        with socket.create_connection((host, port), CONNECT_TIMEOUT_SECONDS):
            return "open"
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return f"no answer in {CONNECT_TIMEOUT_SECONDS:g} s"
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)


def check_master_reachable(nodes: Nodes) -> Check:
    """Check on the other nodes that the first node answers. Refused is an answer too: it has not
    started yet.
    """
    if nodes.rank == 0:
        return Check("master_reachable").skip(_("this is the first node: ask on the others"))
    port = nodes.port or DEFAULT_PORT
    result = reach(nodes.address, port)
    values = {
        "address": nodes.address,
        "port": port,
        "result": result,
    }
    check = Check("master_reachable", values=values)
    if result == "open":
        return check.ok(_("{address}:{port} answers"))
    if result == "refused":
        return check.ok(_("{address} answers; nobody listens on {port} yet"))
    return check.fail(
        _("the first node {address}:{port} cannot be reached: {result}"),
        _(
            "open port {port} and the ports above 1024 between the nodes (firewall), and check the"
            " address and cable"
        ),
    )


def check_own_name(environment: Mapping[str, str]) -> Check:
    """Check that this machine's name leads to an address that others reach: gloo uses it if no
    interface is named.
    """
    interface = environment.get("GLOO_SOCKET_IFNAME")
    if interface:
        return Check("own_address").ok("GLOO_SOCKET_IFNAME={interface}", interface=interface)
    host = socket.gethostname()
    resolved = lookup(host)
    check = Check("own_address", values={"resolved": resolved})
    words = {"host": host, "address": resolved[0] if resolved else ""}
    if resolved and not all(map(is_loopback, resolved)):
        return check.ok(_("{host} is {address}"), **words)
    what = _(
        "this machine's name {host} is {address}: gloo would offer the others an address they"
        " cannot reach"
    )
    if not resolved:
        what = _(
            "this machine's name {host} does not resolve: gloo would have no address to offer the"
            " others"
        )
    return check.warn(
        what,
        _("export GLOO_SOCKET_IFNAME=<the interface between the nodes> (ip -br addr shows them)"),
        **words,
    )


# ---------------------------------------------------------------- variables


def check_variables(environment: Mapping[str, str], processes: int, nodes: int) -> list[Check]:
    """Check the variables that are compared with a fact of this machine; one ok if nothing is
    wrong.

    Other variables are tried for real: by `torch_device`, the launched checks and the dry run.

    Args:
        environment: the variables that the run will be started with.
        processes: of the run on this machine.
    """
    found = (
        _stale_rank(environment),
        _threads(environment, processes),
        _interface(environment, nodes),
    )
    checks = [check for check in found if check is not None]
    return checks or [Check("variables").ok(_("no variables contradict one another"))]


def _stale_rank(environment: Mapping[str, str]) -> Check | None:
    """Find RANK and WORLD_SIZE that an older script exported, outside a launcher."""
    rank, size = environment.get("RANK"), environment.get("WORLD_SIZE", "1")
    launchers = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
    if not rank or size == "1" or any(environment.get(name) for name in launchers):
        return None
    check = Check("stale_rank")
    # With an address and a port, a platform (Kubernetes) may have started this shell as one rank.
    is_platform = environment.get("MASTER_ADDR") and environment.get("MASTER_PORT")
    return (check.warn if is_platform else check.fail)(
        _(
            "RANK={rank} and WORLD_SIZE={size} are exported in this shell: a process started here"
            " would be rank {rank}, and wait for the others"
        ),
        _("unset RANK LOCAL_RANK WORLD_SIZE, unless a platform set them for this process"),
        rank=rank,
        size=size,
    )


def _threads(environment: Mapping[str, str], processes: int) -> Check | None:
    """Find an OMP_NUM_THREADS beyond the cores."""
    text, cores = environment.get("OMP_NUM_THREADS", ""), usable_cores()
    if processes == 1 or not text.isdecimal() or int(text) * processes <= cores:
        return None
    what = _(
        "OMP_NUM_THREADS={count} x {processes} processes on {cores} cores: they wait for one"
        " another"
    )
    fix = _("export OMP_NUM_THREADS={fitting}, or unset it")
    words = {
        "count": text,
        "processes": processes,
        "cores": cores,
    }
    return Check("omp_threads").warn(what, fix, fitting=max(1, cores // processes), **words)


def _interface(environment: Mapping[str, str], nodes: int) -> Check | None:
    """Find a GLOO_SOCKET_IFNAME that is not up, or is loopback for several nodes."""
    name, interfaces = environment.get("GLOO_SOCKET_IFNAME", ""), local_addresses()
    chosen = [each for each in name.split(",") if each in interfaces]
    if not name or not interfaces:
        return None
    check, words = Check("socket_interface"), {"variable": "GLOO_SOCKET_IFNAME"}
    setting = f"GLOO_SOCKET_IFNAME={name}"
    if not chosen:
        return check.fail(
            _("{setting} names no interface that is up; there are {interfaces}"),
            _("export {variable}=<one of them>, or unset it"),
            setting=setting,
            interfaces=", ".join(interfaces),
            **words,
        )
    addresses = [address for interface in chosen for address in interfaces[interface]]
    if nodes > 1 and addresses and all(map(is_loopback, addresses)):
        return check.fail(
            _("{setting} is loopback, and the run has {nodes} nodes"),
            _("export {variable}=<the interface between the nodes>"),
            setting=setting,
            nodes=nodes,
            **words,
        )
    return None
