"""The nodes of a run: who they are, the master's address, and whether it answers."""

from __future__ import annotations

import concurrent.futures
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from finetune.operations.checks.check import Check, fail, ok, skip, warn

DEFAULT_PORT = 29500
CONNECT_TIMEOUT_SECONDS = 3.0
_LOOPBACK = ("127.", "::1", "localhost")


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run as the shell's variables say: `count` of them, this is `rank`, they meet at `address`."""

    count: int = 1
    rank: int | None = None
    address: str = ""
    port: int = DEFAULT_PORT
    port_given: bool = False


def read_nodes(environment: Mapping[str, str]) -> Nodes | Check:
    """NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, or the failed check that says which is wrong."""
    numbers: dict[str, int | None] = {}
    for name, least, most in (("NNODES", 1, 100_000), ("NODE_RANK", 0, 100_000), ("MASTER_PORT", 1, 65_535)):
        text = environment.get(name, "").strip()
        if text and not (text.isdigit() and least <= int(text) <= most):
            return fail(
                "nodes",
                (
                    f"{name} is {text!r}, not a number from {least} to {most}",
                    f"{name} 为 {text!r}，不是 {least} 到 {most} 的整数",
                ),
                (f"export {name} as a number", f"请将 {name} 设为整数"),
            )
        numbers[name] = int(text) if text else None
    count, rank = numbers["NNODES"] or 1, numbers["NODE_RANK"]
    address = environment.get("MASTER_ADDR", "").strip()
    if count > 1 and (rank is None or not address):
        absent = " and ".join(
            name for name, there in (("NODE_RANK", rank is not None), ("MASTER_ADDR", address)) if not there
        )
        return fail(
            "nodes",
            (f"NNODES is {count}, but {absent} is not set", f"NNODES 为 {count}，但未设置 {absent}"),
            (
                "on every node: export MASTER_ADDR=<the first node's address>; NODE_RANK=0 on the first, 1 on the next",
                "在每个节点设置 MASTER_ADDR=<首节点地址>；首节点 NODE_RANK=0，下一个为 1，依此类推",
            ),
        )
    if rank is not None and rank >= count:
        return fail(
            "nodes",
            (
                f"NODE_RANK is {rank}, but there are {count} nodes (NNODES): ranks count from 0",
                f"NODE_RANK 为 {rank}，而节点数（NNODES）为 {count}：序号从 0 开始",
            ),
            (
                f"set NODE_RANK to 0...{count - 1}, or NNODES to {rank + 1}",
                f"将 NODE_RANK 设为 0 至 {count - 1}，或将 NNODES 设为 {rank + 1}",
            ),
        )
    port = numbers["MASTER_PORT"]
    return Nodes(count, rank, address, port or DEFAULT_PORT, port is not None)


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
    if not nodes.address:
        return skip(name, "MASTER_ADDR is not set: one machine", "未设置 MASTER_ADDR：单机运行")
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
    if nodes.count > 1 and all(map(is_loopback, addresses)):
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
    if nodes.rank in (None, 0) and not here:
        verdict = fail if nodes.rank == 0 else warn
        return verdict(
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
    result = connect(nodes.address, nodes.port)
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
