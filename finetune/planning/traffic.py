"""What an optimizer step costs each device: operations, bytes over the network, bytes to and from
the host.

Operations are counted as in planning/flops.py (PaLM, appendix B), less what LoRA does not compute:
a frozen matrix has no gradient of its own, 4 operations per number instead of 6.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import ceil

from finetune.planning.workload import Cluster, Workload

# Share of the peak that training reaches. Published for dense models: 33-50% (torchtitan
# Llama-3.1-8B 33-39% on H100; nanochat d24 50%; QwenLM 72B LoRA with ZeRO-3 33-38%).
EFFICIENCY = 0.4
MUONS = ("normuon", "muon")  # values of --optimizer
# Numbers of the matrices that Muon takes at once: 128 MiB in float32, a few times over.
MUON_AT_ONCE = 32 * 2**20


def forward_flops_per_token(work: Workload) -> int:
    """Operations of a token's forward pass."""
    shape = work.shape
    return 2 * (shape.passed + work.adapter) + 4 * shape.query_width * work.longest


def flops_per_token(work: Workload) -> int:
    """Operations of training that are progress: forward and backward, without recomputing."""
    shape = work.shape
    attention = 12 * shape.query_width * work.longest
    return (4 if work.adapter else 6) * shape.passed + 6 * work.adapter + attention


def computed_flops_per_token(work: Workload) -> int:
    """Operations that the device does: with the blocks computed again where they are checkpointed,
    and a reference.
    """
    again = (
        forward_flops_per_token(work) - 2 * work.shape.embedding
        if work.computing.checkpointing
        else 0
    )
    asked = forward_flops_per_token(work) if work.asks_reference else 0
    return flops_per_token(work) + again + asked


@dataclass(frozen=True)
class Traffic:
    """Bytes of one device in one optimizer step."""

    bytes: int
    formula: str
    source: str = ""


def network_traffic(work: Workload) -> Traffic:
    """What one device sends over the network."""
    n, c, count = work.processes, work.computing.element_bytes, work.microbatches
    part = (n - 1) / n
    if n == 1:
        return Traffic(0, "one process")
    if not work.sharding.engine:
        source, formula = (
            "ring all-reduce (Patarasuk and Yuan 2009)",
            "2 (N-1)/N x 4 B x P_t, once a step",
        )
        if work.muon:
            source, formula = (
                f"{source}; ours: training/optimizers.py",
                f"{formula} + Muon: (N-1)/N x 2 B x matrices",
            )
        return Traffic(
            int(part * (2 * 4 * work.trained + 2 * _muon_gathered(work))), formula, source
        )
    if work.sharding.stage < 3:
        reductions = count if work.sharding.stage == 2 else 1
        source = "ZeRO paper, sec. 7.2.1; a reduction per microbatch"
        sent = int(part * c * work.trained * (reductions + 1))
        return Traffic(sent, "(N-1)/N x P_t x (microbatches + 1)", source)
    whole = work.weight_numbers - work.adapter - work.shape.small
    if work.sharding.hpz > 1:
        # The second copy of what is not trained never expires (partitioned_param_coordinator.py):
        # it is gathered from all processes in the first step only.
        across = 0 if work.adapter else c * whole
        formula = (
            "across nodes only: (N-1)/N x microbatches x ("
            + ("" if work.adapter else "P + ")
            + "P_t)"
        )
        source = "ZeRO++ (Wang et al. 2023), hpZ: the backward pass gathers within a node"
        return Traffic(int(part * count * (across + c * work.trained)), formula, source)
    again = _gathered_again(work)
    times = 2 + work.asks_reference
    formula = (
        f"(N-1)/N x microbatches x ({times} P + P_t"
        + (" + blocks" if again else "")
        + " - max_reuse_distance)"
    )
    source = (
        "ZeRO paper, sec. 7.2.2: gathered for forward and backward; deepspeed"
        " partitioned_param_coordinator.py"
    )
    kept = min(work.sharding.max_reuse_distance, work.sharding.max_live)
    if whole <= kept:
        kept = whole
    elif work.shape.tied:  # traced: a head that is the embedding is gathered for both once more
        kept = max(0, kept - 2 * work.shape.embedding)
    return Traffic(
        int(part * count * c * (times * whole - kept + again + work.trained)), formula, source
    )


def _gathered_again(work: Workload) -> int:
    """Numbers that ZeRO-3 gathers a third time: of frozen blocks that are checkpointed.

    What a block computes again belongs to the module whose backward pass comes first, its last, and
    frozen weights are released with that (deepspeed 0.19.8, partitioned_param_coordinator.py:
    update_recompute_parameters).
    """
    if not (work.adapter and work.computing.checkpointing):
        return 0
    last = sum(
        n * writer.numbers for block, n in work.shape.blocks if (writer := block.parts[-1].writer)
    )
    return work.shape.block_matrices - last


def _muon_gathered(work: Workload) -> int:
    """Numbers of the updates that ranks give each other: some matrices of one shape at a time, as
    many of each rank.
    """
    counts: Counter[tuple[int, int]] = Counter()
    for matrix, count in work.shape.in_blocks if work.muon else ():
        counts[matrix.inputs, matrix.outputs] += count
    gathered = 0
    for (inputs, outputs), count in counts.items():
        at_once = max(1, MUON_AT_ONCE // (inputs * outputs))
        groups = [at_once] * (count // at_once) + [count % at_once]
        gathered += (
            inputs
            * outputs
            * work.processes
            * sum(ceil(group / work.processes) for group in groups)
        )
    return gathered


def host_traffic(work: Workload) -> Traffic:
    """What one device moves to and from the host."""
    c, count, sharding = work.computing.element_bytes, work.microbatches, work.sharding
    bytes_, formulas = 0, []
    if sharding.offload_param:
        times = 2 + work.asks_reference
        bytes_ += times * count * c * ceil(work.weight_numbers / work.processes)
        formulas.append(f"microbatches x {times} x P / N")
    if sharding.offload_optimizer:
        bytes_ += work.share * ((2 * count - 1) * 4 + c)
        formulas.append("(2 microbatches - 1) x 4 B x P_t / N + P_t / N")
    source = "deepspeed 0.19.8 runtime/zero/stage3.py: partition_grads" if formulas else ""
    return Traffic(bytes_, " + ".join(formulas) or "nothing is offloaded", source)


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step; None where a rate is not known.

    Attributes:
        shortest: the network and the host work while the device computes.
        longest: nothing overlaps.
    """

    compute: float | None
    network: float | None
    host: float | None

    @property
    def shortest(self) -> float | None:
        known = [self.compute, self.network, self.host]
        return None if None in known else max(known)  # type: ignore[type-var]

    @property
    def longest(self) -> float | None:
        known = [self.compute, self.network, self.host]
        return None if None in known else sum(known)  # type: ignore[arg-type]


def step_time(work: Workload, cluster: Cluster, step_tokens: int, efficiency: float) -> StepTime:
    """How long a step takes.

    Args:
        step_tokens: of all devices.
        efficiency: share of the peak that is reached.
    """
    compute = None

    def seconds(moved: Traffic, rate: float | None) -> float | None:
        if moved.bytes == 0:
            return 0.0
        return None if rate is None else moved.bytes / rate

    if cluster.peak_flops is not None:
        compute = (
            computed_flops_per_token(work)
            * step_tokens
            / work.processes
            / (cluster.peak_flops * efficiency)
        )
    network = seconds(network_traffic(work), cluster.network_bytes_per_second)
    return StepTime(compute, network, seconds(host_traffic(work), cluster.host_bytes_per_second))
