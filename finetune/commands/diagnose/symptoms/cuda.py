"""NVIDIA GPUs: driver, hardware faults, NCCL."""

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
_CUDA_BUILD_FIX = N_(
    'Compare `nvidia-smi` (driver and the highest CUDA it supports) with `python -c "import torch; '
    'print(torch.version.cuda)"`; install the torch build for that CUDA, or a newer driver. After a driver '
    "upgrade, reboot or reload the modules. Start containers with --gpus all."
)
_DEVICE_FIX = N_(
    "Look at `dmesg -T | grep -i xid` and `nvidia-smi -q -d ECC` (on NPUs `npu-smi info -t ecc`): with Xid 48, "
    "63, 74, 79, 94, 95 or ECC counts the device is faulty: take it out of CUDA_VISIBLE_DEVICES and have it "
    "reset. Otherwise run once with CUDA_LAUNCH_BLOCKING=1, which shows the operator, and look for ids or "
    "shapes out of range."
)

# What processes see of one that listens where they cannot reach it.
_UNREACHED = ("rendezvous_timeout", "collective_timeout", "peer_died")
# What a run that goes on without its GPUs fails of.
_NO_GPU = (
    "bf16_unsupported",
    "device_not_visible",
    "nccl_version_or_system",
    "flash_attn_missing",
    "package_mismatch",
    "dtype_mismatch",
)

