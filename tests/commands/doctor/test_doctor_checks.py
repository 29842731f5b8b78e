"""The checks of doctor one by one: devices, versions (expectations from the vendors' tables, written
by hand), limits, disks, ports, addresses, variables.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT
from packaging.requirements import Requirement

from finetune.commands.doctor import devices, host, network, versions
from finetune.commands.doctor.check import Check
from finetune.config.pretrain_config import PretrainConfig
from finetune.config.run_config import RunConfig
from finetune.runtime.host import HostUse
from finetune.runtime.nodes import Nodes
from finetune.runtime.smi import SmiDevice, SmiReport, parse_info

GIB, MIB = 1 << 30, 1 << 20
OUTPUTS = ROOT / "tests" / "smi_outputs"

# ---------------------------------------------------------------- shorter words for the table below

BUSY = parse_info((OUTPUTS / "npu_24.1_910B1_busy.txt").read_text())  # four; 1 and 2 are held
GPUS = tuple(SmiDevice(n, "H100", f"GPU {n}", "OK", 80 * GIB, 0) for n in range(2))
IDLE = SmiReport("cuda", "580.65", "13.0", GPUS)
MIXED = SmiReport("cuda", devices=(SmiDevice(0, "A100", "GPU 0"), SmiDevice(1, "L4", "GPU 1")))
# by a process of another container, which the tool does not list
HELD = SmiDevice(0, "910B3", "NPU 0", "OK", 64 * GIB, 60 * GIB, processes=())
ABLE = {"name": "x", "bfloat16": True, "fp8": False, "flash": True, "compile": True}
REPORT = {"available": ["cuda", "cpu"], "device_type": "cuda", "count": 2, "matmul_error": ""}
CPU = {"available": ["cpu"], "device_type": "cpu", "count": None}
NEEDS = [Requirement(line) for line in ("torch>=2.10", "transformers<6,>=5.23", "rich>=13")]
INSTALLED = {"torch": "2.13.0", "transformers": "5.23.0", "rich": "15.0.0"}
PAIR = {"torch": "2.12.0+cpu", "torch_cuda": None, "torch_npu": "2.12.0", "importable": True}
PAIR |= {"cann": "9.1.0", "npus_here": True, "floor": "2.10"}
OLD = {"torch": "2.6.0", "torch_npu": "2.6.0", "cann": "8.2.RC1"}
WITHOUT = {"torch_npu": None, "importable": False}
INTERFACES = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"], "eth1": ["10.1.0.1"]}
NAMES = {"first": ["10.0.0.1"], "other": ["10.0.0.2"], "localhost": ["127.0.0.1"]}
STALE = "RANK=0 WORLD_SIZE=4"


def variables(words: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words.split())


def enough(report: SmiReport | None, kind: str, processes: int, words: str = "", **more) -> Check:
    reports = [] if report is None else [report]
    return devices.check_devices(reports, kind, variables(words), processes=processes, **more)


def health(words: str) -> Check:
    found = [SmiDevice(n, "x", f"NPU {n}", health) for n, health in enumerate(words.split())]
    return devices.check_device_health(found)


def torch_device(wanted: str, listed: int, processes: int, **changed: Any) -> Check:
    report = REPORT | {"capabilities": ABLE} | changed
    return devices.check_device_type(report, wanted, listed, processes)


def able(config: Any, device_type: str = "cuda", **changed: bool) -> Check:
    report = {"device_type": device_type, "capabilities": ABLE | changed}
    return devices.check_capabilities(report, config)


def typed(dtype: str) -> RunConfig:
    return RunConfig(model="m", data=("d",), output_dir="o", dtype=dtype)


def packages(**changed: str | None) -> Check:
    return versions.check_packages(NEEDS, (INSTALLED | changed).get)


def cuda(built: str | None, driver: str, wanted: bool = False) -> Check:
    report = SmiReport("cuda", "550.54", driver, (SmiDevice(0, "NVIDIA L4", "GPU 0"),))
    return versions.check_cuda_build("2.13.0", built, report, wanted)


def pair(**changed: Any) -> Check:
    return versions.check_pairing(**PAIR | changed)


def memory(available: int, needed: int) -> Check:
    use = HostUse(None, 8.0, (64 - available) * GIB, 64 * GIB)
    return host.check_host_memory(use, needed * GIB, "the weights")


def port(nodes: Nodes, free: int | None, holder: int | None = None) -> Check:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "first_free_port", lambda first: free)
        patch.setattr(network, "holder_of", lambda port: holder)
        return network.check_port(nodes)


def own_name(words: str = "", addresses: str = "") -> Check:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "lookup", lambda name: addresses.split())
        return network.check_own_name(variables(words))


def address(rank: int, name: str) -> Check:
    return network.check_master_address(Nodes(2, rank, name, 29500))


def nodes(words: str) -> Check:
    return network.check_nodes(variables(words))[1][0]


def contradiction(words: str, processes: int = 1, count: int = 1) -> Check:
    (check,) = network.check_variables(variables(words), processes, count)
    return check


FULL, ONE = {"needed_devices": 4, "needed_bytes": 20 * GIB}, Nodes(1, 0, "a", None)
FP8 = PretrainConfig(train_data_path=("x",), output_dir="o", fp8=True)


@pytest.mark.parametrize(
    ("verdict", "said", "check"),
    [
        # devices: enough of them, their memory, their health, what torch says of them
        ("ok", "4 x 910B1", lambda: enough(BUSY, "npu", 4)),
        ("fail", "3 of 4", lambda: enough(BUSY, "npu", 4, "ASCEND_RT_VISIBLE_DEVICES=0,1,2,7")),
        ("warn", "1 x A100 + 1 x L4", lambda: enough(MIXED, "cuda", 2)),
        ("ok", "takes the cpu", lambda: enough(None, "cpu", 2)),
        ("fail", "2 devices are needed", lambda: enough(None, "cpu", 2, min_devices=2)),
        ("warn", "npu-smi was not found", lambda: enough(None, "npu", 2)),
        ("warn", "dcmi failed", lambda: enough(SmiReport("npu", problem="dcmi failed"), "npu", 1)),
        ("warn", "none found", lambda: enough(SmiReport("cuda", problem="none found"), "cpu", 1)),
        ("fail", "2 devices have 20.0 GiB free, 4 are needed: NPU 1: 6.0 GiB of 64.0 GiB free (pid"
         " 208841 python3 54.6 GiB); NPU 2: 434.0 MiB of 64.0 GiB free (pid 31337 VLLMWorker_TP",
         lambda: devices.check_device_memory(BUSY.devices, **FULL)),
        ("warn", "0,3", lambda: devices.check_device_memory(BUSY.devices, **FULL | {"needed_devices": 2})),
        ("fail", "another container", lambda: devices.check_device_memory([HELD], needed_bytes=GIB * 20)),
        ("warn", "held already", lambda: devices.check_device_memory(BUSY.devices)),
        # what the driver itself holds is not worth a warning
        ("ok", "", lambda: devices.check_device_memory(BUSY.devices[:1])),
        ("skip", "", lambda: devices.check_device_memory([SmiDevice(0, "GB10", "GPU 0")])),
        ("ok", "2 devices", lambda: health("OK OK")),
        ("warn", "NPU 1: Warning", lambda: health("OK Warning")),
        ("fail", "NPU 1: Alarm", lambda: health("OK Alarm")),
        ("skip", "", lambda: health("")),
        ("ok", "2 x x (cuda)", lambda: torch_device("auto", 2, 2)),
        ("fail", "4 processes", lambda: torch_device("auto", 2, 4)),
        ("fail", "torch sees no npu", lambda: torch_device("npu", 0, 1, device_type="npu")),
        ("fail", "no kernel", lambda: torch_device("auto", 2, 1, matmul_error="no kernel image")),
        ("warn", "the driver lists 8", lambda: torch_device("auto", 8, 1, **CPU)),
        ("fail", "has no bfloat16", lambda: able(typed("bfloat16"), "npu", bfloat16=False)),
        ("fail", "float16 is not trained", lambda: able(typed("float16"), "cpu")),
        ("ok", "", lambda: able(typed("auto"), "npu", bfloat16=False)),
        ("warn", "has no fp8", lambda: able(FP8)),
        # versions
        ("fail", "3.11", lambda: versions.check_python((3, 10, 18))),
        ("ok", "3.11.0", lambda: versions.check_python((3, 11, 0))),
        ("warn", "newer", lambda: versions.check_python((3, 14, 0))),
        ("fail", "transformers is not installed", lambda: packages(transformers=None)),
        ("fail", "torch 2.9.1 is outside >=2.10 pip install torch==", lambda: packages(torch="2.9.1")),
        ("warn", "torch 2.14.0+cpu (tested 2.13.0)", lambda: packages(torch="2.14.0+cpu")),
        ("ok", "", lambda: packages(rich="16.0")),  # not leaned on
        ("fail", "outside", lambda: packages(torch="no version")),
        ("ok", "", lambda: cuda("12.8", "12.2")),  # minor versions of one CUDA go together
        ("fail", "up to 12.4", lambda: cuda("13.0", "12.4")),
        ("fail", "without CUDA", lambda: cuda(None, "12.4", wanted=True)),
        ("ok", "", lambda: cuda("12.8", "")),  # the driver does not say
        ("skip", "", lambda: versions.check_cuda_build("2.13.0", None, None, requested=False)),
        ("ok", "2.12.0.post2", lambda: pair(torch_npu="2.12.0.post2")),
        ("fail", "belongs to torch 2.12.0", lambda: pair(torch="2.13.0")),
        ("fail", "refuses", lambda: pair(torch="2.12.0", torch_cuda="12.8")),
        ("fail", "is made for CANN 9.1; CANN 9.0.0 is older", lambda: pair(cann="9.0.0")),
        ("warn", "CANN 10.0.0 is newer", lambda: pair(cann="10.0.0")),
        ("warn", "not in the table", lambda: pair(torch="2.14.0", torch_npu="2.14.0")),
        ("warn", "CANN's version is unknown", lambda: pair(cann=None)),
        ("warn", "not installed as a package", lambda: pair(torch_npu=None)),
        ("skip", "no NPU", lambda: pair(**WITHOUT, npus_here=False)),
        # what this CANN has is offered first
        ("fail", "=2.12.0.post2", lambda: pair(torch="2.9.0", torch_npu="2.9.0.post8")),
        ("fail", "torch==2.10.0 torch_npu==2.10.0", lambda: pair(**WITHOUT, cann="9.0.0")),
        ("fail", "floor, 2.10; CANN 8.2.RC1 has torch_npu 2.6.0, 2.5.1.post1 only", lambda: pair(**OLD)),
        ("fail", "CANN 9.1, then pip install torch==2.12.0 torch_npu==2.12.0", lambda: pair(**OLD)),
        # host
        ("ok", "the weights", lambda: memory(40, 39)),
        ("fail", "the weights", lambda: memory(40, 41)),
        ("warn", "only", lambda: memory(1, 0)),
        ("warn", "pinned offload", lambda: host.check_locked_memory(True, 1, 64 << 10)),
        ("ok", "unlimited", lambda: host.check_locked_memory(True, 2, -1)),
        ("fail", "256", lambda: host.check_open_files(256)),
        ("warn", "1024", lambda: host.check_open_files(1024)),
        ("ok", "", lambda: host.check_open_files(65535)),
        # how nodes find one another
        ("warn", "launch takes a free one", lambda: port(ONE, 29503)),
        ("fail", "MASTER_PORT=29503 on every", lambda: port(Nodes(2, 0, "a", 29500), 29503)),
        ("fail", "by pid 7", lambda: port(Nodes(2, 0, "a", 29500), None, 7)),
        ("skip", "not here", lambda: port(Nodes(2, 1, "a", 29500), None, 7)),
        ("ok", "one node", lambda: nodes("")),
        ("ok", "node 1 of 2", lambda: nodes("NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1")),
        ("fail", "NODE_RANK is not set", lambda: nodes("NNODES=2")),
        ("fail", "MASTER_PORT", lambda: nodes("MASTER_PORT=abc")),
        ("ok", "10.0.0.1", lambda: address(0, "first")),
        ("fail", "no address of this machine", lambda: address(0, "other")),
        ("fail", "does not resolve", lambda: address(1, "nowhere")),
        ("fail", "on themselves", lambda: address(1, "localhost")),
        ("warn", "does not resolve", lambda: own_name("", "")),
        ("warn", "is 127.0.1.1", lambda: own_name("", "127.0.1.1")),
        ("ok", "10.0.0.1", lambda: own_name("", "10.0.0.1")),
        ("ok", "eth0", lambda: own_name("GLOO_SOCKET_IFNAME=eth0")),
        ("skip", "first node", lambda: network.check_master_reachable(Nodes(2, 0, "x", 29500))),
        # variables
        ("fail", "stale_rank", lambda: contradiction(STALE)),
        ("warn", "stale_rank", lambda: contradiction(f"{STALE} MASTER_ADDR=a MASTER_PORT=1")),
        ("ok", "variables", lambda: contradiction(f"{STALE} TORCHELASTIC_RUN_ID=x")),
        ("warn", "omp_threads", lambda: contradiction("OMP_NUM_THREADS=32", processes=8)),
        # gloo takes whole names
        ("fail", "socket_interface", lambda: contradiction("GLOO_SOCKET_IFNAME=eth")),
        ("fail", "socket_interface", lambda: contradiction("GLOO_SOCKET_IFNAME=lo", count=2)),
        ("ok", "variables", lambda: contradiction("GLOO_SOCKET_IFNAME=eth7,eth1", count=2)),
    ],
)  # fmt: skip
def test_verdicts(verdict: str, said: str, check: Callable[[], Check], monkeypatch):
    monkeypatch.setattr(network, "local_addresses", lambda: INTERFACES)
    monkeypatch.setattr(network, "usable_cores", lambda: 64)
    monkeypatch.setattr(network, "lookup", lambda name: NAMES.get(name, []))
    found = check()
    assert found.verdict == verdict, found.what
    assert said in f"{found.name} {found.what} {found.fix}"
    assert (found.fix is None) == (verdict in ("ok", "skip"))


def test_what_a_run_takes():
    assert devices.accelerator([BUSY, IDLE], "auto", ["npu", "cuda"]) == "npu"
    assert devices.accelerator([IDLE], "auto", []) == "cpu"  # torch is a CPU build
    assert devices.accelerator([BUSY], "cpu", ["npu"]) == "cpu"
    assert devices.accelerator([], "auto", ["npu"]) == "npu"  # torch_npu is there, npu-smi is not


# ---------------------------------------------------------------- versions


def test_the_tested_versions_are_those_that_make_installs():
    texts = [(ROOT / name).read_text() for name in ("constraints.txt", "requirements.lock")]
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)", "\n".join(texts), re.M))
    assert {name: pinned.get(name) for name in versions.TESTED} == versions.TESTED
    assert set(versions.LEANED_ON) <= set(versions.TESTED)


def test_torch_build_is_read_without_importing(tmp_path: Path):
    for line, built in (("'13.0'\nhip: Optional[str] = None", "13.0"), ("None", None)):
        text = f"__version__ = '2.13.0+x'\ncuda: Optional[str] = {line}\n"
        (tmp_path / "version.py").write_text(text)
        assert versions.torch_build(tmp_path) == ("2.13.0+x", built)
    assert versions.torch_build(tmp_path / "nothing") == ("", None)


def test_ascend_home(tmp_path: Path):
    info = tmp_path / "both" / "aarch64-linux" / "ascend_toolkit_install.info"
    info.parent.mkdir(parents=True)
    info.write_text("package_name=Ascend-cann-toolkit\nversion=9.1.0\ninnerversion=V100R001C22\n")
    for name, version in (("both", "[7.6.0.1.220:9.0.0]"), ("cfg", "[7.6.0.1.220:8.0.RC3]")):
        (tmp_path / name).mkdir(exist_ok=True)
        text = f"# version: 1.0\nruntime_running_version={version}\n"
        (tmp_path / name / "version.cfg").write_text(text)
    found = [versions.cann_version(tmp_path / name) for name in ("both", "cfg", "nothing")]
    assert found == ["9.1.0", "8.0.RC3", None]
    for home, needed, builds, verdict, said in (
        ("both", True, False, "ok", "CANN 9.1.0"),
        ("old", True, False, "fail", f"{tmp_path / 'old'}"),
        ("", True, False, "warn", "set_env.sh"),
        ("", True, True, "fail", "set_env.sh"),
        ("", False, False, "skip", ""),
    ):
        environment = {"ASCEND_HOME_PATH": str(tmp_path / home)} if home else {}
        check = versions.check_ascend_home(environment, needed=needed, builds_operators=builds)
        assert check.verdict == verdict and said in f"{check.what} {check.fix}"


def test_the_table_is_ordered_and_every_release_stands_once():
    assert list(versions.PAIRS) == sorted(versions.PAIRS, reverse=True)
    releases = [one for several in versions.PAIRS.values() for one in several]
    assert len(releases) == len(set(releases))
    assert versions.RECOMMENDED[0] in versions.PAIRS[versions.RECOMMENDED[1]]


# ---------------------------------------------------------------- disks


@contextlib.contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """A real small file system; skipped where it cannot be mounted."""
    folder.mkdir(exist_ok=True)
    words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(words, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs needs root and the right to mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(path: Path, mebibytes: int) -> None:
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, mebibytes * MIB)


def test_a_real_small_shared_memory(tmp_path: Path):
    def verdict(processes: int, workers: int) -> str:
        return host.check_shared_memory(processes, workers, tmp_path / "shm").verdict

    assert verdict(8, 0) == "skip"
    with tmpfs(tmp_path / "shm", "size=64m") as folder:
        # loaders may get along
        assert [verdict(*counts) for counts in ((1, 0), (1, 8), (8, 0))] == ["ok", "warn", "warn"]
        check = host.check_shared_memory(8, 0, folder)
        assert "64.0 MiB free" in check.what and "--shm-size=2g" in check.fix
        fill(folder / "left by a crash", 30)
        assert [verdict(8, 0), verdict(2, 4)] == ["fail", "warn"]


def test_real_disks(tmp_path: Path):
    with tmpfs(tmp_path / "full", "size=300m") as folder:
        assert host.check_disk("output", folder / "runs" / "new").verdict == "warn"
        fill(folder / "filler", 290)
        check = host.check_disk("output", folder / "runs" / "new")
        assert check.verdict == "fail" and "10.0 MiB free" in check.what
        assert not (folder / "runs").exists()
    for options, said in (("nr_inodes=50", "more files"), ("ro", "cannot be written")):
        with tmpfs(tmp_path / "disk", f"size=8g,{options}") as folder:
            check = host.check_disk("cache", folder)
            assert (check.name, check.verdict) == ("disk_cache", "fail") and said in check.what
    assert host.existing_parent(Path("runs-that-are-not-there/x")) == Path.cwd()


# ---------------------------------------------------------------- the network for real


def test_ports_and_names_for_real(monkeypatch):
    assert network.lookup("no-such-host.invalid") == []
    assert network.is_loopback(network.lookup("localhost")[0])
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        check = network.check_port(Nodes(1, 0, "127.0.0.1", taken))
        free = check.values["next_free"]
        assert check.verdict == "fail" and f"MASTER_PORT={free}" in check.fix
        assert check.values["holder"] == os.getpid() and taken < free <= taken + 10
        for number, result in ((taken, "open"), (closed, "refused")):
            check = network.check_master_reachable(Nodes(2, 1, "127.0.0.1", number))
            assert (check.verdict, check.values["result"]) == ("ok", result)
    monkeypatch.setattr(network, "reach", lambda host, port: "no answer in 3 s")
    gone = network.check_master_reachable(Nodes(2, 1, "10.9.9.9", 29500))
    assert gone.verdict == "fail" and "29500" in gone.fix
