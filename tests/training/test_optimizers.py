"""Optimizers: Muon and AdamW as one, their rates and courses; and those of full fine-tuning with less state."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import run_patches
import torch
import torch.distributed as dist
from run_helpers import LAYOUTS, Materials, events, losses
from safetensors.torch import load_file

import finetune
from finetune.config.pretrain_config import PretrainConfig
from finetune.config.resolution import resolve_object
from finetune.errors import ConfigError
from finetune.modeling.scratch import make_model, scratch_config
from finetune.planning.inputs import fine_tuning_workload
from finetune.planning.memory import memory_of
from finetune.planning.shapes import known_config, shape_of_config
from finetune.planning.workload import Cluster
from finetune.training.muon import POLAR_EXPRESS, SECOND_MOMENT, BatchedMuon, NorMuon
from finetune.training.optimizers import (
    REFERENCE_TOKENS,
    Rates,
    decay_factor,
    make_optimizer,
    momentum_at,
    parameter_kinds,
    scaled_rates,
    set_matrix_schedule,
    skip_where,
)
from finetune.training.trainer import RunTrainer

RATES = Rates(matrix=0.02, embedding=0.3, head=0.008, vector=0.01, decay=0.28)


def config(**settings) -> PretrainConfig:
    return PretrainConfig(train_data_path=("x.bin",), output_dir="out", **settings)


def tiny(arch: str = "nanochat", depth: int = 2):
    return make_model(scratch_config(arch, depth, vocab_size=64, max_seq_len=16), seed=0)


def by_kind(model) -> dict[str, list[torch.nn.Parameter]]:
    return {kind: [p for _, p in members] for kind, members in parameter_kinds(model).items()}


def train_step(model, optimizers, number: int) -> None:
    ids = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(number))
    logits = model(ids[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    for optimizer in optimizers if isinstance(optimizers, tuple) else (optimizers,):
        optimizer.step()
        optimizer.zero_grad()


# kind: what the names of its parameters end with, without numbers of layers.
ASSIGNMENT = {
    "matrix": """self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj self_attn.value_gate
        conv.in_proj conv.out_proj feed_forward.w1 feed_forward.w2 feed_forward.w3""",
    "head": "lm_head",
    "embedding": "model.embed_tokens self_attn.value_embedding",
    "vector": """conv.conv self_attn.q_layernorm self_attn.k_layernorm operator_norm ffn_norm
        model.embedding_norm""",
}


def test_who_is_trained_by_what():
    model = tiny("lfm2_value")
    kinds = parameter_kinds(model)
    for kind, members in kinds.items():
        names = {name.removesuffix(".weight") for name, _ in members}
        names = {name.split(".", 3)[3] if ".layers." in name else name for name in names}
        assert names == set(ASSIGNMENT[kind].split())
    assert sum(len(members) for members in kinds.values()) == len(list(model.parameters()))
    muon, adamw = make_optimizer(model, config(), RATES, fused=False).parts
    assert (type(muon), type(adamw)) == (NorMuon, torch.optim.AdamW)
    assert [id(p) for p in muon.param_groups[0]["params"]] == [id(p) for _, p in kinds["matrix"]]
    assert [group["kind"] for group in adamw.param_groups] == ["head", "embedding", "vector"]
    alone = make_optimizer(model, config(optimizer="adamw"), RATES, fused=False)
    assert [group["kind"] for group in alone.param_groups][0] == "matrix" and len(alone.parts) == 1
    shape = scratch_config("qwen3", 1, vocab_size=64, max_seq_len=16)
    shape.tie_word_embeddings = True
    tied = parameter_kinds(make_model(shape, seed=0))
    assert not tied["head"] and [name for name, _ in tied["embedding"]] == [
        "model.embed_tokens.weight"
    ]


def test_the_joint_optimizer_is_both_run_apart():
    joint_model, apart_model = tiny("qwen3"), tiny("qwen3")
    joint = make_optimizer(joint_model, config(optimizer="muon"), RATES, fused=False)
    kinds = by_kind(apart_model)
    muon = torch.optim.Muon(kinds["matrix"], lr=0.02, weight_decay=0.28, momentum=0.85)
    groups = [
        {"params": kinds["head"], "lr": 0.008, "weight_decay": 0.01},
        {"params": kinds["embedding"], "lr": 0.3, "betas": (0.8, 0.995), "weight_decay": 0.001},
        {"params": kinds["vector"], "lr": 0.01, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.8, 0.96), eps=1e-10)
    for number in range(5):
        train_step(joint_model, joint, number)
        train_step(apart_model, (muon, adamw), number)
        for group in (g for one in (joint, muon, adamw) for g in one.param_groups):
            group["lr"] *= 0.7
    start, apart = dict(tiny("qwen3").named_parameters()), dict(apart_model.named_parameters())
    for name, parameter in joint_model.named_parameters():
        assert torch.equal(parameter, apart[name]), name
        assert not torch.equal(parameter, start[name]), f"{name} was not trained"


def test_state_dict_and_groups_stay_shared_and_without_gradients_nothing_changes():
    """accelerate loads the optimizer's own state into it when it wraps it."""
    model = tiny()
    optimizer = make_optimizer(model, config(), RATES, fused=False)

    def same_after(step: Any) -> bool:
        before = copy.deepcopy(model.state_dict())
        step()
        return all(torch.equal(tensor, before[n]) for n, tensor in model.state_dict().items())

    assert same_after(optimizer.step)
    train_step(model, optimizer, 0)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    assert same_after(lambda: train_step(model, optimizer, 1))
    assert all(part.state is optimizer.state for part in optimizer.parts)


