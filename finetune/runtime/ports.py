"""The port of a launch's rendezvous: bound and held until the process that uses it has it.

If a port is checked first and bound later, another run can take it in between. Here the listening
socket itself is handed over, and the launch keeps holding it from the first attempt to the last.
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
# Connections that wait while node 0 loads torch: the other nodes connect meanwhile, and 64 of them
# would fill Python's default of 128. net.core.somaxconn limits this further.
BACKLOG = 4096
# Errors of binding after which the next port may work: taken, or below 1024 and not for this user.
_NOT_THIS_ONE = (errno.EADDRINUSE, errno.EACCES)


@dataclass
class HeldPort:
    """A listening socket from which no process accepts yet: connections wait in its queue."""

    listener: socket.socket
    number: int
    taken: tuple[int, ...] = ()  # earlier candidates that could not be bound
    address: str = ""  # the only address of this machine at which it answers; empty for all

    @property
    def reached_at(self) -> str:
        """Return an address at which this machine itself reaches it."""
        return self.address or LOOPBACK

    def close(self) -> None:
        self.listener.close()


def candidates(first: int) -> tuple[int, ...]:
    """Return the ports to try, in order."""
    return tuple(range(first, min(first + TRIES, 1 << 16)))


def own_addresses(host: str) -> list[str]:
    """Return the addresses of a host name or address that are this machine's."""
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
    """Return the address to listen at so that nodes which know this machine as `host` reach it;
    empty for all addresses.

    The result is empty if the name does not identify one address. It may not be this machine's own
    name (another route leads here), or may have several addresses. Many systems also resolve their
    own name to loopback.
    """
    own = own_addresses(host)
    if len(own) != 1:
        return ""
    is_loopback = ipaddress.ip_address(own[0].partition("%")[0]).is_loopback
    return "" if is_loopback and own[0] != host else own[0]


def hold_port(first: int | None, *, address: str) -> HeldPort:
    """Bind the first free port of `candidates(first)` and listen on it.

    Args:
        first: the requested port; None for any that is free.
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
    return socket.create_server(("", port), backlog=BACKLOG)  # IPv6 is switched off


def free_port() -> int:
    """Return a TCP port that is free now on the loopback interface."""
    with socket.create_server((LOOPBACK, 0)) as probe:
        return probe.getsockname()[1]


def listens(host: str, port: int, timeout_seconds: float) -> bool:
    """Return whether something accepts connections there."""
    try:
        socket.create_connection((host, port), timeout_seconds).close()
    except OSError:
        return False
    return True
