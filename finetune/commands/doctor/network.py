"""The nodes of a run: who they are, the master's address, and whether it answers."""

from __future__ import annotations

import concurrent.futures
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from finetune.commands.doctor.check import Check, fail, failed, ok, problems_of, skip, warn
from finetune.errors import FinetuneError
from finetune.runtime.nodes import Nodes, nodes_here
from finetune.runtime.ports import DEFAULT_PORT

CONNECT_TIMEOUT_SECONDS = 3.0
_LOOPBACK = ("127.", "::1", "localhost")


def check_nodes(environment: Mapping[str, str]) -> tuple[Nodes | None, list[Check]]:
    """The nodes of the run as the shell's variables (or Slurm's) say, and the checks of that."""
    name = "nodes"
    try:
        nodes = nodes_here(environment)
    except FinetuneError as error:
        return None, [failed(name, problem) for problem in problems_of(error)]
    if nodes.count == 1:
        return nodes, [ok(name, "one node", "单节点")]
    said = f"node {nodes.rank} of {nodes.count}, meeting at {nodes.address}:{nodes.port}"
    chinese = f"{nodes.count} 个节点中的第 {nodes.rank} 个（从 0 起），汇合地址 {nodes.address}:{nodes.port}"
    return nodes, [ok(name, said, chinese, count=nodes.count, rank=nodes.rank)]


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
    """Whether the master's address has meaning here: resolves, is this machine's on node 0, is no loopback for "
    "several."""
    name = "master_address"
    if nodes.count < 2:
        return skip(name, "one node", "单节点")
    addresses = resolve(nodes.address)
    values = {"address": nodes.address, "resolved": addresses}
    if not addresses:
        return fail(
            name,
            (f"MASTER_ADDR {nodes.address} does not resolve", f"MASTER_ADDR {nodes.address} 无法解析"),
            (
                "export MASTER_ADDR as the first node's IP address, or add the name to /etc/hosts on every node",
                "将 MASTER_ADDR 设为首节点的 IP，或在每个节点的 /etc/hosts 中加入该主机名",
            ),
            **values,
        )
    if all(map(is_loopback, addresses)):
        return fail(
            name,
            (
                f"MASTER_ADDR {nodes.address} is {addresses[0]}: other nodes would look for it on themselves",
                f"MASTER_ADDR {nodes.address} 即 {addresses[0]}：其他节点会在自己身上寻找它",
            ),
            (
                "export MASTER_ADDR as the address of the first node that the others reach",
                "将 MASTER_ADDR 设为其他节点可达的首节点地址",
            ),
            **values,
        )
    own = {address for several in interfaces.values() for address in several}
    here = any(address in own or is_loopback(address) for address in addresses)
    if nodes.rank == 0 and not here:
        return fail(
            name,
            (
                f"MASTER_ADDR {nodes.address} ({', '.join(addresses)}) is no address of this machine, which is the "
                "first node",
                f"MASTER_ADDR {nodes.address}（{', '.join(addresses)}）不是本机地址，而本机是首节点",
            ),
            (
                "start NODE_RANK=0 on the machine that MASTER_ADDR names, or correct MASTER_ADDR",
                "请在 MASTER_ADDR 所指机器上以 NODE_RANK=0 启动，或更正 MASTER_ADDR",
            ),
            **values,
        )
    shown = f"MASTER_ADDR {nodes.address} is {addresses[0]}"
    return ok(name, shown, f"MASTER_ADDR {nodes.address} 为 {addresses[0]}", **values)


def reach(host: str, port: int, timeout_seconds: float = CONNECT_TIMEOUT_SECONDS) -> str:
    """ "open", "refused" (the host answers, nobody listens yet), or why it cannot be reached."""
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
    """Whether the first node answers; asked on the others. A refused connection is an answer: it has not started "
    "yet."""
    name = "master_reachable"
    if nodes.count < 2:
        return skip(name, "one node", "单节点")
    if nodes.rank == 0:
        return skip(name, "this is the first node: ask on the others", "本机是首节点：请在其他节点上检查")
    result = connect(nodes.address, nodes.port or DEFAULT_PORT)
    values: dict[str, Any] = {"address": nodes.address, "port": nodes.port, "result": result}
    if result == "open":
        said = f"{nodes.address}:{nodes.port} answers"
        return ok(name, said, f"{nodes.address}:{nodes.port} 可连通", **values)
    if result == "refused":
        return ok(
            name,
            f"{nodes.address} answers; nobody listens on {nodes.port} yet",
            f"{nodes.address} 可达；端口 {nodes.port} 尚无监听",
            **values,
        )
    return fail(
        name,
        (
            f"the first node {nodes.address}:{nodes.port} cannot be reached: {result}",
            f"无法连接首节点 {nodes.address}:{nodes.port}：{result}",
        ),
        (
            f"open port {nodes.port} and the ports above 1024 between the nodes (firewall), and check the address "
            "and cable",
            f"请在节点间放行端口 {nodes.port} 及 1024 以上端口（防火墙），并检查地址与网线",
        ),
        **values,
    )


def check_own_name(
    nodes: Nodes,
    environment: Mapping[str, str],
    resolve: Callable[[str], list[str]] = lookup,
    host_name: str | None = None,
) -> Check:
    """Whether this machine's name leads to an address that others reach: gloo takes it where no interface is named."""
    name = "own_address"
    if nodes.count < 2:
        return skip(name, "one node", "单节点")
    if environment.get("GLOO_SOCKET_IFNAME"):
        return ok(
            name,
            f"GLOO_SOCKET_IFNAME={environment['GLOO_SOCKET_IFNAME']}",
            f"GLOO_SOCKET_IFNAME={environment['GLOO_SOCKET_IFNAME']}",
        )
    host = host_name or socket.gethostname()
    addresses = resolve(host)
    if addresses and not all(map(is_loopback, addresses)):
        return ok(name, f"{host} is {addresses[0]}", f"{host} 为 {addresses[0]}", resolved=addresses)
    what = f"is {addresses[0]}" if addresses else "does not resolve"
    what_zh = f"解析为 {addresses[0]}" if addresses else "无法解析"
    return warn(
        name,
        (
            f"this machine's name {host} {what}: gloo would offer the others an address that they cannot reach",
            f"本机名 {host} {what_zh}：gloo 会给其他节点一个不可达的地址",
        ),
        (
            "export GLOO_SOCKET_IFNAME=<the interface between the nodes> (ip -br addr shows them)",
            "export GLOO_SOCKET_IFNAME=<节点间网卡>（用 ip -br addr 查看）",
        ),
        resolved=addresses,
    )
