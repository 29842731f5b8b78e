"""Doctor on devices: enough of them, enough memory, who holds it, how they are, and what torch says
of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.commands.doctor.devices import (
    accelerator,
    check_capabilities,
    check_device_health,
    check_device_memory,
    check_device_type,
    check_devices,
    visible_devices,
)
from finetune.config.pretrain_config import PretrainConfig
from finetune.config.run_config import RunConfig
from finetune.runtime.smi import SmiDevice, SmiReport, parse_info

OUTPUTS = Path(__file__).parents[2] / "smi_outputs"
GIB = 1 << 30


def npus(name: str) -> SmiReport:
    return parse_info((OUTPUTS / name).read_text())


BUSY = npus("npu_24.1_910B1_busy.txt")  # four 910B1; 1 and 2 are held
IDLE = SmiReport(
    "cuda",
    "580.65",
    "13.0",
    tuple(SmiDevice(i, "H100", f"GPU {i}", "OK", 80 * GIB, 0) for i in range(2)),
)


@pytest.mark.parametrize(
    ("reports", "wanted", "usable", "chosen"),
    [
        ([BUSY, IDLE], "auto", ["npu", "cuda"], "npu"),
        ([IDLE], "auto", ["cuda"], "cuda"),
        ([IDLE], "auto", [], "cpu"),  # torch is a CPU build
        ([BUSY], "auto", [], "cpu"),  # torch_npu is not installed
        ([BUSY], "cpu", ["npu"], "cpu"),
        ([], "auto", [], "cpu"),
        ([], "auto", ["npu"], "npu"),  # torch_npu is there, npu-smi is not
    ],
)
def test_what_a_run_takes(reports: list[SmiReport], wanted: str, usable: list[str], chosen: str):
    assert accelerator(reports, wanted, usable) == chosen


NPUS, GPUS = "ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
MIXED = SmiReport("cuda", devices=(SmiDevice(0, "A100", "GPU 0"), SmiDevice(1, "L4", "GPU 1")))


@pytest.mark.parametrize(
    ("report", "device_type", "environment", "processes", "min_devices", "verdict", "said"),
    [
        (BUSY, "npu", {}, 4, None, "ok", "4 x 910B1"),
        (BUSY, "npu", {NPUS: "0,1,2,7"}, 4, None, "fail", "3 of 4 devices are visible"),
        (BUSY, "npu", {}, 8, None, "fail", "8 are needed"),
        (IDLE, "cuda", {GPUS: "1"}, 1, 2, "fail", "2 are needed"),
        (IDLE, "cuda", {GPUS: ""}, 1, None, "fail", "0 of 2"),
        (MIXED, "cuda", {}, 2, None, "warn", "1 x A100 + 1 x L4"),
        (None, "cpu", {}, 2, None, "ok", "takes the cpu"),
        (None, "cpu", {}, 2, 2, "fail", "2 devices are needed"),
        (None, "npu", {}, 2, None, "warn", "npu-smi was not found"),
        (SmiReport("npu", problem="dcmi failed"), "npu", {}, 1, None, "warn", "dcmi failed"),
        (SmiReport("cuda", problem="none found"), "cpu", {}, 1, None, "warn", "none found"),
    ],
)
def test_enough_devices(report, device_type, environment, processes, min_devices, verdict, said):
    reports = [] if report is None else [report]
    needed = {"processes": processes, "min_devices": min_devices}
    check = check_devices(reports, device_type, environment, **needed)
    assert check.verdict == verdict and said in check.what


def test_no_memory_names_who_holds_it():
    """A preset for four devices with 20 GB free each."""
    check = check_device_memory(BUSY.devices, needed_devices=4, needed_bytes=20 * GIB)
    assert check.verdict == "fail" and "31337, 208841, 208842" in check.fix
    for text in (
        "2 devices have 20.0 GiB free, 4 are needed",
        "NPU 1: 6.0 GiB of 64.0 GiB free (pid 208841 python3 54.6 GiB)",
        "NPU 2: 434.0 MiB of 64.0 GiB free (pid 31337 VLLMWorker_TP",
    ):
        assert text in check.what
    holders = [device["holders"] for device in check.values["devices"]]
    assert holders == [[], [208841], [208842, 31337], []]
    two = check_device_memory(BUSY.devices, needed_devices=2, needed_bytes=20 * GIB)
    assert two.verdict == "warn" and "0,3" in two.fix
    seen = visible_devices(BUSY, {NPUS: "2,3"})
    assert [device.label for device in seen] == ["NPU 2", "NPU 3"]
    # by a process of another container, which the tool does not list
    hidden = SmiDevice(0, "910B3", "NPU 0", "OK", 64 * GIB, 60 * GIB, processes=())
    check = check_device_memory([hidden], needed_bytes=20 * GIB)
    assert check.verdict == "fail" and "another container" in check.fix


@pytest.mark.parametrize(
    ("devices", "more", "verdict"),
    [
        (BUSY.devices, {}, "warn"),
        (BUSY.devices, {"needed_devices": 1}, "ok"),  # the held ones are not taken
        (BUSY.devices[:1], {}, "ok"),  # what the driver itself holds is not worth a warning
        (IDLE.devices, {"needed_devices": 2, "needed_bytes": 20 * GIB}, "ok"),
        ([SmiDevice(0, "NVIDIA GB10", "GPU 0")], {}, "skip"),
    ],
)
def test_memory_of_devices(devices, more: dict[str, int], verdict: str):
    assert check_device_memory(devices, **more).verdict == verdict


@pytest.mark.parametrize(
    ("healths", "verdict", "said"),
    [
        ("OK OK", "ok", "2 devices"),
        ("OK Warning", "warn", "NPU 1: Warning"),
        ("OK Alarm", "fail", "NPU 1: Alarm"),
        ("Critical", "fail", "NPU 0: Critical"),
        ("ECC:4", "fail", "NPU 0: ECC:4"),
        ("", "skip", ""),
    ],
)
def test_health(healths: str, verdict: str, said: str):
    devices = [SmiDevice(n, "x", f"NPU {n}", health) for n, health in enumerate(healths.split())]
    check = check_device_health(devices)
    assert check.verdict == verdict and said in check.what


# ---------------------------------------------------------------- what torch says


ABLE = {"name": "x", "bfloat16": True, "fp8": False, "flash": True, "compile": True}
REPORT = {"available": ["cuda", "cpu"], "device_type": "cuda", "count": 2, "matmul_error": ""}
REPORT |= {"capabilities": ABLE | {"peak_flops": None}}
CPU = {"available": ["cpu"], "device_type": "cpu", "count": None}


@pytest.mark.parametrize(
    ("changed", "wanted", "listed", "processes", "verdict", "said"),
    [
        ({}, "auto", 2, 2, "ok", "2 x x (cuda)"),
        ({}, "auto", 2, 4, "fail", "4 processes"),
        ({"device_type": "npu"}, "npu", 0, 1, "fail", "torch sees no npu"),
        ({"matmul_error": "no kernel image is available"}, "auto", 2, 1, "fail", "no kernel image"),
        (CPU, "auto", 8, 1, "warn", "the driver lists 8"),
        (CPU, "cpu", 8, 4, "ok", "(cpu)"),
    ],
)
def test_torch_sees_the_devices(changed, wanted, listed, processes, verdict, said):
    check = check_device_type(REPORT | changed, wanted, listed, processes)
    assert check.verdict == verdict and said in check.what


@pytest.mark.parametrize(
    ("dtype", "device_type", "bfloat16", "verdict"),
    [
        ("bfloat16", "npu", False, "fail"),
        ("bfloat16", "npu", True, "ok"),
        ("float16", "cpu", True, "fail"),
        ("auto", "npu", False, "ok"),
    ],
)
def test_dtypes_that_the_device_has(dtype: str, device_type: str, bfloat16: bool, verdict: str):
    report = {"device_type": device_type, "capabilities": ABLE | {"bfloat16": bfloat16}}
    config = RunConfig(model="m", data=("d",), output_dir="o", dtype=dtype)
    assert check_capabilities(report, config).verdict == verdict


def test_fp8_is_ignored_in_words():
    config = PretrainConfig(train_data_path=("x",), output_dir="o", fp8=True)
    check = check_capabilities(REPORT, config)
    assert check.verdict == "warn" and "fp8" in check.what
    assert check_capabilities(REPORT, None).what.endswith("no fp8")
