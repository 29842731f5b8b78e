"""The run on a simulated npu: device strings, hccl, the npu attention path, and the same losses as on the CPU.

Nothing here ran on Ascend: `tests/fake_npu` computes everything on the CPU behind tensors that say `npu`.
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

import pytest
import torch
from launching import BIN, ROOT, run_cli, run_command
from safetensors.torch import load_file

from finetune.modeling.attention import ISOLATED_MODEL_TYPES

FAKE_NPU = ROOT / "tests" / "fake_npu"
STEPS = 6

# Runs the command, and writes down what a run on this device used.
OBSERVED = """
import json, os, sys
import torch, torch_npu
import torch.distributed as dist
import transformers.integrations.npu_flash_attention as npu_attention
from finetune.sft import main
from finetune.training.sft_trainer import SFTTrainer

facts = {"layouts": {}, "documents": 0}
attend = npu_attention.npu_fusion_attention

def counted(*args, **kwargs):
    layout = kwargs.get("input_layout") or args[4]
    facts["layouts"][layout] = facts["layouts"].get(layout, 0) + 1
    facts["documents"] = max(facts["documents"], len(kwargs.get("actual_seq_qlen") or ()))
    return attend(*args, **kwargs)

npu_attention.npu_fusion_attention = counted
save_output = SFTTrainer.save_output

def observed(self, output_dir):
    parameters = list(self.model.parameters())
    facts.update(
        devices=sorted({p.device.type for p in parameters}),
        accelerator=str(self.accelerator.device),
        current_device=torch.npu.current_device(),
        distributed_type=self.accelerator.distributed_type.value,
        backend=dist.get_backend() if dist.is_initialized() else None,
        fused=[group.get("fused") for group in self.optimizer.optimizer.param_groups],
        tied=self.model.get_input_embeddings().weight is self.model.get_output_embeddings().weight,
    )
    path = os.environ["OBSERVED"] + os.environ.get("RANK", "0")
    open(path, "w").write(json.dumps(facts))
    save_output(self, output_dir)

