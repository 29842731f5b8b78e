"""torch, torch_npu and CANN: which are here, whether they go together, and what to upgrade to.

The pairs are those of the vendor's compatibility table (Ascend/pytorch, COMPATIBILITY.md). A
torch_npu fits exactly one torch; CANN is compared by its first two numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from finetune.commands.doctor.check import Check, fail, ok, skip, warn
from finetune.runtime.language import _

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


# --------------------------------------------------------------- torch, torch_npu and CANN together


@dataclass(frozen=True)
class AscendSoftware:
    """What is installed.

    Attributes:
        torch_npu: version of the installed distribution; None without one.
        cann: see `cann_version`.
        floor: the lowest torch that this package works with; empty where none is stated.
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
    name, values = "torch_npu_pairing", asdict(here)
    if here.torch_npu is None:
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
        fix = _("pip uninstall torch, then install torch=={release} from PyTorch's CPU wheel index")
        return fail(
            name,
            what.format(torch=here.torch, cuda=torch_cuda),
            fix.format(release=_release(here.torch)),
            **values,
        )
    if here.floor and _version(here.torch_npu) < _version(here.floor):
        return _below_floor(name, here.torch_npu, here)
    if _release(here.torch) != _release(here.torch_npu):
        what = _("torch_npu {torch_npu} belongs to torch {release}, but torch {torch} is installed")
        fix = _(
            "pip install torch=={release}, or the torch_npu of this torch (pip install"
            " torch_npu=={own})"
        )
        release = _release(here.torch_npu)
        return fail(
            name,
            what.format(torch_npu=here.torch_npu, release=release, torch=here.torch),
            fix.format(release=release, own=_release(here.torch)),
            **values,
        )
    return _with_cann(name, here.torch_npu, here)


def _below_floor(name: str, torch_npu: str, here: AscendSoftware) -> Check:
    made = _made_for(here.cann)
    if made and not _fitting(made, here.floor):
        what = _(
            "torch_npu {torch_npu} is below this package's floor, {floor}; CANN {cann} has"
            " torch_npu {made} only"
        ).format(torch_npu=torch_npu, floor=here.floor, cann=here.cann, made=", ".join(made))
    else:
        what = _("torch_npu {torch_npu} is below this package's floor, {floor}")
        what = what.format(torch_npu=torch_npu, floor=here.floor)
    return fail(name, what, _install(here), **asdict(here))


def _with_cann(name: str, torch_npu: str, here: AscendSoftware) -> Check:
    """The last question, with a torch_npu that fits torch: whether it was made for this CANN."""
    numbers, values = _numbers(here.cann or ""), asdict(here)
    made_for = next((cann for cann, releases in PAIRS.items() if torch_npu in releases), None)
    if numbers is None:
        what = _("torch_npu {torch_npu} fits torch, but CANN's version is unknown").format(
            torch_npu=torch_npu
        )
        return warn(
            name,
            what,
            _("source CANN's set_env.sh, so that ASCEND_HOME_PATH leads to it"),
            **values,
        )
    if made_for is None:
        what = _("torch_npu {torch_npu} with CANN {cann} is not in the table of known pairs")
        what = what.format(torch_npu=torch_npu, cann=here.cann)
        return warn(name, what, _("compare them with the vendor's compatibility table"), **values)
    if numbers == made_for:
        return ok(name, f"torch_npu {torch_npu}, CANN {here.cann}", **values)
    older = _("torch_npu {torch_npu} is made for CANN {made_for}; CANN {cann} is older")
    newer = _("torch_npu {torch_npu} is made for CANN {made_for}; CANN {cann} is newer")
    verdict, what = (fail, older) if numbers < made_for else (warn, newer)
    what = what.format(torch_npu=torch_npu, made_for=_show(made_for), cann=here.cann)
    return verdict(name, what, _install(here), **values)


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
    numbers = _numbers(cann or "")
    return PAIRS.get(numbers, ()) if numbers is not None else ()


def _fitting(releases: tuple[str, ...], floor: str) -> str | None:
    """The newest release that this package works with."""
    return next((one for one in releases if not floor or _version(one) >= _version(floor)), None)


def _numbers(cann: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", cann)
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
