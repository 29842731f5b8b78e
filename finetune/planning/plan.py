"""A plan: the need of each location, the time of a step, the largest microbatch, ways to shard the
run, and advice.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from finetune.config.base_config import BaseConfig
from finetune.config.kinds import run_kind
from finetune.planning.auto import choose_execution
from finetune.planning.inputs import with_micro_batch, with_sharding, workload_of
from finetune.planning.memory import Memory, fits, memory_of
from finetune.planning.shapes import ModelShape
from finetune.planning.traffic import (
    StepTime,
    Traffic,
    computed_flops_per_token,
    flops_per_token,
    host_traffic,
    network_traffic,
    step_time,
)
from finetune.planning.workload import GIB, LOCATIONS, PHASES, Cluster, Sharding, Workload
from finetune.runtime.language import N_, _

MOST_SAMPLES = 1 << 14
# Measured: benchmarks/plan_memory.py, docs/guides/planning.md.
KEPT_BY_GLIBC = N_(
    "on a CPU the C library keeps much of what is freed: a process can hold twice what is planned."
    " MALLOC_MMAP_THRESHOLD_=65536 in the environment makes glibc give it back, which takes more"
    " time"
)
# What each preset of ds_configs/pretrain_gpu2_*.json was chosen for: (depth, device batch,
# sequence) -> of one device.
_EXPECTED: dict[tuple[Any, ...], str] = {
    (12, 8, 1536): "15-16 GB",
    (16, 12, 2048): "20-22 GB",
    (20, 14, 3072): "28-30 GB",
}


@dataclass(frozen=True)
class Choice:
    """One way to shard the run: what it needs of a device and a node, and what it moves a step and
    device.
    """

    sharding: Sharding
    device_bytes: int
    node_bytes: int
    network_bytes: int
    host_bytes: int
    fits: bool | None


@dataclass(frozen=True)
class Plan:
    """A plan of a run.

    Attributes:
        fits: None if no memory was given to compare with.
        largest_micro_batch: samples (windows) of the largest microbatch that fits; 0 if none does,
            None if no memory was given.
        expected_memory: what a device is expected to need with a preset of pretraining; otherwise
            empty.
        choices: other ways to shard the run (fine-tuning).
        chosen: values that the run would choose for auto.
        data: the windows of pretraining's token files; None for other runs, and without files.
    """

    cluster: Cluster
    memory: Memory
    fits: bool | None
    time: StepTime
    network: Traffic
    host: Traffic
    step_tokens: int
    flops_per_token: int
    computed_flops_per_token: int
    largest_micro_batch: int | None
    expected_memory: str
    choices: tuple[Choice, ...]
    chosen: dict[str, Any]
    data: dict[str, Any] | None
    advice: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the plan for machines; its form is frozen by tests/frozen/plan.txt."""
        memory, work, largest = self.memory, self.memory.work, self.largest_micro_batch
        cluster = asdict(self.cluster)
        for name in ("device_name", "network_bytes_per_second", "host_bytes_per_second"):
            del cluster[name]
        return {
            "fits": self.fits,
            "model": {
                "model_type": work.shape.model_type,
                "parameters": work.shape.total,
                "trained_parameters": work.trained,
            },
            "cluster": cluster,
            "sharding": work.sharding.name,
            "device_bytes": memory.device(),
            "node_bytes": memory.node(),
            "phases": {
                phase: {where: memory.in_phase(where, phase) for where in LOCATIONS}
                for phase in PHASES
            },
            "terms": [
                {
                    "kind": term.kind,
                    "place": term.location,
                    "bytes": term.bytes,
                    "phases": list(term.phases),
                    "formula": term.formula,
                    "source": term.source,
                    "once_per_node": term.once,
                }
                for term in memory.terms
            ],
            "guide_memory": self.expected_memory or None,
            "row_tokens": work.microbatch_tokens,
            "rows_per_step": work.microbatches,
            "largest_micro_batch": largest,
            "largest_row_tokens": None if largest is None else largest * work.sample_tokens,
            "step": {
                "tokens": self.step_tokens,
                "flops_per_token": self.flops_per_token,
                "computed_flops_per_token": self.computed_flops_per_token,
                "compute_seconds": self.time.compute,
                "network_seconds": self.time.network,
                "host_seconds": self.time.host,
                "shortest_seconds": self.time.shortest,
                "longest_seconds": self.time.longest,
                "network_bytes": self.network.bytes,
                "network_formula": self.network.formula,
                "host_bytes": self.host.bytes,
                "host_formula": self.host.formula,
            },
            "choices": [
                {**asdict(choice), "sharding": choice.sharding.name} for choice in self.choices
            ],
            "chosen": self.chosen,
            "data": self.data,
            "advice": list(self.advice),
        }


