"""What a device would be asked to do, recorded from a step on fake tensors: kernels, bytes,
products, waits, memory.

A dispatch mode above torch's FakeTensorMode sees every operator that autograd, autocast and
checkpointing come to, in the order of the run, and a function mode above both sees what crosses
between host and device. Fake tensors stand for the device's, real ones for the host's: the engine
of a CPU build of torch ends with fake `cuda` tensors, so the device's are fake CPU tensors, and
what would run on the device is forced (roofline_runs.py).

Assumptions: an operator that is no view is one kernel (`_foreach_*` and fused optimizers: as many
as multi_tensor_apply would launch, ATen/native/cuda/MultiTensorApply.cuh); it reads each input and
writes each output once; attention is one kernel forward and one backward, causal within documents.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from roofline_network import Collectives, without_sending
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

NO_KERNEL = frozenset(
    [
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "detach",
        "alias",
        "lift_fresh",
        "set_",
    ]
)
# Reshapes without a copy that are not marked as views.
NO_KERNEL |= {"_unsafe_view", "_reshape_alias", "_local_scalar_dense", "is_pinned"}
WRITE_ONLY = frozenset(
    [
        "fill_",
        "zero_",
        "copy_",
        "uniform_",
        "normal_",
        "zeros",
        "ones",
        "full",
        "arange",
        "new_zeros",
        "new_ones",
        "new_full",
    ]
)
# They read of their first tensor only what they give out.
PICKING = frozenset(
    [
        "embedding",
        "index",
        "gather",
        "index_select",
        "nll_loss_forward",
        "slice_scatter",
        "nll_loss_backward",
    ]
)
# What a compiler fuses with its neighbours is everything that is not one of these.
UNFUSED = frozenset(
    [
        "embedding",
        "index",
        "index_put",
        "index_put_",
        "_index_put_impl_",
        "nonzero",
        "sort",
        "topk",
        "cumsum",
    ]
)
UNFUSED |= {
    "embedding_dense_backward",
    "index_select",
    "gather",
    "scatter_add",
    "histc",
    "bincount",
}
# MultiTensorApply.cuh: numbers of a chunk, chunks and tensors (of four lists) of one launch.
CHUNK, CHUNKS_PER_LAUNCH, TENSORS_PER_LAUNCH = 65536, 320, 36
NONZERO_KERNELS = 3  # counted, scanned, written


@dataclass
class Kernel:
    """One operator as the device would run it.

    Attributes:
        kind: product, attention or other.
        reads, writes: number of each storage -> bytes.
        launches: kernels that it takes.
        shapes, strides: of its tensors, for products.
    """

    name: str
    kind: str
    reads: dict[int, int]
    writes: dict[int, int]
    flops: int = 0
    launches: int = 1
    shapes: tuple[tuple[int, ...], ...] = ()
    strides: tuple[tuple[int, ...], ...] = ()
    dtype: torch.dtype = torch.float32

    @property
    def bytes(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())

    @property
    def fusible(self) -> bool:
        return self.kind == "other" and self.name not in UNFUSED and "foreach" not in self.name


@dataclass
class Segment:
    """A part of a step: what was launched, what made the host wait, what crossed over to or between
    devices.
    """

    kernels: list[Kernel] = field(default_factory=list)
    waits: Counter[str] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)
    collectives: Collectives = field(default_factory=Collectives)
    peak_bytes: int = 0
    start_bytes: int = 0


class Memory:
    """Bytes of all storages that are alive, and the most there were."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self.numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._count = 0

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage, followed from now on until nothing refers to it."""
        storage = tensor.untyped_storage()
        found = self.numbers.get(storage)
        if found is None:
            found = self._count = self._count + 1
            self.numbers[storage] = found
            size = storage.nbytes()
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._freed, size).atexit = False
        return found

    def _freed(self, size: int) -> None:
        self.now -= size


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the numbers behind a tensor; those of an expanded one once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


class Recorder(TorchDispatchMode):
    """Records the operators of the current segment; enter it above a FakeTensorMode.

    Attributes:
        document_lengths: of the microbatch that is computed, for attention's operations.
        targets: of that microbatch: how many numbers of a mask are True.
    """

    def __init__(self) -> None:
        super().__init__()
        self.segment = Segment()
        self.memory = Memory()
        self.document_lengths: tuple[int, ...] | None = None
        self.targets = 0
        # storages made of Python's numbers: AdamW counts its steps there
        self.on_host: set[int] = set()

    def begin(self) -> Segment:
        """A new segment from here on; returns it."""
        self.close()
        self.segment = Segment(start_bytes=self.memory.now)
        self.memory.peak = self.memory.now
        return self.segment

    def close(self) -> None:
        self.segment.peak_bytes = self.memory.peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if name == "_local_scalar_dense":
            if self.memory.number(args[0]) not in self.on_host:
                self.segment.waits["item"] += 1
            return _plain_value(args[0].dtype)
        if func.namespace == "c10d":
            self.segment.collectives.note(func, args)
            return without_sending(func, args)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            args = (args[0], self._without_masks(args[1]), *args[2:])
        elif name == "nonzero":
            self.segment.waits["nonzero"] += 1
            made = torch.empty((self.targets, args[0].dim()), dtype=torch.int64)
            self._add(func, name, args, kwargs, made)
            return made
        out = func(*args, **kwargs)
        if name == "lift_fresh":
            self.on_host.add(self.memory.number(out))
        self._add(func, name, args, kwargs, out)
        return out

    def _without_masks(self, indices: Any) -> list[Any]:
        """Indices with positions in the place of boolean masks, which the host must count first."""
        found: list[Any] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
                continue
            self.segment.waits["boolean index"] += 1
            read = {self.memory.number(index): tensor_bytes(index)}
            self.segment.kernels.append(
                Kernel("nonzero", "other", read, {}, launches=NONZERO_KERNELS)
            )
            found += [torch.empty(self.targets, dtype=torch.int64) for _ in range(index.dim())]
        return found

    def _add(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        # What is only written to is no input: `out`.
        inputs = _tensors((args, {key: value for key, value in kwargs.items() if key != "out"}))
        outputs = _tensors(out)
        # also of what is no kernel: it takes memory
        numbers = [self.memory.number(tensor) for tensor in outputs]
        if (
            not (inputs or outputs)
            or func.is_view
            or name in NO_KERNEL
            or func.namespace in ("prim", "profiler")
        ):
            return
        changed = {id(tensor) for tensor in _changed(func, args, kwargs)}
        given = sum(map(tensor_bytes, outputs))
        reads: dict[int, int] = {}
        writes = {n: tensor_bytes(t) for n, t in zip(numbers, outputs, strict=True)}
        for place, tensor in enumerate(inputs):
            number, size = self.memory.number(tensor), tensor_bytes(tensor)
            if id(tensor) in changed:
                writes[number] = size
                if name in WRITE_ONLY:
                    continue
            if name in PICKING and place == (1 if name == "nll_loss_backward" else 0):
                size = min(size, given)
            reads[number] = max(reads.get(number, 0), size)
        if "foreach" in name or "fused" in name:
            launches = _launches([t for t in inputs if id(t) in changed] or outputs)
        else:
            launches = 1
        kernel = Kernel(name, _kind(func, name), reads, writes, launches=launches)
        if kernel.kind == "attention":
            kernel.flops = self._attention_flops(name, inputs[1 if "backward" in name else 0])
        elif kernel.kind == "product":
            kernel.flops = int(flop_registry[func._overloadpacket](*args, **kwargs, out_val=out))
        kernel.shapes, kernel.strides = (
            tuple(tuple(t.shape) for t in inputs),
            tuple(t.stride() for t in inputs),
        )
        kernel.dtype = (inputs or outputs)[0].dtype
        if kernel.bytes:  # of no numbers nothing is launched
            self.segment.kernels.append(kernel)

    def _attention_flops(self, name: str, query: torch.Tensor) -> int:
        """Two products of the lower triangle forward, five backward (Dao 2023, FlashAttention-2,
        section 3).
        """
        if query.dim() == 4:
            samples, heads, tokens, width = query.shape
            squares = samples * tokens**2
        else:
            _tokens, heads, width = query.shape
            squares = sum(length**2 for length in self.document_lengths or (query.shape[0],))
        return int((5 if "backward" in name else 2) * heads * width * squares)


class Crossings(TorchFunctionMode):
    """Counts what crosses between host and device: real tensors are the host's, fake ones the
    device's.
    """

    def __init__(self, recorder: Recorder, fake: Any) -> None:
        super().__init__()
        self.recorder, self.fake = recorder, fake

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch._subclasses.fake_tensor import FakeTensor

        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if (
            name in ("to", "cpu", "tolist", "numpy", "copy_")
            and args
            and isinstance(args[0], torch.Tensor)
        ):
            is_fake = isinstance(args[0], FakeTensor)
            if name == "to" and not is_fake and _to_device(args[1:], kwargs):
                self.recorder.segment.uploads["pinned" if args[0].is_pinned() else "pageable"] += 1
                made = self.fake.from_tensor(args[0].detach())
                self.recorder.memory.number(made)
                return made
            if is_fake and (
                name in ("cpu", "tolist", "numpy") or (name == "to" and args[1:2] == ("cpu",))
            ):
                self.recorder.segment.waits[name] += 1
        return func(*args, **kwargs)


def _to_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(value, torch.device) for value in (*args, *kwargs.values()))


def _plain_value(dtype: torch.dtype) -> bool | int | float:
    if dtype in (torch.bool, torch.uint8):  # flags
        return False
    return 1.0 if dtype.is_floating_point else 1


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _changed(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operator writes into, by its schema."""
    found: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += _tensors(value)
    return found


