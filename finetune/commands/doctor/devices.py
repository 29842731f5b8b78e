"""Accelerators: how many a run sees, how much of their memory is free, who holds the rest, and whether they are "
"well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from finetune.commands.doctor.check import GIB, Check, fail, gib, ok, skip, warn
from finetune.runtime.device import DEVICE_KINDS
from finetune.runtime.smi import SmiDevice, SmiProcess, SmiReport, visible

TOOLS = {"npu": "npu-smi", "cuda": "nvidia-smi"}
# Memory that others may hold on a device before it is worth a word; drivers and idle contexts hold a few GiB on an NPU.
HELD_SHARE = 0.15
# npu-smi's words, from bad to worse.
SICK = ("alarm", "critical", "fault", "offline")


def accelerator(reports: Sequence[SmiReport], wanted: str, usable: Sequence[str]) -> str:
    """The device type that a run would take, as far as can be told without torch: "npu", "cuda", or "cpu".

    Args:
        wanted: the configuration's device type; auto takes NPU before CUDA.
        usable: types that the installed torch is built for. torch_npu is not installed by chance: where it is, and
            npu-smi is not, the run is taken to be on NPUs that cannot be listed.
    """
    if wanted != "auto":
        return wanted
    listed = {report.device_type for report in reports if report.devices}
    if "npu" in usable and ("npu" in listed or not reports):
        return "npu"
    return "cuda" if "cuda" in listed and "cuda" in usable else "cpu"


def visible_devices(reports: Sequence[SmiReport], device_type: str, environment: Mapping[str, str]) -> list[SmiDevice]:
    """The devices of a type that a program started with these variables would see."""
    report = next((one for one in reports if one.device_type == device_type), None)
    if report is None:
        return []
    return visible(report.devices, environment.get(DEVICE_KINDS[device_type].visible_variable))


def check_devices(
    reports: Sequence[SmiReport],
    device_type: str,
    environment: Mapping[str, str],
    *,
    processes: int | None = None,
    min_devices: int | None = None,
) -> Check:
    """Whether there are as many devices as processes, and as the preset asks for.

    Args:
        device_type: "npu", "cuda", "mps" or "cpu"; see `accelerator`.
        processes: processes on this machine; None where not known.
        min_devices: least number of devices; None: as many as processes.
    """
    name = "devices"
    needed = max(min_devices or 0, processes or 0, 1)
    if device_type not in TOOLS:
        if min_devices:
            return fail(
                name,
                (
                    f"{min_devices} devices are needed, and there is no accelerator here",
                    f"需要 {min_devices} 个设备，而本机没有加速卡",
                ),
                (
                    "use a machine with accelerators, or a preset for one device",
                    "请使用带加速卡的机器，或改用单设备预设",
                ),
            )
        problems = "; ".join(f"{TOOLS[one.device_type]}: {one.problem}" for one in reports if one.problem)
        if problems:
            return warn(
                name,
                (f"no device answers, the run takes the CPU: {problems}", f"没有设备应答，训练将使用 CPU：{problems}"),
                _DRIVER_FIX,
            )
        return ok(name, f"the run takes the {device_type}", f"训练将使用 {device_type}")
    report = next((one for one in reports if one.device_type == device_type), None)
    if report is None:
        return warn(
            name,
            (
                f"{TOOLS[device_type]} is not on the path: devices and their memory are not known",
                f"路径中没有 {TOOLS[device_type]}：无法得知设备与显存",
            ),
            (
                f"install the driver's tools, or add {TOOLS[device_type]}'s folder to PATH",
                f"安装驱动工具，或将 {TOOLS[device_type]} 所在目录加入 PATH",
            ),
        )
    if not report.devices:  # torch says whether it is the tool alone, as in a container that it was not made for
        return warn(
            name,
            (
                f"devices and their memory are not known: {TOOLS[device_type]}: {report.problem}",
                f"无法得知设备与显存：{TOOLS[device_type]}：{report.problem}",
            ),
            _DRIVER_FIX,
        )
    seen = visible_devices(reports, device_type, environment)
    variable = DEVICE_KINDS[device_type].visible_variable
    shown = f" ({variable}={environment[variable]})" if variable in environment else ""
    values = {
        "visible": len(seen),
        "here": len(report.devices),
        "names": [one.name for one in seen],
        "driver": report.driver_version,
    }
    if len(seen) < needed:
        return fail(
            name,
            (
                f"{len(seen)} of {len(report.devices)} devices are visible{shown}; {needed} are needed",
                f"{len(report.devices)} 个设备中可见 {len(seen)} 个{shown}；需要 {needed} 个",
            ),
            (
                f"make more devices visible, or start at most {max(1, len(seen))} processes (--nproc "
                f"{max(1, len(seen))})",
                f"放开更多设备，或最多启动 {max(1, len(seen))} 个进程（--nproc {max(1, len(seen))}）",
            ),
            **values,
        )
    kinds = " + ".join(
        f"{sum(one.name == kind for one in seen)} x {kind}" for kind in dict.fromkeys(one.name for one in seen)
    )
    if len({one.name for one in seen}) > 1:
        return warn(
            name,
            (
                f"devices of different kinds: {kinds}; all wait for the slowest",
                f"设备型号不一：{kinds}；所有设备都会等待最慢的一个",
            ),
            (f"choose equal ones with {variable}", f"用 {variable} 选择相同型号"),
            **values,
        )
    said = f"{kinds}, driver {report.driver_version}{shown}"
    return ok(name, said, f"{kinds}，驱动 {report.driver_version}{shown}", **values)


_DRIVER_FIX = (
    "as root look at the driver (dmesg, lsmod), reload it or restart the machine; in a container pass the devices in",
    "以 root 检查驱动（dmesg、lsmod），重新加载驱动或重启机器；在容器中请映射设备",
)


def check_device_memory(
    devices: Sequence[SmiDevice], *, needed_devices: int | None = None, needed_bytes: int | None = None
) -> Check:
    """Whether enough devices have enough free memory, and who holds it where they have not.

    Args:
        devices: those that the run sees.
        needed_devices: how many of them it takes, the first ones; None: all.
        needed_bytes: free memory that each must have; None: nobody else should hold a notable share.
    """
    name = "device_memory"
    known = [one for one in devices if one.free_bytes is not None]
    if not known:
        return skip(name, "no device tells its memory", "没有设备报告显存")
    count = len(known) if needed_devices is None else needed_devices
    first = known[:count]
    values = {"devices": [_numbers(one) for one in devices], "needed_bytes": needed_bytes, "needed_devices": count}
    if needed_bytes is None:
        held = [one for one in first if (one.used_bytes or 0) > HELD_SHARE * (one.total_bytes or 1)]
        if held:
            what = (f"memory is held already: {_held(held)}", f"显存已被占用：{_held(held)}")
            return warn(name, what, _holders_fix(held, devices), **values)
    else:
        enough = [one for one in known if (one.free_bytes or 0) >= needed_bytes]
        short = [one for one in first if one not in enough]
        if len(enough) < count:
            what = (
                f"{len(enough)} devices have {gib(needed_bytes)} free, {count} are needed: {_held(short)}",
                f"空闲显存达到 {gib(needed_bytes)} 的设备有 {len(enough)} 个，需要 {count} 个：{_held(short)}",
            )
            return fail(name, what, _holders_fix(short, devices), **values)
        if short:
            chosen = ",".join(str(one.index) for one in enough[:count])
            what = (
                f"the run takes the first {count} devices, and not all have {gib(needed_bytes)} free: {_held(short)}",
                f"训练使用前 {count} 个设备，但并非都有 {gib(needed_bytes)} 空闲显存：{_held(short)}",
            )
            fix = (
                f"show it the free ones: {chosen} of those that are visible now",
                f"让其只看到空闲设备：当前可见设备中的 {chosen}",
            )
            return warn(name, what, fix, **values)
    least = min(one.free_bytes or 0 for one in first)
    said = f"at least {gib(least)} free on each of {len(first)} devices"
    return ok(name, said, f"{len(first)} 个设备，每个至少空闲 {gib(least)}", **values)


def _numbers(device: SmiDevice) -> dict[str, Any]:
    return {
        "index": device.index,
        "label": device.label,
        "free_bytes": device.free_bytes,
        "total_bytes": device.total_bytes,
        "holders": [process.pid for process in device.processes or ()],
    }


def _held(devices: Sequence[SmiDevice]) -> str:
    """`NPU 1: 6.0 of 64.0 GiB free (pid 208841 python3 54.6 GiB)`."""
    said = []
    for one in devices:
        holders = sorted(one.processes or (), key=lambda process: -(process.memory_bytes or 0))[:4]
        by = f" ({', '.join(map(_holder, holders))})" if holders else ""
        said.append(f"{one.label}: {(one.free_bytes or 0) / GIB:.1f} of {gib(one.total_bytes or 0)} free{by}")
    return "; ".join(said)


def _holder(process: SmiProcess) -> str:
    memory = "" if process.memory_bytes is None else f" {gib(process.memory_bytes)}"
    return f"pid {process.pid}{' ' + process.name if process.name else ''}{memory}"


def _holders_fix(short: Sequence[SmiDevice], devices: Sequence[SmiDevice]) -> tuple[str, str]:
    pids = sorted({process.pid for one in short for process in one.processes or ()})
    free = [str(one.index) for one in devices if one not in short]
    english, chinese = [], []
    if pids:
        shown = ", ".join(map(str, pids[:8]))
        english.append(f"end what is yours of the processes {shown} (python -m finetune clean ends what our runs left)")
        chinese.append(f"结束其中属于你的进程 {shown}（python -m finetune clean 可清理本软件遗留的进程）")
    elif any(one.processes is not None for one in short):
        english.append(
            "nobody is listed as holder: a process of another container, or one that ended badly; look there"
        )
        chinese.append("未列出占用者：可能是其他容器的进程或异常退出的进程，请排查")
    if free:
        english.append(f"or take the other devices: {','.join(free)}")
        chinese.append(f"或使用其他设备：{','.join(free)}")
    if not english:
        english, chinese = ["use smaller rows, or wait until the devices are free"], ["减小批量，或等待设备空闲"]
    return "; ".join(english), "；".join(chinese)


def check_device_health(devices: Sequence[SmiDevice]) -> Check:
    """What the driver says about the devices' health."""
    name = "device_health"
    told = [one for one in devices if one.health]
    if not told:
        return skip(name, "no device tells its health", "没有设备报告健康状态")
    values = {one.label: one.health for one in told}
    unwell = [one for one in told if one.health.upper() != "OK"]
    if not unwell:
        return ok(name, f"{len(told)} devices are well", f"{len(told)} 个设备状态正常", **values)
    said = ", ".join(f"{one.label}: {one.health}" for one in unwell)
    verdict = fail if any(one.health.lower() in SICK or "ECC" in one.health for one in unwell) else warn
    return verdict(
        name,
        (f"the driver reports {said}", f"驱动报告：{said}"),
        (
            "leave these devices out (visible-device variable), and have them looked at: npu-smi info -t health, or "
            "nvidia-smi -q -d ECC",
            "请用可见设备变量避开这些设备，并排查：npu-smi info -t health，或 nvidia-smi -q -d ECC",
        ),
        **values,
    )
