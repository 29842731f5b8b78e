"""Python, packages, and the CUDA that torch was built for: from metadata, nothing is imported."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from finetune.commands.doctor.check import Check, fail, ok, skip, warn
from finetune.runtime.smi import SmiReport

# What the tests of this version ran with (constraints.txt; a test compares the two).
TESTED = {
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "accelerate": "1.15.0",
    "deepspeed": "0.19.8",
    "peft": "0.21.2",
    "datasets": "5.2.0",
    "pydantic": "2.14.3",
    "rich": "15.0.0",
    "psutil": "7.2.2",
    "tensorboard": "2.21.0",
}
TESTED_PYTHON = ((3, 10), (3, 12))
# Packages whose inner workings the training leans on: another minor version may change them.
LEANED_ON = ("torch", "transformers", "accelerate", "deepspeed", "peft")

Installed = Callable[[str], "str | None"]


def installed_version(name: str) -> str | None:
    """The version of an installed distribution; None where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def own_requirements(extras: Sequence[str] = ()) -> list[Requirement]:
    """What the installed package says it needs; from a checkout that is not installed, the tested names alone."""
    try:
        lines = metadata.requires("finetune") or []
    except metadata.PackageNotFoundError:
        lines = [name for name in TESTED if name != "deepspeed" or "deepspeed" in extras]
    found = [Requirement(line) for line in lines]
    return [one for one in found if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in ("", *extras))]


def lowest_torch(requirements: Sequence[Requirement]) -> str:
    """The floor for torch, e.g. "2.10"; empty where none is stated."""
    floors = [spec.version for one in requirements if one.name == "torch" for spec in one.specifier]
    return floors[0] if floors else ""


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    """Whether this Python is within what the package needs and was tested with."""
    shown = ".".join(map(str, version))
    low, high = (".".join(map(str, one)) for one in TESTED_PYTHON)
    if version[:2] < TESTED_PYTHON[0]:
        return fail(
            "python",
            (f"Python {shown}; at least {low} is needed", f"Python {shown}；至少需要 {low}"),
            (f"make an environment with Python {low} to {high}", f"用 Python {low} 至 {high} 新建环境"),
            version=shown,
        )
    if version[:2] > TESTED_PYTHON[1]:
        return warn(
            "python",
            (
                f"Python {shown} is newer than what was tested ({low} to {high})",
                f"Python {shown} 比测试过的版本（{low} 至 {high}）新",
            ),
            (
                f"if packages fail to install or import, use Python {high}",
                f"若依赖安装或导入失败，请改用 Python {high}",
            ),
            version=shown,
        )
    return ok("python", f"Python {shown}", f"Python {shown}", version=shown)


def check_packages(
    requirements: Sequence[Requirement],
    installed: Installed = installed_version,
    tested: Mapping[str, str] = TESTED,
) -> Check:
    """Required packages: there, within the stated range, and whether those leaned on are the tested ones."""
    versions = {one.name: installed(one.name) for one in requirements}
    missing = [one for one in requirements if versions[one.name] is None]
    outside = [one for one in requirements if not _within(one, versions[one.name])]
    if missing or outside:
        said = [f"{one.name} is not installed" for one in missing]
        said += [f"{one.name} {versions[one.name]} is outside {one.specifier}" for one in outside]
        chinese = [f"未安装 {one.name}" for one in missing]
        chinese += [f"{one.name} {versions[one.name]} 不在 {one.specifier} 范围内" for one in outside]
        pins = " ".join(
            f"{one.name}=={tested[one.name]}" if one.name in tested else f"'{one}'" for one in (*missing, *outside)
        )
        return fail("packages", ("; ".join(said), "；".join(chinese)), (f"pip install {pins}",) * 2, versions=versions)
    others = [name for name in LEANED_ON if versions.get(name) and _minor(versions[name]) != _minor(tested[name])]
    if others:
        said = [f"{name} {versions[name]} (tested {tested[name]})" for name in others]
        return warn(
            "packages",
            (f"other versions than the tested ones: {', '.join(said)}", f"与测试过的版本不同：{'，'.join(said)}"),
            (
                "to be sure: pip install " + " ".join(f"{name}=={tested[name]}" for name in others),
                "稳妥起见：pip install " + " ".join(f"{name}=={tested[name]}" for name in others),
            ),
            versions=versions,
        )
    shown = ", ".join(f"{name} {versions[name]}" for name in LEANED_ON if versions.get(name))
    return ok("packages", shown, shown, versions=versions)


def _within(requirement: Requirement, version: str | None) -> bool:
    if version is None:
        return True  # said as missing
    try:
        return requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _minor(version: str | None) -> tuple[int, ...]:
    return Version(version or "0").release[:2]


def torch_build(folder: Path | None = None) -> tuple[str, str | None]:
    """(version, CUDA version or None) of the installed torch, read from its version.py; ("", None) without torch."""
    if folder is None:
        spec = find_spec("torch")
        if spec is None or not spec.submodule_search_locations:
            return "", None
        folder = Path(next(iter(spec.submodule_search_locations)))
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except OSError:
        return "", None
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.M)
    cuda = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.M)
    return version[1] if version else "", cuda[1] if cuda else None


def check_cuda_build(torch_version: str, cuda: str | None, report: SmiReport | None, wanted: bool) -> Check:
    """Whether torch's CUDA and the driver's go together.

    Args:
        torch_version, cuda: see `torch_build`.
        report: what the NVIDIA driver says; None where there is none.
        wanted: the configuration asks for cuda by name.
    """
    name = "cuda_driver"
    if report is None or not report.devices:
        return skip(name, "no NVIDIA GPU here", "本机没有 NVIDIA GPU")
    values = {
        "torch": torch_version,
        "torch_cuda": cuda,
        "driver": report.driver_version,
        "driver_cuda": report.runtime_version,
    }
    if cuda is None:
        verdict = fail if wanted else warn
        return verdict(
            name,
            (
                f"{len(report.devices)} NVIDIA GPUs are here, but torch {torch_version} is built without CUDA",
                f"本机有 {len(report.devices)} 个 NVIDIA GPU，但 torch {torch_version} 不含 CUDA",
            ),
            (
                "install a CUDA build of the same torch version (pip uninstall torch, then pip install torch=="
                f"{torch_version.split('+')[0]})",
                "安装同版本的 CUDA 版 torch（先 pip uninstall torch，再 pip install "
                f"torch=={torch_version.split('+')[0]}）",
            ),
            **values,
        )
    driver_major = int(report.runtime_version.split(".")[0]) if report.runtime_version else None
    if driver_major is not None and driver_major < int(cuda.split(".")[0]):
        return fail(
            name,
            (
                f"torch is built for CUDA {cuda}, the driver {report.driver_version} runs CUDA up to "
                f"{report.runtime_version}",
                f"torch 面向 CUDA {cuda} 构建，而驱动 {report.driver_version} 最高支持 CUDA {report.runtime_version}",
            ),
            (
                "update the NVIDIA driver, or install the torch that is built for CUDA "
                f"{report.runtime_version.split('.')[0]}",
                f"升级 NVIDIA 驱动，或安装面向 CUDA {report.runtime_version.split('.')[0]} 的 torch",
            ),
            **values,
        )
    shown = f"torch CUDA {cuda}, driver {report.driver_version} (CUDA {report.runtime_version or '?'})"
    return ok(name, shown, shown, **values)
