"""What a launch decides before it starts anything and after a failure."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from launching import ROOT, run_cli

from finetune.commands.launch import launch_spec
from finetune.commands.launch.command import _hold_port
from finetune.commands.launch.launch_spec import LaunchSpec, make_launch_spec, variables
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
from finetune.runtime.nodes import Nodes, expand_nodelist, nodes_here
from finetune.runtime.ports import LOOPBACK, hold_port, listening_address, listens
from finetune.storage import launch_record
from finetune.storage.checkpoint_files import CheckpointWriter
from finetune.storage.launch_record import LaunchRecord, command_digest, describe, still_runs


def free_run_of_ports(count: int) -> int:
    """The first of so many ports in a row that are free now."""
    for first in range(20_000, 60_000, 97):
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("", port)))
            return first
    raise AssertionError("no free ports")


def test_the_next_free_port_is_held():
    first = free_run_of_ports(11)
    with contextlib.ExitStack() as taken:
        for address, port in ((LOOPBACK, first), ("", first + 1)):
            taken.enter_context(socket.create_server((address, port)))
        held = hold_port(first, address="")
        assert (held.number, held.taken) == (first + 2, (first, first + 1))
        with pytest.raises(OSError):
            socket.create_server((LOOPBACK, held.number))
        # what connects before the store is there waits in the queue
        assert listens(LOOPBACK, held.number, 1)
        held.close()
        assert not listens(LOOPBACK, held.number, 1)
        for port in range(first + 2, first + 10):
            taken.enter_context(socket.create_server(("", port)))
        with pytest.raises(StateError, match=f"(?s){first} to {first + 9} is free.*--master-port"):
            hold_port(first, address="")
    assert launch_ports.candidates(65530) == (65530, 65531, 65532, 65533, 65534, 65535)


def test_several_nodes_need_the_port_that_they_were_given():
    """The others look for node 0 there, and nowhere else."""
    first = free_run_of_ports(2)
    nodes = Nodes(2, 0, LOOPBACK, first)
    with socket.create_server((LOOPBACK, first)):
        with pytest.raises(StateError, match=f"port {first} is taken on this machine") as error:
            _hold_port(nodes)
        assert f"({first + 1} is free here)" in str(error.value) and error.value.exit_code == 2
        held = _hold_port(replace(nodes, count=1))
        assert (held.number, held.taken) == (first + 1, (first,))
        held.close()


def test_the_port_listens_at_an_address_of_this_machine(monkeypatch):
    assert listening_address(LOOPBACK) == LOOPBACK and listening_address("::1") in ("::1", "")
    assert launch_ports.own_addresses("203.0.113.9") == []
    assert listening_address("203.0.113.9") == ""
    # what other nodes find under a name is known only if it is one address that leads here from
    # outside
    found = {"alone": ["192.0.2.7"], "loopback": ["127.0.1.1"], "two": ["192.0.2.7", "2001:db8::7"]}
    monkeypatch.setattr(launch_ports, "own_addresses", found.get)
    assert [listening_address(name) for name in found] == ["192.0.2.7", "", ""]
    for address, reached_at in ((LOOPBACK, LOOPBACK), ("127.0.0.2", "127.0.0.2"), ("", LOOPBACK)):
        held = hold_port(None, address=address)
        assert held.number > 0 and held.reached_at == reached_at
        assert listens(reached_at, held.number, 1)
        assert listens(LOOPBACK, held.number, 1) == (address != "127.0.0.2")
        held.close()


def test_nodes_from_variables_and_flags():
    given = {"NNODES": "4", "NODE_RANK": "2", "MASTER_ADDR": "a", "MASTER_PORT": "7"}
    assert nodes_here(given) == Nodes(4, 2, "a", 7)
    assert nodes_here(given, count=3, rank=1, address="b", port=8) == Nodes(3, 1, "b", 8)
    assert nodes_here({"NODE_RANK": "0", "MASTER_ADDR": "a"}) == Nodes(1, 0, LOOPBACK, None)
    assert nodes_here({**given, "MASTER_PORT": ""}).port == 29500
    for wrong, said in (
        ({}, ["NODE_RANK is not set", "MASTER_ADDR is not set"]),
        ({"NODE_RANK": "2", "MASTER_ADDR": "a"}, ["node rank 2 of 2 nodes", "0 to 1"]),
        ({"NODE_RANK": "first", "MASTER_ADDR": "a"}, ["NODE_RANK=first is not a number"]),
    ):
        with pytest.raises((ConfigError, Problems)) as error:
            nodes_here({"NNODES": "2", **wrong})
        assert all(text in str(error.value) for text in [*said, "fix:"])


def test_nodes_from_slurm(monkeypatch, tmp_path: Path):
    with monkeypatch.context() as patch:
        patch.setattr(launch_nodes.shutil, "which", lambda name: None)
        step = {"SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}
        assert nodes_here(step) == Nodes(2, 1, "gpu07", 29500)
        assert nodes_here({**step, "MASTER_ADDR": "10.0.0.1"}).address == "10.0.0.1"
        outside_of_srun = {"SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_NODEID": "0"}
        assert nodes_here(outside_of_srun).count == 1
        with pytest.raises(ConfigError, match="several launches on node 1"):
            nodes_here({**step, "SLURM_LOCALID": "1"})
    tool = tmp_path / "scontrol"
    tool.write_text('#!/bin/sh\n[ "$1 $2 $3" = "show hostnames x[1-2]" ] && printf "a\\nb\\n"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert launch_nodes.slurm_hosts("x[1-2]") == ["a", "b"]
    assert launch_nodes.slurm_hosts("y[1-2]") == ["y1", "y2"], "scontrol failed"


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("n[01-03,7],gpu5,a-b.c", "n01 n02 n03 n7 gpu5 a-b.c"),
        ("n[9-11]", "n9 n10 n11"),
        ("r[1-2]n[1,3]-ib", "r1n1-ib r1n3-ib r2n1-ib r2n3-ib"),
        *((wrong, None) for wrong in ("", "n[a-b]", "n1,,n2", "n[1-2", "n1]")),
    ],
)
def test_node_lists(nodelist: str, hosts: str | None):
    if hosts is None:
        with pytest.raises(ConfigError, match="cannot be read"):
            expand_nodelist(nodelist)
    else:
        assert expand_nodelist(nodelist) == hosts.split()


FACTS = {"interface": None, "report_to": (), "npu_variables": {}}


def values(
    device_type: str, processes: int, nodes: int, timeout_seconds: int, *own: str, **more: Any
) -> dict[str, str]:
    """What is set beside the user's own variables, NAME=VALUE."""
    numbers = {"processes": processes, "nodes": nodes, "timeout_seconds": timeout_seconds}
    user = {"HOME": "/nowhere"} | dict(each.split("=", 1) for each in own)
    facts = FACTS | numbers | more
    return {name: value for name, value, _ in variables(user, device_type=device_type, **facts)}


