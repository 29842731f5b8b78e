"""Memory: of devices, of the host, of /dev/shm."""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.base import Kind, Symptom
from finetune.runtime.language import Text

_DEVICE_OOM_FIX: Text = {
    "en": "Lower --micro-batch-size[[ (now {micro_batch_size}; try {half_micro_batch_size})]]: the global batch stays,"
    " it is cut into more micro-steps. Then, one at a time: --gradient-checkpointing true, a smaller --cutoff-len[[ "
    "(now {cutoff_len}; try {half_cutoff_len})]], ZeRO-3 with offload (--config ds_configs/zero3.json). Against "
    "fragments: expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF or PYTORCH_NPU_ALLOC_CONF. A sharded run of this "
    "package goes on with smaller rows when the same command is started again[[ ({oom_old} did not fit)]].",
    "zh": "减小 --micro-batch-size[[(当前 {micro_batch_size},可试 {half_micro_batch_size})]]:全局批次不变,"
    "只是分成更多微步。仍不够时依次尝试:--gradient-checkpointing true、更小的 --cutoff-len[[(当前 {cutoff_len},可试 "
    "{half_cutoff_len})]]、ZeRO-3 加 offload(--config ds_configs/zero3.json)。显存碎片:在 PYTORCH_CUDA_ALLOC_CONF 或 "
    "PYTORCH_NPU_ALLOC_CONF 中设置 expandable_segments:True。"
    "本软件的分片训练再次执行同一命令时会自动用更小的行继续[[({oom_old} 放不下)]]。",
}
_HOST_OOM_FIX: Text = {
    "en": "See what the host had (`free -g`; in a container its cgroup limit; `dmesg | grep -i oom`). Lower "
    "--dataloader-num-workers[[ (now {dataloader_num_workers})]] and --preprocessing-num-workers; offload less to "
    "the CPU (optimizer offload takes about 16 bytes for each trained parameter of the node, parameter offload 2 for "
    "each); start fewer processes on the machine[[ (now {nproc})]]; or give the container or job more memory.",
    "zh": "查看主机内存(`free -g`;容器内看 cgroup 上限;`dmesg | grep -i oom`)。减小 --dataloader-num-workers[[(当前 "
    "{dataloader_num_workers})]] 与 --preprocessing-num-workers;减少 CPU offload(优化器 offload 每个可训练参数约 16 "
    "字节,参数 offload 每个约 2 字节);每台机器少启动进程[[(当前 {nproc})]];或给容器/作业更多内存。",
}
_SHM_FIX: Text = {
    "en": "Give the container more shared memory (docker run --shm-size=16g or --ipc=host; in Kubernetes an emptyDir "
    "with medium: Memory on /dev/shm), check `df -h /dev/shm`, or lower --dataloader-num-workers[[ (now "
    "{dataloader_num_workers})]] to 0.",
    "zh": "给容器更多共享内存(docker run --shm-size=16g 或 --ipc=host;Kubernetes 中在 /dev/shm 挂载 medium: Memory 的 "
    "emptyDir),用 `df -h /dev/shm` 检查,或把 --dataloader-num-workers[[(当前 {dataloader_num_workers})]] 降到 0。",
}

