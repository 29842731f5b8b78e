"""Accelerators: how many a run sees, how much of their memory is free, who holds the rest, and
their health.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from finetune.commands.doctor.check import Check, fail, ok, skip, warn
from finetune.runtime.device import DEVICE_KINDS
from finetune.runtime.language import _
from finetune.runtime.smi import SmiDevice, SmiProcess, SmiReport, visible
from finetune.storage.durable_files import format_bytes

TOOLS = {"npu": "npu-smi", "cuda": "NVML"}
# Memory that others may hold on a device before it is worth a warning; drivers and idle contexts
# hold a few GiB on an NPU.
HELD_SHARE = 0.15
# npu-smi's own names for a device that cannot be used.
SICK = ("alarm", "critical", "fault", "offline")


def accelerator(reports: Sequence[SmiReport], wanted: str, usable: Sequence[str]) -> str:
    """The device type that a run would take, as far as can be told without torch: "npu", "cuda", or
    "cpu".

    Args:
        wanted: the configuration's device type; auto takes NPU before CUDA.
        usable: types that the installed torch is built for. torch_npu is not installed by chance:
            where it is, and npu-smi is not, the run is taken to be on NPUs that cannot be listed.
    """
    if wanted != "auto":
        return wanted
    listed = {report.device_type for report in reports if report.devices}
    if "npu" in usable and ("npu" in listed or not reports):
        return "npu"
    return "cuda" if "cuda" in listed and "cuda" in usable else "cpu"


def visible_devices(report: SmiReport | None, environment: Mapping[str, str]) -> list[SmiDevice]:
    """The devices that a program started with these variables would see."""
    if report is None:
        return []
    return visible(
        report.devices, environment.get(DEVICE_KINDS[report.device_type].visible_variable)
    )


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
    if device_type not in TOOLS:
        return _without_accelerator(name, reports, device_type, min_devices)
    tool = TOOLS[device_type]
    report = next((one for one in reports if one.device_type == device_type), None)
    if report is None:
        what = _("{tool} was not found: devices and their memory are not known").format(tool=tool)
        return warn(name, what, _("install the driver with its tools; npu-smi must be on PATH"))
    # torch tells whether it is the tool alone, as in a container that it was not made for
    if not report.devices:
        what = _("devices and their memory are not known: {tool}: {problem}")
        return warn(name, what.format(tool=tool, problem=report.problem), _driver_fix())
    return _enough_devices(name, report, environment, max(min_devices or 0, processes or 0, 1))


def _without_accelerator(
    name: str, reports: Sequence[SmiReport], device_type: str, min_devices: int | None
) -> Check:
    if min_devices:
        what = _("{count} devices are needed, and there is no accelerator here").format(
            count=min_devices
        )
        return fail(name, what, _("use a machine with accelerators, or a preset for one device"))
    problems = "; ".join(
        f"{TOOLS[one.device_type]}: {one.problem}" for one in reports if one.problem
    )
    if problems:
        what = _("no device answers, the run takes the CPU: {problems}").format(problems=problems)
        return warn(name, what, _driver_fix())
    return ok(name, _("the run takes the {device_type}").format(device_type=device_type))


def _driver_fix() -> str:
    return _(
        "as root look at the driver (dmesg, lsmod), reload it or restart the machine; in a"
        " container pass the devices in"
    )


def _enough_devices(
    name: str, report: SmiReport, environment: Mapping[str, str], needed: int
) -> Check:
    seen = visible_devices(report, environment)
    names = [one.name for one in seen]
    values = {
        "visible": len(seen),
        "here": len(report.devices),
        "names": names,
        "driver": report.driver_version,
    }
    variable = DEVICE_KINDS[report.device_type].visible_variable
    shown = f" ({variable}={environment[variable]})" if variable in environment else ""
    if len(seen) < needed:
        what = _("{visible} of {here} devices are visible{variable}; {needed} are needed")
        fix = _("make more devices visible, or start at most {count} processes (--nproc {count})")
        return fail(
            name,
            what.format(visible=len(seen), here=len(report.devices), variable=shown, needed=needed),
            fix.format(count=max(1, len(seen))),
            **values,
        )
    kinds = " + ".join(f"{names.count(kind)} x {kind}" for kind in dict.fromkeys(names))
    if len(set(names)) > 1:
        what = _("devices of different kinds: {kinds}; all wait for the slowest").format(
            kinds=kinds
        )
        return warn(
            name, what, _("choose equal ones with {variable}").format(variable=variable), **values
        )
    what = _("{kinds}, driver {driver}{variable}")
    return ok(
        name, what.format(kinds=kinds, driver=report.driver_version, variable=shown), **values
    )


# ---------------------------------------------------------------- memory


def check_device_memory(
    devices: Sequence[SmiDevice],
    *,
    needed_devices: int | None = None,
    needed_bytes: int | None = None,
) -> Check:
    """Whether enough devices have enough free memory, and who holds it where they have not.

    Args:
        devices: those that the run sees.
        needed_devices: how many of them it takes, the first ones; None: all.
        needed_bytes: free memory that each must have; None: nobody else should hold a notable
            share.
    """
    name = "device_memory"
    known = [one for one in devices if one.free_bytes is not None]
    if not known:
        return skip(name, _("no device reports its memory"))
    count = len(known) if needed_devices is None else needed_devices
    first = known[:count]
    values = {
        "devices": [_numbers(one) for one in devices],
        "needed_bytes": needed_bytes,
        "needed_devices": count,
    }
    if needed_bytes is None:
        held = [one for one in first if (one.used_bytes or 0) > HELD_SHARE * (one.total_bytes or 1)]
        if held:
            what = _("memory is held already: {devices}").format(devices=_held(held))
            return warn(name, what, _holders_fix(held, devices), **values)
    else:
        enough = [one for one in known if (one.free_bytes or 0) >= needed_bytes]
        short = [one for one in first if one not in enough]
        texts = {"count": count, "needed": format_bytes(needed_bytes), "devices": _held(short)}
        if len(enough) < count:
            what = _("{enough} devices have {needed} free, {count} are needed: {devices}")
            return fail(
                name,
                what.format(enough=len(enough), **texts),
                _holders_fix(short, devices),
                **values,
            )
        if short:
            what = _(
                "the run takes the first {count} devices, and not all have {needed} free: {devices}"
            )
            fix = _("show it the free ones: {ids} of those that are visible now")
            ids = ",".join(str(one.index) for one in enough[:count])
            return warn(name, what.format(**texts), fix.format(ids=ids), **values)
    least = format_bytes(min(one.free_bytes or 0 for one in first))
    return ok(
        name,
        _("at least {least} free on each of {count} devices").format(least=least, count=len(first)),
        **values,
    )


def _numbers(device: SmiDevice) -> dict[str, Any]:
    return {
        "index": device.index,
        "label": device.label,
        "free_bytes": device.free_bytes,
        "total_bytes": device.total_bytes,
        "holders": [process.pid for process in device.processes or ()],
    }


def _held(devices: Sequence[SmiDevice]) -> str:
    """`NPU 1: 6.0 GiB of 64.0 GiB free (pid 208841 python3 54.6 GiB)`."""
    shown = []
    for one in devices:
        holders = sorted(one.processes or (), key=lambda process: -(process.memory_bytes or 0))[:4]
        text = _("{label}: {free} of {total} free").format(
            label=one.label,
            free=format_bytes(one.free_bytes or 0),
            total=format_bytes(one.total_bytes or 0),
        )
        shown.append(f"{text} ({', '.join(map(_holder, holders))})" if holders else text)
    return "; ".join(shown)


def _holder(process: SmiProcess) -> str:
    memory = "" if process.memory_bytes is None else format_bytes(process.memory_bytes)
    return " ".join(filter(None, (f"pid {process.pid}", process.name, memory)))


def _holders_fix(short: Sequence[SmiDevice], devices: Sequence[SmiDevice]) -> str:
    pids = sorted({process.pid for one in short for process in one.processes or ()})
    free = [str(one.index) for one in devices if one not in short]
    steps = []
    if pids:
        step = _(
            "end what is yours of the processes {pids} (python -m finetune clean ends what our runs"
            " left)"
        )
        steps.append(step.format(pids=", ".join(map(str, pids[:8]))))
    elif any(one.processes is not None for one in short):
        steps.append(
            _(
                "nobody is listed as holder: a process of another container, or one that ended"
                " badly; look there"
            )
        )
    if free:
        steps.append(_("or take the other devices: {ids}").format(ids=",".join(free)))
    return "; ".join(steps) or _("use a smaller batch, or wait until the devices are free")


# ---------------------------------------------------------------- health


def check_device_health(devices: Sequence[SmiDevice]) -> Check:
    """What the driver reports about the devices' health."""
    name = "device_health"
    values = {one.label: one.health for one in devices if one.health}
    if not values:
        return skip(name, _("no device reports its health"))
    unwell = {label: health for label, health in values.items() if health.upper() != "OK"}
    if not unwell:
        return ok(name, _("{count} devices are well").format(count=len(values)), **values)
    verdict = (
        fail
        if any(health.lower() in SICK or "ECC" in health for health in unwell.values())
        else warn
    )
    what = _("the driver reports {healths}")
    fix = _(
        "leave these devices out (visible-device variable), and have them looked at: npu-smi info"
        " -t health, or nvidia-smi -q -d ECC"
    )
    shown = ", ".join(f"{label}: {health}" for label, health in unwell.items())
    return verdict(name, what.format(healths=shown), fix, **values)
