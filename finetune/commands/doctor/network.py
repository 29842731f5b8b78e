"""How the processes of a run find one another: nodes, the port and address at which they meet,
network interfaces, and variables of other launches.
"""

from __future__ import annotations

import concurrent.futures
import os
import socket
from collections.abc import Iterable, Mapping
from typing import Any

import psutil

from finetune.commands.doctor.check import Check, fail, failed, ok, skip, warn
from finetune.errors import FinetuneError, StateError
from finetune.runtime.host import usable_cores
from finetune.runtime.language import _
from finetune.runtime.nodes import Nodes, nodes_here
from finetune.runtime.ports import DEFAULT_PORT, hold_port

CONNECT_TIMEOUT_SECONDS = 3.0
_LOOPBACK = ("127.", "::1", "localhost")


def check_nodes(environment: Mapping[str, str]) -> tuple[Nodes | None, list[Check]]:
    """Read the nodes of the run from the shell's variables (or Slurm's), and check them."""
    name = "nodes"
    try:
        nodes = nodes_here(environment)
    except FinetuneError as error:
        return None, failed(name, error)
    if nodes.count == 1:
        return nodes, [ok(name, _("one node"))]
    what = _("node {rank} of {count}, meeting at {address}:{port}").format(**vars(nodes))
    return nodes, [ok(name, what, count=nodes.count, rank=nodes.rank)]


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
        if connection.laddr and (connection.laddr.port, connection.status) == (port, "LISTEN"):
            return connection.pid
    return None


def check_port(nodes: Nodes) -> Check:
    """Whether the processes can meet at MASTER_PORT. Checked where it will be bound, on the first
    node.
    """
    name = "port"
    port = nodes.port or DEFAULT_PORT
    if nodes.rank != 0:
        return skip(name, _("port {port} is taken on the first node, not here").format(port=port))
    free = first_free_port(port)
    if free == port:
        return ok(name, _("port {port} is free").format(port=port), port=port)
    pid = holder_of(port)
    values = {"port": port, "holder": pid, "next_free": free}
    what = _("port {port} is taken by pid {pid}") if pid else _("port {port} is taken")
    what = what.format(port=port, pid=pid)
    if free is None:
        fix = _("choose a MASTER_PORT far from {port}").format(port=port)
        return fail(name, what, fix, **values)
    several = nodes.count > 1
    fix = (
        _("export MASTER_PORT={free} on every node") if several else _("export MASTER_PORT={free}")
    )
    fix = fix.format(free=free)
    if nodes.port is not None:
        return fail(name, what, fix, **values)
    fix = _("{fix}; python -m finetune launch takes a free one by itself").format(fix=fix)
    return warn(name, what, fix, **values)


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
    pool = concurrent.futures.ThreadPoolExecutor(1)
    answer = pool.submit(socket.getaddrinfo, host, None, 0, socket.SOCK_STREAM)
    try:
        return sorted({str(info[4][0]) for info in answer.result(CONNECT_TIMEOUT_SECONDS)})
    except (OSError, UnicodeError, concurrent.futures.TimeoutError):
        return []
    finally:
        pool.shutdown(wait=False)


def is_loopback(address: str) -> bool:
    return address.startswith(_LOOPBACK)


def check_master_address(nodes: Nodes) -> Check:
    """Whether the master's address resolves, is no loopback if there are several nodes, and is this
    machine's on node 0.
    """
    name = "master_address"
    if nodes.count < 2:
        return skip(name, _("one node"))
    address = nodes.address
    resolved = lookup(address)
    values = {"address": address, "resolved": resolved}
    if not resolved:
        what = _("MASTER_ADDR {address} does not resolve").format(address=address)
        fix = _(
            "export MASTER_ADDR as the first node's IP address, or add the name to /etc/hosts on"
            " every node"
        )
        return fail(name, what, fix, **values)
    if all(map(is_loopback, resolved)):
        what = _("MASTER_ADDR {address} is {resolved}: other nodes would look for it on themselves")
        fix = _("export MASTER_ADDR as the address of the first node that the others reach")
        return fail(name, what.format(address=address, resolved=resolved[0]), fix, **values)
    own = {each for several in local_addresses().values() for each in several}
    if nodes.rank == 0 and not any(each in own or is_loopback(each) for each in resolved):
        what = _(
            "MASTER_ADDR {address} ({resolved}) is no address of this machine, which is the first"
            " node"
        )
        fix = _("start NODE_RANK=0 on the machine that MASTER_ADDR names, or correct MASTER_ADDR")
        what = what.format(address=address, resolved=", ".join(resolved))
        return fail(name, what, fix, **values)
    what = _("MASTER_ADDR {address} is {resolved}").format(address=address, resolved=resolved[0])
    return ok(name, what, **values)


