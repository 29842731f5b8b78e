"""What a run needs of each device and of the host, term by term: numbers in, bytes out, no torch.

A term lives on the device or on the host, in some phases of the run; the need of a place is its worst phase. On a CPU
both are the process's own memory. Every term names the source of its formula; P is all parameters, P_t the trained
ones, N processes. How well the sum predicts is measured: docs/planning.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Literal

from finetune.modeling.activations import Computing, activation_bytes, loss_bytes, working_bytes
from finetune.modeling.shapes import ModelShape

Place = Literal["device", "host"]
Phase = Literal["load", "rows", "update", "save"]
PHASES: tuple[Phase, ...] = ("load", "rows", "update", "save")
TRAINING: tuple[Phase, ...] = ("rows", "update", "save")
MOMENT_BYTES, MASTER_BYTES, GRADIENT_BYTES = 4, 4, 4  # float32, each
MIB = 2**20

# What a process holds before a model is there. CPU: measured (docs/planning.md). Accelerators: the context of driver
# and libraries, about 1 GiB by public reports; not measured here.
FRAMEWORK_HOST_BYTES = {"cpu": 750 * MIB, "cuda": 3072 * MIB, "npu": 3072 * MIB, "mps": 1024 * MIB}
FRAMEWORK_DEVICE_BYTES = {"cpu": 0, "cuda": 1024 * MIB, "npu": 1024 * MIB, "mps": 0}
SHARD_BYTES = 5 * 10**9
WORKER_BYTES = 300 * MIB  # a loader process shares the rest with its parent

_ZERO = "ZeRO paper (Rajbhandari et al. 2020)"
_STAGE3 = "deepspeed 0.19.8 runtime/zero/stage3.py"
_STAGE2 = "deepspeed 0.19.8 runtime/zero/stage_1_and_2.py"


@dataclass(frozen=True)
class Sharding:
    """How the state is spread.

    Attributes:
        engine: DeepSpeed runs the step; else one process, or DDP.
        stage: ZeRO stage, 0 to 3.
        reduce_bucket, prefetch_bucket, persistence_threshold, max_reuse_distance, sub_group: DeepSpeed's numbers of
            elements, with its defaults.
        overlap: `overlap_comm`: ZeRO-1 and -2 have a second bucket.
    """

    engine: bool = False
    stage: int = 0
    offload_optimizer: bool = False
    offload_param: bool = False
    reduce_bucket: int = 500_000_000
    prefetch_bucket: int = 50_000_000
    persistence_threshold: int = 100_000
    max_reuse_distance: int = 1_000_000_000
    sub_group: int = 1_000_000_000
    overlap: bool = False

    @property
    def name(self) -> str:
        """As people call it."""
        if not self.engine:
            return "none"
        offloads = [n for n, on in (("optimizer", self.offload_optimizer), ("weights", self.offload_param)) if on]
        return f"ZeRO-{self.stage}" + (f" + offload of {' and '.join(offloads)}" if offloads else "")


@dataclass(frozen=True)
class Workload:
    """Everything that decides the memory of one process.

    Attributes:
        trained: trained parameters; `adapter` of them are LoRA's, which come on top of the model's own.
        processes: of the whole run. local_processes: on one node.
        row_tokens: most tokens of a row; targets: of them, supervised; longest: of the longest document.
        rows: rows of a device in one optimizer step.
        muon: the blocks' matrices are trained by Muon, which has one moment.
        fused: the optimizer's kernel needs no temporaries.
        file_bytes: bytes of a parameter in the model's files; 0 for a model from scratch.
        data_bytes: of tokenized data, memory-mapped.
        saves: a checkpoint or the result is written.
    """

    shape: ModelShape
    computing: Computing
    sharding: Sharding
    trained: int
    adapter: int = 0
    processes: int = 1
    local_processes: int = 1
    row_tokens: int = 2048
    targets: int = 2048
    longest: int = 2048
    rows: int = 1
    muon: bool = False
    fused: bool = True
    device_type: str = "cuda"
    file_bytes: int = 2
    loader_workers: int = 0
    data_bytes: int = 0
    saves: bool = True

    @property
    def parameters(self) -> int:
        """P: the model's, with adapters."""
        return self.shape.total + self.adapter

    @property
    def share(self) -> int:
        """Trained parameters of one process under ZeRO."""
        return ceil(self.trained / self.processes)


