"""Exchange JSON-serializable values between ranks. torch's own collectives for objects unpickle,
and so run, what a peer sends.

The number of consecutive messages of a gloo collective depends on its algorithm (gloo's
allreduce.cc, allgather.cc, broadcast.cc). Among N ranks it is 2 (N - 1) for an all-reduce and N - 1
for an all-gather, because both are rings, and log2 N for a broadcast. At 1,024 ranks a ring is too
slow for a few bytes, so `largest_of_all` uses a tree in both directions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from finetune.errors import FinetuneError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

# Ranks exchange names and counts: a longer message is not from a rank of this run.
LIMIT_BYTES = 1 << 28


def plain(item: object) -> Any:
    """Return a value as it arrives: floats bit for bit (NaN and infinities too), tuples as lists,
    keys as strings.

    Raises:
        TypeError: it holds something that JSON does not have.
    """
    return json.loads(json.dumps(item))


def all_gather_plain(
    item: object,
    world_size: int,
    *,
    group: ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> list[Any]:
    """Return every rank's value, by rank, as `plain` returns it. Collective: every rank must call
    it.

    Args:
        device: of the tensors for the group's backend.

    Raises:
        FinetuneError: a rank sent something else.
    """
    import torch
    import torch.distributed as dist

    sent = torch.frombuffer(bytearray(json.dumps(item).encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _rank in range(world_size)]
    dist.all_gather(lengths, torch.tensor([len(sent)], device=device), group=group)
    sizes = [_checked(rank, int(length)) for rank, length in enumerate(lengths)]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: len(sent)] = sent
    parts = [torch.empty_like(padded) for _rank in range(world_size)]
    dist.all_gather(parts, padded, group=group)
    return [_read(rank, part[: sizes[rank]]) for rank, part in enumerate(parts)]


def broadcast_plain(item: object, *, group: ProcessGroup | None = None) -> Any:
    """Return rank 0's value, as `plain` returns it; the values of other ranks are ignored.
    Collective: every rank must call it, with a group whose tensors are on the CPU.

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
    """Return the element-wise maximum of all ranks' values. Collective: every rank must call it,
    with equally many 64-bit integers and a group of all ranks whose tensors are on the CPU.

    Takes 2 log2 N consecutive messages: up to rank 0 in the binomial tree that gloo's broadcast
    uses downwards, so that both use the same connections.
    """
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    largest = torch.tensor(values, dtype=torch.int64)
    # a rank's parent has all its bits except the highest, a child one more that is higher
    level = rank.bit_length()
    for bit in reversed(range(level, (size - 1).bit_length())):
        if rank + (1 << bit) < size:
            other = largest.clone()
            dist.recv(other, rank + (1 << bit), group=group)
            largest = torch.maximum(largest, other)
    if rank:
        dist.send(largest, rank - (1 << (level - 1)), group=group)
    dist.broadcast(largest, 0, group=group)
    return [int(value) for value in largest]


def name_ranks(ranks: Iterable[int]) -> str:
    """Return `8-15, 77, 900` for ranks (or nodes) in rising order."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
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
            " their ports (docs/guides/launching.md, Trusted networks)"
        ),
    )
