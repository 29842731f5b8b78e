"""npu-smi and nvidia-smi are read right, whatever the version and the chip.

The texts in `smi_outputs/` have the layout of real outputs (heading, columns, and rules of each driver), with made-up
numbers. Expectations are written by hand.
"""

from __future__ import annotations

import os
import stat
import sys
import types
from pathlib import Path

import pytest

from finetune.runtime import smi
from finetune.runtime.smi import MIB, Output, SmiProcess, number, read_devices, run_tool, visible
from finetune.runtime.smi_npu import parse_info, parse_type, read_npus
from finetune.runtime.smi_nvidia import parse_query, parse_table, read_gpus

OUTPUTS = Path(__file__).parents[1] / "smi_outputs"


def text(name: str) -> str:
    return (OUTPUTS / name).read_text(encoding="utf-8")


def output(name: str, code: int = 0) -> Output:
    return Output(code, text(name))


def memory(report: smi.SmiReport) -> list[tuple[int | None, int | None]]:
    """(used, total) MiB of each device."""
    return [
        (None if d.used_bytes is None else d.used_bytes // MIB, None if d.total_bytes is None else d.total_bytes // MIB)
        for d in report.devices
    ]


def holders(report: smi.SmiReport) -> dict[str, list[tuple[int, str, int | None]]]:
    return {
        device.label: [(p.pid, p.name, p.memory_bytes and p.memory_bytes // MIB) for p in device.processes]
        for device in report.devices
        if device.processes
    }


# ---------------------------------------------------------------- npu-smi info


@pytest.mark.parametrize(
    ("file", "driver", "names", "used_and_total"),
    [
        ("npu_23.0_910B3.txt", "23.0.1", ["910B3"], [(3161, 65536)]),
        ("npu_24.1_910B1_busy.txt", "24.1.0", ["910B1"] * 4, [(m, 65536) for m in (3437, 59356, 65102, 3378)]),
        ("npu_25.2_910_93.txt", "25.2.1", ["Ascend910"] * 4, [(m, 65536) for m in (3143, 62498, 3141, 2887)]),
        ("npu_25.5_910B4.txt", "25.5.2", ["910B4"], [(2922, 32768)]),
        ("npu_26.0_910B3_container.txt", "26.0.rc1", ["910B3"] * 2, [(53984, 65536), (3402, 65536)]),
        ("npu_22.0_310P3.txt", "22.0.4", ["310P3"] * 2, [(1805, 21527), (934, 23054)]),
        ("npu_950.txt", "26.1.0", ["Ascend950DT"] * 2, [(11024, 131072), (2048, 131072)]),
    ],
)
def test_devices_of_every_chip_and_driver(file: str, driver: str, names: list[str], used_and_total: list):
    report = parse_info(output(file))
    assert (report.device_type, report.driver_version, report.problem) == ("npu", driver, "")
    assert [device.name for device in report.devices] == names
    assert memory(report) == used_and_total
    assert [device.index for device in report.devices] == list(range(len(names)))
    assert {device.health for device in report.devices} == {"OK"}


def test_910a_memory_is_hbm_and_not_the_ddr_beside_it():
    report = parse_info(output("npu_23.0_910A.txt"))
    assert memory(report) == [(30711, 32768), *((1024 + number, 32768) for number in range(1, 8))]
    assert holders(report) == {"NPU 0": [(55115, "python", 30784)]}
    first = report.devices[0]
    assert (first.power_watts, first.temperature_celsius, first.utilization_percent) == (67.8, 45, 12)
    assert first.bus_id == "0000:C1:00.0" and first.free_bytes == (32768 - 30711) * MIB


def test_processes_stand_at_their_chip():
    report = parse_info(output("npu_24.1_910B1_busy.txt"))
    assert holders(report) == {
        "NPU 1": [(208841, "python3", 55870)],
        "NPU 2": [(208842, "python3", 30000), (31337, "VLLMWorker_TP", 31700)],
    }
    assert report.devices[0].processes == ()  # known to be none
    two_chips = parse_info(output("npu_25.2_910_93.txt"))
    assert [d.label for d in two_chips.devices] == ["NPU 2 chip 0", "NPU 2 chip 1", "NPU 5 chip 0", "NPU 5 chip 1"]
    assert holders(two_chips) == {"NPU 2 chip 1": [(845053, "python", 59656)]}
    assert two_chips.devices[1].power_watts is None  # "-": the card's power stands at its first chip


def test_a_container_sees_its_own_process_ids_where_the_tool_knows_them():
    report = parse_info(output("npu_26.0_910B3_container.txt"))
    assert holders(report) == {"NPU 0": [(212, "python", 48954), (1712734, "", 150)]}
    assert holders(parse_info(output("npu_950.txt"))) == {"NPU 0": [(1001, "python", 8256), (101, "python", 512)]}


def test_without_a_process_table_the_holders_are_unknown_not_none():
    assert parse_info(output("npu_22.0_310P3.txt")).devices[0].processes is None
    assert holders(parse_info(output("npu_23.0_310P3_busy.txt"))) == {"NPU 0": [(9001, "main", 3120)]}


def test_health_and_missing_numbers():
    report = parse_info(output("npu_24.1_910B2_alarm.txt"))
    assert [device.health for device in report.devices] == ["OK", "Alarm", "Warning"]
    assert (report.devices[2].power_watts, report.devices[2].temperature_celsius) == (None, None)
    assert report.devices[2].bus_id == ""


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (output("npu_no_driver.txt", 255), "dcmi module initialize failed. ret is -8005"),
        (
            output("npu_no_permission.txt", 255),
            "dcmi model initialized failed, because the device is used. ret is -8020",
        ),
        (Output(0, ""), "npu-smi lists no device"),
        (Output(5, "", "something else"), "something else"),
        (Output(124, "", "npu-smi did not answer in 15 s"), "npu-smi did not answer in 15 s"),
    ],
)
def test_no_device_is_said_in_the_tools_own_words(said: Output, problem: str):
    report = parse_info(said)
    assert report.devices == () and report.problem == problem


@pytest.mark.parametrize("file", sorted(path.name for path in OUTPUTS.glob("*_[0-9]*.txt")))
def test_a_table_cut_anywhere_is_read_as_far_as_it_goes(file: str):
    """A tool that is killed while it prints: never an error, and what is read is what stands in the whole."""
    whole, parse = text(file), parse_info if file.startswith("npu") else parse_table
    complete = parse(Output(0, whole)).devices
    for length in range(0, len(whole), 37):
        report = parse(Output(0, whole[:length]))
        for device, same in zip(report.devices, complete, strict=False):
            if "MIG" in same.label and "MIG" not in device.label:
                continue  # the slices stand below the table of whole GPUs
            assert (device.name, device.bus_id) == (same.name, same.bus_id)
            assert device.total_bytes is None or device.free_bytes == same.free_bytes


# ---------------------------------------------------------------- npu-smi info -t


def test_usages_by_type():
    (device,) = parse_type(text("npu_usages_910B3.txt"))
    assert (device.label, device.total_bytes, device.used_bytes) == ("NPU 0", 65536 * MIB, 65536 * MIB // 4)
    assert device.utilization_percent == 61 and device.processes is None
    first, second = parse_type(text("npu_usages_910_93.txt"))
    assert (first.index, second.index) == (0, 1) and {first.label, second.label} == {"NPU 2"}
    assert second.used_bytes == int(65536 * MIB * 0.95) and second.utilization_percent == 88
    (small,) = parse_type(text("npu_usages_310P3.txt"))
    assert small.total_bytes == 21527 * MIB and small.used_bytes == int(21527 * MIB * 0.10)


def test_processes_board_and_health_by_type():
    (device,) = parse_type(text("npu_proc_mem_910B3.txt"))
    assert device.label == "NPU 3"
    assert device.processes == (SmiProcess(907864, "", 134 * MIB), SmiProcess(907999, "python3", 40960 * MIB))
    (board,) = parse_type(text("npu_board_910B3.txt"))
    assert board.name == "910B3" and board.total_bytes is None and board.processes is None
    (sick,) = parse_type(text("npu_health_910B2.txt"))
    assert (sick.label, sick.health) == ("NPU 1", "Warning")
    assert parse_type("") == []


# ---------------------------------------------------------------- nvidia-smi


@pytest.mark.parametrize(
    ("file", "driver", "cuda", "used_and_total", "held"),
    [
        ("nvidia_440_T4_old_processes.txt", "440.33.01", "10.2", [(1213, 15109)], {"GPU 0": [(48988, "python", 1203)]}),
        (
            "nvidia_450_1080Ti_busy.txt",
            "450.80.02",
            "11.0",
            [(10872, 11178), (2, 11178)],
            {"GPU 0": [(2211, "python train.py", 10531), (1433, "/usr/lib/xorg/Xorg", 189)]},
        ),
        ("nvidia_470_V100.txt", "470.161.03", "11.4", [(3, 16160)], {}),
        (
            "nvidia_535_A100.txt",
            "535.104.05",
            "12.2",
            [(4, 81920), (36737, 81920), (4, 81920), (4, 81920)],
            {"GPU 1": [(3518784, "/usr/bin/python3", 36730)]},
        ),
        (
            "nvidia_580_H100.txt",
            "580.65.06",
            "13.0",
            [(12345, 81559), (4, 81559)],
            {"GPU 0": [(1234567, "python3", 12330)]},
        ),
        (
            "nvidia_580_GB10_no_memory.txt",
            "580.95.05",
            "13.0",
            [(None, None)],
            {"GPU 0": [(2903, "/usr/lib/xorg/Xorg", 18)]},
        ),
    ],
)
def test_the_table_of_every_driver(file: str, driver: str, cuda: str, used_and_total: list, held: dict):
    report = parse_table(output(file))
    assert (report.device_type, report.driver_version, report.runtime_version) == ("cuda", driver, cuda)
    assert memory(report) == used_and_total
    assert holders(report) == held
    assert all(device.processes is not None for device in report.devices) and report.problem == ""


def test_table_health_temperature_and_use():
    sick = parse_table(output("nvidia_535_A100.txt")).devices
    assert [device.health for device in sick] == ["OK", "OK", "ECC errors: 4", "OK"]
    busy = parse_table(output("nvidia_450_1080Ti_busy.txt")).devices
    assert [device.utilization_percent for device in busy] == [7, None]
    assert [device.temperature_celsius for device in busy] == [43, 38]
    assert [device.power_watts for device in busy] == [15, None]  # "ERR!"
    assert [device.health for device in busy] == ["", ""]


def test_slices_stand_for_their_gpu():
    report = parse_table(output("nvidia_550_A100_MIG.txt"))
    assert [device.label for device in report.devices] == ["GPU 0 MIG 0", "GPU 0 MIG 1"]
    assert memory(report) == [(37, 20096), (9000, 9856)]
    assert [device.processes for device in report.devices] == [None, None]


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        ("nvidia_no_driver.txt", "couldn't communicate with the NVIDIA driver"),
        ("nvidia_mismatch.txt", "Driver/library version mismatch"),
        ("nvidia_container_lost.txt", "Unknown Error"),
        ("nvidia_no_permission.txt", "Insufficient Permissions"),
        ("nvidia_no_devices.txt", "No devices were found"),
        ("nvidia_lost_gpu.txt", "Unable to determine the device handle"),
    ],
)
def test_no_gpu_is_said_in_the_tools_own_words(file: str, problem: str):
    report = parse_table(output(file, 9))
    assert report.devices == () and problem in report.problem and "\n" not in report.problem


