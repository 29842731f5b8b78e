"""The run on a simulated npu: device strings, hccl, npu attention, and the losses of the CPU.

Nothing here ran on Ascend: `tests/fake_npu` computes on the CPU behind tensors that say `npu`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import run_helpers
import torch
from launching import BIN, ROOT, run_command
from transformers import AutoConfig, AutoModelForCausalLM

from finetune import run as run_settings
from finetune.errors import FinetuneError
from finetune.modeling.attention import ISOLATED_MODEL_TYPES

FAKE_NPU = ROOT / "tests" / "fake_npu"
PATHS = os.pathsep.join(map(str, (FAKE_NPU, ROOT / "tests", ROOT)))
STEPS = 6
# Types whose tiny models have windows shorter than the documents.
WINDOWED = """
afmoe cohere2 cwm exaone4 exaone_moe gemma3_text ministral ministral3 mistral mixtral olmo3 phi3
starcoder2
"""
FUSED = "9 rms_norm, 2 rotary, 2 swiglu"


@dataclass(frozen=True)
class Run:
    folder: Path
    printed: str = ""

    def logged(self, name: str) -> list[float]:
        return run_helpers.values(self.folder, name)

    def event(self, name: str) -> dict[str, Any]:
        return run_helpers.events(self.folder, name)[-1]

    @property
    def samples(self) -> list[list[int]]:
        return run_helpers.sample_ids(self.folder)

    def observed(self, rank: int = 0) -> dict[str, Any]:
        return json.loads(Path(f"{self.folder}.observed{rank}").read_text())


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_model, tiny_data, tiny_valid):
    """(device, processes, kind) -> its run; the simulated npu's has its own processes."""
    folder = tmp_path_factory.mktemp("fake_npu")
    shutil.copytree(tiny_model, folder / "model")
    config = AutoConfig.from_pretrained(folder / "model")
    config.head_dim = 16  # which the kernel takes
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")

    @cache
    def execute(device: str, processes: int, kind: str = "lora") -> Run:
        output = folder / f"{device}-{processes}-{kind}"
        materials = run_helpers.Materials(folder, folder / "model", tiny_data, tiny_valid)
        changes = {"valid_data": str(tiny_valid)} if kind == "lora" else {"dtype": "bfloat16"}
        changes |= {
            "device_type": device,
            "finetuning": kind,
            "learning_rate": 1e-3,
            "lora_r": None,
        }
        settings = materials.settings(output, global_batch_size=6, **changes)
        if device == "cpu":
            run_settings(settings)
            return Run(output)
        (folder / "settings.json").write_text(json.dumps(settings))
        launcher = [sys.executable]
        if processes > 1:
            launcher = [str(BIN / "torchrun"), "--standalone", f"--nproc_per_node={processes}"]
        env = {"PYTHONPATH": PATHS, "OBSERVED": f"{output}.observed"}
        words = [str(FAKE_NPU / "observed.py"), "--config", str(folder / "settings.json")]
        result = run_command([*launcher, *words], env=env)
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
    """auto takes the npu first; each rank has its own, and hccl; float32 has its own attention."""
    npu, cpu = run("auto", 2), run("cpu", 1)
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
    names = ("eval_loss", *(f"eval_loss/{level}" for level in ("explain", "reasoning", "topology")))
    found, expected = ([each.event("eval")[name] for name in names] for each in (npu, cpu))
    assert found == pytest.approx(expected, rel=1e-5)
    found, expected = (run_helpers.result_weights(each.folder) for each in (npu, cpu))
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 1e-3 * tensor.norm(), name


def test_a_simulated_npu_trains_all_weights_in_16_bits(run):
    """Packed rows go through npu_fusion_attention in the TND layout, documents apart."""
    npu, cpu = run("npu", 1, "full"), run("cpu", 1, "full")
    facts = npu.observed()
    assert facts["devices"] == ["npu"] and facts["backend"] is None
    assert not any(facts["fused"]), "the fused AdamW is off for npu in the device table"
    assert facts["tied"], "tied weights came apart on the way to the device"
    assert facts["layouts"] == ["TND"] and facts["documents"] > 1
    assert facts["host_reads"] == 0, "attention made the host wait for the device"
    assert_fused(npu)
    assert npu.event("start")["dtype"] == "bfloat16" and npu.samples == cpu.samples
    # two bfloat16 attentions round differently
    assert npu.logged("loss") == pytest.approx(cpu.logged("loss"), rel=5e-3)
    assert cpu.event("start")["fused_layers"] == "none"
    weights = run_helpers.result_weights(cpu.folder).values()
    assert {tensor.dtype for tensor in weights} == {torch.bfloat16}


def test_weights_that_a_device_unties_are_not_trained(tmp_path, monkeypatch):
    """Where `model.to` makes new parameters, as PyTorch does if a backend says nothing."""
    settings = run_helpers.make_materials(tmp_path).settings(tmp_path / "run", finetuning="full")
    monkeypatch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
    with pytest.raises(FinetuneError, match="tied weights came apart on the move to the cpu"):
        run_settings(settings)


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
        assert (int(calls) > 0) != other and (int(bands) > 0) == (kind in WINDOWED.split()), found[
            kind
        ]
        # attention must not read the device
        assert float(off) < 0.05 and (other or int(reads) == 0), f"{kind}: {found[kind]}"
