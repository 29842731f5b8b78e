"""What a step sends between processes: collectives, seen as the operators `c10d::*` that everything
comes to.

A trace is of rank 0 of a group of so many processes, which torch's fake process group stands for:
it has the size and sends nothing. A real run, whose processes send, is counted in the same way
(`Listener`), and the two are compared.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

KINDS = ("allreduce", "allgather", "reduce_scatter", "broadcast", "alltoall", "barrier")
# training/control.py: some bytes between hosts, which the devices do not wait for
AGREEMENT = "agreement"


@dataclass
class Collectives:
    """Of a part of a step, by kind.

    Attributes:
        numbers: of calls.
        bytes: of their inputs on this rank.
        sent: bytes that this rank sends in a ring.
    """

    numbers: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    sent: float = 0.0

    def note(self, func: Any, args: Any, *, agreement: bool = False) -> None:
        """Add a call of an operator `c10d::*`."""
        name = func._schema.name.partition("::")[2]
        arguments = dict(
            zip((argument.name for argument in func._schema.arguments), args, strict=False)
        )
        kind = next((kind for kind in KINDS if kind in name), name)
        inputs = next(
            (value for name, value in arguments.items() if name.startswith("input")), args[0]
        )
        given = sum(
            t.numel() * t.element_size() for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)
        )
        if kind in ("send", "recv_"):
            return  # of an agreement, which goes up a tree by these and comes down in one broadcast
        if kind != "barrier":
            self.sent += sent_bytes(
                kind, given, torch.distributed.ProcessGroup.unbox(arguments["process_group"]).size()
            )
            self.bytes[AGREEMENT if agreement else kind] += given
        self.numbers[AGREEMENT if agreement else kind] += 1

    def plain(self) -> dict[str, dict[str, int]]:
        """Numbers and bytes by kind."""
        return {"numbers": dict(self.numbers), "bytes": dict(self.bytes)}

    @property
    def number(self) -> int:
        """Of the device's, without what hosts agree on."""
        return sum(self.numbers.values()) - self.numbers[AGREEMENT]


def sent_bytes(kind: str, given: int, processes: int) -> float:
    """What a rank sends, of so many bytes of input (Patarasuk and Yuan 2009: rings)."""
    part = (processes - 1) / processes
    factors = {
        "allreduce": 2 * part,
        "reduce_scatter": part,
        "alltoall": part,
        "allgather": processes - 1,
    }
    return factors.get(kind, 1.0) * given


def without_sending(func: Any, args: Any) -> Any:
    """What an operator `c10d::*` gives at once: the tensors it was given, and work that is done."""
    from torch._C._distributed_c10d import FakeWork

    returns = len(func._schema.returns)
    if returns == 0:
        return None
    return FakeWork().boxed() if returns == 1 else (args[0], FakeWork().boxed())


class Listener(TorchDispatchMode):
    """Notes the collectives of real tensors, which go on."""

    def __init__(self, current: Callable[[], Collectives], *, agreement: bool = False) -> None:
        super().__init__()
        self.current, self.agreement = current, agreement

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.current().note(func, args, agreement=self.agreement)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def agreements(current: Callable[[], Collectives]) -> Iterator[None]:
    """Note what hosts agree on apart from the rest; their tensors are real in a trace too, for the
    answers matter.
    """
    from finetune.training.control import Control

    def apart(method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            with _disable_current_modes(), Listener(current, agreement=True):
                return method(*arguments)

        return called

    with contextlib.ExitStack() as stack:
        for name in ("any", "gather", "check_equal", "share"):
            stack.enter_context(patch.object(Control, name, apart(getattr(Control, name))))
        yield


@contextlib.contextmanager
def fake_group(processes: int) -> Iterator[None]:
    """Be rank 0 of so many processes, of which there is no other."""
    import torch.distributed as dist
    from accelerate.state import PartialState
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if processes == 1:
        yield
        return
    new_group = dist.new_group
    environment = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    environment |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "unused"}
    dist.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())
    try:
        with (
            patch.dict(os.environ, environment),
            patch.object(
                dist, "new_group", lambda *ranks, **options: new_group(*ranks, backend="fake")
            ),
            # It compares numbers of tensors that have none.
            patch(
                "torch.nn.parallel.distributed._verify_param_shape_across_processes",
                lambda *a, **k: None,
            ),
            # It says cpu:0, which a fake tensor takes for another device than cpu.
            patch.object(
                PartialState,
                "set_device",
                lambda state: setattr(state, "device", torch.device("cpu")),
            ),
            patch.object(torch.nn.parallel, "DistributedDataParallel", replicas()),
        ):
            yield
    finally:
        dist.destroy_process_group()


def replicas() -> Any:
    """DDP whose buckets are reduced by a hook.

    DDP's own reduction takes its result from the work's future, and FakeWork's is empty (torch
    2.13, distributed/c10d/comm.cpp, parseHookResult). As many bytes: a bucket is filled by a copy
    instead of a product.
    """

    class Replicas(torch.nn.parallel.DistributedDataParallel):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.register_comm_hook(None, _reduce)

        def _pre_forward(self, *arguments: Any, **options: Any) -> Any:
            with RealIntegers():  # the order of buckets, which ranks exchange in the second step
                return super()._pre_forward(*arguments, **options)

    return Replicas


class RealIntegers(TorchDispatchMode):
    """Makes int32 tensors real, for what reads their numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        if torch.int32 in (kwargs.get("dtype"), *(tensor.dtype for tensor in tensors)):
            with _disable_current_modes():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _reduce(
    state: None, bucket: torch.distributed.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    torch.distributed.all_reduce(bucket.buffer())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


_reduce.__annotations__ = {
    "bucket": torch.distributed.GradBucket,
    "return": torch.futures.Future[torch.Tensor],
}
