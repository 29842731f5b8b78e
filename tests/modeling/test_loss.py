"""The loss against its definition: each sample alone, losses summed, divided by the targets of the
global batch.
"""

from __future__ import annotations

import copy
import itertools
import json
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import run_helpers
import torch
import transformers
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from finetune.batching.collate import collate
from finetune.batching.steps import Execution, InOrder, LossGroups, StepBatches
from finetune.modeling import objective
from finetune.modeling.attention import choose_attention
from finetune.modeling.loss import (
    ChunkedHead,
    make_chunked_head,
    microbatch_losses,
    sums_by_group,
    token_losses,
)
from finetune.training.control import Control
from finetune.training.executor import REHEARSAL, StepExecutor, largest_microbatch, microbatch_seed

VOCABULARY = 50
CPU = torch.device("cpu")


class FakeSamples:
    """Samples of random tokens: a question that is not trained, answers that are, sometimes in two
    turns.
    """

    def __init__(self, count: int, seed: int) -> None:
        choose = np.random.default_rng(seed)
        self.items = []
        for number in range(count):
            length = int(choose.integers(2, 24))
            # every fifth has no target
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


def make_model(attention: str) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        initializer_range=0.3,
        tie_word_embeddings=True,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).double()


@pytest.fixture
def model() -> Qwen3ForCausalLM:
    return make_model(choose_attention(Qwen3Config()))


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


def assert_gradients_equal(
    model: torch.nn.Module, wanted: dict[str, torch.Tensor], tolerance: float = 1e-9
) -> None:
    for name, parameter in model.named_parameters():
        norm = wanted[name].norm()
        assert norm > 0, name
        assert (parameter.grad - wanted[name]).norm() < tolerance * norm, name


