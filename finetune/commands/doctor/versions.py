"""Versions: Python, packages, torch with its CUDA, torch_npu and CANN; whether they go together.
Everything is read from metadata and files; nothing is imported.

The pairs are those of the vendor's compatibility table (Ascend/pytorch, COMPATIBILITY.md). A
torch_npu fits exactly one torch; CANN is compared by its first two numbers.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from finetune.commands.doctor.check import Check
from finetune.runtime.language import _
from finetune.runtime.smi import SmiReport
from finetune.version import DISTRIBUTION

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
LOWEST_PYTHON, HIGHEST_PYTHON = "3.11", "3.12"  # that were tested
# Packages whose inner workings the training leans on: another minor version may change them.
LEANED_ON = ("torch", "transformers", "accelerate", "deepspeed", "peft")

# CANN -> torch_npu releases made for it, newest first.
PAIRS = {
    "9.1": (
        *("2.12.0.post2", "2.12.0", "2.11.0.post2", "2.11.0", "2.10.0.post6", "2.10.0.post4"),
        *("2.9.0.post8", "2.9.0.post6", "2.7.1.post10", "2.7.1.post8"),
    ),
    "9.0": ("2.10.0", "2.9.0.post2", "2.8.0.post4", "2.7.1.post4"),
    "8.5": ("2.9.0", "2.8.0.post2", "2.7.1.post2", "2.6.0.post5"),
    "8.3": ("2.8.0", "2.7.1", "2.6.0.post3"),
    "8.2": ("2.6.0", "2.5.1.post1"),
}
# What the vendor recommends to new installations: torch_npu, CANN.
RECOMMENDED = ("2.12.0", "9.1")


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution; None if there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def own_requirements(extras: Sequence[str] = ()) -> list[Requirement]:
    """Return what the installed package needs; for a checkout that is not installed, the tested
    names alone.
    """
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        lines = [name for name in TESTED if name != "deepspeed" or "deepspeed" in extras]
    found = []
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            found.append(requirement)
    return found


def lowest_torch(requirements: Sequence[Requirement]) -> str:
    """Return the floor for torch, e.g. "2.10"; "0" if none is stated."""
    floors = [spec.version for one in requirements if one.name == "torch" for spec in one.specifier]
    return floors[0] if floors else "0"


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    """Check that this Python is within what the package needs and was tested with."""
    shown = ".".join(map(str, version))
    check = Check("python", values={"version": shown})
    words = {"low": LOWEST_PYTHON, "high": HIGHEST_PYTHON}
    if _minor(shown) < _minor(LOWEST_PYTHON):
        return check.fail(
            _("Python {version}; at least {low} is needed"),
            _("make an environment with Python {low} to {high}"),
            **words,
        )
    if _minor(shown) > _minor(HIGHEST_PYTHON):
        return check.warn(
            _("Python {version} is newer than what was tested ({low} to {high})"),
            _("if packages fail to install or import, use Python {high}"),
            **words,
        )
    return check.ok("Python {version}")


def check_packages(
    requirements: Sequence[Requirement],
    installed: Callable[[str], str | None] = installed_version,
) -> Check:
    """Check that required packages are installed and within the stated range.

    Packages that the project relies on closely must have the tested version.
    """
    versions = {one.name: installed(one.name) for one in requirements}
    check, problems, pins = Check("packages", values={"versions": versions}), [], []
    for one in requirements:
        version = versions[one.name]
        if version is None:
            problem = _("{name} is not installed")
        elif not one.specifier.contains(_version(version), prereleases=True):
            problem = _("{name} {version} is outside {range}")
        else:
            continue
        problems.append(problem.format(name=one.name, version=version, range=one.specifier))
        pins.append(f"{one.name}=={TESTED[one.name]}" if one.name in TESTED else f"'{one}'")
    if problems:
        what, fix = "; ".join(problems), "pip install {pins}"
        return check.fail("{problems}", fix, problems=what, pins=" ".join(pins))
    there = {name: versions[name] for name in LEANED_ON if versions.get(name)}
    others = [name for name in there if _minor(there[name]) != _minor(TESTED[name])]
    if others:
        text = _("{name} {version} (tested {tested})")
        shown = (text.format(name=n, version=there[n], tested=TESTED[n]) for n in others)
        return check.warn(
            _("other versions than the tested ones: {packages}"),
            _("to be sure: pip install {pins}"),
            packages=", ".join(shown),
            pins=" ".join(f"{name}=={TESTED[name]}" for name in others),
        )
    return check.ok(", ".join(f"{name} {version}" for name, version in there.items()))


def _version(text: str) -> Version:
    """Return a version that can be compared; 0 if the text is not one."""
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")


def _minor(version: str) -> tuple[int, ...]:
    return _version(version).release[:2]


def _release(text: str) -> str:
    """`2.12.0` of `2.12.0.post2` and `2.12.0+cpu`."""
    return ".".join(map(str, _version(text).release))


def torch_build(folder: Path | None = None) -> tuple[str, str | None]:
    """Return the version and the CUDA version (None: built without) of the installed torch, read
    from its version.py; ("", None) without torch.
    """
    if folder is None:
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            return "", None
        folder = Path(spec.origin).parent
    text = _read(folder / "version.py")
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.M)
    cuda = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.M)
    return version[1] if version else "", cuda[1] if cuda else None


def check_cuda_build(
    torch_version: str, cuda: str | None, report: SmiReport | None, requested: bool
) -> Check:
    """Check that torch's CUDA and the driver's go together.

    Args:
        torch_version, cuda: see `torch_build`.
        report: of the NVIDIA driver; None if there is none.
        requested: the configuration asks for cuda by name.
    """
    if report is None or not report.devices:
        return Check("cuda_driver").skip(_("no NVIDIA GPU here"))
    driver_cuda = report.runtime_version
    values = {
        "torch": torch_version,
        "torch_cuda": cuda,
        "driver": report.driver_version,
        "driver_cuda": driver_cuda,
    }
    check = Check("cuda_driver", values=values)
    if cuda is None:
        return (check.fail if requested else check.warn)(
            _("{count} NVIDIA GPUs are here, but torch {torch} is built without CUDA"),
            _(
                "install a CUDA build of the same torch version (pip uninstall torch, then pip"
                " install torch=={release})"
            ),
            count=len(report.devices),
            release=_release(torch_version),
        )
    major = driver_cuda.split(".")[0]
    if major and int(major) < int(cuda.split(".")[0]):
        return check.fail(
            _("torch is built for CUDA {cuda}, the driver {driver} runs CUDA up to {driver_cuda}"),
            _("update the NVIDIA driver, or install the torch that is built for CUDA {major}"),
            cuda=cuda,
            major=major,
        )
    return check.ok(
        _("torch CUDA {cuda}, driver {driver} (CUDA {driver_cuda})"),
        cuda=cuda,
        driver_cuda=driver_cuda or "?",
    )


# ---------------------------------------------------------------- CANN


def cann_home(environment: Mapping[str, str]) -> str | None:
    """Return where CANN is, by the variables of its set_env.sh."""
    return environment.get("ASCEND_HOME_PATH") or environment.get("ASCEND_TOOLKIT_HOME") or None


def cann_version(home: Path) -> str | None:
    """Return CANN's version as it is published ("8.2.RC1", "9.1.0"); None if no file has it.

    Reads `<arch>-linux/ascend_toolkit_install.info` (`version=8.2.RC1`) and `version.cfg`
    (`toolkit_running_version=[7.6.0.1.220:8.0.0]`, the published number after the colon).
    """
    infos = [_read(info) for info in sorted(home.glob("*-linux/ascend_toolkit_install.info"))]
    text = "\n".join((*infos, _read(home / "version.cfg")))
    found = re.search(r"^version=(\S+)", text, re.M) or re.search(
        r"^(?:toolkit|runtime|compiler)_running_version=\[(?:[^\]:]*:)?([^\]]+)\]", text, re.M
    )
    return found[1] if found else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def npus_present() -> bool:
    """Return whether the driver has made devices for NPUs, with or without npu-smi."""
    return any(Path("/dev").glob("davinci[0-9]*"))


def check_ascend_home(
    environment: Mapping[str, str], *, needed: bool, builds_operators: bool = False
) -> Check:
    """Check that CANN's set_env.sh was sourced in this shell.

    Args:
        needed: torch_npu is installed, or NPUs are here.
        builds_operators: the run builds DeepSpeed operators, which read ASCEND_HOME_PATH without
            asking whether it is set.
    """
    check = Check("ascend_home")
    if not needed:
        return check.skip(_("no NPU and no torch_npu here"))
    home = cann_home(environment)
    if home is None:
        what = _(
            "ASCEND_HOME_PATH is not set: CANN's libraries may not be found, and DeepSpeed builds"
            " no operator"
        )
        fix = _("install CANN, then source its set_env.sh in this shell")
        return (check.fail if builds_operators else check.warn)(what, fix)
    if not Path(home).is_dir():
        return check.fail(
            _("ASCEND_HOME_PATH is {home}, and that folder does not exist"),
            _("source the set_env.sh of the CANN that is installed"),
            home=home,
        )
    version = cann_version(Path(home))
    check = Check("ascend_home", values={"cann": version})
    return check.ok(
        _("CANN {version} at {home}"), version=version or _("(version unknown)"), home=home
    )


# ---------------------------------------------------------------- torch, torch_npu and CANN


def check_pairing(
    torch: str,
    torch_npu: str | None,
    cann: str | None,
    floor: str,
    *,
    torch_cuda: str | None,
    importable: bool,
    npus_here: bool,
) -> Check:
    """Check that torch, torch_npu and CANN fit one another and this package.

    Args:
        torch_npu: version of the installed distribution; None without one.
        cann: see `cann_version`.
        floor: the lowest torch that this package works with.
        torch_cuda: CUDA that torch was built for; None for a CPU build.
        importable: a module torch_npu is on the path, installed as a distribution or not.
        npus_here: there are NPUs on this machine.
    """
    values = {
        "torch": torch,
        "torch_npu": torch_npu,
        "cann": cann,
        "floor": floor,
    }
    check = Check("torch_npu_pairing", values=values)
    found = re.match(r"\d+\.\d+", cann or "")
    number = found[0] if found else ""
    install = _how_to_install(PAIRS.get(number, ()), floor)
    if torch_npu is None and importable:
        return check.warn(
            _("torch_npu is on the path, but not installed as a package: its version is unknown"),
            _("pip install the torch_npu that belongs to this torch, unless this is meant"),
        )
    if torch_npu is None and not npus_here:
        return Check("torch_npu_pairing").skip(_("no NPU and no torch_npu here"))
    if torch_npu is None:
        return check.fail(
            _("there are NPUs here, but torch_npu is not installed: the run would take the CPU"),
            install,
        )
    if torch_cuda is not None:
        return check.fail(
            _("torch {torch} is built for CUDA {cuda}: torch_npu refuses to work beside it"),
            _("pip uninstall torch, then install torch=={release} from PyTorch's CPU wheel index"),
            cuda=torch_cuda,
            release=_release(torch),
        )
    if _version(torch_npu) < _version(floor):
        made = PAIRS.get(number, ())
        what = _("torch_npu {torch_npu} is below this package's floor, {floor}")
        if made and _version(made[0]) < _version(floor):
            what = _(
                "torch_npu {torch_npu} is below this package's floor, {floor}; CANN {cann} has"
                " torch_npu {made} only"
            )
        return check.fail(what, install, made=", ".join(made))
    words = {"release": _release(torch_npu), "own": _release(torch)}
    if words["own"] != words["release"]:
        return check.fail(
            _("torch_npu {torch_npu} belongs to torch {release}, but torch {torch} is installed"),
            _(
                "pip install torch=={release}, or the torch_npu of this torch (pip install"
                " torch_npu=={own})"
            ),
            **words,
        )
    if not number:
        return check.warn(
            _("torch_npu {torch_npu} fits torch, but CANN's version is unknown"),
            _("source CANN's set_env.sh, so that ASCEND_HOME_PATH leads to it"),
        )
    made_for = next((cann for cann, releases in PAIRS.items() if torch_npu in releases), None)
    if made_for is None:
        return check.warn(
            _("torch_npu {torch_npu} with CANN {cann} is not in the table of known pairs"),
            _("compare them with the vendor's compatibility table"),
        )
    if number == made_for:
        return check.ok("torch_npu {torch_npu}, CANN {cann}")
    if _version(number) < _version(made_for):
        return check.fail(
            _("torch_npu {torch_npu} is made for CANN {made_for}; CANN {cann} is older"),
            install,
            made_for=made_for,
        )
    return check.warn(
        _("torch_npu {torch_npu} is made for CANN {made_for}; CANN {cann} is newer"),
        install,
        made_for=made_for,
    )


def _how_to_install(releases: Sequence[str], floor: str) -> str:
    """Return how to install the newest of these torch_npu releases within the floor, else the
    recommended pair.
    """
    if releases and _version(releases[0]) >= _version(floor):
        return f"pip install torch=={_release(releases[0])} torch_npu=={releases[0]}"
    torch_npu, cann = RECOMMENDED
    text = _(
        "upgrade: the NPU driver and firmware that CANN {cann}'s release notes name, then CANN"
        " {cann}, then pip install torch=={torch} torch_npu=={torch_npu}"
    )
    return text.format(cann=cann, torch=_release(torch_npu), torch_npu=torch_npu)
