"""Drivers are read right: npu-smi's tables whatever the version and the chip, and NVML whatever it
refuses. The texts in `smi_outputs/` have the layout of real outputs, with made-up numbers.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import psutil
import pynvml
import pytest
from smi_tools import OUTPUTS, FakeGpu, FakeNvml

from finetune.runtime import smi
from finetune.runtime.host import MIB
from finetune.runtime.smi import (
    SmiDevice,
    SmiReport,
    parse_info,
    read_devices,
    read_gpus,
    read_npus,
    visible,
)


def text(name: str) -> str:
    return (OUTPUTS / f"npu_{name}.txt").read_text(encoding="utf-8")


def memory(report: SmiReport) -> list[tuple[int, int]]:
    """(used, total) MiB of each device."""
    return [(each.used_bytes // MIB, each.total_bytes // MIB) for each in report.devices]


def holders(report: SmiReport) -> dict[str, list[tuple[int, str, int]]]:
    return {
        device.label: [(p.pid, p.name, p.memory_bytes // MIB) for p in device.processes]
        for device in report.devices
        if device.processes
    }


@pytest.mark.parametrize(
    ("file", "driver", "name", "memory_mib"),
    [
        ("25.2_910_93", "25.2.1", "Ascend910", [(n, 65536) for n in (3143, 62498, 3141, 2887)]),
        ("26.0_910B3_container", "26.0.rc1", "910B3", [(53984, 65536), (3402, 65536)]),
        ("22.0_310P3", "22.0.4", "310P3", [(1805, 21527), (934, 23054)]),
        ("950", "26.1.0", "Ascend950DT", [(11024, 131072), (2048, 131072)]),
    ],
)
def test_devices_of_every_chip_and_driver(file, driver, name, memory_mib):
    report = parse_info(text(file))
    assert (report.device_type, report.driver_version, report.problem) == ("npu", driver, "")
    assert memory(report) == memory_mib
    for number, device in enumerate(report.devices):
        assert (device.index, device.name, device.health) == (number, name, "OK")


def test_910a_memory_is_hbm_and_not_the_ddr_beside_it():
    report = parse_info(text("23.0_910A"))
    assert memory(report) == [(30711, 32768), *((1024 + number, 32768) for number in range(1, 8))]
    first = report.devices[0]
    assert (first.temperature_celsius, first.utilization_percent) == (45, 12)


def test_processes_stand_at_their_chip():
    """Without a process table the holders are unknown, not none."""
    expected = {
        "24.1_910B1_busy": {
            "NPU 1": [(208841, "python3", 55870)],
            "NPU 2": [(208842, "python3", 30000), (31337, "VLLMWorker_TP", 31700)],
        },
        "25.2_910_93": {"NPU 2 chip 1": [(845053, "python", 59656)]},
        "26.0_910B3_container": {"NPU 0": [(212, "python", 48954), (1712734, "", 150)]},
        "23.0_310P3_busy": {"NPU 0": [(9001, "main", 3120)]},
    }
    assert {name: holders(parse_info(text(name))) for name in expected} == expected
    labels = [device.label for device in parse_info(text("25.2_910_93")).devices]
    assert labels == ["NPU 2 chip 0", "NPU 2 chip 1", "NPU 5 chip 0", "NPU 5 chip 1"]
    assert parse_info(text("24.1_910B1_busy")).devices[0].processes == ()
    assert parse_info(text("22.0_310P3")).devices[0].processes is None


def test_alarms_and_no_devices():
    report = parse_info(text("24.1_910B2_alarm"))
    assert [device.health for device in report.devices] == ["OK", "Alarm", "Warning"]
    assert report.devices[2].temperature_celsius is None
    used = "dcmi model initialized failed, because the device is used. ret is -8020"
    for printed, problem in (  # in the tool's own words
        ((text("no_permission"), "", 255), used),
        (("", "", 0), "npu-smi lists no device"),
        (("", "something else", 5), "something else"),
        (("", "", 5), "npu-smi ended with 5"),
    ):
        report = parse_info(*printed)
        assert report.devices == () and report.problem == problem


def test_real_programs_on_the_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert read_npus() is None
    for program, timeout, problem in (
        (f'#!/bin/sh\n[ "$1" = info ] && cat "{OUTPUTS}/npu_25.5_910B4.txt"\n', 60.0, ""),
        ("#!/bin/sh\nexec sleep 30\n", 0.2, "npu-smi did not answer in 0.2 s"),
        ("no program", 60.0, "npu-smi cannot be run: Exec format error"),
    ):
        (tmp_path / "npu-smi").write_text(program)
        (tmp_path / "npu-smi").chmod(0o755)
        monkeypatch.setattr(smi, "TIMEOUT_SECONDS", timeout)
        report = read_npus()
        assert report.problem == problem
        assert memory(report) == ([] if problem else [(2922, 32768)])


def nvidia(monkeypatch: pytest.MonkeyPatch, *gpus: FakeGpu, **options) -> SmiReport:
    """What is read of a driver; whatever it answers, the library is let go."""
    driver = FakeNvml(*gpus, **options)
    driver.install(monkeypatch)
    report = read_gpus()
    assert driver.users == 0
    return report


def test_a_gpu_in_full(monkeypatch):
    me = os.getpid()
    busy = FakeGpu("NVIDIA A100-SXM4-80GB", total=81920, used=36737, use=97, celsius=61)
    busy.computing, busy.drawing = [(me, 36730)], [(me, 36730), (1, 7)]
    report = nvidia(monkeypatch, busy, FakeGpu(ecc=4), driver="535.104.05", cuda=12020)
    assert (report.device_type, report.problem) == ("cuda", "")
    assert (report.driver_version, report.runtime_version) == ("535.104.05", "12.2")
    first, second = report.devices
    assert (first.name, first.label, first.health) == (busy.name, "GPU 0", "OK")
    assert memory(report)[0] == (36737, 81920)
    assert (first.utilization_percent, first.temperature_celsius) == (97, 61)
    # not the desktop, which only draws
    assert holders(report) == {"GPU 0": [(me, psutil.Process().name(), 36730)]}
    assert (second.index, second.label, second.processes) == (1, "GPU 1", ())
    assert second.health == "ECC errors: 4"


def test_what_a_gpu_does_not_tell_is_unknown(monkeypatch):
    """GB10 has no memory of its own; old drivers lack some questions."""
    silent = FakeGpu("NVIDIA GB10", total=None, use=None, celsius=None, ecc=None, computing=None)
    silent.fails = {"memory": pynvml.NVML_ERROR_UNKNOWN}
    hidden = FakeGpu(computing=[(2**22 + 1, None)])
    hidden.fails = {"mig": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}
    first, second = nvidia(monkeypatch, silent, hidden).devices
    assert first == SmiDevice(0, "NVIDIA GB10", "GPU 0")
    assert [(p.pid, p.name, p.memory_bytes) for p in second.processes] == [(2**22 + 1, "", None)]

    def too_old(handle: FakeGpu) -> None:
        raise pynvml.NVMLLibraryMismatchError

    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", too_old)
    assert [device.processes for device in read_gpus().devices] == [None, None]


def test_slices_stand_for_their_gpu(monkeypatch):
    small, hidden = FakeGpu(total=20096, used=37, use=None), FakeGpu(computing=None)
    gpus = [FakeGpu("A100", slices=slices) for slices in ({0: small, 2: hidden}, {})]
    found = nvidia(monkeypatch, *gpus).devices
    labels = [(each.index, each.name, each.label) for each in found]
    assert labels == [(0, "A100 MIG", "GPU 0 MIG 0"), (1, "A100 MIG", "GPU 0 MIG 2")]
    assert [each.processes for each in found] == [(), None] and found[0].used_bytes == 37 * MIB


def test_a_driver_that_fails_and_a_lost_gpu_are_said_in_words(monkeypatch):
    lost = pynvml.NVML_ERROR_GPU_IS_LOST
    for gpus, init_error, problem in (
        ((), pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "driver is not loaded"),
        ((FakeGpu(), FakeGpu(fails={"handle": lost})), 0, "GPU is lost"),
        ((FakeGpu(), FakeGpu(fails={"memory": lost})), 0, "GPU is lost"),
    ):
        report = nvidia(monkeypatch, *gpus, init_error=init_error)
        assert (report.device_type, report.devices) == ("cuda", ()) and problem in report.problem
        assert report.driver_version == ("580.65.06" if gpus else "")


def test_a_driver_without_devices_no_driver_and_one_that_hangs(tmp_path: Path, monkeypatch):
    assert nvidia(monkeypatch).problem == "No devices were found"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [report.device_type for report in read_devices()] == ["cuda"]
    FakeNvml(init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND).install(monkeypatch)
    assert read_gpus() is None and read_devices() == []
    forever = threading.Event()
    monkeypatch.setattr(pynvml, "nvmlInit", forever.wait)
    monkeypatch.setattr(smi, "TIMEOUT_SECONDS", 0.1)
    assert read_gpus().problem == "the NVIDIA driver did not answer in 0.1 s"
    forever.set()


def test_visible_devices():
    cases = {None: "0 1 2 3", "2,0": "2 0", "": "", "-1": "", "GPU-1234": "0 1 2 3"}
    cases |= {"1,9,2": "1"}  # ids after one that does not exist do not count
    for variable, names in cases.items():
        left = visible([SmiDevice(n, str(n), f"GPU {n}") for n in range(4)], variable)
        assert [device.name for device in left] == names.split(), variable
        assert [device.index for device in left] == list(range(len(left)))
