"""The loss against its definition: each sample alone, summed, by the global batch's targets."""

from __future__ import annotations

import copy
import itertools
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import run_helpers
import tiny_models
import torch
from accelerate import Accelerator
from tiny_models import CPU, VOCABULARY, tiny_config
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from finetune import run
from finetune.batching.collate import collate
from finetune.batching.steps import Execution, InOrder, LossGroups, StepBatches
from finetune.modeling import objective
from finetune.modeling.attention import ISOLATED, choose_attention
from finetune.modeling.loss import (
    ChunkedHead,
    make_chunked_head,
    microbatch_losses,
    sums_by_group,
    token_losses,
)
from finetune.modeling.preference_loss import WeighedHead
from finetune.training.control import Control
from finetune.training.executor import REHEARSAL, StepExecutor, largest_microbatch, microbatch_seed


class FakeSamples:
    """Random tokens, of which some are trained; none in every fifth sample."""

    def __init__(self, count: int, seed: int) -> None:
        choose = np.random.default_rng(seed)
        self.items = []
        for number in range(count):
            length = int(choose.integers(2, 24))
            supervised = choose.random(length) < (0.5 if number % 5 else 0.0)
            supervised[0] = False
            self.items.append((choose.integers(0, VOCABULARY, length).astype(np.int32), supervised))
        self.lengths = np.array([len(ids) for ids, _ in self.items])
        self.supervised_counts = np.array([int(mask.sum()) for _, mask in self.items])
        self.difficulties = choose.integers(-1, 2, count)
        self.record_ids = np.arange(count)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.items[index]


def make_model(attention: str) -> torch.nn.Module:
    config = tiny_config("qwen3", num_hidden_layers=2, tie_word_embeddings=True)
    return tiny_models.make_model(config, attention).double().requires_grad_(True)


@pytest.fixture
def model() -> torch.nn.Module:
    choose_attention(tiny_config("qwen3"))
    return make_model(ISOLATED)


def plain_losses(model: torch.nn.Module, ids: np.ndarray, supervised: np.ndarray) -> torch.Tensor:
    """Losses of a sample's targets, from nothing but its tokens."""
    tokens = torch.from_numpy(ids.astype(np.int64))
    logits = model(input_ids=tokens[None]).logits[0]
    mask = torch.from_numpy(supervised[1:].copy())
    return cross_entropy(logits[:-1][mask], tokens[1:][mask], reduction="none")


def defined_gradient(samples: FakeSamples) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of all samples as one global batch, with transformers' own attention."""
    model = make_model("sdpa")
    total = int(samples.supervised_counts.sum())
    loss = sum(plain_losses(model, *samples[i]).sum() for i in range(len(samples))) / total
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_gradients_equal(model, wanted, tolerance=1e-09):
    for name, parameter in model.named_parameters():
        norm = wanted[name].norm()
        assert norm > 0, name
        assert (parameter.grad - wanted[name]).norm() < tolerance * norm, name


def execute(model, samples, execution, *, head=None, rehearsal=False):
    """Run all samples as step 0 of every rank; gradients are added up, as an all-reduce would.

    Returns loss, sums per difficulty and the number of microbatches.
    """
    loss, group_losses, count = 0.0, torch.zeros(2), 0
    for rank in range(execution.world_size):
        step_batches = StepBatches(
            samples,
            InOrder(len(samples), len(samples)),
            replace(execution, rank=rank),
            difficulty_ids=samples.difficulties,
            groups=LossGroups(("easy", "hard")),
            pad_token_id=0,
        )
        executor = StepExecutor(
            Accelerator(cpu=True),
            step_batches,
            Control(1),
            seed=1,
            head=head,
            flat_reduce=False,
            largest=largest_microbatch(step_batches) if rehearsal else None,
        )
        result = executor.run(model, step_batches[0])
        loss += float(result.loss)
        group_losses += result.sums
        count += len(step_batches[0].microbatches)
    return loss, group_losses, count


EXECUTIONS = {
    "one packed sequence": Execution(0, 1, 10_000, None),
    "packed": Execution(0, 1, 40, None),
    "padded": Execution(0, 1, None, 4),
    "packed, 3 ranks": Execution(0, 3, 60, None),
    "padded, 2 ranks": Execution(0, 2, None, 4),
    "packed, more ranks than samples": Execution(0, 30, 60, None),
    "padded, more ranks than microbatches": Execution(0, 9, None, 6),
}