@dataclass(frozen=True)
class Term:
    """One use of memory.

    Attributes:
        kind: weights, gradients, optimizer, live, activations, logits, buffers, loader, framework, load or save.
        formula: in words, with its numbers.
        once: on the host, one process of a node has it.
    """

    kind: str
    bytes: int
    place: Place
    formula: str
    source: str
    phases: tuple[Phase, ...] = TRAINING
    once: bool = False


@dataclass(frozen=True)
class Memory:
    """The terms of a workload."""

    work: Workload
    terms: tuple[Term, ...] = field(default_factory=tuple)

    def in_phase(self, place: Place, phase: Phase) -> int:
        """Bytes of one process at a place in a phase."""
        return sum(term.bytes for term in self.terms if term.place == place and phase in term.phases)

    def device(self) -> int:
        """Most bytes of one device."""
        return max(self.in_phase("device", phase) for phase in PHASES)

    def process(self, phases: Sequence[Phase] = PHASES) -> int:
        """Most bytes of rank 0 where device and host are one (CPU), without the framework's."""
        return max(
            sum(term.bytes for term in self.terms if phase in term.phases and term.kind != "framework")
            for phase in phases
        )

    def node(self) -> int:
        """Most host bytes of one node; on a CPU, of all its processes together."""
        places = ("device", "host") if self.work.device_type == "cpu" else ("host",)

        def in_phase(phase: Phase) -> int:
            here = [term for term in self.terms if term.place in places and phase in term.phases]
            return sum(term.bytes * (1 if term.once else self.work.local_processes) for term in here)

        return max(in_phase(phase) for phase in PHASES)


def memory_of(work: Workload) -> Memory:
    """All terms of a workload that are not zero."""
    state = _zero3(work) if work.sharding.stage == 3 else _zero12(work) if work.sharding.engine else _plain(work)
    terms = [*state, *_row(work), *_surroundings(work)]
    return Memory(work, tuple(term for term in terms if term.bytes))


# ---------------------------------------------------------------- weights, gradients, optimizer


def _moments(work: Workload, numbers: int) -> int:
    """Bytes of the optimizer's moments for so many trained parameters."""
    if not work.muon:
        return 2 * MOMENT_BYTES * numbers
    matrices = work.shape.layers * work.shape.block_matrices
    return MOMENT_BYTES * matrices + 2 * MOMENT_BYTES * (numbers - matrices)


def _plain(work: Workload) -> list[Term]:
    """One process, or DDP."""
    how, trained = work.computing, work.trained
    frozen = work.parameters - trained
    held = how.weight_bytes * frozen + (how.adapter_bytes if work.adapter else how.weight_bytes) * trained
    terms = [
        Term("weights", held, "device", f"{how.weight_bytes} B x P", "ours: training/build_sft.py", PHASES),
        _gradients(work, trained),
        Term(
            "optimizer",
            _moments(work, trained),
            "device",
            "4 B x blocks' matrices + 8 B x the rest" if work.muon else "8 B x P_t",
            "torch.optim.AdamW: two float32 moments" + ("; Muon: one" if work.muon else ""),
        ),
        Term(
            "buffers",
            0 if work.fused else 4 * trained,
            "device",
            "4 B x P_t: intermediate tensors of the update",
            "torch.optim.AdamW(foreach=True)",
            ("update",),
        ),
    ]
    if how.autocast:
        cast = how.element_bytes * work.shape.passed
        terms.append(Term("weights", cast, "device", "2 B x matrices: cast for the row", "torch.amp", ("rows",)))
    if work.muon:
        largest = max(matrix.numbers for matrix in work.shape.matrices)
        terms.append(Term("buffers", 14 * largest, "device", "14 B x largest matrix", "torch.optim.Muon", ("update",)))
    if work.processes > 1:
        # LoRA's gradients are summed flat, after all rows; DDP's buckets are made all the same, and stay untouched.
        touched = 4 * trained if not (work.adapter and work.device_type == "cpu") else 0
        terms.append(Term("buffers", touched, "device", "4 B x P_t: buckets", "torch DDP reducer"))
        if work.adapter:
            terms.append(
                Term("buffers", 4 * trained, "device", "4 B x P_t: flat sum", "ours: execution.py", ("update",))
            )
    return terms


def _gradients(work: Workload, numbers: int) -> Term:
    size = work.computing.adapter_bytes if work.adapter else work.computing.weight_bytes
    return Term("gradients", size * numbers, "device", f"{size} B x P_t", f"{_ZERO}, sec. 3.1")