SFTTrainer.save_output = observed
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@dataclass(frozen=True)
class Run:
    folder: Path
    printed: str = ""

    def logged(self, name: str) -> list[float]:
        lines = (self.folder / "trainer_log.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        assert [record["step"] for record in records] == list(range(1, STEPS + 1))
        return [record[name] for record in records]

    @property
    def samples(self) -> str:
        return (self.folder / "samples.jsonl").read_text()

    def observed(self, rank: int = 0) -> dict:
        return json.loads(Path(f"{self.folder}.observed{rank}").read_text())

    @property
    def start(self) -> dict:
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return next(record for record in map(json.loads, lines) if record["event"] == "start")


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory, tiny_model: Path) -> Path:
    """The tiny model with heads of 16, which the kernel takes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("wide") / "model"
    shutil.copytree(tiny_model, folder)
    config = AutoConfig.from_pretrained(folder)
    config.head_dim = 16
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, wide_model: Path, tiny_data: Path, tiny_valid: Path) -> Callable[..., Run]:
    """(device, processes, kind) -> its run: the CPU's in this process, the simulated npu's in processes of its own."""
    folder = tmp_path_factory.mktemp("fake_npu")
    script = folder / "observed.py"
    script.write_text(OBSERVED)

    @cache
    def execute(device: str, processes: int = 1, kind: str = "lora") -> Run:
        output = folder / f"{device}-{processes}-{kind}"
        settings = {
            "model": wide_model,
            "data": tiny_data,
            "output-dir": output,
            "cache-dir": folder / "cache",
            "device-type": device,
            "dtype": "float32" if kind == "lora" else "bfloat16",
            "finetuning": kind,
            "learning-rate": 2e-3 if kind == "lora" else 1e-3,
            "max-steps": STEPS,
            "micro-batch-size": 2,
            "global-batch-size": 6,
            "cutoff-len": 96,
            "report-to": "none",
            "log-samples": "true",
        }
        if kind == "lora":
            settings["valid-data"] = tiny_valid
        flags = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
        if device == "cpu":
            _in_process(flags)
            return Run(output)
        launcher = [sys.executable] if processes == 1 else [str(BIN / "torchrun"), "--standalone", "--nproc_per_node=2"]
        paths = os.pathsep.join([str(FAKE_NPU), str(ROOT)])
        result = run_command(
            [*launcher, str(script), *flags], env={"PYTHONPATH": paths, "OBSERVED": f"{output}.observed"}
        )
        assert result.returncode == 0, f"on the simulated npu:\n{result.stdout}\n{result.stderr}"
        return Run(output, result.stderr)

    return execute


def _in_process(flags: list[str]) -> None:
    from finetune.sft import main

    before = dict(os.environ)
    try:
        assert main(flags) == 0
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_two_simulated_npus_compute_what_the_cpu_does(run):
    npu, cpu = run("auto", 2), run("cpu")
    assert (npu.start["device_type"], npu.start["world_size"]) == ("npu", 2), "auto did not take the npu first"
    assert npu.samples == cpu.samples
    assert npu.logged("loss") == pytest.approx(cpu.logged("loss"), rel=1e-5)
    assert npu.logged("grad_norm") == pytest.approx(cpu.logged("grad_norm"), rel=1e-4)


def test_the_adapter_from_simulated_npus_is_the_cpus(run):
    expected = load_file(run("cpu").folder / "adapter_model.safetensors")
    found = load_file(run("auto", 2).folder / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 1e-3 * tensor.norm(), name


def test_everything_is_on_the_simulated_npu(run):
    facts = run("npu", 1, "full").observed()
    assert facts["devices"] == ["npu"] and facts["accelerator"].startswith("npu")
    assert facts["distributed_type"] in ("NO", "MULTI_NPU") and facts["backend"] is None
    assert not any(facts["fused"]), "the fused AdamW is off for npu in the device table"
    assert facts["tied"], "tied weights came apart on the way to the device"


def test_each_rank_has_its_own_simulated_npu_and_hccl(run):
    for rank in (0, 1):
        facts = run("auto", 2).observed(rank)
        assert (facts["current_device"], facts["accelerator"]) == (rank, f"npu:{rank}")
        assert (facts["distributed_type"], facts["backend"]) == ("MULTI_NPU", "hccl")


def test_float32_does_not_take_the_attention_that_npus_have_for_16_bits(run):
    assert run("auto", 2).observed()["layouts"] == {}


def test_16_bits_take_npu_attention_with_the_ends_of_documents(run):
    """Full training in bfloat16: packed rows go through npu_fusion_attention in the TND layout, documents apart."""
    npu, cpu = run("npu", 1, "full"), run("cpu", 1, "full")
    facts = npu.observed()
    assert facts["layouts"].get("TND", 0) > 0 and facts["documents"] > 1
    assert facts["tied"] and npu.start["dtype"] == "bfloat16"
    assert npu.samples == cpu.samples
    # Two bfloat16 attentions round differently; a document that saw its neighbour would be off by far more.
    assert npu.logged("loss") == pytest.approx(cpu.logged("loss"), rel=5e-3)


def test_a_whole_model_in_16_bits_says_so(run):
    folder = run("cpu", 1, "full").folder
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}


def test_the_validation_loss_is_the_cpus(run):
    def last(folder: Path) -> dict:
        records = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        found = [record for record in records if record["event"] == "eval"][-1]
        return {name: value for name, value in found.items() if name.startswith("eval_loss")}

    expected = last(run("cpu").folder)
    assert len(expected) == 4  # overall and per level
    assert last(run("auto", 2).folder) == pytest.approx(expected, rel=1e-5)


def test_more_processes_than_simulated_npus_are_refused(tiny_model: Path, tiny_data: Path, tmp_path: Path):
    """One npu and, by the launcher's variables, two processes: refused before any process group exists."""
    flags = ["--model", tiny_model, "--data", tiny_data, "--output-dir", tmp_path / "out", "--max-steps", 1]
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    env = world | {"PYTHONPATH": os.pathsep.join([str(FAKE_NPU), str(ROOT)]), "ASCEND_RT_VISIBLE_DEVICES": "0"}
    result = run_cli(flags, env=env | {"FAKE_NPU_COUNT": "1"})
    assert result.returncode == 2
    assert "[ERROR] 2 processes were started here, on 1 npu device" in result.stderr
    assert "ASCEND_RT_VISIBLE_DEVICES=0" in result.stderr and "--nproc_per_node 1" in result.stderr
    assert not (tmp_path / "out").exists()


def test_weights_that_a_device_unties_are_not_trained(tiny_model: Path, tiny_data: Path, tmp_path: Path):
    """A simulated npu whose `model.to` makes new parameters: what PyTorch does where a backend says nothing."""
    flags = ["--model", tiny_model, "--data", tiny_data, "--output-dir", tmp_path / "out", "--max-steps", 1]
    paths = os.pathsep.join([str(FAKE_NPU), str(ROOT)])
    flags += ["--dtype", "float32", "--finetuning", "full"]
    result = run_cli(flags, env={"PYTHONPATH": paths, "FAKE_NPU_UNTIES": "1"})
    assert result.returncode == 1
    assert "[ERROR] tied weights came apart on the move to the npu device" in result.stderr


