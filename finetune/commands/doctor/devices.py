"""Accelerators: how many a run sees, how much of their memory is free, who holds the rest, their
health, and what torch can do with them.

    python -m finetune.commands.doctor.devices < {"device_type": "auto", "language": "en"}

is the separate process that imports torch (and torch_npu), multiplies two matrices on the device,
and reports what the device can do.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from finetune.commands.doctor.check import Check
from finetune.commands.doctor.probe import Answer, answer_with, ask, run_to_end
from finetune.config.base_config import BaseConfig
from finetune.runtime import device as runtime_device
from finetune.runtime.language import N_, _
from finetune.runtime.smi import SmiDevice, SmiReport, visible
from finetune.storage.durable_files import format_bytes

MODULE = "finetune.commands.doctor.devices"
TORCH_TIMEOUT_SECONDS = 120.0
TOOLS = {"npu": "npu-smi", "cuda": "NVML"}
# Memory that others may hold on a device before it is worth a warning; drivers and idle contexts
# hold a few GiB on an NPU.
HELD_SHARE = 0.15
# npu-smi's own names for a device that cannot be used.
SICK = ("alarm", "critical", "fault", "offline")
_DRIVER_FIX = N_(
    "as root look at the driver (dmesg, lsmod), reload it or restart the machine; in a container"
    " pass the devices in"
)


def accelerator(reports: Sequence[SmiReport], requested: str, usable: Sequence[str]) -> str:
    """Return the device type that a run would use, as far as is known without torch: "npu", "cuda",
    or "cpu".

    Args:
        requested: the configuration's device type; auto takes NPU before CUDA.
        usable: types that the installed torch is built for. Users install torch_npu on purpose. If
            it is installed and npu-smi is not, assume that the run uses NPUs that cannot be listed.
    """
    if requested != "auto":
        return requested
    listed = {report.device_type for report in reports if report.devices}
    if "npu" in usable and ("npu" in listed or not reports):
        return "npu"
    return "cuda" if "cuda" in listed and "cuda" in usable else "cpu"


def report_of(reports: Sequence[SmiReport], device_type: str) -> SmiReport | None:
    return next((report for report in reports if report.device_type == device_type), None)


def visible_devices(report: SmiReport | None, environment: Mapping[str, str]) -> list[SmiDevice]:
    """Return the devices that a program started with these variables would see."""
    if report is None:
        return []
    variable = runtime_device.DEVICE_KINDS[report.device_type].visible_variable
    return visible(report.devices, environment.get(variable))


def check_devices(
    reports: Sequence[SmiReport],
    device_type: str,
    environment: Mapping[str, str],
    *,
    processes: int,
    min_devices: int | None = None,
) -> Check:
    """Check that there are as many devices as processes, and as the preset asks for.

    Args:
        device_type: "npu", "cuda", "mps" or "cpu"; see `accelerator`.
        processes: processes on this machine.
        min_devices: least number of devices; None: as many as processes.
    """
    if device_type not in TOOLS:
        return _without_accelerator(reports, device_type, min_devices)
    check, tool, report = Check("devices"), TOOLS[device_type], report_of(reports, device_type)
    if report is None:
        return check.warn(
            _("{tool} was not found: devices and their memory are not known"),
            _("install the driver with its tools; npu-smi must be on PATH"),
            tool=tool,
        )
    if not report.devices:
        # a warning: torch finds out whether only the tool fails, as in some containers
        return check.warn(
            _("devices and their memory are not known: {tool}: {problem}"),
            _(_DRIVER_FIX),
            tool=tool,
            problem=report.problem,
        )
    seen, needed = visible_devices(report, environment), max(min_devices or 0, processes)
    names, driver = [device.name for device in seen], report.driver_version
    count = {"visible": len(seen), "here": len(report.devices)}
    check = Check(
        "devices",
        values={
            **count,
            "names": names,
            "driver": driver,
        },
    )
    variable = runtime_device.DEVICE_KINDS[device_type].visible_variable
    shown = f" ({variable}={environment[variable]})" if variable in environment else ""
    if len(seen) < needed:
        fewest = max(1, len(seen))
        return check.fail(
            _("{visible} of {here} devices are visible{variable}; {needed} are needed"),
            _("make more devices visible, or start at most {count} processes (--nproc {count})"),
            variable=shown,
            needed=needed,
            count=fewest,
        )
    kinds = " + ".join(f"{names.count(kind)} x {kind}" for kind in dict.fromkeys(names))
    if len(set(names)) > 1:
        return check.warn(
            _("devices of different kinds: {kinds}; all wait for the slowest"),
            _("choose equal ones with {variable}"),
            kinds=kinds,
            variable=variable,
        )
    return check.ok(_("{kinds}, driver {driver}{variable}"), kinds=kinds, variable=shown)


def _without_accelerator(
    reports: Sequence[SmiReport], device_type: str, min_devices: int | None
) -> Check:
    check = Check("devices")
    if min_devices:
        return check.fail(
            _("{count} devices are needed, and there is no accelerator here"),
            _("use a machine with accelerators, or a preset for one device"),
            count=min_devices,
        )
    problems = [f"{TOOLS[one.device_type]}: {one.problem}" for one in reports if one.problem]
    if problems:
        return check.warn(
            _("no device answers, the run takes the CPU: {problems}"),
            _(_DRIVER_FIX),
            problems="; ".join(problems),
        )
    return check.ok(_("the run takes the {device_type}"), device_type=device_type)


# ---------------------------------------------------------------- memory and health


def check_device_memory(
    devices: Sequence[SmiDevice],
    *,
    needed_devices: int | None = None,
    needed_bytes: int | None = None,
) -> Check:
    """Check that enough devices have enough free memory; report who holds it if they do not.

    Args:
        devices: devices that the run sees.
        needed_devices: how many of them the run takes, starting with the first; None: all.
        needed_bytes: free memory that each must have; None: no other process should hold a notable
            share.
    """
    known = [device for device in devices if device.free_bytes is not None]
    if not known:
        return Check("device_memory").skip(_("no device reports its memory"))

    def is_free(device: SmiDevice) -> bool:
        if needed_bytes is None:
            return (device.used_bytes or 0) <= HELD_SHARE * (device.total_bytes or 1)
        return (device.free_bytes or 0) >= needed_bytes

    count = len(known) if needed_devices is None else needed_devices
    first, free = known[:count], [device for device in known if is_free(device)]
    values = {
        "devices": [_numbers(device) for device in devices],
        "needed_bytes": needed_bytes,
        "needed_devices": count,
    }
    check = Check("device_memory", values=values)
    short = [device for device in first if device not in free]
    if not short and (needed_bytes is None or len(free) >= count):
        least = format_bytes(min(device.free_bytes or 0 for device in first))
        return check.ok(
            _("at least {least} free on each of {count} devices"), least=least, count=len(first)
        )
    pids = sorted({process.pid for device in short for process in device.processes or ()})
    fix = _("use a smaller batch, or wait until the devices are free")
    if len(free) >= count:
        fix = _("show it the free ones: {ids} of those that are visible now")
    elif pids:
        fix = _(
            "end what is yours of the processes {pids} (python -m finetune clean ends what our runs"
            " left)"
        )
    elif any(device.processes is not None for device in short):
        fix = _(
            "nobody is listed as holder: a process of another container, or one that ended badly;"
            " look there"
        )
    words = {
        "devices": "; ".join(map(_held, short)),
        "needed": format_bytes(needed_bytes or 0),
        "enough": len(free),
        "count": count,
        "pids": ", ".join(map(str, pids[:8])),
        "ids": ",".join(str(device.index) for device in free[:count]),
    }
    if needed_bytes is None:
        return check.warn(_("memory is held already: {devices}"), fix, **words)
    if len(free) < count:
        return check.fail(
            _("{enough} devices have {needed} free, {count} are needed: {devices}"), fix, **words
        )
    return check.warn(
        _("the run takes the first {count} devices, and not all have {needed} free: {devices}"),
        fix,
        **words,
    )


def _numbers(device: SmiDevice) -> dict[str, Any]:
    return {
        "index": device.index,
        "label": device.label,
        "free_bytes": device.free_bytes,
        "total_bytes": device.total_bytes,
        "holders": [process.pid for process in device.processes or ()],
    }


def _held(device: SmiDevice) -> str:
    """`NPU 1: 6.0 GiB of 64.0 GiB free (pid 208841 python3 54.6 GiB)`."""
    free, total = format_bytes(device.free_bytes or 0), format_bytes(device.total_bytes or 0)
    text = _("{label}: {free} of {total} free").format(label=device.label, free=free, total=total)
    holders = []
    by_memory = sorted(device.processes or (), key=lambda process: -(process.memory_bytes or 0))
    for process in by_memory[:4]:
        memory = "" if process.memory_bytes is None else format_bytes(process.memory_bytes)
        holders.append(f"pid {process.pid} {process.name} {memory}".rstrip())
    return f"{text} ({', '.join(holders)})" if holders else text


def check_device_health(devices: Sequence[SmiDevice]) -> Check:
    """Check the devices' health as reported by the driver."""
    healths = {device.label: device.health for device in devices if device.health}
    check = Check("device_health", values=healths)
    if not healths:
        return check.skip(_("no device reports its health"))
    unwell = {label: health for label, health in healths.items() if health.upper() != "OK"}
    if not unwell:
        return check.ok(_("{count} devices are well"), count=len(healths))
    is_sick = any(health.lower() in SICK or "ECC" in health for health in unwell.values())
    return (check.fail if is_sick else check.warn)(
        _("the driver reports {healths}"),
        _(
            "leave these devices out (visible-device variable), and have them looked at: npu-smi"
            " info -t health, or nvidia-smi -q -d ECC"
        ),
        healths=", ".join(f"{label}: {health}" for label, health in unwell.items()),
    )


