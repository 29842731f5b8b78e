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

import pytest
import torch
from launching import BIN, ROOT, run_cli, run_command
from safetensors.torch import load_file

from finetune.modeling.attention import ISOLATED_MODEL_TYPES

FAKE_NPU = ROOT / "tests" / "fake_npu"
STEPS = 6
# Types whose tiny models have windows shorter than the documents.
WINDOWED = {
    *(
        "afmoe",
        "cohere2",
        "cwm",
        "exaone4",
        "exaone_moe",
        "gemma3_text",
        "ministral",
        "ministral3",
        "mistral",
    ),
    *("mixtral", "olmo3", "phi3", "starcoder2"),
}
FUSED = "9 rms_norm, 2 rotary, 2 swiglu"

# Runs the command, and writes down what a run on this device used.
OBSERVED = """
import json, os, sys
import torch, torch_npu
import torch.distributed as dist
from torch_npu.device import host_reads
from finetune.modeling import attention
from finetune.sft import main
from finetune.training.trainer import SFTTrainer

facts = {"layouts": {}, "documents": 0, "host_reads": 0, "fused_calls": {}}
attend, isolated = torch_npu.npu_fusion_attention, attention.isolated_attention

def counted(*args, **kwargs):
    layout = kwargs.get("input_layout") or args[4]
    facts["layouts"][layout] = facts["layouts"].get(layout, 0) + 1
    facts["documents"] = max(facts["documents"], len(kwargs.get("actual_seq_qlen") or ()))
    before = host_reads[0]
    result = attend(*args, **kwargs)
    host_reads[0] = before  # the stand-in looks at its mask
    return result

def watched(*args, **kwargs):
    before = host_reads[0]
    result = isolated(*args, **kwargs)
    facts["host_reads"] += host_reads[0] - before
    return result

def tallied(name):
    kernel = getattr(torch_npu, name)
    def call(*args, **kwargs):
        facts["fused_calls"][name] = facts["fused_calls"].get(name, 0) + 1
        return kernel(*args, **kwargs)
    return call

torch_npu.npu_fusion_attention = counted
attention.isolated_attention = watched
for name in ("npu_rms_norm", "npu_rotary_mul", "npu_swiglu"):
    setattr(torch_npu, name, tallied(name))
save_output = SFTTrainer.save_output

def observed(self, output_dir, best):
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
    save_output(self, output_dir, best)

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
def run(
    tmp_path_factory, wide_model: Path, tiny_data: Path, tiny_valid: Path
) -> Callable[..., Run]:
    """(device, processes, kind) -> its run: the CPU's in this process, the simulated npu's in
    processes of its own.
    """
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
        launcher = (
            [sys.executable]
            if processes == 1
            else [str(BIN / "torchrun"), "--standalone", "--nproc_per_node=2"]
        )
        paths = os.pathsep.join([str(FAKE_NPU), str(ROOT)])
        result = run_command(
            [*launcher, str(script), *flags],
            env={"PYTHONPATH": paths, "OBSERVED": f"{output}.observed"},
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
    assert (npu.start["device_type"], npu.start["world_size"]) == (
        "npu",
        2,
    ), "auto did not take the npu first"
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
    """Full training in bfloat16: packed rows go through npu_fusion_attention in the TND layout,
    documents apart.
    """
    npu, cpu = run("npu", 1, "full"), run("cpu", 1, "full")
    facts = npu.observed()
    assert set(facts["layouts"]) == {"TND"} and facts["documents"] > 1
    assert facts["host_reads"] == 0, "attention made the host wait for the device"
    assert facts["tied"] and npu.start["dtype"] == "bfloat16"
    assert npu.samples == cpu.samples
    # Two bfloat16 attentions round differently; a document that saw its neighbour would be off by
    # far more.
    assert npu.logged("loss") == pytest.approx(cpu.logged("loss"), rel=5e-3)


@pytest.mark.parametrize(
    "key", [("npu", 1, "full"), pytest.param(("auto", 2), marks=pytest.mark.slow)]
)
def test_fused_layers_of_npus_are_used_where_they_agree(run, key):
    """Compared with the plain operations at the start, then used for every layer; the losses are
    the CPU's (above).
    """
    found = run(*key)
    assert found.start["fused_layers"].startswith("npu: ") and "not used" not in found.printed
    assert found.start["fused_layers"].endswith(FUSED), found.start["fused_layers"]
    calls = found.observed()["fused_calls"]
    assert (
        set(calls) == {"npu_rms_norm", "npu_rotary_mul", "npu_swiglu"}
        and min(calls.values()) > STEPS
    )
    assert run("cpu", 1, "full").start["fused_layers"] == "none"


def test_a_whole_model_in_16_bits_says_so(run):
    folder = run("cpu", 1, "full").folder
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {
        torch.bfloat16
    }


def test_the_validation_loss_is_the_cpus(run):
    def last(folder: Path) -> dict:
        records = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        found = [record for record in records if record["event"] == "eval"][-1]
        return {name: value for name, value in found.items() if name.startswith("eval_loss")}

    expected = last(run("cpu").folder)
    assert len(expected) == 4  # overall and per level
    assert last(run("auto", 2).folder) == pytest.approx(expected, rel=1e-5)


def test_more_processes_than_simulated_npus_are_refused(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
):
    """One npu and, by the launcher's variables, two processes: refused before any process group
    exists.
    """
    flags = [
        "--model",
        tiny_model,
        "--data",
        tiny_data,
        "--output-dir",
        tmp_path / "out",
        "--max-steps",
        1,
    ]
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    env = world | {
        "PYTHONPATH": os.pathsep.join([str(FAKE_NPU), str(ROOT)]),
        "ASCEND_RT_VISIBLE_DEVICES": "0",
    }
    result = run_cli(flags, env=env | {"FAKE_NPU_COUNT": "1"})
    assert result.returncode == 2
    assert "[ERROR] 2 processes were started here, on 1 npu device" in result.stderr
    assert "ASCEND_RT_VISIBLE_DEVICES=0" in result.stderr and "--nproc_per_node 1" in result.stderr
    assert not (tmp_path / "out").exists()


def test_weights_that_a_device_unties_are_not_trained(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
):
    """A simulated npu whose `model.to` makes new parameters: what PyTorch does where a backend says
    nothing.
    """
    flags = [
        "--model",
        tiny_model,
        "--data",
        tiny_data,
        "--output-dir",
        tmp_path / "out",
        "--max-steps",
        1,
    ]
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
thousand, more = tuple(range(4, 4097, 4)), tuple(range(2, 4097, 2))
assert not refused(many, many, many, thousand) and refused(many, many, many, more)
assert refused(q, k, v, scale=torch.tensor(0.3)) and refused(q, k, v, keep_prob=0.0)
band = dict(atten_mask=mask, sparse_mode=4, next_tockens=0)
assert not refused(q, k, v, pre_tockens=4, **band) and refused(q, k, v, pre_tockens=4, atten_mask=mask, sparse_mode=3)
assert refused(q, k, v, pre_tockens=4, **{**band, "atten_mask": ~mask})
assert refused(q, k, v, pre_tockens=4, **{**band, "atten_mask": mask[:64, :64]})

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
    """Head sizes, narrow values, dtypes, documents, windows, padded lines. Not softcaps."""
    paths = os.pathsep.join([str(FAKE_NPU), str(ROOT)])
    result = run_command(
        [sys.executable, str(FAKE_NPU / "every_type.py")], env={"PYTHONPATH": paths}, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    found = dict(line.split(" ", 1) for line in result.stdout.splitlines() if " " in line)
    assert set(found) >= ISOLATED_MODEL_TYPES
    for kind in ISOLATED_MODEL_TYPES:
        calls, bands, reads, off = found[kind].split()
        # Two bfloat16 attentions round differently; one that saw other tokens would be off by far
        # more.
        assert (int(calls) > 0) == (kind != "gemma2") and float(off) < 0.05, (
            f"{kind}: {found[kind]}"
        )
        assert (int(bands) > 0) == (kind in WINDOWED), f"{kind}: {found[kind]}"
        assert kind == "gemma2" or int(reads) == 0, (
            f"{kind}: attention read the device {reads} times"
        )


OWN_CALL = """
import torch, torch_npu
from finetune.modeling import attention, npu_attention
from finetune.modeling.attention import isolated_attention
from torch_npu.device import host_reads
torch.manual_seed(0)
module, calls, kernel = torch.nn.Module(), [], torch_npu.npu_fusion_attention

