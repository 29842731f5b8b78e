"""Plain values between ranks, as JSON: torch's own collectives for objects unpickle, and so run, what a peer sends."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from finetune.errors import FinetuneError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

# What ranks tell each other is names and counts; a length beyond this is not a rank's of ours.
LIMIT_BYTES = 1 << 28


def plain(item: object) -> Any:
    """A value as it arrives: floats bit for bit (NaN and infinities too), tuples as lists, keys as texts.

    Raises:
        TypeError: it holds something that JSON has not.
    """
    return json.loads(json.dumps(item))


def all_gather_plain(
    item: object, world_size: int, *, group: ProcessGroup | None = None, device: torch.device | str = "cpu"
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
    sizes = [int(length) for length in lengths]
    for rank, size in enumerate(sizes):
        if not 0 < size <= LIMIT_BYTES:
            raise _foreign(rank, f"a message of {size} bytes")
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: len(mine)] = mine
    parts = [torch.empty_like(padded) for _rank in range(world_size)]
    dist.all_gather(parts, padded, group=group)
    received = []
    for rank, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        try:
            received.append(json.loads(part[:size].cpu().numpy().tobytes()))
        except (ValueError, RecursionError) as error:
            raise _foreign(rank, "something that is not JSON") from error
    return received


def _foreign(rank: int, sent: str) -> FinetuneError:
    return FinetuneError(
        f"rank {rank} sent {sent}: it is not a process of this run",
        where="exchange between ranks",
        fix="give all nodes the same version of this package, and see that nobody else reaches their ports "
        "(docs/launching.md, Trusted networks)",
    )
