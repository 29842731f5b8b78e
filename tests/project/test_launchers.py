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
NAMES = ["single_node.sh", "multi_node.sh", "npu_4.sh", "dual_gpu.sh", "slurm.sbatch"]
SINGLE, MULTI, NPUS, GPUS, SLURM = (FOLDER / name for name in NAMES)
STAND_IN = """#!{python}
import json, os, sys
if sys.argv[1] != "-c":  # that one asks whether torch is there
    with open({record!r}, "a") as file:
        file.write(json.dumps({{"pid": os.getpid(), "words": sys.argv[1:], "variables": dict(os.environ)}}) + "\\n")
"""


class Started:
    """What a launcher did: its exit code and output, and the one command that it gave to python."""

    def __init__(self, process: subprocess.Popen, said: str, record: Path) -> None:
        self.code, self.pid, self.said = process.returncode, process.pid, said
        lines = record.read_text().splitlines() if record.exists() else []
        self.calls = [json.loads(line) for line in lines]
        self.variables = self.calls[0]["variables"] if lines else {}

    @property
    def words(self) -> list[str]:
        """What finetune launch gets."""
        assert self.code == 0, self.said
        (call,) = self.calls
        assert call["words"][:3] == ["-m", "finetune", "launch"]
        return call["words"][3:]


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Started]:
    """Run a script in a folder of its own, where only the tools that it needs exist."""
    folder, record = tmp_path / "bin", tmp_path / "calls.jsonl"
    folder.mkdir()
    for tool in ("bash", "dirname", "mkdir"):
        (folder / tool).symlink_to(shutil.which(tool))
    # srun gives its command to every node; here to this one
    srun = '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n'
    python = STAND_IN.format(python=sys.executable, record=str(record))
    for name, text in (("python", python), ("srun", srun)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)

    def run(script: Path, *flags: str, **variables: str) -> Started:
        record.unlink(missing_ok=True)
        clean = ["NPROC_PER_NODE", "KIND", "NNODES", "PYTHON", "PYTORCH_NPU_ALLOC_CONF"]
        env = environment({**dict.fromkeys(clean), "PATH": str(folder), **variables})
        words, output = ["bash", str(script), *flags], subprocess.PIPE
        process = subprocess.Popen(
            words, cwd=tmp_path, env=env, stdout=output, stderr=subprocess.STDOUT, text=True
        )
        said, _ = process.communicate(timeout=PATIENCE_SECONDS)
        return Started(process, said, record)

    return run


def test_the_scripts_themselves() -> None:
    scripts = sorted([*FOLDER.glob("*.sh"), SLURM])
    for script in scripts:
        for banned in ("pkill", "killall", "WORLD_SIZE", "export RANK", "rm "):
            assert banned not in script.read_text()
    options = re.findall(r"^#SBATCH (\S+)$", SLURM.read_text(), re.MULTILINE)
    assert "--ntasks-per-node=1" in options
    assert any(re.fullmatch("--signal=TERM@[0-9]+", word) for word in options)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: the scripts were not checked")
    checked = subprocess.run(["shellcheck", *map(str, scripts)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("script", [SINGLE, MULTI, NPUS, GPUS, SLURM], ids=NAMES)
def test_flags_pass_through_word_by_word_and_signals_reach_the_launch(
    start: Callable[..., Started], script: Path
) -> None:
    flags = ["--output-dir", "a folder", "--data", "*.jsonl", "--packing=false", ""]
    preset = {NPUS: ["standard"], GPUS: ["balanced"]}.get(script, [])
    started = start(script, *preset, *flags)
    assert started.words[-len(flags) :] == flags
    assert started.calls[0]["pid"] == started.pid, "the launch takes the place of the shell"


def test_what_launch_is_told(start: Callable[..., Started]) -> None:
    assert start(SINGLE).words == ["--nnodes", "1", "sft"]
    assert start(MULTI, NNODES="4", KIND="pretrain").words == ["--nnodes", "4", "pretrain"]
    assert start(SLURM).words == ["sft"], "the nodes are Slurm's to say"


@pytest.mark.parametrize(
    ("script", "kind", "presets"),
    [
        (NPUS, "npu4", "conservative standard full"),
        (GPUS, "gpu2", "conservative balanced aggressive"),
    ],
)
def test_presets(start: Callable[..., Started], script: Path, kind: str, presets: str) -> None:
    for preset in presets.split():
        started = start(script, preset, "--device_batch_size=1")
        assert started.words[:4] == ["--nnodes", "1", "pretrain", "--config"]
        config = ROOT / "ds_configs" / f"pretrain_{kind}_{preset}.json"
        assert Path(started.words[4]).samefile(config)
        assert started.variables["NPROC_PER_NODE"] == kind[-1]
        splits = "PYTORCH_NPU_ALLOC_CONF" in started.variables
        assert splits == (script == NPUS and preset == "conservative")
    assert start(script, "conservative", NPROC_PER_NODE="1").variables["NPROC_PER_NODE"] == "1"
    refused = start(script, "huge")
    assert refused.code == 2 and not refused.calls
    assert all(name in refused.said for name in presets.split())


def test_two_nodes_and_one_runs_out_of_memory(tmp_path: Path) -> None:
    """The page's two lines on this machine: both nodes' workers are restarted, with smaller rows
    and the same run.
    """
    page = (ROOT / "docs" / "guides" / "launching.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("NODE_RANK=")]
    assert [line.split()[0] for line in lines] == ["NODE_RANK=0", "NODE_RANK=1"]
    address = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()} NPROC_PER_NODE=1"
    tiny = " --model data_samples/tiny-qwen3 --micro-batch-size 2 --global-batch-size 16"
    tiny += " --log-samples --report-to none"
    lines = [line.replace("MASTER_ADDR=192.168.1.100", address) + tiny for line in lines]
    injected = f"{ROOT / 'tests' / 'out_of_memory'}:{ROOT}"
    variables = {"PYTHONPATH": injected, "FINETUNE_LOG_DIR": str(tmp_path / "logs")}
    results = run_together([small(line, tmp_path) for line in lines], tmp_path, variables)
    (first, said), (second, other) = results
    assert (first, second) == (0, 0), said + other
    folder = tmp_path / "qwen32b_lora_zero3"
    starts = events(folder, "start")
    assert [(start["world_size"], start["zero_stage"]) for start in starts] == [(2, 3), (2, 3)]
    rows = [f"microbatches of at most {tokens} tokens" for tokens in (4096, 2048)]
    assert [start["rows"] for start in starts] == rows
    assert "node 0 of 2" in said and "[SUCCESS]" in said, "rank 0 is on the first node"
    assert "[SUCCESS]" not in other
    assert status(folder)["state"] == "done" and len(sample_ids(folder)) == 2