@pytest.mark.parametrize("name", EXECUTIONS)
def test_gradient_is_that_of_the_definition(model, name, monkeypatch):
    earlier: list[weakref.ref] = []

    def watched(*arguments: object) -> torch.Tensor:
        # they hold on to their graph, and that to tensors as large as hidden states
        assert all(losses() is None for losses in earlier), "losses of a microbatch before"
        losses = microbatch_losses(*arguments)
        earlier.append(weakref.ref(losses))
        return losses

    monkeypatch.setattr(objective, "microbatch_losses", watched)
    samples, execution = FakeSamples(23, seed=3), EXECUTIONS[name]
    rehearsal, head = name in ("packed", "padded"), None
    if "ranks" not in name:
        head = ChunkedHead(model.get_output_embeddings(), 3 * VOCABULARY)
    wanted_loss, wanted = defined_gradient(samples)
    given = {"head": head, "rehearsal": rehearsal}
    loss, group_losses, count = execute(model, samples, execution, **given)
    assert count % execution.world_size == 0 and len(earlier) == count + rehearsal
    if "more ranks" in name:  # so some microbatches are empty
        assert count > len(samples) // (execution.samples_per_microbatch or 1)
    assert_gradients_equal(model, wanted)
    assert loss == pytest.approx(wanted_loss, rel=1e-6)  # summed in float32, for the log only
    plain = make_model("sdpa").requires_grad_(False)
    for difficulty in (0, 1):
        members = np.flatnonzero(samples.difficulties == difficulty).tolist()
        wanted_sum = float(sum(plain_losses(plain, *samples[i]).sum() for i in members))
        assert float(group_losses[difficulty]) == pytest.approx(wanted_sum, rel=1e-5)


def test_every_microbatch_draws_its_own_dropout():
    """By seed, step, place in the schedule and rank; the rehearsal's draw is nobody else's."""
    keys = itertools.product((0, 1), range(3), (REHEARSAL, 0, 1, 2, 3), range(3))
    seeds = [microbatch_seed(*key) for key in keys]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)


def head_losses(head, hidden, targets, softcap=None, made=ChunkedHead):
    config = None if softcap is None else SimpleNamespace(final_logit_softcapping=softcap)
    chunked = made(copy.copy(head), 4 * head.out_features, softcapped=config)
    with chunked.scoring(targets):
        return chunked._forward(hidden)


def by_autograd(head: Any, hidden: Any, targets: Any, softcap: float | None = None) -> Any:
    logits = head(hidden)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return cross_entropy(logits, targets, reduction="none")


def eleven_tokens(*, bias: bool = False) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = torch.nn.Linear(16, VOCABULARY, bias=bias).double()
    hidden = torch.randn(11, 16, dtype=torch.float64, requires_grad=True)
    return head, hidden, torch.randint(0, VOCABULARY, (11,))


@pytest.mark.parametrize("kind", [ChunkedHead, WeighedHead])
@pytest.mark.parametrize(("bias", "softcap"), [(False, None), (True, 0.7)])
def test_the_heads_gradients_are_those_of_autograd(bias: bool, softcap: float | None, kind: Any):
    """With the same factor for every target, or with its own where preferences weigh the losses."""
    head, hidden, targets = eleven_tokens(bias=bias)
    trained = [hidden, *head.parameters()]
    factors = torch.rand(11, dtype=torch.float64) if kind is WeighedHead else 0.03
    wanted = by_autograd(head, hidden, targets, softcap)
    found = head_losses(head, hidden, targets, softcap, kind)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad((x * factors).sum(), trained) for x in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-13)


def test_a_frozen_head_gives_each_target_its_own_factor_and_a_trained_one_says_that_it_cannot():
    head, hidden, targets = eleven_tokens()
    factors = torch.rand(11, dtype=torch.float64)
    (wanted,) = torch.autograd.grad((by_autograd(head, hidden, targets) * factors).sum(), hidden)
    losses = head_losses(head, hidden, targets)
    of_hidden, of_weight = torch.autograd.grad((losses * factors).sum(), (hidden, head.weight))
    torch.testing.assert_close(of_hidden, wanted, rtol=1e-11, atol=1e-13)
    assert of_weight.isnan().all(), "a wrong gradient would be worse"
    head.requires_grad_(False)
    (frozen,) = torch.autograd.grad((head_losses(head, hidden, targets) * factors).sum(), hidden)
    assert torch.equal(frozen, of_hidden)