def _launches(tensors: list[torch.Tensor]) -> int:
    """Kernels of multi_tensor_apply for so many tensors of these sizes."""
    chunks = sum(math.ceil(tensor.numel() / CHUNK) for tensor in tensors)
    return max(
        1, math.ceil(chunks / CHUNKS_PER_LAUNCH), math.ceil(len(tensors) / TENSORS_PER_LAUNCH)
    )


def _kind(func: Any, name: str) -> str:
    if "varlen_attn" in name or "scaled_dot_product" in name or "attention" in name:
        return "attention"
    return "product" if func._overloadpacket in flop_registry else "other"


def fused(kernels: list[Kernel]) -> list[Kernel]:
    """The same with neighbours fused, as a perfect compiler would: a lower bound, the order as it
    was recorded.

    Kernels that are neither products nor attention, and stand side by side, become one, which reads
    what was made before it and writes what is read after it.
    """
    last_read: dict[int, int] = {}
    for place, kernel in enumerate(kernels):
        last_read.update(dict.fromkeys(kernel.reads, place))
    made: list[Kernel] = []
    start = 0
    while start < len(kernels):
        if not kernels[start].fusible:
            made.append(kernels[start])
            start += 1
            continue
        stop = start
        reads: dict[int, int] = {}
        writes: dict[int, int] = {}
        while stop < len(kernels) and kernels[stop].fusible:
            for number, size in kernels[stop].reads.items():
                if number not in writes:
                    reads[number] = max(reads.get(number, 0), size)
            writes.update(kernels[stop].writes)
            stop += 1
        # What is never read again within the recorded part is a result (a gradient, a loss) where
        # nothing here read it.
        inside = {number for kernel in kernels[start:stop] for number in kernel.reads}
        kept = {n: s for n, s in writes.items() if last_read.get(n, -1) >= stop or n not in inside}
        made.append(Kernel("fused", "other", reads, kept))
        start = stop
    return made
