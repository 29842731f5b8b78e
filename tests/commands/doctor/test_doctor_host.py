"""Doctor on the host and the network: limits by hand, and real ones where they cost little (tmpfs,
a bound port).
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from finetune.commands.doctor import host, network
from finetune.commands.doctor.host import check_disk, check_shared_memory
from finetune.commands.doctor.network import check_master_reachable, check_own_name, check_port
from finetune.runtime.host import HostUse
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


@pytest.mark.parametrize(
    ("available", "needed", "verdict"),
    [(40, 0, "ok"), (40, 39, "ok"), (40, 41, "fail"), (1, 0, "warn")],
)
def test_host_memory(available: int, needed: int, verdict: str):
    use = HostUse(None, 8.0, (64 - available) * GIB, 64 * GIB)
    check = host.check_host_memory(use, needed * GIB, "the weights")
    assert check.verdict == verdict
    assert not needed or "the weights" in check.what


def test_a_real_small_shared_memory(tmp_path: Path):
    with tmpfs(tmp_path / "shm", "size=64m") as folder:
        assert check_shared_memory(1, 0, folder).verdict == "ok"
        assert check_shared_memory(1, 8, folder).verdict == "warn"  # loaders may get along
        check = check_shared_memory(8, 0, folder)
        assert check.verdict == "warn" and "64.0 MiB free" in check.what
        assert "--shm-size=2g" in check.fix and "workers" not in check.fix
        with (folder / "left by a crash").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 30 * MIB)
        assert check_shared_memory(8, 0, folder).verdict == "fail"
        assert check_shared_memory(2, 4, folder).verdict == "warn"
    assert check_shared_memory(8, 0, tmp_path / "nothing").verdict == "skip"


def test_limits():
    for limit, pinned, nodes, verdict in (
        (64 << 10, True, 1, "warn"),
        (64 << 10, False, 2, "warn"),
        (64 << 10, False, 1, "ok"),
        (-1, True, 2, "ok"),
    ):
        assert host.check_locked_memory(pinned, nodes, limit).verdict == verdict
    for limit, verdict in ((256, "fail"), (1024, "warn"), (65535, "ok"), (-1, "ok")):
        assert host.check_open_files(limit).verdict == verdict


# ---------------------------------------------------------------- disk


def test_real_disks(tmp_path: Path):
    with tmpfs(tmp_path / "full", "size=300m") as folder:
        assert check_disk("output", folder / "runs" / "new").verdict == "warn"
        with (folder / "filler").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 290 * MIB)
        check = check_disk("output", folder / "runs" / "new")
        assert check.verdict == "fail" and "10.0 MiB free" in check.what
        assert not (folder / "runs").exists()
    with tmpfs(tmp_path / "no_inodes", "size=8g,nr_inodes=50") as folder:
        check = check_disk("output", folder)
        assert check.verdict == "fail" and "more files" in check.what
    with tmpfs(tmp_path / "read_only", "size=8g,ro") as folder:
        check = check_disk("cache", folder / "cache")
        assert (check.name, check.verdict) == ("disk_cache", "fail")
        assert "cannot be written" in check.what


def test_the_folder_that_will_be_made_is_judged_by_the_one_above(tmp_path: Path):
    assert check_disk("output", tmp_path / "runs", needed_bytes=1 << 60).verdict == "fail"
    assert host.existing_parent(tmp_path / "a" / "b") == tmp_path
    assert host.existing_parent(Path("runs-that-are-not-there/x")) == Path.cwd()


def test_compilers(tmp_path: Path):
    empty = {"PATH": str(tmp_path)}
    check = host.check_compiler("DeepSpeed's CPU Adam", empty)
    assert check.verdict == "fail" and "DeepSpeed's CPU Adam cannot be built" in check.what
    assert host.check_compiler("", empty).verdict == "skip"
    (tmp_path / "my-g++").write_text("#!/bin/sh\n")
    (tmp_path / "my-g++").chmod(0o755)
    assert host.check_compiler("x", {**empty, "CXX": "my-g++ -O2"}).verdict == "ok"


# ---------------------------------------------------------------- the port


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_really_taken_port(taken_port: int):
    check = check_port(Nodes(1, 0, "127.0.0.1", taken_port))
    free = check.values["next_free"]
    assert check.verdict == "fail" and f"MASTER_PORT={free}" in check.fix
    assert taken_port < free <= taken_port + 10
    assert network.holder_of(taken_port) == os.getpid() == check.values["holder"]
    with socket.create_server(("127.0.0.1", free)):
        pass  # it is free indeed, and was let go


@pytest.mark.parametrize(
    ("nodes", "free", "holder", "verdict", "said"),
    [
        (Nodes(1, 0, "a", None), 29503, None, "warn", "launch takes a free one"),
        (Nodes(1, 0, "a", None), 29500, None, "ok", "29500 is free"),
        (Nodes(2, 0, "a", 29500), 29503, None, "fail", "MASTER_PORT=29503 on every node"),
        (Nodes(2, 0, "a", 29500), None, 7, "fail", "by pid 7"),
        (Nodes(2, 1, "a", 29500), None, 7, "skip", "not here"),
    ],
)
def test_ports(
    nodes: Nodes,
    free: int | None,
    holder: int | None,
    verdict: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(network, "first_free_port", lambda first: free)
    monkeypatch.setattr(network, "holder_of", lambda port: holder)
    check = check_port(nodes)
    assert check.verdict == verdict and said in f"{check.what} {check.fix}"


# ---------------------------------------------------------------- nodes and addresses


@pytest.mark.parametrize(
    ("words", "verdict", "said"),
    [
        ("", "ok", "one node"),
        ("NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1", "ok", "node 1 of 2"),
        ("NNODES=2", "fail", "NODE_RANK is not set"),
        ("MASTER_PORT=abc", "fail", "MASTER_PORT"),
    ],
)
def test_nodes(words: str, verdict: str, said: str):
    nodes, checks = network.check_nodes(dict(word.split("=") for word in words.split()))
    assert {check.verdict for check in checks} == {verdict}
    assert (nodes is None) == (verdict == "fail")
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
    check = network.check_master_address(nodes)
    assert check.verdict == verdict and said in check.what


def test_reaching_the_first_node_for_real(taken_port: int, monkeypatch: pytest.MonkeyPatch):
    assert network.lookup("no-such-host.invalid") == []
    assert network.is_loopback(network.lookup("localhost")[0])
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    for port, result, text in ((taken_port, "open", "answers"), (closed, "refused", "nobody")):
        check = check_master_reachable(Nodes(2, 1, "127.0.0.1", port))
        assert (check.verdict, check.values["result"]) == ("ok", result) and text in check.what
    monkeypatch.setattr(network, "reach", lambda host, port: "no answer in 3 s")
    gone = check_master_reachable(Nodes(2, 1, "10.9.9.9", 29500))
    assert gone.verdict == "fail" and "29500" in gone.fix
    assert check_master_reachable(Nodes(2, 0, "x", 29500)).verdict == "skip"


def test_a_host_name_that_is_loopback_misleads_gloo(monkeypatch: pytest.MonkeyPatch):
    for addresses, verdict in ((["127.0.1.1"], "warn"), (["10.0.0.1"], "ok"), ([], "warn")):
        monkeypatch.setattr(network, "lookup", lambda host, found=addresses: found)
        check = check_own_name({})
        assert check.verdict == verdict and (verdict == "ok" or "GLOO_SOCKET" in check.fix)
    assert check_own_name({"GLOO_SOCKET_IFNAME": "eth0"}).verdict == "ok"


def test_floors_are_what_deepspeed_takes():
    """Two buffers of 32 MiB and two of 1 MiB for each process."""
    deepspeed = pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    text = (Path(deepspeed.__file__).parent / "ops/csrc/cpu/comm/shm.cpp").read_text()
    for line in (
        "#define MAX_BUF_SIZE 1048576 * 32",
        "#define NAIVE_ALLREDUCE_THRESHOLD 1048576",
        "char buffer[2 * NAIVE_ALLREDUCE_THRESHOLD + 2 * MAX_BUF_SIZE]",
    ):
        assert line in text
    assert host.SHM_PER_PROCESS_BYTES == 2 * MIB + 2 * 32 * MIB
