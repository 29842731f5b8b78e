"""torch and torch_npu can be imported, see the devices, and can do what the configuration asks.

    python -m finetune.commands.doctor.torch_device REPORT < {"device_type": "auto", "language":
    "en"}

is the process of its own in which that is tried: it imports torch (and torch_npu), multiplies two
matrices on the device, and reports what the device can do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from finetune.commands.doctor.check import Check, fail, ok, skip, warn
from finetune.commands.doctor.probe import Answer, answer_with, ask
from finetune.config.base_config import BaseConfig
from finetune.runtime import device as devices
from finetune.runtime.language import _

TORCH_TIMEOUT_SECONDS = 120.0
MODULE = "finetune.commands.doctor.torch_device"


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
    report: Mapping[str, Any], wanted: str, devices_listed: int, processes: int = 1
) -> Check:
    """Whether the device that is asked for is there, and whether torch sees what the driver
    lists.
    """
    name, chosen, available, count = (
        "torch_device",
        report["device_type"],
        report["available"],
        report.get("count"),
    )
    values = {"available": available, "device_type": chosen, "count": count}
    if chosen not in available:
        what = _("torch sees no {device_type}; it sees {available}")
        fix = _("leave --device-type out, or install the driver and package that it needs")
        return fail(
            name, what.format(device_type=chosen, available=", ".join(available)), fix, **values
        )
    if count is not None and count < processes:
        what = _("torch sees {count} {device_type} devices, and {processes} processes are to start")
        fix = _("--nproc {count}, or make more devices visible").format(count=max(1, count))
        return fail(
            name, what.format(count=count, device_type=chosen, processes=processes), fix, **values
        )
    if report["matmul_error"]:
        what = _("a matrix product on {device_type} fails: {error}")
        fix = _("update the driver, or install a torch that is built for this device")
        return fail(
            name, what.format(device_type=chosen, error=report["matmul_error"]), fix, **values
        )
    if wanted == "auto" and chosen == "cpu" and devices_listed:
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
    """What torch sees here: versions, device types, and the capabilities of the one that a run
    would take.

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
    available = devices.available_device_types()
    chosen = available[0] if device_type == "auto" else device_type
    report |= {"available": available, "device_type": chosen}
    if chosen in available:
        report |= {
            "count": devices.device_count(chosen),
            "capabilities": asdict(devices.capabilities(chosen)),
            "matmul_error": _matmul_error(chosen),
        }
    return report


def _matmul_error(device_type: str) -> str:
    """Why a matrix product on the device is wrong; empty where it is right."""
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
