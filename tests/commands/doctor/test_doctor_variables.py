"""Doctor on variables: each contradiction is found by its rule alone, and what is right is
silent.
"""

from __future__ import annotations

import pytest

from finetune.commands.doctor import network
from finetune.commands.doctor.check import Check
from finetune.commands.doctor.network import check_variables, matching_interfaces
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
    return check_variables(
        environment, **({"device_type": "npu", "processes": 1, "nodes": 1} | facts)
    )


GPU = {"device_type": "cuda"}
TWO_NODES = {"nodes": 2}
BROKEN = [
    ("stale_world_size", "warn", {"WORLD_SIZE": "4"}, {}),
    ("stale_rank", "fail", {"RANK": "0", "WORLD_SIZE": "4"}, {}),
    ("stale_rank", "warn", {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}, {}),
    ("stale_rank", "fail", {"RANK": "4", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x"}, {}),
    ("omp_threads", "warn", {"OMP_NUM_THREADS": "32"}, {"processes": 8}),
    ("omp_threads", "warn", {"OMP_NUM_THREADS": "many"}, {}),
    ("socket_interface", "fail", {"HCCL_SOCKET_IFNAME": "enp189"}, {}),
    ("socket_interface", "fail", {"GLOO_SOCKET_IFNAME": "eth"}, {}),  # gloo takes whole names
    ("socket_interface", "fail", {"NCCL_SOCKET_IFNAME": "lo"}, {**GPU, **TWO_NODES}),
    ("socket_interface", "warn", {"HCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth1"}, {}),
]  # fmt: skip
RIGHT = [
    ({}, {}),
    ({"WORLD_SIZE": "4", "RANK": "3", "TORCHELASTIC_RUN_ID": "x"}, {}),
    ({"RANK": "0", "WORLD_SIZE": "1"}, {}),
    ({"OMP_NUM_THREADS": "8"}, {"processes": 8}),
    ({"HCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "eth1"}, {}),
    ({"NCCL_SOCKET_IFNAME": "^lo,docker"}, {**GPU, **TWO_NODES}),
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
    names = {check.name for check in found({"WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "ib9"})}
    assert names == {"stale_world_size", "socket_interface"}


def test_variables_of_another_device_do_not_matter():
    """A machine's profile may set HCCL's variables for all; a run on its CPU does not read them."""
    (check,) = found({"HCCL_SOCKET_IFNAME": "enp189"}, device_type="cpu")
    assert check.name == "variables"


@pytest.mark.parametrize(
    ("text", "exact", "matched"),
    [
        ("eth", False, {"eth0", "eth1"}),
        ("=eth0", False, {"eth0"}),
        ("^eth,lo", False, {"docker0"}),
        ("^=eth0", False, {"lo", "eth1", "docker0"}),
        ("eth0,docker0", True, {"eth0", "docker0"}),
        ("eth", True, set()),
    ],
)
def test_interfaces_as_nccl_and_hccl_read_them(text: str, exact: bool, matched: set[str]):
    assert matching_interfaces(text, INTERFACES, exact=exact) == matched
