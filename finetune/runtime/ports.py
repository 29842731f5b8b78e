"""The port of a launch's rendezvous: bound and held until the process that uses it has it.

Asking whether a port is free and binding it later leaves a gap in which another run takes it. Here
the listening socket itself is handed over, and the launch keeps its own hold on it from the first
attempt to the last.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass
from typing import Any

from finetune.errors import StateError

DEFAULT_PORT = 29500
LOOPBACK = "127.0.0.1"
TRIES = 10
# Connections that wait while node 0 loads torch: the other nodes knock meanwhile, and Python's own
# 128 would be full with 64 of them. The system takes less where net.core.somaxconn says so.
BACKLOG = 4096
# What binding says where a port cannot be had but the next one may: taken, or below 1024 and not
# for this user.
_NOT_THIS_ONE = (errno.EADDRINUSE, errno.EACCES)


@dataclass
class HeldPort:
    """A listening socket that nobody accepts from yet: what connects waits in its queue."""

    listener: socket.socket
    number: int
    taken: tuple[int, ...] = ()  # the ports before it that could not be had
    address: str = ""  # of this machine, at which alone it answers; empty for all

    @property
    def reached_at(self) -> str:
        """An address at which this machine itself reaches it."""
        return self.address or LOOPBACK

    def close(self) -> None:
        self.listener.close()


def candidates(first: int) -> tuple[int, ...]:
    """The ports that are tried, in order: on every node the same, so that all find the one that was
    free.
    """
    return tuple(range(first, min(first + TRIES, 1 << 16)))


def own_addresses(host: str) -> list[str]:
    """The addresses that a host name or address stands for here, as far as they are this
    machine's.
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [
        str(target[0])
        for family, _kind, _protocol, _name, target in found
        if _binds(family, target)
    ]


def _binds(family: int, target: tuple[Any, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(target)
    except OSError:
        return False
    return True


def listening_address(host: str) -> str:
    """Where to listen so that nodes which know this machine as `host` reach it; empty for all
    addresses.

    All where the name does not say which one they will come to: it is not this machine's own
    (another route leads here), stands for several, or is a name that means the loopback here, as
    many systems have it for their own name.
    """
    own = own_addresses(host)
    if len(own) != 1:
        return ""
    literal = own[0] == host
    return (
        own[0] if literal or not ipaddress.ip_address(own[0].partition("%")[0]).is_loopback else ""
    )


def hold_port(first: int | None, *, address: str) -> HeldPort:
    """Bind the first free port of `candidates(first)` and listen on it.

    Args:
        first: the wanted port; None for any that is free.
        address: of this machine; empty for all.

    Raises:
        StateError: none of the ports is free.
    """
    ports = (0,) if first is None else candidates(first)
    taken = []
    for port in ports:
        try:
            listener = _listen(port, address)
        except OSError as error:
            if error.errno not in _NOT_THIS_ONE:
                raise
            taken.append(port)
        else:
            return HeldPort(listener, listener.getsockname()[1], tuple(taken), address)
    raise StateError(
        f"none of the ports {ports[0]} to {ports[-1]} is free on this machine",
        where="MASTER_PORT or --master-port",
        fix=(
            "give another --master-port, the same on all nodes, or end the runs that hold these "
            f"(ss -ltnp 'sport >= :{ports[0]} and sport <= :{ports[-1]}')"
        ),
    )


def _listen(port: int, address: str) -> socket.socket:
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=BACKLOG)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG
            )
        except OSError as error:
            if error.errno in _NOT_THIS_ONE:
                raise
    return socket.create_server(("", port), backlog=BACKLOG)  # the system has IPv6 switched off


def free_port() -> int:
    """A TCP port that is free now on the loopback interface."""
    with socket.create_server((LOOPBACK, 0)) as probe:
        return probe.getsockname()[1]


def listens(host: str, port: int, timeout_seconds: float) -> bool:
    """Whether something accepts connections there."""
    try:
        socket.create_connection((host, port), timeout_seconds).close()
    except OSError:
        return False
    return True