def reach(host: str, port: int) -> str:
    """Connect, and return how it ends: "open", "refused" (the host answers, nobody listens yet), or
    why the host cannot be reached.
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
    """Whether the first node answers; checked on the others. Refused is an answer too: it has not
    started yet.
    """
    name = "master_reachable"
    if nodes.count < 2:
        return skip(name, _("one node"))
    if nodes.rank == 0:
        return skip(name, _("this is the first node: ask on the others"))
    result = reach(nodes.address, nodes.port or DEFAULT_PORT)
    values: dict[str, Any] = {"address": nodes.address, "port": nodes.port, "result": result}
    if result == "open":
        return ok(name, _("{address}:{port} answers").format(**values), **values)
    if result == "refused":
        what = _("{address} answers; nobody listens on {port} yet").format(**values)
        return ok(name, what, **values)
    what = _("the first node {address}:{port} cannot be reached: {result}").format(**values)
    fix = _(
        "open port {port} and the ports above 1024 between the nodes (firewall), and check the"
        " address and cable"
    ).format(port=nodes.port)
    return fail(name, what, fix, **values)


def check_own_name(nodes: Nodes, environment: Mapping[str, str]) -> Check:
    """Whether this machine's name leads to an address that others reach: gloo uses it if no
    interface is named.
    """
    name = "own_address"
    if nodes.count < 2:
        return skip(name, _("one node"))
    if environment.get("GLOO_SOCKET_IFNAME"):
        return ok(name, f"GLOO_SOCKET_IFNAME={environment['GLOO_SOCKET_IFNAME']}")
    host = socket.gethostname()
    resolved = lookup(host)
    address = resolved[0] if resolved else ""
    if resolved and not all(map(is_loopback, resolved)):
        what = _("{host} is {address}").format(host=host, address=address)
        return ok(name, what, resolved=resolved)
    if resolved:
        what = _(
            "this machine's name {host} is {address}: gloo would offer the others an address they"
            " cannot reach"
        )
    else:
        what = _(
            "this machine's name {host} does not resolve: gloo would have no address to offer the"
            " others"
        )
    fix = _("export GLOO_SOCKET_IFNAME=<the interface between the nodes> (ip -br addr shows them)")
    return warn(name, what.format(host=host, address=address), fix, resolved=resolved)


# ---------------------------------------------------------------- variables


def check_variables(
    environment: Mapping[str, str], device_type: str, processes: int, nodes: int
) -> list[Check]:
    """What is wrong with the variables of the shell; one ok if nothing is.

    Only what runs have confirmed. The other variables of HCCL, NCCL and the allocators are tried
    for real: by `torch_device`, the launched checks and the dry run.

    Args:
        environment: the variables that the run will be started with.
        device_type: what the run takes: "npu", "cuda", "mps" or "cpu".
        processes: of the run on this machine.
    """
    found = (
        _stale_world(environment),
        _threads(environment, processes),
        _interfaces(environment, device_type, nodes),
    )
    checks = [check for check in found if check is not None]
    return checks or [ok("variables", _("no variables contradict one another"))]


def _whole(text: str) -> int | None:
    return int(text) if text.lstrip("-").isdecimal() else None


def _stale_world(environment: Mapping[str, str]) -> Check | None:
    """Launchers' variables that an older script exported."""
    rank, size = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
    if size and not rank:
        return warn(
            "stale_world_size",
            _("WORLD_SIZE={size} is set without RANK: it is ignored").format(size=size),
            _("unset WORLD_SIZE; the launcher sets it for each process"),
        )
    number = _whole(rank)
    processes = _whole(size) or 1
    if number is not None and number >= processes:
        return fail(
            "stale_rank",
            _("RANK={rank} is not below WORLD_SIZE={size}").format(rank=rank, size=size),
            _("unset both; launchers set them"),
        )
    launchers = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
    if not rank or processes == 1 or any(environment.get(name) for name in launchers):
        return None
    # With an address and a port, a platform (Kubernetes) may have started this shell as one rank.
    verdict = warn if environment.get("MASTER_ADDR") and environment.get("MASTER_PORT") else fail
    text = _(
        "RANK={rank} and WORLD_SIZE={size} are exported in this shell: a process started here"
        " would be rank {rank}, and wait for the others"
    )
    fix = _("unset RANK LOCAL_RANK WORLD_SIZE, unless a platform set them for this process")
    return verdict("stale_rank", text.format(rank=rank, size=size), fix)


