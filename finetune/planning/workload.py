"""What a plan computes with: how a run is sharded, what decides its memory, one use of memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Literal

from finetune.planning.activations import Computing
from finetune.planning.shapes import Matrix, ModelShape

GIB = 2**30
Location = Literal["device", "host"]
LOCATIONS: tuple[Location, ...] = ("device", "host")
# Of a step: weights are gathered, microbatches ("rows", as in the JSON form) go forward and
# backward, gradients are summed over processes, weights updated.
Phase = Literal["load", "gather", "rows", "reduce", "update", "save", "result"]
PHASES: tuple[Phase, ...] = ("load", "gather", "rows", "reduce", "update", "save", "result")
STEP: tuple[Phase, ...] = ("gather", "rows", "reduce", "update")
TRAINING: tuple[Phase, ...] = (*STEP, "save", "result")
# Bytes of a number in few bits, without its scale. Those of nf4: a byte for 64 numbers, and float32
# for 256 of these.
QUANTISED_BYTES = {"nf4": 0.5, "int8": 1.0}
NF4_SCALE_BYTES = 1 / 64 + 4 / (64 * 256)


@dataclass(frozen=True)
class Cluster:
    """The machines that a run is planned for.

    Attributes:
        device_memory_bytes, host_memory_bytes: of one device, of one node; None where not said.
        peak_flops: of one device in the compute dtype; None where it is not known.
        network_bytes_per_second, host_bytes_per_second: of one device; None where not known.
    """

    nodes: int = 1
    devices_per_node: int = 1
    device_type: str = "cuda"
    device_name: str = ""
    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    peak_flops: float | None = None
    network_bytes_per_second: float | None = None
    host_bytes_per_second: float | None = None

    @property
    def devices(self) -> int:
        """Of all nodes."""
        return self.nodes * self.devices_per_node


@dataclass(frozen=True)
class Sharding:
    """How the state is spread.

    Attributes:
        engine: DeepSpeed runs the step; else one process, or DDP.
        stage: ZeRO stage, 0 to 3. reduce_bucket, prefetch_bucket, persistence_threshold, max_live,
        max_reuse_distance, sub_group: DeepSpeed's
            numbers of elements, with its defaults.
        overlap: `overlap_comm`: ZeRO-1 and -2 have a second bucket.
        hpz: `zero_hpz_partition_size`: processes, those of a node, that hold a second copy of all
            weights; 1 for none.
    """

    engine: bool = False
    stage: int = 0
    offload_optimizer: bool = False
    offload_param: bool = False
    reduce_bucket: int = 500_000_000
    prefetch_bucket: int = 50_000_000
    persistence_threshold: int = 100_000
    max_live: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    sub_group: int = 1_000_000_000
    overlap: bool = False
    hpz: int = 1

    @property
    def name(self) -> str:
        """As people call it."""
        if not self.engine:
            return "none"
        offloads = [
            n
            for n, on in (("optimizer", self.offload_optimizer), ("weights", self.offload_param))
            if on
        ]
        copy = f" + hpZ of {self.hpz}" if self.hpz > 1 else ""
        return f"ZeRO-{self.stage}{copy}" + (
            f" + offload of {' and '.join(offloads)}" if offloads else ""
        )


@dataclass(frozen=True)
class Workload:
    """Everything that decides the memory of one process.

    Attributes:
        trained: trained parameters; `adapter` of them are LoRA's, which come on top of the model's
            own.
        processes: of the whole run. local_processes: on one node.
        microbatch_tokens: most tokens of a microbatch; targets: of them, supervised; longest: of
            the longest document.
        documents: of a sample, each of at most `longest` tokens.
        asks_reference: each microbatch is also computed with the adapter off, without gradients.
        microbatches: of a device in one optimizer step.
        muon: the blocks' matrices are trained by Muon, which has one moment.
        optimizer: of what Muon does not train: adamw, or with less state adamw-8bit or adafactor.
        fused: the optimizer's kernel needs no temporaries.
        file_bytes: bytes of a parameter in the model's files; 0 for a model from scratch.
        data_bytes: of tokenized data, memory-mapped.
        document_bytes: what each process holds of where the documents of token files begin.
        hccl_bytes: of HCCL's buffers on a device.
        quantization: of the frozen linear layers: none, nf4 or int8. Embedding, head, experts and
            vectors have none.
        saves: a checkpoint or the result is written.
        saves_behind: checkpoints are written while training goes on, from a copy of the state.
    """

    shape: ModelShape
    computing: Computing
    sharding: Sharding
    trained: int
    adapter: int = 0
    processes: int = 1
    local_processes: int = 1
    microbatch_tokens: int = 2048
    targets: int = 2048
    longest: int = 2048
    documents: int = 1
    asks_reference: bool = False
    microbatches: int = 1
    muon: bool = False
    optimizer: str = "adamw"
    fused: bool = True
    device_type: str = "cuda"
    file_bytes: int = 2
    loader_workers: int = 0
    data_bytes: int = 0
    document_bytes: int = 0
    hccl_bytes: int = 0
    quantization: str = "none"
    saves: bool = True
    saves_behind: bool = False

    @property
    def sample_tokens(self) -> int:
        """Most tokens of a sample."""
        return self.longest * self.documents

    @property
    def parameters(self) -> int:
        """P: the model's, with adapters."""
        return self.shape.total + self.adapter

    @cached_property
    def quantised(self) -> tuple[tuple[Matrix, int], ...]:
        """The linear layers in few bits, each with how many there are."""
        return tuple(
            (m, n) for m, n in self.shape.matrices if m.linear and self.quantization != "none"
        )

    @property
    def scale_bytes(self) -> int:
        """Of the scales of what is in few bits; ZeRO-3 has them whole on every device."""
        if self.quantization == "int8":
            return sum(4 * n * m.outputs for m, n in self.quantised)
        return round(sum(NF4_SCALE_BYTES * n * m.numbers for m, n in self.quantised))

    @property
    def weight_numbers(self) -> int:
        """P as it is held, with adapters: what is in few bits as numbers of the compute dtype,
        without its scales.
        """
        packed = sum(n * m.numbers for m, n in self.quantised)
        held = QUANTISED_BYTES.get(self.quantization, 0) * packed / self.computing.element_bytes
        return self.parameters - packed + ceil(held)

    @property
    def share(self) -> int:
        """Trained parameters of one process under ZeRO."""
        return ceil(self.trained / self.processes)

    @property
    def largest_trained(self) -> int:
        """Numbers of the largest tensor that is trained."""
        if not self.adapter:
            return self.shape.largest_module
        return max(
            self.shape.lora_tensors(self.computing.adapter_rank, self.computing.adapted), default=0
        )

    @property
    def gloo(self) -> bool:
        """Collectives run in host memory."""
        return self.device_type == "cpu"

    @property
    def mapped(self) -> bool:
        """The weights that were loaded are the model's files, mapped: nothing is converted,
        partitioned or moved.
        """
        same = self.computing.weight_bytes == self.file_bytes and not self.quantised
        return same and self.device_type == "cpu" and self.sharding.stage < 3


@dataclass(frozen=True)
class Term:
    """One use of memory.

    Attributes:
        kind: weights, gradients, optimizer, live, activations, logits, buffers, loader, framework,
            load or save.
        formula: in words, with its numbers.
        once: on the host, one process of a node has it.
    """

    kind: str
    bytes: int
    location: Location
    formula: str
    source: str
    phases: tuple[Phase, ...] = TRAINING
    once: bool = False
