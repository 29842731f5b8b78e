"""Drivers are read right: npu-smi's tables whatever the version and the chip, and NVML whatever it
refuses.

The texts in `smi_outputs/` have the layout of real outputs (heading, columns, and rules of each
driver), with made-up numbers. Expectations are written by hand.
"""

from __future__ import annotations

import os
import stat
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
    return (OUTPUTS / name).read_text(encoding="utf-8")


def memory(report: SmiReport) -> list[tuple[int | None, int | None]]:
    """(used, total) MiB of each device."""
    return [
        (
            None if d.used_bytes is None else d.used_bytes // MIB,
            None if d.total_bytes is None else d.total_bytes // MIB,
        )
        for d in report.devices
    ]


def holders(report: SmiReport) -> dict[str, list[tuple[int, str, int | None]]]:
    return {
        device.label: [
            (p.pid, p.name, p.memory_bytes and p.memory_bytes // MIB) for p in device.processes
        ]
        for device in report.devices
        if device.processes
    }


# ---------------------------------------------------------------- npu-smi info


@pytest.mark.parametrize(
    ("file", "driver", "names", "used_and_total"),
    [
        ("npu_23.0_910B3.txt", "23.0.1", ["910B3"], [(3161, 65536)]),
        (
            "npu_24.1_910B1_busy.txt",
            "24.1.0",
            ["910B1"] * 4,
            [(m, 65536) for m in (3437, 59356, 65102, 3378)],
        ),
        (
            "npu_25.2_910_93.txt",
            "25.2.1",
            ["Ascend910"] * 4,
            [(m, 65536) for m in (3143, 62498, 3141, 2887)],
        ),
        ("npu_25.5_910B4.txt", "25.5.2", ["910B4"], [(2922, 32768)]),
        (
            "npu_26.0_910B3_container.txt",
            "26.0.rc1",
            ["910B3"] * 2,
            [(53984, 65536), (3402, 65536)],
        ),
        ("npu_22.0_310P3.txt", "22.0.4", ["310P3"] * 2, [(1805, 21527), (934, 23054)]),
        ("npu_950.txt", "26.1.0", ["Ascend950DT"] * 2, [(11024, 131072), (2048, 131072)]),
    ],
)
def test_devices_of_every_chip_and_driver(
    file: str, driver: str, names: list[str], used_and_total: list
):
    report = parse_info(text(file))
    assert (report.device_type, report.driver_version, report.problem) == ("npu", driver, "")
    assert [device.name for device in report.devices] == names
    assert memory(report) == used_and_total
    assert [device.index for device in report.devices] == list(range(len(names)))
    assert {device.health for device in report.devices} == {"OK"}


def test_910a_memory_is_hbm_and_not_the_ddr_beside_it():
    report = parse_info(text("npu_23.0_910A.txt"))
    assert memory(report) == [(30711, 32768), *((1024 + number, 32768) for number in range(1, 8))]
    assert holders(report) == {"NPU 0": [(55115, "python", 30784)]}
    first = report.devices[0]
    assert (first.temperature_celsius, first.utilization_percent) == (45, 12)
    assert first.free_bytes == (32768 - 30711) * MIB


def test_processes_stand_at_their_chip():
    report = parse_info(text("npu_24.1_910B1_busy.txt"))
    assert holders(report) == {
        "NPU 1": [(208841, "python3", 55870)],
        "NPU 2": [(208842, "python3", 30000), (31337, "VLLMWorker_TP", 31700)],
    }
    assert report.devices[0].processes == ()  # known to be none
    two_chips = parse_info(text("npu_25.2_910_93.txt"))
    assert [d.label for d in two_chips.devices] == [
        "NPU 2 chip 0",
        "NPU 2 chip 1",
        "NPU 5 chip 0",
        "NPU 5 chip 1",
    ]
    assert holders(two_chips) == {"NPU 2 chip 1": [(845053, "python", 59656)]}


def test_a_container_sees_its_own_process_ids_where_the_tool_knows_them():
    report = parse_info(text("npu_26.0_910B3_container.txt"))
    assert holders(report) == {"NPU 0": [(212, "python", 48954), (1712734, "", 150)]}
    assert holders(parse_info(text("npu_950.txt"))) == {
        "NPU 0": [(1001, "python", 8256), (101, "python", 512)]
    }


def test_without_a_process_table_the_holders_are_unknown_not_none():
    assert parse_info(text("npu_22.0_310P3.txt")).devices[0].processes is None
    assert holders(parse_info(text("npu_23.0_310P3_busy.txt"))) == {"NPU 0": [(9001, "main", 3120)]}


def test_health_and_missing_numbers():
    report = parse_info(text("npu_24.1_910B2_alarm.txt"))
    assert [device.health for device in report.devices] == ["OK", "Alarm", "Warning"]
    assert report.devices[2].temperature_celsius is None


@pytest.mark.parametrize(
    ("printed", "problem"),
    [
        ((text("npu_no_driver.txt"), "", 255), "dcmi module initialize failed. ret is -8005"),
        (
            (text("npu_no_permission.txt"), "", 255),
            "dcmi model initialized failed, because the device is used. ret is -8020",
        ),
        (("", "", 0), "npu-smi lists no device"),
        (("", "something else", 5), "something else"),
        (("", "", 5), "npu-smi ended with 5"),
    ],
)
def test_no_device_is_said_in_the_tools_own_words(printed: tuple[str, str, int], problem: str):
    report = parse_info(*printed)
    assert report.devices == () and report.problem == problem


@pytest.mark.parametrize("file", sorted(path.name for path in OUTPUTS.glob("npu_[0-9]*.txt")))
def test_a_table_cut_anywhere_is_read_as_far_as_it_goes(file: str):
    """A tool that is killed while it prints: never an error, and what is read is what stands in the
    whole.
    """
    whole = text(file)
    complete = parse_info(whole).devices
    for length in range(0, len(whole), 37):
        report = parse_info(whole[:length])
        for device, same in zip(report.devices, complete, strict=False):
            assert (device.name, device.health, device.utilization_percent) == (
                same.name, same.health, same.utilization_percent
            )  # fmt: skip
            assert same.label.startswith(device.label)
            assert device.total_bytes is None or device.free_bytes == same.free_bytes


# ---------------------------------------------------------------- the program


def make_tool(folder: Path, name: str, body: str) -> None:
    tool = folder / name
    tool.write_text(f"#!/bin/sh\n{body}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)


def test_real_programs_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert read_npus() is None
    make_tool(tmp_path, "npu-smi", f'[ "$1" = info ] && cat "{OUTPUTS}/npu_25.5_910B4.txt"')
    report = read_npus()
    assert report is not None and memory(report) == [(2922, 32768)]
    make_tool(tmp_path, "npu-smi", "exec sleep 30")
    monkeypatch.setattr(smi, "TIMEOUT_SECONDS", 0.2)
    hung = read_npus()
    assert hung is not None and hung.problem == "npu-smi did not answer in 0.2 s"
    (tmp_path / "npu-smi").write_text("no program")
    broken = read_npus()
    assert broken is not None and "cannot be run" in broken.problem and broken.devices == ()


# ---------------------------------------------------------------- NVML


def nvidia(monkeypatch: pytest.MonkeyPatch, *gpus: FakeGpu, **options) -> SmiReport:
    """What is read of a driver; whatever it answers, the library is let go."""
    driver = FakeNvml(*gpus, **options)
    driver.install(monkeypatch)
    report = read_gpus()
    assert report is not None and driver.users == 0
    return report


def test_a_gpu_in_full(monkeypatch: pytest.MonkeyPatch):
    busy = FakeGpu(
        name="NVIDIA A100-SXM4-80GB", total=81920, used=36737, use=97, celsius=61,
        computing=[(os.getpid(), 36730)], drawing=[(os.getpid(), 36730), (1, 7)],
    )  # fmt: skip
    report = nvidia(monkeypatch, busy, FakeGpu(), driver="535.104.05", cuda=12020)
    assert (report.device_type, report.driver_version, report.runtime_version) == (
        "cuda",
        "535.104.05",
        "12.2",
    )
    first, second = report.devices
    assert (first.name, first.label) == ("NVIDIA A100-SXM4-80GB", "GPU 0")
    assert (first.used_bytes, first.total_bytes, first.health) == (36737 * MIB, 81920 * MIB, "OK")
    assert (first.utilization_percent, first.temperature_celsius) == (97, 61)
    own = psutil.Process().name()
    # not the desktop, which only draws
    assert holders(report) == {"GPU 0": [(os.getpid(), own, 36730)]}
    assert (second.index, second.label, second.processes) == (
        1,
        "GPU 1",
        (),
    ) and report.problem == ""


def test_what_a_gpu_does_not_tell_is_unknown(monkeypatch: pytest.MonkeyPatch):
    """GB10 has no memory of its own; a process of another container has no name; old drivers lack
    some questions.
    """
    silent = FakeGpu(
        "NVIDIA GB10",
        total=None,
        use=None,
        celsius=None,
        ecc=None,
        computing=None,
        fails={"memory": pynvml.NVML_ERROR_UNKNOWN},
    )
    hidden = FakeGpu(
        computing=[(2**22 + 1, None)], fails={"mig": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}
    )
    first, second = nvidia(monkeypatch, silent, hidden).devices
    assert first == SmiDevice(0, "NVIDIA GB10", "GPU 0")
    assert [(p.pid, p.name, p.memory_bytes) for p in second.processes] == [(2**22 + 1, "", None)]

    def too_old(handle: FakeGpu) -> None:
        raise pynvml.NVMLLibraryMismatchError

    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", too_old)
    assert [device.processes for device in read_gpus().devices] == [None, None]


def test_memory_errors_are_its_health(monkeypatch: pytest.MonkeyPatch):
    report = nvidia(monkeypatch, FakeGpu(ecc=0), FakeGpu(ecc=4), FakeGpu(ecc=None))
    assert [device.health for device in report.devices] == ["OK", "ECC errors: 4", ""]


def test_slices_stand_for_their_gpu(monkeypatch: pytest.MonkeyPatch):
    slices = {
        0: FakeGpu(total=20096, used=37, use=None),
        2: FakeGpu(total=9856, used=9000, computing=None),
    }
    report = nvidia(
        monkeypatch, FakeGpu("NVIDIA A100", slices=slices), FakeGpu("NVIDIA A100", slices={})
    )
    assert [device.label for device in report.devices] == ["GPU 0 MIG 0", "GPU 0 MIG 2"]
    assert [(device.index, device.name) for device in report.devices] == [
        (0, "NVIDIA A100 MIG"),
        (1, "NVIDIA A100 MIG"),
    ]
    assert memory(report) == [(37, 20096), (9000, 9856)]
    assert [device.processes for device in report.devices] == [(), None]


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "driver is not loaded"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "Driver/library version mismatch"),
        (pynvml.NVML_ERROR_UNKNOWN, "Unknown Error"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "no permission"),
    ],
)
def test_no_gpu_is_said_in_words(code: int, problem: str, monkeypatch: pytest.MonkeyPatch):
    report = nvidia(monkeypatch, init_error=code)
    assert (report.device_type, report.devices) == ("cuda", ()) and problem in report.problem


