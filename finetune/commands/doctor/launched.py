"""Checks that need several processes: started with torch elastic like a run, or run in the world
that this process belongs to.

    torchrun --nproc_per_node 2 -m finetune.commands.doctor.launched DEVICE_TYPE

is one process of the world that doctor starts. Each rank prints its report. A rank without a report
died or hung, and its launcher's messages show how.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from finetune.commands.doctor.check import Check
from finetune.commands.doctor.probe import Answer, print_report, run_to_end
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
# Maximum error of a product of random matrices, relative to its largest element. It includes
# rounding of results and sums, but not of inputs.
MATMUL_TOLERANCE = {
    "float32": 1e-3,
    "bfloat16": 1e-2,
    "float16": 2e-3,
}
MATMUL_SIZE = 512
# Numbers whose float32 sums over up to 2**15 ranks are exact: a wrong sum is wrong, and not
# rounding.
REDUCED_NUMBERS = 1 << 18


def check_launched(processes: int, device_type: str, environment: Mapping[str, str]) -> list[Check]:
    """Start as many processes as a run would, on this machine, and judge what they report."""
    answer = run_to_end(
        [*elastic(processes), "-m", MODULE, device_type],
        environment=without_launcher(environment),
        timeout_seconds=LAUNCH_TIMEOUT_SECONDS,
    )
    return judge(answer.reports, processes, answer)


def check_this_world(device_type: str) -> tuple[LaunchWorld, list[Check]]:
    """Make the same checks in the world that this process was started in, judged on every rank."""
    world = launch_world()
    die_with_launcher(world)
    probe_torch_npu()
    reports = work(world, devices.choose_device_type(device_type), exchange=True)
    return world, judge(reports, world.world_size, Answer(0, ""))


def elastic(processes: int) -> list[str]:
    """Return the command that starts a module or script with `processes` processes here."""
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    return [*launcher, "--standalone", f"--nproc_per_node={processes}"]


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Remove the variables that a launcher sets; our launcher sets its own."""
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    launchers = (*ranks, "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in environment.items() if name not in launchers}


# ---------------------------------------------------------------- what the ranks report, judged


def judge(reports: Sequence[Mapping[str, Any]], processes: int, answer: Answer) -> list[Check]:
    """Judge rendezvous, collectives and arithmetic by the reports of the ranks."""
    reports = sorted(reports, key=lambda report: report["rank"])
    missing = sorted(set(range(processes)) - {report["rank"] for report in reports})
    if missing:
        values = {"silent": missing, "messages": answer.last_lines}
        what = _("rank {ranks} of {processes} reported nothing: {reason}")
        words = {
            "ranks": _joined(missing),
            "processes": processes,
            "reason": answer.reason,
        }
        return [Check("launched_world", values=values).fail(what, answer.fix, **words)]
    backend = reports[0]["backend"]
    what = _("{processes} processes met ({backends})")
    check = Check("launched_world", values={"backend": backend})
    met = check.ok(what, processes=processes, backends=backend)
    return [met, _judge_collectives(reports), _judge_matmul(reports)]


def _joined(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _judge_collectives(reports: Sequence[Mapping[str, Any]]) -> Check:
    """Compare all-reduce and all-gather with what they must be: the numbers are small whole ones,
    so both are exact.
    """
    ranks, wrong = list(range(len(reports))), []
    for report in reports:
        if report["sum_error"] != 0 or list(report["gathered_ranks"]) != ranks:
            wrong.append(report["rank"])
    if not wrong:
        return Check("collectives").ok(
            _("all-reduce and all-gather are exact on {count} ranks"), count=len(reports)
        )
    return Check("collectives", values={"wrong": wrong}).fail(
        _("all-reduce or all-gather is wrong on rank {ranks}"),
        _(
            "the link or a device is broken: leave that device out, and try NCCL_P2P_DISABLE=1 or"
            " another interface"
        ),
        ranks=_joined(wrong),
    )


def _judge_matmul(reports: Sequence[Mapping[str, Any]]) -> Check:
    """Compare one product: the same bits on equal devices, and near the exact one everywhere."""
    errors, dtype = [report["matmul_error"] for report in reports], reports[0]["dtype"]
    far, odd, values = [], [], {"errors": errors, "dtype": dtype}
    digests: dict[str, Counter[str]] = defaultdict(Counter)
    for report in reports:
        digests[report["device"]][report["matmul_digest"]] += 1
    for report in reports:
        ((usual, _count),) = digests[report["device"]].most_common(1)
        if not report["matmul_error"] <= MATMUL_TOLERANCE[report["dtype"]]:
            far.append(report["rank"])
        if report["matmul_digest"] != usual:
            odd.append(report["rank"])
    if far:
        what = _(
            "a matrix product is wrong on rank {ranks}: off by {error:.1e} of its largest number"
        )
        fix = _("this device computes wrong: leave it out and have it replaced")
        check = Check("matmul", values={"wrong": far, **values})
        return check.fail(what, fix, ranks=_joined(far), error=max(errors))
    if odd:
        what = _("equal devices give different bits for one product: rank {ranks} differs")
        fix = _(
            "look at that device's ECC and health; other drivers or kernels on the nodes differ in"
            " bits too"
        )
        check = Check("matmul", values={"odd": odd, **values})
        return check.warn(what, fix, ranks=_joined(odd))
    return Check("matmul", values=values).ok(
        _("one {dtype} product has the same bits on {count} ranks"), count=len(reports)
    )


# ---------------------------------------------------------------- one rank


def work(world: LaunchWorld, device_type: str, *, exchange: bool = False) -> list[dict[str, Any]]:
    """Meet the other ranks, reduce, gather, multiply. The process group is made and taken down
    here.

    Args:
        exchange: give every rank all reports, by the same collectives; else this rank's alone.

    Returns: reports of ranks, with
        sum_error: difference of the all-reduced numbers from their exact sum; 0 is right.
        gathered_ranks: the ranks that an all-gather brought, in order.
        matmul_digest: SHA-256 of the bits of a seeded matrix product; equal on equal devices.
        matmul_error: largest difference from the product in float64 on the host, relative to its
            largest number.
    """
    import torch
    import torch.distributed as dist

    devices.check_local_ranks(device_type, world)
    rank, world_size = world.rank, world.world_size
    backend = devices.DEVICE_KINDS[device_type].backend
    device = torch.device(device_type)
    if device_type in ("npu", "cuda"):
        device = torch.device(device_type, world.local_rank)
        getattr(torch, device_type).set_device(device)
    able, timeout = devices.capabilities(device_type), timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS)
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    numbers = torch.full((REDUCED_NUMBERS,), float(rank + 1), device=device)
    dist.all_reduce(numbers)
    expected = world_size * (world_size + 1) / 2
    mine = torch.tensor([rank], dtype=torch.int64, device=device)
    gathered = [torch.empty_like(mine) for _rank in range(world_size)]
    dist.all_gather(gathered, mine)
    dtype = torch.bfloat16 if able.bfloat16 and device_type != "cpu" else torch.float32
    report = {
        "rank": rank,
        "device": able.name,
        "backend": backend,
        "sum_error": float((numbers.cpu() - expected).abs().max()),
        "gathered_ranks": [int(one) for one in gathered],
        **_multiply(device, dtype),
    }
    reports = [report]
    if exchange:
        reports = all_gather_plain(report, world_size, device=device)
    dist.barrier()
    dist.destroy_process_group()
    return reports


def _multiply(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Multiply in the dtype that training takes, from numbers made on the host: the same on every
    rank.
    """
    import torch

    generator, shape = torch.Generator().manual_seed(0), (MATMUL_SIZE, MATMUL_SIZE)
    left = torch.randn(shape, generator=generator).to(dtype)
    right = torch.randn(shape, generator=generator).to(dtype)
    product = (left.to(device) @ right.to(device)).cpu().float()
    exact = left.double() @ right.double()
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "matmul_digest": hashlib.sha256(product.numpy().tobytes()).hexdigest(),
        "matmul_error": float((product.double() - exact).abs().max() / exact.abs().max()),
    }


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    world = launch_world()
    die_with_launcher(world)
    (report,) = work(world, devices.choose_device_type(sys.argv[1]))
    print_report(report)


if __name__ == "__main__":
    main()