def counted(*args, **kwargs):
    calls.append((len(kwargs["actual_seq_qlen"]), kwargs["sparse_mode"], kwargs["keep_prob"]))
    before = host_reads[0]
    result = kernel(*args, **kwargs)
    host_reads[0] = before
    return result

torch_npu.npu_fusion_attention = counted

def both(lengths, *, heads=4, keys=2, width=24, values=24, samples=1, tokens=None, **given):
    # On the npu and on the CPU (in float32): outputs and gradients.
    tokens = tokens or sum(lengths)
    made = [torch.randn(samples, n, tokens, d).bfloat16() for n, d in ((heads, width), (keys, width), (keys, values))]
    direction = torch.randn(samples, tokens, heads, values).bfloat16()
    calls.clear()
    results = []
    npu = torch.device("npu")
    for device in (npu, torch.device("cpu")):
        leaves = [x.to(device).requires_grad_() if device == npu else x.float().requires_grad_() for x in made]
        before = host_reads[0]
        output, _ = isolated_attention(module, *leaves, None, document_lengths=lengths, **given)
        output.backward(direction.to(device, output.dtype))
        assert host_reads[0] == before
        results.append([output, *(leaf.grad for leaf in leaves)])
    if given.get("dropout"):
        return results
    for mine, theirs in zip(*results):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine.detach().cpu().float(), theirs.detach(), rtol=0.05, atol=0.05)