def rates_of(width: int, worth=REFERENCE_TOKENS, run: float | None = None, **changes) -> Rates:
    run = worth if run is None else run
    return scaled_rates(config(**changes), width=width, worth_tokens=worth, run_tokens=run)


def test_rates_scale_by_width_and_batch():
    reference = Rates(matrix=0.02, embedding=0.3, head=0.008, vector=0.008, decay=0.28)
    assert rates_of(768) == reference
    rates = rates_of(192, REFERENCE_TOKENS // 2, total_batch_size=2**15)
    # a sixteenth to the power of a quarter; no width
    assert rates.matrix == pytest.approx(0.02 / 2)
    assert rates.embedding == pytest.approx(0.3 / 2 * 2)  # width a quarter: twice
    assert rates.head == pytest.approx(0.008)
    assert rates.decay == pytest.approx(0.28 / 4 * 2)  # sqrt of a sixteenth; half the tokens: twice
    before = rates_of(192, REFERENCE_TOKENS // 2, total_batch_size=2**15, lr_batch_exponent=0.5)
    assert before.matrix == pytest.approx(0.02 / 4) and before.decay == rates.decay
    assert rates_of(192, 1, total_batch_size=2**17).decay == pytest.approx(2.8)
    assert rates_of(192, 100, 1, total_batch_size=2**17, lr_scaling=False) == reference
    one = rates_of(64, 1, learning_rate=1e-3, lr_scale=0.7, lr_scaling=False)
    assert one.matrix == one.embedding == one.head == pytest.approx(7e-4)
    assert rates_of(192, optimizer="adamw").matrix == pytest.approx(0.003 * 2)
    # A run of a tenth of the tokens that the model is worth, and of twice as many. By hand.
    shorter, longer = (rates_of(768, run=REFERENCE_TOKENS * size) for size in (0.1, 2))
    assert shorter.matrix == pytest.approx(0.02 * 2.0893, rel=1e-4) and shorter.decay == 0.28
    assert longer.head == 0.008 and longer.decay == pytest.approx(0.14)
    assert rates_of(768, run=1).embedding == pytest.approx(0.3 * 4)


# step of 1000: momentum (0.85 -> 0.97 in 400, -> 0.90 over the last 650), decay factor (half a
# cosine). By hand.
MATRIX_SCHEDULE = {
    0: (0.85, 1.0),
    350: (0.955, 0.5 * (1 + math.cos(0.35 * math.pi))),
    380: (0.964, 0.5 * (1 + math.cos(0.38 * math.pi))),  # the warm-down begins before the top
    500: (0.97 - 0.07 * 150 / 650, 0.5),
    1000: (0.90, 0.0),
}


def test_schedule_of_the_matrices():
    for step, expected in MATRIX_SCHEDULE.items():
        found = (momentum_at(step, 1000, 0.65), decay_factor(step, 1000))
        assert found == pytest.approx(expected, abs=1e-12), step
    optimizer = make_optimizer(tiny(), config(), RATES, fused=False)
    set_matrix_schedule(optimizer, 500, total_steps=1000, warmdown_ratio=0.65, decay=0.28)
    groups = {group["kind"]: group for group in optimizer.param_groups}
    assert groups["matrix"]["momentum"] == pytest.approx(MATRIX_SCHEDULE[500][0])
    assert groups["matrix"]["weight_decay"] == pytest.approx(0.14)
    assert groups["head"]["weight_decay"] == 0.01


MATRIX_SHAPES = [(24, 24)] * 5 + [(16, 40)] * 3 + [(40, 16)] * 2 + [(8, 64)]


def matrices(seed: int = 0) -> list[torch.nn.Parameter]:
    made = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=made)) for shape in MATRIX_SHAPES]


