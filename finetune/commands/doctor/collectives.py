"""HCCL, NCCL and gloo: variables that contradict one another, or name what this machine does not
have.
"""

from __future__ import annotations

from collections.abc import Iterable

from finetune.commands.doctor.check import Check, fail, warn
from finetune.commands.doctor.facts import Facts
from finetune.commands.doctor.network import is_loopback
from finetune.runtime.language import _
from finetune.runtime.ports import DEFAULT_PORT

# HCCL takes this many host ports from HCCL_IF_BASE_PORT on.
HCCL_PORTS = 32
# HCCL rounds HCCL_EXEC_TIMEOUT to multiples of this.
HCCL_EXEC_GRAIN_SECONDS = 68


# ---------------------------------------------------------------- interfaces and addresses


def interface_names(facts: Facts) -> Check | None:
    """*_SOCKET_IFNAME that name no interface that is up, or loopback for several nodes."""
    name = "socket_interface"
    chosen: dict[str, set[str]] = {}
    own = {"npu": ("HCCL_SOCKET_IFNAME",), "cuda": ("NCCL_SOCKET_IFNAME",)}.get(
        facts.device_type, ()
    )
    for variable in (*own, "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        text, setting = facts.get(variable), facts.shown(variable)
        if not text or not facts.interfaces:
            continue
        matched = matching_interfaces(
            text, facts.interfaces, exact=variable.startswith(("GLOO", "TP"))
        )
        if not matched:
            what = _("{setting} names no interface that is up; there are {interfaces}")
            what = what.format(setting=setting, interfaces=", ".join(facts.interfaces))
            return fail(
                name,
                what,
                _("export {variable}=<one of them>, or unset it").format(variable=variable),
            )
        addresses = [address for interface in matched for address in facts.interfaces[interface]]
        if facts.nodes > 1 and addresses and all(map(is_loopback, addresses)):
            what = _("{setting} is loopback, and the run has {nodes} nodes").format(
                setting=setting, nodes=facts.nodes
            )
            return fail(
                name,
                what,
                _("export {variable}=<the interface between the nodes>").format(variable=variable),
            )
        chosen[variable] = matched
    if len(chosen) > 1 and not set.intersection(*chosen.values()):
        what = _("different networks: {settings}").format(
            settings=", ".join(map(facts.shown, chosen))
        )
        return warn(name, what, _("name one interface in all of them"))
    return None


def matching_interfaces(text: str, names: Iterable[str], *, exact: bool) -> set[str]:
    """Interfaces that a *_SOCKET_IFNAME selects.

    As NCCL and HCCL read it: prefixes by default, `=` for exact names, `^` for all others.
    """
    exclude, text = text.startswith("^"), text.lstrip("^")
    exact, text = exact or text.startswith("="), text.lstrip("=")
    wanted = [part.strip() for part in text.split(",") if part.strip()]
    matched = {
        name
        for name in names
        if any(name == part if exact else name.startswith(part) for part in wanted)
    }
    return set(names) - matched if exclude else matched


def hccl_address(facts: Facts) -> Check | None:
    """HCCL_IF_IP that is not this machine's, is loopback for several nodes, or contradicts
    HCCL_SOCKET_IFNAME.
    """
    name, address = "hccl_if_ip", facts.get("HCCL_IF_IP")
    if not address or not facts.interfaces:
        return None
    owners = [
        interface for interface, addresses in facts.interfaces.items() if address in addresses
    ]
    if not owners:
        what = _("HCCL_IF_IP={address} is no address of this machine").format(address=address)
        fix = _("export HCCL_IF_IP as this node's own address (each node has another), or unset it")
        return fail(name, what, fix)
    if facts.nodes > 1 and is_loopback(address):
        what = _("HCCL_IF_IP={address}, and the run has {nodes} nodes").format(
            address=address, nodes=facts.nodes
        )
        return fail(name, what, _("unset HCCL_IF_IP, or set each node's own address"))
    named = facts.get("HCCL_SOCKET_IFNAME")
    if named and not set(owners) & matching_interfaces(named, facts.interfaces, exact=False):
        what = _("HCCL_IF_IP={address} is on {owner}, HCCL_SOCKET_IFNAME={named}: the address wins")
        return warn(
            name,
            what.format(address=address, owner=owners[0], named=named),
            _("keep one of the two"),
        )
    return None


# ---------------------------------------------------------------- ports and timeouts


def hccl_base_port(facts: Facts) -> Check | None:
    """The ports that HCCL takes on the host against MASTER_PORT."""
    name, text, base = (
        "hccl_if_base_port",
        facts.get("HCCL_IF_BASE_PORT"),
        facts.whole("HCCL_IF_BASE_PORT"),
    )
    if not text:
        return None
    if base is None or not 1024 <= base <= 65520:
        what = _("HCCL_IF_BASE_PORT={text} is not a port from 1024 to 65520").format(text=text)
        return fail(name, what, _("export HCCL_IF_BASE_PORT=60000, or unset it"))
    last, master = base + HCCL_PORTS - 1, facts.whole("MASTER_PORT") or DEFAULT_PORT
    if not base <= master <= last:
        return None
    what = _(
        "HCCL takes ports {base} to {last} (HCCL_IF_BASE_PORT), and MASTER_PORT {master} is among"
        " them"
    )
    other = DEFAULT_PORT if not base <= DEFAULT_PORT <= last else last + 1
    return fail(
        name, what.format(base=base, last=last, master=master), f"export MASTER_PORT={other}"
    )


def hccl_ephemeral_ports(facts: Facts) -> Check | None:
    """Ports of HCCL that the kernel may give to any outgoing connection."""
    if facts.ephemeral_ports is None or facts.nodes < 2:
        return None
    base, (low, high) = facts.whole("HCCL_IF_BASE_PORT") or 60000, facts.ephemeral_ports
    last = base + HCCL_PORTS - 1
    if base > high or last < low:
        return None
    what = _(
        "HCCL's ports {base} to {last} are among those that the kernel gives away ({low} to {high})"
    )
    fix = _("as root on every node: sysctl -w net.ipv4.ip_local_reserved_ports={base}-{last}")
    return warn(
        "hccl_ephemeral_ports",
        what.format(base=base, last=last, low=low, high=high),
        fix.format(base=base, last=last),
    )


def hccl_timeouts(facts: Facts) -> Check | None:
    """HCCL's timeouts against the process group's: the one that ends first should be the same on
    both sides.
    """
    name, limit = "hccl_timeouts", facts.timeout_seconds
    fix = _("unset both; they are set to --timeout-seconds ({limit})").format(limit=limit)
    for variable in ("HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT"):
        setting, seconds = facts.shown(variable), facts.whole(variable)
        if facts.get(variable) and (seconds is None or seconds < 0):
            return fail(
                name, _("{setting} is not a number of seconds").format(setting=setting), fix
            )
        what = ""
        if seconds is not None and seconds > limit + HCCL_EXEC_GRAIN_SECONDS:
            what = _(
                "{setting} is above the process group's timeout of {limit} s: the group gives up"
                " first, without HCCL's message"
            )
        elif (
            variable == "HCCL_EXEC_TIMEOUT"
            and seconds
            and seconds < limit - HCCL_EXEC_GRAIN_SECONDS
        ):
            what = _(
                "{setting} is below the process group's timeout of {limit} s: a slow rank ends the"
                " run earlier than asked"
            )
        if what:
            return warn(name, what.format(setting=setting, limit=limit), fix)
    return None


def hccl_whitelist(facts: Facts) -> Check | None:
    """The whitelist switched on without a list."""
    if facts.get("HCCL_WHITELIST_DISABLE") != "0" or facts.get("HCCL_WHITELIST_FILE"):
        return None
    return fail(
        "hccl_whitelist",
        _("HCCL_WHITELIST_DISABLE=0 asks for a whitelist, and HCCL_WHITELIST_FILE is not set"),
        _("unset HCCL_WHITELIST_DISABLE, or name the file"),
    )


def nccl_paths(facts: Facts) -> Check | None:
    """NCCL told to use a path and not to use it."""
    contradictions = (
        ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"),
        ("NCCL_IB_DISABLE", "NCCL_IB_HCA"),
        ("NCCL_IB_DISABLE", "NCCL_IB_GID_INDEX"),
    )
    for switch, other in contradictions:
        if facts.on(switch) and facts.get(other):
            what = _("{switch}=1 turns off what {setting} sets").format(
                switch=switch, setting=facts.shown(other)
            )
            fix = _("keep one: unset {switch}, or unset {other}").format(switch=switch, other=other)
            return warn("nccl_paths", what, fix)
    if facts.on("NCCL_IB_DISABLE") and facts.get("NCCL_NET").upper() == "IB":
        what = _("NCCL_NET=IB asks for what NCCL_IB_DISABLE=1 forbids: NCCL finds no network")
        return fail("nccl_paths", what, _("unset one of them"))
    if facts.on("NCCL_P2P_DISABLE") and facts.on("NCCL_SHM_DISABLE"):
        what = _(
            "NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1: GPUs of one machine talk through the"
            " network"
        )
        return warn("nccl_paths", what, "unset NCCL_SHM_DISABLE")
    return None
