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
from finetune.runtime.language import _
from finetune.runtime.smi import SmiReport

# What the tests of this version ran with (requirements.lock, and constraints.txt for torch; a test
# compares them).
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
TESTED_PYTHON = ((3, 11), (3, 12))
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
    """What the installed package needs; from a checkout that is not installed, the tested names
    alone.
    """
    try:
        lines = metadata.requires("finetune") or []
    except metadata.PackageNotFoundError:
        lines = [name for name in TESTED if name != "deepspeed" or "deepspeed" in extras]
    found = [Requirement(line) for line in lines]
    return [
        one
        for one in found
        if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in ("", *extras))
    ]


def lowest_torch(requirements: Sequence[Requirement]) -> str:
    """The floor for torch, e.g. "2.10"; empty where none is stated."""
    floors = [spec.version for one in requirements if one.name == "torch" for spec in one.specifier]
    return floors[0] if floors else ""


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    """Whether this Python is within what the package needs and was tested with."""
    name, shown = "python", ".".join(map(str, version))
    low, high = (".".join(map(str, one)) for one in TESTED_PYTHON)
    if version[:2] < TESTED_PYTHON[0]:
        what = _("Python {version}; at least {low} is needed").format(version=shown, low=low)
        fix = _("make an environment with Python {low} to {high}").format(low=low, high=high)
        return fail(name, what, fix, version=shown)
    if version[:2] > TESTED_PYTHON[1]:
        what = _("Python {version} is newer than what was tested ({low} to {high})")
        fix = _("if packages fail to install or import, use Python {high}").format(high=high)
        return warn(name, what.format(version=shown, low=low, high=high), fix, version=shown)
    return ok(name, f"Python {shown}", version=shown)


def check_packages(
    requirements: Sequence[Requirement],
    installed: Installed = installed_version,
    tested: Mapping[str, str] = TESTED,
) -> Check:
    """Required packages: there, within the stated range, and whether those leaned on are the tested
    ones.
    """
    name, versions = "packages", {one.name: installed(one.name) for one in requirements}
    missing = [one for one in requirements if versions[one.name] is None]
    outside = [one for one in requirements if not _within(one, versions[one.name])]
    if missing or outside:
        problems = [_("{name} is not installed").format(name=one.name) for one in missing]
        text = _("{name} {version} is outside {range}")
        problems += [
            text.format(name=one.name, version=versions[one.name], range=one.specifier)
            for one in outside
        ]
        pins = (
            f"{one.name}=={tested[one.name]}" if one.name in tested else f"'{one}'"
            for one in missing + outside
        )
        return fail(name, "; ".join(problems), f"pip install {' '.join(pins)}", versions=versions)
    others = [
        one
        for one in LEANED_ON
        if versions.get(one) and _minor(versions[one]) != _minor(tested[one])
    ]
    if others:
        text = _("{name} {version} (tested {tested})")
        shown = ", ".join(
            text.format(name=one, version=versions[one], tested=tested[one]) for one in others
        )
        what = _("other versions than the tested ones: {packages}").format(packages=shown)
        fix = _("to be sure: pip install {pins}").format(
            pins=" ".join(f"{one}=={tested[one]}" for one in others)
        )
        return warn(name, what, fix, versions=versions)
    return ok(
        name,
        ", ".join(f"{one} {versions[one]}" for one in LEANED_ON if versions.get(one)),
        versions=versions,
    )


def _within(requirement: Requirement, version: str | None) -> bool:
    if version is None:
        return True  # reported as missing
    try:
        return requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _minor(version: str | None) -> tuple[int, ...]:
    return Version(version or "0").release[:2]


def torch_build(folder: Path | None = None) -> tuple[str, str | None]:
    """(version, CUDA version or None) of the installed torch, read from its version.py; ("", None)
    without torch.
    """
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


def check_cuda_build(
    torch_version: str, cuda: str | None, report: SmiReport | None, wanted: bool
) -> Check:
    """Whether torch's CUDA and the driver's go together.

    Args:
        torch_version, cuda: see `torch_build`.
        report: of the NVIDIA driver; None where there is none.
        wanted: the configuration asks for cuda by name.
    """
    name = "cuda_driver"
    if report is None or not report.devices:
        return skip(name, _("no NVIDIA GPU here"))
    driver, driver_cuda = report.driver_version, report.runtime_version
    values = {
        "torch": torch_version,
        "torch_cuda": cuda,
        "driver": driver,
        "driver_cuda": driver_cuda,
    }
    if cuda is None:
        what = _("{count} NVIDIA GPUs are here, but torch {torch} is built without CUDA")
        fix = _(
            "install a CUDA build of the same torch version (pip uninstall torch, then pip install"
            " torch=={release})"
        )
        return (fail if wanted else warn)(
            name,
            what.format(count=len(report.devices), torch=torch_version),
            fix.format(release=torch_version.split("+")[0]),
            **values,
        )
    major = driver_cuda.split(".")[0]
    if major and int(major) < int(cuda.split(".")[0]):
        what = _(
            "torch is built for CUDA {cuda}, the driver {driver} runs CUDA up to {driver_cuda}"
        )
        fix = _(
            "update the NVIDIA driver, or install the torch that is built for CUDA {major}"
        ).format(major=major)
        return fail(
            name, what.format(cuda=cuda, driver=driver, driver_cuda=driver_cuda), fix, **values
        )
    what = _("torch CUDA {cuda}, driver {driver} (CUDA {driver_cuda})")
    return ok(name, what.format(cuda=cuda, driver=driver, driver_cuda=driver_cuda or "?"), **values)
