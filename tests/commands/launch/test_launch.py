"""What a launch decides before it starts anything and after a failure: ports, nodes, environment,
policy, log.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import socket
import string
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import ROOT, run_cli

from finetune.commands.launch import launch_spec
from finetune.commands.launch.command import _hold_port
from finetune.commands.launch.launch_spec import (
    LaunchSpec,
    has_wandb_login,
    interface_to,
    make_launch_spec,
    variables,
    without_stale,
)
from finetune.commands.launch.log import LaunchLog, TracebackFold
from finetune.commands.launch.options import LaunchOptions, read_launch_options
from finetune.commands.launch.supervise import AttemptResult, decide_restart
from finetune.config.fields import flag
from finetune.config.options import flags_of
from finetune.errors import ConfigError, Problems, StateError
from finetune.runtime import nodes as launch_nodes
from finetune.runtime import ports as launch_ports
from finetune.runtime.language import speaking
from finetune.runtime.launch_environment import npu_variables
from finetune.runtime.nodes import expand_nodelist, nodes_here
from finetune.runtime.ports import (
    LOOPBACK,
    candidates,
    hold_port,
    listening_address,
    listens,
    own_addresses,
)
from finetune.storage import launch_record
from finetune.storage.checkpoint_files import CheckpointWriter
from finetune.storage.launch_record import LaunchRecord, command_digest, describe, still_runs

# ---------------------------------------------------------------- ports


def free_run_of_ports(count: int) -> int:
    """The first of so many ports in a row that are free now."""
    for first in range(20_000, 60_000, 97):
        held = []
        try:
            held = [socket.create_server(("", port)) for port in range(first, first + count)]
            return first
        except OSError:
            continue
        finally:
            for listener in held:
                listener.close()
    raise AssertionError("no free ports")


def test_the_next_free_port_is_held_and_the_taken_ones_are_told():
    first = free_run_of_ports(3)
    with socket.create_server(("127.0.0.1", first)), socket.create_server(("", first + 1)):
        held = hold_port(first, address="")
        assert (held.number, held.taken) == (first + 2, (first, first + 1))
        with pytest.raises(OSError):
            socket.create_server(("127.0.0.1", held.number))
        assert listens("127.0.0.1", held.number, 1), (
            "what connects before the store is there waits in the queue"
        )
        held.close()
    assert not listens("127.0.0.1", held.number, 1)


def test_ten_tries_and_no_more():
    first = free_run_of_ports(11)
    taken = [socket.create_server(("", port)) for port in range(first, first + 10)]
    try:
        with pytest.raises(StateError, match=f"{first} to {first + 9} is free") as error:
            hold_port(first, address="")
        assert "--master-port" in str(error.value)
    finally:
        for listener in taken:
            listener.close()
    assert candidates(65530) == (65530, 65531, 65532, 65533, 65534, 65535)


def test_several_nodes_need_the_port_that_they_were_given(monkeypatch):
    """The others look for node 0 there, and nowhere else."""
    first = free_run_of_ports(2)
    nodes = launch_nodes.Nodes(2, 0, "127.0.0.1", first)
    with socket.create_server(("127.0.0.1", first)):
        with pytest.raises(StateError, match=f"port {first} is taken on this machine") as error:
            _hold_port(nodes)
        assert f"({first + 1} is free here)" in str(error.value) and error.value.exit_code == 2
        held = _hold_port(replace(nodes, count=1))
        assert (held.number, held.taken) == (first + 1, (first,))
        held.close()


def test_one_node_takes_any_port_of_the_loopback():
    held = hold_port(None, address=LOOPBACK)
    assert held.number > 0 and held.listener.getsockname()[0] == "127.0.0.1" == held.reached_at
    held.close()


def test_an_address_of_this_machine_is_listened_at_and_no_other(monkeypatch):
    assert listening_address("127.0.0.1") == "127.0.0.1" and listening_address("::1") in ("::1", "")
    assert own_addresses("203.0.113.9") == [] and listening_address("203.0.113.9") == ""
    # names: what other nodes find under them is known only where it is one address that leads here
    # from outside
    found = {"alone": ["192.0.2.7"], "loopback": ["127.0.1.1"], "two": ["192.0.2.7", "2001:db8::7"]}
    monkeypatch.setattr(launch_ports, "own_addresses", found.get)
    assert [listening_address(name) for name in found] == ["192.0.2.7", "", ""]
    held = hold_port(None, address="127.0.0.2")
    assert listens("127.0.0.2", held.number, 1) and not listens("127.0.0.1", held.number, 1)
    assert held.reached_at == "127.0.0.2"
    held.close()
    assert hold_port(None, address="").reached_at == "127.0.0.1"


# ---------------------------------------------------------------- nodes


def test_nodes_from_variables_and_flags():
    set_ = {"NNODES": "4", "NODE_RANK": "2", "MASTER_ADDR": "a", "MASTER_PORT": "7"}
    assert nodes_here(set_) == launch_nodes.Nodes(4, 2, "a", 7)
    assert nodes_here(set_, count=3, rank=1, address="b", port=8) == launch_nodes.Nodes(
        3, 1, "b", 8
    )
    assert nodes_here({"NODE_RANK": "0", "MASTER_ADDR": "a"}).count == 1
    assert nodes_here({"MASTER_ADDR": "a"}) == launch_nodes.Nodes(1, 0, "127.0.0.1", None)
    assert nodes_here({**set_, "MASTER_PORT": ""}).port == 29500


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({}, ["NODE_RANK is not set", "MASTER_ADDR is not set"]),
        ({"NODE_RANK": "0", "MASTER_ADDR": ""}, ["MASTER_ADDR is not set"]),
        ({"NODE_RANK": "2", "MASTER_ADDR": "a"}, ["node rank 2 of 2 nodes", "0 to 1"]),
        ({"NODE_RANK": "first", "MASTER_ADDR": "a"}, ["NODE_RANK=first is not a number"]),
    ],
)
def test_what_is_missing_or_wrong_is_said_together(given_: dict[str, str], said: list[str]):
    with pytest.raises((ConfigError, Problems)) as error:
        nodes_here({"NNODES": "2", **given_})
    for text in said:
        assert text in str(error.value)
    assert "fix:" in str(error.value)


def test_slurm(monkeypatch):
    monkeypatch.setattr(launch_nodes.shutil, "which", lambda name: None)
    step = {"SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}
    assert nodes_here(step) == launch_nodes.Nodes(2, 1, "gpu07", 29500)
    assert nodes_here({**step, "MASTER_ADDR": "10.0.0.1"}).address == "10.0.0.1", (
        "the user's own wins"
    )
    assert nodes_here({"SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_NODEID": "0"}).count == 1, (
        "outside of srun"
    )
    with pytest.raises(ConfigError, match="several launches on node 1"):
        nodes_here({**step, "SLURM_LOCALID": "1"})


def test_scontrol_is_asked_where_it_is_there(monkeypatch, tmp_path: Path):
    tool = tmp_path / "scontrol"
    tool.write_text(
        '#!/bin/sh\n[ "$1 $2 $3" = "show hostnames x[1-2]" ] && printf "from-it-1\\nfrom-it-2\\n"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert launch_nodes.slurm_hosts("x[1-2]") == ["from-it-1", "from-it-2"]
    assert launch_nodes.slurm_hosts("y[1-2]") == ["y1", "y2"], "it failed, so the list is read here"


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("node1", ["node1"]),
        ("n[01-03,7],gpu5", ["n01", "n02", "n03", "n7", "gpu5"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("r[1-2]n[1,3]-ib", ["r1n1-ib", "r1n3-ib", "r2n1-ib", "r2n3-ib"]),
        ("a-b.c,d_e", ["a-b.c", "d_e"]),
    ],
)
def test_node_lists(nodelist: str, hosts: list[str]):
    assert expand_nodelist(nodelist) == hosts


@pytest.mark.parametrize("nodelist", ["", "n[1-", "n[a-b]", "n1,,n2", "n[1-2", "n1]"])
def test_node_lists_that_are_none(nodelist: str):
    with pytest.raises(ConfigError, match="cannot be read"):
        expand_nodelist(nodelist)


@given(
    st.lists(
        st.tuples(
            st.text(string.ascii_lowercase, min_size=1, max_size=4),
            st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), min_size=1, max_size=3),
            st.integers(1, 4),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_node_lists_as_slurm_writes_them(parts):
    """Written from the hosts, read back."""
    hosts, written = [], []
    for name, spans, digits in parts:
        ranges = []
        for first, more in spans:
            hosts += [f"{name}{number:0{digits}d}" for number in range(first, first + more + 1)]
            ranges.append(f"{first:0{digits}d}" + (f"-{first + more:0{digits}d}" if more else ""))
        written.append(f"{name}[{','.join(ranges)}]")
    # a range as wide as its first number: 9-11 with one digit has 9, 10, 11
    assert expand_nodelist(",".join(written)) == hosts


# ---------------------------------------------------------------- environment

Facts = dict[str, Any]


def facts_of(
    device_type: str, processes: int, nodes: int, timeout_seconds: int, **more: Any
) -> Facts:
    """The arguments of `variables`."""
    given = {
        "device_type": device_type,
        "processes": processes,
        "nodes": nodes,
        "timeout_seconds": timeout_seconds,
    }
    return {"interface": None, "report_to": (), "npu_variables": {}} | given | more


NPUS = facts_of("npu", 4, 2, 1800, interface="eth1", report_to=("wandb",))


def values(facts: Facts, environment: dict[str, str] | None = None) -> dict[str, str]:
    return {
        name: value
        for name, value, _ in variables({"HOME": "/nowhere", **(environment or {})}, **facts)
    }


def test_what_is_set_for_npus_on_several_nodes():
    found = values(NPUS)
    assert found.pop("OMP_NUM_THREADS") == str(max(1, len(os.sched_getaffinity(0)) // 4))
    assert found == {
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        "HCCL_CONNECT_TIMEOUT": "1800",
        "HCCL_EXEC_TIMEOUT": "1800",
        "GLOO_SOCKET_IFNAME": "eth1",
        "HCCL_SOCKET_IFNAME": "=eth1",
        "WANDB_MODE": "offline",
    }


def test_tuning_of_npus_is_set_for_npus_alone():
    asked = npu_variables(("core-binding", "task-queue"), 512)
    added = {"CPU_AFFINITY_CONF": "2", "TASK_QUEUE_ENABLE": "2", "HCCL_BUFFSIZE": "512"}
    assert values(NPUS | {"npu_variables": asked}).items() >= added.items()
    assert not added.keys() & values(facts_of("cuda", 2, 1, 60, npu_variables=asked)).keys()
    assert "TASK_QUEUE_ENABLE" not in values(
        NPUS | {"npu_variables": asked}, {"TASK_QUEUE_ENABLE": "0"}
    )


def test_what_is_set_elsewhere():
    cuda = values(facts_of("cuda", 2, 1, 60))
    assert set(cuda) == {
        "OMP_NUM_THREADS",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        "PYTORCH_CUDA_ALLOC_CONF",
        "WANDB_MODE",
    }
    assert cuda["WANDB_MODE"] == "disabled"
    assert values(facts_of("cuda", 2, 2, 60, interface="ib0"))["NCCL_SOCKET_IFNAME"] == "=ib0"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in values(facts_of("cpu", 2, 1, 60))
    short = values(facts_of("npu", 2, 1, 20))
    assert (short["HCCL_CONNECT_TIMEOUT"], short["HCCL_EXEC_TIMEOUT"]) == (
        "120",
        "20",
    ), "HCCL takes 120 to 7200"


def test_the_users_own_always_stay_and_every_variable_has_its_reason():
    for name in values(NPUS):
        for own in ("something", ""):
            assert name not in values(NPUS, {name: own})
    with speaking("zh"):
        translated = {variable.name: variable.why for variable in variables({}, **NPUS)}
    for variable in variables({}, **NPUS):
        assert (
            variable.why and translated[variable.name] and variable.why != translated[variable.name]
        )


def test_wandb_logins(tmp_path: Path):
    assert "WANDB_MODE" not in values(NPUS, {"WANDB_API_KEY": "k"})
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password k\n")
    assert has_wandb_login({"HOME": str(tmp_path)}) and "WANDB_MODE" not in values(
        NPUS, {"HOME": str(tmp_path)}
    )
    (tmp_path / ".netrc").write_text("machine other\n  login user\n  password wandb\n")
    assert not has_wandb_login({"HOME": str(tmp_path)})


def test_what_other_launchers_left_does_not_reach_the_workers():
    left = {
        "WORLD_SIZE": "4",
        "RANK": "0",
        "MASTER_PORT": "1",
        "MASTER_ADDR": "a",
        "HCCL_BUFFSIZE": "220",
    }
    assert without_stale(left) == {"HCCL_BUFFSIZE": "220"}


def test_the_loopback_is_no_way_between_nodes():
    assert interface_to("127.0.0.1") is None and interface_to("no such host.") is None


# ---------------------------------------------------------------- what is launched

TINY = "--config ds_configs/zero3.json --device-type cpu"


def spec(words: str, monkeypatch, **environment: str) -> LaunchSpec:
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "NNODES",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    made = make_launch_spec(*read_launch_options(words.split()))
    assert isinstance(made, LaunchSpec)
    return made


def test_flags_of_the_run_are_passed_word_by_word(monkeypatch):
    made = spec(f"--nproc_per_node=2 --max_restarts 1 sft {TINY} --max_steps=3", monkeypatch)
    assert made.flags == (*TINY.split(), "--max_steps=3") and made.processes == 2
    assert (
        made.config.gradient_accumulation_steps * 2 * made.config.micro_batch_size
        == made.config.global_batch_size
    )


def test_processes_of_all_nodes_count_for_the_batch(monkeypatch):
    words = (
        f"--nproc 2 --nnodes 2 --node-rank 0 --master-addr 127.0.0.1 sft {TINY}"
        " --global-batch-size 16"
    )
    made = spec(words, monkeypatch)
    assert made.config.gradient_accumulation_steps == 16 // (4 * made.config.micro_batch_size)


def test_a_stale_world_size_is_set_aside(monkeypatch):
    made = spec(f"--nproc 1 sft {TINY}", monkeypatch, WORLD_SIZE="4")
    assert made.stale == {"WORLD_SIZE": "4"} and "WORLD_SIZE" not in made.environment


def test_launch_in_a_worker_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="was itself started as a worker"):
        spec(f"sft {TINY}", monkeypatch, RANK="0", LOCAL_RANK="0")


@pytest.mark.parametrize(
    ("value", "flags"), [("0", ("--compile", "false")), ("1", ("--compile", "true")), ("x", ())]
)
def test_torch_compile_of_the_guides(monkeypatch, value: str, flags: tuple[str, ...]):
    preset = "--config ds_configs/pretrain_gpu2_balanced.json --device-type cpu"
    made = spec(f"--nproc 2 pretrain {preset}", monkeypatch, TORCH_COMPILE=value)
    assert made.flags == (*preset.split(), *flags)
    assert made.notes == (
        (f"TORCH_COMPILE={value} is taken as --compile {flags[1]}",) if flags else ()
    )
    own = spec(f"--nproc 2 pretrain {preset} --compile true", monkeypatch, TORCH_COMPILE="0")
    assert own.flags[-2:] == ("--compile", "true"), "a flag stays"


@pytest.mark.parametrize(
    ("words", "said"), [("--nproc 0 sft", "'0' processes"), ("--nproc x sft", "'x' processes")]
)
def test_wrong_numbers(words: str, said: str, monkeypatch):
    with pytest.raises(ConfigError, match=said):
        spec(words, monkeypatch)


def test_a_time_to_shut_down_that_is_no_number_is_refused_before_anything_starts(monkeypatch):
    with pytest.raises(ConfigError, match="TORCH_ELASTIC_SHUTDOWN_TIMEOUT=soon"):
        spec(f"--nproc 1 sft {TINY}", monkeypatch, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="soon")


def test_a_secret_of_the_nodes_is_not_used_and_not_shown(monkeypatch):
    node = f"--nproc 1 --nnodes 2 --node-rank 0 --master-addr 127.0.0.1 sft {TINY}"
    made = spec(node, monkeypatch, FINETUNE_RENDEZVOUS_SECRET="correct horse battery")
    assert "correct horse" not in repr(made)
    (note,) = made.notes
    assert note.startswith("FINETUNE_RENDEZVOUS_SECRET is set and not used any more")


@pytest.mark.parametrize("typed", ["--log-dir", "--log_dir"])
def test_a_folder_may_have_the_name_of_a_kind(typed: str):
    options, flags = read_launch_options([typed, "sft", "pretrain", "--seed", "1"])
    assert (options.log_dir, options.kind, flags) == ("sft", "pretrain", ["--seed", "1"])


def test_nodes_of_one_launch_know_each_other_by_their_flags(monkeypatch):
    node = "--nproc 1 --nnodes 2 --master-addr 127.0.0.1"
    first, second, other = (
        spec(f"{node} --node-rank {rank} sft {TINY} --seed {seed}", monkeypatch).digest
        for rank, seed in ((0, 1), (1, 1), (1, 2))
    )
    assert first == second != other


def test_dry_run_and_help_start_nothing(tmp_path: Path):
    words = [
        "launch",
        "--lang",
        "zh",
        "--nproc",
        "2",
        "--log-dir",
        tmp_path / "logs",
        "--dry-run",
        "sft",
        *TINY.split(),
    ]
    shown = run_cli(words, module="finetune", env={"WANDB_MODE": "online", "OMP_NUM_THREADS": None})
    assert shown.returncode == 0, shown.stderr
    assert "环境变量：OMP_NUM_THREADS=" in shown.stdout and "WANDB_MODE" not in shown.stdout
    assert '"-m", "finetune.sft", "--config"' in shown.stdout and "2 x cpu" in shown.stdout
    assert not (tmp_path / "logs").exists()


def test_devices_are_counted_as_the_workers_will_see_them():
    """On three simulated NPUs."""
    words = [
        "launch",
        "--dry-run",
        "sft",
        "--config",
        "ds_configs/zero3.json",
        "--deepspeed",
        "none",
    ]
    words += ["--micro-batch-size", "1", "--global-batch-size", "12", "--timeout-seconds", "60"]
    paths = os.pathsep.join([str(ROOT / "tests" / "fake_npu"), str(ROOT)])
    shown = run_cli(words, module="finetune", env={"PYTHONPATH": paths, "FAKE_NPU_COUNT": "3"})
    assert shown.returncode == 0, shown.stderr
    assert "3 x npu" in shown.stdout and "HCCL_EXEC_TIMEOUT=60" in shown.stdout


def test_the_device_type_of_a_file_counts(monkeypatch, tmp_path: Path):
    (tmp_path / "run.yaml").write_text(
        "device_type: cpu\nmodel: data_samples/tiny-qwen3\ndata: [data_samples/train.jsonl]\n"
    )
    made = spec(f"sft --config {tmp_path / 'run.yaml'} --output-dir x", monkeypatch)
    assert (made.device_type, made.processes) == ("cpu", 1)


def test_help_of_the_run_is_shown_without_a_look_at_devices(monkeypatch, capsys):
    monkeypatch.setattr(launch_spec, "_devices", None)
    with pytest.raises(SystemExit) as left:
        spec("pretrain --help", monkeypatch)
    assert left.value.code == 0 and "--total-batch-size" in capsys.readouterr().out


def test_settings_that_are_wrong_are_refused_before_anything_is_written(tmp_path: Path):
    words = [
        "launch",
        "--nproc",
        "2",
        "--log-dir",
        tmp_path / "logs",
        "sft",
        *TINY.split(),
        "--lern-rate",
        "1",
    ]
    refused = run_cli(words, module="finetune")
    assert refused.returncode == 2
    assert refused.stderr.count("[ERROR]") == 1 and "--learning-rate" in refused.stderr
    assert "Traceback" not in refused.stderr and not (tmp_path / "logs").exists()


def test_the_flags_are_frozen():
    names = {name for name in flags_of(LaunchOptions) if name not in LaunchOptions.positional}
    assert {flag(name) for name in (*names, *LaunchOptions.aliases)} == {
        "--nproc", "--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port",
        "--max-restarts", "--log-dir", "--lang", "--dry-run",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--nproc 2", "sft|pretrain"),
        ("stf --config x", "'stf' is no kind of run"),
        ("--nodes 2 sft", "did you mean --nnodes"),
        ("--nnodes two sft", "'two'"),
        ("", "sft|pretrain"),
    ],
)
def test_a_command_line_that_is_wrong(words: str, said: str):
    with pytest.raises((ConfigError, Problems)) as error:
        read_launch_options(words.split())
    assert said in str(error.value)


# ---------------------------------------------------------------- what a restart cures

CURABLE = {"peer_died", "collective_timeout", "device_oom"}


@pytest.mark.parametrize(
    ("result", "causes", "progressed", "restart"),
    [
        (AttemptResult({0: 0, 1: 0}), [], True, False),
        (AttemptResult({0: 3, 1: 3}), [], True, False),
        (AttemptResult({0: 2, 1: -15}), [], False, False),
        (AttemptResult({1: 4, 0: -15}), ["device_oom"], False, True),
        # it says itself that there are no smaller microbatches
        (AttemptResult({0: 1}), ["device_oom"], True, False),
        (AttemptResult({0: 1, 1: 1}), ["nan_loss"], True, False),
        (AttemptResult({0: 1}), ["peer_died", "unknown"], False, True),
        (AttemptResult({0: 1}), ["unknown"], False, False),
        (AttemptResult({0: 1}), ["unknown"], True, True),
        (AttemptResult({0: -9, 1: -15}), [], True, True),
        (AttemptResult({0: 1}, lost_nodes=[1]), ["collective_timeout"], True, True),
        (AttemptResult({0: -15}, others={1: 1}), [], False, True),
        (AttemptResult({0: 1}, others={1: 1}), ["nan_loss"], True, False),
        (AttemptResult({0: -15}, others={1: 2}), [], False, False),
        (AttemptResult({0: -15}, others={1: 4}), [], False, True),
        (AttemptResult({0: -15}, stop_signal=15), [], False, False),
        (AttemptResult(problem="nodes are missing"), [], False, False),
        (AttemptResult(problem="the connection is lost", can_pass=True), [], False, True),
    ],
)
def test_the_policy(result: AttemptResult, causes: list[str], progressed: bool, restart: bool):
    for left in (1, 0):
        given = {"progressed": progressed, "attempts_left": left}
        decided, why = decide_restart(result, causes, CURABLE, **given)
        assert decided == (restart and left > 0)
        with speaking("zh"):
            _, translated = decide_restart(result, causes, CURABLE, **given)
        assert why and translated and why != translated


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (AttemptResult({0: 0}), 0),
        (AttemptResult({0: 1, 1: -15}), 1),
        (AttemptResult({0: -11}), 1),
        (AttemptResult({0: 2, 1: -15}), 2),
        (AttemptResult({0: -15, 1: 3}, stop_signal=15), 3),
        (AttemptResult({0: 3, 1: 3}), 3),
        (AttemptResult({0: 1, 1: 3}), 1),
        (AttemptResult({0: 3}, others={1: 1}), 1),
        (AttemptResult({0: 3}, others={1: 3}), 3),
        (AttemptResult({0: 3}, stop_signal=15, others={1: 1}), 3),
        (AttemptResult({1: 4, 0: 3}), 4),
        (AttemptResult({0: -15}, stop_signal=15), 143),
        (AttemptResult({0: 4}), 4),
        (AttemptResult({0: -15}, others={1: 2}), 2),
        (AttemptResult(problem="nothing found"), 1),
        (AttemptResult(problem="stopped", stop_signal=2), 130),
    ],
)
def test_the_exit_code_is_the_runs(result: AttemptResult, code: int):
    assert result.exit_code == code


# ---------------------------------------------------------------- the log

LINES = """\
[INFO] before
[rank1]: Traceback (most recent call last):
[INFO] rank 0 goes on
[rank1]:   File "x.py", line 1, in f
[rank1]:     g()