def test_logits_are_made_once_and_evaluation_makes_nothing_else():
    from torch.utils.flop_counter import FlopCounterMode

    head, hidden, targets = eleven_tokens()
    for learning, trained, products in ((True, True, 3), (False, True, 1), (True, False, 2)):
        head.requires_grad_(trained)
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(learning):
            losses = head_losses(head, hidden, targets)
            if learning:
                losses.sum().backward()
        assert counter.get_total_flops() == products * 2 * 11 * 16 * VOCABULARY


def test_the_head_is_an_ordinary_head_again_afterwards(model):
    ids = torch.arange(6)[None]
    before = model(input_ids=ids).logits
    head = make_chunked_head(model)
    microbatch = collate([(*FakeSamples(2, seed=5)[1], 0)], packing=True, pad_token_id=0)
    microbatch_losses(model, microbatch, CPU, head)
    assert torch.equal(model(input_ids=ids).logits, before)
    with pytest.raises(ZeroDivisionError), head.scoring(ids):
        raise ZeroDivisionError  # out of memory, say
    assert torch.equal(model(input_ids=ids).logits, before)
    assert set(model.state_dict()) == set(make_model("sdpa").state_dict())


def test_softmax_of_16_bit_logits_is_in_float32():
    logits = (torch.arange(300.0).reshape(3, 100) / 17).bfloat16()
    losses = token_losses(logits, torch.tensor([0, 5, 99]))
    assert losses.dtype == torch.float32
    wanted = cross_entropy(logits.double(), torch.tensor([0, 5, 99]), reduction="none")
    torch.testing.assert_close(losses.double(), wanted, rtol=1e-6, atol=1e-6)


def test_evaluation_is_the_mean_over_all_targets(tmp_path: Path):
    """13 validation samples in batches of 4, the last holds one; against each sample alone."""
    from finetune.data.dataset import prepare_samples
    from finetune.data.encoding.templates import load_tokenizer

    difficulties = ("explain", "reasoning", "topology")
    materials = run_helpers.make_materials(tmp_path)
    valid, model = str(materials.valid), str(materials.model)
    changes = {"valid_data": valid, "global_batch_size": 4, "max_steps": 1, "warmup_steps": 0}
    settings = materials.settings(tmp_path / "run", **changes)
    run(settings)
    first, last = run_helpers.events(tmp_path / "run", "eval")
    assert first["step"] == 0 and last["step"] == 1 and last["eval_loss"] != first["eval_loss"]
    reading = {"difficulties": difficulties, "difficulty_field": "difficulty", "cutoff_len": 96}
    reading |= {"on_bad_row": "refuse", "cache_dir": settings["cache_dir"], "num_proc": 1}
    samples = prepare_samples((valid,), load_tokenizer(model), **reading)
    model = AutoModelForCausalLM.from_pretrained(model, attn_implementation="sdpa").float()
    with torch.no_grad():
        losses = [plain_losses(model, *map(np.array, samples[i])) for i in range(13)]
    assert first["eval_loss"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)
    for number, difficulty in enumerate(difficulties):
        members = np.flatnonzero(np.array(samples.difficulties) == number).tolist()
        mean = float(torch.cat([losses[i] for i in members]).mean())
        assert first[f"eval_loss/{difficulty}"] == pytest.approx(mean, rel=1e-5)


def test_the_losses_of_a_step_do_not_drift_with_its_targets():
    """float32, as devices add: index_add_ is off by percents here."""
    losses = torch.full((4_000_000,), 1.3)
    difficulties = torch.arange(len(losses)) % 5 // 3  # three of five are of the first
    sums = sums_by_group(losses, difficulties, 2)
    assert sums.tolist() == pytest.approx([1.3 * 2_400_000, 1.3 * 1_600_000], rel=1e-6)
    none = sums_by_group(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([-1, 0, 0]), 1)
    assert none.tolist() == [6.0]
