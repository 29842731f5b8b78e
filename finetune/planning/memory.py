"""What a run needs of each device and of the host, term by term: numbers in, bytes out.

A term is on the device or on the host, in some phases of the run; the need of a location is its
worst phase. On a CPU both are the process's own memory. Every term names the source of its formula;
P is all parameters, P_t the trained ones, N processes. What of it is checked by measurement:
docs/planning.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from finetune.planning.activations import Moment, moments, most_targets_of_whole_chunks
from finetune.planning.state import state_terms
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
ONLY_SAVE: tuple[Phase, ...] = ("save",)
WORKER_BYTES = 300 * MIB  # a loader process shares the rest with its parent
# Of a device's or a host's memory; allocators leave gaps, and the system wants some. Assumed.
USABLE_SHARE = 0.92


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
        """Most bytes of one device."""
        return max(self.in_phase("device", phase) for phase in PHASES)

    def process(self, phases: Sequence[Phase] = PHASES) -> int:
        """Most bytes of rank 0 where device and host are one (CPU), without the framework's."""
        return max(
            sum(
                term.bytes
                for term in self.terms
                if phase in term.phases and term.kind != "framework"
            )
            for phase in phases
        )

    def node(self) -> int:
        """Most host bytes of one node; on a CPU, of all its processes together."""
        locations = ("device", "host") if self.work.device_type == "cpu" else ("host",)

        def in_phase(phase: Phase) -> int:
            here = [
                term for term in self.terms if term.location in locations and phase in term.phases
            ]
            return sum(
                term.bytes * (1 if term.once else self.work.local_processes) for term in here
            )

        return max(in_phase(phase) for phase in PHASES)


def memory_of(work: Workload) -> Memory:
    """All terms of a workload that are not zero."""
    terms = [
        *state_terms(work),
        *_microbatch(work),
        *_surroundings(work),
        *(_saving(work) if work.saves else []),
    ]
    return Memory(work, tuple(term for term in terms if term.bytes))


def fits(memory: Memory, cluster: Cluster) -> bool | None:
    """Whether the need is within what is usable; None where no memory was given that would show it
    does not.
    """
    judged = [
        need <= USABLE_SHARE * there
        for need, there in (
            (
                memory.device(),
                cluster.device_memory_bytes if cluster.device_type != "cpu" else None,
            ),
            (memory.node(), cluster.host_memory_bytes),
        )
        if there is not None
    ]
    if not all(judged):
        return False
    asked = cluster.device_type == "cpu" or cluster.device_memory_bytes is not None
    return True if judged and asked else None


def _microbatch(work: Workload) -> list[Term]:
    """Of the moment in which a microbatch needs most: no two of them are at once."""
    shape, how, tokens = work.shape, work.computing, work.microbatch_tokens

    def need(moment: Moment) -> int:
        return moment.bytes

    # Microbatches have up to so many targets.
    counts = (work.targets, most_targets_of_whole_chunks(shape, how, work.targets))
    most = max(
        (m for count in counts for m in moments(shape, how, tokens, count, work.longest)), key=need
    )
    kept = "blocks' inputs" if how.checkpointing else "layers x a block's kept tensors"
    kept += " + one block's kept tensors" if how.checkpointing and most.name == "block" else ""
    logits = (
        "logits of all targets x 6 B" if how.compiled else "logits of one chunk of targets x 8 B"
    )
    ours, of_loss = (
        "ours: planning/activations.py",
        "ours: modeling/loss.py, ChunkedHead: supervised positions only",
    )
    code = f"{ours} (transformers' code, tensor by tensor)"
    flowing = (
        "gradients within a block"
        if most.name in ("block", "compiled")
        else f"gradients at the {most.name}"
    )
    cast = f"{how.element_bytes} B x matrices: cast for the microbatch"
    return [
        Term("activations", most.kept, "device", f"{kept} x {tokens:,} tokens", code, ("rows",)),
        Term("activations", most.flowing, "device", flowing, ours, ("rows",)),
        Term("logits", most.logits, "device", logits, of_loss, ("rows",)),
        Term("weights", most.casts, "device", cast, "torch.amp", ("rows",)),
    ]


def _surroundings(work: Workload) -> list[Term]:
    """Loading, loader and framework."""
    kind, accelerator, weight_bytes = (
        work.device_type,
        work.device_type != "cpu",
        work.computing.weight_bytes,
    )
    file = work.file_bytes * work.shape.total
    # On a CPU without ZeRO-3 the mapped files are the weights themselves; where nothing is
    # converted, so are they before they go to a device.
    mapped = min(file, SHARD_BYTES) if accelerator else 0 if work.mapped else file
    moved = (
        accelerator
        and work.sharding.stage != 3
        and weight_bytes != work.file_bytes
        and not work.quantised
    )
    context, libraries = DEVICE_KINDS[kind].context_bytes, DEVICE_KINDS[kind].host_bytes
    measured = "assumed" if accelerator else "measured: benchmarks/plan_memory.py"
    workers = WORKER_BYTES * work.loader_workers
    return [
        Term(
            "framework", context, "device", "context", "public reports, not measured here", PHASES
        ),
        Term(
            "buffers",
            work.hccl_bytes,
            "device",
            "2 x HCCL_BUFFSIZE x communicators",
            "CANN environment variables, HCCL_BUFFSIZE; how many communicators there are is"
            " assumed",
            TRAINING,
        ),
        Term("framework", libraries, "host", "imports and libraries", measured, PHASES),
        Term("loader", workers, "host", "300 MiB x loader processes", "assumed", TRAINING),
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
            "loader",
            work.document_bytes,
            "host",
            "8 or 12 B x documents",
            "ours: data/corpus/windows.py",
            PHASES,
        ),
        Term(
            "load",
            mapped,
            "host",
            "a file of the model, mapped" if accelerator else "the model's files, mapped",
            "safetensors: mmap; transformers: files of at most 5 GB, all mapped; what is read may"
            " be dropped again",
            ("load",),
            once=True,
        ),
        Term(
            "load",
            weight_bytes * work.shape.total if moved else 0,
            "host",
            f"{weight_bytes} B x P before it goes to the device",
            "ours: modeling/pretrained.py, scratch.py: made on the host, moved by Trainer",
            ("load",),
        ),
    ]


def _saving(work: Workload) -> list[Term]:
    """Copies on the host: of the state for a checkpoint, then of the whole model for the result of
    full training.
    """
    sharding = work.sharding
    sliced = sharding.stage == 3 and not work.adapter
    shared = not work.adapter and work.processes > 1
    on_host = work.device_type == "cpu" or sharding.offload_optimizer
    written_in_place = on_host and (sliced or not sharding.engine)  # float32 on the host already
    numbers, of_ranks = work.share if shared else work.trained, " / N" if shared else ""
    formula, source = (
        f"8 B x P_t{of_ranks}: moments, after the weights",
        "ours: training/state.py, save",
    )
    state, phases = 0 if written_in_place else 8 * numbers, ONLY_SAVE
    if work.saves_behind:
        # From the first save on; given back before the result is written.
        formula, source = (
            f"12 B x P_t{of_ranks}: copy of weights and moments",
            "ours: training/state.py, snapshot",
        )
        state, phases = 12 * numbers, (*STEP, *ONLY_SAVE)
    result = 0 if work.adapter else work.computing.element_bytes * work.shape.total
    return [
        Term("save", state, "host", formula, source, phases, not shared),
        Term(
            "save",
            result,
            "host",
            "c x P: whole",
            "ours: training/state.py, whole_weights",
            ("result",),
            True,
        ),
    ]
