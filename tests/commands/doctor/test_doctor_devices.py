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
from finetune.config.run_config import RunConfig
from finetune.runtime.language import speaking
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


@pytest.mark.parametrize(
    ("reports", "device_type", "environment", "processes", "min_devices", "verdict", "said"),
    [
        ([BUSY], "npu", {}, 4, None, "ok", "4 x 910B1"),
        (
            [BUSY],
            "npu",
            {"ASCEND_RT_VISIBLE_DEVICES": "0,1,2,7"},
            4,
            None,
            "fail",
            "3 of 4 devices are visible",
        ),
        (
            [BUSY],
            "npu",
            {"ASCEND_RT_VISIBLE_DEVICES": "0,1"},
            4,
            None,
            "fail",
            "2 of 4 devices are visible",
        ),
        ([BUSY], "npu", {}, 8, None, "fail", "8 are needed"),
        ([IDLE], "cuda", {"CUDA_VISIBLE_DEVICES": "1"}, 1, 2, "fail", "2 are needed"),
        ([IDLE], "cuda", {"CUDA_VISIBLE_DEVICES": ""}, 1, None, "fail", "0 of 2"),
        ([], "cpu", {}, 2, None, "ok", "takes the cpu"),
        ([], "cpu", {}, 2, 2, "fail", "2 devices are needed"),
        ([], "npu", {}, 2, None, "warn", "npu-smi was not found"),
        (
            [SmiReport("npu", problem="dcmi module initialize failed")],
            "npu",
            {},
            1,
            None,
            "warn",
            "dcmi",
        ),
        (
            [SmiReport("cuda", problem="No devices were found")],
            "cpu",
            {},
            1,
            None,
            "warn",
            "No devices were found",
        ),
    ],
)
def test_enough_devices(reports, device_type, environment, processes, min_devices, verdict, said):
    check = check_devices(
        reports, device_type, environment, processes=processes, min_devices=min_devices
    )
    assert check.verdict == verdict and said in check.what


def test_devices_of_two_kinds_wait_for_one_another():
    mixed = SmiReport("cuda", devices=(SmiDevice(0, "A100", "GPU 0"), SmiDevice(1, "L4", "GPU 1")))
    check = check_devices([mixed], "cuda", {}, processes=2)
    assert check.verdict == "warn" and "1 x A100 + 1 x L4" in check.what


def test_no_memory_names_who_holds_it():
    """A preset for four devices with 20 GB free each."""
    check = check_device_memory(BUSY.devices, needed_devices=4, needed_bytes=20 * GIB)
    assert check.verdict == "fail" and check.fix is not None
    assert "2 devices have 20.0 GiB free, 4 are needed" in check.what
    assert "NPU 1: 6.0 GiB of 64.0 GiB free (pid 208841 python3 54.6 GiB)" in check.what
    assert "NPU 2: 434.0 MiB of 64.0 GiB free (pid 31337 VLLMWorker_TP" in check.what
    assert "31337, 208841, 208842" in check.fix
    assert [device["holders"] for device in check.values["devices"]] == [
        [],
        [208841],
        [208842, 31337],
        [],
    ]
    two = check_device_memory(BUSY.devices, needed_devices=2, needed_bytes=20 * GIB)
    assert two.verdict == "warn" and two.fix is not None and "0,3" in two.fix


def test_memory_without_a_number_asks_that_nobody_else_is_there():
    assert check_device_memory(BUSY.devices).verdict == "warn"
    # the held ones are not taken
    assert check_device_memory(BUSY.devices, needed_devices=1).verdict == "ok"
    # what the driver itself holds is not worth a warning
    assert check_device_memory(BUSY.devices[:1]).verdict == "ok"
    assert (
        check_device_memory(IDLE.devices, needed_bytes=20 * GIB, needed_devices=2).verdict == "ok"
    )
    assert check_device_memory([SmiDevice(0, "NVIDIA GB10", "GPU 0")]).verdict == "skip"


