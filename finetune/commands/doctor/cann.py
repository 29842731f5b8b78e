"""CANN: where it is, which version, and whether this shell knows it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from finetune.commands.doctor.check import Check, fail, ok, skip, warn

_PLACES = ("usr/local/Ascend/cann", "usr/local/Ascend/ascend-toolkit/latest", "usr/local/Ascend/latest")


def cann_home(environment: Mapping[str, str]) -> str | None:
    """Where CANN is, as its set_env.sh says."""
    return environment.get("ASCEND_HOME_PATH") or environment.get("ASCEND_TOOLKIT_HOME") or None


def cann_version(home: Path) -> str | None:
    """CANN's version as it is published ("8.2.RC1", "9.1.0"); None where no file says it.

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
    environment: Mapping[str, str], *, needed: bool, builds_operators: bool = False, root: Path = Path("/")
) -> Check:
    """Whether CANN's set_env.sh was sourced in this shell.

    Args:
        needed: torch_npu is installed, or NPUs are here.
        builds_operators: the run builds DeepSpeed operators, which read ASCEND_HOME_PATH without asking whether it is
            set.
    """
    name = "ascend_home"
    if not needed:
        return skip(name, "no NPU and no torch_npu here", "本机没有 NPU，也未安装 torch_npu")
    home = cann_home(environment)
    if home is None:
        places = [root / place for place in _PLACES if (root / place).is_dir()]
        verdict = fail if builds_operators else warn
        said = (
            "ASCEND_HOME_PATH is not set: CANN's libraries may not be found, and DeepSpeed builds no operator",
            "未设置 ASCEND_HOME_PATH：可能找不到 CANN 的库，DeepSpeed 也无法编译算子",
        )
        if places:
            script = places[0].parent / "set_env.sh" if places[0].name == "latest" else places[0] / "set_env.sh"
            return verdict(name, said, (f"source {script}",) * 2)
        return verdict(
            name,
            said,
            (
                "install CANN, then source its set_env.sh in this shell",
                "安装 CANN，然后在当前 shell 中 source 其 set_env.sh",
            ),
        )
    if not Path(home).is_dir():
        return fail(
            name,
            (
                f"ASCEND_HOME_PATH is {home}, and that folder does not exist",
                f"ASCEND_HOME_PATH 为 {home}，但该目录不存在",
            ),
            ("source the set_env.sh of the CANN that is installed", "请 source 已安装 CANN 的 set_env.sh"),
        )
    version = cann_version(Path(home))
    return ok(
        name,
        f"CANN {version or '(version unknown)'} at {home}",
        f"CANN {version or '（版本未知）'}，位于 {home}",
        cann=version,
    )
