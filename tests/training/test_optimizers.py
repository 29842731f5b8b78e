"""Muon and AdamW as one optimizer: who is trained by which, equality with both run apart, rates,
courses, state.
"""

from __future__ import annotations

import collections
import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.config.pretrain_config import PretrainConfig
from finetune.config.schedules import ScheduleSettings, learning_rate_schedule
from finetune.modeling.scratch import make_model, scratch_config
from finetune.training.muon import POLAR_EXPRESS, SECOND_MOMENT, BatchedMuon, NorMuon
from finetune.training.optimizers import (
    REFERENCE_TOKENS,
    JointOptimizer,
    Rates,
    decay_factor,
    make_optimizer,
    momentum_at,
    parameter_kinds,
    scaled_rates,
    set_matrix_schedule,
    skip_where,
)
from finetune.training.state import TrainingState

RATES = Rates(matrix=0.02, embedding=0.3, head=0.008, vector=0.01, decay=0.28)


def config(**settings) -> PretrainConfig:
    return PretrainConfig(train_data_path=("x.bin",), output_dir="out", **settings)


def tiny(arch: str = "nanochat", depth: int = 2):
    return make_model(scratch_config(arch, depth, vocab_size=64, max_seq_len=16), seed=0)


def train_step(model, optimizer, number: int) -> None:
    ids = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(number))
    logits = model(ids[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


# kind: what the names of its parameters end with, without numbers of layers.
ASSIGNMENT = {
    "nanochat": {
        "matrix": {
            *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
            "mlp.fc1.weight",
            "mlp.fc2.weight",
        },
        "head": {"lm_head.weight"},
        "embedding": {"model.embed_tokens.weight"},
        "vector": set(),
    },
    "qwen3": {
        "matrix": {
            *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
            *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        },
        "head": {"lm_head.weight"},
        "embedding": {"model.embed_tokens.weight"},
        "vector": {
            "self_attn.q_norm.weight",
            "self_attn.k_norm.weight",
            "input_layernorm.weight",
            "post_attention_layernorm.weight",
            "model.norm.weight",
        },
    },
}
ASSIGNMENT["llama"] = ASSIGNMENT["qwen3"] | {
    "vector": {name for name in ASSIGNMENT["qwen3"]["vector"] if "self_attn" not in name}
}
ASSIGNMENT["lfm2"] = {
    "matrix": {
        *(f"self_attn.{name}_proj.weight" for name in ("q", "k", "v", "out")),
        *(f"conv.{name}_proj.weight" for name in ("in", "out")),
        *(f"feed_forward.w{number}.weight" for number in (1, 2, 3)),
    },
    "head": {"lm_head.weight"},
    "embedding": {"model.embed_tokens.weight"},
    "vector": {
        "conv.conv.weight",
        "self_attn.q_layernorm.weight",
        "self_attn.k_layernorm.weight",
        "operator_norm.weight",
        "ffn_norm.weight",
        "model.embedding_norm.weight",
    },
}
ASSIGNMENT["lfm2_value"] = ASSIGNMENT["lfm2"] | {
    "matrix": ASSIGNMENT["lfm2"]["matrix"] | {"self_attn.value_gate"},
    "embedding": {"model.embed_tokens.weight", "self_attn.value_embedding.weight"},
}


@pytest.mark.parametrize("arch", ASSIGNMENT)
def test_who_is_trained_by_what(arch: str):
    model = tiny(arch)
    kinds = parameter_kinds(model)
    names = {
        kind: {name.split(".", 3)[3] if ".layers." in name else name for name, _ in members}
        for kind, members in kinds.items()
    }
    assert names == ASSIGNMENT[arch]
    assert sum(len(members) for members in kinds.values()) == len(list(model.parameters()))
    optimizer = make_optimizer(model, config(), RATES, fused=False)
    muon, adamw = optimizer.parts
    assert (type(muon), type(adamw)) == (NorMuon, torch.optim.AdamW)
    assert [id(p) for p in muon.param_groups[0]["params"]] == [id(p) for _, p in kinds["matrix"]]
    assert [group["kind"] for group in adamw.param_groups] == [
        k for k in ("head", "embedding", "vector") if kinds[k]
    ]
    alone = make_optimizer(model, config(optimizer="adamw"), RATES, fused=False)
    assert [group["kind"] for group in alone.param_groups][0] == "matrix" and len(alone.parts) == 1


def test_a_tied_head_is_an_embedding():
    shape = scratch_config("qwen3", 1, vocab_size=64, max_seq_len=16)
    shape.tie_word_embeddings = True
    kinds = parameter_kinds(make_model(shape, seed=0))
    assert not kinds["head"] and [name for name, _ in kinds["embedding"]] == [
        "model.embed_tokens.weight"
    ]


def test_the_joint_optimizer_is_both_run_apart():
    joint_model, apart_model = tiny("qwen3"), tiny("qwen3")
    joint = make_optimizer(joint_model, config(optimizer="muon"), RATES, fused=False)
    kinds = {
        kind: [p for _, p in members] for kind, members in parameter_kinds(apart_model).items()
    }
    muon = torch.optim.Muon(kinds["matrix"], lr=0.02, weight_decay=0.28, momentum=0.85)
    adamw = torch.optim.AdamW(
        [
            {"params": kinds["head"], "lr": 0.008, "weight_decay": 0.01},
            {"params": kinds["embedding"], "lr": 0.3, "betas": (0.8, 0.995), "weight_decay": 0.001},
            {"params": kinds["vector"], "lr": 0.01, "weight_decay": 0.0},
        ],
        betas=(0.8, 0.96),
        eps=1e-10,
    )
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for optimizer in (joint, muon, adamw)
    ]
    for number in range(5):
        ids = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(number))
        for model, optimizers in ((joint_model, (joint,)), (apart_model, (muon, adamw))):
            logits = model(ids[:, :-1]).logits
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
    start = dict(tiny("qwen3").named_parameters())
    for (name, a), (_, b) in zip(
        joint_model.named_parameters(), apart_model.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        assert not torch.equal(a, start[name]), f"{name} was not trained"


def test_state_dict_and_groups_stay_shared():
    """accelerate loads the optimizer's own state into it when it wraps it."""
    model = tiny()
    optimizer = make_optimizer(model, config(), RATES, fused=False)
    train_step(model, optimizer, 0)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        group["weight_decay"] = 0.0
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train_step(model, optimizer, 1)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(part.state is optimizer.state for part in optimizer.parts)


def test_a_parameter_without_gradient_is_passed_over():
    model = tiny()
    optimizer = make_optimizer(model, config(), RATES, fused=False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("choice", ["muon", "adamw"])
def test_saved_state_goes_on_bit_identically(choice: str, tmp_path: Path):
    settings = config(optimizer=choice)
    whole, saved = tiny("qwen3"), tiny("qwen3")
    for model in (whole, saved):
        optimizer = make_optimizer(model, settings, RATES, fused=True)
        for number in range(3):
            train_step(model, optimizer, number)
        if model is saved:
            TrainingState(model, optimizer=optimizer).save(tmp_path, rank=0, world_size=1)
        else:
            for number in range(3, 6):
                train_step(model, optimizer, number)
    again = tiny("qwen3")
    TrainingState(again).load_weights(tmp_path)
    optimizer = make_optimizer(again, settings, RATES, fused=True)
    TrainingState(again, optimizer=optimizer).load_moments(tmp_path)
    for number in range(3, 6):
        train_step(again, optimizer, number)
    assert all(
        torch.equal(a, b) for a, b in zip(again.parameters(), whole.parameters(), strict=True)
    )


def rates_of(
    width: int, worth: float = REFERENCE_TOKENS, run: float | None = None, **changes
) -> Rates:
    return scaled_rates(
        config(**changes), width=width, worth_tokens=worth, run_tokens=worth if run is None else run
    )


def test_rates_at_the_reference_are_as_written():
    assert rates_of(768) == Rates(matrix=0.02, embedding=0.3, head=0.008, vector=0.008, decay=0.28)


def test_rates_scale_by_width_and_batch():
    rates = rates_of(192, REFERENCE_TOKENS // 2, total_batch_size=2**15)
    # a sixteenth to the power of a quarter; no width
    assert rates.matrix == pytest.approx(0.02 / 2)
    assert rates.embedding == pytest.approx(0.3 / 2 * 2)  # width a quarter: twice
    assert rates.head == pytest.approx(0.008)
    assert rates.decay == pytest.approx(0.28 / 4 * 2)  # sqrt of a sixteenth; half the tokens: twice
    before = rates_of(192, REFERENCE_TOKENS // 2, total_batch_size=2**15, lr_batch_exponent=0.5)
    assert before.matrix == pytest.approx(0.02 / 4) and before.decay == rates.decay
    assert rates_of(192, 1, total_batch_size=2**17).decay == pytest.approx(2.8)
    plain = rates_of(192, 100, 1, total_batch_size=2**17, lr_scaling=False)
    assert plain == Rates(matrix=0.02, embedding=0.3, head=0.008, vector=0.008, decay=0.28)


# tokens that the model is worth / tokens of the run: factor on the rates. By hand.
HORIZONS = {0.5: 1.0, 1.0: 1.0, 2.0: 1.2483, 10.0: 2.0893, 30.0: 2.9696, 1000.0: 4.0}


@pytest.mark.parametrize(("shorter", "factor"), HORIZONS.items())
def test_shorter_runs_have_higher_rates_and_no_other_decay(shorter: float, factor: float):
    rates = rates_of(768, REFERENCE_TOKENS, REFERENCE_TOKENS / shorter)
    assert rates.matrix == pytest.approx(0.02 * factor, rel=1e-4)
    assert rates.embedding == pytest.approx(0.3 * factor, rel=1e-4)
    assert rates.head == rates.vector == pytest.approx(0.008 * factor, rel=1e-4)
    assert rates.decay == pytest.approx(0.28 * min(1.0, shorter))


def test_one_rate_for_all_and_a_factor():
    rates = rates_of(64, 1, learning_rate=1e-3, lr_scale=0.7, lr_scaling=False)
    assert rates.matrix == rates.embedding == rates.head == pytest.approx(7e-4)
    assert rates_of(192, optimizer="adamw").matrix == pytest.approx(0.003 * 2)


# step: factor, of 100 steps with 10 of warm-up, 65% of warm-down to 5%. By hand.
WARMDOWN = {
    0: 0.1,
    1: 0.2,
    8: 0.9,
    9: 1.0,
    10: 1.0,
    34: 1.0,
    35: 1.0,
    48: 0.81,
    61: 0.62,
    99: 1 / 65 + 64 / 65 * 0.05,
}


def test_warm_up_stable_warm_down():
    factor = learning_rate_schedule(
        "warmdown", ScheduleSettings(100, 10, warmdown_ratio=0.65, final_fraction=0.05)
    )
    found = {step: factor(step) for step in WARMDOWN}
    assert found == pytest.approx(WARMDOWN)


@pytest.mark.parametrize("total", [1, 2, 7, 50])
def test_short_runs_have_a_schedule_too(total: int):
    factor = learning_rate_schedule(
        "warmdown", ScheduleSettings(total, 40, warmdown_ratio=1.0, final_fraction=0.0)
    )
    factors = [factor(step) for step in range(total + 1)]
    assert all(0 <= factor <= 1 for factor in factors) and factors[-1] == 0
    without = learning_rate_schedule(
        "warmdown", ScheduleSettings(total, 0, warmdown_ratio=0.0, final_fraction=0.0)
    )
    flat = [without(step) for step in range(total + 1)]
    assert flat == [1.0] * (total + 1)


# step of 1000: momentum (0.85 -> 0.97 in 400, -> 0.90 over the last 650), decay factor (half a
# cosine). By hand.
MATRIX_SCHEDULE = {
    0: (0.85, 1.0),
    200: (0.91, 0.5 * (1 + math.cos(math.pi / 5))),
    350: (0.955, 0.5 * (1 + math.cos(0.35 * math.pi))),
    500: (0.97 - 0.07 * 150 / 650, 0.5),
    1000: (0.90, 0.0),
}


def test_schedule_of_the_matrices():
    found = {
        step: (momentum_at(step, 1000, 0.65), decay_factor(step, 1000)) for step in MATRIX_SCHEDULE
    }
    for step, expected in MATRIX_SCHEDULE.items():
        assert found[step] == pytest.approx(expected, abs=1e-12), step
    model = tiny()
    optimizer = make_optimizer(model, config(), RATES, fused=False)
    set_matrix_schedule(optimizer, 500, total_steps=1000, warmdown_ratio=0.65, decay=0.28)
    groups = {group["kind"]: group for group in optimizer.param_groups}
    assert groups["matrix"]["momentum"] == pytest.approx(MATRIX_SCHEDULE[500][0])
    assert groups["matrix"]["weight_decay"] == pytest.approx(0.14)
    assert groups["head"]["weight_decay"] == 0.01
    assert isinstance(optimizer, JointOptimizer)


# ---------------------------------------------------------------- Muon of many matrices at once

MATRIX_SHAPES = [(24, 24)] * 5 + [(16, 40)] * 3 + [(40, 16)] * 2 + [(8, 64)]


def matrices(seed: int = 0) -> list[torch.nn.Parameter]:
    made = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=made)) for shape in MATRIX_SHAPES]


def give_gradients(parameters: list[torch.nn.Parameter], step: int) -> None:
    made = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=made)


