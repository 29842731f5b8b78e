"""The port at which the processes meet: free, or who has it and which one is free instead."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

from finetune.operations.checks.check import Check, fail, ok, skip, warn
from finetune.operations.checks.network import DEFAULT_PORT, Nodes

PORT_TRIES = 10


def can_bind(port: int) -> bool:
    """Whether a server could take the port on every interface, as torch's store does (IPv6 and IPv4, reuse of address).

    Raises:
        PermissionError: a port that only root may take.
    """
    for family, host in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((host, port))
                probe.listen(1)
        except OSError as error:
            if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT):
                continue  # this machine has no IPv6
            if error.errno in (errno.EACCES, errno.EPERM):
                raise PermissionError(f"port {port}") from error
            return False
    return True


def holder_of(port: int) -> int | None:
    """The process that listens on a port; None where it cannot be seen."""
    import psutil

    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.AccessDenied, OSError):
        return None
    listening = [one for one in connections if one.laddr and one.laddr.port == port and one.status == "LISTEN"]
    return listening[0].pid if listening else None


def next_free_port(after: int, bind: Callable[[int], bool] = can_bind) -> int | None:
    """The first free port after one, in as many tries as the launcher makes."""
    return next((port for port in range(after + 1, min(65_535, after + PORT_TRIES) + 1) if bind(port)), None)


def check_port(
    nodes: Nodes,
    bind: Callable[[int], bool] = can_bind,
    holder: Callable[[int], int | None] = holder_of,
) -> Check:
    """Whether the processes can meet at the port; asked where it will be bound, on the first node."""
    name = "port"
    if nodes.rank not in (None, 0):
        return skip(
            name, f"port {nodes.port} is taken on the first node, not here", f"端口 {nodes.port} 由首节点使用，不在本机"
        )
    try:
        free = bind(nodes.port)
    except PermissionError:
        return fail(
            name,
            (f"port {nodes.port} is for root only", f"端口 {nodes.port} 仅 root 可用"),
            (f"export MASTER_PORT={DEFAULT_PORT} on every node", f"在每个节点 export MASTER_PORT={DEFAULT_PORT}"),
            port=nodes.port,
        )
    if free:
        return ok(name, f"port {nodes.port} is free", f"端口 {nodes.port} 空闲", port=nodes.port)
    pid, instead = holder(nodes.port), next_free_port(nodes.port, bind)
    by, by_zh = (f" by pid {pid}", f"（进程 {pid}）") if pid else ("", "")
    values = {"port": nodes.port, "holder": pid, "next_free": instead}
    where = " on every node" if nodes.count > 1 else ""
    where_zh = "在每个节点" if nodes.count > 1 else ""
    free_one = f"export MASTER_PORT={instead}{where}" if instead else "choose another MASTER_PORT"
    free_one_zh = f"{where_zh}export MASTER_PORT={instead}" if instead else "请另选 MASTER_PORT"
    what = (f"port {nodes.port} is taken{by}", f"端口 {nodes.port} 已被占用{by_zh}")
    if nodes.port_given or nodes.count > 1:
        return fail(name, what, (free_one, free_one_zh), **values)
    return warn(
        name,
        what,
        (
            f"{free_one}; python -m finetune launch takes a free one by itself",
            f"{free_one_zh}；python -m finetune launch 会自动选择空闲端口",
        ),
        **values,
    )
