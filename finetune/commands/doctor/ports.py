"""The port at which the processes meet: free, or who has it and which one is free instead."""

from __future__ import annotations

from collections.abc import Callable

from finetune.commands.doctor.check import Check, fail, ok, skip, warn
from finetune.errors import StateError
from finetune.runtime.nodes import Nodes
from finetune.runtime.ports import DEFAULT_PORT, hold_port


def first_free_port(first: int) -> int | None:
    """The first port from there on that can be bound, in as many tries as the launcher makes; None where none can."""
    try:
        held = hold_port(first, loopback=False)
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
    listening = [one for one in connections if one.laddr and one.laddr.port == port and one.status == "LISTEN"]
    return listening[0].pid if listening else None


def check_port(
    nodes: Nodes,
    find: Callable[[int], int | None] = first_free_port,
    holder: Callable[[int], int | None] = holder_of,
) -> Check:
    """Whether the processes can meet at MASTER_PORT; asked where it will be bound, on the first node."""
    name, port = "port", nodes.port or DEFAULT_PORT
    if nodes.rank != 0:
        return skip(name, f"port {port} is taken on the first node, not here", f"端口 {port} 由首节点使用，不在本机")
    free = find(port)
    if free == port:
        return ok(name, f"port {port} is free", f"端口 {port} 空闲", port=port)
    pid = holder(port)
    by, by_zh = (f" by pid {pid}", f"（进程 {pid}）") if pid else ("", "")
    values = {"port": port, "holder": pid, "next_free": free}
    where, where_zh = (" on every node", "在每个节点") if nodes.count > 1 else ("", "")
    instead = (f"export MASTER_PORT={free}{where}", f"{where_zh}执行 export MASTER_PORT={free}")
    if free is None:
        instead = (f"choose a MASTER_PORT far from {port}", f"请另选一个远离 {port} 的 MASTER_PORT")
    what = (f"port {port} is taken{by}", f"端口 {port} 已被占用{by_zh}")
    if nodes.port is not None or free is None:
        return fail(name, what, instead, **values)
    itself = (
        "; python -m finetune launch takes a free one by itself",
        "；python -m finetune launch 会自动选用空闲端口",
    )
    return warn(name, what, (instead[0] + itself[0], instead[1] + itself[1]), **values)
