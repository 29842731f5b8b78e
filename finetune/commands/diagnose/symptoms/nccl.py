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

_LINK_FIX = N_(
    "First see whether the process at the other end failed earlier: pass its log and `dmesg` too. If it did not, the "
    "network did: `ibstat` and `ibv_devinfo` show the ports, `dmesg -T | grep -i -E 'mlx5|link'` when one went down: "
    "check its cable, optics and switch port (RoCE: flow control, PFC) at both ends. NCCL_IB_TIMEOUT=22 and "
    "NCCL_IB_RETRY_CNT bridge short interruptions, and NCCL_IB_HCA leaves a bad port out. Then start the same command "
    "again: the run resumes from its last checkpoint."
)

_SAME_NCCL_FIX = N_(
    '`python -c "import torch; print(torch.__version__, torch.cuda.nccl.version())"` on every node must show the same: '
    "install the same torch everywhere (best one image), and take other NCCLs out of LD_LIBRARY_PATH and LD_PRELOAD."
)

# What processes see of one that listens where they cannot reach it.
_UNREACHED = ("rendezvous_timeout", "collective_timeout", "peer_died")

SYMPTOMS = (
    Symptom(
        "nccl_network_interface",
        (
            r"Bootstrap : no socket interface found",
            r"NET/IB ?: (?:Unable to open|No device)|wrong type \d+ != \d+",
            r"no NCCL_SOCKET_IFNAME interface found|No interface found in the same subnet",
            r"with family \d+ is neither AF_INET\(2\) nor AF_INET6\(10\)",
            r"NCCL WARN .*ibv_\w+ failed|Call to ibv_\w+ failed",
            r"[Uu]nable to find (?:address|interface) for: ?\[?(?P<interface>[^\s\]]+)"
            r"|NET/\w+ : No (?:usable )?(?:interface|device) found",
            r"NCCL WARN .*(?:No interface|socket interface|IFNAME)|SOCKET_IFNAME .{0,40}not found"
            r"|getifaddrs .{0,20}fail",
            r"makeDeviceFor(?:Interface|Hostname)\(\): unsupported gloo device",
        ),
        N_(
            "NCCL or gloo found no network interface that reaches the other nodes[[ ({interface})]]."
        ),
        _INTERFACE_FIX,
        source="NCCL, gloo",
        explains=("nccl_version_or_system",),
    ),
    Symptom(
        "nccl_network_interface",
        (
            r"NET/IB ?: .*Got completion (?:from peer (?P<peer>[^\s<]+)\S* )?with (?:status=|error )(?P<status>\d+)",
            r"NET/IB ?: (?P<port>\S+:\d+ )?(?:Async fatal event|Got async (?:error )?event ?: (?:port|GID|QP|device))",
            r"(?:IBV_WC|ibv_wc)_(?:RETRY_EXC|RNR_RETRY|WR_FLUSH)\w*|transport retry counter exceeded",
        ),
        N_(
            "InfiniBand or RoCE packets were not answered although they were sent again and again[[ (peer {peer})]][[, "
            "status {status}]]: the link, its port or the switch failed, or the process at the other end had ended "
            "before."
        ),
        _LINK_FIX,
        kind=Kind.PEER_LOST,
        reported_late=True,
        confidence=0.91,
        source="NCCL",
        explains=("peer_died",),
    ),
    Symptom(
        "nccl_network_interface",
        (
            r"ibv_modify_qp failed.*(?:GID|timed out|[Ii]nvalid|unreachable)|NCCL WARN .*(?:No|[Ii]nvalid"
            r"|[Ww]rong) GID",
        ),
        N_(
            "A RoCE connection could not be made: the address (GID) that NCCL took does not reach the peer, as a "
            "link-local fe80:: address does not."
        ),
        N_(
            "`show_gids` (or `ibv_devinfo -v`) lists the GIDs: set NCCL_IB_GID_INDEX to that of RoCE v2 with the "
            "node's IPv4 address (often 3), or unset it (from NCCL 2.21 it is found); the same on all nodes. "
            "NCCL_IB_HCA chooses the adapters, NCCL_IB_DISABLE=1 does without."
        ),
        confidence=0.93,
        source="NCCL, libibverbs",
        explains=("nccl_version_or_system", "peer_died"),
    ),
    Symptom(
        "nccl_network_interface",
        (
            r"mlx[45]_\w+\b.{0,60}\b[Ll]ink (?:is )?(?:DOWN|[Dd]own)\b|\bPort: \d+ Link DOWN",
            r"\b(?:ib\d+|bond\d+|eth\d+|en[ops]\w+|bnxt_en|ice|i40e)\b.{0,60}[Ll]ink (?:is )?(?:DOWN|[Dd]own)\b",
        ),
        N_("The link of a network adapter went down: connections through it break or time out."),
        _LINK_FIX,
        kind=Kind.MACHINE,
        reported_late=True,
        confidence=0.92,
        in_warnings=True,
        source="Linux kernel, mlx5",
        needs=(*_UNREACHED, "nccl_network_interface", "nccl_version_or_system"),
        explains=("nccl_version_or_system", "peer_died"),
    ),
    Symptom(
        "nccl_network_interface",
        (r"[Gg]loo\b.*(?:connect|remote=|to) ?\[?(?P<address>127\.0\.\d\.1)\b",),
        N_(
            "A process of another machine was told to connect to its own loopback[[ ({address})]]: the name of the "
            "machine that listens has that address in its /etc/hosts."
        ),
        _INTERFACE_FIX,
        confidence=0.92,
        source="gloo",
        explains=_UNREACHED,
    ),
    Symptom(
        "nccl_network_interface",
        (
            r"Unable to resolve hostname to a \(local\) address|Using the loopback address as fallback",
            r"(?:NCCL|GLOO)_SOCKET_IFNAME[^\w^]{1,3}(?:docker|virbr|veth)\w*",
        ),
        N_(
            "A process listens where other machines cannot reach it: at the loopback address, because the name of this "
            "machine has no address, or at an interface that ends at this machine."
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
            r"ibv_\w+ failed.{0,40}Cannot allocate memory|ibv_reg_mr\w*.{0,60}(?:ENOMEM|Cannot allocate memory)",
        ),
        N_(
            "The network adapter could not lock memory: the limit for locked memory (memlock) of these processes is "
            "too low."
        ),
        N_(
            "`ulimit -l` in the shell of the run must say unlimited: in containers --ulimit memlock=-1 (and --cap-add="
            "IPC_LOCK), in Slurm PropagateResourceLimitsExcept=MEMLOCK and LimitMEMLOCK=infinity for slurmd. "
            "NCCL_IB_DISABLE=1 does without InfiniBand."
        ),
        confidence=0.96,  # surer than a host that has no memory
        source="NCCL, libibverbs",
        explains=("nccl_version_or_system", "host_oom"),
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
        explains=(
            "nccl_version_or_system",
            "rendezvous_timeout",
            "collective_timeout",
            "peer_died",
        ),
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
            r"Message truncated : received \d+ bytes instead of|Mismatch(?:ed)? in NCCL version",
            r"NCCL (?:library )?version (?:mismatch|is incompatible)|NCCL version .* mismatch",
            r"NCCL WARN .*[Vv]ersion .{0,20}(?:mismatch|differ)",
        ),
        N_("The ranks have different versions of NCCL, which do not understand one another."),
        _SAME_NCCL_FIX,
        confidence=0.88,
        source="NCCL",
        explains=("peer_died",),
    ),
    Symptom(
        "nccl_version_or_system",
        (r"\bNCCL version (?P<version>\d+\.\d+\.\d+)\+cuda",),
        N_(
            "The logs show different versions of NCCL[[ ({version} is one of them)]], which do not understand one "
            "another."
        ),
        _SAME_NCCL_FIX,
        confidence=0.87,
        in_warnings=True,
        differs="version",
        needs=("nccl_version_or_system",),
        source="NCCL",
        explains=("peer_died",),
    ),
    Symptom(
        "nccl_version_or_system",
        (r"undefined symbol: (?P<symbol>nccl\w+)",),
        N_(
            "Another NCCL than the one that torch was built with is loaded first: it lacks what torch calls[[ "
            "({symbol})]]."
        ),
        N_(
            "Take its folder out of LD_LIBRARY_PATH and LD_PRELOAD (`ldd` on torch's libtorch_cuda.so shows which is "
            "found), and keep one nvidia-nccl-cu* package of the version that torch wants (`pip list | grep nccl`)."
        ),
        confidence=0.93,
        source="dynamic linker",
    ),
    Symptom(
        "nccl_version_or_system",
        (
            r"transport/nvls\.cc:\d+ NCCL WARN|Fabric State\s*:\s*(?!Completed|N/A|Not Supported)(?=\S)",
        ),
        N_(
            "NCCL could not set up NVLink SHARP (NVLS): the NVSwitch fabric of this machine is not ready."
        ),
        N_(
            "`nvidia-smi -q | grep -A2 Fabric` must say Completed: restart nvidia-fabricmanager (of the driver's "
            "version) and wait. Until then NCCL_NVLS_ENABLE=0."
        ),
        confidence=0.9,
        source="NCCL",
    ),
    Symptom(
        "nccl_version_or_system",
        (
            r"Mismatched? collective|(?:Detected|Found) mismatch(?:ed)? .{0,20}(?:collective|rank)",
            r"CollectiveFingerPrint\(|[Cc]ollectives? (?:differ|are different|do not match)",
            r"DDP expects same model across all ranks|not to match (?:sizes|strides) of the same param in process",
            r"Input tensor at index \d+ has invalid shape .*expected|[Tt]ensor list must have the same (?:size|shape)",
        ),
        N_(
            "The ranks called different collectives, or the same one with different sizes or types: they did not take "
            "the same path through the program, or hold tensors of different shapes."
        ),
        N_(
            "Compare the two calls in the evidence. Bring tensors to one shape before they are gathered "
            "(accelerator.pad_across_processes, or pad to the longest over all ranks), give every rank equally many "
            "batches (drop the last one), and make no collective inside `if rank == 0`. TORCH_DISTRIBUTED_DEBUG=DETAIL "
            "names the first call that differs."
        ),
        confidence=0.85,
        source="torch ProcessGroupWrapper",
        explains=("collective_timeout",),
    ),
    Symptom(
        "nccl_version_or_system",
        (
            r"undefined symbol: nccl\w+",
            r"Duplicate GPU detected : rank (?P<rank>\d+)",
            r"NCCL WARN .*Cuda failure .*(?:not supported|invalid device)",
            r"invalid usage \(run with NCCL_|invalid argument \(run with NCCL_",
        ),
        N_(
            "NCCL was used wrongly[[ on rank {rank}]]: two ranks on one GPU, different versions, or different calls."
        ),
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
        N_(
            "NCCL failed[[ on rank {rank}]]: a system call, its version, or how it is used (two ranks on one GPU)."
        ),
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