@pytest.mark.parametrize("question", ["handle", "name", "memory", "ecc"])
def test_a_lost_gpu(question: str, monkeypatch: pytest.MonkeyPatch):
    report = nvidia(
        monkeypatch, FakeGpu(), FakeGpu(fails={question: pynvml.NVML_ERROR_GPU_IS_LOST})
    )
    assert (
        report.devices == ()
        and "GPU is lost" in report.problem
        and report.driver_version == "580.65.06"
    )


def test_a_driver_without_devices_and_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert nvidia(monkeypatch).problem == "No devices were found"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [report.device_type for report in read_devices()] == ["cuda"]
    FakeNvml(init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND).install(monkeypatch)
    assert read_gpus() is None and read_devices() == []


def test_a_driver_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    forever = threading.Event()
    monkeypatch.setattr(pynvml, "nvmlInit", forever.wait)
    monkeypatch.setattr(smi, "TIMEOUT_SECONDS", 0.1)
    report = read_gpus()
    assert report is not None and report.problem == "the NVIDIA driver did not answer in 0.1 s"
    forever.set()


def test_the_stand_in_has_only_what_the_library_has():
    asked = [name for name in dir(FakeNvml) if name.startswith("nvml")]
    assert [name for name in asked if not callable(getattr(pynvml, name, None))] == []


# ---------------------------------------------------------------- visible devices


@pytest.mark.parametrize(
    ("variable", "names"),
    [
        (None, ["0", "1", "2", "3"]),
        ("2,0", ["2", "0"]),
        ("", []),
        ("-1", []),
        ("1,9,2", ["1"]),  # ids after one that does not exist do not count
        ("GPU-1234", ["0", "1", "2", "3"]),
    ],
)
def test_visible_devices(variable: str | None, names: list[str]):
    devices = [SmiDevice(place, str(place), f"GPU {place}") for place in range(4)]
    left = visible(devices, variable)
    assert [device.name for device in left] == names
    assert [device.index for device in left] == list(range(len(names)))