def execute(
    model: torch.nn.Module,
    samples: FakeSamples,
    execution: Execution,
    *,
    head: ChunkedHead | None = None,
    rehearsal: bool = False,
) -> tuple[float, torch.Tensor, int]:
    """Run all samples as step 0 on every rank of the execution, one after the other.

    Returns loss, sums per difficulty and the number of microbatches. One process adds the gradients
    up as the ranks' all-reduce would.
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
    "one sample a packed sequence": Execution(0, 1, 24, None),
    "padded": Execution(0, 1, None, 4),
    "one sample a padded batch": Execution(0, 1, None, 1),
    "packed, 3 ranks": Execution(0, 3, 60, None),
    "padded, 2 ranks": Execution(0, 2, None, 4),
    "packed, more ranks than samples": Execution(0, 30, 60, None),
    "padded, more ranks than microbatches": Execution(0, 9, None, 6),
}


@pytest.mark.parametrize("name", ["packed", "padded"])
def test_nothing_of_a_microbatch_lives_into_the_next_forward(model, name, monkeypatch):
    """Losses hold on to their graph, and that to tensors as large as hidden states."""
    earlier: list[weakref.ref] = []

    def watched(*arguments: object) -> torch.Tensor:
        assert all(losses() is None for losses in earlier), (
            f"{len(earlier)} microbatches before this one"
        )
        losses = microbatch_losses(*arguments)
        earlier.append(weakref.ref(losses))
        return losses

    monkeypatch.setattr(objective, "microbatch_losses", watched)
    _loss, _sums, count = execute(model, FakeSamples(23, seed=3), EXECUTIONS[name], rehearsal=True)
    assert count > 2 and len(earlier) == count + 1


@pytest.mark.parametrize("rehearsal", [False, True], ids=["", "rehearsed"])
@pytest.mark.parametrize("execution", EXECUTIONS.values(), ids=EXECUTIONS.keys())
def test_gradient_is_that_of_the_definition(model, execution, rehearsal):
    samples = FakeSamples(23, seed=3)
    wanted_loss, wanted = defined_gradient(samples)
    loss, group_losses, count = execute(model, samples, execution, rehearsal=rehearsal)
    assert count % execution.world_size == 0
    if "more ranks" in next(name for name, value in EXECUTIONS.items() if value is execution):
        # so some microbatches are empty
        assert count > len(samples) // (execution.samples_per_microbatch or 1)
    assert_gradients_equal(model, wanted)
    assert loss == pytest.approx(wanted_loss, rel=1e-6)  # summed in float32, for the log only
    plain = make_model("sdpa")
    with torch.no_grad():
        for difficulty in (0, 1):
            members = np.flatnonzero(samples.difficulties == difficulty)
            wanted_sum = float(sum(plain_losses(plain, *samples[int(i)]).sum() for i in members))
            assert float(group_losses[difficulty]) == pytest.approx(wanted_sum, rel=1e-5)


def test_an_empty_row_gives_zero_gradients_for_every_parameter(model):
    """DDP and ZeRO wait for each parameter's gradient, so it must be there; and it must not change
    the sum.
    """
    for packing in (True, False):
        losses = microbatch_losses(model, collate([], packing=packing, pad_token_id=0), CPU)
        assert losses.shape == (0,)
        losses.sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and not parameter.grad.any(), name


def test_a_row_of_samples_without_targets_trains_nothing(model):
    ids = np.arange(7, dtype=np.int32)
    microbatch = collate([(ids, np.zeros(7, dtype=bool), 0)] * 2, packing=True, pad_token_id=0)
    microbatch_losses(model, microbatch, CPU).sum().backward()
    assert all(not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 1000])
@pytest.mark.parametrize(
    "execution", [EXECUTIONS["packed"], EXECUTIONS["padded"]], ids=["packed", "padded"]
)
def test_chunked_head_gives_the_same_loss_and_gradients(model, execution, tokens_per_chunk):
    samples = FakeSamples(23, seed=4)
    _, wanted = defined_gradient(samples)
    head = ChunkedHead(
        model.get_output_embeddings(), logits_per_chunk=tokens_per_chunk * VOCABULARY
    )
    assert head.tokens_at_once(torch.zeros(1)) == tokens_per_chunk
    loss, _, _ = execute(model, samples, execution, head=head)
    assert_gradients_equal(model, wanted)
    assert loss == pytest.approx(defined_gradient(samples)[0], rel=1e-6)


def test_chunked_losses_are_the_plain_ones_token_by_token(model):
    samples = FakeSamples(9, seed=5)
    members = [(*samples[i], 0) for i in range(9)]
    microbatch = collate(members, packing=True, pad_token_id=0)
    plain = microbatch_losses(model, microbatch, CPU)
    head = ChunkedHead(model.get_output_embeddings(), logits_per_chunk=4 * VOCABULARY)
    torch.testing.assert_close(
        microbatch_losses(model, microbatch, CPU, head), plain, rtol=1e-12, atol=0
    )


@pytest.mark.parametrize(
    ("kind", "compiled"),
    [("NanoChat", False), ("NanoChat", True), ("Gemma2", False), ("Gemma3", False)],
)
def test_a_chunked_head_squashes_as_the_model_does(kind: str, compiled: bool):
    """A softcap small enough here that nothing is right without it."""
    tiny = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
    }
    tiny |= {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.5}
    text = "Text" if kind == "Gemma3" else ""
    config = getattr(transformers, f"{kind}{text}Config")(**tiny, final_logit_softcapping=0.7)
    squashing = getattr(transformers, f"{kind}ForCausalLM")(config).double()
    samples = FakeSamples(9, seed=5)
    microbatch = collate([(*samples[i], 0) for i in range(9)], packing=False, pad_token_id=0)
    plain = microbatch_losses(squashing, microbatch, CPU)
    head = make_chunked_head(squashing, compiled=compiled)
    assert head is not None
    head.logits_per_chunk = 4 * VOCABULARY
    torch.testing.assert_close(
        microbatch_losses(squashing, microbatch, CPU, head), plain, rtol=1e-9, atol=0
    )


def test_every_microbatch_draws_its_own_dropout():
    """By seed, step, place in the schedule and rank; the rehearsal's draw is nobody else's."""
    keys = itertools.product((0, 1), range(3), (REHEARSAL, 0, 1, 2, 3), range(3))
    seeds = [microbatch_seed(*key) for key in keys]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)


def test_only_one_chunk_of_logits_is_kept(model):
    """What the chunks are for: of the logits nothing stays for the backward pass."""
    samples = FakeSamples(30, seed=6)
    microbatch = collate([(*samples[i], 0) for i in range(30)], packing=True, pad_token_id=0)
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-1:] == (VOCABULARY,) and tensor.dim() == 2:
            kept.append(tensor.shape[0])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        microbatch_losses(model, microbatch, CPU)
    assert max(kept) == len(microbatch.targets)
    kept.clear()
    head = ChunkedHead(model.get_output_embeddings(), logits_per_chunk=8 * VOCABULARY)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        microbatch_losses(model, microbatch, CPU, head)
    assert kept == []


# --------------------------------------------------------------- gradients made in the forward pass


def head_losses(
    head: torch.nn.Linear,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    softcap: float | None = None,
    rows: int = 4,
) -> torch.Tensor:
    config = None if softcap is None else SimpleNamespace(final_logit_softcapping=softcap)
    chunked = ChunkedHead(
        copy.copy(head), logits_per_chunk=rows * head.out_features, softcapped=config
    )
    with chunked.scoring(targets):
        return chunked._forward(hidden)


def by_autograd(
    head: torch.nn.Linear, hidden: torch.Tensor, targets: torch.Tensor, softcap: float | None = None
) -> torch.Tensor:
    logits = head(hidden)
    return cross_entropy(
        logits if softcap is None else softcap * torch.tanh(logits / softcap),
        targets,
        reduction="none",
    )


def gradients_of(losses: torch.Tensor, factor: float, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(losses.sum() * factor, tensors))


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 5, 100])
def test_the_heads_gradients_are_those_of_autograd(bias: bool, softcap: float | None, rows: int):
    torch.manual_seed(0)
    head = torch.nn.Linear(16, VOCABULARY, bias=bias).double()
    hidden, targets = (
        torch.randn(11, 16, dtype=torch.float64, requires_grad=True),
        torch.randint(0, VOCABULARY, (11,)),
    )
    trained = [hidden, *head.parameters()]
    wanted, found = (
        by_autograd(head, hidden, targets, softcap),
        head_losses(head, hidden, targets, softcap, rows),
    )
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    pairs = zip(
        gradients_of(found, 0.03, *trained), gradients_of(wanted, 0.03, *trained), strict=True
    )
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


def test_a_frozen_head_gives_each_target_its_own_factor_and_a_trained_one_says_that_it_cannot():
    torch.manual_seed(0)
    head = torch.nn.Linear(16, VOCABULARY, bias=False).double()
    hidden, targets = (
        torch.randn(11, 16, dtype=torch.float64, requires_grad=True),
        torch.randint(0, VOCABULARY, (11,)),
    )
    factors = torch.rand(11, dtype=torch.float64)
    (wanted,) = torch.autograd.grad((by_autograd(head, hidden, targets) * factors).sum(), hidden)
    of_hidden, of_weight = torch.autograd.grad(
        (head_losses(head, hidden, targets) * factors).sum(), (hidden, head.weight)
    )
    torch.testing.assert_close(of_hidden, wanted, rtol=1e-11, atol=1e-13)
    assert of_weight.isnan().all(), "a wrong gradient would be worse"
    head.requires_grad_(False)
    (frozen,) = torch.autograd.grad((head_losses(head, hidden, targets) * factors).sum(), hidden)
    assert torch.equal(frozen, of_hidden)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_under_autocast_the_heads_gradients_are_as_near_to_float64_as_autograds(
    weights: torch.dtype,
):
    torch.manual_seed(0)
    exact = torch.nn.Linear(64, 500, bias=False).double()
    exact.weight.data = exact.weight.to(weights).double()
    head = copy.deepcopy(exact).to(weights)
    states, targets = torch.randn(40, 64).to(weights), torch.randint(0, 500, (40,))
    truth = gradients_of(
        by_autograd(exact, precise := states.double().requires_grad_(), targets),
        0.1,
        precise,
        exact.weight,
    )
    errors = {}
    for name, losses_of in (("autograd", by_autograd), ("ours", head_losses)):
        hidden = states.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            losses = losses_of(head, hidden, targets)
        found = gradients_of(losses.float(), 0.1, hidden, head.weight)
        assert [tensor.dtype for tensor in found] == [weights, weights]
        errors[name] = [
            float((a.double() - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True)
        ]
    for ours, theirs in zip(errors["ours"], errors["autograd"], strict=True):
        assert ours < 1.2 * theirs < 0.02


def test_logits_are_made_once_and_evaluation_makes_nothing_else():
    from torch.utils.flop_counter import FlopCounterMode

    head, targets = torch.nn.Linear(16, VOCABULARY, bias=False), torch.randint(0, VOCABULARY, (12,))
    hidden = torch.randn(12, 16, requires_grad=True)
    product = 2 * 12 * 16 * VOCABULARY

    def flops(*, learning: bool) -> float:
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(learning):
            losses = head_losses(head, hidden, targets)
            if learning:
                losses.sum().backward()
        return counter.get_total_flops() / product

    assert flops(learning=True) == 3  # logits, hidden states, weights
    assert flops(learning=False) == 1
    head.requires_grad_(False)
    assert flops(learning=True) == 2


def test_chunks_are_larger_where_a_trained_heads_gradient_is_added_up_for_each():
    head = ChunkedHead(torch.nn.Linear(4, 152_000, bias=False, device="meta"))
    on_device, on_cpu = torch.empty(0, device="meta"), torch.empty(0)
    assert (head.tokens_at_once(on_device), head.tokens_at_once(on_cpu)) == (883, 440)
    head.head.requires_grad_(False)
    assert head.tokens_at_once(on_device) == 441


def test_chunks_on_a_cpu_have_the_rows_that_a_product_needs_and_no_more_numbers_than_on_a_device():
    def rows(vocabulary: int) -> int:
        head = ChunkedHead(torch.nn.Linear(4, vocabulary, bias=False, device="meta"))
        return head.tokens_at_once(torch.empty(0))

    assert [rows(vocabulary) for vocabulary in (1024, 16_384, 152_000, 262_144)] == [
        7168,
        448,
        440,
        256,
    ]


def test_the_head_is_an_ordinary_head_again_afterwards(model):
    ids = torch.arange(6)[None]
    before = model(input_ids=ids).logits
    head = make_chunked_head(model)
    assert head is not None
    microbatch = collate([(*FakeSamples(9, seed=7)[1], 0)], packing=True, pad_token_id=0)
    head.logits_per_chunk = VOCABULARY
    microbatch_losses(model, microbatch, CPU, head)
    assert head.targets is None
    assert torch.equal(model(input_ids=ids).logits, before)
    with pytest.raises(ZeroDivisionError), head.scoring(microbatch.targets):
        raise ZeroDivisionError  # out of memory, say
    assert torch.equal(model(input_ids=ids).logits, before)
    copied = copy.deepcopy(model.state_dict())
    assert set(copied) == set(make_model("sdpa").state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_softmax_of_16_bit_logits_is_in_float32(dtype):
    logits = (torch.arange(300.0).reshape(3, 100) / 17).to(dtype)
    losses = token_losses(logits, torch.tensor([0, 5, 99]))
    assert losses.dtype == torch.float32
    wanted = cross_entropy(logits.double(), torch.tensor([0, 5, 99]), reduction="none")
    torch.testing.assert_close(losses.double(), wanted, rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- evaluation, in a run


@pytest.mark.parametrize("packing", [True, False])
def test_evaluation_is_the_mean_over_all_targets(tmp_path: Path, tiny_model: Path, packing: bool):
    """13 validation samples in batches of 4: the last holds one; against each sample alone, per
    difficulty too.
    """
    from finetune.data.dataset import prepare_samples
    from finetune.data.encoding.templates import load_tokenizer

    difficulties = ("explain", "reasoning", "topology")
    data = run_helpers.make_data(tmp_path / "train.jsonl", 30)
    valid = run_helpers.make_data(tmp_path / "valid.jsonl", 13, seed=1)
    materials = run_helpers.Materials(tmp_path, tiny_model, data, valid)
    output_dir = tmp_path / "run"
    settings = materials.settings(
        output_dir,
        valid_data=str(valid),
        global_batch_size=4,
        max_steps=1,
        warmup_steps=0,
        packing=packing,
    )
    run_helpers.train(settings, 2)
    first, last = run_helpers.events(output_dir, "eval")
    assert first["step"] == 0 and last["step"] == 1

    samples = prepare_samples(
        (str(valid),),
        load_tokenizer(str(tiny_model)),
        cutoff_len=96,
        difficulties=difficulties,
        difficulty_field="difficulty",
        on_bad_row="refuse",
        cache_dir=settings["cache_dir"],
        num_proc=1,
    )
    assert len(samples) == 13
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    with torch.no_grad():
        per_sample = [
            plain_losses(model, *(np.array(part) for part in samples[i])) for i in range(13)
        ]
    assert first["eval_loss"] == pytest.approx(float(torch.cat(per_sample).mean()), rel=1e-5)
    for number, difficulty in enumerate(difficulties):
        members = torch.cat(
            [
                loss
                for loss, own in zip(per_sample, samples.difficulties, strict=True)
                if own == number
            ]
        )
        assert first[f"eval_loss/{difficulty}"] == pytest.approx(float(members.mean()), rel=1e-5)
    assert last["eval_loss"] != first["eval_loss"]
    assert json.dumps(first).count("NaN") == 0


def test_evaluation_sums_millions_of_targets_as_float64_does():
    """50 million targets of two difficulties and none, in 200 microbatches on each of two ranks."""
    from finetune.training.trainer import RunTrainer

    generator = np.random.default_rng(0)
    losses = generator.gamma(2.0, 1.0, 125_000).astype(np.float32)
    difficulties = generator.choice([0, 1, -1], 125_000, p=[0.6, 0.3, 0.1])
    microbatch = SimpleNamespace(groups=torch.from_numpy(difficulties))
    counts = np.array([(difficulties == number).sum() for number in (0, 1)])
    batch = SimpleNamespace(supervised_tokens=2 * 125_000, group_tokens=2 * counts)
    trainer = SimpleNamespace(
        scored=lambda _: (
            (batch, iter([(microbatch, torch.from_numpy(losses))])) for _ in range(200)
        ),
        session=SimpleNamespace(
            control=SimpleNamespace(sum=lambda sums: [2 * value for value in sums])
        ),
    )
    found = RunTrainer.evaluation(trainer, SimpleNamespace(groups=LossGroups(("easy", "hard"))))
    precise = losses.astype(np.float64)
    expected = {"loss": precise.mean(), "loss/easy": precise[difficulties == 0].mean()}
    expected["loss/hard"] = precise[difficulties == 1].mean()
    assert found == pytest.approx(expected, rel=1e-9)


def test_the_losses_of_a_step_do_not_drift_with_its_targets():
    """float32, as devices add: index_add_ is off by 6% here."""
    losses = torch.full((40_000_000,), 1.3)
    difficulties = torch.arange(len(losses)) % 5 // 3  # three of five are of the first
    sums = sums_by_group(losses, difficulties, 2)
    expected = [1.3 * 24_000_000, 1.3 * 16_000_000]
    assert sums.tolist() == pytest.approx(expected, rel=1e-6)
    none = sums_by_group(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([-1, 0, 0]), 1)
    assert none.tolist() == [6.0]
