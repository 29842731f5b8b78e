"""Plain values between ranks, as JSON: torch's own collectives for objects unpickle, and so run,
what a peer sends.

How many messages one after another a collective of gloo takes among N ranks (gloo's allreduce.cc,
allgather.cc, broadcast.cc): an all-reduce 2 (N - 1) and an all-gather N - 1, as both are rings, a
broadcast log2 N. At 1,024 ranks a ring takes longer than what a few bytes are worth, so these go up
and down a tree.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from finetune.errors import FinetuneError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

# What ranks tell each other is names and counts; a length beyond this is not a rank's of ours.
LIMIT_BYTES = 1 << 28


def plain(item: object) -> Any:
    """A value as it arrives: floats bit for bit (NaN and infinities too), tuples as lists, keys as
    texts.

    Raises:
        TypeError: it holds something that JSON has not.
    """
    return json.loads(json.dumps(item))


def all_gather_plain(
    item: object,
    world_size: int,
    *,
    group: ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> list[Any]:
    """Every rank's plain value, by rank, on every rank, as `plain` makes it. Every rank must call.

    Args:
        device: where the group's backend takes its tensors from.

    Raises:
        FinetuneError: a rank sent something else.
    """
    import torch
    import torch.distributed as dist

    mine = torch.frombuffer(bytearray(json.dumps(item).encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _rank in range(world_size)]
    dist.all_gather(lengths, torch.tensor([len(mine)], device=device), group=group)
    sizes = [_checked(rank, int(length)) for rank, length in enumerate(lengths)]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: len(mine)] = mine
    parts = [torch.empty_like(padded) for _rank in range(world_size)]
    dist.all_gather(parts, padded, group=group)
    return [
        _read(rank, part[:size]) for rank, (part, size) in enumerate(zip(parts, sizes, strict=True))
    ]


def broadcast_plain(item: object, *, group: ProcessGroup | None = None) -> Any:
    """Rank 0's plain value on every rank, as `plain` makes it; that of the others is not looked at.
    Every rank must call, with a group whose tensors are on the CPU.

    Raises:
        FinetuneError: rank 0 sent something else.
    """
    import torch
    import torch.distributed as dist

    sent = torch.frombuffer(bytearray(json.dumps(item).encode()), dtype=torch.uint8)
    size = torch.tensor([len(sent)])
    dist.broadcast(size, 0, group=group)
    if dist.get_rank(group) != 0:
        sent = torch.empty(_checked(0, int(size)), dtype=torch.uint8)
    dist.broadcast(sent, 0, group=group)
    return _read(0, sent)


def largest_of_all(values: Sequence[int], *, group: ProcessGroup | None = None) -> list[int]:
    """The largest of all ranks' values, place by place, on every rank. Every rank must call, with
    as many integers of 64 bits and a group of all ranks whose tensors are on the CPU.

    2 log2 N messages one after another: up to rank 0 by the binomial tree in which gloo's broadcast
    comes down again, so that both use the same connections.
    """
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mine = torch.tensor(values, dtype=torch.int64)
    # its parent has all its bits but the highest, a child one more that is higher
    level = rank.bit_length()
    for bit in reversed(range(level, (size - 1).bit_length())):
        if rank + (1 << bit) < size:
            other = mine.clone()
            dist.recv(other, rank + (1 << bit), group=group)
            mine = torch.maximum(mine, other)
    if rank:
        dist.send(mine, rank - (1 << (level - 1)), group=group)
    dist.broadcast(mine, 0, group=group)
    return [int(value) for value in mine]


def name_ranks(ranks: Iterable[int]) -> str:
    """`8-15, 77, 900` for ranks (or nodes) in rising order."""
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ranks), lambda item: item[1] - item[0])
    ]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _checked(rank: int, size: int) -> int:
    if not 0 < size <= LIMIT_BYTES:
        raise _foreign(rank, f"a message of {size} bytes")
    return size


def _read(rank: int, sent: torch.Tensor) -> Any:
    try:
        return json.loads(sent.cpu().numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise _foreign(rank, "something that is not JSON") from error


def _foreign(rank: int, sent: str) -> FinetuneError:
    return FinetuneError(
        f"rank {rank} sent {sent}: it is not a process of this run",
        where="exchange between ranks",
        fix=(
            "give all nodes the same version of this package, and see that nobody else reaches"
            " their ports (docs/launching.md, Trusted networks)"
        ),
    )