[rank1]: During handling of the above exception, another exception occurred:

[rank1]: Traceback (most recent call last):
[rank1]:   File "x.py", line 2, in g
[rank1]: RuntimeError: the error
W1121 13:47:16.695000 15005 .venv/lib/torch/distributed/api.py:1028] Sending process 15100 closing signal SIGTERM
[W1121 13:47:16.695 socket.cpp:755] [c10d] The client socket cannot be initialized
Exception raised from recvBytes at Utils.hpp:1 (most recent call first):
frame #0: c10::Error::Error + 0x80 (0x7f in libc10.so)

[ERROR] after"""
SHOWN = [
    "[INFO] before",
    "[INFO] rank 0 goes on",
    "",
    "",
    "[rank1]: RuntimeError: the error",
    "[ERROR] after",
]


def test_tracebacks_are_folded_rank_by_rank():
    fold = TracebackFold()
    assert [line for line in LINES.splitlines() if fold.shows(line.encode())] == SHOWN
    assert fold.folded == len(LINES.splitlines()) - len(SHOWN)


def test_the_console_follows_the_file_and_a_part_keeps_its_line_numbers(tmp_path: Path):
    console = io.BytesIO()
    with LaunchLog(tmp_path / "logs" / "a.log", console) as log:
        log.info("first\nsecond")
        log.warning("third")
        middle = log.size_bytes
        os.write(log.descriptor, "子进程\n".encode())
        log.error("last")
        with log.since(middle) as part:
            assert part.read_text().splitlines() == ["", "", "", "子进程", "[ERROR] last"]
    text = "[INFO] first\n  second\n[WARNING] third\n子进程\n[ERROR] last\n"
    assert console.getvalue().decode() == text == (tmp_path / "logs" / "a.log").read_text()


def test_a_console_that_is_gone_does_not_matter(tmp_path: Path):
    console = io.BytesIO()
    console.close()
    with LaunchLog(tmp_path / "a.log", console) as log:
        log.info("said")
        time.sleep(0.5)
        log.info("and more")
    assert (tmp_path / "a.log").read_text() == "[INFO] said\n[INFO] and more\n"


def test_a_recorded_process_is_told_from_others():
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    described = describe(process.pid, "worker", rank=1, attempt=2)
    assert described is not None and still_runs(described)
    process.communicate(b"\n")
    assert describe(process.pid, "worker") is None and not still_runs(described)


def test_a_process_whose_clock_was_set_is_still_itself():
    described = describe(os.getpid(), "worker")
    assert still_runs(replace(described, start_time=described.start_time + 5))
    assert not still_runs(replace(described, start_ticks=described.start_ticks + 1))
    assert not still_runs(replace(described, boot_id="of another boot"))
    before = replace(described, boot_id=None, start_ticks=None)
    assert still_runs(before) and not still_runs(replace(before, start_time=before.start_time + 5))


def test_a_command_that_is_not_there_yet_is_waited_for(monkeypatch):
    """Between fork and exec a process has none; the digest of nothing would be anybody's."""
    looks = iter([[], [], ["python", "-m", "finetune.sft"]])
    monkeypatch.setattr(psutil.Process, "cmdline", lambda self: next(looks))
    assert describe(os.getpid(), "worker").command_digest == command_digest(
        ["python", "-m", "finetune.sft"]
    )


