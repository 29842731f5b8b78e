"""launchers/*.sh: what they start, told by a stand-in for python that writes its arguments down; and two real nodes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, environment
from run_helpers import events, sample_ids, status
from shell_blocks import run_together, shell_lines, small

from finetune.device import free_port

SCRIPTS = [ROOT / "launchers" / name for name in ("single_node.sh", "multi_node.sh")]
SINGLE, MULTI = SCRIPTS
TOOLS = ("bash", "date", "mkdir", "tee", "awk", "grep", "wc", "getconf", "dirname")
STAND_IN = """#!{python}
import json, os, sys
if sys.argv[1] != "-c":  # that one asks whether torch is there
    with open({record!r}, "a") as file:
        file.write(json.dumps({{"pid": os.getpid(), "words": sys.argv[1:], "variables": dict(os.environ)}}) + "\\n")
    print("said by", sys.argv[2])
"""
# As the tools of Ascend and NVIDIA print it: on the NPU box the rows with "-" are management chips.
NPU_SMI = """NPU ID    Chip ID   Chip Logic ID   Chip Name
 0         0         0               Ascend 910B3
 0         1         -               Mcu
 1         0         1               Ascend 910B3
 1         1         -               Mcu
 2         0         2               Ascend 910B3
 2         1         -               Mcu
