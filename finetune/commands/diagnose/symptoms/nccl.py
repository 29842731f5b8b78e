"""NCCL and gloo: how processes on GPUs and CPUs reach one another."""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.base import Kind, Symptom
from finetune.runtime.language import N_

_INTERFACE_FIX = N_(
    "Name the interface shared by the nodes: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME (`ip -br addr` lists them; "
    "never lo or docker0 for several nodes), on the same network on all nodes, with all ports open between them. "
    "Without InfiniBand: NCCL_IB_DISABLE=1. NCCL_DEBUG=INFO shows what it chose."
)

_NCCL_FIX = N_(
    "Run once with NCCL_DEBUG=INFO: its last WARN line names the reason. Make sure that each rank has its own "
    "GPU (CUDA_VISIBLE_DEVICES, --nproc_per_node[[ {nproc}]]), that /dev/shm is large enough (--shm-size), "
    "that all nodes have the same torch, and that only one nvidia-nccl-cu* package is installed (`pip list | "
    "grep nccl`)."
)

# What processes see of one that listens where they cannot reach it.
_UNREACHED = ("rendezvous_timeout", "collective_timeout", "peer_died")

SYMPTOMS = (
    Symptom(
        "nccl_network_interface",
        (
            r"Bootstrap : no socket interface found",
            r"NET/IB ?: (?:Unable to open|No device|Async fatal event|Got async event ?: port error)"
            r"|wrong type \d+ != \d+",
            r"no NCCL_SOCKET_IFNAME interface found|No interface found in the same subnet",
            r"with family \d+ is neither AF_INET\(2\) nor AF_INET6\(10\)",
            r"NET/IB : Got completion from peer .* with (?:status=|error )(?P<status>\d+)",
            r"NCCL WARN .*ibv_\w+ failed|Call to ibv_\w+ failed",
            r"[Uu]nable to find (?:address|interface) for: ?\[?(?P<interface>[^\s\]]+)"
            r"|NET/\w+ : No (?:usable )?(?:interface|device) found",
            r"NCCL WARN .*(?:No interface|socket interface|IFNAME)|SOCKET_IFNAME .{0,40}not found"
            r"|getifaddrs .{0,20}fail",
            r"makeDeviceFor(?:Interface|Hostname)\(\): unsupported gloo device",
        ),
        N_("NCCL or gloo found no network interface that reaches the other nodes[[ ({interface})]]."),
        _INTERFACE_FIX,
        source="NCCL, gloo",
        explains=("nccl_version_or_system",),
    ),
    Symptom(
        "nccl_network_interface",
        (r"Unable to resolve hostname to a \(local\) address|Using the loopback address as fallback",),
        N_(
            "gloo found no address for the name of this machine and listens at the loopback address, where other "
            "machines cannot reach it."
        ),
        _INTERFACE_FIX,
        confidence=0.9,
        in_warnings=True,
        source="torch ProcessGroupGloo",
        needs=_UNREACHED,
        explains=_UNREACHED,
    ),
    Symptom(
        "nccl_network_interface",
        (
            r"Connect to (?P<peer>\S+) failed ?: (?:Software caused connection abort|Connection (?:refused"
            r"|timed out)|No route to "
            r"host|Network is unreachable)",
            r"Call to connect (?:to (?P<peer>\S+) )?(?:returned|failed|timeout).*(?:No route to host|timed out"
            r"|unreachable|refused)",
            r"connect\S* (?:to )?\[?(?P<peer>(?:\d{1,3}\.){3}\d+\S*?)\]?:? .{0,20}(?:Connection timed out"
            r"|Network is unreachable)",
        ),
        N_(
            "A process cannot connect to another one[[ at {peer}]]: there is no way through the network, because of "
            "a wrong "
            "interface, a firewall or a missing route, or the process there is gone."
        ),
        _INTERFACE_FIX,
        kind=Kind.TIMEOUT,
        confidence=0.8,
        source="NCCL, gloo, torch c10d, Linux",
        explains=("nccl_version_or_system", "rendezvous_timeout", "collective_timeout", "peer_died"),
    ),
    Symptom(
        "nccl_network_interface",
        (
            r"(?:(?P<peer>(?:\d{1,3}\.){3}\d+)\S*.{0,80})?(?:[Nn]o route to host|Host is unreachable"
            r"|Network is unreachable)",
            r"\bE(?:HOST|NET)UNREACH\b|errno: 11?3\b|\[Errno 113\]",
        ),
        N_(
            "There is no way through the network to another process[[ at {peer}]]: a firewall, a missing route, a "
            "wrong interface, or its machine is down."
        ),
        _INTERFACE_FIX,
        more_fix=N_(
            "From this machine `ping[[ {peer}]]`, `ip route get[[ {peer}]]` and `nc -vz[[ {peer}]] PORT` show where "
            "it ends."
        ),
        kind=Kind.VAGUE,
        confidence=0.9,
        source="Linux",
        explains=("nccl_version_or_system", "rendezvous_timeout", "collective_timeout"),
    ),
    Symptom(
        "nccl_version_or_system",
        (
            r"undefined symbol: nccl\w+",
            r"Duplicate GPU detected : rank (?P<rank>\d+)",
            r"NCCL (?:library )?version (?:mismatch|is incompatible)|NCCL version .* mismatch",
            r"Mismatched? (?:collective|in NCCL version)|(?:Detected|Found) mismatch(?:ed)? .{0,20}(?:collective|rank)",
            r"NCCL WARN .*(?:[Vv]ersion .{0,20}(?:mismatch|differ)|Cuda failure .*(?:not supported|invalid device))",
            r"invalid usage \(run with NCCL_|invalid argument \(run with NCCL_",
        ),
        N_("NCCL was used wrongly[[ on rank {rank}]]: two ranks on one GPU, different versions, or different calls."),
        _NCCL_FIX,
        confidence=0.78,
        source="NCCL, torch ProcessGroupNCCL",
    ),
    Symptom(
        "nccl_version_or_system",
        (
            r"ncclInvalidUsage|ncclInvalidArgument",
            r"\bncclSystemError\b|unhandled system error",
            r"\bncclInternalError\b|NCCL .{0,40}internal error",
            r"ncclUnhandledCudaError|unhandled cuda error",
            r"NCCL error in: |NCCL Error \d|DistBackendError: NCCL",
        ),
        N_("NCCL failed[[ on rank {rank}]]: a system call, its version, or how it is used (two ranks on one GPU)."),
        _NCCL_FIX,
        kind=Kind.VAGUE,
        confidence=0.7,
        source="NCCL, torch ProcessGroupNCCL",
    ),
    Symptom(
        "nccl_version_or_system",
        (r"NCCL WARN (?!.*(?:retry|[Dd]eprecat|Failed to open lib|No plugin|not supported, ))",),
        N_("NCCL warned[[ on rank {rank}]] of something that no rule knows."),
        _NCCL_FIX,
        kind=Kind.CASCADE,
        confidence=0.5,
        source="NCCL",
    ),
)
