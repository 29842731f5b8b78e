"""What to do: which ZeRO stage, offload or not, when LoRA needs no ZeRO-3, how large rows may be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from finetune.planning.memory import Workload
from finetune.runtime.language import Text

if TYPE_CHECKING:
    from finetune.planning.inputs import Cluster
    from finetune.planning.plan import Choice

GIB = 2**30
# Measured: benchmarks/plan_memory.py, docs/planning.md.
KEPT_BY_GLIBC: Text = {
    "en": "on a CPU the C library keeps much of what is freed: a process can hold twice what is planned. "
    "MALLOC_MMAP_THRESHOLD_=65536 in the environment makes glibc give it back, which takes more time",
    "zh": "在 CPU 上，C 库会保留大量已释放的内存：进程占用可达预测值的两倍。"
    "设置环境变量 MALLOC_MMAP_THRESHOLD_=65536 可让 glibc 归还这些内存，但会更慢",
}


def advise(
    work: Workload, cluster: Cluster, fits: bool | None, choices: Sequence[Choice], largest: int | None
) -> Iterator[Text]:
    """Advice in the order in which it matters. `choices` are ordered from the one that moves least."""
    if work.device_type == "cpu":
        yield KEPT_BY_GLIBC
    if fits is None:
        yield {
            "en": "give --device-memory (and --host-memory) to learn whether it fits",
            "zh": "请给出 --device-memory（和 --host-memory），以判断能否放下",
        }
        return
    best = next((choice for choice in _cheapest_first(choices) if choice.fits), None)
    if best is None and choices:
        yield from _nothing_fits(cluster, choices)
    elif best is not None and best.sharding.name != work.sharding.name:
        yield _better(work, best, fits)
    if best is not None and work.adapter and best.sharding.stage < 3 and work.sharding.stage == 3:
        whole = work.computing.element_bytes * work.shape.total / GIB
        yield {
            "en": f"LoRA needs no ZeRO-3 here: the frozen weights, {whole:.1f} GiB, fit on each device whole, and only "
            f"{work.trained / 1e6:,.1f} M parameters have gradients and moments",
            "zh": f"此处 LoRA 不需要 ZeRO-3：冻结权重共 {whole:.1f} GiB，每个设备都放得下；"
            f"只有 {work.trained / 1e6:,.1f} M 个参数有梯度和优化器状态",
        }
    if not fits and not choices:
        yield from _smaller_microbatches(work, largest)
    if largest is not None:  # no more than all samples of a step
        largest = min(largest, work.rows * work.microbatch_tokens // work.longest)
    if fits and largest is not None and work.rows > 1 and largest * work.longest > work.microbatch_tokens:
        yield {
            "en": f"rows may be larger: {largest * work.longest:,} tokens fit instead of {work.microbatch_tokens:,}, so that "
            f"a step has fewer of its {work.rows} rows; the training stays the same",
            "zh": f"每行可以更大：放得下 {largest * work.longest:,} 个 token（现为 {work.microbatch_tokens:,}），"
            f"每步的 {work.rows} 行可以减少；训练结果不变",
        }


def _cheapest_first(choices: Sequence[Choice]) -> list[Choice]:
    """From the one that moves the fewest bytes; one that shards less comes first where they are equal."""
    return sorted(
        choices, key=lambda choice: (choice.traffic.host_bytes > 0, choice.sharding.stage, choice.traffic.host_bytes)
    )


def _better(work: Workload, best: Choice, fits: bool | None) -> Text:
    now, network, host = work.sharding.name, best.traffic.network_bytes / GIB, best.traffic.host_bytes / GIB
    moves = f"{network:.2f} GiB over the network and {host:.2f} GiB to and from the host a step and device"
    moves_zh = f"每步每设备网络 {network:.2f} GiB、主机往返 {host:.2f} GiB"
    need = f"{best.device_bytes / GIB:.1f} GiB a device, {best.node_bytes / GIB:.1f} GiB a host"
    need_zh = f"每设备 {best.device_bytes / GIB:.1f} GiB、每主机 {best.node_bytes / GIB:.1f} GiB"
    if not fits:
        return {
            "en": f"{now} does not fit; {best.sharding.name} does: {need}; {moves}",
            "zh": f"{now} 放不下；{best.sharding.name} 可以：{need_zh}；{moves_zh}",
        }
    return {
        "en": f"{best.sharding.name} fits and moves less than {now}: {need}; {moves}",
        "zh": f"{best.sharding.name} 放得下，且数据搬运少于 {now}：{need_zh}；{moves_zh}",
    }


def _nothing_fits(cluster: Cluster, choices: Sequence[Choice]) -> Iterator[Text]:
    least = min(choices, key=lambda choice: max(_shares(choice, cluster)))
    need = f"{least.device_bytes / GIB:.1f} GiB a device, {least.node_bytes / GIB:.1f} GiB a host"
    need_zh = f"每设备 {least.device_bytes / GIB:.1f} GiB、每主机 {least.node_bytes / GIB:.1f} GiB"
    of_device, of_host = _shares(least, cluster)
    if of_host > of_device:
        yield {
            "en": f"no way to shard it fits: {least.sharding.name} comes nearest, with {need}; the hosts have too "
            "little: take more nodes, or hosts with more memory",
            "zh": f"任何切分方式都放不下：最接近的是 {least.sharding.name}，{need_zh}；主机内存不足："
            "请增加节点，或使用内存更大的主机",
        }
        return
    yield {
        "en": f"no way to shard it fits {cluster.devices} devices: {least.sharding.name} comes nearest, with {need}; "
        "take more devices, a smaller --cutoff-len or --micro-batch-size, or --gradient-checkpointing",
        "zh": f"任何切分方式在 {cluster.devices} 个设备上都放不下：最接近的是 {least.sharding.name}，{need_zh}；"
        "请增加设备，或减小 --cutoff-len、--micro-batch-size，或打开 --gradient-checkpointing",
    }


def _shares(choice: Choice, cluster: Cluster) -> tuple[float, float]:
    """Need of a device and of a host, over what there is; 0 where that is not known."""
    device, host = cluster.device_memory_bytes, cluster.host_memory_bytes
    return (choice.device_bytes / device if device else 0.0, choice.node_bytes / host if host else 0.0)


def _smaller_microbatches(work: Workload, largest: int | None) -> Iterator[Text]:
    if largest:
        windows = work.rows * work.microbatch_tokens // work.longest
        largest = next(size for size in range(min(largest, windows), 0, -1) if windows % size == 0)
        yield {
            "en": f"--device-batch-size {largest} fits; accumulation makes up for it and the training stays the same",
            "zh": f"--device-batch-size {largest} 放得下；梯度累积会补足，训练结果不变",
        }
    elif not work.computing.checkpointing:
        yield {
            "en": "not even one window fits: turn on --gradient-checkpointing, or lower --max-seq-len or --depth",
            "zh": "连一个窗口都放不下：请打开 --gradient-checkpointing，或减小 --max-seq-len 或 --depth",
        }
    else:
        yield {
            "en": "not even one window fits: make --max-seq-len or --depth smaller",
            "zh": "连一个窗口都放不下：请减小 --max-seq-len 或 --depth",
        }
