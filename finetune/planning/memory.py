"""What a run needs of each device and of the host, term by term: sizes in, bytes out.

A term is on the device or on the host, in some phases of the run; the need of a location is its
worst phase. On a CPU both are the process's own memory. Every term names the source of its formula:
P is all parameters, P_t the trained ones, N processes, c the bytes of the compute dtype. Formulas
under DeepSpeed are read off its 0.19.8 source. docs/guides/planning.md has what is checked by
measurement. A term that changes no plan by more than a few percent is left out: `auto` needs 15%,
because the first step rehearses the largest microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from finetune.planning.activations import worst_moment
from finetune.planning.workload import (
    PHASES,
    STEP,
    TRAINING,
    Cluster,
    Location,
    Phase,
    Term,
    Workload,
)
from finetune.runtime.device import DEVICE_KINDS
from finetune.runtime.host import MIB

SHARD_BYTES = 5 * 10**9
WORKER_BYTES = 300 * MIB  # a loader process shares the rest with its parent
# Of a device's or a host's memory; allocators leave gaps, and the system wants some. Assumed.
USABLE_SHARE = 0.92
MOMENT, MASTER, GRADIENT = 4, 4, 4  # bytes: float32, each
_GLOO_THREADS = 2  # torch ProcessGroupGloo.hpp, Options: collectives that run at once
_SUMMING: tuple[Phase, ...] = ("rows", "reduce", "update")
_ZERO = "ZeRO paper (Rajbhandari et al. 2020)"
_STAGE3 = "deepspeed 0.19.8 runtime/zero/stage3.py"
_STAGE2 = "deepspeed 0.19.8 runtime/zero/stage_1_and_2.py"
_GLOO = "torch ProcessGroupGloo.cpp"
_STATE = "ours: training/state.py"


@dataclass(frozen=True)
class Memory:
    """The terms of a workload."""

    work: Workload
    terms: tuple[Term, ...]

    def in_phase(self, location: Location, phase: Phase) -> int:
        """Bytes of one process in a phase."""
        return sum(
            term.bytes for term in self.terms if term.location == location and phase in term.phases
        )

    def device(self) -> int:
        """Return the peak memory of one device, in bytes."""
        return max(self.in_phase("device", phase) for phase in PHASES)

    def process(self, phases: Sequence[Phase] = PHASES) -> int:
        """Return the peak memory of rank 0 on a CPU, in bytes, without the framework's.

        There, device and host memory are the same.
        """
        own = [term for term in self.terms if term.kind != "framework"]
        return max(sum(term.bytes for term in own if phase in term.phases) for phase in phases)

    def node(self) -> int:
        """Return the peak host memory of one node, in bytes; on a CPU, of all its processes."""
        places = ("device", "host") if self.work.device_type == "cpu" else ("host",)
        needs = dict.fromkeys(PHASES, 0)
        for term in self.terms:
            if term.location in places:
                for phase in term.phases:
                    needs[phase] += term.bytes * (1 if term.once else self.work.local_processes)
        return max(needs.values())


def memory_of(work: Workload) -> Memory:
    """All terms of a workload that are not zero."""
    terms = [*state_terms(work), *_microbatch(work), *_surroundings(work), *_saving(work)]
    return Memory(work, tuple(term for term in terms if term.bytes))


def fits(memory: Memory, cluster: Cluster) -> bool | None:
    """Return whether the need is within what is usable; None if no memory was given that would show
    that it is not.
    """
    on_cpu = cluster.device_type == "cpu"
    device = None if on_cpu else cluster.device_memory_bytes
    pairs = ((memory.device(), device), (memory.node(), cluster.host_memory_bytes))
    judged = [need <= USABLE_SHARE * there for need, there in pairs if there is not None]
    if not all(judged):
        return False
    return True if judged and (on_cpu or device is not None) else None


# ---------------------------------------------------------------- weights, gradients, optimizer


def state_terms(work: Workload) -> list[Term]:
    """Return the terms that do not depend on the microbatch, zero terms included."""
    if work.sharding.stage == 3:
        return [*_zero3(work), *_quantized(work)]
    return [*(_zero12(work) if work.sharding.engine else _plain(work)), *_quantized(work)]


def _moments(work: Workload, parameters: int) -> int:
    """Return the bytes of the optimizer's moments for `parameters` trained parameters."""
    if work.optimizer == "adafactor":  # of a matrix one moment per row and column
        return MOMENT * sum((m.inputs + m.outputs) * m.experts for m in work.shape.matrices)
    if work.optimizer == "adamw-8bit":  # two bytes, and a scale for 256 elements of each
        return round(2 * (1 + MOMENT / 256) * parameters)
    return 2 * MOMENT * parameters - MOMENT * work.shape.block_matrices * work.muon


