"""What a plan computes with: the machines, how a run is sharded and computed, one use of memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Literal

from finetune.planning.shapes import Matrix, ModelShape

GIB = 2**30
Location = Literal["device", "host"]
LOCATIONS: tuple[Location, ...] = ("device", "host")
# Of a step: weights are gathered, microbatches ("rows", as in `plan --json`) go forward and
# backward, gradients are summed over processes, weights are updated.
Phase = Literal["load", "gather", "rows", "reduce", "update", "save", "result"]
PHASES: tuple[Phase, ...] = ("load", "gather", "rows", "reduce", "update", "save", "result")
STEP: tuple[Phase, ...] = ("gather", "rows", "reduce", "update")
TRAINING: tuple[Phase, ...] = (*STEP, "save", "result")
# Bytes per parameter of a quantized layer, without its scales. For scales, nf4 has one byte per 64
# parameters, and one float32 per 256 of those bytes. Each output of an int8 layer has one float32.
QUANTIZED_BYTES = {"nf4": 0.5, "int8": 1.0}
NF4_SCALE_BYTES = 1 / 64 + 4 / (64 * 256)


@dataclass(frozen=True)
class Cluster:
    """The machines that a run is planned for.

    Attributes:
        device_memory_bytes, host_memory_bytes: of one device, of one node; None if not given.
        peak_flops: of one device in the compute dtype; None if unknown.
        network_bytes_per_second, host_bytes_per_second: of one device; None if unknown.
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
        """Number of devices on all nodes."""
        return self.nodes * self.devices_per_node


@dataclass(frozen=True)
class Sharding:
    """How the training state is sharded.

    Attributes:
        engine: DeepSpeed runs the step; else one process, or DDP.
        stage: ZeRO stage, 0 to 3.
        reduce_bucket, prefetch_bucket, persistence_threshold, max_live, max_reuse_distance,
            sub_group: DeepSpeed's settings, in elements, with its defaults.
        overlap: `overlap_comm`: ZeRO-1 and -2 have a second bucket.
        hpz: `zero_hpz_partition_size`: processes of a node that hold a second copy of all weights;
            1 for none.
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
        """The name that people use."""
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
class Computing:
    """How tensors are held while a microbatch is computed.

    Attributes:
        element_bytes: of the compute dtype.
        weight_bytes: of the dtype of the base's weights.
        adapted: names of the linear layers with an adapter, empty without LoRA.
        adapter_bytes: of the dtype of adapters.
        dropout: there is dropout in front of the adapters.
        checkpointing: blocks are recomputed in the backward pass.
        compiled: the step is compiled, head and loss included.
        partitioned: weights are gathered module by module (ZeRO-3).
        fused_lora: base product and adapter are one function if weights are whole
            (modeling/lora.py).
        fused_layers: norms with a scale, rotation and SwiGLU are one function each
            (modeling/layers.py).
        float32_attention: attention casts queries, keys and values up (a CPU in 16 bits,
            modeling/attention.py).
        whole_logits: logits of all targets are made at once, because the head is not a plain linear
            layer.
        trained_rows: single rows of embedding and head are trained (`--train-tokens`).
    """

    element_bytes: int
    weight_bytes: int
    adapted: frozenset[str] = frozenset()
    adapter_bytes: int = 0
    dropout: bool = False
    checkpointing: bool = False
    compiled: bool = False
    partitioned: bool = False
    fused_lora: bool = False
    fused_layers: bool = False
    float32_attention: bool = False
    whole_logits: bool = False
    trained_rows: bool = False

    @property
    def full(self) -> bool:
        """All parameters are trained."""
        return not self.adapted

    @property
    def autocast(self) -> bool:
        """Weights are cast for each product; the residual stream has their dtype."""
        return self.weight_bytes > self.element_bytes

    @property
    def adds_adapters(self) -> bool:
        """Adapters are added by the base's own products, and layers of one input keep it once."""
        return bool(self.adapted) and self.fused_lora and not self.partitioned

    @property
    def casts_adapters(self) -> bool:
        """peft casts the input of each adapter to the adapter's dtype, which autograd keeps."""
        wider = self.adapter_bytes > self.element_bytes
        return bool(self.adapted) and wider and not self.adds_adapters

    @property
    def residual_bytes(self) -> int:
        """Bytes per element of the residual stream."""
        return self.weight_bytes if self.autocast else self.element_bytes


@dataclass(frozen=True)
class Workload:
    """Everything that decides the memory of one process.

    Attributes:
        trained: trained parameters; `adapter` of them are LoRA's, in addition to the model's own.
        processes: number in the whole run; `local_processes`: number on one node.
        microbatch_tokens: maximum tokens of a microbatch; `targets`: supervised tokens among them;
            `longest`: tokens of the longest document.
        documents: number in a sample, each of at most `longest` tokens.
        asks_reference: each microbatch is also computed with the adapter off, without gradients.
        microbatches: number per device in one optimizer step.
        muon: the blocks' matrices are trained by Muon, which has one moment.
        optimizer: for what Muon does not train: adamw, or with less state adamw-8bit or adafactor.
        fused: the optimizer's kernel needs no temporaries.
        file_bytes: bytes per parameter in the model's files; 0 for a model from scratch.
        data_bytes: bytes of tokenized data, memory-mapped.
        hccl_bytes: bytes of HCCL's buffers on a device.
        quantization: of the frozen linear layers: none, nf4 or int8. Embedding, head, experts and
            vectors are not quantized.
        saves_behind: checkpoints are written in the background, from a copy of the state.
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
    hccl_bytes: int = 0
    quantization: str = "none"
    saves_behind: bool = False

    @property
    def sample_tokens(self) -> int:
        """Return the maximum number of tokens in a sample."""
        return self.longest * self.documents

    @property
    def parameters(self) -> int:
        """P: the model's, with adapters."""
        return self.shape.total + self.adapter

    @cached_property
    def quantized(self) -> tuple[Matrix, ...]:
        """The quantized linear layers."""
        if self.quantization == "none":
            return ()
        return tuple(m for m in self.shape.matrices if m.linear and not m.is_end)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the quantized layers' scales; under ZeRO-3 every device has all of them."""
        if self.quantization == "int8":
            return sum(4 * m.outputs for m in self.quantized)
        return round(NF4_SCALE_BYTES * sum(m.size for m in self.quantized))

    @cached_property
    def held_parameters(self) -> int:
        """Return P, counting quantized layers in elements of the compute dtype, without scales."""
        packed = sum(m.size for m in self.quantized)
        held = QUANTIZED_BYTES.get(self.quantization, 0) * packed / self.computing.element_bytes
        return self.parameters - packed + ceil(held)

    @property
    def share(self) -> int:
        """Trained parameters of one process under ZeRO."""
        return ceil(self.trained / self.processes)

    @property
    def gloo(self) -> bool:
        """Collectives run in host memory."""
        return self.device_type == "cpu"

    @property
    def mapped(self) -> bool:
        """The loaded weights are the model's files, mapped: nothing is converted, partitioned or
        moved.
        """
        same = self.computing.weight_bytes == self.file_bytes and not self.quantized
        return same and self.device_type == "cpu" and self.sharding.stage < 3


@dataclass(frozen=True)
class Term:
    """One use of memory.

    Attributes:
        kind: weights, gradients, optimizer, live, activations, logits, buffers, loader, framework,
            load or save.
        formula: description of how the bytes are computed.
        once: on the host, only one process of a node holds it.
    """

    kind: str
    bytes: int
    location: Location
    formula: str
    source: str
    phases: tuple[Phase, ...] = TRAINING
    once: bool = False