def test_variables_for_npus(tmp_path: Path):
    npus = ("npu", 4, 2, 1800)
    facts = {"interface": "eth1", "report_to": ("wandb",)}
    found = values(*npus, **facts)
    assert found == {
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 4)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        "HCCL_CONNECT_TIMEOUT": "1800",
        "HCCL_EXEC_TIMEOUT": "1800",
        "GLOO_SOCKET_IFNAME": "eth1",
        "HCCL_SOCKET_IFNAME": "=eth1",
        "WANDB_MODE": "offline",
    }
    for name in found:  # the user's own always stay
        assert name not in values(*npus, f"{name}=x", **facts) | values(*npus, f"{name}=", **facts)
    asked = {"npu_variables": npu_variables(("core-binding", "task-queue"), 512)}
    added = {"CPU_AFFINITY_CONF": "2", "TASK_QUEUE_ENABLE": "2", "HCCL_BUFFSIZE": "512"}
    assert values(*npus, **asked).items() >= added.items()
    assert "TASK_QUEUE_ENABLE" not in values(*npus, "TASK_QUEUE_ENABLE=0", **asked)
    assert not added.keys() & values("cuda", 2, 1, 60, **asked).keys()
    short = values("npu", 2, 1, 20)  # HCCL takes 120 to 7200
    assert (short["HCCL_CONNECT_TIMEOUT"], short["HCCL_EXEC_TIMEOUT"]) == ("120", "20")
    # a login of wandb
    assert "WANDB_MODE" not in values(*npus, "WANDB_API_KEY=k", **facts)
    for machine, is_login in (("api.wandb.ai", True), ("other", False)):
        (tmp_path / ".netrc").write_text(f"machine {machine}\n  login user\n  password wandb\n")
        assert launch_spec.has_wandb_login({"HOME": str(tmp_path)}) == is_login
    assert launch_spec.interface_to(LOOPBACK) is launch_spec.interface_to("no such host.") is None