def test_memory_of_somebody_who_is_not_listed():
    """A process of another container holds memory, and the tool does not list it."""
    hidden = SmiDevice(0, "910B3", "NPU 0", "OK", 64 * GIB, 60 * GIB, processes=())
    check = check_device_memory([hidden], needed_bytes=20 * GIB)
    assert check.verdict == "fail" and check.fix is not None and "another container" in check.fix


def test_visible_devices_are_the_runs():
    seen = visible_devices(BUSY, {"ASCEND_RT_VISIBLE_DEVICES": "2,3"})
    assert [device.label for device in seen] == ["NPU 2", "NPU 3"]
    assert check_device_memory(seen, needed_devices=2, needed_bytes=20 * GIB).verdict == "fail"


@pytest.mark.parametrize(
    ("healths", "verdict"),
    [
        (["OK", "OK"], "ok"),
        (["OK", "Warning"], "warn"),
        (["OK", "Alarm"], "fail"),
        (["Critical"], "fail"),
        (["ECC errors: 4"], "fail"),
        (["", ""], "skip"),
    ],
)
def test_health(healths: list[str], verdict: str):
    devices = [
        SmiDevice(number, "x", f"NPU {number}", health) for number, health in enumerate(healths)
    ]
    assert check_device_health(devices).verdict == verdict


def test_health_of_a_real_layout():
    assert "NPU 1: Alarm" in check_device_health(npus("npu_24.1_910B2_alarm.txt").devices).what
    assert (
        "GPU 2: ECC errors: 4"
        in check_device_health([SmiDevice(2, "NVIDIA A100", "GPU 2", "ECC errors: 4")]).what
    )
    with speaking("zh"):
        assert (
            "驱动报告：GPU 2: ECC errors: 4"
            in check_device_health([SmiDevice(2, "NVIDIA A100", "GPU 2", "ECC errors: 4")]).what
        )


# ---------------------------------------------------------------- what torch says


def torch_report(**changed):
    able = {
        "name": "x",
        "bfloat16": True,
        "fp8": False,
        "flash": True,
        "compile": True,
        "peak_flops": None,
    }
    return {
        "available": ["cuda", "cpu"], "device_type": "cuda", "count": 2, "capabilities": able, "matmul_error": "",
    } | changed  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "wanted", "listed", "processes", "verdict", "said"),
    [
        ({}, "auto", 2, 2, "ok", "2 x x (cuda)"),
        ({}, "auto", 2, 4, "fail", "4 processes"),
        ({"device_type": "npu"}, "npu", 0, 1, "fail", "torch sees no npu"),
        ({"matmul_error": "no kernel image is available"}, "auto", 2, 1, "fail", "no kernel image"),
        (
            {"available": ["cpu"], "device_type": "cpu", "count": None},
            "auto",
            8,
            1,
            "warn",
            "the driver lists 8",
        ),
        ({"available": ["cpu"], "device_type": "cpu", "count": None}, "cpu", 8, 4, "ok", "(cpu)"),
    ],
)
def test_torch_sees_the_devices(changed, wanted, listed, processes, verdict, said):
    check = check_device_type(torch_report(**changed), wanted, listed, processes)
    assert check.verdict == verdict and said in check.what


def run_config(**settings) -> RunConfig:
    return RunConfig(model="m", data=("d",), output_dir="o", **settings)


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
    able = torch_report()["capabilities"] | {"bfloat16": bfloat16}
    report = torch_report(device_type=device_type, capabilities=able)
    assert check_capabilities(report, run_config(dtype=dtype)).verdict == verdict


def test_fp8_is_ignored_in_words():
    from finetune.config.pretrain_config import PretrainConfig

    config = PretrainConfig(train_data_path=("x",), output_dir="o", fp8=True)
    check = check_capabilities(torch_report(), config)
    assert check.verdict == "warn" and "fp8" in check.what
    assert check_capabilities(torch_report(), None).what.endswith("no fp8")
