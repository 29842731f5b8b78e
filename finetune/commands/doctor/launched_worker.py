"""One process of the world that doctor starts, or is started in: collectives and arithmetic, compared over the ranks.

    torchrun --nproc_per_node 2 -m finetune.commands.doctor.launched_worker FOLDER DEVICE_TYPE

Each rank writes FOLDER/rank-N.json; a rank that is missing there died or hung, and its launcher's messages say how.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

from finetune.runtime import device as devices
from finetune.runtime.device import LaunchWorld, launch_world
from finetune.runtime.parent_watchdog import die_with_launcher

TIMEOUT_SECONDS = 60
MATMUL_SIZE = 512
# Numbers whose float32 sums over up to 2**15 ranks are exact: a wrong sum is wrong, and not rounding.
REDUCED_NUMBERS = 1 << 18


@dataclass
class RankReport:
    """What one rank saw.

    Attributes:
        sum_error: difference of the all-reduced numbers from their exact sum; 0 is right.
        gathered_ranks: the ranks that an all-gather brought, in order.
        matmul_digest: SHA-256 of the bits of a seeded matrix product; equal on equal devices.
        matmul_error: largest difference from the product in float64 on the host, relative to its largest number.
    """

    rank: int
    world_size: int
    host: str
    device: str
    backend: str
    dtype: str = ""
    sum_error: float = -1.0
    gathered_ranks: list[int] = field(default_factory=list)
    matmul_digest: str = ""
    matmul_error: float = -1.0


def work(world: LaunchWorld, device_type: str, *, exchange: bool = False) -> list[RankReport]:
    """Meet the other ranks, reduce, gather, multiply. The process group is made and taken down here.

    Args:
        exchange: give every rank all reports, by the same collectives; else this rank's alone.
    """
    import torch
    import torch.distributed as dist

    devices.check_local_ranks(device_type, world)
    backend = devices.DEVICE_KINDS[device_type].backend
    if device_type in ("npu", "cuda"):
        getattr(torch, device_type).set_device(world.local_rank)
    place = torch.device(device_type, world.local_rank) if device_type in ("npu", "cuda") else torch.device(device_type)
    able = devices.capabilities(device_type)
    dist.init_process_group(
        backend, rank=world.rank, world_size=world.world_size, timeout=timedelta(seconds=TIMEOUT_SECONDS)
    )
    report = RankReport(world.rank, world.world_size, os.uname().nodename, able.name, backend)
    numbers = torch.full((REDUCED_NUMBERS,), float(world.rank + 1), device=place)
    dist.all_reduce(numbers)
    expected = world.world_size * (world.world_size + 1) / 2
    report.sum_error = float((numbers.cpu() - expected).abs().max())
    mine = torch.tensor([world.rank], dtype=torch.int64, device=place)
    gathered = [torch.empty_like(mine) for _ in range(world.world_size)]
    dist.all_gather(gathered, mine)
    report.gathered_ranks = [int(one.cpu()) for one in gathered]
    _multiply(report, device_type, place, able.bfloat16 and device_type != "cpu")
    reports: list[RankReport] = [report]
    if exchange:
        reports = [report] * world.world_size
        dist.all_gather_object(reports, report)
    dist.barrier()
    dist.destroy_process_group()
    return reports


def _multiply(report: RankReport, device_type: str, place: object, bfloat16: bool) -> None:
    """A product in the dtype that training takes, from numbers made on the host: the same on every rank."""
    import torch

    dtype = torch.bfloat16 if bfloat16 else torch.float32
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, generator=generator).to(dtype) for _ in range(2))
    product = (left.to(place) @ right.to(place)).cpu().float()  # type: ignore[arg-type]
    exact = left.double() @ right.double()
    report.dtype = str(dtype).removeprefix("torch.")
    report.matmul_digest = hashlib.sha256(product.numpy().tobytes()).hexdigest()
    report.matmul_error = float((product.double() - exact).abs().max() / exact.abs().max())


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    world = launch_world()
    die_with_launcher(world)
    folder, requested = Path(sys.argv[1]), sys.argv[2]
    device_type = devices.choose_device_type(requested)
    (report,) = work(world, device_type)
    (folder / f"rank-{world.rank}.json").write_text(json.dumps(asdict(report)), encoding="utf-8")


if __name__ == "__main__":
    main()
