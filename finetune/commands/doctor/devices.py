"""Accelerators: how many a run sees, how much of their memory is free, who holds the rest, their
health, and what torch can do with them.

    python -m finetune.commands.doctor.devices REPORT < {"device_type": "auto", "language": "en"}

is the process of its own that imports torch (and torch_npu), multiplies two matrices on the device,
and reports what the device can do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from finetune.commands.doctor.check import Check, fail, ok, skip, warn
from finetune.commands.doctor.probe import Answer, answer_with, ask
from finetune.config.base_config import BaseConfig
from finetune.runtime import device as runtime_device
from finetune.runtime.language import _
from finetune.runtime.smi import SmiDevice, SmiProcess, SmiReport, visible
from finetune.storage.durable_files import format_bytes

MODULE = "finetune.commands.doctor.devices"
TORCH_TIMEOUT_SECONDS = 120.0
TOOLS = {"npu": "npu-smi", "cuda": "NVML"}
# Memory that others may hold on a device before it is worth a warning; drivers and idle contexts
# hold a few GiB on an NPU.
HELD_SHARE = 0.15
# npu-smi's own names for a device that cannot be used.
SICK = ("alarm", "critical", "fault", "offline")


def accelerator(reports: Sequence[SmiReport], requested: str, usable: Sequence[str]) -> str:
    """Return the device type that a run would use, as far as is known without torch: "npu", "cuda",
    or "cpu".

    Args:
        requested: the configuration's device type; auto takes NPU before CUDA.
        usable: types that the installed torch is built for. torch_npu is not installed by chance:
            if it is, and npu-smi is not, assume that the run uses NPUs that cannot be listed.
    """
    if requested != "auto":
        return requested
    listed = {report.device_type for report in reports if report.devices}
    if "npu" in usable and ("npu" in listed or not reports):
        return "npu"
    return "cuda" if "cuda" in listed and "cuda" in usable else "cpu"


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
    count = {"visible": len(seen), "here": len(report.devices)}
    values = count | {"names": names, "driver": report.driver_version}
    variable = runtime_device.DEVICE_KINDS[report.device_type].visible_variable
    shown = f" ({variable}={environment[variable]})" if variable in environment else ""
    if len(seen) < needed:
        what = _("{visible} of {here} devices are visible{variable}; {needed} are needed")
        fix = _("make more devices visible, or start at most {count} processes (--nproc {count})")
        what = what.format(variable=shown, needed=needed, **count)
        return fail(name, what, fix.format(count=max(1, len(seen))), **values)
    kinds = " + ".join(f"{names.count(kind)} x {kind}" for kind in dict.fromkeys(names))
    if len(set(names)) > 1:
        what = _("devices of different kinds: {kinds}; all wait for the slowest")
        fix = _("choose equal ones with {variable}").format(variable=variable)
        return warn(name, what.format(kinds=kinds), fix, **values)
    what = _("{kinds}, driver {driver}{variable}")
    what = what.format(kinds=kinds, driver=report.driver_version, variable=shown)
    return ok(name, what, **values)


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


# ---------------------------------------------------------------- what torch says


def check_torch(
    environment: Mapping[str, str],
    device_type: str,
    config: BaseConfig | None,
    devices_listed: int = 0,
    processes: int = 1,
) -> tuple[list[Check], str | None]:
    """Import torch as a run would: (checks, the device type that a run takes or None).

    Args:
        device_type: the configuration's, or auto.
        processes: processes of the run on this machine.
        devices_listed: devices that npu-smi or the NVIDIA driver lists, to compare with.
    """
    request = {"device_type": device_type}
    answer = ask(MODULE, request, environment=environment, timeout_seconds=TORCH_TIMEOUT_SECONDS)
    report = answer.report
    if report is None:
        return [_import_failed(answer, environment)], None
    checks = [ok("torch_import", f"torch {report['torch']}", version=report["torch"])]
    if (version := report["torch_npu"]) is not None:
        checks.append(
            ok(
                "torch_npu_import",
                _("torch_npu {version} loads").format(version=version),
                version=version,
            )
        )
    checks.append(check_device_type(report, device_type, devices_listed, processes))
    return [*checks, check_capabilities(report, config)], report["device_type"]


def _import_failed(answer: Answer, environment: Mapping[str, str]) -> Check:
    """Which of the two it was: torch imports torch_npu by itself, so a torch_npu that cannot load
    takes torch along.
    """
    if answer.code is None:
        what = _("importing torch and a matrix product on the device did not end in {seconds:g} s")
        fix = _(
            "look for a device that hangs (npu-smi info, nvidia-smi) and leave it out with the"
            " visible-device variable; a slow shared file system shows here too"
        )
        return fail("torch_import", what.format(seconds=TORCH_TIMEOUT_SECONDS), fix)
    if find_spec("torch_npu") is not None:
        alone = ask(
            MODULE,
            {"device_type": "cpu", "torch_npu": False},
            environment={**environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            timeout_seconds=TORCH_TIMEOUT_SECONDS,
        )
        if alone.report is not None:
            what = _("torch_npu is installed but cannot be loaded: {reason}").format(
                reason=answer.reason
            )
            fix = _(
                "source CANN's set_env.sh in this shell, install the torch_npu that matches this"
                " torch, or remove it where there is no NPU: pip uninstall torch_npu"
            )
            return fail("torch_npu_import", what, fix)
    what = _("torch cannot be imported: {reason}").format(reason=answer.reason)
    return fail("torch_import", what, _("install torch anew: pip install --force-reinstall torch"))


def check_device_type(
    report: Mapping[str, Any], requested: str, devices_listed: int, processes: int = 1
) -> Check:
    """Whether the device that is asked for is there, and whether torch sees what the driver
    lists.
    """
    name = "torch_device"
    chosen, available, count = report["device_type"], report["available"], report.get("count")
    values = {"available": available, "device_type": chosen, "count": count}
    if chosen not in available:
        what = _("torch sees no {device_type}; it sees {available}")
        what = what.format(device_type=chosen, available=", ".join(available))
        fix = _("leave --device-type out, or install the driver and package that it needs")
        return fail(name, what, fix, **values)
    if count is not None and count < processes:
        what = _("torch sees {count} {device_type} devices, and {processes} processes are to start")
        what = what.format(processes=processes, **values)
        fix = _("--nproc {count}, or make more devices visible").format(count=max(1, count))
        return fail(name, what, fix, **values)
    if report["matmul_error"]:
        what = _("a matrix product on {device_type} fails: {error}")
        what = what.format(device_type=chosen, error=report["matmul_error"])
        fix = _("update the driver, or install a torch that is built for this device")
        return fail(name, what, fix, **values)
    if requested == "auto" and chosen == "cpu" and devices_listed:
        what = _("the driver lists {count} devices, torch sees none: the run takes the CPU")
        fix = _(
            "install the torch build for them (torch_npu, or a CUDA build), or unset the"
            " visible-device variable"
        )
        return warn(name, what.format(count=devices_listed), fix, **values)
    device = report["capabilities"]["name"]
    what = _("torch takes {device} ({device_type}), a matrix product is right").format(
        device=device if count is None else f"{count} x {device}", device_type=chosen
    )
    return ok(name, what, **values)


def check_capabilities(report: Mapping[str, Any], config: BaseConfig | None) -> Check:
    """bfloat16, fp8 and fused attention: what the device has against what is asked for."""
    name, able = "capabilities", report.get("capabilities")
    if able is None:
        return skip(name, _("the device is not there"))
    dtype, device = getattr(config, "dtype", "auto"), able["name"]
    if dtype == "bfloat16" and not able["bfloat16"]:
        what = _("{device} has no bfloat16, and the configuration asks for it").format(
            device=device
        )
        return fail(name, what, _("--dtype float16, or --dtype float32"), **able)
    if dtype == "float16" and report["device_type"] in ("cpu", "mps"):
        what = _("float16 is not trained on {device_type}").format(
            device_type=report["device_type"]
        )
        return fail(name, what, _("--dtype float32, or --dtype bfloat16"), **able)
    if getattr(config, "fp8", False) and not able["fp8"]:
        what = _("{device} has no fp8: --fp8 is ignored").format(device=device)
        return warn(name, what, _("leave --fp8 out"), **able)
    there = {"bf16": able["bfloat16"], "fp8": able["fp8"], "flash attention": able["flash"]}
    has = ", ".join(feature for feature, is_there in there.items() if is_there) or _("float32 only")
    lacks = ", ".join(feature for feature, is_there in there.items() if not is_there)
    what = _("{device}: {has}; no {lacks}") if lacks else _("{device}: {has}")
    return ok(name, what.format(device=device, has=has, lacks=lacks), **able)


# ---------------------------------------------------------------- in the process of its own


def probe(device_type: str, *, torch_npu: bool = True) -> dict[str, Any]:
    """Report what torch sees here: versions, device types, and the capabilities of the type that a
    run would use.

    Args:
        torch_npu: False leaves torch_npu alone, to see whether torch works without it; then the
            device is the CPU.
    """
    import torch

    report: dict[str, Any] = {"torch": torch.__version__, "torch_npu": None}
    if not torch_npu:
        return report
    if find_spec("torch_npu") is not None:
        report["torch_npu"] = import_module("torch_npu").__version__
    available = runtime_device.available_device_types()
    chosen = available[0] if device_type == "auto" else device_type
    report |= {"available": available, "device_type": chosen}
    if chosen in available:
        report |= {
            "count": runtime_device.device_count(chosen),
            "capabilities": asdict(runtime_device.capabilities(chosen)),
            "matmul_error": _matmul_error(chosen),
        }
    return report


def _matmul_error(device_type: str) -> str:
    """Return why a matrix product on the device is wrong; empty if it is right."""
    import torch

    left = torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64) % 7
    try:
        product = (left.to(device_type) @ left.to(device_type)).cpu()
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    return (
        "" if torch.equal(product, left @ left) else _("a product of small whole numbers is wrong")
    )


if __name__ == "__main__":
    answer_with(probe)