def make_plan(config: BaseConfig, shape: ModelShape, cluster: Cluster, efficiency: float) -> Plan:
    """Return the plan of a configuration on a cluster. Measures a copy in memory if no host
    bandwidth is given.
    """
    chosen = choose_execution(config, shape, cluster)
    config = chosen.config
    work = workload_of(config, shape, cluster)
    memory, moved = memory_of(work), host_traffic(work)
    if moved.bytes and cluster.host_bytes_per_second is None:
        cluster = replace(cluster, host_bytes_per_second=measured_copy_rate())

    def is_too_large(micro_batch: int) -> bool:
        return fits(memory_of(with_micro_batch(work, config, micro_batch)), cluster) is False

    judged = fits(memory, cluster)
    largest = None
    if judged is not None:  # memory never falls with the microbatch
        largest = bisect_left(range(1, MOST_SAMPLES + 1), True, key=is_too_large)
    # Pretraining has DDP, and Muon needs whole matrices.
    sharded = not hasattr(config, "train_data_path") and not work.muon
    choices = tuple(_choices(work, cluster)) if sharded else ()
    preset = [getattr(config, n, None) for n in ("depth", "device_batch_size", "max_seq_len")]
    advice = [chosen.reason] if chosen.reason else []
    advice += _advice(work, cluster, judged, choices, largest)
    return Plan(
        cluster=cluster,
        memory=memory,
        fits=judged,
        time=step_time(work, cluster, config.tokens_per_step, efficiency),
        network=network_traffic(work),
        host=moved,
        step_tokens=config.tokens_per_step,
        flops_per_token=flops_per_token(work),
        computed_flops_per_token=computed_flops_per_token(work),
        largest_micro_batch=largest,
        expected_memory=_EXPECTED.get(tuple(preset), ""),
        choices=choices,
        chosen=dict(chosen.values),
        data=run_kind(config).planned_data(config),
        advice=tuple(advice),
    )


def _choices(work: Workload, cluster: Cluster) -> Iterator[Choice]:
    """Yield the ways to shard a fine-tuning run; the given numbers of elements stay."""
    for stage, optimizer, weights in (
        (0, False, False),
        (2, False, False),
        (2, True, False),
        (3, False, False),
        (3, True, False),
        (3, True, True),
    ):
        sharding = replace(
            work.sharding,
            engine=stage > 0,
            stage=stage,
            offload_optimizer=optimizer,
            offload_param=weights,
            hpz=work.sharding.hpz if stage == 3 else 1,
        )
        other = with_sharding(work, sharding)
        memory = memory_of(other)
        yield Choice(
            sharding,
            memory.device(),
            memory.node(),
            network_traffic(other).bytes,
            host_traffic(other).bytes,
            fits(memory, cluster),
        )


def measured_copy_rate() -> float:
    """Measure the rate of a copy within this machine's memory, in bytes per second: the best of
    three copies of 64 MiB.
    """
    import numpy as np

    source = np.ones(8 * 2**20)
    target = np.empty_like(source)
    rates = []
    for _attempt in range(3):
        start = time.perf_counter()
        np.copyto(target, source)
        rates.append(source.nbytes / (time.perf_counter() - start))
    return max(rates)


# ---------------------------------------------------------------- advice


def _advice(
    work: Workload,
    cluster: Cluster,
    fits: bool | None,
    choices: Sequence[Choice],
    largest: int | None,
) -> Iterator[str]:
    """Advice in the order in which it matters."""
    if work.device_type == "cpu":
        yield _(KEPT_BY_GLIBC)
    if fits is None:
        yield _("give --device-memory (and --host-memory) to learn whether it fits")
        return
    # What moves the fewest bytes; of equals what shards least.
    best = min(
        (choice for choice in choices if choice.fits),
        key=lambda choice: (choice.host_bytes > 0, choice.sharding.stage, choice.host_bytes),
        default=None,
    )
    if best is None and choices:
        yield _nothing_fits(cluster, choices)
    elif best is not None and best.sharding.name != work.sharding.name:
        moves = _(
            "{network:.2f} GiB over the network and {host:.2f} GiB to and from the host a step and"
            " device"
        ).format(network=best.network_bytes / GIB, host=best.host_bytes / GIB)
        text = _("sharding {best} fits and moves less than {now}: {need}; {moves}")
        if not fits:
            text = _("sharding {now} does not fit; {best} does: {need}; {moves}")
        names = {"best": best.sharding.name, "now": work.sharding.name}
        yield text.format(need=_need(best), moves=moves, **names)
    if best is not None and work.adapter and best.sharding.stage < 3 and work.sharding.stage == 3:
        frozen_bytes = work.computing.element_bytes * (work.held_parameters - work.adapter)
        yield _(
            "LoRA needs no ZeRO-3 here: the frozen weights, {size:.1f} GiB, fit on each device"
            " whole, and only {trained:,.1f} M parameters have gradients and moments"
        ).format(size=frozen_bytes / GIB, trained=work.trained / 1e6)
    samples = work.microbatches * work.microbatch_tokens // work.sample_tokens  # of a step
    if not fits and not choices:
        if largest:
            size = max(size for size in range(1, min(largest, samples) + 1) if samples % size == 0)
            text = _(
                "--device-batch-size {size} fits; accumulation makes up for it and the training"
                " stays the same"
            )
            yield text.format(size=size)
        elif work.computing.checkpointing:
            yield _("not even one window fits: make --max-seq-len or --depth smaller")
        else:
            yield _(
                "not even one window fits: turn on --gradient-checkpointing, or lower"
                " --max-seq-len or --depth"
            )
    tokens = min(largest or 0, samples) * work.sample_tokens
    if fits and work.microbatches > 1 and tokens > work.microbatch_tokens:
        yield _(
            "microbatches may be larger: {tokens:,} tokens fit instead of {now:,}, so that a step"
            " has fewer than {count} of them; the training stays the same"
        ).format(tokens=tokens, now=work.microbatch_tokens, count=work.microbatches)


def _need(choice: Choice) -> str:
    text = _("{device:.1f} GiB a device, {host:.1f} GiB a host")
    return text.format(device=choice.device_bytes / GIB, host=choice.node_bytes / GIB)


def _nothing_fits(cluster: Cluster, choices: Sequence[Choice]) -> str:
    def shares(choice: Choice) -> tuple[float, float]:
        """Need of a device and of a host, over what there is; 0 if that is not known."""
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
