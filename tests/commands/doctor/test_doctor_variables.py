"""Doctor on variables: what contradicts this machine is found, and what is right is silent."""

from __future__ import annotations

import pytest

from finetune.commands.doctor import network
from finetune.commands.doctor.check import Check
from finetune.commands.doctor.network import check_variables
from finetune.runtime.language import speaking

INTERFACES = {
    "lo": ["127.0.0.1"],
    "eth0": ["10.0.0.1"],
    "eth1": ["10.1.0.1"],
    "docker0": ["172.17.0.1"],
}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "local_addresses", lambda: INTERFACES)
    monkeypatch.setattr(network, "usable_cores", lambda: 64)


def found(environment: dict[str, str], **facts) -> list[Check]:
    return check_variables(environment, **({"processes": 1, "nodes": 1} | facts))


TWO_NODES = {"nodes": 2}
BROKEN = [
    ("stale_rank", "fail", {"RANK": "0", "WORLD_SIZE": "4"}, {}),
    ("stale_rank", "warn", {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}, {}),
    ("omp_threads", "warn", {"OMP_NUM_THREADS": "32"}, {"processes": 8}),
    ("socket_interface", "fail", {"GLOO_SOCKET_IFNAME": "eth"}, {}),  # gloo takes whole names
    ("socket_interface", "fail", {"GLOO_SOCKET_IFNAME": "lo"}, TWO_NODES),
]  # fmt: skip
RIGHT = [
    ({}, {}),
    ({"WORLD_SIZE": "4", "RANK": "3", "TORCHELASTIC_RUN_ID": "x"}, {}),
    ({"RANK": "0", "WORLD_SIZE": "1"}, {}),
    ({"OMP_NUM_THREADS": "8"}, {"processes": 8}),
    ({"GLOO_SOCKET_IFNAME": "lo"}, {}),
    ({"HCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "eth7,eth1"}, TWO_NODES),
]


@pytest.mark.parametrize(("name", "verdict", "environment", "facts"), BROKEN)
def test_a_contradiction_is_found_by_its_rule_alone(
    name: str, verdict: str, environment: dict, facts: dict
):
    (check,) = found(environment, **facts)
    with speaking("zh"):
        (chinese,) = found(environment, **facts)
    assert (check.name, check.verdict) == (chinese.name, chinese.verdict) == (name, verdict)
    assert check.fix and chinese.fix and chinese.what != check.what
    for variable, value in environment.items():
        if variable in check.what:
            assert value in check.what and value in chinese.what, "the texts carry the value"


@pytest.mark.parametrize(("environment", "facts"), RIGHT)
def test_what_is_right_is_silent(environment: dict, facts: dict):
    (check,) = found(environment, **facts)
    assert (check.name, check.verdict) == ("variables", "ok")


def test_several_are_reported_together():
    names = {
        check.name for check in found({"RANK": "0", "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "ib9"})
    }
    assert names == {"stale_rank", "socket_interface"}