def trained(kind: type[torch.optim.Muon], steps: int, **settings: Any):
    """Matrices after some steps on given gradients, with their optimizer."""
    parameters = matrices()
    optimizer = kind(parameters, lr=0.05, weight_decay=0.1, momentum=0.9, **settings)
    for step in range(steps):
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return parameters, optimizer


def gradients(step: int) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in matrices(100 + step)]


def in_float64(
    steps: int, normuon: bool, rate: float = 0.05, decay: float = 0.1
) -> list[torch.Tensor]:
    """A matrix at a time, without bfloat16: Muon from torch.optim.Muon's documentation, NorMuon from the
    papers that it names.
    """
    weights = [parameter.detach().double() for parameter in matrices()]
    buffers: list[Any] = [0.0] * len(weights)
    neurons: list[Any] = [0.0] * len(weights)
    coefficients = POLAR_EXPRESS if normuon else [(3.4445, -4.7750, 2.0315)] * 5
    for step in range(steps):
        for number, gradient in enumerate(gradients(step)):
            weight, gradient = weights[number], gradient.double()
            buffers[number] = 0.9 * buffers[number] + 0.1 * gradient
            x = 0.1 * gradient + 0.9 * buffers[number]
            rows, columns = x.shape
            if normuon:
                x = x / x.norm(dim=1, keepdim=True)
            x = x / x.norm() / (1.01 if normuon else 1.0)
            for a, b, c in coefficients:
                x = a * x + b * (x @ x.T @ x) + c * (x @ x.T @ x @ x.T @ x)
            step_rate = rate * max(1, rows / columns) ** 0.5
            if not normuon:
                weights[number] = weight * (1 - rate * decay) - step_rate * x
                continue
            x = x * min(rows, columns) ** 0.5 / x.norm()
            mean = x.square().mean(dim=int(rows >= columns), keepdim=True)
            neurons[number] = 0.9 * neurons[number] + 0.1 * mean
            even = x / neurons[number].sqrt()
            even = even * x.norm() / even.norm()
            weights[number] = weight - step_rate * (even + decay * weight * (weight * even >= 0))
    return weights


def errors(parameters: list[torch.nn.Parameter], truth: list[torch.Tensor]) -> list[float]:
    """Relative to the change."""
    pairs = zip(parameters, truth, matrices(), strict=True)
    return [float((p.detach() - t).norm() / (t - start.detach()).norm()) for p, t, start in pairs]


