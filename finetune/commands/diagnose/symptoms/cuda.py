"""NVIDIA GPUs: driver, builds of torch, hardware faults."""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.base import OURS, Kind, Symptom
from finetune.runtime.language import N_

_CUDA_BUILD_FIX = N_(
    'Compare `nvidia-smi` (driver and the highest CUDA it supports) with `python -c "import torch; '
    'print(torch.version.cuda)"`; install the torch build for that CUDA, or a newer driver. After a driver '
    "upgrade, reboot or reload the modules. Start containers with --gpus all."
)
_FABRIC_FIX = N_(
    "`systemctl status nvidia-fabricmanager` on the machine: install the fabric manager of exactly the driver's "
    "version (`nvidia-smi` shows that), `systemctl enable --now nvidia-fabricmanager`, and start again. Containers "
    "need nothing: it runs on the host."
)
_DEVICE_FIX = N_(
    "Look at `dmesg -T | grep -i xid` and `nvidia-smi -q -d ECC` (on NPUs `npu-smi info -t ecc`): with Xid 48, "
    "63, 74, 79, 94, 95 or ECC counts the device is faulty: take it out of CUDA_VISIBLE_DEVICES and have it "
    "reset. Otherwise run once with CUDA_LAUNCH_BLOCKING=1, which shows the operator, and look for ids or "
    "shapes out of range."
)

# What a run that goes on without its GPUs fails of.
_NO_GPU = (
    "bf16_unsupported",
    "device_not_visible",
    "nccl_version_or_system",
    "flash_attn_missing",
    "package_mismatch",
    "dtype_mismatch",
    "program_error",
)

