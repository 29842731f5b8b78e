"""HCCL, NCCL and gloo: variables that contradict one another, or name what this machine does not have."""

from __future__ import annotations

from collections.abc import Iterable

from finetune.commands.doctor.check import Check, fail, warn
from finetune.commands.doctor.facts import Facts
from finetune.commands.doctor.network import is_loopback
from finetune.runtime.ports import DEFAULT_PORT

# HCCL takes this many host ports from HCCL_IF_BASE_PORT on.
HCCL_PORTS = 32
# HCCL rounds HCCL_EXEC_TIMEOUT to multiples of this.
HCCL_EXEC_GRAIN_SECONDS = 68


# ---------------------------------------------------------------- interfaces and addresses


def interface_names(facts: Facts) -> Check | None:
    """*_SOCKET_IFNAME that name no interface that is up, or loopback for several nodes."""
    chosen: dict[str, set[str]] = {}
    own = {"npu": ("HCCL_SOCKET_IFNAME",), "cuda": ("NCCL_SOCKET_IFNAME",)}.get(facts.device_type, ())
    for variable in (*own, "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        text = facts.get(variable)
        if not text or not facts.interfaces:
            continue
        matched = matching_interfaces(text, facts.interfaces, exact=variable.startswith(("GLOO", "TP")))
        if not matched:
            return fail(
                "socket_interface",
                (
                    f"{variable}={text} names no interface that is up; there are {', '.join(facts.interfaces)}",
                    f"{variable}={text} 不对应任何已启用网卡；现有 {', '.join(facts.interfaces)}",
                ),
                (f"export {variable}=<one of them>, or unset it", f"export {variable}=<其中之一>，或 unset"),
            )
        addresses = [address for name in matched for address in facts.interfaces[name]]
        if facts.nodes > 1 and addresses and all(map(is_loopback, addresses)):
            return fail(
                "socket_interface",
                (
                    f"{variable}={text} is loopback, and the run has {facts.nodes} nodes",
                    f"{variable}={text} 是回环网卡，而训练有 {facts.nodes} 个节点",
                ),
                (f"export {variable}=<the interface between the nodes>", f"export {variable}=<节点间网卡>"),
            )
        chosen[variable] = matched
    if len(chosen) > 1 and not set.intersection(*chosen.values()):
        said = ", ".join(f"{name}={facts.get(name)}" for name in chosen)
        return warn(
            "socket_interface",
            (f"different networks: {said}", f"使用了不同的网络：{said}"),
            ("name one interface in all of them", "请统一为同一网卡"),
        )
    return None


def matching_interfaces(text: str, names: Iterable[str], *, exact: bool) -> set[str]:
    """Interfaces that a *_SOCKET_IFNAME selects: prefixes by default, `=` exact names, `^` all others (NCCL and "
    "HCCL)."""
    exclude, text = text.startswith("^"), text.lstrip("^")
    exact, text = exact or text.startswith("="), text.lstrip("=")
    wanted = [part.strip() for part in text.split(",") if part.strip()]
    matched = {name for name in names if any(name == part if exact else name.startswith(part) for part in wanted)}
    return set(names) - matched if exclude else matched


def hccl_address(facts: Facts) -> Check | None:
    """HCCL_IF_IP that is not this machine's, is loopback for several nodes, or contradicts HCCL_SOCKET_IFNAME."""
    address = facts.get("HCCL_IF_IP")
    if not address or not facts.interfaces:
        return None
    owners = [name for name, addresses in facts.interfaces.items() if address in addresses]
    name = "hccl_if_ip"
    if not owners:
        return fail(
            name,
            (f"HCCL_IF_IP={address} is no address of this machine", f"HCCL_IF_IP={address} 不是本机地址"),
            (
                "export HCCL_IF_IP as this node's own address (each node has another), or unset it",
                "将 HCCL_IF_IP 设为本节点自己的地址（每个节点不同），或 unset",
            ),
        )
    if facts.nodes > 1 and is_loopback(address):
        return fail(
            name,
            (
                f"HCCL_IF_IP={address}, and the run has {facts.nodes} nodes",
                f"HCCL_IF_IP={address}，而训练有 {facts.nodes} 个节点",
            ),
            ("unset HCCL_IF_IP, or set each node's own address", "unset HCCL_IF_IP，或设为各节点自己的地址"),
        )
    named = facts.get("HCCL_SOCKET_IFNAME")
    if named and not set(owners) & matching_interfaces(named, facts.interfaces, exact=False):
        return warn(
            name,
            (
                f"HCCL_IF_IP={address} is on {owners[0]}, HCCL_SOCKET_IFNAME={named}: the address wins",
                f"HCCL_IF_IP={address} 属于 {owners[0]}，而 HCCL_SOCKET_IFNAME={named}：以地址为准",
            ),
            ("keep one of the two", "二者保留其一"),
        )
    return None


# ---------------------------------------------------------------- ports and timeouts


def hccl_base_port(facts: Facts) -> Check | None:
    """The ports that HCCL takes on the host against MASTER_PORT, and against the kernel's own."""
    text, base = facts.get("HCCL_IF_BASE_PORT"), facts.whole("HCCL_IF_BASE_PORT")
    name = "hccl_if_base_port"
    if not text:
        return None
    if base is None or not 1024 <= base <= 65520:
        return fail(
            name,
            (
                f"HCCL_IF_BASE_PORT={text} is not a port from 1024 to 65520",
                f"HCCL_IF_BASE_PORT={text} 不是 1024 到 65520 的端口",
            ),
            ("export HCCL_IF_BASE_PORT=60000, or unset it", "export HCCL_IF_BASE_PORT=60000，或 unset"),
        )
    last, master = base + HCCL_PORTS - 1, facts.whole("MASTER_PORT") or DEFAULT_PORT
    if base <= master <= last:
        return fail(
            name,
            (
                f"HCCL takes ports {base} to {last} (HCCL_IF_BASE_PORT), and MASTER_PORT {master} is among them",
                f"HCCL 占用端口 {base} 至 {last}（HCCL_IF_BASE_PORT），MASTER_PORT {master} 在其中",
            ),
            (
                f"export MASTER_PORT={DEFAULT_PORT if not base <= DEFAULT_PORT <= last else last + 1}",
                f"export MASTER_PORT={DEFAULT_PORT if not base <= DEFAULT_PORT <= last else last + 1}",
            ),
        )
    return None


def hccl_ephemeral_ports(facts: Facts) -> Check | None:
    """Ports of HCCL that the kernel may give to any outgoing connection."""
    if facts.ephemeral_ports is None or facts.nodes < 2:
        return None
    base, (low, high) = facts.whole("HCCL_IF_BASE_PORT") or 60000, facts.ephemeral_ports
    if base > high or base + HCCL_PORTS - 1 < low:
        return None
    last = base + HCCL_PORTS - 1
    return warn(
        "hccl_ephemeral_ports",
        (
            f"HCCL's ports {base} to {last} are among those that the kernel gives away ({low} to {high})",
            f"HCCL 使用的端口 {base} 至 {last} 在内核临时端口范围内（{low} 至 {high}）",
        ),
        (
            f"as root on every node: sysctl -w net.ipv4.ip_local_reserved_ports={base}-{last}",
            f"在每个节点以 root 执行：sysctl -w net.ipv4.ip_local_reserved_ports={base}-{last}",
        ),
    )


def hccl_timeouts(facts: Facts) -> Check | None:
    """HCCL's timeouts against the process group's: the one that ends first should be the same on both sides."""
    limit = facts.timeout_seconds
    fix = (
        f"unset both; they are set to --timeout-seconds ({limit})",
        f"unset 二者；会自动设为 --timeout-seconds（{limit}）",
    )
    for variable in ("HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT"):
        text, seconds = facts.get(variable), facts.whole(variable)
        if text and (seconds is None or seconds < 0):
            return fail(
                "hccl_timeouts",
                (f"{variable}={text} is not a number of seconds", f"{variable}={text} 不是秒数"),
                fix,
            )
        if seconds is not None and seconds > limit + HCCL_EXEC_GRAIN_SECONDS:
            return warn(
                "hccl_timeouts",
                (
                    f"{variable}={seconds} is above the process group's timeout of {limit} s: the group gives up "
                    "first, without HCCL's words",
                    f"{variable}={seconds} 大于进程组超时 {limit} 秒：进程组会先放弃，看不到 HCCL 的说明",
                ),
                fix,
            )
        if variable == "HCCL_EXEC_TIMEOUT" and seconds and seconds < limit - HCCL_EXEC_GRAIN_SECONDS:
            return warn(
                "hccl_timeouts",
                (
                    f"{variable}={seconds} is below the process group's timeout of {limit} s: a slow rank ends the "
                    "run earlier than asked",
                    f"{variable}={seconds} 小于进程组超时 {limit} 秒：慢进程会比预期更早终止训练",
                ),
                fix,
            )
    return None


def hccl_whitelist(facts: Facts) -> Check | None:
    """The whitelist switched on without a list."""
    if facts.get("HCCL_WHITELIST_DISABLE") == "0" and not facts.get("HCCL_WHITELIST_FILE"):
        return fail(
            "hccl_whitelist",
            (
                "HCCL_WHITELIST_DISABLE=0 asks for a whitelist, and HCCL_WHITELIST_FILE is not set",
                "HCCL_WHITELIST_DISABLE=0 启用了白名单，但未设置 HCCL_WHITELIST_FILE",
            ),
            ("unset HCCL_WHITELIST_DISABLE, or name the file", "unset HCCL_WHITELIST_DISABLE，或指定文件"),
        )
    return None


def nccl_paths(facts: Facts) -> Check | None:
    """NCCL told to use a path and not to use it."""
    contradictions = (
        ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"),
        ("NCCL_IB_DISABLE", "NCCL_IB_HCA"),
        ("NCCL_IB_DISABLE", "NCCL_IB_GID_INDEX"),
    )
    for switch, setting in contradictions:
        if facts.on(switch) and facts.get(setting):
            return warn(
                "nccl_paths",
                (
                    f"{switch}=1 turns off what {setting}={facts.get(setting)} sets",
                    f"{switch}=1 关闭了 {setting}={facts.get(setting)} 所设置的功能",
                ),
                (f"keep one: unset {switch}, or unset {setting}", f"保留其一：unset {switch} 或 unset {setting}"),
            )
    if facts.on("NCCL_IB_DISABLE") and facts.get("NCCL_NET").upper() == "IB":
        return fail(
            "nccl_paths",
            (
                "NCCL_NET=IB asks for what NCCL_IB_DISABLE=1 forbids: NCCL finds no network",
                "NCCL_NET=IB 要求使用 NCCL_IB_DISABLE=1 所禁用的网络：NCCL 找不到网络",
            ),
            ("unset one of them", "unset 其中之一"),
        )
    if facts.on("NCCL_P2P_DISABLE") and facts.on("NCCL_SHM_DISABLE"):
        return warn(
            "nccl_paths",
            (
                "NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1: GPUs of one machine talk through the network",
                "同时设置 NCCL_P2P_DISABLE=1 与 NCCL_SHM_DISABLE=1：同机 GPU 之间将走网络",
            ),
            ("unset NCCL_SHM_DISABLE", "unset NCCL_SHM_DISABLE"),
        )
    return None