def test_variables_elsewhere():
    cuda = values("cuda", 2, 1, 60)
    names = "OMP_NUM_THREADS PYTORCH_CUDA_ALLOC_CONF TORCH_ELASTIC_SHUTDOWN_TIMEOUT WANDB_MODE"
    assert sorted(cuda) == names.split()
    assert cuda["WANDB_MODE"] == "disabled"
    assert values("cuda", 2, 2, 60, interface="ib0")["NCCL_SOCKET_IFNAME"] == "=ib0"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in values("cpu", 2, 1, 60)
    left = {"WORLD_SIZE": "4", "RANK": "0", "MASTER_PORT": "1", "MASTER_ADDR": "a", "OWN": "1"}
    assert launch_spec.without_stale(left) == {"OWN": "1"}


TINY = "--config ds_configs/zero3.json --device-type cpu"
NODE = "--nproc 1 --nnodes 2 --master-addr 127.0.0.1"


def spec(words: str, monkeypatch, **environment: str) -> LaunchSpec:
    for name in (*launch_spec.STALE, "NNODES", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    made = make_launch_spec(*read_launch_options(words.split()))
    assert isinstance(made, LaunchSpec)
    return made


def test_processes_of_all_nodes_count_for_the_batch(monkeypatch):
    words = f"--nproc 2 {NODE[10:]} --node-rank 0 sft {TINY} --global-batch-size 16"
    config = spec(words, monkeypatch).config
    assert config.gradient_accumulation_steps == 16 // (4 * config.micro_batch_size)


def test_what_old_scripts_set(monkeypatch):
    made = spec(f"--nproc 1 sft {TINY}", monkeypatch, WORLD_SIZE="4")
    assert made.stale == {"WORLD_SIZE": "4"} and "WORLD_SIZE" not in made.environment
    made = spec(
        f"{NODE} --node-rank 0 sft {TINY}", monkeypatch, FINETUNE_RENDEZVOUS_SECRET="correct horse"
    )
    assert "correct horse" not in repr(made)
    (note,) = made.notes
    assert note.startswith("FINETUNE_RENDEZVOUS_SECRET is set and not used any more")
    monkeypatch.delenv("FINETUNE_RENDEZVOUS_SECRET")
    preset = "--config ds_configs/pretrain_gpu2_balanced.json --device-type cpu"
    for value, more in (("0", "--compile false"), ("1", "--compile true"), ("x", "")):
        made = spec(f"--nproc 2 pretrain {preset}", monkeypatch, TORCH_COMPILE=value)
        assert made.flags == tuple(f"{preset} {more}".split())
        assert made.notes == ((f"TORCH_COMPILE={value} is taken as {more}",) if more else ())
    made = spec(f"--nproc 2 pretrain {preset} --compile true", monkeypatch, TORCH_COMPILE="0")
    assert made.flags[-2:] == ("--compile", "true"), "a flag stays"


@pytest.mark.parametrize(
    ("words", "said", "variables"),
    [
        (f"sft {TINY}", "was itself started as a worker", {"RANK": "0", "LOCAL_RANK": "0"}),
        ("--nproc 0 sft", "'0' processes", {}),
        ("--nproc x sft", "'x' processes", {}),
        (f"--nproc 1 sft {TINY}", "TIMEOUT=soon", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"}),
        ("stf --config x", "'stf' is no kind of run", {}),
        ("--nodes 2 sft", "did you mean --nnodes", {}),
        ("", "sft|pretrain", {}),
    ],
)
def test_what_is_refused(words: str, said: str, variables: dict[str, str], monkeypatch):
    with pytest.raises((ConfigError, Problems)) as error:
        spec(words, monkeypatch, **variables)
    assert said in str(error.value)


def test_nodes_of_one_launch_know_each_other_by_their_flags(monkeypatch):
    first, second, other = (
        spec(f"{NODE} --node-rank {rank} sft {TINY} --seed {seed}", monkeypatch).digest
        for rank, seed in ((0, 1), (1, 1), (1, 2))
    )
    assert first == second != other


def test_dry_run_and_refusals_start_nothing(tmp_path: Path):
    """Devices are counted as the workers will see them: three simulated NPUs."""
    run = ["launch", "--lang", "zh", "--log-dir", tmp_path / "logs"]
    words = "--dry-run sft --config ds_configs/zero3.json --deepspeed none"
    words += " --micro-batch-size 1 --global-batch-size 12 --timeout-seconds 60"
    paths = os.pathsep.join([str(ROOT / "tests" / "fake_npu"), str(ROOT)])
    variables = {"PYTHONPATH": paths, "FAKE_NPU_COUNT": "3"}
    variables |= {"WANDB_MODE": "online", "OMP_NUM_THREADS": None}
    shown = run_cli([*run, *words.split()], module="finetune", env=variables)
    assert shown.returncode == 0, shown.stderr
    assert "环境变量：OMP_NUM_THREADS=" in shown.stdout and "WANDB_MODE" not in shown.stdout
    assert '"-m", "finetune.sft", "--config"' in shown.stdout
    assert "3 x npu" in shown.stdout and "HCCL_EXEC_TIMEOUT=60" in shown.stdout
    refused = run_cli([*run, "sft", *TINY.split(), "--lern-rate", "1"], module="finetune")
    assert refused.returncode == 2
    assert refused.stderr.count("[ERROR]") == 1 and "--learning-rate" in refused.stderr
    assert "Traceback" not in refused.stderr and not (tmp_path / "logs").exists()


def test_help_of_the_run_is_shown_without_a_look_at_devices(monkeypatch, capsys):
    monkeypatch.setattr(launch_spec, "_devices", None)
    with pytest.raises(SystemExit) as left:
        spec("pretrain --help", monkeypatch)
    assert left.value.code == 0 and "--total-batch-size" in capsys.readouterr().out


FLAGS = (
    "--nproc --nproc-per-node --nnodes --node-rank --master-addr --master-port --max-restarts"
    " --log-dir --lang --dry-run"
)


def test_the_flags_are_frozen():
    names = {name for name in flags_of(LaunchOptions) if name not in LaunchOptions.positional}
    assert {flag(name) for name in (*names, *LaunchOptions.aliases)} == set(FLAGS.split())
    for typed in ("--log-dir", "--log_dir"):  # a folder may have the name of a kind
        options, flags = read_launch_options([typed, "sft", "pretrain", "--seed", "1"])
        assert (options.log_dir, options.kind, flags) == ("sft", "pretrain", ["--seed", "1"])


CURABLE = {"peer_died", "collective_timeout", "device_oom"}


@pytest.mark.parametrize(
    ("result", "causes", "progressed", "restart", "code"),
    [
        (AttemptResult({0: 0, 1: 0}), [], True, False, 0),
        (AttemptResult({0: 2, 1: -15}), [], False, False, 2),
        (AttemptResult({1: 4, 0: 3}), [], False, True, 4),
        # it says itself that there are no smaller microbatches
        (AttemptResult({0: 1}), ["device_oom"], True, False, 1),
        (AttemptResult({0: 1, 1: 3}), ["nan_loss"], True, False, 1),
        (AttemptResult({0: 1}), ["peer_died", "unknown"], False, True, 1),
        (AttemptResult({0: 1}), ["unknown"], False, False, 1),
        (AttemptResult({0: 1}), ["unknown"], True, True, 1),
        (AttemptResult({0: -9, 1: -15}), [], False, True, 1),
        (AttemptResult({0: 1, 1: -15}), [], False, False, 1),
        (AttemptResult({0: 1}, lost_nodes=[1]), ["collective_timeout"], True, True, 1),
        (AttemptResult({0: -15}, others={1: 1}), [], False, True, 1),
        (AttemptResult({0: 3}, others={1: 1}), [], False, True, 1),
        (AttemptResult({0: 3}, others={1: 3}), [], False, False, 3),
        (AttemptResult({0: -15}, others={1: 2}), [], False, False, 2),
        (AttemptResult({0: -15}, others={1: 4}), [], False, True, 4),
        (AttemptResult({0: -15}, stop_signal=15), [], False, False, 143),
        (AttemptResult({0: -15, 1: 3}, stop_signal=15), [], False, False, 3),
        (AttemptResult({0: 3}, stop_signal=15, others={1: 1}), [], True, False, 3),
        (AttemptResult(problem="nodes are missing"), [], False, False, 1),
        (AttemptResult(problem="the connection is lost", can_pass=True), [], False, True, 1),
        (AttemptResult(problem="stopped", stop_signal=2), [], False, False, 130),
    ],
)
def test_the_policy_and_the_exit_code(result, causes, progressed, restart, code):
    assert result.exit_code == code
    for left in (1, 0):
        given = {"progressed": progressed, "attempts_left": left}
        decided, why = decide_restart(result, causes, CURABLE, **given)
        assert decided == (restart and left > 0) and why


def test_every_end_is_told():
    result = AttemptResult({1: 1, 0: -15}, lost_nodes=[3, 4, 5], others={1: 4, 6: 3})
    with speaking("zh"):
        lines = result.lines(Nodes(16, 0, "10.0.0.1", 29500))
    for part, line in zip(("1", "SIGTERM", "3-5", "4"), lines, strict=True):
        assert part in line and "{" not in line and not line.isascii()
    assert "10.0.0.1" in lines[2]


@pytest.mark.parametrize(
    ("resume", "saved", "attempt", "resumed"),
    [
        ("auto", (5,), 2, False),  # it does so by itself
        ("never", (), 1, False),
        ("never", (), 2, True),
        # killed before it saved: from that checkpoint again, not from step 0
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
    more = ["--resume", "auto"] if resumed else []
    assert made.worker_arguments(attempt) == ["-u", "-m", "finetune.sft", "--seed", "1", *more]


# What a console shows has a + before it.
LINES = """\
+[INFO] before
-[rank1]: Traceback (most recent call last):
+[INFO] rank 0 goes on
-[rank1]:   File "x.py", line 1, in f
+
-[rank1]: During handling of the above exception, another exception occurred:
-[rank1]: Traceback (most recent call last):
+[rank1]: RuntimeError: the error
-W1121 13:47:16.695000 15005 .venv/lib/torch/distributed/api.py:1028] Sending process 15100 closing signal SIGTERM
-[W1121 13:47:16.695 socket.cpp:755] [c10d] The client socket cannot be initialized
-Exception raised from recvBytes at Utils.hpp:1 (most recent call first):
-frame #0: c10::Error::Error + 0x80 (0x7f in libc10.so)
-
+[ERROR] after"""


def test_tracebacks_are_folded_rank_by_rank():
    fold = TracebackFold()
    for line in LINES.splitlines():
        assert fold.shows(line[1:].encode()) == (line[0] == "+"), line
    assert fold.folded == LINES.count("\n-")


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
    reading, writing = os.pipe()
    os.close(reading)
    with LaunchLog(tmp_path / "a.log", os.fdopen(writing, "wb", buffering=0)) as log:
        log.info("said")
        log.folded()  # which shows what there is
        log.info("and more")
    assert (tmp_path / "a.log").read_text() == "[INFO] said\n[INFO] and more\n"


def test_a_process_that_has_ended_does_not_run():
    waiting = [sys.executable, "-S", "-c", "input()"]
    with subprocess.Popen(waiting, stdin=subprocess.PIPE) as process:
        described = describe(process.pid, "worker")
        assert still_runs(described)
        process.stdin.close()
        # it has ended, and nobody has taken notice
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not still_runs(described) and describe(process.pid, "worker") is None
    assert not still_runs(described) and describe(process.pid, "worker") is None


def test_a_command_that_is_not_there_yet_is_waited_for(monkeypatch):
    """Between fork and exec a process has none; the digest of nothing would be anybody's."""
    looks = iter([[], [], ["python", "-m", "finetune.sft"]])
    monkeypatch.setattr(psutil.Process, "cmdline", lambda self: next(looks))
    expected = command_digest(["python", "-m", "finetune.sft"])
    assert describe(os.getpid(), "worker").command_digest == expected
    monkeypatch.setattr(launch_record, "COMMAND_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(psutil.Process, "cmdline", lambda self: [])
    assert describe(os.getpid(), "worker").command_digest is None


def test_the_record_of_processes_is_frozen(tmp_path: Path):
    """The form in docs/guides/launching.md, which cleaning up relies on."""
    recorded = LaunchRecord(tmp_path / "a.log", Path("runs/x"))
    recorded.add_workers({3: os.getpid()}, attempt=2)
    recorded.end()
    path = tmp_path / "a.processes.json"
    facts = json.loads(path.read_text())
    names = "ended_at log output_dir processes started_at version"
    assert sorted(facts) == names.split()
    run = str(Path("runs/x").absolute())
    assert (facts["version"], facts["log"], facts["output_dir"]) == (1, "a.log", run)
    names = "attempt boot_id command_digest host pid rank role start_ticks start_time"
    first, second = facts["processes"]
    assert sorted(first) == names.split() and path.stat().st_mode & 0o022 == 0
    assert (first["role"], first["rank"], first["attempt"]) == ("supervisor", None, None)
    assert (second["role"], second["rank"], second["attempt"]) == ("worker", 3, 2)
    digest = command_digest(psutil.Process().cmdline())
    assert first["command_digest"] == digest and len(digest) == 64
