"""What an optimizer step costs each device: operations, bytes over the network, bytes to and from
the host.

Operations are counted as in the PaLM paper (Chowdhery et al. 2022, appendix B) and nanochat. Each
parameter of a matrix that a token passes takes 6 floating-point operations (2 forward, 4 backward).
Attention takes 12 x attention layers x width x sequence length; causality is not deducted. LoRA
computes less: a frozen matrix has no weight gradient, so it takes 4 operations per parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from finetune.planning.workload import Cluster, Workload

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Share of the peak that training reaches. Published for dense models: 33-50% (torchtitan
# Llama-3.1-8B 33-39% on H100; nanochat d24 50%; QwenLM 72B LoRA with ZeRO-3 33-38%).
EFFICIENCY = 0.4
MUONS = ("normuon", "muon")  # values of --optimizer
# Parameters of the matrices that Muon takes at once: 128 MiB in float32, a few times over.
MUON_AT_ONCE = 32 * 2**20


def matrix_parameters(model: PreTrainedModel) -> int:
    """Parameters of the matrices that a token passes: blocks and output head. Embeddings are only
    looked up.
    """
    from torch.nn import Embedding

    head = model.get_output_embeddings().weight
    tables = {id(m.weight) for m in model.modules() if isinstance(m, Embedding)} - {id(head)}
    return sum(p.numel() for p in model.parameters() if p.ndim >= 2 and id(p) not in tables)


def flops_utilisation(
    tokens_per_second: float, flops_of_a_token: int, peak_flops: float | None, devices: int
) -> float | None:
    """MFU as a fraction of the peak of all devices; None if the peak is unknown. Recomputed
    activations are not counted: they are not progress.
    """
    if peak_flops is None:
        return None
    return tokens_per_second * flops_of_a_token / (peak_flops * devices)


def forward_flops_per_token(work: Workload) -> int:
    """Return the operations of a token's forward pass."""
    shape = work.shape
    return 2 * (shape.passed + work.adapter) + 4 * shape.query_width * work.longest


def flops_per_token(work: Workload) -> int:
    """Operations of training that are progress: forward and backward, without recomputing."""
    shape = work.shape
    attention = 12 * shape.query_width * work.longest
    return (4 if work.adapter else 6) * shape.passed + 6 * work.adapter + attention


def computed_flops_per_token(work: Workload) -> int:
    """Operations that the device does: with checkpointed blocks recomputed, and a reference."""
    flops, forward = flops_per_token(work), forward_flops_per_token(work)
    if work.computing.checkpointing:
        flops += forward - 2 * work.shape.embedding
    return flops + forward * work.asks_reference


@dataclass(frozen=True)
class Traffic:
    """Bytes of one device in one optimizer step."""

    bytes: int
    formula: str
    source: str = ""


