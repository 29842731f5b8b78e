"""Losses of preferences against TRL's own code, in float64; log-probabilities by document; a head
whose losses are weighed.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.batching.collate import Answers
from finetune.batching.steps import LossGroups
from finetune.config.preference_config import LOSSES, PreferenceConfig
from finetune.modeling.preference_loss import PAIR_LOSSES, WeighedHead, document_sums, orpo_losses
from finetune.training.preferences.objective import SUMS, PreferenceObjective, preference_facts

PAIRS, LONGEST = 5, 9
CPU = torch.device("cpu")


def config_of(loss: str, **changes: Any) -> PreferenceConfig:
    return PreferenceConfig(model="m", data="d", output_dir="o", loss=loss, **changes)


def documents(count: int, *, seed: int = 0) -> tuple[torch.Tensor, tuple[int, ...], torch.Tensor]:
    """Losses of targets, targets of each document, and the reference's log-probability of each;
    float64.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = tuple(torch.randint(1, LONGEST + 1, (count,), generator=generator).tolist())
    losses = torch.rand(sum(counts), generator=generator, dtype=torch.float64) * 2 + 0.01
    reference = torch.stack([-part.sum() for part in losses.split(counts)])
    noise = torch.randn(count, generator=generator, dtype=torch.float64)
    return losses.requires_grad_(), counts, reference + noise


def answers_of(
    counts: tuple[int, ...], *, labels: list[int] | None = None, groups: list[int] | None = None
) -> Answers:
    samples = len(counts) if labels else len(counts) // 2
    return Answers(
        targets=counts,
        counts=torch.tensor(counts),
        samples=torch.arange(samples),
        groups=torch.tensor(groups or [-1] * samples),
        labels=torch.tensor(labels or [-1] * samples),
    )


def ours(
    config: PreferenceConfig,
    losses: torch.Tensor,
    answers: Answers,
    reference: torch.Tensor | None,
    **own: float,
):
    """The mean over samples; `own` are what `begin` finds out."""
    objective = PreferenceObjective(config, SimpleNamespace(), None)
    for name, value in own.items():
        setattr(objective, name, value)
    needed = reference if config.needs_reference else None
    return objective.scored(losses, answers, needed, groups=0).total / len(answers.samples)


# ---------------------------------------------------------------- TRL's own code, without a Trainer