npu_attention._hidden(torch.zeros(1, device="npu").device)
both((5, 1, 9, 3))
assert calls == [(4, 3, 1.0)]
both((5, 1, 9, 3), sliding_window=4, scaling=0.2)
assert calls == [(4, 4, 1.0)]
both((5, 1, 9, 3), sliding_window=9)
assert calls == [(4, 3, 1.0)], "a window that no document reaches"
both((5, 1, 9, 3), keys=4, width=40, values=16)  # as in multi-head latent attention
both(None, samples=3, tokens=7)
assert calls == [(3, 3, 1.0)]
both((1,) * 2500, width=16, values=16)
assert [documents for documents, *_ in calls] == [1024, 1024, 452]
both((3, 1) * 600 + (200,), width=16, values=16, sliding_window=2)
assert [documents for documents, *_ in calls] == [1024, 177] and {mode for _, mode, _ in calls} == {4}

# Dropout is the kernel's: what is kept is scaled up, some is gone.
(mine, *_), _ = both((64,) * 8, dropout=0.5)
assert {round(keep, 3) for *_, keep in calls} == {0.5}
assert (mine.cpu()[0, ::64] == 0).any()  # of first tokens, which see one token
# Heads that the kernel does not take, float32, and softcap go another way.
both((5, 9), heads=2, keys=2, width=520, values=520)
assert not calls
both((5, 9), softcap=5.0)
assert not calls
wide = torch.randn(1, 2, 6, 16, device="npu")
isolated_attention(module, wide, wide, wide, None, document_lengths=(2, 4))
assert not calls
with torch.autocast("npu", torch.bfloat16):
    isolated_attention(module, wide, wide, wide, None, document_lengths=(2, 4))
assert calls == [(2, 3, 1.0)]
print("fine")
"""


def test_the_npus_attention_is_called_as_documented_and_right(tmp_path: Path):
    """Windows, narrow values, padded lines, thousands of documents, dropout; forward and backward
    against the CPU.
    """
    paths = os.pathsep.join([str(FAKE_NPU), str(ROOT)])
    result = run_command([sys.executable, "-c", OWN_CALL], env={"PYTHONPATH": paths}, cwd=tmp_path)
    assert result.returncode == 0 and "fine" in result.stdout, result.stderr


CHECKED_CALL = """
import sys
sys.path.insert(0, sys.argv[1])
import logging
import torch, torch_npu
from tiny_models import make_model, tiny_config
from finetune.modeling.attention import BY_DOCUMENT, ISOLATED, choose_attention
from finetune.modeling.attention_check import check_attention

logging.basicConfig(format="%(message)s")
kernel = torch_npu.npu_fusion_attention
calls = []

def check(model_type="mistral", setting="auto", dtype=torch.bfloat16, tokens=700, **changes):
    config = tiny_config(model_type, **changes)
    model = make_model(config, choose_attention(config))
    calls.clear()
    said = check_attention(model, setting, device_type="npu", dtype=dtype, tokens=tokens)
    return said, model.config._attn_implementation

