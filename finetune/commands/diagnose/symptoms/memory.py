"""Memory: of devices, of the host, of /dev/shm."""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.base import OURS, Kind, Symptom, cann, ended_by, returned
from finetune.runtime.language import N_

_DEVICE_OOM_FIX = N_(
    "[[Process {holder} of the device's memory: if it is not this run's, stop it or take another device first. "
    "]][[This process itself holds only {own_share}: end what else is on it, and give every rank a device of its own "
    "(set_device(LOCAL_RANK), not a fixed number). ]][[In evaluation ({evaluation}) the trainer keeps the logits of "
    "all batches on the device: set eval_accumulation_steps, reduce them in preprocess_logits_for_metrics, or set "
    "prediction_loss_only; and lower per_device_eval_batch_size. ]][[{loading} calls torch.load, which puts what it "
    "reads onto the device that it was saved from, for every rank the same one: give it map_location='cpu', or save "
    "and load sharded states. ]][[{gathering} collects the whole model or optimizer on the device: save sharded states "
    "(fsdp_state_dict_type SHARDED_STATE_DICT; with DeepSpeed stage3_gather_16bit_weights_on_model_save false, and "
    "zero_to_fp32.py afterwards), or collect them in the host's memory and on rank 0 only (offload_to_cpu=True, "
    "rank0_only=True, in StateDictOptions cpu_offload=True). ]][[{fragmented} are reserved but not in use, "
    "which is "
    "fragmentation: set expandable_segments first (below). ]]Lower --micro-batch-size[[ (now {micro_batch_size}; try "
    "{half_micro_batch_size})]]: the global batch stays the same, split into more micro-steps. Then, one at a time: "
    "--gradient-checkpointing true, a smaller --cutoff-len[[ (now {cutoff_len}; try {half_cutoff_len})]], ZeRO-3 with "
    "offload (--config ds_configs/zero3.json). Against fragmentation: expandable_segments:True in "
    "PYTORCH_CUDA_ALLOC_CONF or PYTORCH_NPU_ALLOC_CONF. A sharded run of this package resumes with smaller "
    "microbatches when the same command is started again[[ ({oom_old} did not fit)]]."
)
_HOST_OOM_FIX = N_(
    "Check how much memory the host has (`free -g`; in a container its cgroup limit; `dmesg | grep -i oom`). Lower "
    "--dataloader-num-workers[[ (now {dataloader_num_workers})]] and --preprocessing-num-workers; offload less to the "
    "CPU (optimizer offload takes about 16 bytes per trained parameter of the node, parameter offload 2 bytes per "
    "parameter); start fewer processes on the machine[[ (now {nproc})]]; or give the container or job more memory."
)
_SHM_FIX = N_(
    "Give the container more shared memory (docker run --shm-size=16g or --ipc=host; in Kubernetes an emptyDir with "
    "medium: Memory on /dev/shm), check `df -h /dev/shm`, or lower --dataloader-num-workers[[ (now "
    "{dataloader_num_workers})]] to 0."
)

