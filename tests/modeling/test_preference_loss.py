"""Losses of preferences against TRL's own code, in float64, and a head whose losses are weighed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from finetune.batching.collate import Answers
from finetune.batching.steps import LossGroups
from finetune.config.preference_config import PreferenceConfig
from finetune.modeling.preference_loss import document_sums, orpo_losses
from finetune.training.preferences.objective import PreferenceObjective, preference_facts

PAIRS, LONGEST = 5, 9
CPU = torch.device("cpu")


def config_of(loss: str, **changes: Any) -> PreferenceConfig:
    return PreferenceConfig(model="m", data="d", output_dir="o", loss=loss, **changes)


def documents(count: int, *, seed: int = 0) -> tuple[torch.Tensor, tuple[int, ...], torch.Tensor]:
    """Losses of targets, targets of each document, and the reference's log-probability of each."""
    generator = torch.Generator().manual_seed(seed)
    counts = tuple(torch.randint(1, LONGEST + 1, (count,), generator=generator).tolist())
    losses = torch.rand(sum(counts), generator=generator, dtype=torch.float64) * 2 + 0.01
    reference = torch.stack([-part.sum() for part in losses.split(counts)])
    noise = torch.randn(count, generator=generator, dtype=torch.float64)
    return losses.requires_grad_(), counts, reference + noise


def answers_of(counts, *, labels=None, groups=None):
    samples = len(counts) if labels else len(counts) // 2
    return Answers(
        targets=counts,
        counts=torch.tensor(counts),
        samples=torch.arange(samples),
        groups=torch.tensor(groups or [-1] * samples),
        labels=torch.tensor(labels or [-1] * samples),
    )


def ours(config: PreferenceConfig, losses: Any, answers: Answers, reference: Any, **own: float):
    """The mean over samples; `own` are what `begin` finds out."""
    objective = PreferenceObjective(config, SimpleNamespace(), None)
    for name, value in own.items():
        setattr(objective, name, value)
    needed = reference if config.needs_reference else None
    return objective.scored(losses, answers, needed, groups=0).total / len(answers.samples)


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


def computed(trainer_class: Any, trainer: Any, parts: Iterable[torch.Tensor], **own: Any) -> Any:
    """The loss of answers whose tokens have these losses."""
    parts = list(parts)
    log_probs = -pad_sequence(parts, batch_first=True)
    # A token in front, which nobody predicts: TRL shifts the mask by it.
    ones = [torch.ones(1 + len(part), dtype=torch.long) for part in parts]
    completion = pad_sequence(ones, batch_first=True)
    completion[:, 0] = 0
    same = dict.fromkeys(("input_ids", "attention_mask", "completion_mask"), completion)
    nothing = torch.zeros_like(log_probs.detach())
    facts = {"entropy": nothing, "mean_logits": nothing, "is_top1": nothing.bool()}
    output = SimpleNamespace(log_probs=log_probs, **facts)
    return trainer_class._compute_loss(trainer, lambda **_: output, {**same, **own}, False)


def trl_of_pairs(config: PreferenceConfig, losses: Any, counts: Any, reference: Any) -> Any:
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

    given = {"ld_alpha": None, "f_divergence_type": "reverse_kl", "use_weighting": False}
    given |= {"loss_types": ["sigmoid" if config.loss == "dpo" else "ipo", "sft"]}
    trainer = fake_trainer(config, **given, loss_weights=[1.0, config.sft_weight])
    own = {"ref_chosen_logps": reference[0::2], "ref_rejected_logps": reference[1::2]}
    parts = losses.split(counts)
    return computed(DPOTrainer, trainer, (*parts[0::2], *parts[1::2]), **own)


def trl_kto(config, parts, reference, labels, mismatched):
    from trl.trainer.kto_trainer import KTOTrainer

    given = {"desirable_weight": 1.3, "undesirable_weight": 0.6, "loss_type": "kto"}
    given |= {"calculate_KL": True, "_compute_kl_logps": lambda model, batch: mismatched}
    trainer = fake_trainer(config, **given)
    own = {"ref_logps": reference, "ref_KL_logps": torch.zeros_like(mismatched)}
    label = torch.tensor(labels, dtype=torch.bool)
    return computed(KTOTrainer, trainer, parts, label=label, **own)


def same_with_gradient(found: torch.Tensor, wanted: torch.Tensor, losses: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    gradients = [torch.autograd.grad(x, losses, retain_graph=True)[0] for x in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)
    assert gradients[0].abs().max() > 1e-6


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


@pytest.mark.parametrize("shift", [3.0, -3.0])
def test_the_loss_and_gradient_of_labels_are_trls(shift: float):
    """With a reference point above 0, and with one that is cut to it."""
    config = config_of("kto", desirable_weight=1.3, undesirable_weight=0.6)
    losses, counts, reference = documents(6)
    labels = [1, 0, 1, 1, 0, 1]
    generator = torch.Generator().manual_seed(1)
    mismatched = torch.randn(6, generator=generator, dtype=torch.float64) + shift
    wanted = trl_kto(config, losses.split(counts), reference, labels, mismatched)
    point = max(0.0, float(mismatched.mean()))
    answers = answers_of(counts, labels=labels)
    found = ours(config, losses, answers, reference, _reference_point=point)
    same_with_gradient(found, wanted, losses)


def test_a_probability_that_rounds_to_one_has_finite_odds():
    chosen = torch.tensor([0.0, -1e-9, -5.0], requires_grad=True)
    found = orpo_losses(chosen, torch.tensor([-1.0, 0.0, -5.0]), beta=0.1)
    found.sum().backward()
    assert torch.isfinite(found).all() and torch.isfinite(chosen.grad).all()


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
    assert facts["rejected_reward"] == pytest.approx(float(rewards[1::2].mean()), rel=1e-5)
    assert facts["margin/easy"] == pytest.approx(margins[0], rel=1e-5)
    assert facts["loss/hard"] == pytest.approx(np.log1p(np.exp(-margins[2])), rel=1e-5)
