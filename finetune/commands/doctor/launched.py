"""Checks that need several processes: started with torch elastic as a run is, or asked in the world that we are in."""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.commands.doctor.check import Check, fail, ok, warn
from finetune.commands.doctor.probe import Answer, run_to_end, what_now

WORKER = "finetune.commands.doctor.launched_worker"
LAUNCH_TIMEOUT_SECONDS = 300.0
# Of a product of random numbers, relative to its largest: rounding of inputs is not in it, of results and sums it is.
MATMUL_TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-2, "float16": 2e-3}


def check_launched(processes: int, device_type: str, environment: Mapping[str, str]) -> list[Check]:
    """Start as many processes as a run would, on this machine, and judge what they say."""
    with tempfile.TemporaryDirectory(prefix="finetune-doctor-") as folder:
        words = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"),
            *("-m", WORKER, folder, device_type),
        ]
        code, messages = run_to_end(words, environment=clean(environment), timeout_seconds=LAUNCH_TIMEOUT_SECONDS)
        reports = read_reports(Path(folder))
    return judge(reports, processes, Answer(None, code, messages))


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what a launcher sets: ours sets it anew."""
    launchers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in environment.items() if name not in launchers}


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """The reports of the ranks that wrote one, by rank."""
    reports = []
    for path in folder.glob("rank-*.json"):
        try:
            reports.append(json.loads(path.read_text(encoding="utf-8")))
        except ValueError:
            continue  # half written: its rank counts as one that said nothing
    return sorted(reports, key=lambda report: report["rank"])


def judge(reports: Sequence[Mapping[str, Any]], processes: int, answer: Answer) -> list[Check]:
    """Meeting, collectives and arithmetic, from what the ranks wrote."""
    silent = sorted(set(range(processes)) - {report["rank"] for report in reports})
    if silent:
        ranks = ", ".join(map(str, silent))
        return [
            fail(
                "launched_world",
                (
                    f"rank {ranks} of {processes} said nothing: {answer.reason}",
                    f"{processes} 个进程中 {ranks} 号没有结果：{answer.reason}",
                ),
                what_now(answer),
                silent=silent,
                messages=answer.last_words,
            )
        ]
    backends = "/".join(sorted({report["backend"] for report in reports}))
    said = f"{processes} processes met ({backends})"
    return [
        ok("launched_world", said, f"{processes} 个进程已汇合（{backends}）", backend=backends),
        judge_collectives(reports),
        judge_matmul(reports),
    ]


def judge_collectives(reports: Sequence[Mapping[str, Any]]) -> Check:
    """All-reduce and all-gather are exact: the numbers are small whole ones."""
    name, expected = "collectives", list(range(len(reports)))
    wrong = [r["rank"] for r in reports if r["sum_error"] != 0 or list(r["gathered_ranks"]) != expected]
    if wrong:
        ranks = ", ".join(map(str, wrong))
        return fail(
            name,
            (
                f"all-reduce or all-gather is wrong on rank {ranks}",
                f"{ranks} 号进程的 all-reduce 或 all-gather 结果错误",
            ),
            (
                "the link or a device is broken: leave that device out, and try NCCL_P2P_DISABLE=1 or another "
                "interface",
                "链路或设备有故障：避开该设备，或尝试 NCCL_P2P_DISABLE=1、更换网卡",
            ),
            wrong=wrong,
        )
    return ok(
        name,
        f"all-reduce and all-gather are exact on {len(reports)} ranks",
        f"{len(reports)} 个进程的 all-reduce 与 all-gather 完全正确",
    )


def judge_matmul(reports: Sequence[Mapping[str, Any]]) -> Check:
    """One product, bit for bit equal on equal devices, and near the exact one everywhere."""
    name = "matmul"
    far = [r["rank"] for r in reports if not r["matmul_error"] <= MATMUL_TOLERANCE[r["dtype"]]]
    values = {"errors": [report["matmul_error"] for report in reports], "dtype": reports[0]["dtype"]}
    if far:
        ranks = ", ".join(map(str, far))
        worst = max(report["matmul_error"] for report in reports)
        return fail(
            name,
            (
                f"a matrix product is wrong on rank {ranks}: off by {worst:.1e} of its largest number",
                f"{ranks} 号进程的矩阵乘法错误：偏差为最大值的 {worst:.1e}",
            ),
            ("this device computes wrong: leave it out and have it replaced", "该设备计算有误：请避开并更换"),
            wrong=far,
            **values,
        )
    odd = []
    for device in {report["device"] for report in reports}:
        alike = [report for report in reports if report["device"] == device]
        usual = Counter(report["matmul_digest"] for report in alike).most_common(1)[0][0]
        odd += [report["rank"] for report in alike if report["matmul_digest"] != usual]
    if odd:
        ranks = ", ".join(map(str, sorted(odd)))
        return warn(
            name,
            (
                f"equal devices give different bits for one product: rank {ranks} differs",
                f"相同型号设备的同一乘积逐位不同：{ranks} 号进程不一致",
            ),
            (
                "look at that device's ECC and health; other drivers or kernels on the nodes differ in bits too",
                "检查该设备的 ECC 与健康状态；各节点驱动或算子版本不同也会造成差异",
            ),
            odd=sorted(odd),
            **values,
        )
    said = f"one {reports[0]['dtype']} product has the same bits on {len(reports)} ranks"
    return ok(name, said, f"同一 {reports[0]['dtype']} 乘积在 {len(reports)} 个进程上逐位相同", **values)