# ---------------------------------------------------------------- what torch reports


def check_torch(
    environment: Mapping[str, str],
    device_type: str,
    config: BaseConfig | None,
    devices_listed: int = 0,
    processes: int = 1,
) -> tuple[list[Check], str | None]:
    """Import torch as a run would.

    Args:
        device_type: the configuration's, or auto.
        devices_listed: devices that npu-smi or the NVIDIA driver lists, to compare with.
        processes: processes of the run on this machine.

    Returns: the checks, and the device type that a run takes, or None.
    """
    request = {"device_type": device_type}
    answer = ask(MODULE, request, environment=environment, timeout_seconds=TORCH_TIMEOUT_SECONDS)
    report = answer.report
    if report is None:
        return [_import_failed(answer, environment)], None
    version = report["torch"]
    checks = [Check("torch_import", values={"version": version}).ok("torch {version}")]
    if report["torch_npu"] is not None:
        check = Check("torch_npu_import", values={"version": report["torch_npu"]})
        checks.append(check.ok(_("torch_npu {version} loads")))
    checks.append(check_device_type(report, device_type, devices_listed, processes))
    return [*checks, check_capabilities(report, config)], report["device_type"]


def _import_failed(answer: Answer, environment: Mapping[str, str]) -> Check:
    """Find out which of the two failed: torch imports torch_npu by itself, so a torch_npu that
    cannot load takes torch along.
    """
    check = Check("torch_import")
    if answer.code is None:
        return check.fail(
            _("importing torch and a matrix product on the device did not end in {seconds:g} s"),
            _(
                "look for a device that hangs (npu-smi info, nvidia-smi) and leave it out with the"
                " visible-device variable; a slow shared file system shows here too"
            ),
            seconds=TORCH_TIMEOUT_SECONDS,
        )
    if find_spec("torch_npu") is not None:
        alone = run_to_end(
            [sys.executable, "-c", "import torch"],
            environment={**environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            timeout_seconds=TORCH_TIMEOUT_SECONDS,
        )
        if alone.code == 0:
            return Check("torch_npu_import").fail(
                _("torch_npu is installed but cannot be loaded: {reason}"),
                _(
                    "source CANN's set_env.sh in this shell, install the torch_npu that matches"
                    " this torch, or remove it where there is no NPU: pip uninstall torch_npu"
                ),
                reason=answer.reason,
            )
    return check.fail(
        _("torch cannot be imported: {reason}"),
        _("install torch anew: pip install --force-reinstall torch"),
        reason=answer.reason,
    )


def check_device_type(
    report: Mapping[str, Any], requested: str, devices_listed: int, processes: int = 1
) -> Check:
    """Check that the requested device is available, and that torch sees what the driver lists."""
    chosen, available, count = report["device_type"], report["available"], report.get("count")
    values = {
        "available": available,
        "device_type": chosen,
        "count": count,
    }
    check = Check("torch_device", values=values)
    if chosen not in available:
        return check.fail(
            _("torch sees no {device_type}; it sees {available}"),
            _("leave --device-type out, or install the driver and package that it needs"),
            available=", ".join(available),
        )
    if count is not None and count < processes:
        what = _("torch sees {count} {device_type} devices, and {processes} processes are to start")
        fix = _("--nproc {count}, or make more devices visible").format(count=max(1, count))
        return check.fail(what, fix, processes=processes)
    if report["matmul_error"]:
        return check.fail(
            _("a matrix product on {device_type} fails: {error}"),
            _("update the driver, or install a torch that is built for this device"),
            error=report["matmul_error"],
        )
    if requested == "auto" and chosen == "cpu" and devices_listed:
        return check.warn(
            _("the driver lists {count} devices, torch sees none: the run takes the CPU"),
            _(
                "install the torch build for them (torch_npu, or a CUDA build), or unset the"
                " visible-device variable"
            ),
            count=devices_listed,
        )
    device = report["capabilities"]["name"]
    shown = device if count is None else f"{count} x {device}"
    return check.ok(
        _("torch takes {device} ({device_type}), a matrix product is right"), device=shown
    )


def check_capabilities(report: Mapping[str, Any], config: BaseConfig | None) -> Check:
    """Compare bfloat16, fp8 and fused attention of the device with what is asked for."""
    able, device_type = report.get("capabilities"), report["device_type"]
    if able is None:
        return Check("capabilities").skip(_("the device is not there"))
    check, dtype = Check("capabilities", values=able), getattr(config, "dtype", "auto")
    words = {"device": able["name"], "device_type": device_type}
    if dtype == "bfloat16" and not able["bfloat16"]:
        return check.fail(
            _("{device} has no bfloat16, and the configuration asks for it"),
            _("--dtype float16, or --dtype float32"),
            **words,
        )
    if dtype == "float16" and device_type in ("cpu", "mps"):
        return check.fail(
            _("float16 is not trained on {device_type}"),
            _("--dtype float32, or --dtype bfloat16"),
            **words,
        )
    if getattr(config, "fp8", False) and not able["fp8"]:
        return check.warn(_("{device} has no fp8: --fp8 is ignored"), _("leave --fp8 out"), **words)
    there = {
        "bf16": able["bfloat16"],
        "fp8": able["fp8"],
        "flash attention": able["flash"],
    }
    has = ", ".join(feature for feature, is_there in there.items() if is_there) or _("float32 only")
    lacks = ", ".join(feature for feature, is_there in there.items() if not is_there)
    what = _("{device}: {has}; no {lacks}") if lacks else _("{device}: {has}")
    return check.ok(
        what,
        has=has,
        lacks=lacks,
        **words,
    )


# ---------------------------------------------------------------- in the separate process


def probe(device_type: str) -> dict[str, Any]:
    """Report what torch sees here: versions, device types, and the capabilities of the type that a
    run would use.
    """
    import torch

    has_npu = find_spec("torch_npu") is not None
    available = runtime_device.available_device_types()
    chosen = available[0] if device_type == "auto" else device_type
    report = {
        "torch": torch.__version__,
        "torch_npu": import_module("torch_npu").__version__ if has_npu else None,
        "available": available,
        "device_type": chosen,
    }
    if chosen in available:
        report["count"] = runtime_device.device_count(chosen)
        report["capabilities"] = asdict(runtime_device.capabilities(chosen))
        report["matmul_error"] = _matmul_error(chosen)
    return report


def _matmul_error(device_type: str) -> str:
    """Return why a matrix product on the device is wrong; empty if it is right."""
    import torch

    left = torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64) % 7
    try:
        product = (left.to(device_type) @ left.to(device_type)).cpu()
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    is_right = torch.equal(product, left @ left)
    return "" if is_right else _("a product of small whole numbers is wrong")


if __name__ == "__main__":
    answer_with(probe)