def muon_in_float64(steps: int, rate: float, decay: float, momentum: float) -> list[torch.Tensor]:
    """The algorithm from its definition (torch.optim.Muon's documentation), without bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    weights = [parameter.detach().double() for parameter in matrices()]
    buffers = [torch.zeros_like(weight) for weight in weights]
    for step in range(steps):
        give_gradients(given := matrices(), step)
        for number, parameter in enumerate(given):
            gradient = parameter.grad.double()
            buffers[number] = momentum * buffers[number] + (1 - momentum) * gradient
            x = (1 - momentum) * gradient + momentum * buffers[number]
            tall = x.shape[0] > x.shape[1]
            x = x.T if tall else x
            x = x / x.norm().clamp(min=1e-7)
            for _ in range(5):
                gram = x @ x.T
                x = a * x + (b * gram + c * gram @ gram) @ x
            x = x.T if tall else x
            scale = math.sqrt(max(1, x.shape[0] / x.shape[1]))
            weights[number] = weights[number] * (1 - rate * decay) - rate * scale * x
    return weights


def test_batched_muon_is_as_near_to_float64_as_torchs(monkeypatch):
    settings = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9}
    truth, before = muon_in_float64(4, 0.05, 0.1, 0.9), matrices()
    errors, moments = {}, {}
    for kind, at_once in ((torch.optim.Muon, 0), (BatchedMuon, 2**25), (BatchedMuon, 2 * 24 * 24)):
        monkeypatch.setattr("finetune.training.muon.MUON_AT_ONCE", at_once)
        parameters = matrices()
        optimizer = kind(parameters, **settings)
        for step in range(4):
            give_gradients(parameters, step)
            optimizer.step()
        change = [
            (p.detach() - b.detach(), t - b.detach())
            for p, b, t in zip(parameters, before, truth, strict=True)
        ]
        errors[at_once] = [float((ours - wanted).norm() / wanted.norm()) for ours, wanted in change]
        moments[at_once] = [optimizer.state[p]["momentum_buffer"] for p in parameters]
    for at_once in (2**25, 2 * 24 * 24):
        assert all(torch.equal(*pair) for pair in zip(moments[at_once], moments[0], strict=True))
        for ours, theirs in zip(errors[at_once], errors[0], strict=True):
            assert ours < 1.1 * theirs + 1e-4 < 0.05


def normuon_in_float64(
    steps: int, rate: float, decay: float, momentum: float
) -> list[torch.Tensor]:
    """The algorithm a matrix at a time, from the papers that NorMuon names, without bfloat16."""
    weights = [parameter.detach().double() for parameter in matrices()]
    buffers = [torch.zeros_like(weight) for weight in weights]
    neurons: list[Any] = [0.0] * len(weights)
    for step in range(steps):
        give_gradients(given := matrices(), step)
        for number, parameter in enumerate(given):
            gradient, weight = parameter.grad.double(), weights[number]
            buffers[number] = momentum * buffers[number] + (1 - momentum) * gradient
            x = (1 - momentum) * gradient + momentum * buffers[number]
            rows, columns = x.shape
            x = x * (x.norm() / rows**0.5) / x.norm(dim=1, keepdim=True)
            x = x / (1.01 * x.norm())
            for a, b, c in POLAR_EXPRESS:
                x = a * x + b * (x @ x.T @ x) + c * (x @ x.T @ x @ x.T @ x)
            x = x * min(rows, columns) ** 0.5 / x.norm()
            mean = x.square().mean(dim=int(rows >= columns), keepdim=True)
            neurons[number] = 0.9 * neurons[number] + 0.1 * mean
            even = x / neurons[number].sqrt()
            even = even * x.norm() / even.norm()
            step_rate = rate * max(1, rows / columns) ** 0.5
            weights[number] = weight - step_rate * (even + decay * weight * (weight * even >= 0))
    return weights


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_normuon_is_its_definition(dtype: torch.dtype, tolerance: float):
    """bfloat16 rounds the products of five iterations: some percent of an update, as of torch's own
    Muon.
    """
    truth, before, parameters = normuon_in_float64(6, 0.05, 0.1, 0.9), matrices(), matrices()
    optimizer = NorMuon(parameters, lr=0.05, weight_decay=0.1, momentum=0.9, dtype=dtype)
    for step in range(6):
        give_gradients(parameters, step)
        optimizer.step()
    for ours, wanted, start in zip(parameters, truth, before, strict=True):
        assert float((ours.detach() - wanted).norm() / (wanted - start.detach()).norm()) < tolerance
        assert optimizer.state[ours][SECOND_MOMENT].numel() == max(ours.shape)


def test_polar_express_comes_nearer_to_one_than_one_polynomial_five_times():
    """What the coefficients are for, of singular values from 0.005 to 1."""

    def farthest(coefficients: Any) -> float:
        x = torch.logspace(-2.3, 0, 500, dtype=torch.float64)
        for a, b, c in coefficients:
            x = a * x + b * x**3 + c * x**5
        return float((x - 1).abs().max())

    assert farthest(POLAR_EXPRESS) < 0.15 < 0.3 < farthest([(3.4445, -4.7750, 2.0315)] * 5)


class Calls(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def test_muons_matrices_of_a_shape_take_one_product_together():
    def products(kind: type[torch.optim.Muon]) -> int:
        parameters = matrices()
        give_gradients(parameters, 0)
        with Calls() as calls:
            kind(parameters).step()
        return sum(calls.counts[f"aten::{name}"] for name in ("mm", "addmm", "bmm", "baddbmm"))

    assert products(torch.optim.Muon) == 15 * len(MATRIX_SHAPES)
    assert products(BatchedMuon) == 15 * len(set(MATRIX_SHAPES))


@pytest.mark.parametrize("kind", ["normuon", "muon", "adamw"])
def test_a_step_is_empty_where_the_device_says_so(kind: str):
    """Weights, moments and step count to the bit, though every gradient is NaN; the next is as if
    it had not been.
    """
    plain, skipping = tiny("qwen3"), tiny("qwen3")
    pair = [
        make_optimizer(model, config(optimizer=kind), RATES, fused=True)
        for model in (plain, skipping)
    ]
    for model, optimizer in zip((plain, skipping), pair, strict=True):
        assert skip_where(optimizer, torch.zeros(()))
        train_step(model, optimizer, 0)
    kept = copy.deepcopy((skipping.state_dict(), pair[1].state_dict()["state"]))
    for parameter in skipping.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    assert skip_where(pair[1], torch.ones(()))
    pair[1].step()
    pair[1].zero_grad()
    for name, tensor in skipping.state_dict().items():
        assert torch.equal(tensor, kept[0][name]), name
    for number, state in pair[1].state_dict()["state"].items():
        assert all(torch.equal(tensor, kept[1][number][name]) for name, tensor in state.items())
    for model, optimizer in zip((plain, skipping), pair, strict=True):
        skip_where(optimizer, torch.zeros(()))
        train_step(model, optimizer, 1)
    for (name, ours), wanted in zip(skipping.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, wanted), name


def test_an_optimizer_without_a_fused_kernel_is_asked_by_the_host():
    optimizer = make_optimizer(tiny(), config(), RATES, fused=False)
    assert not skip_where(optimizer, torch.ones(()))
    assert all(getattr(part, "found_inf", None) is None for part in optimizer.parts)