def _threads(environment: Mapping[str, str], processes: int) -> Check | None:
    """OMP_NUM_THREADS beyond the cores."""
    text = environment.get("OMP_NUM_THREADS", "")
    count = _whole(text)
    if text and (count is None or count < 1):
        what = _("OMP_NUM_THREADS is {text!r}, not a number of threads").format(text=text)
        return warn("omp_threads", what, "unset OMP_NUM_THREADS")
    cores = usable_cores()
    if not count or processes == 1 or count * processes <= cores:
        return None
    what = _(
        "OMP_NUM_THREADS={count} x {processes} processes on {cores} cores: they wait for one"
        " another"
    ).format(count=count, processes=processes, cores=cores)
    fix = _("export OMP_NUM_THREADS={fitting}, or unset it")
    return warn("omp_threads", what, fix.format(fitting=max(1, cores // processes)))


def _interfaces(environment: Mapping[str, str], device_type: str, nodes: int) -> Check | None:
    """*_SOCKET_IFNAME that name no interface that is up, or loopback for several nodes."""
    name = "socket_interface"
    own = {"npu": ["HCCL_SOCKET_IFNAME"], "cuda": ["NCCL_SOCKET_IFNAME"]}.get(device_type, [])
    interfaces = local_addresses()
    chosen: dict[str, set[str]] = {}
    for variable in (*own, "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        text = environment.get(variable, "")
        if not text or not interfaces:
            continue
        setting = f"{variable}={text}"
        exact = variable.startswith(("GLOO", "TP"))
        matched = matching_interfaces(text, interfaces, exact=exact)
        if not matched:
            what = _("{setting} names no interface that is up; there are {interfaces}")
            what = what.format(setting=setting, interfaces=", ".join(interfaces))
            fix = _("export {variable}=<one of them>, or unset it").format(variable=variable)
            return fail(name, what, fix)
        addresses = [address for interface in matched for address in interfaces[interface]]
        if nodes > 1 and addresses and all(map(is_loopback, addresses)):
            what = _("{setting} is loopback, and the run has {nodes} nodes")
            fix = _("export {variable}=<the interface between the nodes>")
            what = what.format(setting=setting, nodes=nodes)
            return fail(name, what, fix.format(variable=variable))
        chosen[setting] = matched
    if len(chosen) > 1 and not set.intersection(*chosen.values()):
        what = _("different networks: {settings}").format(settings=", ".join(chosen))
        return warn(name, what, _("name one interface in all of them"))
    return None


def matching_interfaces(text: str, names: Iterable[str], *, exact: bool) -> set[str]:
    """Return the interfaces that a *_SOCKET_IFNAME selects.

    As NCCL and HCCL read it: prefixes by default, `=` for exact names, `^` for all others.
    """
    exclude = text.startswith("^")
    text = text.lstrip("^")
    exact = exact or text.startswith("=")
    parts = [part for part in text.lstrip("=").split(",") if part]
    matched = {
        name
        for name in names
        if any(name == part if exact else name.startswith(part) for part in parts)
    }
    return set(names) - matched if exclude else matched
