"""launchers/*: what they start, told by a stand-in for python that writes its arguments down; and
two real nodes.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import PATIENCE_SECONDS, ROOT, environment
from run_helpers import events, sample_ids, status
from shell_blocks import run_together, small

from finetune.runtime.ports import free_port

FOLDER = ROOT / "launchers"
SCRIPTS = sorted([*FOLDER.glob("*.sh"), FOLDER / "slurm.sbatch"])
SINGLE, MULTI, NPUS, GPUS, SLURM = (
    FOLDER / name
    for name in ("single_node.sh", "multi_node.sh", "npu_4.sh", "dual_gpu.sh", "slurm.sbatch")
)
TOOLS = ("bash", "dirname", "mkdir")
STAND_IN = """#!{python}
import json, os, sys
if sys.argv[1] != "-c":  # that one asks whether torch is there
    with open({record!r}, "a") as file:
        file.write(json.dumps({{"pid": os.getpid(), "words": sys.argv[1:], "variables": dict(os.environ)}}) + "\\n")
"""


class Started:
    """What a launcher did: its process, and the one command that it gave to python."""

    def __init__(self, process: subprocess.CompletedProcess, pid: int, record: Path) -> None:
        self.process, self.pid = process, pid
        self.calls = (
            [json.loads(line) for line in record.read_text().splitlines()]
            if record.exists()
            else []
        )

    @property
    def words(self) -> list[str]:
        """What finetune launch gets."""
        assert self.process.returncode == 0, self.process.stdout
        (call,) = self.calls
        assert call["words"][:3] == ["-m", "finetune", "launch"]
        return call["words"][3:]

    @property
    def variables(self) -> dict[str, str]:
        return self.calls[0]["variables"]


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Started]:
    """Run a script in a folder of its own, where only the tools that it needs exist."""
    folder, record = tmp_path / "bin", tmp_path / "calls.jsonl"
    folder.mkdir()
    for tool in TOOLS:
        (folder / tool).symlink_to(shutil.which(tool))
    (folder / "python").write_text(STAND_IN.format(python=sys.executable, record=str(record)))
    (folder / "python").chmod(0o755)
    # srun gives its command to every node; here to this one
    (folder / "srun").write_text('#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n')
    (folder / "srun").chmod(0o755)

    def run(script: Path, *flags: str, **variables: str) -> Started:
        record.unlink(missing_ok=True)
        clean = dict.fromkeys(
            ("NPROC_PER_NODE", "KIND", "NNODES", "PYTHON", "PYTORCH_NPU_ALLOC_CONF")
        )
        process = subprocess.Popen(
            ["bash", str(script), *flags],
            cwd=tmp_path,
            env=environment({**clean, "PATH": str(folder), **variables}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        said, _ = process.communicate(timeout=PATIENCE_SECONDS)
        return Started(
            subprocess.CompletedProcess(process.args, process.returncode, said), process.pid, record
        )

    return run


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_the_script_itself(script: Path) -> None:
    text = script.read_text()
    assert len(text.splitlines()) <= 40 and max(map(len, text.splitlines())) <= 120
    for banned in ("pkill", "killall", "WORLD_SIZE", "export RANK", "rm "):
        assert banned not in text
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: the scripts were not checked")
    checked = subprocess.run(
        ["shellcheck", str(script)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    "script", [SINGLE, MULTI, NPUS, GPUS, SLURM], ids=lambda script: script.name
)
def test_flags_pass_through_word_by_word_and_signals_reach_the_launch(
    start: Callable[..., Started], script: Path
) -> None:
    flags = ["--output-dir", "a folder", "--data", "*.jsonl", "--packing=false", ""]
    preset = {NPUS: ["standard"], GPUS: ["balanced"]}.get(script, [])
    started = start(script, *preset, *flags)
    assert started.words[-len(flags) :] == flags
    assert started.calls[0]["pid"] == started.pid, "the launch takes the place of the shell"
    assert not {"WORLD_SIZE", "RANK", "LOCAL_RANK"} & set(started.variables)


def test_what_launch_is_told(start: Callable[..., Started]) -> None:
    assert start(SINGLE).words == ["--nnodes", "1", "sft"]
    assert start(SINGLE, KIND="pretrain").words == ["--nnodes", "1", "pretrain"]
    assert start(MULTI).words == ["--nnodes", "2", "sft"]
    assert start(MULTI, NNODES="4", KIND="pretrain").words == ["--nnodes", "4", "pretrain"]
    assert start(SLURM).words == ["sft"], "the nodes are Slurm's to say"


@pytest.mark.parametrize(
    ("script", "presets", "processes"),
    [(NPUS, "conservative standard full", "4"), (GPUS, "conservative balanced aggressive", "2")],
    ids=["npu_4.sh", "dual_gpu.sh"],
)
def test_presets(start: Callable[..., Started], script: Path, presets: str, processes: str) -> None:
    for preset in presets.split():
        started = start(script, preset, "--device_batch_size=1")
        assert started.words[:4] == ["--nnodes", "1", "pretrain", "--config"]
        kind = f"npu{processes}" if script == NPUS else f"gpu{processes}"
        assert Path(started.words[4]).samefile(
            ROOT / "ds_configs" / f"pretrain_{kind}_{preset}.json"
        )
        assert started.variables["NPROC_PER_NODE"] == processes
        conservative = script == NPUS and preset == "conservative"
        assert started.variables.get("PYTORCH_NPU_ALLOC_CONF") == (
            "max_split_size_mb:32" if conservative else None
        )
    assert start(script, "conservative", NPROC_PER_NODE="1").variables["NPROC_PER_NODE"] == "1"
    own = start(script, "conservative", PYTORCH_NPU_ALLOC_CONF="x")
    assert own.variables["PYTORCH_NPU_ALLOC_CONF"] == "x"
    for wrong in ([], ["huge"], ["--depth", "1"]):
        refused = start(script, *wrong)
        assert refused.process.returncode == 2 and not refused.calls
        assert all(name in refused.process.stdout for name in presets.split())


def test_slurm_asks_for_one_task_a_node_and_time_to_save() -> None:
    options = re.findall(r"^#SBATCH (\S+)$", SLURM.read_text(), re.MULTILINE)
    assert "--ntasks-per-node=1" in options and any(
        re.fullmatch("--signal=TERM@[0-9]+", word) for word in options
    )


def test_missing_variables_are_said_together(tmp_path: Path) -> None:
    line = "bash launchers/multi_node.sh --config ds_configs/zero3.json"
    ((code, said),) = run_together([line], tmp_path, {"FINETUNE_LOG_DIR": str(tmp_path / "logs")})
    assert code == 2 and not (tmp_path / "logs").exists()
    assert "NODE_RANK is not set" in said and "MASTER_ADDR is not set" in said and "fix:" in said


def test_two_nodes_and_one_runs_out_of_memory(tmp_path: Path) -> None:
    """The page's two lines on this machine: both nodes' workers are restarted, with smaller rows
    and the same run.
    """
    page = (ROOT / "docs" / "guides" / "launching.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("NODE_RANK=")]
    assert [line.split()[0] for line in lines] == ["NODE_RANK=0", "NODE_RANK=1"]
    address = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()} NPROC_PER_NODE=1"
    tiny = (
        " --model data_samples/tiny-qwen3 --micro-batch-size 2 --global-batch-size 16 --log-samples"
        " --report-to none"
    )
    here = [
        small(line.replace("MASTER_ADDR=192.168.1.100", address) + tiny, tmp_path) for line in lines
    ]
    injected = f"{ROOT / 'tests' / 'out_of_memory'}:{ROOT}"
    results = run_together(
        here, tmp_path, {"PYTHONPATH": injected, "FINETUNE_LOG_DIR": str(tmp_path / "logs")}
    )
    said = "\n".join(output for _, output in results)
    assert [code for code, _ in results] == [0, 0], said
    folder = tmp_path / "qwen32b_lora_zero3"
    starts = events(folder, "start")
    assert [(start["world_size"], start["zero_stage"]) for start in starts] == [(2, 3), (2, 3)]
    assert [start["rows"] for start in starts] == [
        "microbatches of at most 4096 tokens",
        "microbatches of at most 2048 tokens",
    ]
    assert json.loads((folder / "oom.json").read_text())["step"] == 2
    assert "node 0 of 2" in results[0][1] and "[SUCCESS]" in results[0][1], (
        "rank 0 is on the first node"
    )
    assert "[SUCCESS]" not in results[1][1]
    assert status(folder)["state"] == "done" and len(sample_ids(folder)) == 2


def test_wrong_settings_are_refused_once_and_without_workers(tmp_path: Path) -> None:
    line = "bash launchers/single_node.sh --config ds_configs/zero3.json --lern-rate 1"
    environment_ = {"NPROC_PER_NODE": "2", "FINETUNE_LOG_DIR": str(tmp_path / "logs")}
    ((code, said),) = run_together([line], tmp_path, environment_)
    assert code == 2 and not (tmp_path / "logs").exists()
    assert said.count("[ERROR]") == 1 and "--learning-rate" in said and "Traceback" not in said