def padded(
    losses: torch.Tensor, counts: tuple[int, ...], order: Iterable[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities `(documents, longest)`, and which of them are tokens."""
    parts, order = losses.split(counts), list(order)
    pad = torch.nn.functional.pad
    log_probs = torch.stack([-pad(parts[n], (0, LONGEST - len(parts[n]))) for n in order])
    return log_probs, torch.stack([torch.arange(LONGEST) < counts[n] for n in order])


def outputs_of(log_probs: torch.Tensor) -> Any:
    nothing = torch.zeros_like(log_probs.detach())
    return SimpleNamespace(
        log_probs=log_probs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool()
    )


def fake_trainer(config: PreferenceConfig, **attributes: Any) -> Any:
    same = lambda value: value  # noqa: E731
    return SimpleNamespace(
        accelerator=SimpleNamespace(device=CPU, gather=same, gather_for_metrics=same),
        model=SimpleNamespace(training=True),
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **attributes,
    )


def computed(
    trainer_class: Any, trainer: Any, log_probs: torch.Tensor, mask: torch.Tensor, **own: Any
) -> Any:
    # A token in front, which nobody predicts: TRL shifts the mask by it.
    completion = torch.nn.functional.pad(mask, (1, 0)).long()
    inputs = {
        "input_ids": torch.zeros_like(completion),
        "attention_mask": torch.ones_like(completion),
        "completion_mask": completion,
        **own,
    }
    return trainer_class._compute_loss(
        trainer, lambda **given: outputs_of(log_probs), inputs, False
    )


def trl_of_pairs(
    config: PreferenceConfig, losses: torch.Tensor, counts: tuple[int, ...], reference: torch.Tensor
) -> Any:
    means = torch.stack([-part.mean() for part in losses.split(counts)])
    if config.loss == "orpo":
        from trl.experimental.orpo.orpo_trainer import ORPOTrainer

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "float", lambda tensor: tensor)  # TRL rounds to float32
            ratio = ORPOTrainer.odds_ratio_loss(fake_trainer(config), means[0::2], means[1::2])[0]
        chosen = torch.cat(losses.split(counts)[0::2])
        # orpo_trainer.py, get_batch_loss_metrics: policy_nll_loss - losses.mean(); its
        # cross-entropy is a mean over tokens.
        return config.sft_weight * chosen.mean() - ratio.mean()
    if config.loss == "simpo":
        from trl.experimental.cpo.cpo_trainer import CPOTrainer

        trainer = fake_trainer(config, alpha=0.0, loss_type="simpo", simpo_gamma=config.simpo_gamma)
        return CPOTrainer.cpo_loss(trainer, means[0::2], means[1::2])[0].mean()
    from trl.trainer.dpo_trainer import DPOTrainer

    trainer = fake_trainer(
        config,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid" if config.loss == "dpo" else "ipo", "sft"],
        loss_weights=[1.0, config.sft_weight],
        use_weighting=False,
    )
    log_probs, mask = padded(losses, counts, [*range(0, len(counts), 2), *range(1, len(counts), 2)])
    own = {"ref_chosen_logps": reference[0::2], "ref_rejected_logps": reference[1::2]}
    return computed(DPOTrainer, trainer, log_probs, mask, **own)


def trl_kto(
    config: PreferenceConfig,
    losses: torch.Tensor,
    counts: tuple[int, ...],
    reference: torch.Tensor,
    labels: list[int],
    mismatched: torch.Tensor,
) -> Any:
    from trl.trainer.kto_trainer import KTOTrainer

    trainer = fake_trainer(
        config,
        calculate_KL=True,
        loss_type="kto",
        desirable_weight=config.desirable_weight,
        undesirable_weight=config.undesirable_weight,
        _compute_kl_logps=lambda model, batch: mismatched,
    )
    log_probs, mask = padded(losses, counts, range(len(counts)))
    own = {"ref_logps": reference, "ref_KL_logps": torch.zeros_like(mismatched)}
    label = torch.tensor(labels, dtype=torch.bool)
    return computed(KTOTrainer, trainer, log_probs, mask, label=label, **own)


def same_with_gradient(found: torch.Tensor, wanted: torch.Tensor, losses: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    gradients = [torch.autograd.grad(x, losses, retain_graph=True)[0] for x in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)
    assert gradients[0].abs().max() > 1e-6


def test_every_loss_has_its_formula_and_its_settings():
    assert {*PAIR_LOSSES, "kto"} == set(LOSSES)
    for name, formula in PAIR_LOSSES.items():
        parameters = inspect.signature(formula).parameters.values()
        read = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        assert read - {"beta"} == set(LOSSES[name].settings) - {"sft_weight"}, name


@pytest.mark.parametrize("changes", [{}, {"beta": 0.5, "sft_weight": 0.7}])
@pytest.mark.parametrize("loss", ["dpo", "ipo", "orpo", "simpo"])
def test_losses_and_gradients_of_pairs_are_trls(loss: str, changes: dict[str, float]):
    if loss == "simpo":
        changes = {"beta": 1.5, "simpo_gamma": 0.4, "label_smoothing": 0.1} if changes else {}
    config = config_of(loss, **changes)
    losses, counts, reference = documents(2 * PAIRS)
    wanted = trl_of_pairs(config, losses, counts, reference)
    weight = config.sft_weight * PAIRS / sum(counts[0::2])
    found = ours(config, losses, answers_of(counts), reference, _token_weight=weight)
    same_with_gradient(found, wanted, losses)


def test_label_smoothing_is_conservative_dpo():
    """TRL 1.16 has it no longer for "sigmoid", only among its "aot": E. Mitchell's note, equation
    3, by hand.
    """
    config = config_of("dpo", label_smoothing=0.2)
    losses, counts, reference = documents(2 * PAIRS)
    log_probs = torch.stack([-part.sum() for part in losses.split(counts)])
    ratios = log_probs - reference
    margin = 0.1 * (ratios[0::2] - ratios[1::2])
    wanted = -0.8 * torch.log(torch.sigmoid(margin)) - 0.2 * torch.log(torch.sigmoid(-margin))
    wanted = wanted.mean()
    same_with_gradient(ours(config, losses, answers_of(counts), reference), wanted, losses)


@pytest.mark.parametrize("shift", [3.0, -3.0])
def test_the_loss_and_gradient_of_labels_are_trls(shift: float):
    """With a reference point above 0, and with one that is cut to it."""
    config = config_of("kto", desirable_weight=1.3, undesirable_weight=0.6)
    losses, counts, reference = documents(6)
    labels = [1, 0, 1, 1, 0, 1]
    generator = torch.Generator().manual_seed(1)
    mismatched = torch.randn(6, generator=generator, dtype=torch.float64) + shift
    wanted = trl_kto(config, losses, counts, reference, labels, mismatched)
    point = max(0.0, float(mismatched.mean()))
    answers = answers_of(counts, labels=labels)
    found = ours(config, losses, answers, reference, _reference_point=point)
    same_with_gradient(found, wanted, losses)


def test_a_probability_that_rounds_to_one_has_finite_odds():
    chosen = torch.tensor([0.0, -1e-9, -5.0], requires_grad=True)
    found = orpo_losses(chosen, torch.tensor([-1.0, 0.0, -5.0]), beta=0.1)
    found.sum().backward()
    assert torch.isfinite(found).all() and torch.isfinite(chosen.grad).all()


# --------------------------------------------------------------------- however microbatches are cut


@settings(max_examples=25, deadline=None)
@given(
    loss=st.sampled_from(["dpo", "ipo", "orpo", "simpo", "kto"]),
    samples=st.integers(1, 7),
    cuts=st.lists(st.integers(0, 7), max_size=3),
    seed=st.integers(0, 1000),
)
def test_loss_gradient_and_log_do_not_depend_on_the_cut(
    loss: str, samples: int, cuts: list[int], seed: int
):
    config = config_of(loss, **({} if loss == "kto" else {"sft_weight": 0.5}))
    each = 1 if loss == "kto" else 2
    losses, counts, reference = documents(samples * each, seed=seed)
    labels = [(seed + n) % 2 for n in range(samples)] if loss == "kto" else None
    groups = [(seed + n) % 3 - 1 for n in range(samples)]
    objective = PreferenceObjective(config, SimpleNamespace(), None)
    objective._token_weight, objective._reference_point = (0.0 if loss == "kto" else 0.3), 0.2
    bounds = [0, *sorted(min(cut, samples) for cut in cuts), samples]
    needed = reference if config.needs_reference else None

    def scored(begin: int, end: int) -> Any:
        first, last = begin * each, end * each
        targets = slice(sum(counts[:first]), sum(counts[:last]))
        own = labels[begin:end] if labels else None
        part = answers_of(counts[first:last], labels=own, groups=groups[begin:end])
        if begin == end:
            part = answers_of(())
        here = None if needed is None else needed[first:last]
        return objective.scored(losses[targets], part, here, groups=2)

    whole = scored(0, samples)
    parts = [scored(begin, end) for begin, end in zip(bounds, bounds[1:], strict=False)]
    total = sum(part.total for part in parts)
    torch.testing.assert_close(total, whole.total, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(value, losses)[0] for value in (total, whole.total)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    sums = sum(part.sums.double() for part in parts)
    torch.testing.assert_close(sums, whole.sums.double(), rtol=1e-5, atol=1e-5)


def test_what_the_log_says():
    """Means over all pairs and over those of a difficulty; a pair without one is in no other."""
    config = config_of("dpo")
    losses, counts, reference = documents(6)
    objective = PreferenceObjective(config, SimpleNamespace(), None)
    found = objective.scored(losses, answers_of(counts, groups=[0, -1, 1]), reference, groups=2)
    facts = preference_facts(found.sums.tolist(), LossGroups(("easy", "hard")), config)
    log_probs = -document_sums(losses, counts).detach()
    rewards = 0.1 * (log_probs - reference)
    margins = (rewards[0::2] - rewards[1::2]).numpy()
    assert facts["margin"] == pytest.approx(margins.mean(), rel=1e-5)
    assert facts["accuracy"] == pytest.approx((margins > 0).mean())
    assert facts["chosen_logprob"] == pytest.approx(float(log_probs[0::2].mean()), rel=1e-5)
    assert facts["rejected_reward"] == pytest.approx(float(rewards[1::2].mean()), rel=1e-5)
    assert facts["margin/easy"] == pytest.approx(margins[0], rel=1e-5)
    assert facts["loss/hard"] == pytest.approx(np.log1p(np.exp(-margins[2])), rel=1e-5)
    assert len(found.sums) == 3 * len(SUMS)


# ---------------------------------------------------------------------- the head


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_trained_head_whose_losses_have_factors(softcap: float | None):
    """The chunked head gives the gradients of cross-entropy, whatever factor each target has."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(8, 30).double()
    softcapped = None if softcap is None else SimpleNamespace(final_logit_softcapping=softcap)
    head = WeighedHead(linear, logits_per_chunk=90, softcapped=softcapped)
    hidden = torch.randn(1, 17, 8, dtype=torch.float64, requires_grad=True)
    targets, factors = torch.randint(0, 30, (17,)), torch.randn(17, dtype=torch.float64)
    wanted_of = [hidden, linear.weight, linear.bias]
    with head.scoring(targets):
        found = linear(hidden)
    gradients = torch.autograd.grad((found * factors).sum(), wanted_of)
    logits = linear(hidden)[0]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    plain = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=0)
    right = torch.autograd.grad((plain * factors).sum(), wanted_of)
    for gradient, wanted in zip(gradients, right, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-12)