def test_batched_muon_is_as_near_to_float64_as_torchs(monkeypatch):
    truth = in_float64(4, normuon=False)
    theirs, reference = trained(torch.optim.Muon, 4)
    for at_once in (2**25, 2 * 24 * 24):
        monkeypatch.setattr("finetune.training.muon.MUON_AT_ONCE", at_once)
        ours, optimizer = trained(BatchedMuon, 4)
        for error, other in zip(errors(ours, truth), errors(theirs, truth), strict=True):
            assert error < 1.1 * other + 1e-4 < 0.05
        for mine, other in zip(ours, theirs, strict=True):
            moments = (optimizer.state[mine], reference.state[other])
            assert torch.equal(*(moment["momentum_buffer"] for moment in moments))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_normuon_is_its_definition(dtype: torch.dtype, tolerance: float):
    """bfloat16 rounds the products of five iterations: some percent of an update, as torch's own Muon."""
    parameters, optimizer = trained(NorMuon, 6, dtype=dtype)
    assert max(errors(parameters, in_float64(6, normuon=True))) < tolerance
    assert all(optimizer.state[p][SECOND_MOMENT].numel() == max(p.shape) for p in parameters)


def test_ranks_share_the_matrices(monkeypatch):
    _, muon = trained(BatchedMuon, 0)
    (group,), update = muon.param_groups, torch.randn(5, 8, 6)
    parts: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda whole, part: parts.append(part))
    for rank in range(3):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        assert len(muon._directions(update, group)) == 5
    assert torch.equal(torch.cat(parts)[:5], muon._orthogonalised(update, group))


@pytest.mark.parametrize("kind", ["normuon", "muon", "adamw"])
def test_a_step_is_empty_where_the_device_says_so(kind: str):
    """To the bit, though every gradient is NaN: the next step is as if it had not been."""
    models = plain, skipping = tiny("qwen3"), tiny("qwen3")
    pair = [make_optimizer(m, config(optimizer=kind), RATES, fused=True) for m in models]

    def both(number: int) -> None:
        for model, optimizer in zip(models, pair, strict=True):
            assert skip_where(optimizer, torch.zeros(()))
            train_step(model, optimizer, number)

    both(0)
    for parameter in skipping.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    assert skip_where(pair[1], torch.ones(()))
    pair[1].step()
    pair[1].zero_grad()
    for wanted, ours in zip(*(o.state_dict()["state"].values() for o in pair), strict=True):
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in ours.items())
    both(1)
    for (name, ours), wanted in zip(skipping.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, wanted), name


NAMES = ("adamw-8bit", "adafactor", "muon")
RATE, DECAY = 1e-3, 0.5
# bitsandbytes keeps 32 bits for tensors of less than 4096 numbers, and both must be there
MATERIALS = {"hidden": 64}