SYMPTOMS = (
    Symptom(
        "cuda_driver_mismatch",
        (r"HIP error: (?:invalid device function|no kernel image)|no kernel image.{0,60}\bgfx\d+",),
        N_("This build of torch for ROCm has no kernels for this GPU."),
        N_(
            '`rocminfo | grep gfx` names the GPU, `python -c "import torch; print(torch.cuda.get_arch_list())"` what '
            "the build has. Install a build that has it; a consumer GPU that is built like one of those runs as that, "
            "untested by AMD: HSA_OVERRIDE_GFX_VERSION=10.3.0 for gfx103x, 11.0.0 for gfx110x."
        ),
        confidence=0.94,
        source="ROCm",
    ),
    Symptom(
        "cuda_driver_mismatch",
        (
            r"[Ff]ailed to initialize NVML: Driver/library version mismatch",
            r"NVRM: API mismatch: the client has the version (?P<library>[\d.]+)",
        ),
        N_(
            "The NVIDIA driver was upgraded while its old kernel module is still loaded: the module and the "
            "libraries[[ ({library})]] are of different versions."
        ),
        N_(
            "Reboot the machine, or end all that uses the GPUs and reload the module (`rmmod nvidia_uvm nvidia_drm "
            "nvidia_modeset nvidia; nvidia-smi`). So that it does not come back: hold the driver's packages back from "
            "unattended upgrades. In a container: its libraries must be the host's (nvidia-container-toolkit)."
        ),
        confidence=0.94,
        source="NVML",
        explains=_NO_GPU,
    ),
    Symptom(
        "cuda_driver_mismatch",
        (
            r"The NVIDIA driver on your system is too old \(found version (?P<found>\d+)\)",
            r"CUDA driver version is insufficient for CUDA runtime version",
            r"Found no NVIDIA driver on your system",
            r"Unexpected error from cudaGetDeviceCount|unsupported display driver / cuda driver combination",
            r"no kernel image is available for execution on the device|device kernel image is invalid",
            r"forward compatibility was attempted on non supported HW",
            r"CUDA unknown error - this may be due to an incorrectly set up environment",
            r"CUDA initialization: |CUDA driver initialization failed|cuInit.{0,40}(?:fail|error)"
            r"|PTX was compiled with an unsupported",
            r"CUDA_ERROR_(?:SYSTEM_DRIVER_MISMATCH|NO_BINARY_FOR_GPU|UNSUPPORTED_PTX_VERSION|COMPAT_NOT_SUPPORTED)",
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
            r"system not yet initialized|CUDA_ERROR_SYSTEM_NOT_READY|Error 802\b",
            r"[Ff]abric ?[Mm]anager\b.{0,90}(?:don't match|do(?:es)? not match|mismatch|not running|is not|fail)",
        ),
        N_(
            "The NVSwitch machine's fabric manager does not run, or is of another version than the driver: no GPU of "
            "the machine can be used until it does."
        ),
        _FABRIC_FIX,
        confidence=0.93,
        source="CUDA runtime, NVIDIA fabric manager",
        explains=("package_mismatch",),
    ),
    Symptom(
        "cuda_driver_mismatch",
        (r"Warning: CUDA initialization: .*Error 802\b",),
        N_(
            "torch warned that the NVSwitch machine is not ready (its fabric manager does not run, or is of another "
            "version than the driver), and went on without GPUs: what failed afterwards follows from it."
        ),
        _FABRIC_FIX,
        confidence=0.94,
        in_warnings=True,
        source="torch, NVIDIA fabric manager",
        needs=_NO_GPU,
        explains=_NO_GPU,
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
            r"(?:Error|Exception): .*(?:CUDA is required but not available for bitsandbytes"
            r"|bitsandbytes\b.{0,80}(?:requires? (?:CUDA|a GPU)|without (?:GPU|CUDA) support|no GPU))",
            r"(?:Error|Exception): .*None of the available devices `?available_devices.{0,200}bitsandbytes",
            r"(?:Error|Exception): .*No GPU found\. A GPU is needed for quantization"
            r"|CUDA Setup failed despite (?:GPU|CUDA) being available",
            r"AttributeError: 'NoneType' object has no attribute 'c(?:adam|adagrad|lion|momentum|rmsprop|lars|lamb"
            r"|quantize|dequantize|get_|int8|igemm|gemm|gemv|blockwise)\w*'",
            r"libbitsandbytes_cpu\.so: undefined symbol",
        ),
        N_(
            "bitsandbytes works on no GPU here: torch sees none, or the installed bitsandbytes was built without CUDA, "
            "or its library for this CUDA could not be loaded."
        ),
        N_(
            "`python -c 'import torch; print(torch.cuda.is_available(), torch.version.cuda)'` in the environment of "
            "the run: if False, make the GPU visible (driver, CUDA_VISIBLE_DEVICES, --gpus all) or install torch with "
            "CUDA; if True, `pip install -U bitsandbytes` and see `python -m bitsandbytes`. Without a GPU train "
            "without quantization (no 4-bit or 8-bit, optimizer adamw_torch)."
        ),
        confidence=0.92,
        in_warnings=True,
        source="transformers, bitsandbytes",
        explains=("nccl_version_or_system", "cuda_driver_mismatch"),
    ),
    Symptom(
        "device_not_visible",
        (
            r"invalid device ordinal|Attempting to deserialize object on CUDA device \d+"
            r"|No CUDA GPUs are available|no CUDA-capable device is detected",
            r"all CUDA-capable devices are busy or unavailable|CUDA_ERROR_(?:NO_DEVICE|INVALID_DEVICE"
            r"|DEVICE_UNAVAILABLE)",
            r"(?:more|fewer|not enough) (?:processes|ranks|GPUs|devices) .{0,40}(?:than|available|visible)",
            r"fp16 mixed precision requires a GPU|no GPUs found|only (?:\d+|one) (?:GPU|NPU"
            r"|device)s?\b.{0,40}(?:process|rank|available|visible|but)",
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
            r"uncorrectable (?:NVLink )?(?:ECC )?error|[Dd]ouble[- ][Bb]it ECC(?!\s*:?\s*(?:N/A|0\b))",
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
            r"NVRM: Xid \([^)]*\): (?P<xid>61|62|119|120)\b",
            r"waiting for RPC response from GPU\d* ?GSP|GSP (?:RPC )?(?:timeout|error)|failed to (?:load|boot) GSP",
        ),
        N_(
            "A GPU's own firmware (GSP) stopped answering the driver[[ (Xid {xid})]]: calls to it hang or fail."
        ),
        N_(
            "Reset the GPU (`nvidia-smi --gpu-reset -i N` with nothing running on it) or reboot the machine, then "
            "start the same command again: the run resumes from its last checkpoint. If it comes back: update the "
            "driver, or load it with NVreg_EnableGpuFirmware=0, and have the GPU checked."
        ),
        kind=Kind.MACHINE,
        confidence=0.91,
        in_warnings=True,
        reported_late=True,
        source="NVIDIA kernel driver",
    ),
    Symptom(
        "illegal_memory_or_ecc",
        (
            r"an illegal memory access was encountered|CUDA_ERROR_(?:ILLEGAL_ADDRESS|LAUNCH_FAILED|MISALIGNED_ADDRESS)",
            rf"NVRM: Xid \([^)]*\): (?P<xid>\d+)(?!.*\bname=(?!{OURS}))",
            r"CUDA error: (?:unspecified launch failure|misaligned address|an illegal instruction"
            r"|invalid program counter|unknown error)|Invalid access of peer GPU memory",
            r"(?:CUBLAS|CUDNN|CUSOLVER|CUFFT)_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)",
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
        confidence=0.66,
        source="CUDA runtime",
        explains=("device_oom",),  # what libraries that cannot start after it are taken for
    ),
    Symptom(
        "cuda_driver_mismatch",
        (
            r"(?P<library>lib(?:cudnn|cublas|cusparse|cusolver|cufft|nvJitLink|cudart)\w*\.so\S*): undefined symbol",
            # The name of the library may stand on the line before, where a terminal wrapped it.
            r"undefined symbol: _*(?P<library>nvJitLink|cusparse|cublas|cudnn|cusolver|cufft|curand|nvrtc|cudart)\w*",
            r"version (?P<library>lib(?:cudnn|cublas|cusparse|cusolver|cufft|nvJitLink|cudart|nvrtc)\w*\.so[.\d]*)"
            r"(?: not (?:found|defined)|$)",
            r"(?P<library>cuDNN) version incompatibility: PyTorch was compiled",
            r"[Cc]ould not load library (?P<library>libcudnn\S+?)\.? "
            r"|Unable to load any of \{?(?P<library_>libcudnn[^,}]*)",
        ),
        N_(
            "CUDA libraries of two versions are mixed[[ ({library})]]: the system's are found before those that came "
            "with torch."
        ),
        N_(
            "Unset LD_LIBRARY_PATH (torch's wheels bring their own CUDA libraries), or take the folders of cuDNN and "
            "CUDA out of it; then `pip check` for the nvidia-*-cu* packages that this torch wants."
        ),
        confidence=0.94,
        source="cuDNN, dynamic linker",
        explains=("package_mismatch", "native_crash"),
    ),
)