SYMPTOMS = (
    Symptom(
        "device_oom",
        (
            r"(?:CUDA|NPU|XPU|HIP) out of memory\.(?: Tried to allocate (?P<wanted>[\d.]+ ?\w+))?(?:.*?total capacity "
            r"of (?P<capacity>[\d.]+ ?\w+)|.*?; (?P<capacity_>[\d.]+ ?\w+) total capacity)?",
            r"MPS backend out of memory(?: \(MPS allocated: (?P<used>[\d.]+ ?\w+))?",
            r"CUDA error: out of memory",
            r"CUBLAS_STATUS_ALLOC_FAILED",
            r"^\[ERROR\] (?:rank \d+: )?out of memory (?:at step (?P<step>\d+)|with rows that cannot)",
            r"\b(?:torch|cuda)\.OutOfMemoryError\b",
        ),
        {
            "en": "A device ran out of memory[[ on rank {rank}]][[ at step {step}]][[: {wanted} more were asked "
            "for]][[, of {capacity} in all]].",
            "zh": "设备显存不足[[(rank {rank})]][[,第 {step} 步]][[:还需要 {wanted}]][[,总容量 {capacity}]]。",
        },
        _DEVICE_OOM_FIX,
        confidence=0.95,
        source="allocators of torch and torch_npu; this package",
    ),
    Symptom(
        "device_oom",
        (
            r"EL0004\b.*Failed to allocate memory",
            r"\(?EL0004\)?:",
            r"error code(?: is|:) ?207001\b",
            r"\bERR0[0-4]006\b",
            r"EI0011\b.*(?:[Mm]emory|resource)",
            r"Call rtMalloc fail.*size:(?P<wanted_bytes>\d+)",
        ),
        {
            "en": "An NPU ran out of memory (HBM)[[ on rank {rank}]][[: {wanted_bytes} bytes were asked for]]. "
            "Another process on the same chip counts as well.",
            "zh": "NPU 显存(HBM)不足[[(rank {rank})]][[:申请 {wanted_bytes} 字节]]。同一芯片上的其他进程也占用显存。",
        },
        {
            "en": "See with `npu-smi info` whether another process holds memory on the chip, and end it if it is "
            "yours. " + _DEVICE_OOM_FIX["en"],
            "zh": "用 `npu-smi info` 查看芯片上是否有其他进程占用显存,若是自己的请结束它。" + _DEVICE_OOM_FIX["zh"],
        },
        confidence=0.9,
        source="CANN error codes (EL0004, 207001); public threads",
        explains=("npu_busy_or_owned",),
    ),
    Symptom(
        "host_oom",
        (
            r"MemoryError\b(?:: Unable to allocate (?P<wanted>[\d.]+ \w+))?",
            r"[Oo]ut of memory: Killed process (?P<pid>\d+)",
            r"[Oo]om-kill(?:er)?\b",
            r"oom_kill event",
            r"Detected \d+ oom[_-]kill",
            r"OOMKilled",
            r"Some of your processes may have been killed by the cgroup out-of-memory handler",
            r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)(?:: you tried to allocate "
            r"(?P<wanted>\d+ bytes))?",
            r"Errno 12\b.*Cannot allocate memory|Cannot allocate memory$",
            r"\bstd::bad_alloc\b",
            r"unable to mmap memory: you tried to mmap (?P<wanted>[\d.]+ ?\w+)",
            r"is killed by signal: Killed",
            r"a worker process ended by itself; most often the system killed it",
            r"A process in the process pool was terminated abruptly",
        ),
        {
            "en": "The host ran out of memory[[ on rank {rank}]][[: {wanted} were asked for]], and a process was "
            "refused memory or was killed by the system[[ (process {pid})]].",
            "zh": "主机内存不足[[(rank {rank})]][[:申请 {wanted}]],进程申请内存失败或被系统杀死[[(进程 {pid})]]。",
        },
        _HOST_OOM_FIX,
        confidence=0.9,
        source="Linux kernel, Slurm, torch, Python",
        explains=("dataloader_worker_killed_shm",),
    ),
    Symptom(
        "host_oom",
        (r"^(?:\S+: line \d+: +)?\d* ?Killed\b",),
        {
            "en": "The shell says only that a process was killed (SIGKILL). Nearly always that is the kernel, out of "
            "memory, or the container's limit.",
            "zh": "shell 只说明进程被杀死(SIGKILL),几乎总是内核因内存不足或容器上限所为。",
        },
        _HOST_OOM_FIX,
        kind=Kind.PEER_LOST,
        confidence=0.7,
        source="bash",
        explains=("peer_died",),
    ),
    Symptom(
        "dataloader_worker_killed_shm",
        (
            r"is killed by signal: Bus error",
            r"insufficient shared memory \(shm\)",
            r"unable to (?:open|write|resize|allocate|mmap).{0,40}(?:shared memory|</?(?:dev/shm/)?torch_)",
            r"NCCL WARN Error while creating shared memory segment (?P<path>\S+)",
            r"exitcode +: -7 \(pid: (?P<pid>\d+)\)",
            r"/dev/shm\b.*No space left on device",
        ),
        {
            "en": "Shared memory (/dev/shm) ran out[[ on rank {rank}]]: data loader workers and NCCL pass their data "
            "through it, and containers give only 64 MB.",
            "zh": "共享内存(/dev/shm)用尽[[(rank {rank})]]:数据加载进程和 NCCL 通过它传数据,而容器默认只有 64 MB。",
        },
        _SHM_FIX,
        confidence=0.96,
        source="torch.utils.data, NCCL",
        explains=("disk_full", "nccl_version_or_system", "dataloader_worker_killed_shm"),
    ),
    Symptom(
        "dataloader_worker_killed_shm",
        (r"DataLoader worker \(pid\(?s?\)? (?P<pid>\d+)[\d, ]*\) (?:exited unexpectedly|is killed by signal)",),
        {
            "en": "A data loader worker ended by itself (process {pid}): killed, or short of shared memory.",
            "zh": "数据加载进程 {pid} 自行退出:被杀死或共享内存不足。",
        },
        _SHM_FIX,
        kind=Kind.PEER_LOST,
        confidence=0.7,
        source="torch.utils.data",
    ),
)