SYMPTOMS = (
    Symptom(
        "device_oom",
        (
            r"(?:CUDA|NPU|HIP) out of memory\. Tried to allocate (?P<wanted>[\d.]+ ?\w+) \(\w+ (?P<device>\d+); "
            r"(?P<capacity>[\d.]+ ?\w+) total capacity; (?P<allocated>[\d.]+ ?\w+) already allocated",
            r"(?:CUDA|NPU|HIP) out of memory\. Tried to allocate (?P<wanted>[\d.]+ ?\w+)\..*?total capacity of "
            r"(?P<capacity>[\d.]+ ?\w+).*?Process (?P<holder>\d+ has [\d.]+ [KMG]iB) memory in use"
            r"(?:.*?(?P<unallocated>[\d.]+ ?\w+) is reserved by PyTorch but unallocated)?",
            r"(?:CUDA|NPU|XPU|HIP) out of memory\.(?: Tried to allocate (?P<wanted>[\d.]+ ?\w+))?"
            r"(?:.*?\b[GNX]PU (?P<device>\d+)\b)?(?:.*?total capacity "
            r"of (?P<capacity>[\d.]+ ?\w+)|.*?; (?P<capacity_>[\d.]+ ?\w+) total capacity)?"
            r"(?:.*?(?P<unallocated>[\d.]+ ?\w+) is reserved by PyTorch but unallocated)?",
            r"MPS backend out of memory(?: \(MPS allocated: (?P<used>[\d.]+ ?\w+))?",
            r"(?:CUDA|HIP|CUDA driver) [Ee]rror: out of memory|(?:CUBLAS|CUDNN|CUSOLVER|NVRTC)_STATUS_ALLOC_FAILED"
            r"|CUDA_ERROR_OUT_OF_MEMORY",
            r"[Cc]uda failure '?(?:2 )?'?out of memory|cudaErrorMemoryAllocation|hipErrorOutOfMemory"
            r"|RESOURCE_EXHAUSTED: Out of memory",
            r"^\[ERROR\] (?:rank \d+: )?out of memory (?:at step (?P<step>\d+)|with (?:rows|microbatches) that cannot)",
            r"would exceed allowed memory",
            r"\b(?:torch|cuda|npu|acc)\.OutOfMemoryError\b|\bOutOfMemoryError: (?:CUDA|NPU|HIP|XPU)",
        ),
        N_(
            "A device ran out of memory[[ on rank {rank}]][[ at step {step}]][[ in evaluation ({evaluation})]]"
            "[[ while a checkpoint was loaded ({loading})]]"
            "[[ while the whole state was gathered for a checkpoint ({gathering})]]"
            "[[: {wanted} more were requested]][[, of "
            "{capacity} in total]]."
        ),
        _DEVICE_OOM_FIX,
        confidence=0.95,
        source="allocators of torch and torch_npu; this package",
        restart_cures=True,
    ),
    Symptom(
        "device_oom",
        (
            cann("EL0004", "EI0011", "EI0007")
            + r"|Insufficient_Device_Memory|Memory_Allocation_Failure",
            returned(r"2070(?:01|18)")
            + "|"
            + returned("200000")
            + r"|(?:HCCL function error: |OPS function error: [Hh]ccl).*error code is \(?(?:3|24)\)?(?!\d)",
            r"\bERR0[0-4]006\b|halMemAlloc failed|alloc device memory failed|[Mm]alloc device memory .{0,30}fail",
            r"Call rtMalloc fail.*size:(?P<wanted_bytes>\d+)|rtMalloc execute failed",
            r"reason=\[(?:driver error:out of memory|memory allocation error|device oom)",
        ),
        N_(
            "An NPU ran out of memory (HBM)[[ on rank {rank}]][[: {wanted_bytes} bytes were requested]]. Other "
            "processes on the same chip use the same memory."
        ),
        N_(
            "Check with `npu-smi info` whether another process holds memory on the chip, and stop it if it is yours. "
            "Each communicator of HCCL takes twice HCCL_BUFFSIZE (200 MB): lower it where it was raised."
        ),
        more_fix=_DEVICE_OOM_FIX,
        source="CANN error codes (EL0004, 207001); public threads",
        explains=("npu_busy_or_owned",),
    ),
    Symptom(
        "device_oom",
        (r"(?:CUBLAS|CUDNN|CUSOLVER|CUFFT)_STATUS_NOT_INITIALIZED",),
        N_(
            "A library of CUDA could not start[[ on rank {rank}]]: nearly always because the device's memory was used "
            "up, by this process or by another one."
        ),
        N_(
            "`nvidia-smi` shows who holds memory: stop it or take another device. Otherwise lower --micro-batch-size[[ "
            "(now {micro_batch_size}; try {half_micro_batch_size})]]. If memory is free, compare driver and CUDA "
            "libraries (LD_LIBRARY_PATH unset), and look for ids out of range before it with CUDA_LAUNCH_BLOCKING=1."
        ),
        confidence=0.85,
        source="cuBLAS, cuDNN",
        kind=Kind.VAGUE,
    ),
    Symptom(
        "device_oom",
        (
            r"No available memory for the cache blocks|is larger than the (?:available KV"
            r"|maximum number of tokens that can be stored in KV) cache",
            r"Free memory on device .* is less than desired GPU memory"
            r"|Not enough memory\W{1,3}Please try (?:to increase|increasing) --mem-fraction-static",
            r"out of memory occurred when warming up sampler",
        ),
        N_(
            "The inference engine found no device memory for its cache of keys and values or its first requests: "
            "weights, the trainer's state or other processes took it."
        ),
        N_(
            "Raise gpu_memory_utilization, or lower max_model_len and the number of sequences; where a trainer shares "
            "the device, offload its weights and optimizer while the engine generates, or give the engine devices of "
            "its own (more tensor parallelism). SGLang calls them --mem-fraction-static and --context-length."
        ),
        confidence=0.96,
        source="vLLM, SGLang",
    ),
    Symptom(
        "host_oom",
        (
            r"(?<!OutOf)MemoryError\b(?:: Unable to allocate (?P<wanted>[\d.]+ \w+))?",
            r"Insufficient_Host_Memory",
            r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)(?:: you tried to allocate "
            r"(?P<wanted>\d+ bytes))?",
            r"Errno 12\b.*Cannot allocate memory|Cannot allocate memory(?: \(12\))?\W*$|\bstd::bad_alloc\b"
            r"|ArrowMemoryError",
            r"(?:pin_memory|cudaHostAlloc|cudaHostRegister|pinned memory).{0,60}(?:fail|out of memory|cannot)",
            r"workers? (?:were|was|are) killed due to (?:the node running low on memory|memory pressure)"
            r"|ray\S*OutOfMemoryError",
            r"\bNODE_OUT_OF_MEMORY\b|[Tt]ask was killed due to the node running low on memory"
            r"|[1-9]\d* [Ww]orkers? \(tasks / actors\) killed due to memory pressure",
            r"unable to mmap memory: you tried to mmap (?P<wanted>[\d.]+ ?\w+)",
            r"is killed by signal: Killed",
            r"a worker process ended by itself; most often the system killed it",
            r"subprocesses has abruptly died during map operation",
            r"A process in the process pool was terminated abruptly",
        ),
        N_(
            "The host ran out of memory[[ on rank {rank}]][[: {wanted} were requested]], and a process was denied "
            "memory or killed by the system[[ (process {pid})]]."
        ),
        _HOST_OOM_FIX,
        source="Linux kernel, Slurm, torch, Python",
        explains=("dataloader_worker_killed_shm", "npu_driver_cann_mismatch"),
    ),
    Symptom(
        "host_oom",
        (
            rf"[Oo]ut of memory: Kill(?:ed)? process (?P<pid>\d+)(?!\d)(?!,? \((?!{OURS}))",
            rf"oom-kill:(?!.*task=(?!{OURS}))|oom_reaper: reaped process (?P<pid>\d+) \({OURS}",
            r"oom[-_]kill event|Detected \d+ oom[_-]kill|OOMKilled|OOM[- ]?[Kk]illed|[Kk]illed by (?:the )?(?:OOM"
            r"|oom)|(?<!invoked )oom-killer",
            rf"\b{OURS}\S* invoked oom-killer",
            r"earlyoom\[?.*sending SIG\w+ to process (?P<pid>\d+)",
            r"Some of your (?:processes|step tasks) (?:may )?have been (?:OOM )?[Kk]illed|systemd-oomd?\[.*[Kk]illed",
            r"task \d+: Out Of Memory|(?:State|state)[=:] ?OUT_OF_ME|Exceeded (?:job|step) memory limit",
            r"exceeded memory limit \(|[Cc]ontainer .{0,60}using more memory than|low on resource: memory"
            r"|MEMLIMIT: job killed",
        ),
        N_(
            "The host (or the job's share of it) ran out of memory, and the system killed a process[[ ({pid})]]. "
            "What the "
            "other ranks report after it follows from it."
        ),
        _HOST_OOM_FIX,
        kind=Kind.MACHINE,
        confidence=0.94,
        in_warnings=True,
        reported_late=True,
        source="Linux kernel, cgroups, Slurm, Kubernetes",
        explains=("dataloader_worker_killed_shm",),
    ),
    Symptom(
        "host_oom",
        (
            r"^(?:\S+: line \d+: +)?\d* ?Killed\b|^\[\d+\] +(?:\+ )?\d+ killed\b|task \d+: Killed\b|^zsh: killed\b",
        ),
        N_(
            "The shell only reports that a process was killed (SIGKILL), nearly always by the kernel for lack of "
            "memory or by the container's limit."
        ),
        _HOST_OOM_FIX,
        kind=Kind.KILLED,
        confidence=0.7,
        source="bash, Slurm",
        explains=("peer_died",),
    ),
    Symptom(
        "dataloader_worker_killed_shm",
        (
            r"is killed by signal: Bus error|insufficient shared memory \(shm\)",
            r"unable to (?:open|write|resize|allocate|mmap).{0,40}(?:shared memory|</?(?:dev/shm/)?torch_)",
            r"NCCL WARN Error while creating shared memory segment (?P<path>\S+)",
            r"^Bus error\b",
            r"/dev/shm\b.*No space left on device|No space left on device.*/dev/shm\b",
        ),
        N_(
            "Shared memory (/dev/shm) ran out[[ on rank {rank}]]: data loader workers and NCCL pass their data through "
            "it, and containers give only 64 MB."
        ),
        _SHM_FIX,
        confidence=0.96,
        source="torch.utils.data, NCCL",
        explains=("disk_full", "nccl_version_or_system", "dataloader_worker_killed_shm"),
    ),
    Symptom(
        "unknown",
        ended_by(7, "SIGBUS"),
        N_(
            "A process[[ ({pid})]][[ of rank {rank}]] was ended by a bus error (SIGBUS), and nothing here says why: "
            "shared memory (/dev/shm) may have run out, or a file that it had mapped was cut short or lies on a full "
            "or failing disk."
        ),
        N_(
            "`df -h /dev/shm` and the container's --shm-size first, then `df -h` for data, checkpoints and TMPDIR, and "
            "`dmesg -T | grep -i -E 'bus|i/o error|memory failure|nfs|lustre'` on that machine."
        ),
        kind=Kind.VAGUE,
        confidence=0.55,
        source="torch elastic, MPI, containers",
        explains=("peer_died",),
    ),
    Symptom(
        "dataloader_worker_killed_shm",
        (
            r"DataLoader worker \(pid\(?s?\)? (?P<pid>\d+)[\d, ]*\) "
            r"(?:exited unexpectedly|is killed by signal(?!: (?:Segm|Illeg|Abort)))",
        ),
        N_(
            "A data loader worker exited unexpectedly (process {pid}): killed, or out of shared memory."
        ),
        _SHM_FIX,
        kind=Kind.VAGUE,
        confidence=0.7,
        source="torch.utils.data",
    ),
)
