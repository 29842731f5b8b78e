"""torch and torch_npu can be imported, see the devices, and can do what the configuration asks: asked in a "
"subprocess."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from finetune.commands.doctor.check import Check, fail, ok, skip, warn
from finetune.commands.doctor.probe import TORCH_TIMEOUT_SECONDS, Answer, ask
from finetune.config.run_config import BaseConfig

PROBE = "finetune.commands.doctor.torch_probe"


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
        devices_listed: devices that npu-smi or nvidia-smi shows, to compare with.
    """
    request = {"device_type": device_type}
    answer = ask(PROBE, request, environment=environment, timeout_seconds=TORCH_TIMEOUT_SECONDS)
    if answer.report is None:
        return [_import_failed(answer, environment)], None
    report = answer.report
    checks = [ok("torch_import", f"torch {report['torch']}", f"torch {report['torch']}", version=report["torch"])]
    if report["torch_npu"] is not None:
        said = f"torch_npu {report['torch_npu']} loads"
        checks.append(
            ok("torch_npu_import", said, f"torch_npu {report['torch_npu']} 可加载", version=report["torch_npu"])
        )
    checks.append(check_device_type(report, device_type, devices_listed, processes))
    return [*checks, check_capabilities(report, config)], report["device_type"]


def _import_failed(answer: Answer, environment: Mapping[str, str]) -> Check:
    """Which of the two it was: torch imports torch_npu by itself, so a torch_npu that cannot load takes torch along."""
    if answer.code is None:
        return fail(
            "torch_import",
            (
                f"importing torch and a matrix product on the device did not end in {TORCH_TIMEOUT_SECONDS:g} s",
                f"导入 torch 并在设备上做一次矩阵乘法，{TORCH_TIMEOUT_SECONDS:g} 秒内未结束",
            ),
            (
                "look for a device that hangs (npu-smi info, nvidia-smi) and leave it out with the visible-device "
                "variable; a slow shared file system shows here too",
                "用 npu-smi info 或 nvidia-smi 查找卡死的设备，并用可见设备变量避开；共享文件系统过慢也会如此",
            ),
        )
    if find_spec("torch_npu") is not None:
        alone = ask(
            PROBE,
            {"device_type": "cpu", "torch_npu": False},
            environment={**environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            timeout_seconds=TORCH_TIMEOUT_SECONDS,
        )
        if alone.report is not None:
            return fail(
                "torch_npu_import",
                (
                    f"torch_npu is installed but cannot be loaded: {answer.reason}",
                    f"已安装 torch_npu 但无法加载：{answer.reason}",
                ),
                (
                    "source CANN's set_env.sh in this shell, install the torch_npu that matches this torch, or "
                    "remove it where "
                    "there is no NPU: pip uninstall torch_npu",
                    "在当前 shell 中 source CANN 的 set_env.sh，安装与 torch 匹配的 torch_npu；没有 NPU 时请 pip "
                    "uninstall torch_npu",
                ),
            )
    return fail(
        "torch_import",
        (f"torch cannot be imported: {answer.reason}", f"无法导入 torch：{answer.reason}"),
        (
            "install torch anew: pip install --force-reinstall torch",
            "重新安装 torch：pip install --force-reinstall torch",
        ),
    )


def check_device_type(report: Mapping[str, Any], wanted: str, devices_listed: int, processes: int = 1) -> Check:
    """Whether the device that is asked for is there, and whether torch sees what the driver lists."""
    name, chosen, available = "torch_device", report["device_type"], report["available"]
    values = {"available": available, "device_type": chosen, "count": report.get("count")}
    if chosen not in available:
        return fail(
            name,
            (
                f"torch sees no {chosen}; it sees {', '.join(available)}",
                f"torch 看不到 {chosen}；可见：{', '.join(available)}",
            ),
            (
                "leave --device-type out, or install the driver and package that it needs",
                "去掉 --device-type，或安装所需驱动与软件包",
            ),
            **values,
        )
    if report.get("count") is not None and report["count"] < processes:
        return fail(
            name,
            (
                f"torch sees {report['count']} {chosen} devices, and {processes} processes are to start",
                f"torch 可见 {report['count']} 个 {chosen} 设备，而要启动 {processes} 个进程",
            ),
            (
                f"--nproc {max(1, report['count'])}, or make more devices visible",
                f"--nproc {max(1, report['count'])}，或放开更多设备",
            ),
            **values,
        )
    if report["matmul_error"]:
        return fail(
            name,
            (
                f"a matrix product on {chosen} fails: {report['matmul_error']}",
                f"{chosen} 上的矩阵乘法失败：{report['matmul_error']}",
            ),
            (
                "update the driver, or install a torch that is built for this device",
                "升级驱动，或安装面向该设备的 torch",
            ),
            **values,
        )
    if wanted == "auto" and chosen == "cpu" and devices_listed:
        return warn(
            name,
            (
                f"the driver lists {devices_listed} devices, torch sees none: the run takes the CPU",
                f"驱动列出 {devices_listed} 个设备，而 torch 看不到：训练将使用 CPU",
            ),
            (
                "install the torch build for them (torch_npu, or a CUDA build), or unset the visible-device variable",
                "安装对应的 torch（torch_npu 或 CUDA 版），或 unset 可见设备变量",
            ),
            **values,
        )
    count = "" if report.get("count") is None else f"{report['count']} x "
    said = f"torch takes {count}{report['capabilities']['name']} ({chosen}), a matrix product is right"
    return ok(name, said, f"torch 使用 {count}{report['capabilities']['name']}（{chosen}），矩阵乘法正确", **values)


def check_capabilities(report: Mapping[str, Any], config: BaseConfig | None) -> Check:
    """bfloat16, fp8 and fused attention: what the device has against what is asked for."""
    name, able = "capabilities", report.get("capabilities")
    if able is None:
        return skip(name, "the device is not there", "设备不存在")
    dtype = getattr(config, "dtype", "auto")
    if dtype == "bfloat16" and not able["bfloat16"]:
        return fail(
            name,
            (
                f"{able['name']} has no bfloat16, and the configuration asks for it",
                f"{able['name']} 不支持 bfloat16，而配置要求使用",
            ),
            ("--dtype float16, or --dtype float32", "--dtype float16 或 --dtype float32"),
            **able,
        )
    if dtype == "float16" and report["device_type"] in ("cpu", "mps"):
        return fail(
            name,
            (f"float16 is not trained on {report['device_type']}", f"{report['device_type']} 不支持 float16 训练"),
            ("--dtype float32, or --dtype bfloat16", "--dtype float32 或 --dtype bfloat16"),
            **able,
        )
    if getattr(config, "fp8", False) and not able["fp8"]:
        return warn(
            name,
            (f"{able['name']} has no fp8: --fp8 is ignored", f"{able['name']} 不支持 fp8：--fp8 将被忽略"),
            ("leave --fp8 out", "去掉 --fp8"),
            **able,
        )
    has = [
        what
        for what, there in (("bf16", able["bfloat16"]), ("fp8", able["fp8"]), ("flash attention", able["flash"]))
        if there
    ]
    lacks = [what for what in ("bf16", "fp8", "flash attention") if what not in has]
    said = f"{able['name']}: {', '.join(has) or 'float32 only'}" + (f"; no {', '.join(lacks)}" if lacks else "")
    chinese = f"{able['name']}：{', '.join(has) or '仅 float32'}" + (f"；不支持 {', '.join(lacks)}" if lacks else "")
    return ok(name, said, chinese, **able)
