"""Versions: Python, packages, torch with its CUDA, torch_npu and CANN; whether they go together.
Everything is read from metadata and files; nothing is imported.

The pairs are those of the vendor's compatibility table (Ascend/pytorch, COMPATIBILITY.md). A
torch_npu fits exactly one torch; CANN is compared by its first two numbers.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
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
_USUAL_HOMES = (
    "usr/local/Ascend/cann",
    "usr/local/Ascend/ascend-toolkit/latest",
    "usr/local/Ascend/latest",
)

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
    requirements: Sequence[Requirement], installed: Installed = installed_version
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
            f"{one.name}=={TESTED[one.name]}" if one.name in TESTED else f"'{one}'"
            for one in missing + outside
        )
        return fail(name, "; ".join(problems), f"pip install {' '.join(pins)}", versions=versions)
    others = [
        one
        for one in LEANED_ON
        if versions.get(one) and _minor(versions[one]) != _minor(TESTED[one])
    ]
    if others:
        text = _("{name} {version} (tested {tested})")
        shown = ", ".join(
            text.format(name=one, version=versions[one], tested=TESTED[one]) for one in others
        )
        what = _("other versions than the tested ones: {packages}").format(packages=shown)
        fix = _("to be sure: pip install {pins}").format(
            pins=" ".join(f"{one}=={TESTED[one]}" for one in others)
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
    torch_version: str, cuda: str | None, report: SmiReport | None, requested: bool
) -> Check:
    """Whether torch's CUDA and the driver's go together.

    Args:
        torch_version, cuda: see `torch_build`.
        report: of the NVIDIA driver; None where there is none.
        requested: the configuration asks for cuda by name.
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
    texts = {"cuda": cuda, "driver": driver, "driver_cuda": driver_cuda or "?"}
    if cuda is None:
        what = _("{count} NVIDIA GPUs are here, but torch {torch} is built without CUDA")
        what = what.format(count=len(report.devices), torch=torch_version)
        fix = _(
            "install a CUDA build of the same torch version (pip uninstall torch, then pip install"
            " torch=={release})"
        )
        fix = fix.format(release=torch_version.split("+")[0])
        return (fail if requested else warn)(name, what, fix, **values)
    major = driver_cuda.split(".")[0]
    if major and int(major) < int(cuda.split(".")[0]):
        what = _(
            "torch is built for CUDA {cuda}, the driver {driver} runs CUDA up to {driver_cuda}"
        )
        fix = _(
            "update the NVIDIA driver, or install the torch that is built for CUDA {major}"
        ).format(major=major)
        return fail(name, what.format(**texts), fix, **values)
    what = _("torch CUDA {cuda}, driver {driver} (CUDA {driver_cuda})")
    return ok(name, what.format(**texts), **values)


# ---------------------------------------------------------------- CANN


def cann_home(environment: Mapping[str, str]) -> str | None:
    """Where CANN is, by the variables of its set_env.sh."""
    return environment.get("ASCEND_HOME_PATH") or environment.get("ASCEND_TOOLKIT_HOME") or None


def cann_version(home: Path) -> str | None:
    """CANN's version as it is published ("8.2.RC1", "9.1.0"); None where no file has it.

    Reads `<arch>-linux/ascend_toolkit_install.info` (`version=8.2.RC1`) and `version.cfg`
    (`toolkit_running_version=[7.6.0.1.220:8.0.0]`, the published number after the colon).
    """
    for info in sorted(home.glob("*-linux/ascend_toolkit_install.info")):
        found = re.search(r"^version=(\S+)", _read(info), re.M)
        if found:
            return found[1]
    text = _read(home / "version.cfg")
    for part in ("toolkit", "runtime", "compiler"):
        found = re.search(rf"^{part}_running_version=\[(?:[^\]:]*:)?([^\]]+)\]", text, re.M)
        if found:
            return found[1]
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")[:100_000]
    except OSError:
        return ""


def npus_present(root: Path = Path("/")) -> bool:
    """Whether the driver has made devices for NPUs, with or without npu-smi."""
    return any(root.glob("dev/davinci[0-9]*"))


def check_ascend_home(
    environment: Mapping[str, str],
    *,
    needed: bool,
    builds_operators: bool = False,
    root: Path = Path("/"),
) -> Check:
    """Whether CANN's set_env.sh was sourced in this shell.

    Args:
        needed: torch_npu is installed, or NPUs are here.
        builds_operators: the run builds DeepSpeed operators, which read ASCEND_HOME_PATH without
            asking whether it is set.
    """
    name = "ascend_home"
    if not needed:
        return skip(name, _("no NPU and no torch_npu here"))
    home = cann_home(environment)
    if home is None:
        verdict = fail if builds_operators else warn
        what = _(
            "ASCEND_HOME_PATH is not set: CANN's libraries may not be found, and DeepSpeed builds"
            " no operator"
        )
        found = next((root / usual for usual in _USUAL_HOMES if (root / usual).is_dir()), None)
        if found is None:
            return verdict(name, what, _("install CANN, then source its set_env.sh in this shell"))
        return verdict(
            name, what, f"source {found.parent if found.name == 'latest' else found}/set_env.sh"
        )
    if not Path(home).is_dir():
        what = _("ASCEND_HOME_PATH is {home}, and that folder does not exist").format(home=home)
        return fail(name, what, _("source the set_env.sh of the CANN that is installed"))
    version = cann_version(Path(home))
    what = _("CANN {version} at {home}").format(
        version=version or _("(version unknown)"), home=home
    )
    return ok(name, what, cann=version)