def settings(materials: Materials, folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    common = {"finetuning": "full", "optimizer": name, "learning_rate": RATE, "save_steps": 2}
    return materials.settings(folder, **{**common, **changes})


def first_step(
    name: str, weight: torch.Tensor, gradient: torch.Tensor, in_block: bool
) -> torch.Tensor:
    """Of the definition; vectors do not decay."""
    decayed = weight * (1 - RATE * (DECAY if weight.ndim == 2 else 0.0))
    if name == "muon" and in_block and weight.ndim == 2:
        parameter = torch.nn.Parameter(weight.clone())
        parameter.grad = gradient
        muon = {"lr": RATE, "weight_decay": DECAY, "adjust_lr_fn": "match_rms_adamw"}
        torch.optim.Muon([parameter], **muon).step()
        return parameter.detach()
    if name != "adafactor":  # Adam's first step has the size of the rate
        return decayed - RATE * gradient / (gradient.abs() + 1e-8)
    squares = gradient.double().square() + 1e-30
    if weight.ndim == 2:
        rows, columns = squares.mean(1, keepdim=True), squares.mean(0, keepdim=True)
        squares = rows * columns / rows.mean()
    update = gradient.double() / squares.sqrt()
    return (decayed - RATE * update / update.square().mean().sqrt().clamp(min=1.0)).float()


@pytest.mark.parametrize("name", NAMES)
def test_the_first_step_is_that_of_the_definition(materials, tmp_path, monkeypatch, name) -> None:
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    plain = RunTrainer._get_grad_norm

    def looking(self: RunTrainer, *arguments: Any, **options: Any) -> Any:
        norm = plain(self, *arguments, **options)
        for key, parameter in self.model.named_parameters():
            seen[key] = (parameter.detach().clone(), parameter.grad.clone())
        return norm

    monkeypatch.setattr(RunTrainer, "_get_grad_norm", looking)
    changes = {"max_steps": 1, "warmup_steps": 0, "weight_decay": DECAY, "save_steps": 0}
    finetune.run(settings(materials, tmp_path / "run", name, **changes))
    result = run_helpers.result_weights(tmp_path / "run")
    for key, (weight, gradient) in seen.items():
        expected = first_step(name, weight, gradient, ".layers." in key)
        assert (result[key] - expected).norm() < 0.03 * (expected - weight).norm(), key


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_trains_about_as_adamw_does_and_the_same_after_a_kill(materials, tmp_path, name):
    adamw, whole, killed = (tmp_path / name for name in ("adamw", "whole", "killed"))
    run_helpers.train(settings(materials, adamw, "adamw"))
    run_helpers.train(settings(materials, whole, name))
    before, after = losses(adamw), losses(whole)
    assert after[0] == before[0] and after[-1] < after[0] - 0.3 * (before[0] - before[-1])
    run_helpers.kill_and_resume(
        settings(materials, killed, name, async_save=False), 6, resumed_at=4
    )
    run_helpers.assert_same_training(killed, whole)


def test_a_step_that_is_not_finite_is_skipped(materials, tmp_path) -> None:
    """By the host: this optimizer has no kernel that could."""
    output_dir = tmp_path / "run"
    patch = {"patch": run_patches.spoil_losses, "patch_arguments": (0, (3,), math.nan, "loss")}
    changes = {"save_steps": 1, "save_total_limit": 9, "max_steps": 4}
    run_helpers.train(settings(materials, output_dir, "adamw-8bit", **changes), **patch)
    assert [event["step"] for event in events(output_dir, "nonfinite")] == [3]
    two, three, four = (
        load_file(output_dir / f"checkpoint-{step}" / "weights.safetensors") for step in (2, 3, 4)
    )
    assert all(torch.equal(two[key], three[key]) for key in two)
    assert not all(torch.equal(three[key], four[key]) for key in two)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (LAYOUTS["zero2"], "DeepSpeed shards AdamW's two flat moments"),
        ({"device_type": "npu", "optimizer": "adamw-8bit"}, "not on npu"),
    ],
)
def test_what_it_does_not_go_with_is_refused(materials, tmp_path, changes, words) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve_object(settings(materials, tmp_path, "muon") | changes, 1)


# Of Adafactor: 4 bytes for each row and column of Qwen3-8B's matrices (36 blocks of q, k, v, o, gate, up,
# down; embedding and head).
SIDES = 36 * (2 * 8192 + 2 * (4096 + 1024) + 3 * (4096 + 12288)) + 2 * (151936 + 4096)


@pytest.mark.parametrize(
    ("name", "each"),
    [("adamw", 8), ("adamw-8bit", 2.03), ("adafactor", 4 * SIDES / 8.19e9), ("muon", 0)],
)
def test_a_plan_counts_its_state(name: str, each: float) -> None:
    given = {"model": "Qwen/Qwen3-8B", "data": "x.jsonl", "output_dir": "out", "finetuning": "full"}
    config = resolve_object(given | {"optimizer": name}, 1).config
    shape = shape_of_config(known_config("Qwen/Qwen3-8B"))
    work = fine_tuning_workload(config, shape, Cluster(devices_per_node=1))
    state = sum(term.bytes for term in memory_of(work).terms if term.kind == "optimizer")
    others = shape.total - shape.block_matrices
    expected = 4 * shape.block_matrices + 8 * others if name == "muon" else each * shape.total
    assert state == pytest.approx(expected, rel=0.2 if name == "adafactor" else 0.01)
