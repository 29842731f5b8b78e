"""Checks that need several processes: started with torch elastic as a run is, or asked in the world
that we are in.

    torchrun --nproc_per_node 2 -m finetune.commands.doctor.launched FOLDER DEVICE_TYPE

is one process of the world that doctor starts. Each rank writes FOLDER/rank-N.json; a rank that is
missing there died or hung, and its launcher's messages tell how.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.commands.doctor.check import Check, fail, ok, warn
from finetune.commands.doctor.probe import Answer, run_to_end
from finetune.runtime import device as devices
from finetune.runtime.collectives import all_gather_plain
from finetune.runtime.language import _
from finetune.runtime.launch_environment import LaunchWorld, launch_world, probe_torch_npu
from finetune.runtime.parent_watchdog import die_with_launcher

if TYPE_CHECKING:
    import torch

MODULE = "finetune.commands.doctor.launched"
LAUNCH_TIMEOUT_SECONDS = 300.0
COLLECTIVE_TIMEOUT_SECONDS = 60
# Of a product of random numbers, relative to its largest: rounding of inputs is not in it, of
# results and sums it is.
MATMUL_TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-2, "float16": 2e-3}
MATMUL_SIZE = 512
# Numbers whose float32 sums over up to 2**15 ranks are exact: a wrong sum is wrong, and not
# rounding.
REDUCED_NUMBERS = 1 << 18


def check_launched(processes: int, device_type: str, environment: Mapping[str, str]) -> list[Check]:
    """Start as many processes as a run would, on this machine, and judge what they report."""
    with tempfile.TemporaryDirectory(prefix="finetune-doctor-") as folder:
        command = [
            *(
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc_per_node={processes}",
            ),
            *("-m", MODULE, folder, device_type),
        ]
        answer = run_to_end(
            command,
            environment=without_launcher(environment),
            timeout_seconds=LAUNCH_TIMEOUT_SECONDS,
        )
        return judge(read_reports(Path(folder)), processes, answer)


def check_this_world(device_type: str) -> tuple[LaunchWorld, list[Check]]:
    """The same checks in the world that this process was started in, judged on every rank."""
    world = launch_world()
    die_with_launcher(world)
    probe_torch_npu()
    reports = work(world, devices.choose_device_type(device_type), exchange=True)
    return world, judge(reports, world.world_size, Answer(None, 0, ""))


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what a launcher sets: ours sets it anew."""
    launchers = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    return {name: value for name, value in environment.items() if name not in launchers}


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """The reports of the ranks that wrote one, by rank."""
    reports = []
    for path in folder.glob("rank-*.json"):
        try:
            reports.append(json.loads(path.read_text(encoding="utf-8")))
        except ValueError:
            continue  # half written: its rank counts as one without a report
    return sorted(reports, key=lambda report: report["rank"])


# ---------------------------------------------------------------- what the ranks report, judged


def judge(reports: Sequence[Mapping[str, Any]], processes: int, answer: Answer) -> list[Check]:
    """Rendezvous, collectives and arithmetic, from the reports of the ranks."""
    missing = sorted(set(range(processes)) - {report["rank"] for report in reports})
    if missing:
        what = _("rank {ranks} of {processes} reported nothing: {reason}")
        what = what.format(ranks=_joined(missing), processes=processes, reason=answer.reason)
        return [
            fail("launched_world", what, answer.fix, silent=missing, messages=answer.last_lines)
        ]
    backends = "/".join(sorted({report["backend"] for report in reports}))
    what = _("{processes} processes met ({backends})").format(
        processes=processes, backends=backends
    )
    return [
        ok("launched_world", what, backend=backends),
        _judge_collectives(reports),
        _judge_matmul(reports),
    ]


