"""Doctor on the host and the network: limits by hand, and real ones where they cost little (tmpfs,
a bound port).
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from finetune.commands.doctor import host, network
from finetune.commands.doctor.host import (
    check_compiler,
    check_disk,
    check_host_memory,
    check_locked_memory,
    check_open_files,
    check_shared_memory,
    existing_parent,
)
from finetune.commands.doctor.network import (
    check_master_address,
    check_master_reachable,
    check_nodes,
    check_own_name,
    check_port,
    holder_of,
    is_loopback,
    lookup,
    reach,
)
from finetune.runtime.host import HostUse
from finetune.runtime.language import speaking
from finetune.runtime.nodes import Nodes

GIB, MIB = 1 << 30, 1 << 20


@contextlib.contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """A real small file system; skipped where it cannot be mounted."""
    folder.mkdir(exist_ok=True)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if made.returncode != 0:
        pytest.skip("mounting a tmpfs needs root and the right to mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


# ---------------------------------------------------------------- memory and limits


def use(available: int, total: int = 64 * GIB) -> HostUse:
    return HostUse(None, 8.0, total - available, total)


@pytest.mark.parametrize(
    ("available", "needed", "verdict"),
    [
        (40 * GIB, 0, "ok"),
        (40 * GIB, 39 * GIB, "ok"),
        (40 * GIB, 41 * GIB, "fail"),
        (GIB, 0, "warn"),
    ],
)
def test_host_memory(available: int, needed: int, verdict: str):
    check = check_host_memory(use(available), needed, "the weights")
    assert check.verdict == verdict
    assert not needed or "the weights" in check.what


def test_a_real_small_shared_memory(tmp_path: Path):
    with tmpfs(tmp_path / "shm", "size=64m") as folder:
        assert check_shared_memory(1, 0, folder).verdict == "ok"
        assert check_shared_memory(1, 8, folder).verdict == "warn"  # loaders may get along
        check = check_shared_memory(8, 0, folder)
        assert check.verdict == "warn" and "64.0 MiB free" in check.what
        assert check.fix is not None and "--shm-size=2g" in check.fix and "workers" not in check.fix
        with (folder / "left by a crash").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 30 * MIB)
        assert check_shared_memory(8, 0, folder).verdict == "fail"
        assert check_shared_memory(2, 4, folder).verdict == "warn"
    assert check_shared_memory(8, 0, tmp_path / "nothing").verdict == "skip"


@pytest.mark.parametrize(
    ("limit", "pinned", "nodes", "verdict"),
    [
        (64 << 10, True, 1, "warn"),
        (64 << 10, False, 2, "warn"),
        (64 << 10, False, 1, "ok"),
        (-1, True, 2, "ok"),
    ],
)
def test_locked_memory(limit: int, pinned: bool, nodes: int, verdict: str):
    assert check_locked_memory(pinned, nodes, limit).verdict == verdict


@pytest.mark.parametrize(
    ("limit", "verdict"), [(256, "fail"), (1024, "warn"), (65535, "ok"), (-1, "ok")]
)
def test_open_files(limit: int, verdict: str):
    assert check_open_files(limit).verdict == verdict


# ---------------------------------------------------------------- disk


def test_a_real_full_disk(tmp_path: Path):
    with tmpfs(tmp_path / "disk", "size=300m") as folder:
        assert check_disk("output", folder / "runs" / "new").verdict == "warn"
        full = folder / "filler"
        with full.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 290 * MIB)
        check = check_disk("output", folder / "runs" / "new")
        assert check.verdict == "fail" and "10.0 MiB free" in check.what
        assert not (folder / "runs").exists()
    assert check_disk("output", tmp_path / "runs", needed_bytes=1 << 60).verdict == "fail"


def test_a_real_disk_without_inodes(tmp_path: Path):
    with tmpfs(tmp_path / "disk", "size=8g,nr_inodes=50") as folder:
        check = check_disk("output", folder)
        assert check.verdict == "fail" and "more files" in check.what


def test_a_real_read_only_disk(tmp_path: Path):
    with tmpfs(tmp_path / "disk", "size=8g,ro") as folder:
        check = check_disk("cache", folder / "cache")
        assert (
            check.verdict == "fail"
            and check.name == "disk_cache"
            and "cannot be written" in check.what
        )


def test_the_folder_that_will_be_made_is_judged_by_the_one_above(tmp_path: Path):
    assert existing_parent(tmp_path / "a" / "b") == tmp_path
    assert existing_parent(Path("runs-that-are-not-there/x")) == Path.cwd()


# ---------------------------------------------------------------- a compiler


def test_no_compiler_on_the_path(tmp_path: Path):
    empty = {"PATH": str(tmp_path)}
    check = check_compiler("DeepSpeed's CPU Adam", empty)
    assert check.verdict == "fail" and "DeepSpeed's CPU Adam cannot be built" in check.what
    assert check_compiler("", empty).verdict == "skip"
    compiler = tmp_path / "my-g++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    assert check_compiler("x", {**empty, "CXX": "my-g++ -O2"}).verdict == "ok"


# ---------------------------------------------------------------- the port


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_really_taken_port(taken_port: int):
    check = check_port(Nodes(1, 0, "127.0.0.1", taken_port))
    assert check.verdict == "fail" and check.fix is not None
    free = check.values["next_free"]
    assert taken_port < free <= taken_port + 10 and f"MASTER_PORT={free}" in check.fix
    assert holder_of(taken_port) == os.getpid() == check.values["holder"]
    with socket.create_server(("127.0.0.1", free)):
        pass  # it is free indeed, and was let go


def test_the_default_port_taken_is_a_warning_for_the_launcher_takes_another(
    monkeypatch: pytest.MonkeyPatch,
):
    def found(free: int | None, holder: int | None) -> None:
        monkeypatch.setattr(network, "first_free_port", lambda first: free)
        monkeypatch.setattr(network, "holder_of", lambda port: holder)

    found(29503, None)
    with speaking("zh"):
        check = check_port(Nodes(1, 0, "127.0.0.1", None))
    assert (
        check.verdict == "warn"
        and check.fix is not None
        and "自动选用" in check.fix
        and "29503" in check.fix
    )
    found(29500, None)
    assert check_port(Nodes(1, 0, "127.0.0.1", None)).verdict == "ok"
    found(None, 7)
    none = check_port(Nodes(2, 0, "a", 29500))
    assert none.verdict == "fail" and "by pid 7" in none.what
    assert check_port(Nodes(2, 1, "a", 29500)).verdict == "skip"


# ---------------------------------------------------------------- nodes and addresses


@pytest.mark.parametrize(
    ("environment", "verdict", "said"),
    [
        ({}, "ok", "one node"),
        ({"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}, "ok", "node 1 of 2"),
        ({"NNODES": "2"}, "fail", "NODE_RANK is not set"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "10.0.0.1"}, "fail", "node rank 2 of 2"),
        ({"MASTER_PORT": "abc"}, "fail", "MASTER_PORT"),
    ],
)
def test_nodes(environment: dict[str, str], verdict: str, said: str):
    nodes, checks = check_nodes(environment)
    assert {check.verdict for check in checks} == {verdict} and (nodes is None) == (
        verdict == "fail"
    )
    assert any(said in check.what for check in checks)


INTERFACES = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]}


@pytest.mark.parametrize(
    ("nodes", "addresses", "verdict", "said"),
    [
        (Nodes(2, 0, "first", 29500), ["10.0.0.1"], "ok", "10.0.0.1"),
        (Nodes(2, 0, "first", 29500), ["10.0.0.2"], "fail", "no address of this machine"),
        (Nodes(2, 1, "first", 29500), ["10.0.0.2"], "ok", "10.0.0.2"),
        (Nodes(2, 1, "first", 29500), [], "fail", "does not resolve"),
        (Nodes(2, 1, "localhost", 29500), ["127.0.0.1"], "fail", "on themselves"),
    ],
)
def test_master_address(
    nodes: Nodes, addresses: list[str], verdict: str, said: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(network, "local_addresses", lambda: INTERFACES)
    monkeypatch.setattr(network, "lookup", lambda host: addresses)
    check = check_master_address(nodes)
    assert check.verdict == verdict and said in check.what


def test_a_name_that_really_does_not_resolve():
    assert lookup("no-such-host.invalid") == []
    assert is_loopback(lookup("localhost")[0])


def test_reaching_the_first_node_for_real(taken_port: int, monkeypatch: pytest.MonkeyPatch):
    assert reach("127.0.0.1", taken_port) == "open"
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    assert reach("127.0.0.1", closed) == "refused"
    open_ = check_master_reachable(Nodes(2, 1, "127.0.0.1", taken_port))
    assert open_.verdict == "ok" and "answers" in open_.what
    not_yet = check_master_reachable(Nodes(2, 1, "127.0.0.1", closed))
    assert not_yet.verdict == "ok" and "nobody listens" in not_yet.what
    monkeypatch.setattr(network, "reach", lambda host, port: "no answer in 3 s")
    gone = check_master_reachable(Nodes(2, 1, "10.9.9.9", 29500))
    assert gone.verdict == "fail" and gone.fix is not None and "29500" in gone.fix
    assert check_master_reachable(Nodes(2, 0, "x", 29500)).verdict == "skip"


def test_a_host_name_that_is_loopback_misleads_gloo(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(network, "lookup", lambda host: ["127.0.1.1"])
    check = check_own_name({})
    assert check.verdict == "warn" and check.fix is not None and "GLOO_SOCKET_IFNAME" in check.fix
    assert check_own_name({"GLOO_SOCKET_IFNAME": "eth0"}).verdict == "ok"
    monkeypatch.setattr(network, "lookup", lambda host: ["10.0.0.1"])
    assert check_own_name({}).verdict == "ok"


def test_floors_are_what_deepspeed_takes():
    """Two buffers of 32 MiB and two of 1 MiB for each process:
    deepspeed/ops/csrc/cpu/comm/shm.cpp.
    """
    deepspeed = pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    source = Path(deepspeed.__file__).parent / "ops/csrc/cpu/comm/shm.cpp"
    text = source.read_text()
    assert (
        "#define MAX_BUF_SIZE 1048576 * 32" in text
        and "#define NAIVE_ALLREDUCE_THRESHOLD 1048576" in text
    )
    assert "char buffer[2 * NAIVE_ALLREDUCE_THRESHOLD + 2 * MAX_BUF_SIZE]" in text
    assert host.SHM_PER_PROCESS_BYTES == 2 * MIB + 2 * 32 * MIB