def faulty(change):
    def call(*args, **kwargs):
        calls.append(kwargs["sparse_mode"])
        return kernel(*args, **{**kwargs, **change(args[0], kwargs)})
    torch_npu.npu_fusion_attention = call

def whole(query, kwargs):
    return {"actual_seq_qlen": (len(query),), "actual_seq_kvlen": (len(query),)}

def raises(query, kwargs):
    raise RuntimeError("EZ9999: Inner Error")

used, refused = ("npu_fusion_attention", ISOLATED), ("torch's", BY_DOCUMENT)
faulty(lambda query, kwargs: {})
for model_type in ("mistral", "qwen3", "deepseek_v3"):  # windows, none, multi-head latent attention
    for dtype in (torch.bfloat16, torch.float16):
        assert check(model_type, dtype=dtype) == used
        assert set(calls) == ({3, 4} if model_type == "mistral" else {3})
faulty(whole)
assert check("qwen3") == refused and check("qwen3", tokens=9) == refused
faulty(lambda query, kwargs: {"sparse_mode": 3, "pre_tockens": 2147483647, "next_tockens": 2147483647})
assert check("qwen3") == used and check() == refused  # no window, and one that is ignored
faulty(lambda query, kwargs: {"pre_tockens": kwargs["pre_tockens"] + 1} if "pre_tockens" in kwargs else {})
assert check() == refused
faulty(lambda query, kwargs: {"scale": query.shape[-1] ** -0.5})
assert check("qwen3") == refused
faulty(raises)
assert check("qwen3") == refused
for given in ({"setting": "off"}, {"dtype": torch.float32}, {"model_type": "gemma2"}, {"head_dim": 520}):
    assert check(**given) == ("torch's", ISOLATED) and not calls, given
"""


def test_an_npu_attention_that_differs_is_not_used(tmp_path: Path):
    """Ends of documents, a window or the scale ignored, a window one too wide, an error: SDPA per
    document instead.
    """
    paths = os.pathsep.join([str(FAKE_NPU), str(ROOT)])
    result = run_command(
        [sys.executable, "-c", CHECKED_CALL, str(ROOT / "tests")],
        env={"PYTHONPATH": paths},
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    warnings = [
        line for line in result.stderr.splitlines() if "npu_fusion_attention is not used: " in line
    ]
    assert (
        len(warnings) == 6
        and sum("RuntimeError: EZ9999: Inner Error." in line for line in warnings) == 1
    )
    assert all("Fix: " in line and "--fused-layers off" in line for line in warnings)


FUSED_CALL = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, torch_npu
from tiny_models import make_model, tiny_config
from finetune.modeling.layers import agreeing_ops, compare_layers, find_fusable, provided_ops

model = make_model(tiny_config("qwen3", head_dim=16, hidden_size=64), "eager")
ops, npu = provided_ops("npu"), torch.device("npu")
given = dict(device=npu, dtypes=[torch.float32, torch.bfloat16], tokens=100)
comparisons = compare_layers(ops, find_fusable(model), model.config)
assert len(comparisons) == 4 and agreeing_ops("npu", ops, comparisons, **given) == ops

# A kernel that takes the neighbour for the other half, as `interleave` does.
kernel = torch_npu.npu_rotary_mul
torch_npu.npu_rotary_mul = lambda x, cos, sin: kernel(x.flip(-1), cos, sin)
kept = agreeing_ops("npu", ops, comparisons, **given)
assert kept == {name: ops[name] for name in ("rms_norm", "swiglu")}
print("fine")
"""


def test_the_npus_fused_operations_are_called_as_documented_and_right(tmp_path: Path):
    paths = os.pathsep.join([str(FAKE_NPU), str(ROOT)])
    command = [sys.executable, "-c", FUSED_CALL, str(ROOT / "tests")]
    result = run_command(command, env={"PYTHONPATH": paths}, cwd=tmp_path)
    assert result.returncode == 0 and "fine" in result.stdout, result.stderr
    assert "rotary position embedding of 4 heads of 16 of npu is not used" in result.stderr


def test_the_simulation_is_no_part_of_the_package():
    assert not list((ROOT / "finetune").rglob("*fake_npu*"))
    assert "include = finetune, finetune.*" in (ROOT / "setup.cfg").read_text()