def test_one_without_a_command_is_nobody_to_be_ended(monkeypatch):
    monkeypatch.setattr(launch_record, "COMMAND_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(psutil.Process, "cmdline", lambda self: [])
    assert describe(os.getpid(), "worker").command_digest is None


def test_one_that_has_ended_does_not_run():
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE
    ) as process:
        described = describe(process.pid, "worker")
        process.stdin.close()
        # it has, and nobody has taken notice
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not still_runs(described) and describe(process.pid, "worker") is None


def test_the_record_of_processes_is_frozen(tmp_path: Path):
    """The form in docs/guides/launching.md, which cleaning up relies on."""
    recorded = LaunchRecord(tmp_path / "a.log", Path("runs/x"))
    recorded.add_workers({3: os.getpid()}, attempt=2)
    recorded.end()
    facts = json.loads((tmp_path / "a.processes.json").read_text())
    assert set(facts) == {"version", "log", "output_dir", "started_at", "ended_at", "processes"}
    assert (facts["version"], facts["log"], facts["output_dir"]) == (
        1,
        "a.log",
        str(Path("runs/x").absolute()),
    )
    first, second = facts["processes"]
    named = {
        "pid",
        "start_time",
        "command_digest",
        "role",
        "rank",
        "attempt",
        "host",
        "boot_id",
        "start_ticks",
    }
    assert set(first) == named and (tmp_path / "a.processes.json").stat().st_mode & 0o022 == 0
    assert (first["role"], first["rank"], first["attempt"]) == ("supervisor", None, None)
    assert (second["role"], second["rank"], second["attempt"]) == ("worker", 3, 2)
    words = "\0".join(psutil.Process().cmdline()).encode()
    assert (
        first["command_digest"] == hashlib.sha256(words).hexdigest()
        and len(first["command_digest"]) == 64
    )


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_end_is_told_in_both_languages(language: str):
    nodes = launch_nodes.Nodes(2, 0, "10.0.0.1", 29500)
    result = AttemptResult({1: 1, 0: -15}, others={1: 4, 3: 3})
    with speaking(language):
        lines = result.lines(nodes)
    parts = ("1", "SIGTERM", "4")
    assert [part in line for part, line in zip(parts, lines, strict=True)] == [True] * 3
    assert all("{" not in line and line.isascii() == (language == "en") for line in lines)


