"""torch, torch_npu and CANN: which go together, and the way up from old ones.

The pairs are those of the vendor's compatibility table (Ascend/pytorch, COMPATIBILITY.md). A torch_npu fits exactly one
torch; CANN is compared by its first two numbers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from packaging.version import InvalidVersion, Version

from finetune.commands.doctor.check import Check, fail, ok, skip, warn

# CANN -> torch_npu releases made for it, newest first.
PAIRS: dict[tuple[int, int], tuple[str, ...]] = {
    (9, 1): (
        *("2.12.0.post2", "2.12.0", "2.11.0.post2", "2.11.0", "2.10.0.post6", "2.10.0.post4"),
        *("2.9.0.post8", "2.9.0.post6", "2.7.1.post10", "2.7.1.post8"),
    ),
    (9, 0): ("2.10.0", "2.9.0.post2", "2.8.0.post4", "2.7.1.post4"),
    (8, 5): ("2.9.0", "2.8.0.post2", "2.7.1.post2", "2.6.0.post5"),
    (8, 3): ("2.8.0", "2.7.1", "2.6.0.post3"),
    (8, 2): ("2.6.0", "2.5.1.post1"),
}
# What the vendor recommends to new installations.
RECOMMENDED = ("2.12.0", (9, 1))


def _cann_numbers(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def _show(cann: tuple[int, int]) -> str:
    return f"{cann[0]}.{cann[1]}"


def check_pairing(
    *,
    torch: str,
    torch_cuda: str | None,
    torch_npu: str | None,
    importable: bool,
    cann: str | None,
    npus_here: bool,
    floor: str,
) -> Check:
    """Whether torch, torch_npu and CANN fit one another and this package.

    Args:
        torch: version of the installed torch.
        torch_cuda: CUDA that torch was built for; None for a CPU build.
        torch_npu: version of the installed distribution; None without one.
        importable: a module torch_npu is on the path, installed as a distribution or not.
        cann: see `cann_version`.
        npus_here: there are NPUs on this machine.
        floor: the lowest torch that this package works with.
    """
    name = "torch_npu_pairing"
    values = {"torch": torch, "torch_npu": torch_npu, "cann": cann, "floor": floor}
    if torch_npu is None:
        return _without_distribution(name, importable, cann, npus_here, floor, values)
    if torch_cuda is not None:
        return fail(
            name,
            (
                f"torch {torch} is built for CUDA {torch_cuda}: torch_npu refuses to work beside it",
                f"torch {torch} 是 CUDA {torch_cuda} 版：torch_npu 拒绝与其同时使用",
            ),
            (
                f"pip uninstall torch, then install torch=={_release(torch)} from PyTorch's CPU wheel index",
                f"先 pip uninstall torch，再从 PyTorch 的 CPU 源安装 torch=={_release(torch)}",
            ),
            **values,
        )
    if floor and _version(torch_npu) < _version(floor):
        return _below_floor(name, torch_npu, cann, floor, values)
    if _release(torch) != _release(torch_npu):
        return fail(
            name,
            (
                f"torch_npu {torch_npu} belongs to torch {_release(torch_npu)}, but torch {torch} is installed",
                f"torch_npu {torch_npu} 对应 torch {_release(torch_npu)}，而已安装的是 torch {torch}",
            ),
            (
                f"pip install torch=={_release(torch_npu)}, or the torch_npu of this torch (pip install torch_npu=="
                f"{_release(torch)})",
                f"pip install torch=={_release(torch_npu)}，或安装与当前 torch 对应的 torch_npu"
                f"（pip install torch_npu=={_release(torch)}）",
            ),
            **values,
        )
    return _with_cann(name, torch_npu, cann, floor, values)


def _without_distribution(
    name: str, importable: bool, cann: str | None, npus_here: bool, floor: str, values: dict[str, str | None]
) -> Check:
    if importable:
        return warn(
            name,
            (
                "torch_npu is on the path, but not installed as a package: its version is unknown",
                "torch_npu 在路径中，但不是以软件包安装的：版本未知",
            ),
            (
                "pip install the torch_npu that belongs to this torch, unless this is meant",
                "如非有意，请 pip 安装与当前 torch 对应的 torch_npu",
            ),
            **values,
        )
    if not npus_here:
        return skip(name, "no NPU and no torch_npu here", "本机没有 NPU，也未安装 torch_npu")
    return fail(
        name,
        (
            "there are NPUs here, but torch_npu is not installed: the run would take the CPU",
            "本机有 NPU，但未安装 torch_npu：训练会落到 CPU 上",
        ),
        (_install(cann, floor, "en"), _install(cann, floor, "zh")),
        **values,
    )


def _below_floor(name: str, torch_npu: str, cann: str | None, floor: str, values: dict[str, str | None]) -> Check:
    made = PAIRS.get(_cann_numbers(cann or "") or (0, 0), ())
    only = f"; CANN {cann} has torch_npu {', '.join(made)} only" if made and not _fitting(made, floor) else ""
    only_zh = f"；CANN {cann} 仅有 torch_npu {', '.join(made)}" if only else ""
    return fail(
        name,
        (
            f"torch_npu {torch_npu} is below this package's floor, {floor}{only}",
            f"torch_npu {torch_npu} 低于本软件包的下限 {floor}{only_zh}",
        ),
        (_install(cann, floor, "en"), _install(cann, floor, "zh")),
        **values,
    )


def _with_cann(name: str, torch_npu: str, cann: str | None, floor: str, values: dict[str, str | None]) -> Check:
    numbers = None if cann is None else _cann_numbers(cann)
    made_for = next((one for one, releases in PAIRS.items() if torch_npu in releases), None)
    if numbers is None:
        return warn(
            name,
            (
                f"torch_npu {torch_npu} fits torch, but CANN's version is unknown",
                f"torch_npu {torch_npu} 与 torch 匹配，但 CANN 版本未知",
            ),
            (
                "source CANN's set_env.sh, so that ASCEND_HOME_PATH leads to it",
                "请 source CANN 的 set_env.sh，使 ASCEND_HOME_PATH 指向它",
            ),
            **values,
        )
    if made_for is None:
        return warn(
            name,
            (
                f"torch_npu {torch_npu} with CANN {cann} is not in the table of known pairs",
                f"torch_npu {torch_npu} 与 CANN {cann} 的组合不在已知配套表中",
            ),
            ("compare them with the vendor's compatibility table", "请对照厂商的版本配套表"),
            **values,
        )
    if numbers < made_for:
        return fail(
            name,
            (
                f"torch_npu {torch_npu} is made for CANN {_show(made_for)}; CANN {cann} is older",
                f"torch_npu {torch_npu} 面向 CANN {_show(made_for)}；当前 CANN {cann} 较旧",
            ),
            (_install(cann, floor, "en"), _install(cann, floor, "zh")),
            **values,
        )
    if numbers > made_for:
        return warn(
            name,
            (
                f"torch_npu {torch_npu} is made for CANN {_show(made_for)}; CANN {cann} is newer",
                f"torch_npu {torch_npu} 面向 CANN {_show(made_for)}；当前 CANN {cann} 较新",
            ),
            (_install(cann, floor, "en"), _install(cann, floor, "zh")),
            **values,
        )
    shown = f"torch_npu {torch_npu}, CANN {cann}"
    return ok(name, shown, shown, **values)


def _install(cann: str | None, floor: str, language: str) -> str:
    """What to install: what this CANN has within the floor, else the way up."""
    fitting = _fitting(PAIRS.get(_cann_numbers(cann or "") or (0, 0), ()), floor)
    if fitting:
        return f"pip install torch=={_release(fitting)} torch_npu=={fitting}"
    release, needs = RECOMMENDED
    pip = f"pip install torch=={_release(release)} torch_npu=={release}"
    if language == "zh":
        return f"升级路径：按 CANN {_show(needs)} 发行说明升级 NPU 驱动与固件，安装 CANN {_show(needs)}，再 {pip}"
    return (
        f"the way up: the NPU driver and firmware that CANN {_show(needs)}'s release notes name, then CANN "
        f"{_show(needs)}, then {pip}"
    )


def _fitting(releases: Sequence[str], floor: str) -> str | None:
    """The newest release that this package works with."""
    return next((one for one in releases if not floor or _version(one) >= _version(floor)), None)


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")


def _release(text: str) -> str:
    """`2.12.0` of `2.12.0.post2` and `2.12.0+cpu`."""
    return ".".join(map(str, _version(text).release))
