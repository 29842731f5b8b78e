"""Doctor on variables: each contradiction is found by its rule alone, and what is right is
silent.
"""

from __future__ import annotations

import pytest

from finetune.commands.doctor.check import Check
from finetune.commands.doctor.collectives import matching_interfaces
from finetune.commands.doctor.facts import Facts
from finetune.commands.doctor.variables import RULES, RULES_FOR, check_variables
from finetune.runtime.language import speaking

INTERFACES = {
    "lo": ["127.0.0.1"],
    "eth0": ["10.0.0.1"],
    "eth1": ["10.1.0.1"],
    "docker0": ["172.17.0.1"],
}


def found(environment: dict[str, str], **facts) -> list[Check]:
    settings = {"interfaces": INTERFACES, "device_type": "npu", "cores": 64} | facts
    return check_variables(Facts(environment, **settings))


RT, CUDA = "ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
GPU = {"device_type": "cuda", "devices_here": 2}
TWO_NODES = {"nodes": 2}
BROKEN = [
    ("stale_world_size", "warn", {"WORLD_SIZE": "4"}, {}),
    ("stale_rank", "fail", {"RANK": "0", "WORLD_SIZE": "4"}, {}),
    ("stale_rank", "warn", {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}, {}),
    ("stale_rank", "fail", {"RANK": "4", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x"}, {}),
    ("omp_threads", "warn", {"OMP_NUM_THREADS": "32"}, {"processes": 8}),
    ("omp_threads", "warn", {"OMP_NUM_THREADS": "many"}, {}),
    ("visible_devices", "warn", {RT: ""}, {}),
    ("visible_devices", "warn", {CUDA: "-1"}, GPU),
    ("visible_devices", "fail", {RT: "0,1,2,7"}, {"devices_here": 4}),
    ("visible_devices", "fail", {CUDA: "0,1,2"}, GPU),
    ("visible_devices", "fail", {CUDA: "0,0"}, GPU),
    ("visible_devices", "fail", {RT: "npu0"}, {}),
    ("ascend_visible_devices", "fail", {"ASCEND_VISIBLE_DEVICES": "4,5,6,7", RT: "4,5,6,7"}, {}),
    ("visible_devices", "fail", {"ASCEND_VISIBLE_DEVICES": "4,5", RT: "4,5"}, {"devices_here": 2}),
    ("ds_accelerator", "fail", {"DS_ACCELERATOR": "cuda"}, {"deepspeed": True}),
    ("npu_allocator", "fail", {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:32"}, {}),
    ("npu_allocator", "fail", {"PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb=32"}, {}),
    ("cuda_allocator", "warn", {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync,expandable_segments:True"}, GPU),
    ("cuda_allocator", "warn", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:32",
                                "PYTORCH_ALLOC_CONF": "expandable_segments:True"}, GPU),
    ("cuda_allocator", "fail", {"PYTORCH_ALLOC_CONF": "expandable_segments"}, GPU),
    ("socket_interface", "fail", {"HCCL_SOCKET_IFNAME": "enp189"}, {}),
    ("socket_interface", "fail", {"GLOO_SOCKET_IFNAME": "eth"}, {}),  # gloo takes whole names
    ("socket_interface", "fail", {"NCCL_SOCKET_IFNAME": "lo"}, {**GPU, **TWO_NODES}),
    ("socket_interface", "warn", {"HCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth1"}, {}),
    ("hccl_if_ip", "fail", {"HCCL_IF_IP": "10.0.0.9"}, {}),
    ("hccl_if_ip", "fail", {"HCCL_IF_IP": "127.0.0.1"}, TWO_NODES),
    ("hccl_if_ip", "warn", {"HCCL_IF_IP": "10.0.0.1", "HCCL_SOCKET_IFNAME": "eth1"}, {}),
    ("hccl_if_base_port", "fail", {"HCCL_IF_BASE_PORT": "29480", "MASTER_PORT": "29511"}, {}),
    ("hccl_if_base_port", "fail", {"HCCL_IF_BASE_PORT": "29480"}, {}),  # the default MASTER_PORT
    ("hccl_if_base_port", "fail", {"HCCL_IF_BASE_PORT": "80"}, {}),
    ("hccl_ephemeral_ports", "warn", {}, {**TWO_NODES, "ephemeral_ports": (32768, 60999)}),
    ("hccl_timeouts", "warn", {"HCCL_CONNECT_TIMEOUT": "7200"}, {}),
    ("hccl_timeouts", "warn", {"HCCL_EXEC_TIMEOUT": "600"}, {}),
    ("hccl_timeouts", "warn", {"HCCL_EXEC_TIMEOUT": "1836"}, {"timeout_seconds": 600}),
    ("hccl_timeouts", "fail", {"HCCL_CONNECT_TIMEOUT": "30min"}, {}),
    ("hccl_whitelist", "fail", {"HCCL_WHITELIST_DISABLE": "0"}, {}),
    ("nccl_paths", "warn", {"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "mlx5"}, GPU),
    ("nccl_paths", "warn", {"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "NVL"}, GPU),
    ("nccl_paths", "warn", {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}, GPU),
    ("nccl_paths", "fail", {"NCCL_IB_DISABLE": "1", "NCCL_NET": "IB"}, GPU),
    ("synchronous_launches", "warn", {"ASCEND_LAUNCH_BLOCKING": "1", "TASK_QUEUE_ENABLE": "0"}, {}),
    ("wandb", "warn", {"WANDB_MODE": "disabled", "WANDB_API_KEY": "x"}, {}),
]  # fmt: skip
RIGHT = [
    ({}, {}),
    ({"WORLD_SIZE": "4", "RANK": "3", "TORCHELASTIC_RUN_ID": "x"}, {}),
    ({"RANK": "0", "WORLD_SIZE": "1"}, {}),
    ({"OMP_NUM_THREADS": "8"}, {"processes": 8}),
    ({RT: "0,1,2,3"}, {"devices_here": 4}),
    ({CUDA: "GPU-8f3b,MIG-1"}, GPU),
    ({CUDA: "7"}, {"device_type": "npu", "devices_here": 2}),  # of the other kind
    ({"ASCEND_VISIBLE_DEVICES": "4,5,6,7", RT: "0,1,2,3"}, {}),
    ({"DS_ACCELERATOR": "npu"}, {"deepspeed": True}),
    ({"DS_ACCELERATOR": "cuda"}, {}),
    ({"PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:32"}, {}),
    ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:64"}, GPU),
    ({"HCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "eth1"}, {}),
    ({"NCCL_SOCKET_IFNAME": "^lo,docker"}, {**GPU, **TWO_NODES}),
    ({"HCCL_IF_IP": "10.0.0.1", "HCCL_SOCKET_IFNAME": "=eth0"}, TWO_NODES),
    ({"HCCL_IF_IP": "127.0.0.1"}, {}),
    ({"HCCL_IF_BASE_PORT": "60000", "MASTER_PORT": "29500"}, {}),
    ({}, {**TWO_NODES, "ephemeral_ports": (32768, 50000)}),
    ({"HCCL_CONNECT_TIMEOUT": "1800", "HCCL_EXEC_TIMEOUT": "1836"}, {}),
    ({"HCCL_CONNECT_TIMEOUT": "600"}, {}),
    ({"NCCL_IB_DISABLE": "1"}, GPU),
    ({"WANDB_MODE": "offline", "WANDB_API_KEY": "x"}, {}),
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
        if variable in check.what and not variable.endswith("KEY"):
            assert value in check.what and value in chinese.what, "the texts carry the value"
        if variable.endswith("KEY"):
            assert f"={value}" not in check.what + check.fix, "a secret is not shown"


@pytest.mark.parametrize(("environment", "facts"), RIGHT)
def test_what_is_right_is_silent(environment: dict, facts: dict):
    (check,) = found(environment, **facts)
    assert (check.name, check.verdict) == ("variables", "ok")


def test_several_are_reported_together():
    names = {
        check.name
        for check in found({"WORLD_SIZE": "2", "HCCL_IF_IP": "10.0.0.9", "HCCL_IF_BASE_PORT": "80"})
    }
    assert names == {"stale_world_size", "hccl_if_ip", "hccl_if_base_port"}


def test_variables_of_another_device_do_not_matter():
    """A machine's profile may set HCCL's variables for all; a run on its CPU does not read them."""
    for name, _verdict, environment, facts in BROKEN:
        if name.startswith(("hccl", "npu", "nccl", "cuda")):
            (check,) = found(environment, **facts | {"device_type": "cpu"})
            assert check.name == "variables", environment


def test_every_rule_has_an_example():
    """Each rule finds one of the broken examples, so none is there for nothing."""
    settings = {"interfaces": INTERFACES, "device_type": "npu", "cores": 64}
    examples = [
        Facts(environment, **settings | facts) for _name, _verdict, environment, facts in BROKEN
    ]
    for rule in (*RULES, *(rule for rules in RULES_FOR.values() for rule in rules)):
        assert any(rule(facts) is not None for facts in examples), rule.__name__


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
