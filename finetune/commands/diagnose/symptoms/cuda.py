"""NVIDIA GPUs: driver, hardware faults, NCCL."""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.base import Kind, Symptom
from finetune.runtime.language import N_

_INTERFACE_FIX = N_(
    "Name the interface shared by the nodes: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME (`ip -br addr` lists them; "
    "never lo or docker0 for several nodes), on the same network on all nodes, with all ports open between them. "
    "Without InfiniBand: NCCL_IB_DISABLE=1. NCCL_DEBUG=INFO shows what it chose."
)

SYMPTOMS = (
    Symptom(
        "nccl_network_interface",
        (
            r"Bootstrap : no socket interface found",
            r"no NCCL_SOCKET_IFNAME interface found|No interface found in the same subnet",
            r"with family \d+ is neither AF_INET\(2\) nor AF_INET6\(10\)",
            r"NET/IB : Got completion from peer .* with (?:status=|error )(?P<status>\d+)",
            r"NCCL WARN .*ibv_\w+ failed|Call to ibv_\w+ failed",
            r"[Uu]nable to find (?:address|interface) for: ?\[?(?P<interface>[^\s\]]+)",
            r"makeDeviceFor(?:Interface|Hostname)\(\): unsupported gloo device",
        ),
        N_("NCCL or gloo found no network interface that reaches the other nodes[[ ({interface})]]."),
        _INTERFACE_FIX,
        source="NCCL, gloo",
        explains=("nccl_version_or_system",),
    ),
    Symptom(
        "nccl_network_interface",
        (
            r"Connect to (?P<peer>\S+) failed : (?:Connection (?:refused|timed out)|No route to host|Network is "
            r"unreachable)",
            r"Call to connect (?:returned|failed).*(?:No route to host|timed out|unreachable)",
        ),
        N_("NCCL cannot connect[[ to {peer}]]: wrong interface, firewall, or the process there is gone."),
        _INTERFACE_FIX,
        kind=Kind.TIMEOUT,
        confidence=0.8,
        source="NCCL",
        explains=("nccl_version_or_system",),
    ),
    Symptom(
        "nccl_version_or_system",
        (
            r"undefined symbol: nccl\w+",
            r"Duplicate GPU detected : rank (?P<rank>\d+)",
            r"ncclInvalidUsage",
            r"NCCL (?:library )?version (?:mismatch|is incompatible)|NCCL version .* mismatch",
            r"\bncclSystemError\b|unhandled system error \(run with NCCL_DEBUG=INFO",
            r"\bncclInternalError\b",
            r"ncclUnhandledCudaError|unhandled cuda error \(run with NCCL_DEBUG=INFO",
            r"Mismatched collective|Mismatch in NCCL version",
        ),
        N_("NCCL failed[[ on rank {rank}]]: a system call, its version, or how it is used (two ranks on one GPU)."),
        N_(
            "Run once with NCCL_DEBUG=INFO: its last WARN line names the reason. Make sure that each rank has its own "
            "GPU (CUDA_VISIBLE_DEVICES, --nproc_per_node[[ {nproc}]]), that /dev/shm is large enough (--shm-size), "
            "that all nodes have the same torch, and that only one nvidia-nccl-cu* package is installed (`pip list | "
            "grep nccl`)."
        ),
        confidence=0.75,
        source="NCCL, torch ProcessGroupNCCL",
    ),
    Symptom(
        "cuda_driver_mismatch",
        (
            r"The NVIDIA driver on your system is too old \(found version (?P<found>\d+)\)",
            r"CUDA driver version is insufficient for CUDA runtime version",
            r"[Ff]ailed to initialize NVML: Driver/library version mismatch",
            r"Found no NVIDIA driver on your system",
            r"Unexpected error from cudaGetDeviceCount|unsupported display driver / cuda driver combination",
            r"no kernel image is available for execution on the device",
            r"forward compatibility was attempted on non supported HW",
            r"system not yet initialized|CUDA unknown error - this may be due to an incorrectly set up environment",
            r"Torch not compiled with CUDA enabled",
            r"libcud(?:a|art|nn)\w*\.so\S*: cannot open shared object file",
            r"device type '?cuda'? is not available",
        ),
        N_(
            "The NVIDIA driver and this torch do not match[[ (driver {found})]], the driver is missing, or torch was "
            "built without CUDA or for other GPUs."
        ),
        N_(
            'Compare `nvidia-smi` (driver and the highest CUDA it supports) with `python -c "import torch; '
            'print(torch.version.cuda)"`; install the torch build for that CUDA, or a newer driver. After a driver '
            "upgrade, reboot or reload the modules. Start containers with --gpus all."
        ),
        confidence=0.92,
        source="torch, CUDA runtime, NVML",
    ),
    Symptom(
        "illegal_memory_or_ecc",
        (
            r"an illegal memory access was encountered",
            r"uncorrectable (?:NVLink )?(?:ECC )?error|[Dd]ouble[- ][Bb]it ECC",
            r"NVRM: Xid \([^)]*\): (?P<xid>\d+)",
            r"GPU has fallen off the bus|GPU is lost",
            r"CUDA error: (?:unspecified launch failure|misaligned address|hardware stack error)",
            r"HBM MULTI BIT ECC ERROR|\bUCE ERROR\b|SUSPECT (?:DEVICE )?MEM ERROR",
            r"HBM .*multi-bit ECC|error code(?: is|:) ?50705[34]\b|\(?EI0012\)?:",
        ),
        N_(
            "A device accessed memory that does not belong to it, or its memory or link is faulty[[ (Xid {xid})]][[ on "
            "rank {rank}]]."
        ),
        N_(
            "Look at `dmesg -T | grep -i xid` and `nvidia-smi -q -d ECC` (on NPUs `npu-smi info -t ecc`): with Xid 48, "
            "63, 74, 79, 94, 95 or ECC counts the device is faulty: take it out of CUDA_VISIBLE_DEVICES and have it "
            "reset. Otherwise run once with CUDA_LAUNCH_BLOCKING=1, which shows the operator, and look for ids or "
            "shapes out of range."
        ),
        confidence=0.88,
        source="CUDA runtime, NVIDIA kernel driver, torch_npu",
        explains=("nccl_version_or_system",),
    ),
    Symptom(
        "illegal_memory_or_ecc",
        (r"CUDA error: device-side assert triggered",),
        N_("A CUDA kernel failed an assertion: nearly always an id or index out of range."),
        N_(
            "Run once with CUDA_LAUNCH_BLOCKING=1 to see the operator. If it is an embedding, the tokenizer has more "
            "tokens than the model; if it is the loss, a label is out of range."
        ),
        confidence=0.6,
        source="CUDA runtime",
    ),
)
