"""The run on a simulated npu: device strings, hccl, the npu attention path, and the same losses as
on the CPU.

Nothing here ran on Ascend: `tests/fake_npu` computes everything on the CPU behind tensors that say
`npu`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from launching import BIN, ROOT, run_cli, run_command
from safetensors.torch import load_file

from finetune.modeling.attention import ISOLATED_MODEL_TYPES

FAKE_NPU = ROOT / "tests" / "fake_npu"
PATHS = os.pathsep.join(map(str, (FAKE_NPU, ROOT / "tests", ROOT)))
STEPS = 6
# Types whose tiny models have windows shorter than the documents.
_WINDOWED = """
afmoe cohere2 cwm exaone4 exaone_moe gemma3_text ministral ministral3 mistral mixtral olmo3 phi3
starcoder2
"""
WINDOWED = set(_WINDOWED.split())
FUSED = "9 rms_norm, 2 rotary, 2 swiglu"


@dataclass(frozen=True)
class Run:
    folder: Path
    printed: str = ""

    def logged(self, name: str) -> list[float]:
        lines = (self.folder / "trainer_log.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        assert [record["step"] for record in records] == list(range(1, STEPS + 1))
        return [record[name] for record in records]

    def event(self, name: str) -> dict[str, Any]:
        """The last one."""
        records = map(json.loads, (self.folder / "events.jsonl").read_text().splitlines())
        return [record for record in records if record["event"] == name][-1]

    @property
    def samples(self) -> str:
        return (self.folder / "samples.jsonl").read_text()

    def observed(self, rank: int = 0) -> dict[str, Any]:
        return json.loads(Path(f"{self.folder}.observed{rank}").read_text())


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_data: Path, tiny_valid: Path
) -> Callable[..., Run]:
    """(device, processes, kind) -> its run: the CPU's in this process, the simulated npu's in
    processes of its own. Heads are of 16, which the kernel takes.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from finetune.sft import main

    folder = tmp_path_factory.mktemp("fake_npu")
    shutil.copytree(tiny_model, folder / "model")
    config = AutoConfig.from_pretrained(folder / "model")
    config.head_dim = 16
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")

    @cache
    def execute(device: str, processes: int = 1, kind: str = "lora") -> Run:
        output = folder / f"{device}-{processes}-{kind}"
        words = f"--model {folder}/model --data {tiny_data} --output-dir {output}"
        words += f" --cache-dir {folder}/cache --device-type {device} --max-steps {STEPS}"
        words += " --micro-batch-size 2 --global-batch-size 6 --cutoff-len 96 --report-to none"
        words += f" --log-samples --finetuning {kind}"
        if kind == "lora":
            words += f" --dtype float32 --learning-rate 2e-3 --valid-data {tiny_valid}"
        else:
            words += " --dtype bfloat16 --learning-rate 1e-3"
        if device == "cpu":
            before = dict(os.environ)
            try:
                assert main(words.split()) == 0
            finally:
                os.environ.clear()
                os.environ.update(before)
            return Run(output)
        launcher = [sys.executable]
        if processes > 1:
            launcher = [str(BIN / "torchrun"), "--standalone", f"--nproc_per_node={processes}"]
        env = {"PYTHONPATH": PATHS, "OBSERVED": f"{output}.observed"}
        result = run_command([*launcher, str(FAKE_NPU / "observed.py"), *words.split()], env=env)
        assert result.returncode == 0, f"on the simulated npu:\n{result.stdout}\n{result.stderr}"
        return Run(output, result.stderr)

    return execute


def assert_fused(found: Run) -> None:
    """Compared with the plain operations at the start, then used for every layer."""
    fused = found.event("start")["fused_layers"]
    assert fused.startswith("npu: ") and fused.endswith(FUSED) and "not used" not in found.printed
    calls = found.observed()["fused_calls"]
    assert set(calls) == {"npu_rms_norm", "npu_rotary_mul", "npu_swiglu"}
    assert min(calls.values()) > STEPS