def network_traffic(work: Workload) -> Traffic:
    """Return what one device sends over the network."""
    sharding, count, parameters = work.sharding, work.microbatches, work.trained
    part, c = (work.processes - 1) / work.processes, work.computing.element_bytes
    if work.processes == 1:
        return Traffic(0, "one process")
    if not sharding.engine:
        formula, source = "2 (N-1)/N x 4 B x P_t, once a step", "ring all-reduce"
        updates = 0.0
        if work.muon:
            # Ranks give each other the updates: of matrices taken at once as many of each rank.
            for matrix in work.shape.matrices:
                at_once = max(1, MUON_AT_ONCE // matrix.size)
                padded = max(1, work.processes / at_once)
                updates += 2 * padded * matrix.size * matrix.in_block
            formula = f"{formula} + Muon: (N-1)/N x 2 B x matrices"
            source = f"{source}; ours: training/optimizers.py"
        return Traffic(int(part * (8 * parameters + updates)), formula, source)
    if sharding.stage < 3:
        reductions = count if sharding.stage == 2 else 1
        source = "ZeRO paper, sec. 7.2.1; a reduction per microbatch"
        sent = int(part * c * parameters * (reductions + 1))
        return Traffic(sent, "(N-1)/N x P_t x (microbatches + 1)", source)
    whole = work.held_parameters - work.adapter - work.shape.small
    if sharding.hpz > 1:
        # The second copy of what is not trained never expires (partitioned_param_coordinator.py):
        # it is gathered from all processes in the first step only.
        gathered, terms = (0, "P_t") if work.adapter else (whole, "P + P_t")
        formula = f"across nodes only: (N-1)/N x microbatches x ({terms})"
        source = "ZeRO++ (Wang et al. 2023), hpZ: the backward pass gathers within a node"
    else:
        times, kept = 2 + work.asks_reference, min(sharding.max_reuse_distance, sharding.max_live)
        if whole > kept and work.shape.tied:  # traced: such a head is gathered for both once more
            kept = max(0, kept - 2 * work.shape.embedding)
        gathered = times * whole - min(whole, kept)
        terms = f"{times} P + P_t"
        if work.adapter and work.computing.checkpointing:
            # Frozen blocks are gathered a third time. DeepSpeed counts a block's recomputation to
            # the module whose backward pass comes first, which is its last module, and releases
            # frozen weights with it (partitioned_param_coordinator.py:
            # update_recompute_parameters).
            last = [(block.parts[-1].writer, count) for block, count in work.shape.blocks]
            gathered += work.shape.block_matrices
            gathered -= sum(writer.size * count for writer, count in last if writer)
            terms += " + blocks"
        formula = f"(N-1)/N x microbatches x ({terms} - max_reuse_distance)"
        source = "ZeRO paper, sec. 7.2.2; deepspeed 0.19.8 partitioned_param_coordinator.py"
    return Traffic(int(part * count * c * (gathered + parameters)), formula, source)


def host_traffic(work: Workload) -> Traffic:
    """Return what one device moves to and from the host."""
    c, count, sharding = work.computing.element_bytes, work.microbatches, work.sharding
    bytes_, formulas = 0, []
    if sharding.offload_param:
        times = 2 + work.asks_reference
        bytes_ += times * count * c * ceil(work.held_parameters / work.processes)
        formulas.append(f"microbatches x {times} x P / N")
    if sharding.offload_optimizer:
        bytes_ += work.share * ((2 * count - 1) * 4 + c)
        formulas.append("(2 microbatches - 1) x 4 B x P_t / N + P_t / N")
    source = "deepspeed 0.19.8 runtime/zero/stage3.py: partition_grads" if formulas else ""
    return Traffic(bytes_, " + ".join(formulas) or "nothing is offloaded", source)


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step; None if a rate is not known."""

    compute: float | None
    network: float | None
    host: float | None

    @property
    def shortest(self) -> float | None:
        """The network and the host work while the device computes."""
        known = [part for part in (self.compute, self.network, self.host) if part is not None]
        return max(known) if len(known) == 3 else None

    @property
    def longest(self) -> float | None:
        """Nothing overlaps."""
        known = [part for part in (self.compute, self.network, self.host) if part is not None]
        return sum(known) if len(known) == 3 else None


def step_time(work: Workload, cluster: Cluster, step_tokens: int, efficiency: float) -> StepTime:
    """Estimate how long a step takes.

    Args:
        step_tokens: tokens of a step on all devices.
        efficiency: share of the peak that is reached.
    """

    def seconds(moved: Traffic, rate: float | None) -> float | None:
        if moved.bytes == 0:
            return 0.0
        return None if rate is None else moved.bytes / rate

    flops = computed_flops_per_token(work) * step_tokens / work.processes
    return StepTime(
        None if cluster.peak_flops is None else flops / (cluster.peak_flops * efficiency),
        seconds(network_traffic(work), cluster.network_bytes_per_second),
        seconds(host_traffic(work), cluster.host_bytes_per_second),
    )