"""
NVIDIA_SMI = "GPU 0: A (UUID: GPU-1)\n  MIG 1g.5gb Device 0: (UUID: MIG-1)\nGPU 1: A (UUID: GPU-2)\n"


class Started:
    """What a launcher did: its process, and the commands it gave to python."""

    def __init__(self, process: subprocess.CompletedProcess, pid: int, record: Path) -> None:
        self.process, self.pid = process, pid
        self.calls = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []

    @property
    def torchrun(self) -> list[str]:
        assert self.process.returncode == 0, self.process.stdout
        assert self.calls[-1]["words"][:2] == ["-m", "torch.distributed.run"]
        return self.calls[-1]["words"][2:]

    def option(self, name: str) -> str:
        return self.torchrun[self.torchrun.index(name) + 1]

    def flags(self) -> list[str]:
        """What finetune.sft gets."""
        return self.torchrun[self.torchrun.index("finetune.sft") + 1 :]


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Started]:
    """Run a script in a folder of its own, where only the tools that it needs exist, and those given."""
    folder, record = tmp_path / "bin", tmp_path / "calls.jsonl"
    folder.mkdir()
    for tool in TOOLS:
        (folder / tool).symlink_to(shutil.which(tool))

    def put(name: str, text: str) -> None:
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)

    put("python", STAND_IN.format(python=sys.executable, record=str(record)))

    def run(script: Path, *flags: str, printed: dict[str, str] | None = None, **variables: str) -> Started:
        record.unlink(missing_ok=True)
        for name, text in (printed or {}).items():
            put(name, f"#!{shutil.which('bash')}\necho '{text}'\n")
        clean = dict.fromkeys(("OMP_NUM_THREADS", "ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"))
        process = subprocess.Popen(
            ["bash", str(script), *flags],
            cwd=tmp_path,
            env=environment({**clean, "PATH": str(folder), **variables}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        said, _ = process.communicate(timeout=60)
        return Started(subprocess.CompletedProcess(process.args, process.returncode, said), process.pid, record)

    return run


NODE = {"NODE_RANK": "0", "MASTER_ADDR": "192.168.1.100"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_the_script_itself(script: Path) -> None:
    text = script.read_text()
    assert len(text.splitlines()) <= 40 and max(map(len, text.splitlines())) <= 120
    for banned in ("pkill", "killall", "export WORLD_SIZE", "export RANK", "rm "):
        assert banned not in text
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: the scripts were not checked")
    checked = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    "variables, missing",
    [
        ({}, ["NODE_RANK", "MASTER_ADDR"]),
        ({"MASTER_ADDR": "a"}, ["NODE_RANK"]),
        ({"NODE_RANK": "0"}, ["MASTER_ADDR"]),
        ({"NODE_RANK": "", "MASTER_ADDR": "a"}, ["NODE_RANK"]),
    ],
)
def test_what_is_missing_is_said(
    start: Callable[..., Started], tmp_path: Path, variables: dict[str, str], missing: list[str]
) -> None:
    started = start(MULTI, **variables)
    assert started.process.returncode == 2 and not started.calls and not (tmp_path / "logs").exists()
    lines = started.process.stdout.splitlines()
    assert lines[:-1] == [f"[ERROR] {name} is not set" for name in missing]
    assert lines[-1].startswith("  fix: ")


@pytest.mark.parametrize(
    "variables, printed, processes",
    [
        ({}, {}, 1),
        ({}, {"npu-smi": NPU_SMI}, 3),
        ({}, {"nvidia-smi": NVIDIA_SMI}, 2),
        ({}, {"npu-smi": "dcmi model initialized failed", "nvidia-smi": NVIDIA_SMI}, 1),
        ({"ASCEND_RT_VISIBLE_DEVICES": "0,1,2,3"}, {"npu-smi": NPU_SMI}, 4),
        ({"CUDA_VISIBLE_DEVICES": "5"}, {"nvidia-smi": NVIDIA_SMI}, 1),
        ({"CUDA_VISIBLE_DEVICES": ""}, {"nvidia-smi": NVIDIA_SMI}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "NPROC_PER_NODE": "7"}, {}, 7),
    ],
)
def test_devices_are_counted(
    start: Callable[..., Started], variables: dict[str, str], printed: dict[str, str], processes: int
) -> None:
    assert start(SINGLE, printed=printed, **variables).option("--nproc-per-node") == str(processes)


def test_flags_pass_through_word_by_word(start: Callable[..., Started]) -> None:
    flags = ["--output-dir", "a folder", "--data", "*.jsonl", "--packing=false", ""]
    for started in (start(SINGLE, *flags), start(MULTI, *flags, **NODE)):
        assert started.flags() == flags
        assert started.calls[0]["words"] == ["-m", "finetune", "inspect", "--rows", "0", *flags]


def test_what_torchrun_is_told(start: Callable[..., Started]) -> None:
    single = start(SINGLE)
    assert (single.option("--nnodes"), single.option("--rdzv-endpoint")) == ("1", "127.0.0.1:0")
    first = start(MULTI, **NODE)
    assert (first.option("--nnodes"), first.option("--rdzv-endpoint")) == ("2", "192.168.1.100:29500")
    assert (first.option("--rdzv-conf"), first.option("--local-addr")) == ("is_host=true", "192.168.1.100")
    assert first.option("--max-restarts") == "3"
    assert start(MULTI, **NODE | {"NODE_RANK": "1"}).option("--rdzv-conf") == "is_host=false"
    other = start(MULTI, **NODE, NNODES="4", MASTER_PORT="7", MAX_RESTARTS="0")
    given = [other.option(name) for name in ("--nnodes", "--rdzv-endpoint", "--max-restarts")]
    assert given == ["4", "192.168.1.100:7", "0"]


@pytest.mark.parametrize("address", ["192.168.1.100", "10.0.0.1", "node-z", "Zeus.local", "fd00::1"])
def test_nodes_keep_their_order(start: Callable[..., Started], address: str) -> None:
    """The rendezvous gives rank 0 to the address that sorts first."""
    ranks = [0, 1, 2, 9, 10, 11, 100]
    given = [start(MULTI, NODE_RANK=str(rank), MASTER_ADDR=address).option("--local-addr") for rank in ranks]
    assert given == sorted(given) and len(set(given)) == len(ranks) and given[0] == address


def test_the_workers_environment(start: Callable[..., Started]) -> None:
    variables: dict[str, Any] = start(SINGLE, NPROC_PER_NODE="1").calls[-1]["variables"]
    assert not {"WORLD_SIZE", "RANK", "LOCAL_RANK"} & set(variables)
    assert int(variables["OMP_NUM_THREADS"]) >= 1
    assert int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) >= 300
    assert variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    own = start(SINGLE, OMP_NUM_THREADS="3", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="5").calls[-1]["variables"]
    assert (own["OMP_NUM_THREADS"], own["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) == ("3", "5")


def test_the_check_before_knows_the_number_of_processes(start: Callable[..., Started]) -> None:
    variables = start(MULTI, **NODE, NNODES="3", NPROC_PER_NODE="8").calls[0]["variables"]
    assert (variables["RANK"], variables["WORLD_SIZE"]) == ("0", "24")


def test_signals_reach_torchrun_and_the_console_is_logged(start: Callable[..., Started], tmp_path: Path) -> None:
    started = start(SINGLE)
    assert started.calls[-1]["pid"] == started.pid, "torchrun takes the place of the shell, so signals go to it"
    (log,) = (tmp_path / "logs").iterdir()
    assert log.read_text() == started.process.stdout
    assert f"log in logs/{log.name}" in log.read_text() and "said by torch.distributed.run" in log.read_text()


def test_two_nodes_and_one_runs_out_of_memory(tmp_path: Path) -> None:
    """The README's two lines on this machine: both nodes' workers are restarted, with smaller rows and the same run."""
    lines = [line for line in shell_lines(ROOT / "README.md") if "multi_node.sh" in line]
    assert [line.split()[0] for line in lines] == ["NODE_RANK=0", "NODE_RANK=1"]
    address = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()} NPROC_PER_NODE=1"
    tiny = " --model data_samples/tiny-qwen3 --micro-batch-size 2 --global-batch-size 16 --log-samples --report-to none"
    here = [small(line.replace("MASTER_ADDR=192.168.1.100", address) + tiny, tmp_path) for line in lines]
    injected = f"{ROOT / 'tests' / 'out_of_memory'}:{ROOT}"
    results = run_together(here, tmp_path, {"PYTHONPATH": injected})
    said = "\n".join(output for _, output in results)
    for log in [word for word in said.split() if word.startswith("logs/")]:
        (ROOT / log).unlink()
    assert [code for code, _ in results] == [0, 0], said
    folder = tmp_path / "qwen32b_lora_zero3"
    starts = events(folder, "start")
    assert [(start["world_size"], start["zero_stage"]) for start in starts] == [(2, 3), (2, 3)]
    assert [start["rows"] for start in starts] == ["rows of at most 4096 tokens", "rows of at most 2048 tokens"]
    assert json.loads((folder / "oom.json").read_text())["step"] == 2
    assert "node 0 of 2" in results[0][1] and "[SUCCESS]" in results[0][1], "rank 0 is on the first node"
    assert "[SUCCESS]" not in results[1][1]
    assert status(folder)["state"] == "done" and len(sample_ids(folder)) == 2


def test_wrong_settings_are_refused_once_and_without_workers(tmp_path: Path) -> None:
    line = "bash launchers/single_node.sh --config ds_configs/zero3.json --lern-rate 1"
    ((code, said),) = run_together([line], tmp_path, {"NPROC_PER_NODE": "2"})
    (log,) = [word for word in said.split() if word.startswith("logs/")]
    (ROOT / log).unlink()
    assert code == 2
    assert said.count("[ERROR]") == 1 and "--learning-rate" in said and "Traceback" not in said
