"""Doctor on Python, packages, torch, torch_npu and CANN: expectations from the vendors' tables,
written by hand.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import ROOT
from packaging.requirements import Requirement

from finetune.commands.doctor import versions
from finetune.commands.doctor.versions import (
    TESTED,
    cann_version,
    check_ascend_home,
    check_cuda_build,
    check_packages,
    check_pairing,
    check_python,
    lowest_torch,
    own_requirements,
    torch_build,
)
from finetune.runtime.smi import SmiDevice, SmiReport


def test_python():
    for version, verdict in (
        ((3, 10, 18), "fail"),
        ((3, 11, 0), "ok"),
        ((3, 12, 4), "ok"),
        ((3, 14, 0), "warn"),
    ):
        assert check_python(version).verdict == verdict


def test_the_tested_versions_are_those_that_make_installs():
    texts = [(ROOT / name).read_text() for name in ("constraints.txt", "requirements.lock")]
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)", "\n".join(texts), re.M))
    assert {name: pinned.get(name) for name in TESTED} == TESTED
    assert set(versions.LEANED_ON) <= set(TESTED)


def test_what_is_needed_comes_from_the_package_itself():
    needed = {one.name for one in own_requirements()}
    assert {"torch", "transformers", "accelerate", "peft", "rich", "psutil"} <= needed
    assert "deepspeed" not in needed
    assert "deepspeed" in {one.name for one in own_requirements(("deepspeed",))}
    stated = re.search(r"^\s+torch>=(\S+)$", (ROOT / "setup.cfg").read_text(), re.M)
    assert stated and lowest_torch(own_requirements()) == stated[1]


NEEDS = [Requirement(line) for line in ("torch>=2.10", "transformers<6,>=5.23", "rich>=13")]


@pytest.mark.parametrize(
    ("changed", "verdict", "said"),
    [
        ({}, "ok", "torch 2.13.0"),
        ({"transformers": None}, "fail", "transformers is not installed"),
        ({"torch": "2.9.1"}, "fail", "torch 2.9.1 is outside >=2.10"),
        ({"transformers": "6.0.0"}, "fail", "transformers 6.0.0 is outside"),
        ({"torch": "2.14.0+cpu"}, "warn", "torch 2.14.0+cpu (tested 2.13.0)"),
        ({"torch": "2.13.1"}, "ok", "torch 2.13.1"),
        ({"rich": "16.0"}, "ok", ""),  # not leaned on
        ({"torch": "no version"}, "fail", "outside"),
    ],
)
def test_packages(changed: dict[str, str | None], verdict: str, said: str):
    installed = {"torch": "2.13.0", "transformers": "5.23.0", "rich": "15.0.0"} | changed
    check = check_packages(NEEDS, installed.get)
    assert check.verdict == verdict and said in check.what
    assert verdict != "fail" or f"{[*changed][0]}==" in check.fix


# ---------------------------------------------------------------- CUDA


def test_torch_build_is_read_without_importing(tmp_path: Path):
    (tmp_path / "version.py").write_text(
        "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    )
    assert torch_build(tmp_path) == ("2.13.0+cu130", "13.0")
    (tmp_path / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n")
    assert torch_build(tmp_path) == ("2.13.0+cpu", None)
    assert torch_build(tmp_path / "nothing") == ("", None)
    import torch

    assert torch_build() == (torch.__version__, torch.version.cuda)


@pytest.mark.parametrize(
    ("cuda", "driver_cuda", "wanted", "verdict"),
    [
        ("13.0", "13.0", False, "ok"),
        ("12.8", "12.2", False, "ok"),  # minor versions of one CUDA go together
        ("13.0", "12.4", False, "fail"),
        (None, "12.4", False, "warn"),
        (None, "12.4", True, "fail"),
        ("12.8", "", False, "ok"),  # the driver does not say
    ],
)
def test_cuda_of_torch_and_of_the_driver(
    cuda: str | None, driver_cuda: str, wanted: bool, verdict: str
):
    report = SmiReport("cuda", "550.54", driver_cuda, (SmiDevice(0, "NVIDIA L4", "GPU 0"),))
    assert check_cuda_build("2.13.0", cuda, report, wanted).verdict == verdict
    assert check_cuda_build("2.13.0", cuda, None, requested=wanted).verdict == "skip"


# ---------------------------------------------------------------- CANN


def test_ascend_home(tmp_path: Path):
    info = tmp_path / "both" / "aarch64-linux" / "ascend_toolkit_install.info"
    info.parent.mkdir(parents=True)
    info.write_text("package_name=Ascend-cann-toolkit\nversion=9.1.0\ninnerversion=V100R001C22\n")
    running = {"both": "[7.6.0.1.220:9.0.0]", "cfg": "[7.6.0.1.220:8.0.RC3]", "short": "[9.9]"}
    for name, version in running.items():
        (tmp_path / name).mkdir(exist_ok=True)
        text = f"# version: 1.0\nruntime_running_version={version}\n"
        (tmp_path / name / "version.cfg").write_text(text)
    found = [cann_version(tmp_path / name) for name in (*running, "nothing")]
    assert found == ["9.1.0", "8.0.RC3", "9.9", None]
    check = check_ascend_home({"ASCEND_HOME_PATH": str(tmp_path / "both")}, needed=True)
    assert check.verdict == "ok" and check.values["cann"] == "9.1.0"
    gone = check_ascend_home({"ASCEND_HOME_PATH": str(tmp_path / "old")}, needed=True)
    assert gone.verdict == "fail" and str(tmp_path / "old") in gone.what
    unsourced = check_ascend_home({}, needed=True)
    assert unsourced.verdict == "warn" and "set_env.sh" in str(unsourced.fix)
    assert check_ascend_home({}, needed=True, builds_operators=True).verdict == "fail"
    assert check_ascend_home({}, needed=False).verdict == "skip"


PAIR = {"torch": "2.12.0+cpu", "torch_cuda": None, "torch_npu": "2.12.0", "importable": True}
PAIR |= {"cann": "9.1.0", "npus_here": True, "floor": "2.10"}
WITHOUT = {"torch_npu": None, "importable": False}


@pytest.mark.parametrize(
    ("changed", "verdict", "said"),
    [
        ({}, "ok", "torch_npu 2.12.0, CANN 9.1.0"),
        ({"torch_npu": "2.12.0.post2"}, "ok", "2.12.0.post2"),
        ({"torch": "2.10.0", "torch_npu": "2.10.0", "cann": "9.0.0"}, "ok", "CANN 9.0.0"),
        ({"torch": "2.13.0"}, "fail", "belongs to torch 2.12.0"),
        ({"torch": "2.12.0", "torch_cuda": "12.8"}, "fail", "refuses"),
        ({"cann": "9.0.0"}, "fail", "is made for CANN 9.1; CANN 9.0.0 is older"),
        ({"torch": "2.10.0", "torch_npu": "2.10.0"}, "warn", "CANN 9.1.0 is newer"),
        ({"cann": "10.0.0"}, "warn", "CANN 10.0.0 is newer"),
        ({"torch": "2.14.0", "torch_npu": "2.14.0"}, "warn", "not in the table"),
        ({"cann": None}, "warn", "CANN's version is unknown"),
        ({"torch_npu": None}, "warn", "not installed as a package"),
        (WITHOUT, "fail", "torch_npu is not installed"),
        (WITHOUT | {"npus_here": False}, "skip", "no NPU"),
    ],
)
def test_pairs(changed: dict, verdict: str, said: str):
    check = check_pairing(**PAIR | changed)
    assert check.verdict == verdict and said in check.what


def test_what_to_install():
    """CANN 8.2.RC1 has torch_npu 2.5.1 and 2.6 only: below the floor, whichever is installed."""
    old = {"torch": "2.6.0", "torch_npu": "2.6.0", "cann": "8.2.RC1"}
    check = check_pairing(**PAIR | old)
    assert check.verdict == "fail" and "below this package's floor, 2.10" in check.what
    assert "CANN 8.2.RC1 has torch_npu 2.6.0, 2.5.1.post1 only" in check.what
    assert "CANN 9.1" in check.fix and "torch_npu==2.12.0" in check.fix
    # what this CANN has is offered first
    check = check_pairing(**PAIR | WITHOUT | {"cann": "9.0.0"})
    assert check.fix == "pip install torch==2.10.0 torch_npu==2.10.0"
    check = check_pairing(**PAIR | {"torch": "2.9.0", "torch_npu": "2.9.0.post8"})
    assert check.verdict == "fail" and "torch_npu==2.12.0.post2" in check.fix


def test_the_table_is_ordered_and_every_release_stands_once():
    assert list(versions.PAIRS) == sorted(versions.PAIRS, reverse=True)
    releases = [one for several in versions.PAIRS.values() for one in several]
    assert len(releases) == len(set(releases))
    for several in versions.PAIRS.values():
        torches = [versions._version(versions._release(one)) for one in several]
        assert torches == sorted(torches, reverse=True)
    assert versions.RECOMMENDED[0] in versions.PAIRS[versions.RECOMMENDED[1]]
