"""Doctor on variables: what contradicts this machine is found, and what is right is silent."""

from __future__ import annotations

import pytest

from finetune.commands.doctor import network
from finetune.commands.doctor.network import check_variables

INTERFACES = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"], "eth1": ["10.1.0.1"]}
STALE = "RANK=0 WORLD_SIZE=4"


@pytest.mark.parametrize(
    ("words", "processes", "nodes", "expected"),
    [
        (STALE, 1, 1, {"stale_rank": "fail"}),
        (f"{STALE} MASTER_ADDR=10.0.0.1 MASTER_PORT=29500", 1, 1, {"stale_rank": "warn"}),
        ("OMP_NUM_THREADS=32", 8, 1, {"omp_threads": "warn"}),
        ("GLOO_SOCKET_IFNAME=eth", 1, 1, {"socket_interface": "fail"}),  # it takes whole names
        ("GLOO_SOCKET_IFNAME=lo", 1, 2, {"socket_interface": "fail"}),
        (f"{STALE} GLOO_SOCKET_IFNAME=x", 1, 1, {"stale_rank": "fail", "socket_interface": "fail"}),
        ("", 1, 1, {"variables": "ok"}),
        (f"{STALE} TORCHELASTIC_RUN_ID=x", 1, 1, {"variables": "ok"}),
        ("RANK=0 WORLD_SIZE=1", 1, 1, {"variables": "ok"}),
        ("OMP_NUM_THREADS=8", 8, 1, {"variables": "ok"}),
        ("GLOO_SOCKET_IFNAME=lo", 1, 1, {"variables": "ok"}),
        ("HCCL_SOCKET_IFNAME=eth GLOO_SOCKET_IFNAME=eth7,eth1", 1, 2, {"variables": "ok"}),
    ],
)
def test_contradictions(
    words: str,
    processes: int,
    nodes: int,
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(network, "local_addresses", lambda: INTERFACES)
    monkeypatch.setattr(network, "usable_cores", lambda: 64)
    checks = check_variables(dict(word.split("=") for word in words.split()), processes, nodes)
    assert {check.name: check.verdict for check in checks} == expected
    for check in checks:
        assert (check.fix is None) == (check.verdict == "ok")
