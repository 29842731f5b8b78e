"""What to do: which ZeRO stage, offload or not, when LoRA needs no ZeRO-3, how large microbatches
may be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from finetune.planning.traffic import Traffic
from finetune.planning.workload import GIB, Cluster, Sharding, Workload
from finetune.runtime.language import N_, _

# Measured: benchmarks/plan_memory.py, docs/planning.md.
KEPT_BY_GLIBC = N_(
    "on a CPU the C library keeps much of what is freed: a process can hold twice what is planned."
    " MALLOC_MMAP_THRESHOLD_=65536 in the environment makes glibc give it back, which takes more"
    " time"
)


@dataclass(frozen=True)
class Choice:
    """One way to shard the run: what it needs of a device and a node, and what it moves."""

    sharding: Sharding
    device_bytes: int
    node_bytes: int
    network: Traffic
    host: Traffic
    fits: bool | None


def advise(
    work: Workload,
    cluster: Cluster,
    fits: bool | None,
    choices: Sequence[Choice],
    largest: int | None,
) -> Iterator[str]:
    """Advice in the order in which it matters. `choices` are ordered from the one that moves
    least.
    """
    if work.device_type == "cpu":
        yield _(KEPT_BY_GLIBC)
    if fits is None:
        yield _("give --device-memory (and --host-memory) to learn whether it fits")
        return
    best = next((choice for choice in _cheapest_first(choices) if choice.fits), None)
    if best is None and choices:
        yield _nothing_fits(cluster, choices)
    elif best is not None and best.sharding.name != work.sharding.name:
        yield _better(work, best, fits)
    if best is not None and work.adapter and best.sharding.stage < 3 and work.sharding.stage == 3:
        frozen_bytes = work.computing.element_bytes * (work.weight_numbers - work.adapter)
        yield _(
            "LoRA needs no ZeRO-3 here: the frozen weights, {size:.1f} GiB, fit on each device"
            " whole, and only {trained:,.1f} M parameters have gradients and moments"
        ).format(size=frozen_bytes / GIB, trained=work.trained / 1e6)
    if not fits and not choices:
        yield _smaller_microbatches(work, largest)
    if largest is not None:  # no more than all samples of a step
        largest = min(largest, work.microbatches * work.microbatch_tokens // work.sample_tokens)
    if (
        fits
        and largest is not None
        and work.microbatches > 1
        and largest * work.sample_tokens > work.microbatch_tokens
    ):
        yield _(
            "microbatches may be larger: {tokens:,} tokens fit instead of {now:,}, so that a step"
            " has fewer than {count} of them; the training stays the same"
        ).format(
            tokens=largest * work.sample_tokens, now=work.microbatch_tokens, count=work.microbatches
        )


def _cheapest_first(choices: Sequence[Choice]) -> list[Choice]:
    """From the one that moves the fewest bytes; one that shards less comes first where they are
    equal.
    """
    return sorted(
        choices,
        key=lambda choice: (choice.host.bytes > 0, choice.sharding.stage, choice.host.bytes),
    )


def _need(choice: Choice) -> str:
    text = _("{device:.1f} GiB a device, {host:.1f} GiB a host")
    return text.format(device=choice.device_bytes / GIB, host=choice.node_bytes / GIB)


def _better(work: Workload, best: Choice, fits: bool | None) -> str:
    moves = _(
        "{network:.2f} GiB over the network and {host:.2f} GiB to and from the host a step and"
        " device"
    ).format(network=best.network.bytes / GIB, host=best.host.bytes / GIB)
    text = _("sharding {best} fits and moves less than {now}: {need}; {moves}")
    if not fits:
        text = _("sharding {now} does not fit; {best} does: {need}; {moves}")
    return text.format(
        best=best.sharding.name, now=work.sharding.name, need=_need(best), moves=moves
    )


def _nothing_fits(cluster: Cluster, choices: Sequence[Choice]) -> str:
    def shares(choice: Choice) -> tuple[float, float]:
        """Need of a device and of a host, over what there is; 0 where that is not known."""
        device, host = cluster.device_memory_bytes, cluster.host_memory_bytes
        return (
            choice.device_bytes / device if device else 0.0,
            choice.node_bytes / host if host else 0.0,
        )

    nearest = min(choices, key=lambda choice: max(shares(choice)))
    of_device, of_host = shares(nearest)
    text = _(
        "no way to shard it fits {devices} devices: {nearest} comes nearest, with {need}; take more"
        " devices, a smaller --cutoff-len or --micro-batch-size, or --gradient-checkpointing"
    )
    if of_host > of_device:
        text = _(
            "no way to shard it fits: {nearest} comes nearest, with {need}; the hosts have too"
            " little: take more nodes, or hosts with more memory"
        )
    return text.format(devices=cluster.devices, nearest=nearest.sharding.name, need=_need(nearest))


def _smaller_microbatches(work: Workload, largest: int | None) -> str:
    if largest:
        windows = work.microbatches * work.microbatch_tokens // work.sample_tokens
        size = next(size for size in range(min(largest, windows), 0, -1) if windows % size == 0)
        text = _(
            "--device-batch-size {size} fits; accumulation makes up for it and the training stays"
            " the same"
        )
        return text.format(size=size)
    if work.computing.checkpointing:
        return _("not even one window fits: make --max-seq-len or --depth smaller")
    return _(
        "not even one window fits: turn on --gradient-checkpointing, or lower --max-seq-len or"
        " --depth"
    )