def test_two_simulated_npus_compute_what_the_cpu_does(run):
    """auto takes the npu first; each rank has its own, and hccl; float32 does not take the
    attention that NPUs have for 16 bits.
    """
    npu, cpu = run("auto", 2), run("cpu")
    start = npu.event("start")
    assert (start["device_type"], start["world_size"]) == ("npu", 2)
    for rank in (0, 1):
        facts = npu.observed(rank)
        assert (facts["current_device"], facts["accelerator"]) == (rank, f"npu:{rank}")
        assert (facts["distributed_type"], facts["backend"]) == ("MULTI_NPU", "hccl")
        assert facts["layouts"] == []
    assert_fused(npu)
    assert npu.samples == cpu.samples
    assert npu.logged("loss") == pytest.approx(cpu.logged("loss"), rel=1e-5)
    assert npu.logged("grad_norm") == pytest.approx(cpu.logged("grad_norm"), rel=1e-4)
    found, expected = (
        {name: value for name, value in each.event("eval").items() if name.startswith("eval_loss")}
        for each in (npu, cpu)
    )
    assert len(expected) == 4  # overall and per level
    assert found == pytest.approx(expected, rel=1e-5)
    found, expected = (load_file(each.folder / "adapter_model.safetensors") for each in (npu, cpu))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 1e-3 * tensor.norm(), name


def test_a_simulated_npu_trains_all_weights_in_16_bits(run):
    """Packed rows go through npu_fusion_attention in the TND layout, documents apart."""
    npu, cpu = run("npu", 1, "full"), run("cpu", 1, "full")
    facts = npu.observed()
    assert facts["devices"] == ["npu"] and facts["accelerator"].startswith("npu")
    assert facts["distributed_type"] in ("NO", "MULTI_NPU") and facts["backend"] is None
    assert not any(facts["fused"]), "the fused AdamW is off for npu in the device table"
    assert facts["tied"], "tied weights came apart on the way to the device"
    assert facts["layouts"] == ["TND"] and facts["documents"] > 1
    assert facts["host_reads"] == 0, "attention made the host wait for the device"
    assert_fused(npu)
    assert npu.event("start")["dtype"] == "bfloat16" and npu.samples == cpu.samples
    # Two bfloat16 attentions round differently; a document that saw its neighbour would be off by
    # far more.
    assert npu.logged("loss") == pytest.approx(cpu.logged("loss"), rel=5e-3)
    assert cpu.event("start")["fused_layers"] == "none"
    assert json.loads((cpu.folder / "config.json").read_text())["dtype"] == "bfloat16"
    weights = load_file(cpu.folder / "model.safetensors").values()
    assert {tensor.dtype for tensor in weights} == {torch.bfloat16}


def test_weights_that_a_device_unties_are_not_trained(tiny_model, tiny_data, tmp_path):
    """A simulated npu whose `model.to` makes new parameters: what PyTorch does where a backend says
    nothing.
    """
    words = f"--model {tiny_model} --data {tiny_data} --output-dir {tmp_path}/out --max-steps 1"
    words += " --dtype float32 --finetuning full"
    result = run_cli(words.split(), env={"PYTHONPATH": PATHS, "FAKE_NPU_UNTIES": "1"})
    assert result.returncode == 1
    assert "[ERROR] tied weights came apart on the move to the npu device" in result.stderr


def kernel_checks(*words: str) -> CompletedProcess[str]:
    command = [sys.executable, str(FAKE_NPU / "kernel_checks.py"), *words]
    result = run_command(command, env={"PYTHONPATH": PATHS})
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result


def test_the_npus_kernels_are_called_as_documented_checked_and_right():
    result = kernel_checks()
    assert len(result.stdout.splitlines()) == 3
    said = result.stderr.splitlines()
    warnings = [line for line in said if "npu_fusion_attention is not used: " in line]
    assert len(warnings) == 6 and sum("EZ9999: Inner Error." in line for line in warnings) == 1
    assert all("Fix: " in line and "--fused-layers off" in line for line in warnings)
    assert "rotary position embedding of 4 heads of 16 of npu is not used" in result.stderr


def test_every_packable_type_gives_the_npu_what_it_takes():
    """Head sizes, narrow values, dtypes, documents, windows, padded lines. Not softcaps nor sinks."""
    lines = kernel_checks("every_packable_type").stdout.splitlines()
    found = dict(line.split(" ", 1) for line in lines if " " in line)
    assert set(found) >= ISOLATED_MODEL_TYPES
    for kind in ISOLATED_MODEL_TYPES:
        calls, bands, reads, off = found[kind].split()
        other = kind in ("gemma2", "gpt_oss")
        assert (int(calls) > 0) != other and (int(bands) > 0) == (kind in WINDOWED), found[kind]
        # Two bfloat16 attentions round differently; one that saw other tokens would be off by far
        # more. Attention must not read the device.
        assert float(off) < 0.05 and (other or int(reads) == 0), f"{kind}: {found[kind]}"