def _held(work: Workload) -> str:
    return f"P, linear layers in {work.quantization}" if work.quantized else "P"


def _quantized(work: Workload) -> list[Term]:
    """Return what quantized layers need in addition to their elements."""
    if not work.quantized:
        return []
    c, ours = work.computing.element_bytes, "ours: modeling/quantization.py"
    largest = max(matrix.size for matrix in work.quantized)
    whole = c * work.held_parameters if work.sharding.stage == 3 else 0
    return [
        Term(
            "weights",
            work.scale_bytes,
            "device",
            f"scales of {work.quantization}",
            "bitsandbytes 0.50",
            PHASES,
        ),
        Term(
            "buffers",
            c * largest,
            "device",
            f"{c} B x largest linear layer, dequantised",
            ours,
            ("rows",),
        ),
        Term(
            "load",
            whole,
            "device",
            "all weights in few bits, before they are spread",
            ours,
            ("load",),
        ),
    ]


def _plain(work: Workload) -> list[Term]:
    """One process, or DDP."""
    how, trained = work.computing, work.trained
    each = how.adapter_bytes if work.adapter else how.weight_bytes
    held = how.weight_bytes * (work.held_parameters - trained) + each * trained
    # One process reads a mapped file when it first computes with it; several compare or send its
    # weights before.
    there = TRAINING if work.mapped and work.processes == 1 else PHASES
    weights, optimizer = f"{how.weight_bytes} B x {_held(work)}", "torch.optim.AdamW"
    moments = "8 B x P_t"
    if work.muon:
        moments, optimizer = "4 B x blocks' matrices + 8 B x the rest", f"{optimizer}; Muon"
    elif work.optimizer == "adamw-8bit":
        moments, optimizer = "2 B x P_t", "bitsandbytes AdamW8bit, with scales"
    elif work.optimizer == "adafactor":
        moments, optimizer = "4 B x rows and columns", "transformers Adafactor"
    update = 0 if work.fused else 4 * trained
    temporary, foreach = (
        "4 B x P_t: intermediate tensors of the update",
        "torch.optim.AdamW(foreach=True)",
    )
    buckets = 4 * trained if work.processes > 1 else 0
    return [
        Term("weights", held, "device", weights, "ours: training/build.py", there),
        Term("gradients", each * trained, "device", f"{each} B x P_t", f"{_ZERO}, sec. 3.1", STEP),
        Term("optimizer", _moments(work, trained), "device", moments, optimizer),
        Term("buffers", update, "device", temporary, foreach, ("update",)),
        Term("buffers", buckets, "device", "4 B x P_t: buckets", "torch DDP reducer", PHASES),
    ]


def _zero12(work: Workload) -> list[Term]:
    """ZeRO-1 and ZeRO-2."""
    c, sharding, share = work.computing.element_bytes, work.sharding, work.share
    second = 2 if sharding.overlap and not work.gloo else 1
    flat = "deepspeed 0.19.8 runtime/utils.py: all_gather_into_tensor_dp_groups"
    gathered = c * work.trained if work.gloo else 0
    terms = [
        Term(
            "weights",
            c * work.held_parameters,
            "device",
            f"{c} B x {_held(work)}",
            f"{_ZERO}, sec. 5.1-5.2",
            PHASES,
        ),
        *_optimizer_shares(work, f"{_STAGE2}: __init__", PHASES),
        *_bucket(work, second, 1, ("rows", "reduce"), f"{_STAGE2}: setup_buckets"),
        Term("buffers", c * work.trained, "device", f"{c} B x P_t: flat copy", _STAGE2, ("load",)),
        Term("buffers", gathered, "device", f"{c} B x P_t: gloo's flat output", flat, ("gather",)),
    ]
    if sharding.stage < 2:
        formula, whole = "4 B x P_t", GRADIENT * work.trained
        terms.append(Term("gradients", whole, "device", formula, f"{_ZERO}, sec. 5.1", _SUMMING))
    if sharding.offload_optimizer:
        # In addition to the gradients: weights that are copied back, and the sum over microbatches.
        each = GRADIENT + c * (1 + (work.microbatches > 1))
        formula = f"{each} B x P_t / N: with weights on their way back, and sums"
        return [*terms, Term("gradients", each * share, "host", formula, _STAGE2)]
    formula, copy, step = "4 B x P_t / N", "4 B x P_t / N: flat copy", f"{_STAGE2}: step"
    return [
        *terms,
        Term("gradients", GRADIENT * share, "device", formula, f"{_ZERO}, sec. 5.2", _SUMMING),
        Term("gradients", GRADIENT * share, "device", copy, step, ("update",)),
    ]