def test_queries():
    first, second = parse_query(text("nvidia_query_gpus.csv"), text("nvidia_query_apps.csv"))
    assert (first.used_bytes, first.total_bytes, first.health) == (40004 * MIB, 81920 * MIB, "OK")
    assert (first.utilization_percent, first.temperature_celsius, first.power_watts) == (97, 61, 321.55)
    assert first.processes == (
        SmiProcess(3518784, "/usr/bin/python3", 39000 * MIB),
        SmiProcess(77, "a, name, with commas", 1000 * MIB),
        SmiProcess(78, "[Insufficient Permissions]", None),
    )
    assert second.processes == () and second.health == "ECC errors: 3"
    unknown, old = parse_query(text("nvidia_query_gpus_na.csv"), None)
    assert (unknown.used_bytes, unknown.total_bytes, unknown.health, unknown.processes) == (None, None, "", None)
    assert (old.total_bytes, old.utilization_percent, old.power_watts) == (11178 * MIB, None, None)
    assert parse_query("", "") == ()


# ---------------------------------------------------------------- asking the tools


def answers(**by_word: Output):
    """A runner that answers by the first word of the command's arguments that is known; "" is a plain call."""

    def run(words):
        argument = words[1] if len(words) > 1 else ""
        return next((said for word, said in by_word.items() if argument.startswith(f"--{word}")), by_word.get("plain"))

    return run


