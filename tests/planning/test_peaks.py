"""The planner's peak of a microbatch against the same step on fake tensors, which have sizes and no
numbers; two blocks of each model.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from finetune.planning.activations import worst_moment
from finetune.planning.inputs import with_sharding, workload_of
from finetune.planning.shapes import shape_of_model
from finetune.planning.workload import Cluster, Sharding

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks" / "roofline"
LAYERS = 2
KEPT, FULL = {"gradient_checkpointing": False}, {"finetuning": "full"}
ATTENTION = {"lora_target_modules": ["q_proj", "v_proj"]}  # beside experts only these are counted
SIZES = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4}
SIZES |= {"num_hidden_layers": 2, "intermediate_size": 4096, "tie_word_embeddings": False}
MIXTRAL = {"model_type": "mixtral", "vocab_size": 32000, "num_experts_per_tok": 2}
MIXTRAL |= {**SIZES, "num_local_experts": 8}
MOE = {"model_type": "qwen3_moe", "vocab_size": 151936, "num_experts_per_tok": 8}
MOE |= {**SIZES, "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 64}
VALUE = {"device_batch_size": 8, "arch": "lfm2_value"}
TOKENS = {"train_tokens": ["<|im_end|>"]}
HEAD = {"lora_target_modules": ["q_proj", "lm_head"]}
CASES = {
    "lora kept": {"model": "Qwen/Qwen3-8B", "settings": KEPT},
    "lora dropout": {"model": "Qwen/Qwen2.5-7B", "settings": {"lora_dropout": 0.05}},
    "lora of the head": {"model": "Qwen/Qwen3-8B", "settings": HEAD},
    "lora of tokens, tied": {"model": "Qwen/Qwen3-0.6B", "settings": TOKENS},
    "lora zero3": {"model": "Qwen/Qwen3-32B", "zero3": True},
    "full, tied": {"model": "Qwen/Qwen3-0.6B", "settings": FULL},
    "pretraining": {"model": "nanochat-d12", "settings": {"device_batch_size": 8}},
    "pretraining lfm2_value": {"model": "nanochat-d12", "settings": VALUE},
    "mixtral lora kept": {"model": "mixtral", "config": MIXTRAL, "settings": ATTENTION | KEPT},
    "moe full zero3": {"model": "moe", "config": MOE, "zero3": True, "settings": FULL},
}


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    """The folder of the programs, which is no package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_a_microbatch_is_planned(name: str, monkeypatch: pytest.MonkeyPatch):
    """Within 15%, weights, gradients and moments aside: of the second microbatch."""
    from roofline_runs import Case, empty_model, run_config, trace

    case = Case(**CASES[name], rows=2, steps=1)
    made = trace(case, LAYERS)
    # Such are the products that roofline_cpu.py measures: an `out` is none of their matrices.
    products = [kernel.shapes[-2:] for kernel in made.second.kernels if kernel.name == "mm"]
    assert products and all(left[-1] == right[0] for left, right in products)
    gradients = (2 if case.zero3 else 4) * made.trained
    found = made.second.peak_bytes - made.static_bytes - gradients

    shape = shape_of_model(empty_model(case, LAYERS))
    work = workload_of(run_config(case), shape, Cluster(device_type="cuda"))
    if case.zero3:
        work = with_sharding(work, Sharding(engine=True, stage=3))
    longest = case.tokens // (1 if case.pretraining else case.documents)
    planned = worst_moment(replace(work, longest=longest))
    assert planned.bytes == pytest.approx(found, rel=0.15)


def test_a_step_asks_no_more_of_a_device_than_is_committed(monkeypatch):
    """Kernels, bytes, waits of the host and peaks; fewer are fine, and worth writing down."""
    import roofline

    # what processes send is in test_network.py
    monkeypatch.setattr(roofline, "counted_collectives", dict)
    committed = json.loads(roofline.COUNTS.read_text(encoding="utf-8"))
    more = [
        f"{case}, {part}: {name} {committed[case][part][name]:,} -> {value:,}"
        for case, parts in roofline.counts().items()
        for part, values in parts.items()
        for name, value in values.items()
        if value > committed[case][part][name]
    ]
    assert not more, f"worth it? python benchmarks/roofline/roofline.py --update-counts\n{more}"


def test_waits_of_the_host_and_uploads_are_seen():
    """Each way by which a step has made the host wait, once."""
    import torch
    from roofline_trace import Crossings, Recorder
    from torch._subclasses.fake_tensor import FakeTensorMode

    host = torch.zeros(4)
    fake, recorder = FakeTensorMode(allow_non_fake_inputs=True), Recorder()
    recorder.targets = 3
    with fake, recorder, Crossings(recorder, fake):
        values = host.to(torch.device("cpu"), non_blocking=True)
        assert values[values > 0].shape == (3,)
        assert (values > 0).nonzero().shape == (3, 1)
        assert float(values.sum()) == 1.0 and not bool(values.any())
        values.cpu()
        float(torch.tensor(2.0))  # the host's own
    assert dict(recorder.segment.waits) == {"boolean index": 1, "nonzero": 1, "item": 2, "cpu": 1}
    assert dict(recorder.segment.uploads) == {"pageable": 1}