def _joined(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _judge_collectives(reports: Sequence[Mapping[str, Any]]) -> Check:
    """All-reduce and all-gather are exact: the numbers are small whole ones."""
    name, expected = "collectives", list(range(len(reports)))
    wrong = [
        r["rank"] for r in reports if r["sum_error"] != 0 or list(r["gathered_ranks"]) != expected
    ]
    if not wrong:
        return ok(
            name,
            _("all-reduce and all-gather are exact on {count} ranks").format(count=len(reports)),
        )
    what = _("all-reduce or all-gather is wrong on rank {ranks}").format(ranks=_joined(wrong))
    fix = _(
        "the link or a device is broken: leave that device out, and try NCCL_P2P_DISABLE=1 or"
        " another interface"
    )
    return fail(name, what, fix, wrong=wrong)


def _judge_matmul(reports: Sequence[Mapping[str, Any]]) -> Check:
    """One product, bit for bit equal on equal devices, and near the exact one everywhere."""
    name, dtype = "matmul", reports[0]["dtype"]
    errors = [report["matmul_error"] for report in reports]
    values = {"errors": errors, "dtype": dtype}
    far = [r["rank"] for r in reports if not r["matmul_error"] <= MATMUL_TOLERANCE[r["dtype"]]]
    if far:
        what = _(
            "a matrix product is wrong on rank {ranks}: off by {error:.1e} of its largest number"
        )
        fix = _("this device computes wrong: leave it out and have it replaced")
        return fail(
            name, what.format(ranks=_joined(far), error=max(errors)), fix, wrong=far, **values
        )
    odd = []
    for device in {report["device"] for report in reports}:
        alike = [report for report in reports if report["device"] == device]
        usual = Counter(report["matmul_digest"] for report in alike).most_common(1)[0][0]
        odd += [report["rank"] for report in alike if report["matmul_digest"] != usual]
    if odd:
        what = _("equal devices give different bits for one product: rank {ranks} differs")
        fix = _(
            "look at that device's ECC and health; other drivers or kernels on the nodes differ in"
            " bits too"
        )
        return warn(name, what.format(ranks=_joined(sorted(odd))), fix, odd=sorted(odd), **values)
    what = _("one {dtype} product has the same bits on {count} ranks").format(
        dtype=dtype, count=len(reports)
    )
    return ok(name, what, **values)


# ---------------------------------------------------------------- one rank


@dataclass
class RankReport:
    """What one rank saw.

    Attributes:
        sum_error: difference of the all-reduced numbers from their exact sum; 0 is right.
        gathered_ranks: the ranks that an all-gather brought, in order.
        matmul_digest: SHA-256 of the bits of a seeded matrix product; equal on equal devices.
        matmul_error: largest difference from the product in float64 on the host, relative to its
            largest number.
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


def work(world: LaunchWorld, device_type: str, *, exchange: bool = False) -> list[dict[str, Any]]:
    """Meet the other ranks, reduce, gather, multiply. The process group is made and taken down
    here.

    Args:
        exchange: give every rank all reports, by the same collectives; else this rank's alone.
    """
    import torch
    import torch.distributed as dist

    devices.check_local_ranks(device_type, world)
    backend = devices.DEVICE_KINDS[device_type].backend
    device = torch.device(device_type)
    if device_type in ("npu", "cuda"):
        getattr(torch, device_type).set_device(world.local_rank)
        device = torch.device(device_type, world.local_rank)
    able = devices.capabilities(device_type)
    dist.init_process_group(
        backend,
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS),
    )
    report = RankReport(world.rank, world.world_size, os.uname().nodename, able.name, backend)
    numbers = torch.full((REDUCED_NUMBERS,), float(world.rank + 1), device=device)
    dist.all_reduce(numbers)
    expected = world.world_size * (world.world_size + 1) / 2
    report.sum_error = float((numbers.cpu() - expected).abs().max())
    mine = torch.tensor([world.rank], dtype=torch.int64, device=device)
    gathered = [torch.empty_like(mine) for _rank in range(world.world_size)]
    dist.all_gather(gathered, mine)
    report.gathered_ranks = [int(one.cpu()) for one in gathered]
    _multiply(
        report, device, torch.bfloat16 if able.bfloat16 and device_type != "cpu" else torch.float32
    )
    reports = [asdict(report)]
    if exchange:
        reports = all_gather_plain(asdict(report), world.world_size, device=device)
    dist.barrier()
    dist.destroy_process_group()
    return reports


def _multiply(report: RankReport, device: torch.device, dtype: torch.dtype) -> None:
    """A product in the dtype that training takes, from numbers made on the host: the same on every
    rank.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randn(MATMUL_SIZE, MATMUL_SIZE, generator=generator).to(dtype) for _side in range(2)
    )
    product = (left.to(device) @ right.to(device)).cpu().float()
    exact = left.double() @ right.double()
    report.dtype = str(dtype).removeprefix("torch.")
    report.matmul_digest = hashlib.sha256(product.numpy().tobytes()).hexdigest()
    report.matmul_error = float((product.double() - exact).abs().max() / exact.abs().max())


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    world = launch_world()
    die_with_launcher(world)
    (report,) = work(world, devices.choose_device_type(sys.argv[2]))
    (Path(sys.argv[1]) / f"rank-{world.rank}.json").write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