def _optimizer_shares(work: Workload, source: str, phases: tuple[Phase, ...]) -> list[Term]:
    """Return a process's part of masters and moments under ZeRO."""
    location: Location = "host" if work.sharding.offload_optimizer else "device"
    moments, masters = _moments(work, work.share), "4 B x P_t / N: float32 masters"
    return [
        Term("weights", MASTER * work.share, location, masters, source, phases),
        Term("optimizer", moments, location, "8 B x P_t / N", f"{_ZERO}, sec. 5.1"),
    ]


def _bucket(
    work: Workload, buckets: int, copies: int, phases: tuple[Phase, ...], source: str
) -> list[Term]:
    """Return the buckets that gradients are reduced in, and the copies of one while it is summed
    over processes: after the last microbatch if one bucket holds them all.
    """
    c, size = work.computing.element_bytes, work.sharding.reduce_bucket
    used = min(size, work.trained)
    # Pages of a CPU's bucket that were never written cost no memory.
    held = c * buckets * (used if work.device_type == "cpu" else size)
    when: tuple[Phase, ...] = ("rows",) if size < work.trained else ("reduce",)
    formula, summed = f"{c} B x reduce_bucket_size", "min(P_t, reduce_bucket_size): being summed"
    return [
        Term("buffers", held, "device", formula, source, phases),
        Term("buffers", c * copies * used, "device", f"{c * copies} B x {summed}", source, when),
    ]


def _zero3(work: Workload) -> list[Term]:
    """ZeRO-3, weights included."""
    c, sharding, share = work.computing.element_bytes, work.sharding, work.share
    location: Location = "host" if sharding.offload_optimizer else "device"
    weights: Location = "host" if sharding.offload_param else "device"
    part, held = c * ceil(work.held_parameters / work.processes), _held(work)
    second = c * ceil(work.held_parameters / sharding.hpz) if sharding.hpz > 1 else 0
    hpz = "deepspeed 0.19.8 runtime/zero/partition_parameters.py: _partition_param_sec"
    # The step copies the gradients of a sub-group flat; an optimizer on the host has all of them
    # once more.
    copied = min(share, sharding.sub_group)
    phases: tuple[Phase, ...] = ("update",)
    if sharding.offload_optimizer:
        copied, phases = share, TRAINING
    gradients, flat = f"{_STAGE3}: grad_partitions_flat_buffer", f"{_STAGE3}: step"
    return [
        Term("weights", part, weights, f"{c} B x {held} / N", f"{_ZERO}, sec. 5.3", PHASES),
        Term(
            "weights",
            second,
            weights,
            f"{c} B x P / hpZ: the second copy, within a node",
            hpz,
            STEP,
        ),
        *_gathered(work),
        *_optimizer_shares(work, f"{_STAGE3}: _create_fp32_partitions", TRAINING),
        Term("gradients", GRADIENT * share, location, "4 B x P_t / N", gradients),
        Term("gradients", GRADIENT * copied, location, "4 B x sub-group: copy", flat, phases),
        # gloo's reduce_scatter copies what it gets.
        *_bucket(work, 1, 2 if work.gloo else 1, TRAINING, f"{_STAGE3}: ipg_buckets"),
    ]


def _gathered(work: Workload) -> list[Term]:
    """Weights that are whole on a device under ZeRO-3, and the buffers that they are gathered
    into.
    """
    c, sharding, largest = work.computing.element_bytes, work.sharding, work.shape.largest_module
    threshold = sharding.persistence_threshold
    resident = work.shape.small + work.adapter
    resident += sum(m.size for m in work.shape.matrices if m.size <= threshold and not m.is_end)
    # Fetched ahead, and kept where the backward pass is near.
    reused = sharding.max_reuse_distance // 2 + sharding.prefetch_bucket
    live = min(max(0, work.held_parameters - resident), max(sharding.max_live, reused) + largest)
    # Each weight is copied out of the bucket that it was gathered into. The bucket stays until its
    # last weight is used. gloo also has a flat output for each thread.
    bucket = min(live, sharding.prefetch_bucket + largest)
    flat = min(live, _GLOO_THREADS * bucket) if work.gloo else 0
    always = f"{c} B x parameters up to {threshold:,} numbers, always whole"
    fetched = "max(max_live_parameters, max_reuse_distance / 2 + prefetch bucket)"
    names = "(prefetch bucket + largest module)"
    coordinator = "deepspeed 0.19.8 partitioned_param_coordinator.py, partition_parameters.py"
    outputs = f"{c} B x {_GLOO_THREADS} x {names}: gloo's flat outputs"
    persisted = "deepspeed: stage3_param_persistence_threshold"
    return [
        Term("live", c * resident, "device", always, persisted),
        Term(
            "live",
            c * live,
            "device",
            f"{c} B x min(P, {fetched} + largest module)",
            coordinator,
            ("gather", "rows"),
        ),
        Term("live", c * bucket, "device", f"{c} B x {names}", coordinator, ("rows",)),
        Term("buffers", c * flat, "device", outputs, f"{_GLOO}: allgather", ("gather",)),
    ]