SYMPTOMS = (
    Symptom(
        "nccl_network_interface",
        (
            r"Bootstrap : no socket interface found",
            r"NET/IB ?: (?:Unable to open|No device|Async fatal event|Got async event ?: port error)|wrong type \d+ != \d+",
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
            r"CUDA initialization: |CUDA driver initialization failed|cuInit.{0,40}(?:fail|error)"
            r"|PTX was compiled with an unsupported",
            r"CUDA_ERROR_(?:SYSTEM_DRIVER_MISMATCH|NO_BINARY_FOR_GPU|UNSUPPORTED_PTX_VERSION|COMPAT_NOT_SUPPORTED)",
            r"could not select device driver .*gpu|nvidia-container-cli: .*(?:driver|nvml|libcuda)",
            r"lib(?:cud(?:a|art|nn)|cublas|cufft|curand|cusparse|cusolver|nvrtc|nvJitLink"
            r"|nvidia-ml)\w*\.so\S*: (?:cannot open|undefined)",
            r"is not compatible with the current PyTorch installation"
            r"|NVIDIA-SMI has failed because it couldn't communicate",
        ),
        N_(
            "The NVIDIA driver and this torch do not match[[ (driver {found})]], the driver is missing, or torch was "
            "built without CUDA or for other GPUs."
        ),
        _CUDA_BUILD_FIX,
        confidence=0.92,
        source="torch, CUDA runtime, NVML",
        explains=("package_mismatch",),
    ),
    Symptom(
        "cuda_driver_mismatch",
        (
            r"Warning: CUDA initialization: (?!.*(?:No CUDA GPUs|no CUDA-capable))(?:.*found version (?P<found>\d+))?",
            r"Warning: .*NVIDIA driver on your system is too old \(found version (?P<found>\d+)\)",
        ),
        N_(
            "torch warned that it cannot use the NVIDIA driver[[ ({found})]], and went on without GPUs: what failed "
            "afterwards follows from it."
        ),
        _CUDA_BUILD_FIX,
        confidence=0.93,
        in_warnings=True,
        source="torch",
        needs=_NO_GPU,
        explains=_NO_GPU,
    ),
    Symptom(
        "cuda_driver_mismatch",
        (
            r"Torch not compiled with (?P<wanted>CUDA|ROCm|XPU|MPS) enabled|device type '?(?P<wanted_>cuda"
            r"|xpu)'? is not available",
            r"doesn't have (?P<wanted>NCCL|XCCL|MPI|UCC|GLOO) built[ -]?in|(?P<wanted_>NCCL|nccl) is not available",
            r"(?:[Uu]nknown|[Ii]nvalid|[Uu]nsupported) (?:c10d |distributed )?backend(?: type| name)?:? ?['\"]*"
            r"(?P<wanted>(?i:nccl|rccl|xccl|mpi|gloo|ucc))",
            r"[Dd]evice string: ?'?(?P<wanted>[a-z]+)|device type at start of device string: (?P<wanted_>(?!npu)\w+)",
            r"[Bb]ackend '?(?P<wanted>\w+)'? (?:is )?not (?:found|supported|available|registered)"
            r"|PyTorch is not (?:linked|built) with support for (?P<wanted_>\w+)",
            r"No backend type associated with device type (?P<wanted>\w+)"
            r"|Attempting to deserialize object on a (?P<wanted_>CUDA) device but",
            r"Could not run '\S+' with arguments from the '(?P<wanted>CUDA|XPU|HIP|MPS)' backend",
        ),
        N_(
            "This torch was built without what was asked for[[ ({wanted})]]: it is another build (for the CPU, or "
            "for other "
            "devices), or the name of the device or backend is wrong."
        ),
        N_(
            '`python -c "import torch; print(torch.__version__, torch.version.cuda)"` in the environment of the run '
            "shows the "
            "build. For NVIDIA GPUs install one with CUDA (the selector on pytorch.org names the command for the CUDA "
            "that `nvidia-smi` shows); on a machine without such devices use --device-type cpu and the backend gloo."
        ),
        confidence=0.92,
        source="torch, torch.distributed",
        explains=("package_mismatch",),
    ),
    Symptom(
        "device_not_visible",
        (
            r"invalid device ordinal|No CUDA GPUs are available|no CUDA-capable device is detected",
            r"all CUDA-capable devices are busy or unavailable|CUDA_ERROR_(?:NO_DEVICE|INVALID_DEVICE"
            r"|DEVICE_UNAVAILABLE)",
            r"(?:more|fewer|not enough) (?:processes|ranks|GPUs|devices) .{0,40}(?:than|available|visible)",
            r"no GPUs found|only (?:\d+|one) (?:GPU|NPU|device)s?\b.{0,40}(?:process|rank|available|visible|but)",
            r"Cannot access accelerator device when none|requires? (?:an NVIDIA |a )?GPU,? but none",
            r"device_count\W{1,4}0\b|CUDA_VISIBLE_DEVICES.{0,40}(?:invalid|no such|not exist)"
            r"|Default process group .{0,40}only \d+ GPU",
        ),
        N_(
            "A process[[ of rank {rank}]] asked for a GPU that it cannot see: there are fewer than processes, or "
            "they are hidden or taken."
        ),
        N_(
            "Compare --nproc (processes per machine[[, now {nproc}]]) with `nvidia-smi -L` and CUDA_VISIBLE_DEVICES "
            "in the "
            "environment of the run: GPUs are counted from 0 among the visible ones. In a container start with "
            "--gpus all; in "
            "Slurm ask for them (--gpus-per-node). If they are busy in exclusive mode, end the process that "
            "`nvidia-smi` shows."
        ),
        confidence=0.88,
        source="CUDA runtime, torch",
        explains=("nccl_version_or_system", "cuda_driver_mismatch"),
    ),
    Symptom(
        "illegal_memory_or_ecc",
        (
            r"uncorrectable (?:NVLink )?(?:ECC )?error|[Dd]ouble[- ][Bb]it ECC",
            r"NVRM: Xid \([^)]*\): (?P<xid>(?!(?:8|13|31|32|43|45|68|69|109)\b)\d+)",
            r"fallen off the bus|GPU is lost|RmInitAdapter failed|NVLink.{0,40}(?:fatal|error)"
            r"|Unable to determine the device handle for GPU",
            r"CUDA error: hardware stack error|CUDA_ERROR_(?:ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE"
            r"|HARDWARE_STACK_ERROR)",
            r"GPU requires reset|(?:AER|PCIe Bus Error): .*(?:[Uu]ncorrect|[Ff]atal).*(?:NVRM|nvidia|GPU)?",
        ),
        N_(
            "A device is faulty: its memory or link reports errors that cannot be corrected[[ (Xid {xid})]][[ on "
            "rank {rank}]]."
        ),
        _DEVICE_FIX,
        kind=Kind.MACHINE,
        confidence=0.9,
        in_warnings=True,
        reported_late=True,
        source="CUDA runtime, NVIDIA kernel driver",
    ),
    Symptom(
        "illegal_memory_or_ecc",
        (
            r"an illegal memory access was encountered|CUDA_ERROR_(?:ILLEGAL_ADDRESS|LAUNCH_FAILED|MISALIGNED_ADDRESS)",
            r"NVRM: Xid \([^)]*\): (?P<xid>\d+)",
            r"CUDA error: (?:unspecified launch failure|misaligned address|an illegal instruction"
            r"|invalid program counter|unknown error)|Invalid access of peer GPU memory",
            r"(?:CUBLAS|CUDNN|CUSOLVER|CUFFT)_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR|NOT_INITIALIZED)",
            r"the launch timed out and was terminated",
        ),
        N_(
            "A device accessed memory that does not belong to it, or its memory or link is faulty[[ (Xid {xid})]][[ on "
            "rank {rank}]]."
        ),
        _DEVICE_FIX,
        kind=Kind.VAGUE,
        confidence=0.85,
        source="CUDA runtime, NVIDIA kernel driver",
        explains=("nccl_version_or_system",),
    ),
    Symptom(
        "illegal_memory_or_ecc",
        (r"device-side assert triggered|CUDA_ERROR_ASSERT",),
        N_("A CUDA kernel failed an assertion: nearly always an id or index out of range."),
        N_(
            "Run once with CUDA_LAUNCH_BLOCKING=1 to see the operator. If it is an embedding, the tokenizer has more "
            "tokens than the model; if it is the loss, a label is out of range."
        ),
        kind=Kind.VAGUE,
        confidence=0.6,
        source="CUDA runtime",
    ),
)