def _zero12(work: Workload) -> list[Term]:
    """ZeRO-1 and ZeRO-2."""
    how, sharding, share = work.computing, work.sharding, work.share
    c, place = how.element_bytes, "host" if sharding.offload_optimizer else "device"
    bucket = _touched(work, sharding.reduce_bucket)
    buckets = c * bucket * (2 if sharding.overlap and work.device_type != "cpu" else 1)
    terms = [
        Term("weights", c * work.parameters, "device", f"{c} B x P", f"{_ZERO}, sec. 5.1-5.2", PHASES),
        Term("weights", MASTER_BYTES * share, place, "4 B x P_t / N: float32 masters", f"{_STAGE2}: __init__"),
        Term("optimizer", _moments(work, share), place, "8 B x P_t / N", f"{_ZERO}, sec. 5.1"),
        Term("buffers", buckets, "device", f"{c} B x reduce_bucket_size", f"{_STAGE2}: setup_buckets", ("rows",)),
        Term("buffers", c * work.trained, "device", f"{c} B x P_t: flat copy", f"{_STAGE2}: __init__", ("load",)),
    ]
    if sharding.stage < 2:
        terms.append(Term("gradients", 4 * work.trained, "device", "4 B x P_t", f"{_ZERO}, sec. 5.1"))
    if sharding.offload_optimizer:
        terms += [
            Term(
                "gradients", GRADIENT_BYTES * share, "host", "4 B x P_t / N", f"{_STAGE2}: initialize_optimizer_states"
            ),
            Term("buffers", c * share, "host", f"{c} B x P_t / N: weights on their way back", f"{_STAGE2}: __init__"),
            Term(
                "gradients",
                c * share if work.rows > 1 else 0,
                "host",
                f"{c} B x P_t / N: sum over rows",
                f"{_STAGE2}: accumulated_grads_in_cpu",
            ),
        ]
    else:
        terms += [
            Term("gradients", GRADIENT_BYTES * share, "device", "4 B x P_t / N", f"{_ZERO}, sec. 5.2"),
            Term("gradients", 4 * share, "device", "4 B x P_t / N: flat copy", f"{_STAGE2}: step", ("update",)),
        ]
    return terms


def _zero3(work: Workload) -> list[Term]:
    """ZeRO-3, weights included."""
    how, sharding, share, shape = work.computing, work.sharding, work.share, work.shape
    c, place = how.element_bytes, "host" if sharding.offload_optimizer else "device"
    weights: Place = "host" if sharding.offload_param else "device"
    resident = _resident(work)
    live = min(
        work.parameters - resident,
        sharding.max_reuse_distance // 2 + sharding.prefetch_bucket + shape.largest_module,
    )
    group = min(share, sharding.sub_group)
    terms = [
        Term(
            "weights",
            c * ceil(work.parameters / work.processes),
            weights,
            f"{c} B x P / N",
            f"{_ZERO}, sec. 5.3",
            PHASES,
        ),
        Term(
            "live",
            c * resident,
            "device",
            f"{c} B x parameters up to {sharding.persistence_threshold:,} numbers, always whole",
            "deepspeed: stage3_param_persistence_threshold",
        ),
        Term(
            "live",
            c * live,
            "device",
            f"{c} B x min(P, max_reuse_distance / 2 + prefetch_bucket + largest module)",
            "deepspeed 0.19.8 partitioned_param_coordinator.py: a forward's weights stay if their backward is near",
            ("rows",),
        ),
        Term(
            "weights",
            MASTER_BYTES * share,
            place,
            "4 B x P_t / N: float32 masters",
            f"{_STAGE3}: _create_fp32_partitions",
        ),
        Term("optimizer", _moments(work, share), place, "8 B x P_t / N", f"{_ZERO}, sec. 5.1"),
        Term("gradients", GRADIENT_BYTES * share, place, "4 B x P_t / N", f"{_STAGE3}: grad_partitions_flat_buffer"),
        Term(
            "buffers",
            c * _touched(work, sharding.reduce_bucket),
            "device",
            f"{c} B x reduce_bucket_size",
            f"{_STAGE3}: ipg_buckets",
        ),
        Term(
            "buffers",
            c * min(work.trained, sharding.reduce_bucket),
            "device",
            f"{c} B x min(P_t, reduce_bucket_size): being summed",
            "deepspeed 0.19.8 comm/coalesced_collectives.py: reduce_scatter_coalesced",
            ("rows",),
        ),
    ]
    if sharding.offload_optimizer:
        terms.append(
            Term(
                "gradients",
                4 * share,
                "host",
                "4 B x P_t / N: the optimizer's own",
                f"{_STAGE3}: initialize_optimizer_states",
            )
        )
    else:
        terms.append(
            Term("gradients", 4 * group, "device", "4 B x sub-group: flat copy", f"{_STAGE3}: step", ("update",))
        )
    return terms