def test_queries_are_preferred_and_the_table_fills_in():
    table, gpus = output("nvidia_535_A100.txt"), Output(0, text("nvidia_query_gpus.csv"))
    apps = Output(0, text("nvidia_query_apps.csv"))
    asked = read_gpus(answers(**{"query-gpu": gpus, "query-compute-apps": apps}, plain=table))
    assert asked is not None
    assert (asked.driver_version, asked.runtime_version) == ("535.104.05", "12.2")
    assert [device.temperature_celsius for device in asked.devices] == [61, 31]
    refused = Output(2, 'Field "power.draw" is not a valid field to query.')
    fallback = read_gpus(answers(**{"query-gpu": refused, "query-compute-apps": refused}, plain=table))
    assert fallback is not None and len(fallback.devices) == 4
    sliced = read_gpus(answers(**{"query-gpu": gpus}, plain=output("nvidia_550_A100_MIG.txt")))
    assert sliced is not None and [device.label for device in sliced.devices] == ["GPU 0 MIG 0", "GPU 0 MIG 1"]


def test_a_machine_without_tools_has_no_report():
    assert read_devices(lambda words: None) == []


def make_tool(folder: Path, name: str, body: str) -> None:
    tool = folder / name
    tool.write_text(f"#!/bin/sh\n{body}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)


def test_real_programs_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_tool(tmp_path, "npu-smi", f'[ "$1" = info ] && cat "{OUTPUTS}/npu_25.5_910B4.txt"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    report = read_npus()
    assert report is not None and memory(report) == [(2922, 32768)]
    make_tool(tmp_path, "npu-smi", "exec sleep 30")
    hung = run_tool(["npu-smi", "info"], timeout_seconds=0.2)
    assert hung is not None and parse_info(hung).problem == "npu-smi did not answer in 0.2 s"
    (tmp_path / "npu-smi").write_text("no program")
    broken = run_tool(["npu-smi", "info"])
    assert broken is not None and "cannot be run" in parse_info(broken).problem
    assert run_tool(["no-such-tool"]) is None


# ---------------------------------------------------------------- visible devices, numbers


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
    devices = [smi.SmiDevice(place, str(place), f"GPU {place}") for place in range(4)]
    left = visible(devices, variable)
    assert [device.name for device in left] == names
    assert [device.index for device in left] == list(range(len(names)))


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("71.5 W", 71.5),
        ("97 %", 97),
        ("43C", 43),
        ("-", None),
        ("NA", None),
        ("[N/A]", None),
        ("nan", None),
        ("", None),
    ],
)
def test_numbers(cell: str, value: float | None):
    assert number(cell) == value