# ---------------------------------------------------------------- microbatch, surroundings, saving


def _microbatch(work: Workload) -> list[Term]:
    how, most = work.computing, worst_moment(work)
    kept = "blocks' inputs, and one block's" if how.checkpointing else "layers x a block's"
    kept += f" kept tensors x {work.microbatch_tokens:,} tokens"
    logits = (
        "logits of all targets x 6 B" if how.compiled else "logits of one chunk of targets x 8 B"
    )
    cast = f"{how.element_bytes} B x matrices: cast for the microbatch"
    ours, of_loss = "ours: planning/activations.py", "ours: modeling/loss.py, ChunkedHead"
    code = f"{ours} (transformers' code, tensor by tensor)"
    return [
        Term("activations", most.kept, "device", kept, code, ("rows",)),
        Term("activations", most.flowing, "device", "gradients on their way", ours, ("rows",)),
        Term("logits", most.logits, "device", logits, of_loss, ("rows",)),
        Term("weights", most.casts, "device", cast, "torch.amp", ("rows",)),
    ]


def _surroundings(work: Workload) -> list[Term]:
    """Loading, loader and framework."""
    kind, accelerator = DEVICE_KINDS[work.device_type], work.device_type != "cpu"
    weight_bytes, parameters = work.computing.weight_bytes, work.shape.total
    file = work.file_bytes * parameters
    # On a CPU without ZeRO-3 the mapped files are the weights themselves; if nothing is converted,
    # so are they before they go to a device.
    mapped = min(file, SHARD_BYTES) if accelerator else 0 if work.mapped else file
    converted = weight_bytes != work.file_bytes and not work.quantized
    moved = weight_bytes * parameters if accelerator and converted else 0
    if work.sharding.stage == 3:
        moved = 0
    workers = WORKER_BYTES * work.loader_workers
    measured = "assumed" if accelerator else "measured: benchmarks/plan_memory.py"
    public = "public reports, not measured here"
    return [
        Term("framework", kind.context_bytes, "device", "context", public, PHASES),
        Term(
            "buffers",
            work.hccl_bytes,
            "device",
            "2 x HCCL_BUFFSIZE x communicators",
            "CANN environment variables, HCCL_BUFFSIZE; how many communicators there are is"
            " assumed",
        ),
        Term("framework", kind.host_bytes, "host", "imports and libraries", measured, PHASES),
        Term("loader", workers, "host", "300 MiB x loader processes", "assumed"),
        Term(
            "loader",
            work.data_bytes,
            "host",
            "5 B x tokens, mapped",
            "ours: data/samples.py",
            PHASES,
            once=True,
        ),
        Term(
            "load",
            mapped,
            "host",
            "the model's files, mapped",
            "safetensors: mmap; transformers: files of at most 5 GB, all mapped; what is read may"
            " be dropped again",
            ("load",),
            once=True,
        ),
        Term(
            "load",
            moved,
            "host",
            f"{weight_bytes} B x P before it goes to the device",
            "ours: modeling/pretrained.py, scratch.py: made on the host, moved by Trainer",
            ("load",),
        ),
    ]


def _saving(work: Workload) -> list[Term]:
    """Return the copies on the host: the state for a checkpoint, then the whole model for the
    result of full training.
    """
    sharding, full = work.sharding, not work.adapter
    shared = full and work.processes > 1
    on_host = work.device_type == "cpu" or sharding.offload_optimizer
    # float32 on the host already
    in_place = on_host and ((sharding.stage == 3 and full) or not sharding.engine)
    parameters, of_ranks = (work.share, " / N") if shared else (work.trained, "")
    each = 0 if in_place else 8
    phases: tuple[Phase, ...] = ("save",)
    formula = f"8 B x P_t{of_ranks}: moments, after the weights"
    if work.saves_behind:  # from the first save on; given back before the result is written
        each, phases = 12, (*STEP, "save")
        formula = f"12 B x P_t{of_ranks}: copy of weights and moments"
    result = work.computing.element_bytes * work.shape.total if full else 0
    return [
        Term("save", each * parameters, "host", formula, _STATE, phases, not shared),
        Term("save", result, "host", "c x P: whole", _STATE, ("result",), True),
    ]