def _resident(work: Workload) -> int:
    """Parameters that ZeRO-3 keeps whole on every device."""
    threshold = work.sharding.persistence_threshold
    matrices = sum(m.numbers for m in work.shape.matrices if m.numbers <= threshold) * work.shape.layers
    return work.shape.small + matrices + work.adapter


def _touched(work: Workload, bucket: int) -> int:
    """Numbers of a bucket that cost memory: all of it on a device; on a CPU, pages that were never written cost none."""
    return min(bucket, work.trained) if work.device_type == "cpu" else bucket


# ---------------------------------------------------------------- a row, and what is around it


def _row(work: Workload) -> list[Term]:
    shape, how = work.shape, work.computing
    checkpointed = "blocks' inputs + one block's" if how.checkpointing else "layers x a block's"
    chunk = "all targets" if how.compiled else "one chunk of targets"
    return [
        Term(
            "activations",
            activation_bytes(shape, how, work.row_tokens),
            "device",
            f"{checkpointed} kept tensors x {work.row_tokens:,} tokens",
            "ours: modeling/activations.py (transformers' code, tensor by tensor)",
            ("rows",),
        ),
        Term(
            "activations",
            working_bytes(shape, how, work.row_tokens, work.longest),
            "device",
            "gradients within a block",
            "ours: modeling/activations.py",
            ("rows",),
        ),
        Term(
            "logits",
            loss_bytes(shape, how, work.targets),
            "device",
            f"logits of {chunk} x 12 B" if not how.compiled else f"logits of {chunk} x 6 B",
            "ours: modeling/loss.py, ChunkedHead: supervised positions only",
            ("rows",),
        ),
    ]


def _surroundings(work: Workload) -> list[Term]:
    """Loading, saving, loader and framework."""
    kind, accelerator = work.device_type, work.device_type != "cpu"
    file = work.file_bytes * work.shape.total
    zero3 = work.sharding.stage == 3
    whole = work.computing.weight_bytes * work.shape.total
    terms = [
        Term(
            "framework", FRAMEWORK_DEVICE_BYTES[kind], "device", "context", "public reports, not measured here", PHASES
        ),
        Term("framework", FRAMEWORK_HOST_BYTES[kind], "host", "imports and libraries", "docs/planning.md", PHASES),
        Term("loader", WORKER_BYTES * work.loader_workers, "host", "300 MiB x loader processes", "assumed", TRAINING),
        Term("loader", work.data_bytes, "host", "5 B x tokens, mapped", "ours: data/samples.py", PHASES, once=True),
        Term(
            "load",
            min(file, SHARD_BYTES) if accelerator else file,
            "host",
            "a file of the model, mapped" if accelerator else "the model's files, mapped",
            "safetensors: mmap; transformers: files of at most 5 GB",
            ("load",),
            once=accelerator,
        ),
        Term(
            "load",
            whole if accelerator and not zero3 else 0,
            "host",
            f"{work.computing.weight_bytes} B x P before it goes to the device",
            "transformers from_pretrained",
            ("load",),
        ),
    ]
    return terms + (_saving(work) if work.saves else [])


def _saving(work: Workload) -> list[Term]:
    sliced = work.sharding.stage == 3 and not work.adapter
    copies = work.sharding.engine or work.device_type != "cpu"  # without an engine on a CPU they are where they are
    moments = 8 * (work.share if sliced else work.trained) if copies else 0
    result = 0 if work.adapter else work.computing.element_bytes * work.shape.total
    source = "ours: training/state.py" if moments >= result else "ours: training/trainer.py, whole_weights"
    what = "8 B x P_t" + (" / N" if sliced else "") + ": moments" if moments >= result else "the result, whole"
    return [Term("save", max(moments, result), "host", what, source, ("save",), once=not sliced)]