# ---------------------------------------------------------------- pynvml


def fake_nvml(mig: bool = False) -> types.ModuleType:
    """The part of pynvml that is used, for one GPU that does not say its power."""
    module = types.ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def refuse(*arguments):
        raise NVMLError

    running = types.SimpleNamespace(pid=os.getpid(), usedGpuMemory=5 * MIB)
    module.__dict__.update(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlSystemGetDriverVersion=lambda: "580.65.06",
        nvmlSystemGetCudaDriverVersion_v2=lambda: 13000,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: b"NVIDIA L4",
        nvmlDeviceGetMigMode=lambda handle: (1, 1) if mig else refuse(),
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(total=100 * MIB, used=40 * MIB),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [running],
        nvmlDeviceGetTotalEccErrors=lambda handle, kind, counter: 0,
        nvmlDeviceGetUtilizationRates=lambda handle: types.SimpleNamespace(gpu=7),
        nvmlDeviceGetPowerUsage=refuse,
        nvmlDeviceGetTemperature=lambda handle, sensor: 50,
    )
    return module


def test_pynvml_where_it_is_installed(monkeypatch: pytest.MonkeyPatch):
    from finetune.runtime.smi_nvml import read_nvml

    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    report = read_nvml()
    assert report is not None and (report.driver_version, report.runtime_version) == ("580.65.06", "13.0")
    (device,) = report.devices
    assert (device.name, device.free_bytes, device.health) == ("NVIDIA L4", 60 * MIB, "OK")
    (process,) = device.processes
    assert (process.pid, process.memory_bytes) == (os.getpid(), 5 * MIB) and process.name
    assert device.power_watts is None
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(mig=True))
    assert read_nvml() is None  # the table shows the slices