# ---------------------------------------------------------------- the simulation itself

ATTENTION = """
import torch, torch_npu
from torch.nn.functional import scaled_dot_product_attention
torch.manual_seed(0)
lengths = [5, 1, 9, 3]
ends = torch.tensor(lengths).cumsum(0).tolist()
q, k, v = (torch.randn(sum(lengths), heads, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
mask = torch.ones(2048, 2048).triu(1).bool().to("npu")

def documents(states):
    return [piece.transpose(0, 1)[None] for piece in states.split(lengths)]

for causal in (True, False):
    expected = [
        scaled_dot_product_attention(a, b, c, is_causal=causal, enable_gqa=True, scale=0.3)[0].transpose(0, 1)
        for a, b, c in zip(documents(q), documents(k), documents(v))
    ]
    given = dict(atten_mask=mask, sparse_mode=3) if causal else {}
    found = torch_npu.npu_fusion_attention(
        *(x.to("npu") for x in (q, k, v)), 4, input_layout="TND", scale=0.3,
        actual_seq_qlen=tuple(ends), actual_seq_kvlen=tuple(ends), **given,
    )[0]
    assert found.device.type == "npu" and found.shape == q.shape
    torch.testing.assert_close(found.cpu(), torch.cat(expected), rtol=0.02, atol=0.01)

# What the kernel does not take, the simulation does not either.
def refused(q, k, v, ends=tuple(ends), **changes):
    given = {"input_layout": "TND", "scale": 0.3, "actual_seq_qlen": ends, "actual_seq_kvlen": ends, **changes}
    try:
        torch_npu.npu_fusion_attention(q.to("npu"), k.to("npu"), v.to("npu"), q.shape[1], **given)
    except AssertionError:
        return True

many = torch.zeros(4096, 1, 16, dtype=torch.bfloat16)
assert not refused(q, k, v)
assert refused(q.float(), k.float(), v.float()) and refused(q.half(), k, v)
assert refused(q[..., :8], k[..., :8], v[..., :8]) and refused(q, k, v[..., :8])
assert refused(q, k[:, :1].repeat(1, 3, 1), v[:, :1].repeat(1, 3, 1))
assert refused(many, many, many, tuple(range(1, 4097))) and not refused(many, many, many, (4096,))
assert refused(q, k, v, scale=torch.tensor(0.3)) and refused(q, k, v, pre_tockens=4)

# Numbers of tensors that are gone are forgotten, and the device is a device.
from torch_npu.device import _numbers
x = torch.zeros(3, device="npu")
for _ in range(20_000):
    x = x + 1
assert x.cpu().tolist() == [20_000.0] * 3 and len(_numbers) < 10_000
torch.npu.set_device("npu:1")
assert torch.npu.current_device() == 1
linear = torch.nn.Linear(2, 2)
weight = linear.weight
assert linear.to("npu").weight is weight and weight.device.type == "npu"
print("fine")
"""


def test_the_simulated_attention_keeps_documents_apart(tmp_path: Path):
    paths = os.pathsep.join([str(FAKE_NPU), str(ROOT)])
    result = run_command([sys.executable, "-c", ATTENTION], env={"PYTHONPATH": paths}, cwd=tmp_path)
    assert result.returncode == 0 and "fine" in result.stdout, result.stderr


def test_every_packable_type_gives_the_npu_what_it_takes(tmp_path: Path):
    """Through transformers' path: head sizes, dtypes, documents, windows. Softcaps and latent attention are not its."""
    paths = os.pathsep.join([str(FAKE_NPU), str(ROOT)])
    result = run_command([sys.executable, str(FAKE_NPU / "every_type.py")], env={"PYTHONPATH": paths}, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = dict(line.split(" ", 1) for line in result.stdout.splitlines() if " " in line)
    assert set(found) >= ISOLATED_MODEL_TYPES
    own = {"gemma2", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3"}
    assert {kind for kind, said in found.items() if said == "finetune_isolated"} == own
    for kind in ISOLATED_MODEL_TYPES - own:
        calls, off = found[kind].split()
        # Two bfloat16 attentions round differently; one that saw other tokens would be off by far more.
        assert int(calls) > 0 and float(off) < 0.05, f"{kind}: {found[kind]}"


def test_the_simulation_is_no_part_of_the_package():
    assert not list((ROOT / "finetune").rglob("*fake_npu*"))
    assert "include = finetune, finetune.*" in (ROOT / "setup.cfg").read_text()
