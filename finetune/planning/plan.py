"""A plan: the need of each location, the time of a step, the largest microbatch, ways to shard it,
and what to do.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from finetune.config.base_config import BaseConfig
from finetune.config.kinds import run_kind
from finetune.planning.advice import Choice, advise
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
from finetune.planning.workload import LOCATIONS, PHASES, Cluster, Sharding, Workload

MOST_SAMPLES = 1 << 14


@dataclass(frozen=True)
class Plan:
    """What was found.

    Attributes:
        fits: None where no memory was given to judge by.
        largest_micro_batch: samples (windows) of the largest that fits; 0 if none does, None where
            not judged.
        expected_memory: what a device is expected to need with a preset of pretraining; empty for
            others.
        choices: other ways to shard the run (fine-tuning), from the one that moves least.
        chosen: what the run would put where its configuration says auto.
        data: the windows of pretraining's token files; None for other runs, and where there are
            none yet.
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
        """For machines: its form is frozen by tests/frozen/plan.txt."""
        work, cluster = self.memory.work, self.cluster
        return {
            "fits": self.fits,
            "model": {
                "model_type": work.shape.model_type,
                "parameters": work.shape.total,
                "trained_parameters": work.trained,
            },
            "cluster": {
                "nodes": cluster.nodes,
                "devices_per_node": cluster.devices_per_node,
                "device_type": cluster.device_type,
                "device_memory_bytes": cluster.device_memory_bytes,
                "host_memory_bytes": cluster.host_memory_bytes,
                "peak_flops": cluster.peak_flops,
            },
            "sharding": work.sharding.name,
            "device_bytes": self.memory.device(),
            "node_bytes": self.memory.node(),
            "phases": {
                phase: {where: self.memory.in_phase(where, phase) for where in LOCATIONS}
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
                for term in self.memory.terms
            ],
            "guide_memory": self.expected_memory or None,
            "row_tokens": work.microbatch_tokens,
            "rows_per_step": work.microbatches,
            "largest_micro_batch": self.largest_micro_batch,
            "largest_row_tokens": None
            if self.largest_micro_batch is None
            else self.largest_micro_batch * work.sample_tokens,
            "step": self._step_json(),
            "choices": [
                {
                    "sharding": choice.sharding.name,
                    "device_bytes": choice.device_bytes,
                    "node_bytes": choice.node_bytes,
                    "network_bytes": choice.network.bytes,
                    "host_bytes": choice.host.bytes,
                    "fits": choice.fits,
                }
                for choice in self.choices
            ],
            "chosen": self.chosen,
            "data": self.data,
            "advice": list(self.advice),
        }

    def _step_json(self) -> dict[str, Any]:
        return {
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
        }


def make_plan(config: BaseConfig, shape: ModelShape, cluster: Cluster, efficiency: float) -> Plan:
    """The plan of a configuration on a cluster. Measures a copy in memory where no host bandwidth
    is given.
    """
    chosen = choose_execution(config, shape, cluster)
    config = chosen.config
    work = workload_of(config, shape, cluster)
    memory, moved = memory_of(work), host_traffic(work)
    if moved.bytes and cluster.host_bytes_per_second is None:
        cluster = replace(cluster, host_bytes_per_second=measured_copy_rate())
    judged, largest = fits(memory, cluster), _largest_micro_batch(work, config, cluster)
    choices = tuple(_choice(work, sharding, cluster) for sharding in _shardings(work))
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
        expected_memory=_expected_memory(config),
        choices=choices,
        chosen=dict(chosen.values),
        data=run_kind(config).planned_data(config),
        advice=(*filter(None, [chosen.reason]), *advise(work, cluster, judged, choices, largest)),
    )


def _choice(work: Workload, sharding: Sharding, cluster: Cluster) -> Choice:
    other = with_sharding(work, sharding)
    memory = memory_of(other)
    moved = network_traffic(other), host_traffic(other)
    return Choice(sharding, memory.device(), memory.node(), *moved, fits(memory, cluster))


def _shardings(work: Workload) -> list[Sharding]:
    """The ways to shard a fine-tuning run; the given numbers of elements stay. None for
    pretraining, which has DDP.
    """
    if work.muon or (work.computing.full and not work.sharding.engine and not work.file_bytes):
        return []
    hpz = work.sharding.hpz
    plain = replace(
        work.sharding, engine=False, stage=0, offload_optimizer=False, offload_param=False, hpz=1
    )
    stages = (
        (2, False, False),
        (2, True, False),
        (3, False, False),
        (3, True, False),
        (3, True, True),
    )
    return [plain] + [
        replace(
            plain,
            engine=True,
            stage=stage,
            offload_optimizer=optimizer,
            offload_param=weights,
            hpz=hpz if stage == 3 else 1,
        )
        for stage, optimizer, weights in stages
    ]


def _largest_micro_batch(work: Workload, config: BaseConfig, cluster: Cluster) -> int | None:
    """By halving: memory never falls with the microbatch."""

    def fitting(micro_batch: int) -> bool:
        return fits(memory_of(with_micro_batch(work, config, micro_batch)), cluster) is not False

    if fits(memory_of(work), cluster) is None:
        return None
    if not fitting(1):
        return 0
    low, high = 1, MOST_SAMPLES
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fitting(middle) else (low, middle - 1)
    return low


# What each preset of ds_configs/pretrain_gpu2_*.json was chosen for: (depth, device batch,
# sequence) -> of one device.
_EXPECTED = {(12, 8, 1536): "15-16 GB", (16, 12, 2048): "20-22 GB", (20, 14, 3072): "28-30 GB"}


def _expected_memory(config: BaseConfig) -> str:
    sizes = tuple(
        getattr(config, name, None) for name in ("depth", "device_batch_size", "max_seq_len")
    )
    return _EXPECTED.get(sizes, "")  # type: ignore[arg-type]


def measured_copy_rate() -> float:
    """Bytes a second of a copy within this machine's memory, the best of three of 64 MiB."""
    import numpy as np

    source = np.ones(8 * 2**20)
    target = np.empty_like(source)
    rates = []
    for _attempt in range(3):
        start = time.perf_counter()
        np.copyto(target, source)
        rates.append(source.nbytes / (time.perf_counter() - start))
    return max(rates)