def test_nodes_that_do_not_report_are_named():
    nodes = launch_nodes.Nodes(16, 0, "10.0.0.1", 29500)
    first, second = AttemptResult({0: 1}, lost_nodes=[3, 4, 5]).lines(nodes)
    assert first == "rank 0 ended with exit code 1"
    assert second.startswith("node 3-5 did not report how it ended") and "10.0.0.1" in second


@pytest.mark.parametrize(
    ("resume", "saved", "attempt", "resumed"),
    [
        ("auto", (5,), 2, False),  # it does so by itself
        ("never", (), 1, False),
        # killed before it saved: from that checkpoint again, not from step 0
        ("/old/checkpoint-10", (), 2, False),
        ("/old/checkpoint-10", (5,), 2, False),
        ("/old/checkpoint-10", (5, 12), 2, True),
        ("/old/checkpoint-10", (5, 12), 1, False),
    ],
)
def test_another_attempt_resumes_what_the_first_has_left(tmp_path, resume, saved, attempt, resumed):
    (tmp_path / "status.json").write_text("{}")
    for step in saved:
        with CheckpointWriter(tmp_path, step, f"t{step}") as writer:
            (writer.folder / "state.json").write_text("{}")
            writer.publish(writer.seal(["state.json"]), {})
    config = SimpleNamespace(resume=resume, output_dir=str(tmp_path))
    made = LaunchSpec("finetune.sft", ("--seed", "1"), config, "cpu", None, 1, 0, 1, {})  # type: ignore[arg-type]
    expected = [
        "-u",
        "-m",
        "finetune.sft",
        "--seed",
        "1",
        *(["--resume", "auto"] if resumed else []),
    ]
    assert made.worker_arguments(attempt) == expected