# ---------------------------------------------------------------- torch, torch_npu and CANN


@dataclass(frozen=True)
class AscendSoftware:
    """What is installed.

    Attributes:
        torch_npu: version of the installed distribution; None without one.
        cann: see `cann_version`.
        floor: the lowest torch that this package works with; empty if none is stated.
    """

    torch: str
    torch_npu: str | None
    cann: str | None
    floor: str


def check_pairing(
    here: AscendSoftware, *, torch_cuda: str | None, importable: bool, npus_here: bool
) -> Check:
    """Whether torch, torch_npu and CANN fit one another and this package.

    Args:
        torch_cuda: CUDA that torch was built for; None for a CPU build.
        importable: a module torch_npu is on the path, installed as a distribution or not.
        npus_here: there are NPUs on this machine.
    """
    name = "torch_npu_pairing"
    values = asdict(here)
    torch_npu = here.torch_npu
    if torch_npu is None:
        if importable:
            what = _(
                "torch_npu is on the path, but not installed as a package: its version is unknown"
            )
            fix = _("pip install the torch_npu that belongs to this torch, unless this is meant")
            return warn(name, what, fix, **values)
        if not npus_here:
            return skip(name, _("no NPU and no torch_npu here"))
        what = _("there are NPUs here, but torch_npu is not installed: the run would take the CPU")
        return fail(name, what, _install(here), **values)
    if torch_cuda is not None:
        what = _("torch {torch} is built for CUDA {cuda}: torch_npu refuses to work beside it")
        what = what.format(torch=here.torch, cuda=torch_cuda)
        fix = _("pip uninstall torch, then install torch=={release} from PyTorch's CPU wheel index")
        return fail(name, what, fix.format(release=_release(here.torch)), **values)
    if here.floor and _version(torch_npu) < _version(here.floor):
        made = _made_for(here.cann)
        what = _("torch_npu {torch_npu} is below this package's floor, {floor}")
        if made and not _fitting(made, here.floor):
            what = _(
                "torch_npu {torch_npu} is below this package's floor, {floor}; CANN {cann} has"
                " torch_npu {made} only"
            )
        return fail(name, what.format(made=", ".join(made), **values), _install(here), **values)
    release = _release(torch_npu)
    if _release(here.torch) != release:
        what = _("torch_npu {torch_npu} belongs to torch {release}, but torch {torch} is installed")
        fix = _(
            "pip install torch=={release}, or the torch_npu of this torch (pip install"
            " torch_npu=={own})"
        ).format(release=release, own=_release(here.torch))
        return fail(name, what.format(release=release, **values), fix, **values)
    cann = _numbers(here.cann)
    made_for = next((cann for cann, releases in PAIRS.items() if torch_npu in releases), None)
    if cann is None:
        what = _("torch_npu {torch_npu} fits torch, but CANN's version is unknown")
        fix = _("source CANN's set_env.sh, so that ASCEND_HOME_PATH leads to it")
        return warn(name, what.format(**values), fix, **values)
    if made_for is None:
        what = _("torch_npu {torch_npu} with CANN {cann} is not in the table of known pairs")
        fix = _("compare them with the vendor's compatibility table")
        return warn(name, what.format(**values), fix, **values)
    if cann == made_for:
        return ok(name, f"torch_npu {torch_npu}, CANN {here.cann}", **values)
    verdict = warn
    what = _("torch_npu {torch_npu} is made for CANN {made_for}; CANN {cann} is newer")
    if cann < made_for:
        verdict = fail
        what = _("torch_npu {torch_npu} is made for CANN {made_for}; CANN {cann} is older")
    return verdict(name, what.format(made_for=_show(made_for), **values), _install(here), **values)


def _install(here: AscendSoftware) -> str:
    """What to install: what this CANN has within the floor, else the recommended pair."""
    fitting = _fitting(_made_for(here.cann), here.floor)
    if fitting:
        return f"pip install torch=={_release(fitting)} torch_npu=={fitting}"
    release, needs = RECOMMENDED
    text = _(
        "upgrade: the NPU driver and firmware that CANN {cann}'s release notes name, then CANN"
        " {cann}, then pip install torch=={torch} torch_npu=={torch_npu}"
    )
    return text.format(cann=_show(needs), torch=_release(release), torch_npu=release)


def _made_for(cann: str | None) -> tuple[str, ...]:
    numbers = _numbers(cann)
    return PAIRS.get(numbers, ()) if numbers is not None else ()


def _fitting(releases: tuple[str, ...], floor: str) -> str | None:
    """The newest release that this package works with."""
    return next((one for one in releases if not floor or _version(one) >= _version(floor)), None)


def _numbers(cann: str | None) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", cann or "")
    return (int(found[1]), int(found[2])) if found else None


def _show(cann: tuple[int, int]) -> str:
    return f"{cann[0]}.{cann[1]}"


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")


def _release(text: str) -> str:
    """`2.12.0` of `2.12.0.post2` and `2.12.0+cpu`."""
    return ".".join(map(str, _version(text).release))
