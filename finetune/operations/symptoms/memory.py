"""Memory: of devices, of the host, of /dev/shm."""

from __future__ import annotations

from finetune.operations.symptoms.base import Kind, Symptom

DEVICE_OOM_FIX = {
    "en": "Lower --micro-batch-size[[ (now {micro_batch_size}; try {half_micro_batch_size})]]: the effective batch stays, "
    "more rows are accumulated. Then, one at a time: --gradient-checkpointing, a smaller --cutoff-len"
    "[[ (now {cutoff_len}; try {half_cutoff_len})]], ZeRO-3 with offload (--config ds_configs/zero3.json). For fragments: "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (CUDA) or PYTORCH_NPU_ALLOC_CONF=expandable_segments:True (NPU).",
    "zh": "减小 --micro-batch-size[[(当前 {micro_batch_size},可试 {half_micro_batch_size})]]:有效批次不变,只是累积更多次。"
    "仍不够时依次尝试:--gradient-checkpointing、更小的 --cutoff-len[[(当前 {cutoff_len},可试 {half_cutoff_len})]]、"
    "ZeRO-3 加 CPU offload(--config ds_configs/zero3.json)。若是显存碎片:设置 "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True(CUDA)或 PYTORCH_NPU_ALLOC_CONF=expandable_segments:True(NPU)。",
}
HOST_OOM_FIX = {
    "en": "See how much the host had (`free -g`; in a container the cgroup limit; `dmesg | grep -i oom`). Lower "
    "--dataloader-num-workers[[ (now {dataloader_num_workers})]] and --preprocessing-num-workers, take offload_param off "
    "before offload_optimizer (CPU offload needs about 16 bytes a trained parameter), start fewer processes a machine"
    "[[ (now {nproc})]], or give the container or job more memory.",
    "zh": "查看主机内存(`free -g`;容器看 cgroup 上限;`dmesg | grep -i oom`)。减小 --dataloader-num-workers"
    "[[(当前 {dataloader_num_workers})]] 与 --preprocessing-num-workers;先去掉 offload_param 再去掉 offload_optimizer"
    "(CPU offload 每个训练参数约需 16 字节);每台机器少启动进程[[(当前 {nproc})]],或给容器/作业更多内存。",
}
SYMPTOMS = (
    Symptom(
        "device_oom",
        (
            r"(?:CUDA|NPU|XPU|HIP) out of memory\.(?: Tried to allocate (?P<wanted>[\d.]+ ?\w+))?"
            r"(?:.*?total capacity(?: of)? (?P<capacity>[\d.]+ ?\w+))?",
            r"MPS backend out of memory(?: \(MPS allocated: (?P<used>[\d.]+ ?\w+))?",
            r"\bOutOfMemoryError: (?!DataLoader)(?!.*\bCPU\b)",
            r"CUDA error: out of memory",
            r"CUBLAS_STATUS_ALLOC_FAILED",
            r"^\[ERROR\] (?:rank \d+: )?out of memory (?:at step (?P<step>\d+)|with rows that cannot)",
            r"Failed to allocate device memory",
        ),
        {
            "en": "A device ran out of memory[[ on rank {rank}]][[: it asked for {wanted} more]][[ of {capacity} in all]].",
            "zh": "设备显存不足[[(rank {rank})]][[:还需要 {wanted}]][[,总容量 {capacity}]]。",
        },
        DEVICE_OOM_FIX,
        confidence=0.95,
        source="torch CUDACachingAllocator, torch_npu NPUCachingAllocator, our own messages",
    ),
)
